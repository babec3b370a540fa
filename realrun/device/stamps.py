"""Does a kernel compute with the right expert, whole and undisturbed? Looked at where it computes.

Before an expert's kernels and after them, on the very stream that runs them, the bytes of its slot are summed and
compared with the stamp that came with them, and the stamp with the expert that the run believes to be there. A slot
that holds another expert, is half copied, or is overwritten too early gives another sum or another number. Nothing
waits: what is wrong is counted on the device and read when a step ends.
"""

from typing import TYPE_CHECKING

from realrun.device.devices import Device
from realrun.device.faults import SlotFault
from realrun.device.host_store import MARK
from realrun.device.slots import DeviceCache
from realrun.device.torch_device import the_torch

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = (
    "was not the expert in its slot",
    "was not whole when its kernels began",
    "was wrong when its kernels had ended",
)


class Checker:
    """Counts faults of one run; ``launch`` before and after kernels, ``read`` at the end of a step."""

    def __init__(self, device: Device, cache: DeviceCache, n_experts: int) -> None:
        torch = the_torch()
        self._device, self._cache, self._n_experts = device, cache, n_experts
        self._found = torch.zeros(4, dtype=torch.int64, device=device.torch_device)
        self._host = device.small(4)
        self.checked = 0

    def launch(self, slots: "list[int]", experts: "list[int]", after: bool) -> None:
        """Compare the slots with what they should hold, now on the computing stream."""
        for slot, expert in zip(slots, experts, strict=True):
            self._device.compute.launch(self._compare, slot, expert, after)
        self.checked += 0 if after else len(slots)

    def fetch(self) -> None:
        """Have what was found so far copied to the host."""
        self._device.compute.launch(self._host.copy_, self._found, True)

    def read(self, step: int) -> None:
        """Raise SlotFault if anything was wrong up to the last ``fetch``, which must be over."""
        *counts, first = self._host.tolist()
        if not first:
            return
        layer, expert = divmod(first - 1, self._n_experts)
        what = "; ".join(f"{count} times an expert {kind}" for kind, count in zip(_KINDS, counts, strict=True) if count)
        raise SlotFault(f"step {step}: {what}; first routed layer {layer}, expert {expert}")

    def _compare(self, slot: int, expert: int, after: bool) -> None:
        torch = the_torch()
        stamp, found = self._cache.stamps[slot], self._found
        total = self._cache.bytes[slot].view(torch.int32).sum(dtype=torch.int64)
        other: Tensor = (stamp[0] != MARK) | (stamp[1] != expert)
        partial = (stamp[2] != total) & ~other
        wrong = other | partial
        if after:
            found[2] += wrong
        else:
            found[0] += other
            found[1] += partial
        found[3] = torch.where((found[3] == 0) & wrong, expert + 1, found[3])
