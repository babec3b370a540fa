"""Small valid traces: any at random for property tests, and exact ones from a list of routes."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from traces.schema import DECODE, PREFILL
from traces.trace import Trace, validate


def make_trace(
    experts: Any,
    *,
    n_experts: int,
    phase: Any = None,
    sequence: Any = None,
    layers: Any = None,
    split: str | list[str] | None = None,
    domain: str | list[str] | None = None,
    expert_bytes: list[int] | None = None,
    name: str = "toy",
    meta: dict[str, Any] | None = None,
    **arrays: Any,
) -> Trace:
    """A valid trace of these routes: (T, L, K), or (T, K) and (T,) for one layer.

    Defaults: one sequence "s0", all decode, split eval, domain "general", layers 0..L-1. ``arrays`` are further fields
    of Trace; ``meta`` is merged over the default.
    """
    routes = np.asarray(experts, np.int16)
    routes = routes.reshape(len(routes), 1, -1) if routes.ndim < 3 else routes
    rows, n_layers, top_k = routes.shape
    sequence = np.zeros(rows, np.int32) if sequence is None else np.asarray(sequence, np.int32)
    count = int(sequence.max()) + 1
    model: dict[str, Any] = {"name": name, "experts": n_experts, "top_k": top_k}
    if expert_bytes is not None:
        model["expert_bytes"] = list(expert_bytes)
    starts = np.searchsorted(sequence, sequence)
    fields: dict[str, Any] = {
        "meta": {"schema": 1, "model": model, "captured": {"what": "made by hand for a test"}} | (meta or {}),
        "layers": np.asarray(range(n_layers) if layers is None else layers, np.int32),
        "experts": routes,
        "token": np.full(rows, -1, np.int32),
        "sequence": sequence,
        "position": (np.arange(rows) - starts).astype(np.int32),
        "phase": np.full(rows, DECODE, np.uint8) if phase is None else np.asarray(phase, np.uint8),
        "domain": _texts(domain or "general", count),
        "split": _texts(split or "eval", count),
        "sequence_id": np.array([f"s{i}" for i in range(count)]),
    }
    trace = Trace(**(fields | arrays))
    validate(trace)
    return trace


def _texts(given: str | list[str], count: int) -> np.ndarray:
    return np.array([given] * count if isinstance(given, str) else list(given))


@st.composite
def traces(
    draw: st.DrawFn,
    *,
    max_layers: int = 4,
    max_sequences: int = 4,
    max_rows: int = 6,
    ragged: bool | None = None,
    optional: bool | None = None,
    prefill: bool | None = None,
) -> Trace:
    """Random valid traces: L 1..4, E 2..8 (now and then up to 600), K 1..3, S 1..4, up to ``max_rows`` rows a phase.

    ``ragged``, ``optional`` and ``prefill`` force or forbid -1 ids, the optional arrays and prefill rows; None leaves
    each to chance. Shapes shrink; contents come from a drawn seed, so that a trace costs next to nothing.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_layers = draw(st.integers(1, max_layers))
    n_experts = draw(st.one_of(st.integers(2, 8), st.integers(2, 8), st.sampled_from([9, 128, 256, 600])))
    top_k = draw(st.integers(1, min(3, n_experts)))
    lengths = draw(
        st.lists(
            st.tuples(st.integers(0, 0 if prefill is False else max_rows), st.integers(0, max_rows)).filter(any),
            min_size=1,
            max_size=max_sequences,
        )
    )
    if prefill:
        lengths = [(max(1, before), after) for before, after in lengths]
    count = len(lengths)
    phase = np.concatenate([np.repeat([PREFILL, DECODE], pair) for pair in lengths])
    sequence = np.repeat(np.arange(count), [sum(pair) for pair in lengths])
    # A route often repeats an earlier one, as real ones do, so that caches have something to hit.
    routes = _routes(rng, (len(phase), n_layers, top_k), n_experts)
    again = rng.random(len(phase)) < draw(st.sampled_from([0.0, 0.5]))
    routes[again] = routes[rng.integers(0, len(phase), len(phase))][again]
    if draw(st.booleans()) if ragged is None else ragged:
        routes[rng.random(routes.shape) < 0.2] = -1
    sizes = draw(st.one_of(st.none(), st.lists(st.integers(1, 5), min_size=n_layers, max_size=n_layers)))
    split = rng.choice(["profile", "eval"], count)
    is_eval = (split == "eval")[sequence]
    arrays, about = _optional(draw, rng, routes, phase, n_experts, optional, is_eval)
    return make_trace(
        routes,
        n_experts=n_experts,
        phase=phase,
        sequence=sequence,
        layers=np.cumsum(rng.integers(1, 3, n_layers)) - 1,
        split=split.tolist(),
        domain=rng.choice(["law", "code", "数学", "🙂 chat"], count).tolist(),
        expert_bytes=None if sizes is None else [1_000_000 * size for size in sizes],
        meta=about,
        token=rng.integers(-1, 50_000, len(phase)).astype(np.int32),
        **arrays,
    )


