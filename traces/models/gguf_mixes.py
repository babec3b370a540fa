"""The mixes of formats that llama.cpp's presets give the matrices of a model.

``llama-quantize`` gives most matrices the format that the preset is named by, and some another one, by what they do and
how deep they lie. These are the rules of ``src/llama-quant.cpp`` of ggml-org/llama.cpp at commit 007dbbf3, for files
made without an importance matrix, but for the presets below iq4 that require one.
"""

from dataclasses import dataclass
from functools import cached_property

from traces.models.blocks import BLOCKS
from traces.models.spec import ModelSpec
from traces.models.weights import Weight

BASE = {
    "bf16": "bf16", "f16": "f16", "f32": "f32", "q4_0": "q4_0", "q4_1": "q4_1", "q5_0": "q5_0", "q5_1": "q5_1",
    "q8_0": "q8_0", "q2_k_s": "q2_k", "q2_k": "q2_k", "q3_k_s": "q3_k", "q3_k_m": "q3_k", "q3_k_l": "q3_k",
    "q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k", "q6_k": "q6_k",
    "iq2_xxs": "iq2_xxs", "iq2_xs": "iq2_xs", "iq2_s": "iq2_xs", "iq2_m": "iq2_s", "iq3_xxs": "iq3_xxs",
    "iq3_xs": "iq3_s", "iq3_s": "iq3_s", "iq3_m": "iq3_s", "iq4_nl": "iq4_nl", "iq4_xs": "iq4_xs", "mxfp4_moe": "mxfp4",
}  # fmt: skip
"""The presets, and the format that each gives where no rule says another."""

_FALLBACK = {
    **dict.fromkeys(("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_k", "q3_k"), "q4_0"), "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip
"""What takes the place of a format whose blocks of 256 do not fill a row."""
_UNQUANTISED = ("ssm_conv1d", "ffn_gate_inp")
_LOW = ("iq2_xxs", "iq2_xs", "iq2_s", "iq2_m")
_OF_EIGHT = (
    "q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m", "iq4_xs",
)  # fmt: skip
_OUTPUT = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k",
           "iq2_s": "iq3_s", "iq2_m": "iq3_s"}  # fmt: skip
_EMBEDDING = {"iq2_xxs": "q2_k", "iq2_xs": "q2_k", "iq2_s": "iq3_s", "iq2_m": "iq3_s", "iq3_xxs": "iq3_s"}


