"""What each sequence of a run had of it."""

from dataclasses import dataclass

import numpy as np

from ground.errors import InputError
from sim.log import LATE_IN_FLIGHT, LATE_QUEUED, PREFETCH_HIT, REUSE_HIT, Log
from sim.workload import Workload
from traces.schema import DECODE
from traces.trace import Trace


@dataclass(frozen=True)
class Shares:
    """What each sequence of a run had of it in decode, all (S,) int64.

    Tokens, time in ns, look-ups, and of these hits and what was on its way (late).
    """

    tokens: np.ndarray
    ns: np.ndarray
    lookups: np.ndarray
    hits: np.ndarray
    late: np.ndarray


def shares(trace: Trace, work: Workload, log: Log) -> Shares:
    """Split a run's decode over its sequences. Raises InputError unless they ran one at a time (batch 1)."""
    schedule = work.schedule
    decode = schedule.phase == DECODE
    rows_of = np.diff(schedule.offsets)
    if (rows_of[decode] != 1).any():
        raise InputError("batch: sequences that decode together cannot be told apart; expected a run of batch 1")
    whose = trace.sequence[schedule.rows[schedule.offsets[:-1]]]
    step_of_lookup = work.call // work.n_layers
    found = decode[step_of_lookup]
    hit = found & np.isin(log.found, (REUSE_HIT, PREFETCH_HIT))
    late = found & np.isin(log.found, (LATE_QUEUED, LATE_IN_FLIGHT))

    def per_sequence(step: np.ndarray, weight: np.ndarray | int = 1) -> np.ndarray:
        total = np.zeros(trace.n_sequences, np.int64)
        np.add.at(total, whose[step], weight)
        return total

    ns = np.diff(log.finish, prepend=0)
    steps = np.flatnonzero(decode)
    return Shares(
        tokens=per_sequence(steps),
        ns=per_sequence(steps, ns[steps]),
        lookups=per_sequence(step_of_lookup[found]),
        hits=per_sequence(step_of_lookup[hit]),
        late=per_sequence(step_of_lookup[late]),
    )
