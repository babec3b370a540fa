"""How long a sweep will take, by a few of its designs.

Of each policy on each trace one is run that makes a plan, and one that finds it.
"""

import random
import time
from collections.abc import Sequence

from sim.sweep.execute import run_design
from sim.sweep.tasks import Batch, Task

PATIENCE = 20.0
"""Seconds that are spent on trying; what is left then is taken to be as slow as what was tried."""
_START = 2.0
"""Seconds that processes take to start."""


def seconds(batches: Sequence[Batch], workers: int) -> float:
    """About how long so many processes take for ``batches``. Runs some of their designs and keeps nothing."""
    alike: dict[str, list[Batch]] = {}
    for batch in batches:
        fields = batch[0].design.fields
        alike.setdefault(repr([fields.get(name) for name in ("policy", "trace", "mix")]), []).append(batch)
    if not alike:
        return 0.0
    run_design(batches[0][0].design, batches[0][0].key)  # loads what every design needs
    begin = time.monotonic()
    tried = designs = 0.0
    total = 0.0
    # Shuffled, so that what is not tried is like what is.
    for group in random.Random(0).sample([*alike.values()], len(alike)):
        count = sum(map(len, group))
        if time.monotonic() - begin < PATIENCE:
            first, later = _seconds_of(group[0][0]), _seconds_of(group[0][-1])
            part = count * later + len(group) * max(0.0, first - later)
            tried, designs = tried + part, designs + count
        else:
            part = count * tried / designs
        total += part
    return total / min(workers, len(batches)) + _START


def _seconds_of(task: Task) -> float:
    return run_design(task.design, task.key).seconds


def spoken(amount: float) -> str:
    """Seconds as a person says them."""
    if amount < 90:
        return f"{amount:.0f} s"
    return f"{amount / 60:.0f} min" if amount < 5400 else f"{amount / 3600:.1f} h"