@dataclass(frozen=True)
class Mix:
    """The formats of one preset in one model."""

    preset: str
    model: ModelSpec

    def form(self, weight: Weight) -> str:
        """The format of a matrix."""
        base, role = BASE[self.preset], weight.matrix.role
        if role in _UNQUANTISED:
            return "f32"
        if base in ("bf16", "f16", "f32"):
            return base
        return self._fitting(self._wanted(weight, base), weight.matrix.columns)

    def _fitting(self, form: str, columns: int) -> str:
        if columns % BLOCKS[form][0] == 0:
            return form
        other = _FALLBACK.get(form, "f16")
        return other if columns % BLOCKS[other][0] == 0 else "f16"

    def _wanted(self, weight: Weight, base: str) -> str:
        role = weight.matrix.role
        if role == "output" or (role == "token_embd" and self.model.tied):
            return self._head(base, weight.matrix.columns)
        if self.preset == "mxfp4_moe":
            return base if weight.part == "experts" else "q8_0"
        if role == "token_embd":
            return _EMBEDDING.get(self.preset, base)
        rules = {
            "attn_v": self._values, "attn_qkv": self._values, "attn_k": self._keys, "attn_q": self._queries,
            "attn_output": self._attention_output, "ffn_down": self._down, "ffn_gate": self._in, "ffn_up": self._in,
        }  # fmt: skip
        rule = rules.get(role)
        return (rule(weight.layer) if rule else None) or base

    def _head(self, base: str, columns: int) -> str:
        if self.preset == "mxfp4_moe" or columns % BLOCKS[base][0]:
            return "q8_0"
        if self.preset in (*_LOW, "iq3_xxs"):
            return "q5_k"
        return "q8_0" if base == "q8_0" else "q6_k"

    @cached_property
    def _eight(self) -> bool:
        return self.model.experts == 8

    @cached_property
    def _shared_keys(self) -> bool:
        """Whether four or more query heads share a key. Latent attention has one key for all heads, in such a file."""
        sizes = {matrix.role: matrix for matrix in self.model.attention.matrices}
        if "attn_k" not in sizes:
            return True
        return sizes["attn_output"].columns >= 4 * sizes["attn_k"].rows

    @cached_property
    def _values_before(self) -> dict[int, int]:
        """How many layers before each one have a matrix for values."""
        roles = [{matrix.role for matrix in self.model.attention_of(n).matrices} for n in range(self.model.layers)]
        having = [n for n, found in enumerate(roles) if found & {"attn_v", "attn_qkv"}]
        return {layer: before for before, layer in enumerate(having)}

    def _values(self, layer: int) -> str | None:
        if self.preset in _LOW:  # a model with routed experts has four of them or more
            return "q4_k"
        if self._eight:
            return "q8_0"
        place, count = self._values_before[layer], len(self._values_before)
        early = {"q3_k_m": ("q5_k" if place < 2 else "q4_k"), "q4_k_s": "q5_k" if place < 4 else None}
        if self.preset in early:
            return early[self.preset]
        if self.preset in ("q4_k_m", "q5_k_m"):
            return "q6_k" if _more(place, count) else None
        always = {"iq3_m": "q4_k", "q3_k_l": "q5_k"}
        shared = {"q2_k": "q4_k", "q2_k_s": "q4_k", "iq3_xxs": "q4_k", "iq3_xs": "q4_k", "iq3_s": "q4_k",
                  "iq4_nl": "q5_k", "iq4_xs": "q5_k"}  # fmt: skip
        otherwise = {"q2_k": "q3_k"}
        return always.get(self.preset) or (shared if self._shared_keys else otherwise).get(self.preset)

    def _keys(self, layer: int) -> str | None:
        if self._eight:
            return "q4_k" if self.preset in _LOW else "q8_0"
        return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.preset)

    def _queries(self, layer: int) -> str | None:
        return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(self.preset)

    def _attention_output(self, layer: int) -> str | None:
        if self._eight:
            return "q5_k" if self.preset in (*_OF_EIGHT, *_LOW) else None
        return _OUTPUT.get(self.preset)

    def _down(self, layer: int) -> str | None:
        count = self.model.layers
        first, more = layer < count // 8, _more(layer, count)
        rules: dict[str, str | None] = {
            "q2_k": "q3_k", "q3_k_l": "q5_k", "q3_k_m": "q5_k" if layer < count // 16 else "q4_k",
            "q2_k_s": "q4_k" if first else None,
            "iq4_nl": "q5_k" if first else None, "iq4_xs": "q5_k" if first else None,
            "q4_k_s": "q5_k" if first else None, "iq3_m": "q4_k" if first or (self._eight and more) else None,
            "q4_k_m": "q6_k" if more else None, "q5_k_m": "q6_k" if more else None,
            "iq2_xxs": "q2_k" if first else None, "iq2_xs": "q2_k" if first else None,
            "iq2_s": "iq3_s" if first else None, "iq2_m": "iq3_s" if first else None,
        }  # fmt: skip
        return rules.get(self.preset)

    def _in(self, layer: int) -> str | None:
        eighth = self.model.layers // 8
        middle = eighth <= layer < 7 * self.model.layers // 8
        return "iq3_xxs" if self.preset == "iq3_xs" and middle else None


def _more(place: int, count: int) -> bool:
    """Whether a layer is one of those that presets give more bits: the first eighth, the last, and each third one."""
    return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
