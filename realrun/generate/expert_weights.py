"""The weights of a Hugging Face model's experts, and what stands in for them while they lie in slots.

Each experts module keeps its code. Where it had a parameter that holds all experts one after another, it gets an object
that gives the weights of one expert from its slot, and waits for them if they are on their way. Where each expert is a
module of its own, its parameters are pointed at its slot before it runs. So every number is computed as it would be in
the resident model, in the same order, and the tokens are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from realrun.device.host_store import checksum
from realrun.device.torch_device import the_torch
from traces.capture.routers import RoutedLayer

if TYPE_CHECKING:
    import torch

_ALIGNED = 64


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor of an expert: its name in the experts module, shape and type, and where in a slot it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: "torch.dtype"
    begin: int
    end: int

    def of(self, slot: "torch.Tensor") -> "torch.Tensor":
        """The tensor in the bytes of a slot."""
        return slot[self.begin : self.end].view(self.dtype).view(self.shape)


class ExpertWeights:
    """The weights of all experts of one experts module, as its own code and this project name them."""

    def __init__(self, routed: RoutedLayer) -> None:
        module: Any = routed.experts
        if module is None:
            raise InputError(f"layer {routed.layer}: no module that holds its experts; it cannot be offloaded")
        self.module = module
        children = [child for name, child in module.named_children() if name.startswith("expert")]
        self.apart = bool(children)
        """Whether each expert is a module of its own."""
        if self.apart:
            self.count = len(children)
            self._tensors = [dict(child.named_parameters()) for child in children]
        else:
            stacks = dict(module.named_parameters(recurse=False))
            if not stacks or len({len(stack) for stack in stacks.values()}) != 1:
                raise InputError(
                    f"layer {routed.layer}: {type(module).__name__} holds its experts in a way that is not known here"
                )
            self.count = len(next(iter(stacks.values())))
            self._tensors = [{name: stack[i] for name, stack in stacks.items()} for i in range(self.count)]
        self.children = children
        self.parts: list[ExpertTensor] = []
        end = 0
        for name, tensor in self._tensors[0].items():
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + tensor.numel() * tensor.element_size()
            self.parts.append(ExpertTensor(name, tuple(tensor.shape), tensor.dtype, begin, end))
        self.size = -(-end // _ALIGNED) * _ALIGNED

    def write(self, expert: int, target: "torch.Tensor") -> int:
        """Write one expert's bytes as they lie in a slot; returns their checksum."""
        target.zero_()
        for part in self.parts:
            part.of(target).copy_(self._tensors[expert][part.name])
        return checksum(target)

    def let_go(self) -> None:
        """Take the weights out of the module: they are in the store now."""
        torch = the_torch()
        self._tensors.clear()
        for child in self.children:
            for parameter in child.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        if not self.apart:
            for part in self.parts:
                del self.module._parameters[part.name]

    def stand_in(self, slot_of: "Callable[[int], torch.Tensor]") -> list[Any]:
        """Have the module read each expert from ``slot_of(expert)``, the bytes of its slot; hooks to remove later."""
        handles = []
        for expert, child in enumerate(self.children):
            hook = _pointed(self.parts, partial(slot_of, expert))
            handles.append(child.register_forward_pre_hook(hook))
        for part in () if self.apart else self.parts:
            setattr(self.module, part.name, _FromSlots(part, slot_of))
        return handles


class _FromSlots:
    """Stands where a parameter held all experts."""

    def __init__(self, part: ExpertTensor, slot_of: "Callable[[int], torch.Tensor]") -> None:
        self._part, self._slot_of = part, slot_of

    def __getitem__(self, expert: Any) -> "torch.Tensor":
        return self._part.of(self._slot_of(int(expert)))


def _pointed(parts: list[ExpertTensor], slot: "Callable[[], torch.Tensor]") -> Callable[..., None]:
    def hook(module: Any, inputs: Any) -> None:
        data = slot()
        parameters = dict(module.named_parameters())
        for part in parts:
            parameters[part.name].data = part.of(data)

    return hook
