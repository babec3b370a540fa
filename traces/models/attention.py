"""What one layer has to mix tokens: attention of some kind, reduced to the numbers that cost time and memory."""

from dataclasses import dataclass
from typing import Self

#: Bytes of one cached key or value number: bf16, whatever the weights are stored in.
KV_BYTES = 2
#: Bytes of one number of a state that is added to for a whole sequence: float32, as the reference kernels keep it.
STATE_BYTES = 4


@dataclass(frozen=True)
class Matrix:
    """``count`` weight matrices of one shape: ``columns`` inputs, along which blocks of weights lie, and ``rows``."""

    role: str
    """What it does, as llama.cpp names it in a file: ``attn_q``."""
    columns: int
    rows: int
    count: int = 1

    @property
    def weights(self) -> int:
        """How many."""
        return self.columns * self.rows * self.count


@dataclass(frozen=True)
class Attention:
    """The attention of one layer, or what stands in its place (linear attention, a state space).

    Linear attention caches nothing for each token. It keeps a state of fixed size for each sequence, which every step
    reads and writes.
    """

    shape: str
    """In words, for tables: ``GQA 32/8/128``."""
    matrices: tuple[Matrix, ...]
    """The projections of one layer, and its convolution and index if it has them."""
    kv_width: int
    """Numbers cached for one token in one layer, those of the index left out."""
    prefill_width: int
    """Multiply-adds for one (query, key) pair when keys and values stand expanded, over all heads."""
    decode_width: int
    """The same when they are read as cached: wider for MLA, whose cache holds the shared latent."""
    state_bytes: int = 0
    """Bytes of the state of one sequence."""
    state_width: int = 0
    """Multiply-adds of one row with the state."""
    index_kv_width: int = 0
    """Numbers that the index caches for one token: charged in bf16, though the makers' kernels keep them in fp8."""
    index_width: int = 0
    """Multiply-adds by which the index scores one (query, key) pair, whether or not the pair is chosen."""

    @property
    def parameters(self) -> int:
        """Weights of one layer."""
        return sum(matrix.weights for matrix in self.matrices)

    @classmethod
    def grouped(cls, hidden: int, heads: int, kv_heads: int, head_dim: int, gated: bool = False) -> Self:
        """Multi-head or grouped-query attention (Ainslie et al., arXiv 2305.13245); ``gated`` has an output gate."""
        return cls(
            shape=("gated " if gated else "") + f"GQA {heads}/{kv_heads}/{head_dim}",
            matrices=(
                Matrix("attn_q", hidden, heads * head_dim * (2 if gated else 1)),
                Matrix("attn_k", hidden, kv_heads * head_dim),
                Matrix("attn_v", hidden, kv_heads * head_dim),
                Matrix("attn_output", heads * head_dim, hidden),
            ),
            kv_width=2 * kv_heads * head_dim,
            prefill_width=2 * heads * head_dim,
            decode_width=2 * heads * head_dim,
        )

    @classmethod
    def latent(
        cls, hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int,
        index_heads: int = 0, index_dim: int = 0,
    ) -> Self:  # fmt: skip
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); ``q_rank`` 0 is a full query projection.

        With the lightning indexer of DeepSeek-V3.2 (arXiv 2512.02556) ``index_heads`` queries, made of the queries'
        latent, score one key a token.
        """
        query = heads * (nope + rope)
        index = index_heads * index_dim
        queries = (
            (Matrix("attn_q_a", hidden, q_rank), Matrix("attn_q_b", q_rank, query))
            if q_rank
            else (Matrix("attn_q", hidden, query),)
        )
        indexer = (
            Matrix("indexer.attn_q_b", q_rank, index),
            Matrix("indexer.attn_k", hidden, index_dim),
            Matrix("indexer.proj", hidden, index_heads),
        )
        return cls(
            shape=f"MLA {heads} heads, kv rank {kv_rank}" + (f", index {index_heads}/{index_dim}" if index else ""),
            matrices=(
                *queries,
                Matrix("attn_kv_a_mqa", hidden, kv_rank + rope),
                Matrix("attn_k_b", nope, kv_rank, heads),
                Matrix("attn_v_b", kv_rank, value, heads),
                Matrix("attn_output", heads * value, hidden),
                *(indexer if index else ()),
            ),
            kv_width=kv_rank + rope,
            prefill_width=heads * (nope + rope + value),
            decode_width=heads * (2 * kv_rank + rope),
            index_kv_width=index_dim,
            index_width=index,
        )  # fmt: skip

    @classmethod
    def lightning(cls, hidden: int, heads: int, head_dim: int) -> Self:
        """Lightning attention (MiniMax-01, arXiv 2501.08313): queries, keys, values, a gate, the output.

        A row adds k v^T to a head's state and reads q of it: two multiply-adds a number. The state is kept in the
        model's own precision, here bf16, as by transformers' class.
        """
        state, inner = heads * head_dim * head_dim, heads * head_dim
        return cls(
            shape=f"lightning {heads}/{head_dim}",
            matrices=(
                Matrix("attn_qkv", hidden, 3 * inner), Matrix("attn_gate", hidden, inner),
                Matrix("attn_output", inner, hidden),
            ),
            kv_width=0, prefill_width=0, decode_width=0, state_bytes=state * KV_BYTES, state_width=2 * state,
        )  # fmt: skip

    @classmethod
    def delta(cls, hidden: int, heads: int, key: int, value_heads: int, value: int, kernel: int) -> Self:
        """Gated delta net (Yang et al., arXiv 2412.06464), behind a convolution over ``kernel`` tokens.

        Projections: queries and keys (``heads`` of ``key``), values, gate and output (``value_heads`` of ``value``),
        and two numbers a value head. A row reads k of the state, adds k times the difference, and reads q: three
        multiply-adds a number.
        """
        mixed = 2 * heads * key + value_heads * value
        state = value_heads * key * value
        return cls(
            shape=f"delta net {heads}/{value_heads}/{key}x{value}",
            matrices=(
                Matrix("attn_qkv", hidden, mixed), Matrix("attn_gate", hidden, value_heads * value),
                Matrix("ssm_ba", hidden, 2 * value_heads), Matrix("ssm_conv1d", kernel, mixed),
                Matrix("ssm_out", value_heads * value, hidden),
            ),
            kv_width=0, prefill_width=0, decode_width=0,
            state_bytes=state * STATE_BYTES + mixed * kernel * KV_BYTES, state_width=3 * state,
        )  # fmt: skip

    @classmethod
    def mamba2(cls, hidden: int, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> Self:
        """Mamba-2 (Dao and Gu, arXiv 2405.21060), behind a convolution over ``kernel`` tokens.

        Projections: the inner width twice (values and gate), B and C of each group, a step size a head; the output. A
        row adds B x^T to a head's state and reads C of it: two multiply-adds a number.
        """
        inner = heads * head_dim
        mixed = inner + 2 * groups * state
        return cls(
            shape=f"mamba-2 {heads}/{head_dim}x{state}",
            matrices=(
                Matrix("ssm_in", hidden, inner + mixed + heads), Matrix("ssm_conv1d", kernel, mixed),
                Matrix("ssm_out", inner, hidden),
            ),
            kv_width=0, prefill_width=0, decode_width=0,
            state_bytes=inner * state * STATE_BYTES + mixed * kernel * KV_BYTES, state_width=2 * inner * state,
        )  # fmt: skip
