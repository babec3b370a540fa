"""Generate text with a real model whose experts are offloaded, under any policy that can run online.

The tokens are those of the resident model, at every cache size and however wrong a prediction: only where weights lie
changes. Of a model with an encoder and a decoder each stack has slots and a policy of its own, sharing the budget by
their experts' bytes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from realrun.device.devices import Device
from realrun.device.host_store import HostStore
from realrun.engine.predicting import Predictions
from realrun.generate.live import LiveTrace, Planner, Shape, check_basis, check_online, one_step
from realrun.generate.offload import ExpertWeights, Offloaded, OffloadLoop
from sim.log import DECODE, LATE_IN_FLIGHT, LATE_QUEUED, MISS, PREFILL, Counters
from sim.machine.hardware import Hardware
from sim.machine.prediction_costs import PredictionCosts
from sim.policies import Setting, make_policy, parameters_of, policy_class
from sim.run.cache_size import as_typed, describe_capacity, parse_capacity
from sim.run.prepared import settle_for
from traces.capture.decoding import Decoding, Prompt, passes
from traces.capture.routers import RoutedLayer, no_router, parts, routed_layers
from traces.embeddings import Basis
from traces.models.spec import Attention, ModelSpec
from traces.trace import Trace

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Choice:
    """How experts are offloaded: the policy with its parameters, the slots, what it learns from and what it costs."""

    policy: str = "lru"
    values: dict[str, object] = field(default_factory=dict)
    cache: str = "25%"
    profile: Sequence[Trace] = ()
    hardware: str = "h200"
    software: str = "fast"
    seed: int = 0
    check: bool = False
    limit: int | None = None

    def refuse(self) -> None:
        """Refuse what is wrong whatever the model. Raises InputError."""
        kind = policy_class(self.policy)
        check_online(kind)
        parameters_of(self.policy, dict(self.values))
        if not as_typed(self.cache)[0]:
            raise InputError(f"--cache {self.cache!r}: expected room for one expert at least, such as 1 (slot)")
        if kind.learns and not self.profile:
            raise InputError(f"policy {kind.name}: it learns from a profile split; name traces with --profile")

    def refuse_for(self, model: Any, basis: Basis | None) -> None:
        """Refuse what does not go with ``model``, whose weights may be missing, or its ``basis``. Raises InputError."""
        check_basis(policy_class(self.policy), basis, self.profile)
        for routed, weights in _stacks(model).values():
            shape = len(routed), weights[0].count
            for trace in self.profile:
                if (trace.n_layers, trace.n_experts) != shape:
                    raise InputError(
                        f"--profile {trace.source}: {trace.n_layers} layers x {trace.n_experts} experts; expected "
                        f"those of the model, {shape[0]} x {shape[1]}"
                    )


def _stacks(model: Any) -> dict[str, tuple[list[RoutedLayer], list[ExpertWeights]]]:
    """Routed layers and their experts, of each stack that has any. Raises InputError if none has, or they differ."""
    found = {}
    for part in parts(model):
        if not (routed := routed_layers(model, part)):
            continue
        weights = [ExpertWeights(layer) for layer in routed]
        if len({(one.size, one.count) for one in weights}) != 1:
            raise InputError(f"{type(model).__name__}: routed layers differ in the number or the size of their experts")
        found[part] = routed, weights
    if not found:
        raise no_router(model)
    return found


@dataclass(frozen=True)
class Generated:
    """What came of a prompt: token ids (those that were run), times of steps in ns, and what look-ups found.

    ``found`` are codes of ``sim.log`` in the order of look-ups, ``counters`` the totals, one a stack, the decoder last.
    """

    tokens: list[int]
    step_ns: list[int]
    found: list[np.ndarray]
    counters: list[Counters]
    cache: str

    def summary(self) -> dict[str, Any]:
        """Plain data for a report."""
        found, counters = self.found[-1], self.counters[-1]
        late = int(np.isin(found, [LATE_QUEUED, LATE_IN_FLIGHT]).sum())
        misses = int((found == MISS).sum())
        decode = sum(self.step_ns[1:])
        return {
            "tokens": len(self.tokens),
            "ttft_ms": self.step_ns[0] / 1e6,
            "tokens_per_s": len(self.step_ns[1:]) * 1e9 / decode if decode else None,
            "lookups": len(found),
            "hits": len(found) - late - misses,
            "late": late,
            "misses": misses,
            "link_bytes": {"demand": sum(counters.demand_bytes), "prefetch": sum(counters.prefetch_bytes)},
            "cache": self.cache,
            "clock": "measured",
        }


class Offloader:
    """A model with its experts in host memory; a context, in which the model generates with them.

    Args:
        model: a causal language model or an encoder-decoder one, on the host, in eval mode.
        device: where it is to run; all but the experts is moved there.
        choice: how.
        basis: of its embeddings, for policies that read them.

    Raises InputError if it has no known router, its experts are not of one size, memory is short, or the policy cannot
    run online.
    """

    def __init__(self, model: Any, device: Device, choice: Choice, basis: Basis | None = None) -> None:
        self.model, self.device, self.choice = model, device, choice
        choice.refuse()
        choice.refuse_for(model, basis)
        _one_after_another(model)
        stacks = _stacks(model)
        bytes_of = {part: sum(one.size * one.count for one in weights) for part, (_, weights) in stacks.items()}
        self.stacks: list[_Stack] = []
        for part, (routed, weights) in stacks.items():
            share = bytes_of[part] / sum(bytes_of.values())
            self.stacks.append(_Stack(model, part, routed, weights, device, choice, share, basis))
        model.to(device.torch_device)

    def __enter__(self) -> "Offloader":
        with self.device.running():
            for stack in self.stacks:
                stack.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        for stack in self.stacks:
            stack.close()

    def generate(self, prompt: list[int], new_tokens: int, pad: int, eos: set[int]) -> Generated:
        """Decode greedily up to ``new_tokens`` tokens after ``prompt``, or up to one of ``eos``.

        Raises SlotFault if a check is on and finds a wrong expert.
        """
        tokens: list[int] = []
        step_ns: list[int] = []
        with self.device.running():
            for stack in self.stacks:
                stack.begin_sequence()
            begin = time.perf_counter_ns()
            wanted = [Prompt(prompt, [], 0)]
            for one in passes(self.model, wanted, new_tokens + 1, Decoding("greedy"), pad, eos):
                now = time.perf_counter_ns()
                if one.prefill and one.part == "decoder":
                    step_ns[-1] += now - begin  # the encoder's pass and the decoder's first token
                else:
                    step_ns.append(now - begin)
                begin = now
                if not one.prefill:
                    tokens.append(int(one.ids[0, 0]))
            for stack in self.stacks:
                stack.end_sequence()
        found = [np.frombuffer(bytes(stack.loop.calls.found), np.uint8) for stack in self.stacks]
        counters = [stack.loop.counters for stack in self.stacks]
        return Generated(tokens, step_ns, found, counters, self.stacks[-1].described)


class _Stack:
    """One stack of the model: its experts' store, slots, policy and hooks."""

    def __init__(
        self, model: Any, part: str, routed: list[RoutedLayer], weights: list[ExpertWeights], device: Device,
        choice: Choice, share: float, basis: Basis | None,
    ) -> None:  # fmt: skip
        self.size, self.count = weights[0].size, weights[0].count
        self.model, self.part, self.routed, self.device, self.choice = model, part, routed, device, choice
        self.offloaded = Offloaded(routed, weights)
        layers = len(routed)
        expert_bytes = (self.size,) * layers
        budget = parse_capacity(choice.cache, expert_bytes, self.count)
        if not choice.cache.strip().endswith("%"):  # an absolute size is shared by the stacks
            budget = max(self.size, int(budget * share))
        self.budget, self.described = budget, describe_capacity(budget, expert_bytes, self.count)
        kind = policy_class(choice.policy)
        config: Any = model.config
        hidden = next(p.shape[-1] for p in routed[0].router.parameters() if p.dim() == 2)
        top_k = int(next((k for name in _TOP_K if (k := getattr(config, name, None)) is not None), 1))
        numbers = tuple(layer.layer for layer in routed)
        self.shape = Shape(type(model).__name__, numbers, self.count, top_k, self.size, len(weights[0].parts))
        spec = _spec(self.shape, hidden)
        hardware, software = Hardware.load(choice.hardware), PredictionCosts.load(choice.software)
        setting = Setting(spec, budget, tuple(choice.profile), choice.seed, hardware, software)
        self.policy = make_policy(choice.policy, setting, dict(choice.values))
        self.live = LiveTrace(self.shape, kind.needs, basis)
        self._basis = basis
        self.predictions = Predictions(device, software, hardware, hidden)

        def fill(number: int, target: "torch.Tensor") -> int:
            layer, expert = divmod(number, self.count)
            return weights[layer].write(expert, target)

        self.store = HostStore(device, layers * self.count, self.size, fill=fill, limit=choice.limit)
        for one in weights:  # before the rest of the model moves to the device
            one.let_go()
        self.planner = Planner(self.policy, self.live)
        self.loop = self._loop()
        self._handles: list[Any] = []
        self._states: dict[int, Any] = {}

    def _loop(self) -> OffloadLoop:
        """Slots, under what the policy says before anything is known."""
        self.live.begin(1, PREFILL)
        plan = self.policy.plan(self.policy.view(self.live.trace(), one_step(self.shape, [0], PREFILL)))
        if plan.host is not None:
            raise InputError(f"policy {self.policy.name}: it runs experts on the host, which only a replay does")
        terms = settle_for(type(self.policy), one_step(self.shape, [0], PREFILL), plan, self.budget)
        if plan.everything_resident:
            every = self.size * self.count * len(self.routed)
            self.described = describe_capacity(every, (self.size,) * len(self.routed), self.count)
        self.store.refuse_slots(terms.slots, "give a smaller --cache")
        self.live = LiveTrace(self.shape, type(self.policy).needs, self._basis)
        self.planner = Planner(self.policy, self.live)
        shape = (len(self.routed), self.count)
        loop = OffloadLoop(self.device, self.store, shape, plan, terms, self.predictions, check=self.choice.check)
        if self.device.torch_device.type == "cpu":
            loop.cache.bytes.zero_()  # really taken from here on: what follows must see what is left
        return loop

    # -- hooks ---------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put experts' stand-ins and hooks into the model, and all experts into slots if the policy says so."""
        loop = self.loop
        if loop.plan.everything_resident:
            self.device.synchronize()
            loop._copy_all()
        self.offloaded.attach(
            lambda layer, expert: loop.slot_of(layer * self.count + expert), self._called, lambda layer: loop.leave()
        )
        owner = getattr(self.model, self.part) if self.part else self.model
        self._handles.append(owner.get_input_embeddings().register_forward_hook(self._embedded))
        for layer, routed in enumerate(self.routed):
            self._handles.append(routed.router.register_forward_hook(self._router_hook(layer)))

    def close(self) -> None:
        """Take the hooks out and free the host's memory."""
        for handle in self._handles:
            handle.remove()
        self.offloaded.detach()
        self.store.close()

    def begin_sequence(self) -> None:
        """A prompt comes: what was known of another sequence is not of this one. Slots stay as they are."""
        step = self.planner.step
        self.live = LiveTrace(self.shape, type(self.policy).needs, self._basis)
        self.planner = Planner(self.policy, self.live)
        self.planner.step = step
        self._prefilled = False

    def end_sequence(self) -> None:
        """Look at the last step's check."""
        self._check()

    def _embedded(self, module: Any, inputs: Any, output: Any) -> None:
        """A step begins: the embedding layer's output is known."""
        self._check()
        rows = output.reshape(-1, output.shape[-1])
        phase = DECODE if self._prefilled else PREFILL
        self._prefilled = True
        self.loop.begin_step(phase)
        self.planner.begin(len(rows), phase)
        self._know_state(0, rows)
        decision = self.planner.decide(0)
        if decision is not None:
            self.loop._decide(decision, self.loop.step)
            self.loop.link.kick()

    def _check(self) -> None:
        if self.loop.checker and self.loop.step >= 0:
            self.loop.checker.fetch()
            self.device.synchronize()
            self.loop.checker.read(self.loop.step)

    def _router_hook(self, layer: int) -> Any:
        routed, needs = self.routed[layer], type(self.policy).needs

        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            self._know_state(layer + 1, hidden)
            if needs & {"gates", "probs"}:
                routing = routed.family.routing(module, hidden, output)
                self.live.know(layer, gates=_host(routing.weights.float()), probs=_host((routing.probs * 255).round()))
            if "lookahead" in needs and layer + 1 < len(self.routed):
                following = self.routed[layer + 1]
                ahead = following.family.ahead(following.router, hidden, self.shape.top_k)
                self.live.know(layer, lookahead=_host(ahead))

        return hook

    def _know_state(self, level: int, rows: Any) -> None:
        if self.live.wants_state(level):
            self.live.know_state(level, _host(rows.float()))

    def _called(self, layer: int, ids: Any) -> None:
        """The route of a layer is known: the call begins."""
        routes = _host(ids.reshape(len(ids), -1))
        self.live.know(layer, experts=routes)
        needed = np.unique(routes[(routes >= 0) & (routes < self.count)]) + layer * self.count
        self.loop.call(layer, needed.tolist(), lambda: self.planner.decide(layer + 1))


_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k")


def _host(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.detach().cpu().numpy())


def _spec(shape: Shape, hidden: int) -> ModelSpec:
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
        attention=Attention("not counted", 0, 0, 0, 0),
        windows=(0,) * layers,
        vocab=1,
        tied=True,
    )


def resident_tokens(
    model: Any, device: Device, prompt: list[int], new_tokens: int, pad: int, eos: set[int]
) -> list[int]:
    """What the same model generates with all its experts on ``device``; it is on the host again afterwards."""
    _one_after_another(model)
    model.to(device.torch_device)
    with device.running():
        steps = passes(model, [Prompt(prompt, [], 0)], new_tokens + 1, Decoding("greedy"), pad, eos)
        tokens = [int(one.ids[0, 0]) for one in steps if not one.prefill]
    model.to("cpu")
    return tokens


def _one_after_another(model: Any) -> None:
    """Have experts modules loop over their experts; batched ways gather the weights of all."""
    for module in (model, *model.modules()):
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
