"""Make a Mixture-of-Experts model out of a small dense one ("sparse upcycling", Komatsuzaki et al., arXiv 2212.05055).

Every expert of a layer starts with neurons of the dense layer's MLP, all of them or a random share, some of them
redrawn at random, so that experts differ from the first step and can specialise; attention, norms and embeddings are
taken over; routers start at random, without the directions that all tokens share. Where experts hold a share, their
output is scaled so that those of one token stand in for the dense MLP. What families name differently is one table; the
rest is common to all.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.training.routers import start_router
from traces.training.topologies import Topology

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def source_layers(target: int, source: int) -> list[int]:
    """Which of ``source`` dense layers each of ``target`` layers is made from, in order and spread evenly.

    With 30 layers for 32, two layers in the middle of the model appear twice and every layer appears; for 48, 18 appear
    twice; for 24, every fifth is left out.
    """
    return [min(source - 1, int((layer + 0.5) * source / target)) for layer in range(target)]


def expert_weights(
    weight: "torch.Tensor", neurons: "torch.Tensor", redrawn: "torch.Tensor", axis: int, generator: "torch.Generator"
) -> "torch.Tensor":
    """Copies of one MLP matrix, an expert each, of the neurons that it holds, the redrawn ones' weights drawn anew.

    ``neurons`` (experts, n) numbers the neurons of each expert, ``redrawn`` (experts, n) says which of these it
    forgets; ``axis`` is the neurons' axis in ``weight``. New weights are normal with the matrix's standard deviation.
    """
    import torch

    copies = torch.stack([weight.index_select(axis, held) for held in neurons])
    if not redrawn.any():
        return copies
    fresh = torch.randn(copies.shape, generator=generator) * weight.std()
    mask = redrawn.unsqueeze(2 - axis)  # (E, n, 1) where neurons are rows, (E, 1, n) where they are columns
    return torch.where(mask, fresh, copies)


def upcycle(
    base: "PreTrainedModel", topology: Topology, redrawn: float = 0.25, seed: int = 0,
    sample: "torch.Tensor | None" = None,
) -> "PreTrainedModel":  # fmt: skip
    """A model of ``topology`` with the weights of the dense Llama-like ``base`` (float32, on the CPU).

    ``redrawn`` is the share of neurons that each expert draws anew, 0 <= redrawn <= 1. ``sample`` (n, T) are token ids
    of text like that to come: what the dense layers make of it decides how routers and narrow experts start (random
    tokens, the same every time, if None). A function of its arguments. Raises InputError for a share out of range or a
    family without a builder.
    """
    import torch

    if not 0 <= redrawn <= 1:
        raise InputError(f"redrawn share is {redrawn}; it lies in 0..1")
    if topology.family not in _FAMILIES:
        raise InputError(f"no way to upcycle to family {topology.family!r}; one of {', '.join(_FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the new model draws its routers from the global generator
        model: Any = _empty(topology, _shared_config(base.config)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    dense: Any = base.model
    origins = source_layers(topology.layers, len(dense.layers))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(dense.embed_tokens.weight)
        model.lm_head.weight.copy_(base.lm_head.weight)
        model.model.norm.load_state_dict(dense.norm.state_dict(), strict=False)
        seen = _look(base, sample)
        for layer, origin in zip(model.model.layers, origins, strict=True):
            _take_over(layer, dense.layers[origin], seen[origin], topology, redrawn, generator)
            # A layer that appears n times adds its n-th part each time, so that together they add what it did.
            for matrix in _outputs(layer):
                matrix.div_(origins.count(origin))
    return model


@dataclass(frozen=True)
class _Seen:
    """What a dense layer did with a sample: inputs (N, H) of its MLP, root mean square of what its attention reads, of
    its queries and of its keys.
    """

    inputs: "torch.Tensor"
    read: float
    queries: float
    keys: float


def _look(base: "PreTrainedModel", sample: "torch.Tensor | None") -> "list[_Seen]":
    """Run the sample, or random tokens, through the dense model; what each layer did."""
    import torch

    inputs: list[torch.Tensor] = []
    read: list[float] = []
    queries: list[float] = []
    keys: list[float] = []

    def size(found: list[float], module: Any, given: Any, output: "torch.Tensor") -> None:
        found.append(output.square().mean().sqrt().item())

    dense: Any = base.model
    if sample is None:
        sample = torch.randint(base.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
    with ExitStack() as hooks:
        for layer in dense.layers:
            hooks.enter_context(layer.mlp.register_forward_hook(lambda *call: inputs.append(call[1][0].flatten(0, 1))))
            hooks.enter_context(layer.input_layernorm.register_forward_hook(partial(size, read)))
            hooks.enter_context(layer.self_attn.q_proj.register_forward_hook(partial(size, queries)))
            hooks.enter_context(layer.self_attn.k_proj.register_forward_hook(partial(size, keys)))
        dense(input_ids=sample, use_cache=False)
    return [_Seen(*seen) for seen in zip(inputs, read, queries, keys, strict=True)]


def _take_over(
    layer: Any, source: Any, seen: _Seen, topology: Topology, redrawn: float, generator: "torch.Generator"
) -> None:
    """Fill one layer from a dense one."""
    import torch

    # What the new layer has beyond the dense one stays as it is: biases of attention and norms are 0.
    latent = hasattr(layer.self_attn, "kv_b_proj")
    for part in ("input_layernorm", "post_attention_layernorm", *(() if latent else ("self_attn",))):
        getattr(layer, part).load_state_dict(getattr(source, part).state_dict(), strict=False)
    if latent:
        _take_over_latent(layer.self_attn, source.self_attn, seen)
    if not hasattr(layer.mlp, "experts"):
        layer.mlp.load_state_dict(source.mlp.state_dict())
        return
    gate, up, down = (getattr(source.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
    free = torch.arange(gate.shape[0])
    if topology.shared:
        order = torch.randperm(gate.shape[0], generator=generator)
        count = round(topology.shared * gate.shape[0])
        shared, free = order[:count].sort().values, order[count:].sort().values
        always, gated = _shared(layer.mlp), hasattr(layer.mlp, "shared_expert_gate")
        always.gate_proj.weight.copy_(gate[shared])
        always.up_proj.weight.copy_(up[shared])
        always.down_proj.weight.copy_((2 if gated else 1) * down[:, shared])
        if gated:
            layer.mlp.shared_expert_gate.weight.zero_()  # half of it at first, hence the 2
    neurons = _divided(source.mlp, seen.inputs, free, topology, generator)
    forgotten = torch.rand(neurons.shape, generator=generator) < redrawn
    both = [expert_weights(matrix, neurons, forgotten, 0, generator) for matrix in (gate, up)]
    layer.mlp.experts.gate_up_proj.copy_(torch.cat(both, dim=1))
    layer.mlp.experts.down_proj.copy_(expert_weights(down, neurons, forgotten, 1, generator))
    start_router(_router(layer.mlp).weight, seen.inputs)
    if neurons.shape[1] < len(free):
        _scale(layer.mlp, source.mlp, seen.inputs, neurons, free)
    if hasattr(layer.self_attn, "q_norm"):  # normalised queries and keys get back the size that they had
        layer.self_attn.q_norm.weight.fill_(seen.queries)
        layer.self_attn.k_norm.weight.fill_(seen.keys)


def _take_over_latent(attention: Any, source: Any, seen: _Seen) -> None:
    """Fill attention that keeps keys and values as one latent vector from attention that keeps them apart.

    The latent is as wide as what is read, and is that but for its size. Content is compared and read as before; the
    part of queries and keys that knows places is another, and starts at random.
    """
    import torch

    heads, content, hidden = attention.num_heads, attention.qk_nope_head_dim, attention.hidden_size
    queries, keys, values = (
        getattr(source, name).weight.view(-1, content, hidden) for name in ("q_proj", "k_proj", "v_proj")
    )
    keys, values = (each.repeat_interleave(heads // len(each), dim=0) for each in (keys, values))
    # Products are divided by the root of the whole head's width, the places' part included.
    wider = (attention.qk_head_dim / content) ** 0.5
    attention.q_proj.weight.view(heads, -1, hidden)[:, :content].copy_(wider * queries)
    attention.kv_a_proj_with_mqa.weight[:hidden].copy_(torch.eye(hidden))
    attention.kv_a_layernorm.weight.fill_(seen.read)
    attention.kv_b_proj.weight.view(heads, -1, hidden).copy_(torch.cat((keys, values), dim=1))
    attention.o_proj.weight.copy_(source.o_proj.weight)


def _shared(sparse: Any) -> Any:
    """The shared experts of a layer as one MLP, or None."""
    return next((getattr(sparse, name) for name in ("shared_expert", "shared_experts") if hasattr(sparse, name)), None)


def _divided(
    mlp: Any, inputs: "torch.Tensor", free: "torch.Tensor", topology: Topology, generator: "torch.Generator"
) -> "torch.Tensor":
    """Neurons (experts, n) of each expert, of those that are ``free``: drawn in proportion to what they add on average.

    Drawn without replacement by Gumbel's trick (the largest of log weight + noise).
    """
    import torch

    width = round(topology.width * mlp.gate_proj.weight.shape[0])
    if width >= len(free):
        return free.expand(topology.experts, -1)
    active = mlp.act_fn(mlp.gate_proj(inputs)) * mlp.up_proj(inputs)
    added = (active.abs().mean(dim=0) * mlp.down_proj.weight.norm(dim=0))[free]
    noise = -torch.empty(topology.experts, len(free)).exponential_(generator=generator).log()
    return free[(added.clamp(min=1e-9).log() + noise).topk(width, dim=1).indices.sort(dim=1).values]


def _router(sparse: Any) -> Any:
    return sparse.router if hasattr(sparse, "router") else sparse.gate


def _scale(sparse: Any, mlp: Any, inputs: "torch.Tensor", neurons: "torch.Tensor", free: "torch.Tensor") -> None:
    """Scale what experts give so that those of a token make up for the dense neurons that they do not hold.

    Each neuron by how few experts hold it, then all alike by least squares against the ``free`` neurons of the dense
    ``mlp`` on ``inputs``, every token with the same weight.
    """
    import torch

    held = torch.bincount(neurons.flatten(), minlength=mlp.gate_proj.weight.shape[0])[neurons]
    sparse.experts.down_proj.mul_((len(neurons) / held).unsqueeze(1))
    _, weights, ids = _router(sparse)(inputs)
    given = sparse.experts(inputs, ids, weights)
    active = mlp.act_fn(mlp.gate_proj(inputs)) * mlp.up_proj(inputs)
    wanted = active[:, free] @ mlp.down_proj.weight[:, free].T
    size = wanted.square().sum(dim=1, keepdim=True).clamp(min=1e-12)
    sparse.experts.down_proj.mul_(float((wanted * given / size).sum() / (given.square() / size).sum()))


def _outputs(layer: Any) -> "list[torch.Tensor]":
    """The matrices with which a layer adds to the residual stream."""
    if not hasattr(layer.mlp, "experts"):
        return [layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight]
    shared = _shared(layer.mlp)
    matrices = [layer.self_attn.o_proj.weight, layer.mlp.experts.down_proj]
    return matrices + ([] if shared is None else [shared.down_proj.weight])


def _empty(topology: Topology, shared: dict[str, Any]) -> "PreTrainedModel":
    """The family's model of this topology, with random weights; ``shared`` are the fields that the dense config has."""
    from transformers import AutoConfig, AutoModelForCausalLM

    mlp = shared["intermediate_size"]
    own = _FAMILIES[topology.family](topology, round(topology.width * mlp), round(topology.shared * mlp), shared)
    sizes = {"num_hidden_layers": topology.layers, "num_experts_per_tok": topology.top_k}
    config = AutoConfig.for_model(topology.family, **shared | sizes | own)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _shared_config(config: Any) -> dict[str, Any]:
    """What a dense config and a Mixture-of-Experts config have in common."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range",
    )  # fmt: skip
    return {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}


# What each family's config calls its experts and needs besides: of the topology, the widths of a routed and of the
# shared expert, and the fields that the dense config has.
_FAMILIES: dict[str, Callable[[Topology, int, int, dict[str, Any]], dict[str, Any]]] = {
    "mixtral": lambda topology, width, shared, dense: {"num_local_experts": topology.experts, "sliding_window": None},
    # Biases as in the published model. Its router learns only where several experts lie within twice the jitter of the
    # best one: the published 0.01 leaves too few such tokens for a training of minutes.
    "phimoe": lambda topology, width, shared, dense: {
        "num_local_experts": topology.experts, "intermediate_size": width, "router_jitter_noise": 0.05,
        "attention_bias": True, "lm_head_bias": True,
    },
    "qwen2_moe": lambda topology, width, shared, dense: {
        "num_experts": topology.experts, "moe_intermediate_size": width, "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False, "qkv_bias": True,
    },
    "qwen3_moe": lambda topology, width, shared, dense: {
        "num_experts": topology.experts, "moe_intermediate_size": width, "norm_topk_prob": True,
    },
    "deepseek_v2": lambda topology, width, shared, dense: {
        "n_routed_experts": topology.experts, "moe_intermediate_size": width, "n_shared_experts": shared // width,
        "first_k_dense_replace": topology.dense, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": False, "q_lora_rank": None,
        "kv_lora_rank": dense["hidden_size"], "num_key_value_heads": dense["num_attention_heads"],
        "qk_nope_head_dim": dense["hidden_size"] // dense["num_attention_heads"],
        "qk_rope_head_dim": dense["hidden_size"] // dense["num_attention_heads"] // 2,
        "v_head_dim": dense["hidden_size"] // dense["num_attention_heads"],
    },
}  # fmt: skip
