"""The router families that are built in: what differs from the defaults of `Family`, keyed by the router's class.

Read from the modelling code of transformers 5.17 and 5.24. Names on one line have the same ``forward``, to the letter.
"""

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from traces.capture.routers import Family, linear

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


def _within_groups(router: Any, scores: "torch.Tensor", best: "torch.Tensor") -> "torch.Tensor":
    """Scores (N, E) with minus infinity outside the router's best groups, which are those of largest ``best`` (N, G).

    Minus infinity, not 0: where corrections make all allowed scores negative, 0 would win.
    """
    kept = best.topk(router.topk_group, dim=-1).indices
    outside = best.new_ones(best.shape).scatter(1, kept, 0).bool()
    return scores.masked_fill(outside.repeat_interleave(scores.shape[-1] // best.shape[-1], dim=1), float("-inf"))


def _deepseek_v2_choice(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    """Groups by their best expert, where the model limits groups at all."""
    if router.topk_method != "group_limited_greedy":
        return probs
    return _within_groups(router, probs, probs.view(len(probs), router.num_group, -1).amax(dim=-1))


def _deepseek_v3_choice(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    """Scores with the balancing correction; groups by the sum of their two best experts."""
    corrected = probs + router.e_score_correction_bias
    groups = corrected.view(len(probs), router.num_group, -1)
    return _within_groups(router, corrected, groups.topk(2, dim=-1).values.sum(dim=-1))


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


_NORMALISED = Family()
_BY_FLAG = Family(normalised=_norm_flag)
_SOFTMAX_OF_CHOSEN = Family(choice=_by_logit, logits=linear)
_PHI = Family(choice=_by_logit, normalised=lambda router: False)
_DEEPSEEK_V2 = Family(logits=_in_float32, choice=_deepseek_v2_choice, normalised=lambda router: False)
_DEEPSEEK_V3 = Family(
    logits=_in_float32, probs=_sigmoid, choice=_deepseek_v3_choice, normalised=_norm_flag,
    probabilities="sigmoid of each expert's logit, without the balancing correction; they do not sum to 1",
)  # fmt: skip
_SWITCH = Family(
    read=_switch_read, logits=_switch_logits, given=_switch_given, choice=_by_logit, normalised=lambda router: False,
    matrix="classifier.weight",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    # Top K of a softmax, brought to a sum of 1.
    **dict.fromkeys(("MixtralTopKRouter", "MiniMaxTopKRouter", "Qwen3VLMoeTextTopKRouter"), _NORMALISED),
    **dict.fromkeys(("Qwen3_5MoeTopKRouter", "Qwen3OmniMoeTextTopKRouter"), _NORMALISED),
    # The same, brought to a sum of 1 if the configuration says so.
    **dict.fromkeys(("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "FlexOlmoTopKRouter"), _BY_FLAG),
    **dict.fromkeys(("Qwen3NextTopKRouter", "Qwen3OmniMoeThinkerTextTopKRouter"), _BY_FLAG),
    # Top K of the logits, then a softmax over those K.
    "GptOssTopKRouter": _SOFTMAX_OF_CHOSEN,
    **dict.fromkeys(("GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter"), _SOFTMAX_OF_CHOSEN),
    "GraniteMoeHybridTopKRouter": _SOFTMAX_OF_CHOSEN,
    # Each of the two experts is weighed by a softmax of its own, so two weights sum to nearly 2.
    "PhimoeTopKRouter": _PHI,
    # Unnormalised and scaled; DeepSeek-MoE-16B routes as DeepSeek-V2-Lite does.
    "DeepseekV2TopkRouter": _DEEPSEEK_V2,
    **dict.fromkeys(("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "Dots1TopkRouter"), _DEEPSEEK_V3),
    **dict.fromkeys(("Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "Glm4vMoeTextTopkRouter"), _DEEPSEEK_V3),
    **dict.fromkeys(("GlmMoeDsaTopkRouter", "ExaoneMoeTopkRouter", "SolarOpenTopkRouter"), _DEEPSEEK_V3),
    "SwitchTransformersTop1Router": _SWITCH,
}


NAMES = (
    "Mixtral", "MiniMax", "Qwen", "OLMoE", "FlexOlmo", "Phi", "gpt-oss", "Granite", "DeepSeek", "GLM", "dots.1",
    "EXAONE", "Solar", "Switch",
)  # fmt: skip
"""What people call the models whose routers are known."""


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
