"""Small traces of three domains with everything that the experiments read, in a folder."""

from pathlib import Path

import numpy as np

from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.trace import Trace

LAYERS, EXPERTS, DIMS = 4, 8, 4
DOMAINS = ("banking", "code", "law", "math")


def domain_trace(domain: str, sequences: int = 8, tokens: int = 6) -> Trace:
    """Prompts of two tokens; each domain's embeddings point its own way and its routes favour experts of its own."""
    which = DOMAINS.index(domain)
    rng = np.random.default_rng(which)
    length, count = 2 + tokens, sequences
    phase = np.tile([0, 0] + [1] * tokens, count)
    lean = np.eye(DIMS, dtype=int)[which] * 60
    keys = (lean + rng.integers(-15, 16, (count * length, LAYERS + 1, DIMS))).astype(np.int8)
    weight = rng.random((count * length, LAYERS, EXPERTS)) + 0.6 * (np.arange(EXPERTS) // 2 == which)
    routes = (-weight).argsort(axis=2)[:, :, :2].astype(np.int16)
    ahead = np.roll(routes, -1, axis=1)
    ahead[:, -1] = -1
    return make_trace(
        routes,
        n_experts=EXPERTS,
        sequence=np.repeat(np.arange(count), length),
        phase=phase,
        domain=domain,
        split=["profile" if i < count * 3 // 4 else "eval" for i in range(count)],
        sequence_id=np.array([f"{domain}{i}" for i in range(count)]),
        token=rng.integers(0, 9, count * length).astype(np.int32),
        embeddings=keys[phase == 1],
        prefill_embeddings=keys[phase == 0, 1],
        embedding_scale=np.ones(LAYERS + 1, np.float32),
        probs=(weight * 100).astype(np.uint8),
        lookahead=ahead,
        meta={
            "embedding": {"basis_sha256": "0", "dims": DIMS, "bits": 8, "prefill_layer": 1},
            "model": {"name": "toy", "experts": EXPERTS, "top_k": 2} | toy_meta(LAYERS),
        },
    )


SWITCH = "switch-base-32"


def predicted_trace(domain: str, learnt: str, sequences: int = 64, tokens: int = 2) -> Trace:
    """Decoder rows of a Switch with 32 experts, of which three quarters of the routes are predicted.

    ``learnt`` is the domain of which the predictor learnt. Routes follow a token's kind, of which there are 9.
    """
    rng = np.random.default_rng(len(domain))
    profile, experts = 6, 32
    count = (profile + sequences) * tokens
    kinds = rng.integers(0, 9, count)
    routes = (kinds[:, None, None] * 3 + np.arange(6)[None, :, None] + rng.integers(0, 2, (count, 6, 1))) % experts
    right = rng.random((count, 6, 1)) < 0.75
    second = (routes + 1 + rng.integers(0, 7, routes.shape)) % experts
    ranked = np.concatenate([np.where(right, routes, second), np.where(right, second, routes)], axis=2)
    split = ["profile"] * profile + ["eval"] * sequences
    told = np.repeat(np.array(split) == "eval", tokens)[:, None, None]
    ahead = np.roll(routes, -1, axis=1)
    ahead[:, -1] = -1
    return make_trace(
        routes,
        n_experts=experts,
        sequence=np.repeat(np.arange(profile + sequences), tokens),
        layers=[1, 3, 5, 7, 9, 11],
        domain=domain,
        split=split,
        sequence_id=np.array([f"{domain}{i}" for i in range(profile + sequences)]),
        lookahead=ahead.astype(np.int16),
        predicted_experts=np.where(told, ranked, -1).astype(np.int16),
        predicted_probs=np.where(told, np.full_like(ranked, 200), 0).astype(np.uint8),
        meta={
            "model": {"name": SWITCH, "part": "decoder", "experts": experts, "top_k": 1},
            "predictor": {"sha256": "0", "trained_on": [{"domains": [learnt]}]},
        },
    )


def predicted_traces(folder: Path) -> Path:
    """Two data sets of a Switch with predictions of a net that learnt from the first, in ``folder``."""
    folder.mkdir(exist_ok=True)
    for domain in ("translation", "summaries"):
        predicted_trace(domain, "translation").save(folder / f"switch32_{domain}.npz")
    return folder


def domain_traces(folder: Path, sequences: int = 8) -> Path:
    """A trace a domain, in ``folder``."""
    folder.mkdir(exist_ok=True)
    for domain in DOMAINS:
        domain_trace(domain, sequences).save(folder / f"toy_{domain}.npz")
    return folder
