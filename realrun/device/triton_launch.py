"""Launch a Triton kernel past Triton's own dispatch, which takes several times as long as the launch.

Triton looks at every argument of every launch to choose a compiled kernel. Where a caller always passes arguments of
the same kinds, the kernel that the first launch chose is the right one for all. It is launched by itself, addresses
given as numbers. Another version of Triton could break that way. So a caller compares the results of both ways first,
and keeps to Triton's own if they differ.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
        compiled = self._compiled
        hooks = (None, None, None)
        compiled.run(
            *grid, 1, stream, compiled.function, compiled.packed_metadata, *hooks, *arguments, *self._constants
        )
