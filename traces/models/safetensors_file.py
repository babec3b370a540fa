"""A model from the headers of safetensors files and the config.json beside them: the bytes of every tensor."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.text import utf8
from traces.models.configs import read_config
from traces.models.spec import ModelSpec
from traces.models.tensor_files import Sizes, Tensor, placed
from traces.models.weights import Part

_MOST_HEADER = 2**28
_FORMS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E4M3": "fp8"}
_PACKED = {"awq": "int4-awq", "gptq": "int4-gptq", "mxfp4": "mxfp4"}
_NOT_RUN = ("mtp.", "visual.", "vision_tower.", "model.visual.", "model.vision_tower.")
"""Where tensors begin that no token of a text passes."""
_CLOSE = 0.01


def read_safetensors(path: Path) -> ModelSpec:
    """The model of an index, ``*.safetensors.index.json``, or of a single file.

    Where the index's files are not there, sizes are those that config.json gives, if they agree with the index's total
    within 1 %. Raises InputError for what is no such file, or no model that is known, OSError.
    """
    config = _json(path.with_name("config.json"))
    if path.suffix == ".safetensors":
        return _of_headers(path, config, [path])
    index = _json(path)
    names = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(names, Mapping) or not names:
        raise InputError(f"{path}: weight_map is missing; expected the index of a model in several files")
    files = [path.with_name(name) for name in sorted({str(name) for name in names.values()})]
    if all(file.is_file() for file in files):
        return _of_headers(path, config, files)
    spec = read_config(config, str(path.with_name("config.json")))
    total, own = (index.get("metadata") or {}).get("total_size"), spec.resident_bytes + spec.all_expert_bytes
    if not isinstance(total, int) or abs(own - total) > _CLOSE * total:
        raise InputError(
            f"{path}: total_size is {total!r}, and by config.json the model has {own:,} bytes; expected the files that "
            f"it lists beside it, such as {files[0].name}"
        )
    return replace(spec, source=f"{path.name}, and sizes by config.json")


def _json(path: Path) -> Any:
    try:
        return json.loads(utf8(path.read_bytes(), str(path)), parse_constant=str)
    except (ValueError, RecursionError) as wrong:
        raise InputError(f"{path}: not valid JSON: {wrong}") from None


def _of_headers(path: Path, config: Any, files: list[Path]) -> ModelSpec:
    """Sizes by the headers of ``files``, all else by ``config``."""
    beside = str(path.with_name("config.json"))
    spec, method = read_config(_unquantised(config), beside), _method(config)
    if spec.encoder_layers:
        raise InputError(f"{path}: a model of two stacks; expected its config.json, or a model of one")
    sizes, forms = Sizes(), Counter[str]()
    for tensor in (tensor for file in files for tensor in _tensors(file)):
        part, layer = placed(tensor.name, _part_of)
        run = layer < spec.layers and not tensor.name.startswith(_NOT_RUN)
        sizes.add(tensor, part if run else None, layer)
        if part == "experts" and run:
            forms[tensor.form] += tensor.size
    if missing := [layer for layer in spec.moe_layers if not sizes.layers["experts", layer]]:
        raise InputError(f"{path}: no expert of layer {missing[0]} is in its files; expected the whole model")
    ((most, _),) = forms.most_common(1)
    sizes.forms[method or most] = spec.routed_layers * spec.experts * spec.expert_parameters
    spec = replace(spec, tied=sizes.head is None)
    stored = sizes.stored(spec, path.name)
    return replace(spec, expert_bytes=sizes.expert_bytes(spec), stored=stored, source=f"the headers of {path.name}")


def _unquantised(config: Any) -> Any:
    """``config`` without what it says of formats, which the headers say."""
    if not isinstance(config, Mapping):
        return config
    inner = config.get("text_config")
    nested = {"text_config": _unquantised(inner)} if isinstance(inner, Mapping) else {}
    return {**config, "quantization_config": None, **nested}


def _method(config: Mapping[str, Any]) -> str | None:
    """The format of experts that are packed, whose numbers' own type does not tell it."""
    quantised = config.get("quantization_config")
    name = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    return _PACKED.get(str(name))


def _tensors(file: Path) -> Iterator[Tensor]:
    """What the header of a file lists: a length of 8 bytes, and so many bytes of JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= _MOST_HEADER:
            raise InputError(f"{file}: a header of {length:,} bytes; expected a safetensors file")
        text = stream.read(length)
    try:
        entries = json.loads(text)
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                form = _FORMS.get(entry["dtype"], entry["dtype"].lower())
                yield Tensor(name, tuple(entry["shape"][::-1]), form, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as wrong:
        raise InputError(f"{file}: not a safetensors file whose header can be read: {wrong!r:.80}") from None


def _part_of(name: str) -> Part:
    if ".experts." in f".{name}":
        return "experts"
    if re.search(r"(^|\.)(router|gate)\.", name):
        return "routers"
    return "ffn" if name.startswith(("mlp.", "block_sparse_moe.", "feed_forward.")) else "attention"
