"""A small Switch Transformer: encoder and decoder, every second layer routed, one expert a token.

No dense model at hand has its parts (ReLU without a gate, relative positions, two stacks), so all but the tokenizer and
the embeddings of a dense model starts at random.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from traces.training.batches import TokenBatch
from traces.training.routers import start_routers
from traces.training.topologies import Topology


def new_switch(dense: Any, tokenizer: Any, topology: Topology, seed: int, batch: TokenBatch) -> Any:
    """A Switch of ``topology`` with the embeddings of the causal language model ``dense``, float32, on the CPU.

    ``batch`` is text like that to come: by it the routers start. A function of its arguments.
    """
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    given = dense.config
    pad = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None)
    config: Any = SwitchTransformersConfig(
        vocab_size=given.vocab_size, d_model=given.hidden_size, num_heads=given.num_attention_heads,
        d_kv=given.hidden_size // given.num_attention_heads, d_ff=round(topology.width * given.intermediate_size),
        num_layers=topology.layers, num_decoder_layers=topology.layers,
        num_sparse_encoder_layers=topology.layers // 2, num_sparse_decoder_layers=topology.layers // 2,
        num_experts=topology.experts, expert_capacity=64, router_jitter_noise=0.01, dropout_rate=0.1,
        tie_word_embeddings=True, pad_token_id=pad, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    config.decoder_start_token_id = pad if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = SwitchTransformersForConditionalGeneration(config).float()
    with torch.no_grad():
        # Without what all tokens share, and of the size that such a model's embeddings start with.
        embeddings = dense.get_input_embeddings().weight
        embeddings = embeddings - embeddings.mean(dim=0)
        model.shared.weight.copy_(embeddings / embeddings.std())
    start_routers(model, batch)
    return model


class StackedExperts(nn.Module):
    """A layer's experts as two tensors, (E, F, H) and (E, H, F), for all tokens at once: Switch's run one by one.

    Called as Switch's experts are, with states (N, H), a one-hot choice (N, 1, E), all 0 for a token without room, and
    weights (N, 1); gives what they give.
    """

    def __init__(self, experts: Any, dropout: float) -> None:
        super().__init__()
        each = list(experts.values())
        self.inner = nn.Parameter(torch.stack([one.wi.weight.detach() for one in each]))
        self.outer = nn.Parameter(torch.stack([one.wo.weight.detach() for one in each]))
        self.act, self._dropout = each[0].act, dropout

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See the class."""
        experts = len(self.inner)
        chosen = chosen.reshape(-1, experts)
        counts = chosen.sum(dim=0)
        served = chosen.sum(dim=1).nonzero().squeeze(1)
        ids = chosen[served].argmax(dim=1)
        order = ids.argsort(stable=True)
        ids, rows = ids[order], served[order]
        # Each expert's tokens, padded to as many as the busiest one has.
        most = int(counts.max())
        place = ids * most + torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[ids]
        states = hidden.new_zeros(experts * most, hidden.shape[1]).index_copy(0, place, hidden[rows])
        inner = self.act(states.view(experts, most, -1) @ self.inner.transpose(1, 2))
        inner = functional.dropout(inner, self._dropout, self.training)
        given = (inner @ self.outer.transpose(1, 2)).flatten(0, 1)[place] * weights[rows].to(hidden.dtype)
        return torch.zeros_like(hidden).index_copy(0, rows, given)

    def unstacked(self, experts: Any) -> None:
        """Give Switch's own experts these weights, on their device and in their precision."""
        for one, inner, outer in zip(experts.values(), self.inner.detach(), self.outer.detach(), strict=True):
            one.wi.weight, one.wo.weight = (nn.Parameter(matrix.clone()) for matrix in (inner, outer))


@contextmanager
def stacked(model: Any) -> Iterator[None]:
    """While this is open the experts of a Switch run stacked, which a GPU does many times as fast."""
    blocks = [module for module in model.modules() if type(module).__name__ == "SwitchTransformersSparseMLP"]
    own = [block.experts for block in blocks]
    for block in blocks:
        block.experts = StackedExperts(block.experts, model.config.dropout_rate)
    try:
        yield
    finally:
        for block, experts in zip(blocks, own, strict=True):
            block.experts.unstacked(experts)
            block.experts = experts
