"""The parts of a calibration, one after the other, some of which a profile can do without."""

import gc
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from ground.errors import InputError
from realrun.calibrate.machine import Machine

_Result = TypeVar("_Result")


def step(what: str, work: Callable[[], _Result]) -> _Result:
    """Do one part, and say on standard error how long it took."""
    begin = time.monotonic()
    result = work()
    print(f"{what}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    return result


class Parts:
    """Parts that a profile can do without.

    Attributes:
        left_out: the reason of each that was left out, by name.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.left_out: dict[str, str] = {}

    def try_to(self, what: str, work: Callable[[], _Result]) -> _Result | None:
        """As `step`; None if it cannot be done here. Raises InputError if the device does not go on after that."""
        try:
            return step(what, work)
        except (InputError, RuntimeError, MemoryError, OSError, ImportError) as failed:
            reason = _first_line(failed)
        self.left_out[what] = reason
        print(f"{what}: left out: {reason}", file=sys.stderr, flush=True)
        gc.collect()  # its memory
        try:
            self.machine.synchronize()
        except RuntimeError as broken:
            raise InputError(f"{what}: {reason}; the device does not go on: {_first_line(broken)}") from None
        return None


def _first_line(failed: BaseException) -> str:
    return next(iter(str(failed).splitlines()), type(failed).__name__)
