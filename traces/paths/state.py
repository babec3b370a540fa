"""What the path rule has learned, and what it remembers of a run: plain arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

FEATURES = 12
"""Numbers that say how an expert was used, the last of them a head's own; see ``traces.paths.observe``."""
HEADS = 4
"""What is told of an expert: the chance of use at its layer's next visit, and at the visits of each later window."""
WINDOWS = np.array([0, 1, 4, 12, 60])
"""Ends of the heads' windows, in visits from now: the first, 2 to 4, 5 to 12, 13 to 60."""
DECAYS = np.array([0.5, 0.8, 0.95, 0.99], np.float32)
"""A use counts so much less at each further visit."""
TOPIC_DECAYS = np.array([0.0, 0.9, 0.97], np.float32)
"""The same for the sums from which the topic is told."""
NEAR, AROUND = 6, 1
"""Lags, in calls, at which one call tells of another: 1 to ``NEAR``, and so many around a whole token."""
TOPIC, COUNT, DECAYED, GATE, AGE, BASE = 11, 15, 16, 20, 21, 22
"""Rows of ``marks`` beyond the features: topics of the heads, uses, decayed uses, the gate weight at the last use,
visits since (at most 200), what heads tell (the first a logit without the path, the others chances of no use)."""
MARKS = BASE + HEADS
LEARNED = (
    "lags", "heads", "head_sums", "reach", "reach_sums", "path", "path_sums", "share", "visits", "topic_in",
    "topic_out", "topic_mean",
)  # fmt: skip
"""Fields that a model file holds."""
RATES = {"new": (0.02, 0.1, 0.02), "learned": (0.01, 0.05, 0.03)}
"""Steps of learning for the first head, paths and later heads: where nothing was learned before, and after that."""
_HEAD_SUM, _PATH_SUM = 0.001, 0.3


class Run(NamedTuple):
    """What is read of a run of T rows in N steps, of models with L layers of which each token takes K experts."""

    routes: np.ndarray  # (T, L, K) int16, -1 for none; rows of all steps in the order in which they run
    gates: np.ndarray  # (T, L, K) uint8, x 255
    starts: np.ndarray  # (N + 1,) int64: the first row of each step
    slot: np.ndarray  # (T,) int64: which of the S sequences that run at once a row belongs to
    place: np.ndarray  # (T,) int64: its place in its sequence
    active: np.ndarray  # (N, S) bool: sequences that run in a step, or have come since the last decode step


class Paths(NamedTuple):
    """E experts a layer, D lags, R numbers of a topic, S sequences that run at once.

    First what is read of the run (`Run`), then what is learned, then what is remembered of the sequences that run.
    """

    routes: np.ndarray
    gates: np.ndarray
    starts: np.ndarray
    slot: np.ndarray
    place: np.ndarray
    active: np.ndarray
    lags: np.ndarray  # (D,) int64, rising
    heads: np.ndarray  # (HEADS, FEATURES) float32, as all that follows where nothing else is said
    head_sums: np.ndarray  # the same: squared slopes so far, as all sums
    reach: np.ndarray  # (D,): what a prediction at this distance adds
    reach_sums: np.ndarray
    path: np.ndarray  # (L, E, D, E): what a use says of each expert of the layer so many calls later
    path_sums: np.ndarray
    share: np.ndarray  # (L, E): the share of visits that take the expert, in the world
    visits: np.ndarray  # (L,)
    topic_in: np.ndarray  # (3, L, E, R)
    topic_out: np.ndarray  # (HEADS, L, R, E)
    topic_mean: np.ndarray  # (3, L, R)
    rates: np.ndarray  # (3,): see RATES
    options: np.ndarray  # (3,) int64: whether to learn; whether layers have pools of their own; a random number
    last: np.ndarray  # (S,) int64: the last row of each sequence
    running: np.ndarray  # (S,) int64: its rows in this step
    tokens: np.ndarray  # (S,) int64: the place of the last of them in the sequence
    seen: np.ndarray  # (S, L) int64: visits in this sequence
    waiting: np.ndarray  # (S, L, 3) int64: visits since features were kept for the later heads, -1 for none
    kept: np.ndarray  # (S, L, 3, FEATURES + 1, E): these, and uses in the head's window since
    marks: np.ndarray  # (S, L, MARKS, E)
    ahead: np.ndarray  # (S, 2 L, E): what paths say of the next 2 L calls
    topic: np.ndarray  # (S, R)
    topic_parts: np.ndarray  # (S, L, 3, R)
    chances: np.ndarray  # (L, 6, E): no use at the next visit, then what `sim.predictors.pathwise.worths` reads


