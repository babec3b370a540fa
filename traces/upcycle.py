"""Make a Mixture-of-Experts model out of a small dense one ("sparse upcycling", Komatsuzaki et al., arXiv 2212.05055).

Every expert of a layer starts as the dense layer's MLP with a share of its neurons redrawn at random, so that experts
differ from the first step and can specialise; attention, norms and embeddings are taken over; routers start at random.
``expert_weights`` and ``source_layers`` know nothing of the target family; one builder a family does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from traces.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Topology:
    """Shape of the routing of a published model: what the small model must have in common with it."""

    name: str
    family: str
    layers: int
    experts: int
    top_k: int


TOPOLOGIES = {topology.name: topology for topology in (Topology("mixtral-8x7b", "mixtral", 32, 8, 2),)}


def source_layers(target: int, source: int) -> list[int]:
    """Which of ``source`` dense layers each of ``target`` layers is made from, in order and spread evenly.

    With 30 layers for 32, two layers in the middle of the model appear twice and every layer appears.
    """
    return [min(source - 1, int((layer + 0.5) * source / target)) for layer in range(target)]


def expert_weights(
    weight: "torch.Tensor", experts: int, redrawn: "torch.Tensor", axis: int, generator: "torch.Generator"
) -> "torch.Tensor":
    """``experts`` copies of one MLP matrix, (experts, *weight.shape), with the redrawn neurons' weights drawn anew.

    ``redrawn`` (experts, neurons) says which neurons each expert forgets; ``axis`` is the neurons' axis in ``weight``.
    New weights are normal with the matrix's own standard deviation.
    """
    import torch

    copies = weight.unsqueeze(0).repeat(experts, 1, 1)
    fresh = torch.randn(copies.shape, generator=generator) * weight.std()
    mask = redrawn.unsqueeze(2 - axis)  # (E, neurons, 1) where neurons are rows, (E, 1, neurons) where they are columns
    return torch.where(mask, fresh, copies)


def upcycle(base: "PreTrainedModel", topology: Topology, redrawn: float = 0.25, seed: int = 0) -> "PreTrainedModel":
    """A model of ``topology`` with the weights of the dense Llama-like ``base`` (float32, on the CPU).

    ``redrawn`` is the share of neurons that each expert draws anew, 0 <= redrawn <= 1. A function of its arguments.
    Raises InputError for a share out of range or a family without a builder.
    """
    import torch

    if not 0 <= redrawn <= 1:
        raise InputError(f"redrawn share is {redrawn}; it lies in 0..1")
    if topology.family not in _BUILDERS:
        raise InputError(f"no way to upcycle to family {topology.family!r}; one of {', '.join(_BUILDERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the new model draws its routers from the global generator
        return _BUILDERS[topology.family](base, topology, redrawn, torch.Generator().manual_seed(seed))


def _mixtral(
    base: "PreTrainedModel", topology: Topology, redrawn: float, generator: "torch.Generator"
) -> "PreTrainedModel":
    """A MixtralForCausalLM from a LlamaForCausalLM."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            **_shared_config(base.config),
            num_hidden_layers=topology.layers,
            num_local_experts=topology.experts,
            num_experts_per_tok=topology.top_k,
            sliding_window=None,
        )
    ).float()
    dense: Any = base.model
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(dense.embed_tokens.weight)
        model.lm_head.weight.copy_(base.lm_head.weight)
        model.model.norm.weight.copy_(dense.norm.weight)
        for layer, origin in zip(model.model.layers, source_layers(topology.layers, len(dense.layers)), strict=True):
            source = dense.layers[origin]
            for part in ("self_attn", "input_layernorm", "post_attention_layernorm"):
                getattr(layer, part).load_state_dict(getattr(source, part).state_dict())
            gate, up, down = (getattr(source.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
            forgotten = torch.rand(topology.experts, gate.shape[0], generator=generator) < redrawn
            both = [expert_weights(matrix, topology.experts, forgotten, 0, generator) for matrix in (gate, up)]
            layer.mlp.experts.gate_up_proj.copy_(torch.cat(both, dim=1))
            layer.mlp.experts.down_proj.copy_(expert_weights(down, topology.experts, forgotten, 1, generator))
    return model


def _shared_config(config: Any) -> dict[str, Any]:
    """What a dense config and a Mixture-of-Experts config have in common."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
    )  # fmt: skip
    return {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}


_BUILDERS: dict[str, Callable[..., "PreTrainedModel"]] = {"mixtral": _mixtral}
