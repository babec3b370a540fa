"""Losses that keep a router from sending most tokens to few experts."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def balance_loss(logits: "torch.Tensor", uses: "torch.Tensor") -> "torch.Tensor":
    """Load-balancing loss of one layer (Switch Transformer, arXiv 2101.03961, eq. 4): E * sum of uses x probability.

    ``logits`` (N, E); ``uses`` (E,) from :func:`expert_uses`. The loss is K when experts are used alike and more when
    the probable ones are the used ones.
    """
    import torch

    return logits.shape[-1] * (uses * torch.softmax(logits.float(), dim=-1).mean(dim=0)).sum()


def window_balance_loss(logits: "torch.Tensor", chosen: "torch.Tensor", window: int) -> "torch.Tensor":
    """The mean over windows of :func:`balance_loss` of each, for ``chosen`` (N, E) 1 where an expert was taken.

    Rows are tokens in order; a window is ``window`` rows and must lie in one sequence.
    """
    import torch

    experts = logits.shape[-1]
    uses = chosen.view(-1, window, experts).mean(dim=1)
    probable = torch.softmax(logits.float(), dim=-1).view(-1, window, experts).mean(dim=1)
    return experts * (uses * probable).sum(dim=-1).mean()


def padded_balance_loss(logits: "torch.Tensor", chosen: "torch.Tensor", valid: "torch.Tensor") -> "torch.Tensor":
    """The mean over sequences of :func:`balance_loss` of each, where only rows with ``valid`` (B, N) count.

    ``logits`` and ``chosen`` are (B * N, E); every sequence has a row that counts.
    """
    import torch

    experts, weights = logits.shape[-1], valid.unsqueeze(-1) / valid.sum(dim=1)[:, None, None]
    uses = (chosen.view(*valid.shape, experts) * weights).sum(dim=1)
    probable = (torch.softmax(logits.float(), dim=-1).view(*valid.shape, experts) * weights).sum(dim=1)
    return experts * (uses * probable).sum(dim=-1).mean()


def chosen_experts(ids: "torch.Tensor", experts: int) -> "torch.Tensor":
    """(N, E) float32: 1 where an expert is among a token's ids (N, K), -1 for none. Needs no wait for the device."""
    import torch

    return (ids.unsqueeze(-1) == torch.arange(experts, device=ids.device)).float().sum(dim=1)


def expert_uses(ids: "torch.Tensor", experts: int) -> "torch.Tensor":
    """(E,) float32: uses of each expert a token, for ids (N, K); the sum is K."""
    return chosen_experts(ids, experts).mean(dim=0)
