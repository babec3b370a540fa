"""Which model, layers and slots the requests of a record have, told from its first ones and held against the others."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ground.errors import InputError
from traces.convert.request import Record, Request
from traces.convert.shapes import (
    Given,
    RecordedModel,
    recognised,
    resolve_experts,
    resolve_layers,
    unlike_model,
)
from traces.layer_numbers import listed
from traces.models.known import builtin_decoder, builtin_models

_FILLERS = (-1, 0, 255)
_ROWS = 32  # in memory at once of what stands beside routes


@dataclass(frozen=True)
class RecordShape:
    """What a record's routes are of: the model, E experts, the routed ``layers``, and which of the stored rows' layers
    and slots are theirs.
    """

    model: RecordedModel
    experts: int
    layers: list[int]
    stored: tuple[int, int]  # layers and slots of the record
    routed_at: np.ndarray | None  # (L,) places of routed layers in the record; None: all
    constant: tuple[int, ...]  # ids that the last slots hold in every route: shared experts

    @property
    def slots(self) -> int:
        """Routed experts of a token."""
        return self.stored[1] - len(self.constant)

    def routed(self, request: Request) -> np.ndarray:
        """(n, L, k) routes of routed layers and experts alone; raises InputError if the request is of another shape."""
        routes = request.routes
        if routes.ndim != 3 or routes.shape[1:] != self.stored or routes.dtype.kind not in "iu" or not len(routes):
            raise InputError(
                f"{request.where}: {routes.dtype} of shape {routes.shape}, expected integers (rows, {self.stored[0]}, "
                f"{self.stored[1]}) as in the requests before"
            )
        if self.routed_at is not None:
            others = np.setdiff1d(np.arange(self.stored[0]), self.routed_at)
            if not np.isin(routes[:, others], _FILLERS).all():
                raise InputError(f"{request.where}: routes in layers {listed(others.tolist())}, which are not routed")
            routes = routes[:, self.routed_at]
        if self.constant:
            real = ~(routes == routes[:, :1, :1]).all(axis=(1, 2))
            if (routes[real][:, :, self.slots :] != self.constant).any():
                raise InputError(f"{request.where}: the last slots vary, which held {self.constant} in all rows before")
            routes = routes[:, :, : self.slots]
        return routes

    def beside(self, name: str, request: Request, routed: np.ndarray, first: int, end: int) -> Iterator[np.ndarray]:
        """What stands beside rows ``first`` to ``end`` - 1, for routed layers alone and as it is stored, part by part.

        ``routed`` is what `routed` gives of the request. Raises InputError.
        """
        whole = request.rows[name]
        sizes = {"gates": (self.stored[1],), "probs": (self.experts,)}.get(name, whole.shape[2:])
        wanted = (len(request.routes), self.stored[0], *sizes)
        if whole.dtype.kind != "f" or whole.shape != wanted:
            raise InputError(f"{request.where}: {name} {whole.dtype} of shape {whole.shape}, expected floats {wanted}")
        for start in range(first, end, _ROWS):
            part = slice(start, min(start + _ROWS, end))
            yield self._part(name, whole[part], routed[part], request.where)

    def _part(self, name: str, array: np.ndarray, routed: np.ndarray, where: str) -> np.ndarray:
        """Some rows of the same."""
        if self.routed_at is not None:
            array = array[:, self.routed_at]
        if name != "states" and not (np.isfinite(array).all() and np.abs(array).max(initial=0) <= np.finfo("f2").max):
            raise InputError(f"{where}: {name} hold a value that is not finite, or too large to be stored")
        if name == "probs":
            if array.min(initial=0) < 0 or array.max(initial=0) > 1.001:
                raise InputError(f"{where}: probabilities from {array.min()} to {array.max()}, expected 0 to 1")
            return np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
        if name == "gates":
            array = np.where(routed < 0, 0, array[:, :, : self.slots])
        return array


def recorded_shape(record: Record, given: Given, head: list[Request], notes: list[str]) -> RecordShape:
    """The shape of a record's requests, told from the ``head``; raises InputError."""
    first = head[0]
    if first.routes.ndim != 3 or not first.routes.size or first.routes.dtype.kind not in "iu":
        shape = f"{first.routes.dtype} of shape {first.routes.shape}"
        raise InputError(f"{first.where}: {shape}, expected integers (rows, layers, k)")
    for request in head:
        routes = request.routes
        if routes.shape[1:] != first.routes.shape[1:] or routes.dtype.kind not in "iu":
            wanted = f"integers (rows, {', '.join(map(str, first.routes.shape[1:]))}) as in {first.where}"
            raise InputError(f"{request.where}: {routes.dtype} of shape {routes.shape}, expected {wanted}")
    stored = first.routes if len(head) == 1 else np.concatenate([request.routes for request in head])
    recorded, slots = int(stored.shape[1]), int(stored.shape[2])
    if record.buffers and (stored == stored[0, 0, 0]).all() and (value := int(stored[0, 0, 0])) in _nothing(stored):
        raise InputError(
            f"{first.where}: every id of {len(stored)} rows is {value} (nothing was captured), expected routes"
        )
    last = _constant_slots(stored) if record.buffers else []
    asked = given if given.model or record.model is None else Given(**given.stated | {"model": record.model})
    model = recognised(
        asked, recorded, None if record.reduced else slots - len(last), given.experts or record.experts,
        record.among or builtin_models(),
    )  # fmt: skip
    experts = resolve_experts(model, given.experts, record.experts)
    # Ids from E on are of shared experts; a constant below E is left to be judged as any other route.
    while last and 0 <= last[0] < experts and last[0] != 2 ** (8 * stored.dtype.itemsize) - 1:
        last.pop(0)
    if last:
        notes.append(
            f"the last {len(last)} slots hold {', '.join(map(str, last))} in every route, as shared experts that an "
            f"engine runs beside the routed ones: left out, top-{slots - len(last)} stays"
        )
    layers, routed_at = _routed_layers(record, given, model, stored, first.where, notes)
    notes += unlike_model(model, slots - len(last))
    return RecordShape(model, experts, layers, (recorded, slots), routed_at, tuple(last))


