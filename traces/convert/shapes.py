"""Which model a routing record is of: what its shape, the file and a person say, and whether they agree."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.arrays import integers, shown
from traces.layer_numbers import increasing, listed, parse_layers
from traces.models.configs import read_config
from traces.models.known import builtin, builtin_decoder, builtin_models, stored_config
from traces.models.spec import ModelSpec


@dataclass(frozen=True)
class RecordedModel:
    """The model of a record: its name and, where they are known, its dimensions and the config file they are from."""

    name: str
    spec: ModelSpec | None = None
    config: dict[str, Any] | None = None

    def meta(self, experts: int, top_k: int) -> dict[str, Any]:
        """What ``meta["model"]`` says of it."""
        said = {"name": self.name, "experts": experts, "top_k": top_k}
        return said if self.config is None else said | {"config": self.config}


@dataclass(frozen=True)
class Given:
    """What a person says of a record; None leaves it to the file.

    ``model`` is a built-in name in any case, the path of a config.json or of its folder, or any other name.
    """

    model: str | None = None
    experts: int | None = None
    layers: str | None = None
    domain: str | None = None
    source: str | None = None
    licence: str | None = None

    @property
    def stated(self) -> dict[str, Any]:
        """All of it by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def recorded(self) -> RecordedModel | None:
        """The model that the person names; raises InputError for a config.json that cannot be read."""
        if self.model is None:
            return None
        path = Path(self.model)
        if (spec := builtin_decoder(self.model)) is not None:
            return RecordedModel(spec.name, spec)
        if path.suffix != ".json" and not path.is_file() and not (path / "config.json").is_file():
            return RecordedModel(self.model)
        try:
            config, where = stored_config(self.model)
        except OSError as error:
            raise InputError(f"--model {shown(path)}: cannot be read: {error.strerror}") from None
        file = Path(where).resolve()
        name = file.parent.name if file.name == "config.json" else file.stem
        if builtin(name) is not None:  # whose own configuration replay would take
            name = f"{name} (config.json)"
        return RecordedModel(shown(name), read_config(config, shown(where)), config)


def recognised(
    given: Given, layers: int, top_k: int | None = None, experts: int | None = None,
    among: Iterable[str] = builtin_models(),
) -> RecordedModel:  # fmt: skip
    """The model that the person names or the one known model with this many routed layers, experts a token and a layer.

    Raises InputError if none or several fit.
    """
    if given.recorded is not None:
        return given.recorded
    fits = [
        spec
        for spec in map(builtin_decoder, among)
        if spec is not None
        and spec.routed_layers == layers
        and top_k in (None, spec.top_k)
        and experts in (None, spec.experts)
    ]
    if len(fits) != 1:
        size = f"{layers} layers" + (f" x {experts} experts" if experts else "") + (f", top-{top_k}" if top_k else "")
        which = f"fits {' and '.join(spec.name for spec in fits)}" if fits else "is of no known model"
        raise InputError(
            f"model: a record of {size} {which}, expected --model NAME or, of a model that is not built in, its "
            "config.json, which replay needs"
        )
    return RecordedModel(fits[0].name, fits[0])


def one_number(name: str, array: np.ndarray) -> int:
    """The whole number that an array of one entry holds; raises InputError."""
    if array.size != 1 or array.dtype.kind not in "iu":
        raise InputError(f"array {name!r}: {array.dtype} of shape {array.shape}, expected one whole number")
    return int(array.reshape(-1)[0])


def resolve_experts(model: RecordedModel, given: int | None, stated: int | None) -> int:
    """E: of --experts, the record and the known model, which must agree; raises InputError."""
    said = {}
    if given is not None:
        said["--experts"] = given
    if stated is not None:
        said["the record"] = stated
    if model.spec is not None:
        said[model.name] = model.spec.experts
    if not said:
        raise InputError(
            f"experts: the file does not say how many {model.name} has, expected --experts N, or its config.json as "
            "--model"
        )
    if len(set(said.values())) > 1:
        raise InputError(f"experts: {', '.join(f'{who} says {n}' for who, n in said.items())}, expected one number")
    experts = next(iter(said.values()))
    if not 1 <= experts <= 2**15:
        raise InputError(f"experts: {experts}, expected 1 to {2**15}")
    return experts


def resolve_layers(model: RecordedModel, recorded: int, given: str | None, stored: np.ndarray | None) -> list[int]:
    """Model layer number of each of ``recorded`` layers.

    A model of which some layers are dense, or which is not known, must be told: a record's row number is not a layer
    number there. Raises InputError if they are missing, contradict each other or do not fit the model.
    """
    layers = None if given is None else parse_layers(given)
    if stored is not None:
        ids = increasing(integers(stored.reshape(-1), np.int32, "array 'layer_ids'").tolist(), "array 'layer_ids'")
        if layers is not None and layers != ids:
            raise InputError(f"layers: the record says {listed(ids)}, but --layers says {given}")
        layers = ids
    if model.spec is None:
        if layers is None:
            raise InputError(
                f"layers: {model.name} is not known and the file has no layer_ids, expected its config.json as "
                f"--model, which replay needs too, or numbers such as --layers 0-{recorded - 1}"
            )
        return layers
    routed = list(model.spec.moe_layers)
    if layers is None and len(routed) < model.spec.layers:
        raise InputError(
            f"layers: {model.name} has dense layers ({model.spec.layers - len(routed)}) and the file has no layer_ids, "
            f"expected them or --layers {listed(routed, len(routed)).replace(' ', '')}"
        )
    if layers is None and len(routed) != recorded:
        raise InputError(f"layers: {recorded} recorded, expected the {len(routed)} routed layers of {model.name}")
    if layers not in (None, routed):
        raise InputError(
            f"layers: {listed(layers or [])}, expected all {len(routed)} routed layers of {model.name}, "
            f"{listed(routed)}"
        )
    return routed


def unlike_model(model: RecordedModel, top_k: int) -> list[str]:
    """A note where a record's top_k is not the model's own."""
    if model.spec is None or model.spec.top_k == top_k:
        return []
    return [f"run with {top_k} experts a token; {model.name}'s own config says {model.spec.top_k}"]
