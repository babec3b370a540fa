"""How a model's experts are to be offloaded, and what of it does not go with the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ground.errors import InputError
from realrun.generate.expert_weights import ExpertWeights
from realrun.generate.live import check_basis, check_online
from sim.policies import parameters_of, policy_class
from sim.run.cache_size import as_typed
from traces.capture.routers import RoutedLayer, no_router, parts, routed_layers
from traces.embeddings import Basis
from traces.trace import Trace


@dataclass(frozen=True)
class OffloadOptions:
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
        for routed, weights in stacks_of(model).values():
            shape = len(routed), weights[0].count
            for trace in self.profile:
                if (trace.n_layers, trace.n_experts) != shape:
                    raise InputError(
                        f"--profile {trace.source}: {trace.n_layers} layers x {trace.n_experts} experts; expected "
                        f"those of the model, {shape[0]} x {shape[1]}"
                    )


def stacks_of(model: Any) -> dict[str, tuple[list[RoutedLayer], list[ExpertWeights]]]:
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
