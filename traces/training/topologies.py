"""The shapes of published models' routing that small models are trained with."""

from dataclasses import dataclass

from traces.models.known import model_spec
from traces.models.released import RELEASED


@dataclass(frozen=True)
class Topology:
    """Shape of the routing of a published model: what the small model must have in common with it.

    ``family`` is the model type of the class that stands for it. ``width`` and ``shared`` are the shares of the dense
    MLP's neurons that a routed expert and the shared experts hold. The first ``dense`` layers have no router. Of an
    encoder-decoder model ``layers`` are those of one stack, of which every second is routed.
    """

    name: str
    family: str
    layers: int
    experts: int
    top_k: int
    width: float = 1.0
    shared: float = 0.0
    dense: int = 0

    @property
    def encoder_decoder(self) -> bool:
        """Whether it reads with one stack and writes with another."""
        return self.family == SWITCH


SWITCH = "switch_transformers"


def _released(name: str, width: float = 1.0, shared: float = 0.0, family: str = "") -> Topology:
    spec = model_spec(name)
    dense = 0 if spec.encoder_layers else spec.layers - spec.routed_layers
    layers = spec.encoder_layers or spec.layers
    return Topology(
        name, family or RELEASED[name]["model_type"], layers, spec.experts, spec.top_k, width, shared, dense
    )


_RELEASED = (
    _released("mixtral-8x7b"),
    _released("phi-3.5-moe", width=1 / 2),
    # The shared expert is four routed ones wide, as in the published model.
    _released("qwen1.5-moe-a2.7b", width=1 / 8, shared=1 / 2),
    _released("qwen3-30b-a3b", width=1 / 12),
    # Two shared experts, each as wide as a routed one. transformers has no class for it: DeepSeek-V2's, with one group
    # and no scaling, chooses and weighs as it does.
    _released("deepseek-moe-16b", width=1 / 8, shared=1 / 4, family="deepseek_v2"),
    *(_released(f"switch-base-{experts}", width=1 / 4) for experts in (32, 64, 128)),
)
TOPOLOGIES = {topology.name: topology for topology in _RELEASED}
