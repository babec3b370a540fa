"""Several traces of one model as one workload: their sequences take turns, as queries of several datasets do."""

import dataclasses
import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from ground.errors import InputError
from traces.trace import Trace


def mix(traces: Sequence[Trace]) -> Trace:
    """All sequences of ``traces``, one of each in turn; where a trace has no more, the others go on.

    The profile sequences come first and the evaluation sequences after them, each split taking turns by itself, so
    that either is as mixed as the other. A single trace stays as it is. ``meta.joined`` names every source and its
    hash, ``sha256`` is that of the sources' hashes in their order. Raises InputError if they are not of one model
    (as ``Trace.concat``) or not of one embedding basis.
    """
    if len(traces) == 1:
        return traces[0]
    for index, other in enumerate(traces[1:]):
        _check_model(traces[0], other)
        _check_basis(traces[0], other)
        _check_apart(traces[: index + 1], other)
    whole = Trace.concat(traces)
    first = np.cumsum([0, *(trace.n_sequences for trace in traces)])
    order: list[int] = []
    for split in ("profile", "eval"):
        queues = [(start + np.flatnonzero(t.split == split)).tolist() for t, start in zip(traces, first, strict=False)]
        order += [index for turn in zip_longest(*queues) for index in turn if index is not None]
    meta = whole.meta | {"text": joined_text(traces)} if all("text" in trace.meta for trace in traces) else whole.meta
    digest = hashlib.sha256("".join(trace.sha256 for trace in traces).encode()).hexdigest()
    source = " + ".join(trace.source or "trace" for trace in traces)
    return dataclasses.replace(whole.take(np.array(order)), meta=meta, source=source, sha256=digest)


def basis_of(trace: Trace) -> str | None:
    """The hash of the basis of a trace's embeddings; None where it names none."""
    return trace.meta.get("embedding", {}).get("basis_sha256")


def _check_model(one: Trace, other: Trace) -> None:
    """Raise InputError if the traces name two models: whatever else differs follows from that."""
    a, b = (trace.meta["model"]["name"] for trace in (one, other))
    if a != b:
        raise InputError(
            f"traces of different models cannot be mixed: {one.source or 'the first'} has {a}, "
            f"{other.source or 'a later one'} has {b}; expected traces of one model"
        )


def _check_basis(one: Trace, other: Trace) -> None:
    """Raise InputError if both traces hold embeddings and each in a basis of its own: their products say nothing."""
    a, b = basis_of(one), basis_of(other)
    if a is not None and b is not None and a != b:
        raise InputError(
            f"traces of different embedding bases cannot be mixed: {one.source or 'the first'} has {a:.12}, "
            f"{other.source or 'a later one'} has {b:.12}; expected traces captured with one basis"
        )


def _check_apart(before: Sequence[Trace], other: Trace) -> None:
    """Raise InputError if a trace holds a sequence that one before it holds: it would be replayed twice."""
    for one in before:
        if len(both := np.intersect1d(one.sequence_id, other.sequence_id)):
            raise InputError(
                f"{one.source or 'the first'} and {other.source or 'a later one'} both hold sequence {str(both[0])!r}; "
                f"expected traces of different sequences"
            )


def joined_text(traces: Sequence[Trace]) -> dict[str, object]:
    """What ``meta.text`` says of the sources, together."""
    texts = [trace.meta["text"] for trace in traces]
    return {
        "source": "; ".join(dict.fromkeys(str(text["source"]) for text in texts if "source" in text)),
        "sources": {name: licence for text in texts for name, licence in text.get("sources", {}).items()},
        "licence": "; ".join(sorted({str(text["licence"]) for text in texts if "licence" in text})),
    }
