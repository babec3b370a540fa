"""The model that a name, a config file or a trace stands for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.text import utf8
from traces.layer_numbers import listed
from traces.models.configs import read_config
from traces.models.released import RELEASED
from traces.models.spec import ModelSpec


def builtin_models() -> tuple[str, ...]:
    """Names of the models that are built in."""
    return tuple(RELEASED)


@cache
def builtin(name: str) -> ModelSpec | None:
    """The built-in model of this name, in any case of letters; None if there is none."""
    key = name.lower()
    return read_config(RELEASED[key], key) if key in RELEASED else None


def builtin_decoder(name: str) -> ModelSpec | None:
    """The same, but None for an encoder-decoder model, whose routes may be of either stack."""
    spec = builtin(name)
    return None if spec is None or spec.encoder_layers else spec


def model_spec(name_or_path: str) -> ModelSpec:
    """A built-in model by name, or a model from a ``config.json`` (or a folder that holds one), a GGUF file, or the
    index of safetensors files.

    Raises InputError for an unknown name or a file that is not a usable one, OSError if it cannot be read.
    """
    spec, path = builtin(name_or_path), Path(name_or_path)
    if spec is not None:
        return spec
    if path.suffix == ".gguf":
        from traces.models.gguf_file import read_gguf

        return read_gguf(path)
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        from traces.models.safetensors_file import read_safetensors

        return read_safetensors(path)
    return read_config(*stored_config(name_or_path))


def stored_config(name_or_path: str) -> tuple[Any, str]:
    """What a ``config.json`` (or that of a folder) holds, infinities as words, and its path; raises as `model_spec`."""
    path = Path(name_or_path)
    if name_or_path and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"model {name_or_path!r}: the folder holds no config.json; expected one")
    if path.suffix != ".json" and not path.is_file():
        raise InputError(f"model {name_or_path!r} is unknown; expected a config.json or one of {', '.join(RELEASED)}")
    text = utf8(path.read_bytes(), str(path))
    try:
        return json.loads(text, parse_constant=str), str(path)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); expected a Hugging Face config.json") from error


def resolve_model(model: Mapping[str, Any] | str | Path, layers: Sequence[int] | np.ndarray | None = None) -> ModelSpec:
    """The model that a trace names in ``meta["model"]``, or that a person names on the command line.

    A mapping holds ``name``, ``experts``, ``top_k`` and, optionally, ``expert_bytes`` (one a routed layer),
    ``config`` (which holds even for a built-in name) and ``part`` ("encoder" or "decoder" of an encoder-decoder model).
    ``top_k`` and ``expert_bytes`` override the model's own; ``experts`` must agree with it. ``layers`` are the trace's
    routed layers: others than the model's are an InputError, except that an encoder-decoder model is reduced to its
    decoder (or ``part``) where these are its.
    """
    if isinstance(model, str | Path):
        return _fit_routed_layers(model_spec(str(model)), layers, None)
    name = model.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"meta: model.name is {name!r}; expected the name of a model")
    spec = builtin(name)
    if model.get("config") is not None:
        own = replace(read_config(model["config"], f"meta: model.config of {name}"), name=name)
        if spec is None or replace(own, name=spec.name, source=spec.source) != spec:
            spec = own  # a checkpoint may bear a built-in model's name and have other sizes
    if spec is None:
        raise InputError(
            f"meta: model.name {name!r} is unknown and there is no model.config; expected one of {', '.join(RELEASED)}"
        )
    return as_traced(_fit_routed_layers(spec, layers, model.get("part")), model)


def _fit_routed_layers(spec: ModelSpec, layers: Sequence[int] | np.ndarray | None, part: str | None) -> ModelSpec:
    """The whole model or one of its stacks, whichever has these routed ``layers``."""
    if part is not None:
        spec = spec.stack(part)
    if layers is None:
        return spec
    recorded = tuple(map(int, layers))
    for candidate in (spec, *([spec.stack("decoder")] if spec.encoder_layers else [])):
        if recorded == candidate.moe_layers:
            return candidate
    if len(recorded) != spec.routed_layers:
        raise InputError(f"{spec.name}: the trace has {len(recorded)} routed layers; expected {spec.routed_layers}")
    raise InputError(
        f"{spec.name}: the trace's routed layers are {listed(recorded)}; expected {listed(spec.moe_layers)}"
    )


def as_traced(spec: ModelSpec, model: Mapping[str, Any]) -> ModelSpec:
    """``spec`` with what the trace says of it, after checking that the two do not contradict each other."""
    experts = model.get("experts", spec.experts)
    if type(experts) is not int or experts != spec.experts:
        raise InputError(f"meta: model.experts is {experts!r}; {spec.name} has {spec.experts}")
    top_k = model.get("top_k", spec.top_k)
    if type(top_k) is not int or not 1 <= top_k <= spec.experts:
        raise InputError(f"meta: model.top_k is {top_k!r}; expected a whole number from 1 to {spec.experts}")
    sizes = model.get("expert_bytes")
    if sizes is None:
        return replace(spec, top_k=top_k)
    if not isinstance(sizes, list | tuple) or len(sizes) != spec.routed_layers:
        found = f"{len(sizes)} values" if isinstance(sizes, list | tuple) else repr(sizes)
        raise InputError(
            f"meta: model.expert_bytes is {found}; expected a list of {spec.routed_layers}, one a routed layer"
        )
    for row, size in enumerate(sizes):
        if type(size) is not int or size < 1:
            raise InputError(f"meta: model.expert_bytes[{row}] is {size!r}; expected a whole number of bytes above 0")
    return replace(spec, top_k=top_k, expert_bytes=tuple(sizes))
