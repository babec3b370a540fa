"""What a schedule makes of the keys and values that sequences have cached: how many there are, and what moves."""

from dataclasses import replace

import numpy as np

from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from sim.workload import Schedule, Workload
from traces.models.spec import ModelSpec
from traces.trace import Trace


def peak_cache(trace: Trace, schedule: Schedule) -> tuple[int, int]:
    """Cached tokens of all sequences that are under way, at most, and how many these are, at most.

    A sequence is under way from its first step to its last, whether or not a step runs it.
    """
    step = np.repeat(np.arange(schedule.n_steps), np.diff(schedule.offsets))
    sequence, position = trace.sequence[schedule.rows], trace.position[schedule.rows].astype(np.int64)
    order = np.lexsort((position, sequence))
    step, sequence, position = step[order], sequence[order], position[order]
    first = np.diff(sequence, prepend=-1) > 0
    last = np.roll(first, -1)
    tokens, sequences = (np.zeros(schedule.n_steps + 1, np.int64) for _ in range(2))
    np.add.at(tokens, step, np.where(first, position + 1, 1))
    np.add.at(tokens, step[last] + 1, -(position[last] + 1))
    np.add.at(sequences, step[first], 1)
    np.add.at(sequences, step[last] + 1, -1)
    return int(tokens.cumsum().max()), int(sequences.cumsum().max())


def cache_bytes(trace: Trace, schedule: Schedule, model: ModelSpec) -> int:
    """GPU memory that keys, values and states of all sequences under way take, at most."""
    tokens, sequences = peak_cache(trace, schedule)
    return tokens * model.kv_bytes_per_token + sequences * model.state_bytes_per_sequence


def with_moves(work: Workload, trace: Trace, model: ModelSpec, hardware: Hardware) -> Workload:
    """``work``, its steps beginning with the copies of what is cached of rows that come from another batch.

    ExpertFlow's Merge and Reindex: what stays in its batch is not touched.
    """
    schedule = work.schedule
    if schedule.moved is None:
        return work
    step = np.repeat(np.arange(schedule.n_steps), np.diff(schedule.offsets))
    cached = np.where(schedule.moved, trace.position[schedule.rows], 0)
    tokens, sequences = (
        np.bincount(step, weights=weights, minlength=schedule.n_steps) for weights in (cached, schedule.moved)
    )
    moved = replace(work, move_ns=Costs(model, hardware).move_ns(tokens, sequences))
    moved.check_size()
    return moved
