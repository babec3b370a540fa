"""What a Mixture-of-Experts model is made of: layers, experts, weights and bytes."""

from dataclasses import dataclass, replace

from ground.errors import InputError
from traces.models.attention import Attention
from traces.models.blocks import matrix_bytes

MOST_EXPERT_BYTES = 2**50
KV_FORMATS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""What cached keys and values may be stored in: what llama.cpp's --cache-type-k takes."""


@dataclass(frozen=True)
class Stored:
    """Bytes of a model's weights outside its routed experts, as a file or a quantisation has them.

    Norms, biases and scales that belong to one of these are counted with it.
    """

    attention: tuple[int, ...]
    """Of each model layer."""
    ffn: tuple[int, ...]
    """Of the dense FFN of each model layer, or of its shared experts; 0 where it has neither."""
    routers: tuple[int, ...]
    """Of the router of each routed layer."""
    embedding: int
    head: int
    """Of the LM head, which is the embedding where the two share one matrix."""
    formats: tuple[tuple[str, int], ...] = ()
    """Formats of the routed experts, and how many of all their weights each has."""
    label: str = ""
    """What it is called: ``q4_k_m``."""


@dataclass(frozen=True)
class ModelSpec:
    """One model. Weight matrices are counted; norms and biases (below 0.04 % of any model built in) are not.

    Layers are numbered from 0. In an encoder-decoder model the encoder's layers come first; `stack` gives either half.
    """

    name: str
    layers: int
    moe_layers: tuple[int, ...]
    """Model layer number of each routed layer, ascending."""
    hidden: int
    experts: int
    top_k: int
    expert_ffn: int
    expert_bytes: tuple[int, ...]
    """Bytes of one expert, for each routed layer."""
    attention: Attention
    windows: tuple[int, ...]
    """For each layer, how many tokens its attention reads at most, the last ones or those that an index chooses.

    0 is all of them.
    """
    vocab: int
    tied: bool
    """Whether the embedding and the LM head share one matrix."""
    shared_ffn: int = 0
    """Width of all shared experts of a routed layer together."""
    dense_ffn: int = 0
    """FFN width of the layers that have no router."""
    expert_matrices: int = 3
    """Matrices of an expert and of a dense FFN: gate, up, down, or 2 without a gate."""
    weight_bytes: int = 2
    """Bytes a weight of attention, dense and shared layers (1 where they are stored in fp8)."""
    embedding_bytes: int = 2
    """Bytes a weight of the embedding, the LM head and the routers."""
    encoder_layers: int = 0
    """How many of the first layers are an encoder."""
    cross_attention: bool = False
    """Whether the layers after the encoder also attend to its output."""
    other_attention: Attention | None = None
    """What stands in the place of ``attention`` in ``other_layers``: linear attention, or attention of other sizes."""
    other_layers: tuple[int, ...] = ()
    """Layers that have ``other_attention``, ascending."""
    parked_bytes: int = 0
    """Non-expert weights that stay in GPU memory although this spec does not run them (the other stack's)."""
    stored: Stored | None = None
    """Bytes of the weights outside routed experts, where ``weight_bytes`` and ``embedding_bytes`` do not give them."""
    kv_format: str = "bf16"
    """Of cached keys and values."""
    source: str = ""

    def __post_init__(self) -> None:
        """Raise InputError for experts of no size or of one that no sum of bytes in 64 bits has room for."""
        for size in self.expert_bytes:
            if not 1 <= size <= MOST_EXPERT_BYTES:
                raise InputError(f"{self.name}: an expert of {size} bytes; expected 1 to {MOST_EXPERT_BYTES} (1 PiB)")

    @property
    def routed_layers(self) -> int:
        """Number of routed layers."""
        return len(self.moe_layers)

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert."""
        return self.expert_matrices * self.hidden * self.expert_ffn

    @property
    def shared_parameters(self) -> int:
        """Weights of the shared experts of one routed layer."""
        return self.expert_matrices * self.hidden * self.shared_ffn

    @property
    def dense_parameters(self) -> int:
        """Weights of the FFN of one layer without a router."""
        return self.expert_matrices * self.hidden * self.dense_ffn

    @property
    def router_parameters(self) -> int:
        """Weights of one router."""
        return self.hidden * self.experts

    def attention_of(self, layer: int) -> Attention:
        """What model layer ``layer`` mixes its tokens by."""
        other = self.other_attention if layer in self.other_layers else None
        return other or self.attention

    def attention_parameters(self, layer: int) -> int:
        """Attention weights of model layer ``layer``, twice as many where it has cross-attention too."""
        crossed = self.cross_attention and layer >= self.encoder_layers
        return self.attention_of(layer).parameters * (2 if crossed else 1)

    @property
    def in_bf16(self) -> bool:
        """Whether all weights outside routed experts have two bytes."""
        return self.stored is None and self.weight_bytes == 2 == self.embedding_bytes

    def attention_bytes(self, layer: int) -> int:
        """Bytes of the attention of model layer ``layer``."""
        return self.stored.attention[layer] if self.stored else self.attention_parameters(layer) * self.weight_bytes

    def ffn_bytes(self, layer: int) -> int:
        """Bytes of the FFN of model layer ``layer`` that every token passes: of its shared experts if it is routed."""
        if self.stored:
            return self.stored.ffn[layer]
        return self.weight_bytes * (self.shared_parameters if layer in self.moe_layers else self.dense_parameters)

    def router_bytes(self, layer: int) -> int:
        """Bytes of the router of model layer ``layer``; 0 if it has none."""
        if layer not in self.moe_layers:
            return 0
        if self.stored:
            return self.stored.routers[self.moe_layers.index(layer)]
        return self.router_parameters * self.embedding_bytes

    @property
    def embedding_table_bytes(self) -> int:
        """Bytes of the embedding."""
        return self.stored.embedding if self.stored else self.vocab * self.hidden * self.embedding_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head, whether or not it is the embedding."""
        return self.stored.head if self.stored else self.vocab * self.hidden * self.embedding_bytes

    @property
    def _linear_parameters(self) -> int:
        """Weights outside experts, routers and embeddings."""
        attention = sum(self.attention_parameters(layer) for layer in range(self.layers))
        dense = (self.layers - self.routed_layers) * self.dense_parameters
        return attention + dense + self.routed_layers * self.shared_parameters

    @property
    def _embedding_parameters(self) -> int:
        """Weights of embedding, LM head and routers."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.routed_layers * self.router_parameters

    @property
    def total_parameters(self) -> int:
        """All weights."""
        experts = self.routed_layers * self.experts * self.expert_parameters
        return self._linear_parameters + self._embedding_parameters + experts

    @property
    def active_parameters(self) -> int:
        """Weights that one token passes, both embedding tables included."""
        experts = self.routed_layers * self.top_k * self.expert_parameters
        return self._linear_parameters + self._embedding_parameters + experts

    @property
    def resident_bytes(self) -> int:
        """Bytes of all non-expert weights, which stay in GPU memory."""
        blocks = (self.attention_bytes(n) + self.ffn_bytes(n) + self.router_bytes(n) for n in range(self.layers))
        return sum(blocks) + self.embedding_table_bytes + (0 if self.tied else self.head_bytes) + self.parked_bytes

    @property
    def all_expert_bytes(self) -> int:
        """Bytes of every routed expert of the model."""
        return self.experts * sum(self.expert_bytes)

    @property
    def routed_bytes_per_token(self) -> int:
        """Bytes of the experts that one token uses, each counted once."""
        return self.top_k * sum(self.expert_bytes)

    def kv_bytes(self, width: int) -> int:
        """Bytes of ``width`` cached numbers of one token."""
        return matrix_bytes(self.kv_format, width, 1)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more cached token takes in all decoder layers (in windowed ones until the window is full)."""
        return self.cached_bytes(1)

    def cached_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of a sequence of so many tokens: of a window's last ones, where there is one.

        An index chooses from all tokens, and all are kept.
        """
        total = 0
        for layer in range(self.encoder_layers, self.layers):
            one, window = self.attention_of(layer), self.windows[layer]
            kept = min(tokens, window) if window and not one.index_kv_width else tokens
            total += kept * self.kv_bytes(one.kv_width) + tokens * self.kv_bytes(one.index_kv_width)
        return total

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of the states that layers of linear attention keep for one sequence, however long it is."""
        return sum(self.attention_of(layer).state_bytes for layer in range(self.layers))

    def stack(self, part: str) -> "ModelSpec":
        """The ``"encoder"`` or ``"decoder"`` of an encoder-decoder model alone, its layers numbered from 0.

        The other stack's non-expert weights stay counted in `resident_bytes`. Raises InputError for a decoder-only
        model and for another ``part``.
        """
        if part not in ("encoder", "decoder") or not self.encoder_layers:
            raise InputError(f'{self.name}: part {part!r}; expected "encoder" or "decoder", of a model that has both')
        split = self.encoder_layers
        mine = range(split) if part == "encoder" else range(split, self.layers)
        rows = [row for row, layer in enumerate(self.moe_layers) if layer in mine]
        spec = replace(
            self,
            name=f"{self.name} ({part})",
            layers=len(mine),
            moe_layers=tuple(self.moe_layers[row] - mine.start for row in rows),
            expert_bytes=tuple(self.expert_bytes[row] for row in rows),
            windows=self.windows[mine.start : mine.stop],
            other_layers=tuple(layer - mine.start for layer in self.other_layers if layer in mine),
            encoder_layers=0,
            cross_attention=self.cross_attention and part == "decoder",
            stored=self.stored and replace(
                self.stored,
                attention=self.stored.attention[mine.start : mine.stop],
                ffn=self.stored.ffn[mine.start : mine.stop],
                routers=tuple(self.stored.routers[row] for row in rows),
            ),
        )
        return replace(spec, parked_bytes=self.resident_bytes - spec.resident_bytes)
