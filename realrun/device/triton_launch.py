"""Launch a Triton kernel past Triton's own dispatch, which takes several times as long as the launch.

Triton looks at every argument of every launch to choose a compiled kernel. Where a caller always passes arguments of
the same kinds, the kernel that the first launch chose is the right one for all. It is launched by itself, addresses
given as numbers. Another version of Triton could break that way. So a caller compares the results of both ways first,
and keeps to Triton's own if they differ.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def triton_runs_on(device: "torch.device") -> bool:
    """Whether Triton is installed and makes kernels for ``device``."""
    return device.type == "cuda" and find_spec("triton") is not None


class Direct:
    """One kernel, always launched with arguments of the same kinds: tensors that begin at multiples of 16 bytes."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: Any = None
        self._constants: tuple[Any, ...] = ()

    def dispatched(self, grid: tuple[int, int], arguments: "tuple[torch.Tensor | int, ...]", **constants: Any) -> None:
        """Launch as Triton does it, on the current stream; ``constants`` are the kernel's last arguments, in order."""
        warps = constants.pop("num_warps")
        self._compiled = self._kernel[grid](*arguments, **constants, num_warps=warps)
        self._constants = tuple(constants.values())

    def launch(self, grid: tuple[int, int], stream: int, arguments: tuple[int, ...]) -> None:
        """Launch the kernel that ``dispatched`` chose on ``stream``; tensors are given as their addresses."""
        kernel, hooks = self._compiled, (None, None, None)
        kernel.run(*grid, 1, stream, kernel.function, kernel.packed_metadata, *hooks, *arguments, *self._constants)
