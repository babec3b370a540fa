"""What a router family is: how to read its router's output, and how its router chooses.

The defaults are those of most routers; `traces.capture.families` holds the families that are built in, and
`docs/capture.md` shows how to add one of your own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Routing:
    """What one router call decided for N tokens: ids (N, K) in router order, weights (N, K), probabilities (N, E).

    An id of -1 is a token that its expert had no room for; its weight is 0.
    """

    ids: "torch.Tensor"
    weights: "torch.Tensor"
    probs: "torch.Tensor"
    tied: "torch.Tensor"  # (N,) bool: the last expert or group chosen scores as much as the best one not chosen


def linear(router: Any, hidden: "torch.Tensor") -> "torch.Tensor":
    """Logits (N, E) of a router that is one matrix, with or without bias, in the model's precision."""
    import torch

    return torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))


def softmax(router: Any, logits: "torch.Tensor") -> "torch.Tensor":
    """Probabilities (N, E): the softmax of the logits over all experts, in float32."""
    return logits.float().softmax(dim=-1)


def by_probability(router: Any, logits: "torch.Tensor", probs: "torch.Tensor") -> "torch.Tensor":
    """The experts with the largest probabilities are chosen."""
    return probs


def triple(router: Any, hidden: "torch.Tensor", output: Any) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """(logits, weights, ids) of an output in that order or the reverse: ids are the integers."""
    first, weights, last = output
    return (last, weights, first) if not first.is_floating_point() else (first, weights, last)


def second_and_third(inputs: tuple[Any, ...]) -> "tuple[torch.Tensor, torch.Tensor]":
    """(ids, weights) of experts that are called with (hidden, ids, weights)."""
    return inputs[1], inputs[2]


@dataclass(frozen=True)
class Family:
    """One router family. The defaults are those of most: a linear router, softmax over all experts, the K largest.

    ``read(router, hidden, output)`` gives logits (N, E), weights (N, K) and ids (N, K) of a router's output for its
    input ``hidden`` (N, H). ``probs(router, logits)`` are its routing probabilities (N, E) and
    ``choice(router, logits, probs)`` the scores (N, E) whose K largest are chosen. Where only experts of a token's best
    groups may be chosen, ``groups(router, scores)`` are the scores (N, G) of its groups, of which the
    ``router.topk_group`` largest count, else None. ``logits(router, hidden)`` applies the router's weights to other
    states without calling the module, which would fire its hooks again.

    ``matrix`` names the router's weights of shape (E, H), which is checked; "" if it has none of that shape.

    ``experts`` names the module beside the router that is called with what the router chose, and ``given`` finds
    (ids, weights) in its positional inputs; "" where there is no such module: then nothing is compared.
    ``normalised(router)`` tells whether the weights of a token sum to 1 before ``scale(router)``.

    ``models`` is what people call the models, ``about`` how they choose and weigh, in words.
    """

    read: Callable[[Any, "torch.Tensor", Any], "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"] = triple
    logits: Callable[[Any, "torch.Tensor"], "torch.Tensor"] = linear
    probs: Callable[[Any, "torch.Tensor"], "torch.Tensor"] = softmax
    choice: Callable[[Any, "torch.Tensor", "torch.Tensor"], "torch.Tensor"] = by_probability
    groups: Callable[[Any, "torch.Tensor"], "torch.Tensor | None"] = lambda router, scores: None
    matrix: str = "weight"
    experts: str = "experts"
    given: Callable[[tuple[Any, ...]], "tuple[torch.Tensor, torch.Tensor]"] = second_and_third
    normalised: Callable[[Any], bool] = lambda router: True
    scale: Callable[[Any], float] = lambda router: float(getattr(router, "routed_scaling_factor", 1.0))
    probabilities: str = "softmax of the router's logits over all experts"
    models: str = ""
    about: str = ""

    def routing(self, router: Any, hidden: "torch.Tensor", output: Any) -> Routing:
        """What a router's output for ``hidden`` (N, H) says."""
        logits, weights, ids = self.read(router, hidden, output)
        return Routing(ids, weights, *self.judged(router, logits, ids.shape[-1]))

    def judged(self, router: Any, logits: "torch.Tensor", top_k: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Probabilities (N, E) of a router's logits, and (N,) whether its choice of ``top_k`` hung on a tie."""
        probs = self.probs(router, logits)
        scores, tied = self._eligible(router, self.choice(router, logits, probs))
        return probs, tied | _tied(scores, top_k)

    def ahead(self, router: Any, hidden: "torch.Tensor", top_k: int) -> "torch.Tensor":
        """Ids (N, K) that the router's weights choose for states (N, H) of another layer."""
        logits = self.logits(router, hidden)
        scores, _ = self._eligible(router, self.choice(router, logits, self.probs(router, logits)))
        return scores.topk(top_k, dim=-1).indices

    def _eligible(self, router: Any, scores: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Scores (N, E) with minus infinity outside the best groups, and (N,) whether two groups tied for being one.

        Minus infinity, not 0: where corrections make all allowed scores negative, 0 would win.
        """
        groups = self.groups(router, scores)
        if groups is None:
            return scores, scores.new_zeros(len(scores)).bool()
        best = groups.topk(router.topk_group, dim=-1).indices
        outside = groups.new_ones(groups.shape).scatter(1, best, 0).bool()
        outside = outside.repeat_interleave(scores.shape[-1] // groups.shape[-1], dim=1)
        return scores.masked_fill(outside, float("-inf")), _tied(groups, router.topk_group)

    def facts(self, router: Any) -> dict[str, Any]:
        """What a trace's meta says of its router: stored probabilities, and how weights are scaled."""
        return {
            "class": type(router).__name__,
            "probabilities": self.probabilities,
            "weights_sum_to_1": bool(self.normalised(router)),
            "weights_scaled_by": self.scale(router),
        }


def _tied(scores: "torch.Tensor", top_k: int) -> "torch.Tensor":
    """(N,) whether the K-th largest score equals the next one."""
    if top_k >= scores.shape[-1]:
        return scores.new_zeros(len(scores)).bool()
    best = scores.topk(top_k + 1, dim=-1).values
    return best[:, -1] == best[:, -2]