def _nothing(stored: np.ndarray) -> tuple[int, ...]:
    """Values that mean nothing where all ids of several hold them."""
    return (*_FILLERS, 2 ** (8 * stored.dtype.itemsize) - 1) if stored[0].size > 1 else (-1,)


def _constant_slots(stored: np.ndarray) -> list[int]:
    """The ids of the last slots of (T, L, K) that hold one id each in every real row: none, or above all other ids.

    At least one slot is left.
    """
    real = stored[~(stored == stored[:, :1, :1]).all(axis=(1, 2))]
    real = real[:, ~np.isin(real, _FILLERS).all(axis=(0, 2))]  # without dense layers, which hold filler
    none = int(np.iinfo(stored.dtype).max) if stored.dtype.kind == "u" else -1
    last: list[int] = []
    while real.size and len(last) < stored.shape[2] - 1:
        slot = real[:, :, stored.shape[2] - 1 - len(last)]
        value = int(slot[0, 0])
        others = real[:, :, : stored.shape[2] - 1 - len(last)]
        if not (slot == value).all() or (value != none and value <= int(others.max())):
            break
        last.insert(0, value)
    return last


def _routed_layers(
    record: Record, given: Given, model: RecordedModel, stored: np.ndarray, where: str, notes: list[str]
) -> tuple[list[int], np.ndarray | None]:
    """The routed layers' numbers, and where they stand among the recorded ones if these are all of the model's."""
    recorded, spec = stored.shape[1], model.spec
    sizes = () if spec is None else (spec.routed_layers, spec.layers)
    if sizes and recorded not in sizes and len(stored) in sizes:
        raise InputError(
            f"{where}: shape {stored.shape}, expected (rows, {sizes[0]} layers, k); the first two axes look swapped"
        )
    if sizes and recorded == 1 < sizes[0]:
        raise InputError(f"{where}: one layer only, expected the {sizes[0]} of {model.name}")
    stated = record.layers
    if sizes and stated is None and given.layers is None and sizes[0] < sizes[1] == recorded and spec is not None:
        stated = np.array(spec.moe_layers)  # a buffer of all layers, whose dense ones are looked at below
    layers = resolve_layers(model, recorded, given.layers, stated)
    routed_at = None
    if len(layers) != recorded:
        # A buffer of all model layers: the dense ones hold filler, and only those may be left out.
        others = np.setdiff1d(np.arange(recorded), layers)
        if layers[-1] >= recorded or not len(others) or not np.isin(stored[:, others], _FILLERS).all():
            raise InputError(f"{where}: {recorded} layers, expected {len(layers)}, as many as numbers")
        notes.append(
            f"layers {listed(others.tolist())} of the record are not routed and hold filler; they were left out"
        )
        routed_at = np.array(layers)
    if recorded == 1:
        notes.append("one layer only: a real model has more; was the rest of the capture lost?")
    return layers, routed_at


def check_not_flat(stored: np.ndarray, given: Given) -> None:
    """Refuse routes whose layers and slots stand in one axis, or all of them in one, as some engines hand them out."""
    named = None if given.recorded is None else given.recorded.spec
    specs = [named] if named is not None else [spec for name in builtin_models() if (spec := builtin_decoder(name))]
    if stored.ndim == 1 and stored.size:
        wanted = f"(rows, {named.routed_layers}, {named.top_k})" if named is not None else "(rows, layers, k)"
        raise InputError(
            f"array 'routed_experts': a flat buffer of {stored.size} ids, expected {wanted}: reshape it, rows first"
        )
    if stored.ndim == 2 and stored.shape in {(spec.routed_layers, spec.experts) for spec in specs}:
        raise InputError(
            f"array 'routed_experts': shape {stored.shape}, layers x experts, so it is how often experts were taken, "
            "without tokens: there is nothing to replay; expected the experts of each token, (rows, layers, k)"
        )
    shapes = {(spec.routed_layers, spec.top_k) for spec in specs if spec.top_k > 1}
    for layers, slots in sorted(shapes) if stored.ndim == 2 else ():
        if stored.shape[1] == layers * slots and (given.recorded is None) == (named is None):
            raise InputError(
                f"array 'routed_experts': shape {stored.shape}, {layers} layers x {slots} slots in one axis, it seems, "
                f"expected (rows, layers, k): reshape it to ({len(stored)}, {layers}, {slots})"
            )
