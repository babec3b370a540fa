"""The experts of a Hugging Face model in slots: the model's own code computes with weights that come and go.

Each experts module keeps its code. Where it had a parameter that holds all experts one after another, it gets an object
that gives the weights of one expert from its slot, and waits for them if they are on their way; where each expert is a
module of its own, its parameters are pointed at its slot before it runs. So every number is computed as it would be in
the resident model, in the same order, and the tokens are the same.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from realrun.device.host_store import checksum
from realrun.device.machine import the_torch
from realrun.engine.loop import Loop
from sim.log import PREFILL
from sim.run.link import Transfer
from sim.run.slots import RESIDENT
from traces.capture.routers import RoutedLayer

if TYPE_CHECKING:
    import torch

_ALIGNED = 64


@dataclass(frozen=True)
class Part:
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
        self.parts: list[Part] = []
        end = 0
        for name, tensor in self._tensors[0].items():
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + tensor.numel() * tensor.element_size()
            self.parts.append(Part(name, tuple(tensor.shape), tensor.dtype, begin, end))
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


class _Stack:
    """Stands where a parameter held all experts."""

    def __init__(self, part: Part, slot_of: Callable[[int], "torch.Tensor"]) -> None:
        self._part, self._slot_of = part, slot_of

    def __getitem__(self, expert: Any) -> "torch.Tensor":
        return self._part.of(self._slot_of(int(expert)))


class Offloaded:
    """The experts modules of one stack of a model, their weights in the slots of ``loop``.

    Layer calls come from the modules' own hooks: ``called(layer, ids)`` before an experts module runs, with the ids
    (n, K) that its router chose, and ``left(layer)`` after it.
    """

    def __init__(self, routed: list[RoutedLayer], weights: list[ExpertWeights]) -> None:
        self.routed, self.weights = routed, weights
        self._handles: list[Any] = []

    def attach(
        self, slot_of: Callable[[int, int], "torch.Tensor"], called: Callable[[int, Any], None],
        left: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Put stand-ins and hooks into the modules; ``slot_of(layer, expert)`` gives the bytes of a slot."""
        for layer, (routed, weights) in enumerate(zip(self.routed, self.weights, strict=True)):
            module, slot = weights.module, partial(slot_of, layer)
            for expert, child in enumerate(weights.children):
                hook = _pointed(weights.parts, partial(slot, expert))
                self._handles.append(child.register_forward_pre_hook(hook))
            for part in () if weights.apart else weights.parts:
                setattr(module, part.name, _Stack(part, slot))
            before, after = _before(routed, partial(called, layer)), _after(partial(left, layer))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))

    def detach(self) -> None:
        """Take the hooks out; the experts stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _pointed(parts: list[Part], slot: Callable[[], "torch.Tensor"]) -> Callable[..., None]:
    def hook(module: Any, inputs: Any) -> None:
        data = slot()
        parameters = dict(module.named_parameters())
        for part in parts:
            parameters[part.name].data = part.of(data)

    return hook


def _before(routed: RoutedLayer, called: Callable[[Any], None]) -> Callable[..., None]:
    def hook(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids, _ = routed.family.given((*inputs, *named.values()))
        called(ids)

    return hook


def _after(left: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        left()

    return hook


class OffloadLoop(Loop):
    """Calls whose experts are run one after another by the model's own code, in rising order.

    As many as fit are claimed ahead; each is let go of when the next one is taken up.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.step = self._call_number = self._current = -1
        self._late: set[int] = set()
        self._insisted: list[Transfer] = []
        self._to_claim: deque[int] = deque()
        self._claimed: dict[int, Transfer | None] = {}

    def begin_step(self, phase: int) -> None:
        """A step begins."""
        self.step += 1
        self.link.phase = phase
        self.predict.append(0)
        if self.plan.ring and not self.step:
            self._stream_next_layer(0)
            self.link.kick()

    def call(self, layer: int, needed: list[int], decide: Callable[[], Any]) -> None:
        """The route of a layer is known: ``needed`` are its experts, flat and rising; ``decide`` asks the policy."""
        self._await_free()  # the host has the route, so all that was launched before it is over
        self._turn()
        call = self.step * self.n_layers + layer
        first = len(self.found)
        self.found.extend(bytes(len(needed)))
        self._call_number, self._current = call, -1
        self._late = self._look_up(call, needed, first)
        self._insisted = self._rest(call, self._late) if self.plan.ring else []
        self.link.passed = call
        self._to_claim.extend(needed)
        self.link.awaited.update(needed)
        self._claim_more()
        self.link.kick()
        decision = decide()
        if decision is not None:
            self._decide(decision, self.step)
        prefill = self.plan.stream_prefill and self.link.phase == PREFILL and layer + 1 < self.n_layers
        if self.plan.ring or prefill:
            self._stream_next_layer(call + 1)
        self.link.kick()

    def slot_of(self, expert: int) -> "torch.Tensor":
        """The bytes of ``expert``, whose call is under way: the model computes with them next."""
        if expert != self._current:
            self._leave_current()
            if expert not in self._claimed and expert not in self._to_claim:  # the model comes back to it
                self._to_claim.appendleft(expert)
                self._claim_more()
                self.link.kick()
            self._until(lambda: expert in self._claimed, "a slot for expert", expert)
            transfer = self._claimed.pop(expert)
            if transfer is not None and self.cache.state[expert] != RESIDENT:
                self._stand_still(self._call_number, [transfer], expert in self._late)
            self.cache.used[expert] = 1
            self._current = expert
            if self.checker:
                self.checker.launch([self.cache.slot[expert]], [expert], after=False)
        return self.cache.bytes[self.cache.slot[expert]]

    def leave(self) -> None:
        """The call's experts have been launched."""
        self._leave_current()
        for expert in list(self._claimed):  # claimed, and in the end not run
            self._hold(self.device.compute.record(), [expert])
        self._claimed.clear()
        self._to_claim.clear()
        self.link.awaited.clear()
        self._stand_still_for_rest(self._call_number, self._insisted)

    def _leave_current(self) -> None:
        if self._current >= 0:
            if self.checker:
                self.checker.launch([self.cache.slot[self._current]], [self._current], after=True)
            self._hold(self.device.compute.record(), [self._current])
            self._current = -1

    def _claim_more(self) -> None:
        cache = self.cache
        while self._to_claim and cache.pinned.count(1) < cache.fit[self._to_claim[0]]:
            expert = self._to_claim.popleft()
            self.link.awaited.discard(expert)
            _, waiting = self._claim([expert])
            self._claimed[expert] = waiting[0] if waiting else None

    def _let_go(self, kick: bool = True) -> bool:
        gone = super()._let_go(kick and not self._to_claim)
        if gone and self._to_claim:
            self._claim_more()
            self.link.kick()
        return gone

    def _wait_for(self, transfer: Transfer) -> None:
        """What the model's own code computes from now on waits for the copy."""
        self.device.hold_back(transfer.event)
