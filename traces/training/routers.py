"""How the routers of a model that is about to be trained start: without what all tokens share."""

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from traces.capture.routers import parts, routed_layers
from traces.training.batches import TokenBatch

if TYPE_CHECKING:
    import torch

# A router's start leaves out so many directions, those in which a layer's inputs are largest. All tokens share them: a
# router that sees them sends most tokens to a few experts, above all in the last layer.
SHARED_DIRECTIONS = 8
# Standard deviation of a router's first logits. Far less and the router learns from noise; far more and it has decided
# before it has learnt.
FIRST_LOGITS = 0.6


def start_router(weight: "torch.Tensor", inputs: "torch.Tensor") -> None:
    """Take what all ``inputs`` (N, H) share out of a router's weight (E, H), and give its first logits their size."""
    import torch

    alike = torch.nn.functional.normalize(inputs, dim=1)
    _, vectors = torch.linalg.eigh(alike.T @ alike)  # by rising size
    shared = vectors[:, -min(SHARED_DIRECTIONS, len(vectors) // 2) :]
    weight.sub_(weight @ shared @ shared.T)
    weight.mul_(FIRST_LOGITS / (inputs @ weight.T).std())


def start_routers(model: Any, batch: TokenBatch) -> None:
    """Start every router of ``model`` by what reaches it when ``batch`` is run, those before it started already."""
    import torch

    def start(part: str, matrix: str, router: Any, inputs: Any) -> None:
        hidden, valid = inputs[0], batch.valid[part]
        rows = hidden.reshape(-1, hidden.shape[-1])
        start_router(router.get_parameter(matrix), rows if valid is None else rows[valid.flatten()])

    with ExitStack() as hooks, torch.no_grad():
        for part in parts(model):
            for routed in routed_layers(model, part):
                hook = partial(start, part, routed.family.matrix)
                hooks.enter_context(routed.router.register_forward_pre_hook(hook))
        model.eval()(**batch.inputs, use_cache=False)
