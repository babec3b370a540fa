"""The router families that are built in: what differs from the defaults of `Family`, keyed by the router's class.

Read from the modelling code of transformers 5.17 and 5.24. A line here is all that a family needs to be captured;
``traces.models.configs`` has what it needs to be simulated from its own configuration.
"""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.capture.family import Family, linear

if TYPE_CHECKING:
    import torch


def _in_float32(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """DeepSeek's routers multiply in float32 whatever the model's precision."""
    import torch

    return torch.nn.functional.linear(hidden.float(), router.weight.float())


def _norm_flag(router: Any) -> bool:
    """The family's own flag, with the default of its configuration class where a checkpoint leaves it out."""
    return bool(router.norm_topk_prob)


def _by_logit(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    return logits


def _sigmoid(router: Any, logits: "torch.Tensor") -> "torch.Tensor":
    return logits.sigmoid()


def _deepseek_v2_groups(router: Any, scores: "torch.Tensor") -> "torch.Tensor | None":
    """Groups by their best expert, where the model limits groups at all."""
    if router.topk_method != "group_limited_greedy":
        return None
    return scores.view(len(scores), router.num_group, -1).amax(dim=-1)


def _corrected(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    return probs + router.e_score_correction_bias


def _deepseek_v3_groups(router: Any, scores: "torch.Tensor") -> "torch.Tensor":
    """Groups by the sum of their two best experts."""
    return scores.view(len(scores), router.num_group, -1).topk(2, dim=-1).values.sum(dim=-1)


def _switch_logits(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    import torch

    classifier = router.classifier
    return torch.nn.functional.linear(hidden.to(router.dtype), classifier.weight.to(router.dtype), classifier.bias)


def _switch_ids(served: "torch.Tensor") -> "torch.Tensor":
    """(N, 1) ids of a one-hot mask (..., E); -1 where the expert's capacity was used up."""
    flat = served.reshape(-1, served.shape[-1])
    return flat.argmax(dim=-1, keepdim=True).masked_fill(flat.sum(dim=-1, keepdim=True) == 0, -1)


def _switch_read(router: Any, hidden: "torch.Tensor", output: Any) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """5.24 gives (served, p, logits); 5.17 (p, served, p): there the logits are taken from the router's weights.

    ``served`` is one-hot over experts, all 0 for a token beyond its expert's capacity (5.17 never drops one).
    """
    newer = not output[0].is_floating_point()
    served, chosen = (output[0], output[1]) if newer else (output[1], output[0])
    logits = output[2].reshape(-1, served.shape[-1]) if newer else _switch_logits(router, hidden)
    ids = _switch_ids(served)
    return logits, chosen.reshape(-1, 1).masked_fill(ids < 0, 0), ids


def _switch_given(inputs: tuple[Any, ...]) -> "tuple[torch.Tensor, torch.Tensor]":
    ids = _switch_ids(inputs[1])
    return ids, inputs[2].reshape(-1, 1).masked_fill(ids < 0, 0)


def _gemma_probs(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """Gemma 4's router normalises and scales its input itself, and gives probabilities instead of logits."""
    import torch

    scaled = router.norm(hidden) * router.scale * router.scalar_root_size
    return torch.nn.functional.linear(scaled, router.proj.weight).float().softmax(dim=-1)


def _named(family: Family, **models: str) -> dict[str, Family]:
    """A family for each router class of these, with what people call its models."""
    return {router: replace(family, models=name) for router, name in models.items()}


FAMILIES: dict[str, Family] = {
    **_named(
        Family(about="softmax, K largest; sum to 1"),
        MixtralTopKRouter="Mixtral", MiniMaxTopKRouter="MiniMax", Qwen3VLMoeTextTopKRouter="Qwen3-VL-MoE",
        Qwen3_5MoeTopKRouter="Qwen3.5-MoE",
    ),
    **_named(
        Family(normalised=_norm_flag, about="softmax, K largest; sum to 1 if configured"),
        Qwen2MoeTopKRouter="Qwen2-MoE (Qwen1.5-MoE)", Qwen3MoeTopKRouter="Qwen3-MoE", Qwen3NextTopKRouter="Qwen3-Next",
        Qwen3OmniMoeThinkerTextTopKRouter="Qwen3-Omni-MoE (thinker)", OlmoeTopKRouter="OLMoE",
        FlexOlmoTopKRouter="FlexOlmo",
    ),
    **_named(
        Family(choice=_by_logit, logits=linear, about="K largest logits, then a softmax of these"),
        GptOssTopKRouter="gpt-oss", GraniteMoeTopKRouter="Granite-MoE", GraniteMoeSharedTopKRouter="Granite-MoE-shared",
        GraniteMoeHybridTopKRouter="Granite-MoE-hybrid",
    ),
    **_named(
        Family(
            choice=_by_logit, normalised=lambda router: False,
            about="sparse mixer, two; sum to nearly 2",
        ),
        PhimoeTopKRouter="Phi-3.5-MoE",
    ),
    # DeepSeek-MoE-16B routes as DeepSeek-V2-Lite does.
    **_named(
        Family(
            logits=_in_float32, groups=_deepseek_v2_groups, normalised=lambda router: False,
            about="softmax, K largest of the best groups; scaled",
        ),
        DeepseekV2TopkRouter="DeepSeek-V2",
    ),
    **_named(
        Family(
            logits=_in_float32, probs=_sigmoid, choice=_corrected, groups=_deepseek_v3_groups, normalised=_norm_flag,
            probabilities="sigmoid of each expert's logit, without the balancing correction; they do not sum to 1",
            about="sigmoid + correction, K largest of the best groups; sum to 1 if configured, scaled",
        ),
        DeepseekV3TopkRouter="DeepSeek-V3", DeepseekV32TopkRouter="DeepSeek-V3.2", Glm4MoeTopkRouter="GLM-4-MoE",
        Glm4MoeLiteTopkRouter="GLM-4-MoE-lite", Glm4vMoeTextTopkRouter="GLM-4V-MoE", GlmMoeDsaTopkRouter="GLM-MoE-DSA",
        Dots1TopkRouter="dots.1", ExaoneMoeTopkRouter="EXAONE-MoE", SolarOpenTopkRouter="Solar",
    ),
    **_named(
        Family(
            logits=_gemma_probs, probs=lambda router, scores: scores, normalised=lambda router: False,
            matrix="proj.weight", about="softmax, K largest; sum to 1, then scaled expert by expert",
        ),
        Gemma4TextRouter="Gemma-4",
    ),
    **_named(
        Family(
            read=_switch_read, logits=_switch_logits, given=_switch_given, choice=_by_logit,
            normalised=lambda router: False, matrix="classifier.weight",
            about="softmax, the largest one; an expert has limited room",
        ),
        SwitchTransformersTop1Router="Switch",
    ),
}  # fmt: skip
"""Families by the class of their router. Routers of one entry have the same ``forward``, to the letter."""


def read_families(path: str | Path) -> dict[str, Family]:
    """The families that a person's own Python file defines as ``FAMILIES``; running it may also register classes.

    Raises InputError if there is no such file or it defines none, and lets the file's own errors through.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; expected a Python file that defines FAMILIES")
    found = runpy.run_path(str(path)).get("FAMILIES")
    if not isinstance(found, dict) or not found or not all(isinstance(one, Family) for one in found.values()):
        raise InputError(f"{path}: FAMILIES is {found!r:.60}; expected a dict of router class name to Family")
    return found
