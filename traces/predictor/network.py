"""The path predictor: a small T5 that reads a prompt and tells, for each token, every layer's experts in one pass.

ExpertFlow (arXiv 2410.17954, "Routing Path Predictor"): the encoder reads the prompt, the decoder the tokens, and one
head gives a probability for each expert of each layer, (B, S, L, E). Sizes are those of T5-small with a model width of
32: 3.8 million weights with T5's vocabulary, 7.2 MB in 16 bits.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ground.addresses import check_torch
from ground.errors import InputError
from ground.files import atomic_path, check_regular
from traces.predictor.sequences import PathSequence
from traces.weight_files import record_of

check_torch()
import torch  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from safetensors.torch import load as tensors_of  # noqa: E402
from safetensors.torch import save as as_safetensors  # noqa: E402
from torch import nn  # noqa: E402
from transformers import T5Config, T5Model  # noqa: E402

LEAST_VOCABULARY = 32128
_RECORD = "path_predictor"
_ADDING = ("SelfAttention.o.weight", "EncDecAttention.o.weight", "DenseReluDense.wo.weight")


@dataclass(frozen=True)
class PredictorShape:
    """Sizes of a predictor: of what it predicts (``layers`` x ``experts``) and of its net.

    The last id of ``vocabulary`` stands for every token beyond it and for unknown ones.
    """

    vocabulary: int
    layers: int
    experts: int
    width: int = 32
    inner: int = 2048
    stack_layers: int = 6
    heads: int = 8
    head_width: int = 64

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) is not int or not 1 <= value < 2**31:
                raise InputError(f"predictor: {name} is {value!r:.40}; expected a whole number of at least 1")


class PathPredictor(nn.Module):
    """Logits (B, S, L, E) of prompts (B, P) and tokens (B, S), both padded on the right.

    ``prompt_valid`` (B, P) are the tokens of prompts that count. A row's logits hang on the whole prompt and on the
    tokens up to its own, never on later ones.
    """

    def __init__(self, shape: PredictorShape) -> None:
        super().__init__()
        self.shape = shape
        self.stacks = T5Model(
            T5Config(
                vocab_size=shape.vocabulary, d_model=shape.width, d_ff=shape.inner, d_kv=shape.head_width,
                num_heads=shape.heads, num_layers=shape.stack_layers, num_decoder_layers=shape.stack_layers,
                pad_token_id=0, dropout_rate=0.0,
            )
        )  # fmt: skip
        self.head = nn.Linear(shape.width, shape.layers * shape.experts)

    def forward(self, prompt: torch.Tensor, prompt_valid: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        states = self.stacks(
            input_ids=prompt, attention_mask=prompt_valid.long(), decoder_input_ids=tokens, use_cache=False
        ).last_hidden_state
        return self.told(states)

    def told(self, states: torch.Tensor) -> torch.Tensor:
        """Logits (B, S, L, E) of the decoder's states (B, S, width)."""
        return self.head(states).unflatten(-1, (self.shape.layers, self.shape.experts))

    @property
    def parameters_in_all(self) -> int:
        """Weights of the net."""
        return sum(weight.numel() for weight in self.parameters())


@dataclass(frozen=True)
class StoredPredictor:
    """A predictor as read from its file: the net in eval mode, what is known of it, and the file's hash and size."""

    net: PathPredictor
    record: Mapping[str, Any]
    sha256: str
    size: int


@dataclass(frozen=True)
class PathBatch:
    """Sequences as tensors, padded on the right: see `PathPredictor`. ``routes`` (B, S, L, K) are -1 where padded."""

    prompt: torch.Tensor
    prompt_valid: torch.Tensor
    tokens: torch.Tensor
    routes: torch.Tensor


def new_predictor(shape: PredictorShape, seed: int) -> PathPredictor:
    """A predictor with random weights, the same for the same seed.

    What each block adds to the embeddings starts small, so that what a token says by itself is heard.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        net = PathPredictor(shape)
        for name, weight in net.named_parameters():
            if name.endswith(_ADDING):
                weight.mul_(0.01)
    return net


def path_batch(sequences: Sequence[PathSequence], vocabulary: int, device: Any) -> PathBatch:
    """Sequences in one batch on ``device``."""
    longest, most = (max(len(getattr(one, name)) for one in sequences) for name in ("prompt", "tokens"))
    prompt = np.zeros((len(sequences), longest), np.int64)
    tokens = np.zeros((len(sequences), most), np.int64)
    valid = np.zeros(prompt.shape, bool)
    routes = np.full((len(sequences), most, *sequences[0].routes.shape[1:]), -1, np.int64)
    for row, one in enumerate(sequences):
        prompt[row, : len(one.prompt)] = known_ids(one.prompt, vocabulary)
        valid[row, : len(one.prompt)] = True
        tokens[row, : len(one.tokens)] = known_ids(one.tokens, vocabulary)
        routes[row, : len(one.tokens)] = one.routes
    return PathBatch(*(torch.from_numpy(array).to(device) for array in (prompt, valid, tokens, routes)))


def known_ids(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Token ids with the last one of the vocabulary in place of unknown ones."""
    last = vocabulary - 1
    return np.where((tokens < 0) | (tokens > last), last, tokens)


def save_predictor(net: PathPredictor, record: Mapping[str, Any], path: str | Path) -> None:
    """Write the net in 16 bits with its sizes and ``record`` as one safetensors file, whole or not at all."""
    about = json.dumps({"shape": asdict(net.shape), **record}, allow_nan=False, sort_keys=True)
    weights = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in _own(net).items()}
    with atomic_path(path) as part:
        part.write_bytes(as_safetensors(weights, metadata={_RECORD: about}))


def load_predictor(path: str | Path, device: str = "cpu") -> StoredPredictor:
    """Read a predictor; it computes in float32. Raises InputError for a file that is none, OSError."""
    check_regular(path)
    data = Path(path).read_bytes()
    try:
        weights = tensors_of(data)
        record = record_of(data, _RECORD)
        net = PathPredictor(PredictorShape(**record["shape"]))
        wrong = net.load_state_dict(weights, strict=False)
        if set(wrong.missing_keys) & set(_own(net)) or wrong.unexpected_keys:
            raise InputError(f"lacks {wrong.missing_keys[:1]} or has {wrong.unexpected_keys[:1]}")
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError, RecursionError) as error:
        why = str(error).split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: not a path predictor ({why:.200})") from None
    return StoredPredictor(net.to(device).eval(), record, hashlib.sha256(data).hexdigest(), len(data))


def _own(net: PathPredictor) -> dict[str, torch.Tensor]:
    """The net's weights by name, each once: both stacks share the embedding."""
    return {name: weight for name, weight in net.state_dict().items() if not name.endswith("embed_tokens.weight")}


def device_named(name: str) -> str:
    """``cuda`` or ``cpu`` for ``auto``, else the name."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
