"""One stack of a model whose experts are offloaded: their store, slots and policy, told of routes as they come."""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from realrun.device.devices import Device
from realrun.device.host_store import HostStore
from realrun.engine.predicting import Predictions
from realrun.generate.expert_weights import ExpertWeights
from realrun.generate.live import LiveTrace, Planner, StackShape, one_step
from realrun.generate.offload import OffloadLoop
from realrun.generate.options import OffloadOptions
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts
from sim.policies import Setting, make_policy, policy_class
from sim.run.cache_size import describe_capacity, is_relative, parse_capacity
from sim.run.prepared import settle_for
from traces.capture.listening import Listener, in_8_bits, listen, look_ahead, on_host
from traces.capture.routers import RoutedLayer
from traces.embeddings import Basis
from traces.models.attention import Attention
from traces.models.spec import ModelSpec
from traces.schema import DECODE, PREFILL

if TYPE_CHECKING:
    import torch

_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts", "top_k")


class OffloadedStack(Listener):
    """One stack of the model: its experts' store, slots, policy and hooks."""

    def __init__(
        self, model: Any, part: str, routed: list[RoutedLayer], weights: list[ExpertWeights], device: Device,
        options: OffloadOptions, share: float, basis: Basis | None,
    ) -> None:  # fmt: skip
        self.size, self.count = weights[0].size, weights[0].count
        self.model, self.part, self.layers, self.device, self.options = model, part, routed, device, options
        self.weights = weights
        layers = len(routed)
        expert_bytes = (self.size,) * layers
        budget = parse_capacity(options.cache, expert_bytes, self.count)
        if not is_relative(options.cache):  # an absolute size is shared by the stacks
            budget = max(self.size, int(budget * share))
        self.budget, self.described = budget, describe_capacity(budget, expert_bytes, self.count)
        kind = policy_class(options.policy)
        config: Any = model.config.get_text_config(decoder=True)
        hidden = next(p.shape[-1] for p in routed[0].router.parameters() if p.dim() == 2)
        top_k = int(next((k for name in _TOP_K if (k := getattr(config, name, None)) is not None), 1))
        numbers = tuple(layer.layer for layer in routed)
        self.shape = StackShape(type(model).__name__, numbers, self.count, top_k, self.size, len(weights[0].parts))
        spec = _spec(self.shape, hidden)
        hardware, software = Hardware.load(options.hardware), PredictionCosts.load(options.software)
        setting = Setting(spec, budget, tuple(options.profile), options.seed, hardware, software)
        self.policy = make_policy(options.policy, setting, dict(options.values))
        self.live = LiveTrace(self.shape, kind.needs, basis)
        self._basis = basis
        self.predictions = Predictions(device, software, hardware, hidden)

        def fill(number: int, target: "torch.Tensor") -> int:
            layer, expert = divmod(number, self.count)
            return weights[layer].write(expert, target)

        self.store = HostStore(device, layers * self.count, self.size, fill=fill, limit=options.limit)
        for one in weights:  # before the rest of the model moves to the device
            one.let_go()
        self.planner = Planner(self.policy, self.live)
        self.loop = self._loop()
        self._handles: list[Any] = []

    def _loop(self) -> OffloadLoop:
        """Slots, under what the policy says before anything is known."""
        self.live.begin(1, PREFILL)
        plan = self.policy.plan(self.policy.view(self.live.trace(), one_step(self.shape, [0], PREFILL)))
        if plan.host is not None:
            raise InputError(f"policy {self.policy.name}: it runs experts on the host, which only a replay does")
        terms = settle_for(type(self.policy), one_step(self.shape, [0], PREFILL), plan, self.budget)
        if plan.everything_resident:
            every = self.size * self.count * len(self.layers)
            self.described = describe_capacity(every, (self.size,) * len(self.layers), self.count)
        self.store.refuse_slots(terms.slots, "give a smaller --cache")
        self.live = LiveTrace(self.shape, type(self.policy).needs, self._basis)
        self.planner = Planner(self.policy, self.live)
        shape = (len(self.layers), self.count)
        loop = OffloadLoop(self.device, self.store, shape, plan, terms, self.predictions, check=self.options.check)
        if self.device.torch_device.type == "cpu":
            loop.cache.bytes.zero_()  # really taken from here on: what follows must see what is left
        return loop

    def attach(self) -> None:
        """Put experts' stand-ins and hooks into the model, and all experts into slots if the policy says so."""
        loop = self.loop
        if loop.plan.everything_resident:
            self.device.synchronize()
            loop.copy_all()
        self._handles = listen(self.model, self.part, self.layers, self)
        for layer, weights in enumerate(self.weights):
            self._handles += weights.stand_in(partial(self._slot_of, layer))
            self._handles.append(weights.module.register_forward_hook(lambda *_: loop.leave()))

    def _slot_of(self, layer: int, expert: int) -> "torch.Tensor":
        return self.loop.slot_of(layer * self.count + expert)

    def close(self) -> None:
        """Take the hooks out and free the host's memory."""
        for handle in self._handles:
            handle.remove()
        self.store.close()

    def begin_sequence(self) -> None:
        """A prompt comes: what was known of another sequence is not of this one. Slots stay as they are."""
        step = self.planner.step
        self.live = LiveTrace(self.shape, type(self.policy).needs, self._basis)
        self.planner = Planner(self.policy, self.live)
        self.planner.step = step
        self._prefilled = False

    def check(self) -> None:
        """Look at what the last step's check found, if one is on."""
        if self.loop.checker and self.loop.step >= 0:
            self.loop.checker.fetch()
            self.device.synchronize()
            self.loop.checker.read(self.loop.step)

    def embedded(self, states: "torch.Tensor") -> None:
        """A step begins."""
        self.check()
        phase = DECODE if self._prefilled else PREFILL
        self._prefilled = True
        self.loop.begin_step(phase)
        self.planner.begin(len(states), phase)
        self._know_state(0, states)
        decision = self.planner.decide(0)
        if decision is not None:
            self.loop.decide(decision, self.loop.step)
            self.loop.link.kick()

    def routed(self, index: int, hidden: "torch.Tensor", output: Any) -> None:
        """A router has answered: keep what the policy needs of it."""
        self._know_state(index + 1, hidden)
        layer, needs = self.layers[index], type(self.policy).needs
        if needs & {"gates", "probs"}:
            routing = layer.family.routing(layer.router, hidden, output)
            self.live.know(index, gates=on_host(routing.weights.float()), probs=on_host(in_8_bits(routing.probs)))
        if "lookahead" in needs and index + 1 < len(self.layers):
            ahead = look_ahead(self.layers[index + 1], hidden, self.shape.top_k)
            self.live.know(index, lookahead=on_host(ahead))

    def _know_state(self, level: int, states: "torch.Tensor") -> None:
        if self.live.wants_state(level):
            self.live.know_state(level, on_host(states.float()))

    def called(self, index: int, ids: "torch.Tensor", weights: "torch.Tensor") -> None:
        """The route of a layer is known: the call begins."""
        routes = on_host(ids.reshape(len(ids), -1))
        self.live.know(index, experts=routes)
        needed = np.unique(routes[(routes >= 0) & (routes < self.count)]) + index * self.count
        self.loop.call(index, needed.tolist(), lambda: self.planner.decide(index + 1))


def _spec(shape: StackShape, hidden: int) -> ModelSpec:
    """As much of a model's description as its modules tell; nothing here is charged for its attention."""
    layers = shape.layers[-1] + 1
    return ModelSpec(
        name=shape.name,
        layers=layers,
        moe_layers=shape.layers,
        hidden=hidden,
        experts=shape.experts,
        top_k=shape.top_k,
        expert_ffn=max(1, shape.expert_bytes // (2 * 3 * hidden)),
        expert_bytes=(shape.expert_bytes,) * len(shape.layers),
        attention=Attention("not counted", (), 0, 0, 0),
        windows=(0,) * layers,
        vocab=1,
        tied=True,
    )