def _routes(rng: np.random.Generator, shape: tuple[int, int, int], n_experts: int) -> np.ndarray:
    """Distinct random ids in random order."""
    rows, n_layers, slots = shape
    return rng.random((rows, n_layers, n_experts)).argsort(axis=2)[:, :, :slots].astype(np.int16)


def _optional(
    draw: st.DrawFn,
    rng: np.random.Generator,
    routes: np.ndarray,
    phase: np.ndarray,
    n_experts: int,
    wanted: bool | None,
    is_eval: np.ndarray,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Optional arrays of a trace, ``is_eval`` (T,) its evaluation rows, and what they add to its meta."""

    def has() -> bool:
        return draw(st.booleans()) if wanted is None else wanted

    rows, n_layers, _ = routes.shape
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    if has():
        arrays["gates"] = np.where(routes < 0, 0, rng.random(routes.shape)).astype(np.float16)
    if has():
        largest = draw(st.integers(1, n_experts))
        if largest < n_experts:
            arrays["prob_experts"] = _routes(rng, (rows, n_layers, largest), n_experts)
        arrays["probs"] = rng.integers(0, 256, (rows, n_layers, largest), dtype=np.uint8)
    if has():
        ahead = _routes(rng, routes.shape, n_experts)
        ahead[:, -1] = -1
        arrays["lookahead"] = ahead
    if has():
        dims = draw(st.integers(1, 6))
        decode = int((phase == DECODE).sum())
        arrays["embeddings"] = rng.integers(-127, 128, (decode, n_layers + 1, dims), dtype=np.int8)
        arrays["prefill_embeddings"] = rng.integers(-127, 128, (rows - decode, dims), dtype=np.int8)
        arrays["embedding_scale"] = rng.uniform(0.01, 1, n_layers + 1).astype(np.float32)
        about["embedding"] = {"basis_sha256": "0" * 64, "dims": dims, "bits": 8, "prefill_layer": 0}
    if has():
        ranked = _routes(rng, (rows, n_layers, draw(st.integers(1, n_experts))), n_experts)
        falling = -np.sort(-rng.integers(0, 256, ranked.shape), axis=2)
        said = is_eval[:, None, None]
        arrays["predicted_experts"] = np.where(said, ranked, -1).astype(np.int16)
        arrays["predicted_probs"] = np.where(said, falling, 0).astype(np.uint8)
        about["predictor"] = {"sha256": "1" * 64}
    return arrays, about


def assert_same(one: Trace, other: Trace) -> None:
    """Assert that two traces hold the same meta and, to the bit, the same arrays."""
    assert one.meta == other.meta
    for name in Trace.__dataclass_fields__:
        if name in ("meta", "source", "sha256"):
            continue
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            assert a is b, name
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert a.dtype == b.dtype or a.dtype.kind == "U", name