def lags_of(layers: int) -> np.ndarray:
    """The lags (D,) int64 at which calls of a model of so many layers tell of each other."""
    around = range(max(layers - AROUND, 1), min(layers + AROUND, 2 * layers - 1) + 1)
    return np.array(sorted({*range(1, min(NEAR, layers) + 1), *around}), np.int64)


def untrained(layers: int, experts: int, top_k: int) -> dict[str, np.ndarray]:
    """What is learned (`LEARNED`) before any route was seen."""
    lags, real = lags_of(layers), np.float32
    path = (layers, experts, len(lags), experts)
    return {
        "lags": lags, "heads": HEADS_AT_LARGE.copy(), "head_sums": np.full((HEADS, FEATURES), _HEAD_SUM, real),
        "reach": np.zeros(len(lags), real), "reach_sums": np.full(len(lags), _HEAD_SUM, real),
        "path": np.zeros(path, real), "path_sums": np.full(path, _PATH_SUM, real),
        "share": np.full((layers, experts), top_k / experts, real), "visits": np.zeros(layers, real),
        "topic_in": np.zeros((3, layers, experts, 0), real), "topic_out": np.zeros((HEADS, layers, 0, experts), real),
        "topic_mean": np.zeros((3, layers, 0), real),
    }  # fmt: skip


def fresh(
    run: Run, learned: Mapping[str, np.ndarray], rates: tuple[float, float, float], learn: bool = True,
    pools: bool = False,
) -> Paths:  # fmt: skip
    """A state at the beginning of a run."""
    sequences, (layers, experts), rank = run.active.shape[1], learned["share"].shape, learned["topic_in"].shape[3]

    def counts(*shape: int) -> np.ndarray:
        return np.zeros((sequences, *shape), np.int64)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros((sequences, *shape), np.float32)

    return Paths(
        **run._asdict(), **{name: learned[name] for name in LEARNED}, rates=np.array(rates, np.float32),
        options=np.array([learn, pools, 1], np.int64), last=counts(), running=counts(), tokens=counts(),
        seen=counts(layers), waiting=counts(layers, 3) - 1, kept=zeros(layers, 3, FEATURES + 1, experts),
        marks=zeros(layers, MARKS, experts), ahead=zeros(2 * layers, experts), topic=zeros(rank),
        topic_parts=zeros(layers, 3, rank), chances=np.zeros((layers, 6, experts), np.float32),
    )  # fmt: skip


HEADS_AT_LARGE = np.array(
    [
        [-0.2, 0.4, 0.05, 0.05, 0.15, -0.1, -1.9, 0.45, 2.0, 1.1, 0.02, 0.5],
        [0.0, 0.2, 0.05, 0.1, 0.2, 0.6, 0.4, 0.2, 0.8, 0.8, 0.04, 0.5],
        [0.1, 0.1, 0.05, 0.08, 0.1, 0.5, 0.3, 0.35, 0.3, 0.3, 0.06, 0.5],
        [0.1, 0.05, 0.0, 0.07, 0.1, 0.15, 0.4, 0.75, 0.05, 0.15, 0.06, 0.5],
    ],
    np.float32,
)
"""Where learning begins: about the mean of what DeepSeek-V2-Lite and gpt-oss-20b taught, on published traces."""
