"""A model from the header of a GGUF file: its layers, experts, and the bytes and format of every tensor.

The package ``gguf`` reads the header; weights are never read, and need not be there. Of a file in several parts all
must be there.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from ground.errors import InputError
from traces.models.attention import Attention
from traces.models.spec import ModelSpec
from traces.models.tensor_files import Sizes, Tensor, placed
from traces.models.weights import Part

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NEEDS = "the package gguf, which reads the file's header (pip install gguf)"


def read_gguf(path: Path) -> ModelSpec:
    """The model of a file. Raises InputError for no GGUF file of a Mixture-of-Experts model, OSError."""
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: Path, state: int) -> ModelSpec:
    fields: dict[str, Any] = {}
    tensors: list[Tensor] = []
    for part in _parts(path):
        own, found = _header(part)
        fields = fields or own
        tensors += found
    return _Model(path, fields, tensors).spec()


def _parts(path: Path) -> list[Path]:
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    parts = [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise InputError(f"{path}: {missing[0]} is not beside it; expected all {count} parts, or their headers")
    return parts


def _header(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and tensors. A header is small: the file may end after it."""
    try:
        import gguf
    except ImportError as absent:
        raise InputError(f"{path}: {absent}; expected {_NEEDS}") from None
    found: list[Tensor] = []

    class Header(gguf.GGUFReader):
        """What precedes the weights."""

        def _build_tensors(self, start_offs: int, fields: Sequence[Any]) -> None:
            for each in fields:
                _, name, _, shape, kind, _ = each.parts
                form, count = gguf.GGMLQuantizationType(int(kind[0])), prod(shape.tolist())
                weights, size = gguf.GGML_QUANT_SIZES[form]
                text = bytes(name).decode()
                found.append(Tensor(text, tuple(shape.tolist()), form.name.lower(), count // weights * size))

    try:
        reader = Header(path)
        fields = {name: _value(field) for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as wrong:
        raise InputError(f"{path}: not a GGUF file whose header can be read: {wrong}") from None
    return fields, found


def _value(field: Any) -> Any:
    """What a field of metadata holds: a text, a number, or a list of these."""
    kinds = [kind.name for kind in field.types]
    if kinds and kinds[-1] == "STRING":
        texts = [bytes(field.parts[at]).decode("utf-8", "replace") for at in field.data]
        return texts if kinds[0] == "ARRAY" else texts[0]
    numbers = [field.parts[at].tolist()[0] for at in field.data]
    return numbers if kinds and kinds[0] == "ARRAY" else numbers[0] if numbers else None


def _part_of(name: str) -> Part:
    if "_exps" in name:
        return "experts"
    if name.startswith(("ffn_gate_inp", "exp_probs_b")):
        return "routers"
    return "ffn" if name.startswith("ffn_") else "attention"


class _Model:
    """What the header says, made a `ModelSpec`."""

    def __init__(self, path: Path, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        self.path, self.fields = path, fields
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.family = str(fields.get("general.architecture", ""))

    def fail(self, found: str, expected: str) -> InputError:
        """The error for a file that does not say what is needed."""
        return InputError(f"{self.path}: {found}; expected {expected}")

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata, the largest where there is one a layer."""
        value = self.fields.get(f"{self.family}.{key}", default)
        if isinstance(value, list) and value:
            value = max(value)
        if type(value) is not int or value < 0:
            raise self.fail(f"{self.family}.{key} is {value!r:.60}", "a whole number")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """The lengths of a tensor, columns first. Raises InputError if it is not there."""
        if name not in self.tensors:
            raise self.fail(f"there is no tensor {name}", "one in a file of a Mixture-of-Experts model")
        return self.tensors[name].shape

    def spec(self) -> ModelSpec:
        """The model."""
        layers = self.number("block_count") - self.number("nextn_predict_layers", 0)
        routed = tuple(n for n in range(layers) if f"blk.{n}.ffn_down_exps.weight" in self.tensors)
        if not routed:
            raise self.fail("no layer has a tensor ffn_down_exps", "a Mixture-of-Experts model with merged experts")
        hidden, vocab = self.shape("token_embd.weight")[:2]
        width, _, experts = self.shape(f"blk.{routed[0]}.ffn_down_exps.weight")
        dense = next((n for n in range(layers) if n not in routed), None)
        attention, other, others = self._attention(layers, hidden)
        gated = any(f"blk.{routed[0]}.{name}.weight" in self.tensors for name in ("ffn_gate_exps", "ffn_gate_up_exps"))
        sizes = self._sizes(layers)
        plain = ModelSpec(
            name=str(self.fields.get("general.name") or self.path.stem),
            layers=layers,
            moe_layers=routed,
            hidden=hidden,
            experts=experts,
            top_k=self.number("expert_used_count"),
            expert_ffn=width,
            expert_bytes=(1,) * len(routed),
            attention=attention,
            windows=self._windows(layers),
            vocab=vocab,
            tied=sizes.head is None,
            shared_ffn=self._width(routed[0], ("ffn_down_shexp", "ffn_down")),
            dense_ffn=0 if dense is None else self._width(dense, ("ffn_down",)),
            expert_matrices=3 if gated else 2,
            other_attention=other,
            other_layers=others,
            source=f"the header of {self.path.name}",
        )
        return replace(plain, expert_bytes=sizes.expert_bytes(plain), stored=sizes.stored(plain, self.path.name))

    def _width(self, layer: int, names: Sequence[str]) -> int:
        """The inner size of an FFN; 0 if the layer has none."""
        found = (self.tensors.get(f"blk.{layer}.{name}.weight") for name in names)
        return next((tensor.shape[0] for tensor in found if tensor is not None), 0)

    def _sizes(self, layers: int) -> Sizes:
        sizes = Sizes()
        for tensor in self.tensors.values():
            part, layer = placed(tensor.name, _part_of)
            sizes.add(tensor, part if layer < layers else None, layer)
            if part == "experts" and layer < layers and tensor.name.endswith(".weight"):
                sizes.forms[tensor.form] += prod(tensor.shape)
        return sizes

    def _windows(self, layers: int) -> tuple[int, ...]:
        """What attention reaches: in all layers but those that the pattern leaves out, or every second one."""
        window = self.number("attention.sliding_window", 0)
        pattern = self.fields.get(f"{self.family}.attention.sliding_window_pattern")
        if not isinstance(pattern, list) or len(pattern) != layers:
            pattern = [self.family == "gpt-oss" and n % 2 == 0 for n in range(layers)]
        return tuple(window if short else 0 for short in pattern)

    def _attention(self, layers: int, hidden: int) -> tuple[Attention, Attention | None, tuple[int, ...]]:
        """Of most layers, of the others, and which these are."""
        if self.number("attention.kv_lora_rank", 0):
            return self._latent(hidden), None, ()
        linear = tuple(n for n in range(layers) if f"blk.{n}.ssm_out.weight" in self.tensors)
        kinds = [None if n in linear else self._heads(n) for n in range(layers)]
        counted = Counter(kind for kind in kinds if kind is not None)
        if not counted:
            raise self.fail("no layer has a tensor attn_k", "attention whose keys are cached")
        usual = counted.most_common(1)[0][0] if linear else kinds[-1]
        assert usual is not None
        if linear:
            return self._grouped(hidden, usual), self._linear(hidden, linear[0]), linear
        rare = tuple(n for n, kind in enumerate(kinds) if kind != usual)
        other = kinds[rare[0]] if rare else None
        return self._grouped(hidden, usual), self._grouped(hidden, other) if other else None, rare

    def _heads(self, layer: int) -> tuple[int, int, int, bool, bool] | None:
        """Query heads, key heads, the width of one, whether queries have a gate, and whether values have a matrix."""
        key = self.tensors.get(f"blk.{layer}.attn_k.weight")
        if key is None:
            return None
        heads = self.fields.get(f"{self.family}.attention.head_count")
        heads = heads[layer] if isinstance(heads, list) else self.number("attention.head_count")
        queries, into = self.shape(f"blk.{layer}.attn_q.weight")[1], self.shape(f"blk.{layer}.attn_output.weight")[0]
        width = into // heads
        values = f"blk.{layer}.attn_v.weight" in self.tensors
        return heads, key.shape[1] // width, width, queries == 2 * into, values

    def _grouped(self, hidden: int, kind: tuple[int, int, int, bool, bool]) -> Attention:
        heads, keys, width, gated, values = kind
        whole = Attention.grouped(hidden, heads, keys, width, gated)
        if values:
            return whole
        return replace(whole, matrices=tuple(matrix for matrix in whole.matrices if matrix.role != "attn_v"))

    def _latent(self, hidden: int) -> Attention:
        rope = self.number("rope.dimension_count")
        key = self.number("attention.key_length_mla", self.number("attention.key_length"))
        return Attention.latent(
            hidden,
            heads=self.number("attention.head_count"),
            q_rank=self.number("attention.q_lora_rank", 0),
            kv_rank=self.number("attention.kv_lora_rank"),
            nope=key - rope,
            rope=rope,
            value=self.number("attention.value_length_mla", self.number("attention.value_length")),
        )

    def _linear(self, hidden: int, layer: int) -> Attention:
        """A gated delta net, or Mamba-2, which has one matrix for all that goes in."""
        heads, inner = self.number("ssm.time_step_rank"), self.number("ssm.inner_size")
        groups, state, kernel = (self.number(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel"))
        if f"blk.{layer}.ssm_in.weight" in self.tensors:
            return Attention.mamba2(hidden, heads, inner // heads, groups, state, kernel)
        return Attention.delta(hidden, groups, state, heads, inner // heads, kernel)
