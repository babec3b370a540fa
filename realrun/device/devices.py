"""Where a run happens: a GPU's streams and events, or the same of a CPU.

A stream does what it is given one after another, beside the host. A device has three: one computes, one copies, one
makes predictions beside the step. Everything a run does on a device goes through them, so that the engine is the same
on a GPU and on a CPU, where a stream is a thread and a copy goes from one buffer to another.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ground.errors import InputError
from ground.text import amount

if TYPE_CHECKING:
    import torch


class Event(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(Protocol):
    """Work in order, beside the host."""

    def launch(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Have ``work(*arguments)`` done after all that was launched before; returns at once."""

    def record(self, again: Any = None) -> Event:
        """The point after all that was launched so far; ``again`` is an event to use anew, which must be over."""

    def mark(self) -> Event:
        """The same, with the time at which it is passed; see ``Device.between``."""

    def wait(self, event: Any) -> None:
        """What is launched from now on waits for ``event``, of any stream of this device."""

    def delay(self, seconds: float) -> None:
        """Do nothing for about so long, as a kernel that sleeps."""


class Device(Protocol):
    """A device with three streams: one computes, one copies, one predicts beside the step."""

    torch_device: "torch.device"
    memory: str
    """What its memory is called."""
    name: str
    """What it is, for a report."""
    compute: Stream
    copies: Stream
    """Of experts."""
    aside: Stream
    """Of predictions that run beside the step."""

    def running(self) -> Any:
        """A context in which the compute stream is the current one; every launch belongs inside."""

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", begin: int = 0, end: int | None = None) -> None:
        """Copy bytes ``begin`` to ``end`` to the same place of ``target``, on the copying stream.

        Both are contiguous and must stay until that is done, the host's side pinned. Raises RunError.
        """

    def copy_back(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        """As ``copy`` the other way: all of ``source``, which is the device's, to ``target``, which is the host's."""

    def between(self, first: Any, last: Any) -> int:
        """Nanoseconds between two marks that have been passed."""

    def graph(self, work: Callable[[], Any]) -> Callable[[], None]:
        """``work``, which must always touch the same tensors, ready to be launched at little cost."""

    def small(self, *shape: int) -> "torch.Tensor":
        """A few int64 numbers of host memory that the device writes to beside the host."""

    def pin(self, address: int, size: int) -> None:
        """Lock host memory into place, so that copies from it run beside everything else. Raises MemoryError."""

    def unpin(self, address: int) -> None:
        """Let go of what ``pin`` locked."""

    def hold_back(self, event: Any) -> None:
        """What the host's own thread computes from now on, as a model does, waits for ``event``."""

    def breathe(self) -> None:
        """The host has nothing to do but to look again."""

    def synchronize(self) -> None:
        """Wait until all streams are idle."""

    def free_bytes(self) -> int | None:
        """Device memory that is not in use, None if that is not known."""


def refuse_too_little(what: str, need: int, have: int | None, remedy: str) -> None:
    """Raise InputError if ``need`` bytes of ``what`` are more than there are; None is not known."""
    if have is not None and need > have:
        raise InputError(f"{what}: needs {amount(need)} and {amount(have)} are free; {remedy}")
