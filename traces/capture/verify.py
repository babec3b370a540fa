"""Check a trace against its file's hash, or against the model that it says it is of."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ground.errors import InputError
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

# Below this share of equal routes a trace is of another model; two runs of one model agree far better, and two models
# of the same shape about as well as chance.
LEAST_AGREEMENT = 0.75
# Probabilities this close trade places when sums are added in another order.
CLOSE = 0.02


@dataclass(frozen=True)
class Agreement:
    """How a second run of some sequences routed: ``routes`` are (row, layer) pairs, compared as sets of experts.

    ``close`` of those that ``differ`` exchanged experts whose probabilities lie within CLOSE of each other.
    """

    sequences: int
    rows: int
    routes: int
    differ: int
    close: int
    same_checkpoint: bool | None

    @property
    def share(self) -> float:
        """Share of routes that are equal."""
        return 1 - self.differ / self.routes

    def __str__(self) -> str:
        text = (
            f"{self.routes - self.differ:,} of {self.routes:,} routes are equal ({self.share:.2%}; {self.rows:,} rows "
            f"of {self.sequences} sequences)"
        )
        if self.differ:
            text += (
                f"; {self.differ:,} differ, {self.close:,} of them between experts within {CLOSE} of each other in "
                "probability: sums added in another order (batch size, kernel, device) tip such choices, and change "
                "the input of the layers after them"
            )
        if self.same_checkpoint is False:
            text += "; the checkpoint's weights are not those that the trace names"
        return text


def verify(
    path: str | Path, model: str | Path | None = None, *, sha256: str | None = None, sequences: int = 4, **options: Any
) -> str:
    """Load and validate a trace, compare its hash and re-run some of its sequences; what was found, in words.

    ``options`` are those of :func:`rerun`. Raises InputError if the trace is not valid, is another file than the hash
    says, or routes as another model than the one given.
    """
    trace = Trace.load(path)
    if sha256 is not None and sha256.strip().lower() != trace.sha256:
        raise InputError(f"{trace.source}: sha256 {trace.sha256}, expected {sha256.strip().lower()}")
    found = f"{trace.sha256}  ok"
    if model is None:
        return found
    agreement = rerun(trace, model, sequences=sequences, **options)
    if agreement.share < LEAST_AGREEMENT:
        raise InputError(f"{trace.source}: not routes of {model}: {agreement}")
    return f"{found}\n{agreement}"


def rerun(
    trace: Trace, model: str | Path, *, sequences: int = 4, device: str = "auto", adapter: str | Path | None = None,
    experts_implementation: str | None = None,
) -> Agreement:  # fmt: skip
    """Run ``sequences`` of a trace, spread evenly over it, through ``model`` again: one by one, on the tokens recorded.

    Raises InputError if the trace lacks the tokens for it or has other layers than the model.
    """
    from traces.capture.checkpoint import checkpoint_sha256, load, located, unchanged
    from traces.capture.families import FAMILIES, read_families
    from traces.capture.recorder import recorders

    if sequences < 1:
        raise InputError(f"sequences is {sequences}; expected at least 1")
    part = trace.meta["model"].get("part", "")
    prompts = _prompts(trace, part)
    chosen = sorted(prompts)[:: max(1, -(-len(prompts) // sequences))]
    folder = located(model)
    families = FAMILIES | (read_families(adapter) if adapter else {})  # which may register the model's classes
    with unchanged(folder):
        network, _ = load(folder, experts_implementation, device)
        sha256 = checkpoint_sha256(folder)
    totals = np.zeros(4, int)
    with ExitStack() as hooks:
        found = {name: hooks.enter_context(one) for name, one in recorders(network, families).items()}
        layers = [routed.layer for routed in found[part].layers] if part in found else []
        if layers != trace.layers.tolist():
            raise InputError(f"{trace.source}: layers {trace.layers.tolist()!s:.60}; {model} routes {layers!s:.60}")
        for number in chosen:
            totals += _compare(found, part, trace, number, prompts[number])
    rows, routes, differ, close = totals.tolist()
    named = trace.meta.get("captured", {}).get("checkpoint_sha256")
    same = None if named is None else named == sha256
    return Agreement(len(chosen), rows, routes, differ, close, same)


def _prompts(trace: Trace, part: str) -> dict[int, list[int]]:
    """Prompt tokens of the sequences that can be run again, by number."""
    source = trace
    if part == "decoder":
        beside = Path(trace.source).with_suffix(".encoder.npz")
        if not beside.is_file():
            raise InputError(f"{trace.source}: its prompts are in the encoder's trace; expected {beside}")
        source = Trace.load(beside)
    of = {name: number for number, name in enumerate(source.sequence_id.tolist())}
    prompts = {}
    for number, name in enumerate(trace.sequence_id.tolist()):
        mine = slice(*trace.offsets[number : number + 2])
        if name in of and (trace.token[mine] >= 0).all() and trace.position[mine.start] == 0:
            rows = slice(*source.offsets[of[name] : of[name] + 2])
            ids = source.token[rows][source.phase[rows] == PREFILL].tolist()
            if ids and min(ids) >= 0:
                prompts[number] = ids
    if not prompts:
        raise InputError(f"{trace.source}: no sequence with all token ids, its prompt's included; nothing to run again")
    return prompts


def _compare(found: Mapping[str, Any], part: str, trace: Trace, number: int, prompt: list[int]) -> np.ndarray:
    """(rows, routes, differing, close) of one sequence."""
    from traces.capture.batches import run_batch
    from traces.capture.decoding import Decoding, Prompt

    rows = slice(*trace.offsets[number : number + 2])
    said = trace.token[rows][trace.phase[rows] == DECODE].tolist()
    # The last token of a response is never run, so one more than was decoded is given.
    given = Prompt(prompt, [*said, prompt[0]], 0)
    again = run_batch(found, [given], len(said) + 1, Decoding(mode="teacher-forced"), prompt[0], set())[part].arrays
    recorded, now, probs = trace.experts[rows], again["experts"], again["probs"]
    if now.shape != recorded.shape or probs.shape[2] != trace.n_experts:
        raise InputError(f"{trace.source}: {trace.n_experts} experts, top-{trace.top_k}; the model has other numbers")
    differ = (np.sort(recorded, axis=2) != np.sort(now, axis=2)).any(axis=2)
    close = 0
    for row, layer in np.argwhere(differ):
        old, new = set(recorded[row, layer].tolist()) - {-1}, set(now[row, layer].tolist()) - {-1}
        p = probs[row, layer] / 255
        close += bool(old and new) and max(p[list(new - old)], default=0) - min(p[list(old - new)], default=0) <= CLOSE
    return np.array([len(now), differ.size, differ.sum(), close])


def show(text: str) -> None:
    """Print what was found."""
    Console(highlight=False, soft_wrap=True).print(text, markup=False)
