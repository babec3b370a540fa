"""Megatron's router traces: ``router_trace_rank{r}.jsonl``, with hidden states and logits in files beside them.

A record is one layer of one step of a rank, without requests: a step of several tokens is a prompt, or a whole text of
a training run, and steps of one token continue it. Fields are those of ``megatron.core.transformer.moe.router_trace``
(https://docs.nvidia.com/megatron-core/developer-guide/nightly/apidocs/core/core.transformer.moe.router_trace.html).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.json_values import json_values
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.sidecar import Sidecar, Softmax, Vectors
from traces.convert.source import Source, by_number

_NAME = "router_trace_rank*.jsonl"
_SIDECARS = {"states": ("hidden_states_rank{}.bin", "hs"), "logits": ("logits_rank{}.bin", "logit")}
_ROWS = 64  # whose logits are in memory at once
_STRAY = "{} records of multi-token prediction, whose layers are no part of the model's own, were passed over"


@dataclass
class _Rank:
    """The file of one rank, the source that it is or lies in, and the files beside it that have been opened."""

    source: Source
    path: Path
    beside: dict[str, Sidecar] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    def values(self) -> Iterator[Any]:
        """Its records."""
        with self.source.open(self.path) as handle:
            yield from json_values(handle)


@dataclass
class _Step:
    """One step of a rank: routes (n, L, k) of its layers in order, and (n, W) bfloat16 of each layer beside them."""

    number: int
    routes: np.ndarray
    beside: dict[str, list[np.ndarray]]

    def __len__(self) -> int:
        return len(self.routes)


def _read(sources: Sequence[Source], given: Given) -> Record:
    ranks = [_Rank(source, path) for source in sources for path in (source.inside(_NAME) or [source.path])]
    heads = [next(_steps(rank, Record(())), None) for rank in ranks]
    streams = _streams(ranks, heads)
    layers = sorted(layer for rank in streams[0] for layer in _layers(rank))
    logits = heads[0] is not None and "logits" in heads[0].beside
    record = Record(
        (), layers=np.array(layers), captured="routes as Megatron's router tracer wrote them", buffers=False,
        experts=int(heads[0].beside["logits"][0].shape[1]) if logits and heads[0] is not None else None,
        files=[rank.path.parent / name.format(_number(rank)) for rank in ranks for name, _ in _SIDECARS.values()],
    )  # fmt: skip
    record.files = [path for path in record.files if path.is_file()]
    if len(streams) < len(ranks):
        record.notes.append(f"{len(ranks)} ranks are {len(streams)} streams of tokens: pipeline stages are joined")
    if logits:
        record.notes.append("probabilities are the softmax of the logits; experts of a route stand by falling logit")
    record.requests = _all(streams, record)
    return record


def _all(streams: list[list[_Rank]], record: Record) -> Iterator[Request]:
    """The requests of all streams, and a note where their experts are not those of the largest logits."""
    routes = odd = 0
    for stream in streams:
        for number, steps in enumerate(_grouped(stream, record)):
            request, against = _request(steps, number)
            routes, odd = routes + request.routes.shape[0] * request.routes.shape[1], odd + against
            yield request
    if odd:
        record.notes.append(
            f"{odd} of {routes} routes do not hold the experts of the largest logits: a router with biases or groups, "
            "or files that do not belong together?"
        )


def _streams(ranks: list[_Rank], heads: list[_Step | None]) -> list[list[_Rank]]:
    """Files of ranks that hold the layers of the same tokens together; ranks that copy another are left out."""
    kept: list[tuple[frozenset[int], np.ndarray, _Rank]] = []
    for rank, head in zip(ranks, heads, strict=True):
        if head is None:
            continue
        layers = frozenset(_layers(rank))
        if not any(layers == other and np.array_equal(head.routes, routes) for other, routes, _ in kept):
            kept.append((layers, head.routes, rank))
    stages: dict[frozenset[int], list[_Rank]] = {}
    for layers, _, rank in kept:
        stages.setdefault(layers, []).append(rank)
    if not stages:
        raise InputError("holds no record of a step")
    parts = sorted(stages.values(), key=lambda some: min(_layers(some[0])))
    if len({len(part) for part in parts}) > 1 or sum(map(len, stages)) != len(frozenset().union(*stages)):
        raise InputError("ranks hold overlapping layers, expected all layers of each, or stages of a pipeline")
    return [list(stream) for stream in zip(*parts, strict=True)]


def _layers(rank: _Rank) -> list[int]:
    """The layers of a file's first step."""
    found: list[int] = []
    for value in rank.values():
        if value.get("block", "decoder") == "decoder":
            if value["layer"] in found:
                break
            found.append(value["layer"])
    return sorted(found)


def _grouped(stream: list[_Rank], record: Record) -> Iterator[list[_Step]]:
    """The steps of one request after another: one of several tokens, and those of one token that follow it."""
    steps: list[_Step] = []
    for step in _joined([_steps(rank, record) for rank in stream]):
        if steps and len(step) > 1:
            yield steps
            steps = []
        steps.append(step)
    if steps:
        yield steps


def _request(steps: list[_Step], number: int) -> tuple[Request, int]:
    """One request, and how many of its routes are not those of the largest logits."""
    routes = np.concatenate([step.routes for step in steps])
    beside = {name: Vectors(name, [step.beside[name] for step in steps]) for name in steps[0].beside}
    logits, odd = beside.get("logits"), 0
    for start in range(0, len(routes) if logits is not None else 0, _ROWS):
        part = slice(start, start + _ROWS)
        routes[part], other = _by_logit(routes[part], beside["logits"][part])
        odd += other
    probs = None if logits is None else Softmax(logits)
    # Steps of one token alone, or one step: which rows are of a prompt is known where a longer step comes first.
    prompt = len(steps[0]) if len(steps) > 1 and len(steps[0]) > 1 else 0
    where = f"steps {steps[0].number} to {steps[-1].number}"
    return Request(routes, prompt=prompt, probs=probs, states=beside.get("states"), where=where), odd


def _by_logit(routes: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, int]:
    """Routes (n, L, k) with the largest of their logits (n, L, E) first, and how many are not of the largest of all."""
    taken = np.take_along_axis(logits, np.maximum(routes, 0).astype(np.intp), axis=2)
    largest = np.sort(logits, axis=2)[:, :, -routes.shape[2] :]
    odd = int(((np.sort(taken, axis=2) != largest) & (routes >= 0)).any(axis=2).sum())
    order = np.argsort(np.where(routes < 0, np.inf, -taken), axis=2, kind="stable")
    return np.take_along_axis(routes, order, axis=2), odd


def _joined(streams: list[Iterator[_Step]]) -> Iterator[_Step]:
    """The steps of a pipeline's stages, layers side by side."""
    for parts in zip(*streams, strict=True):
        if len({(part.number, len(part)) for part in parts}) > 1:
            raise InputError(f"step {parts[0].number}: stages of a pipeline have other steps or tokens")
        beside = {name: [array for part in parts for array in part.beside[name]] for name in parts[0].beside}
        yield _Step(parts[0].number, np.concatenate([part.routes for part in parts], axis=1), beside)


def _steps(rank: _Rank, record: Record) -> Iterator[_Step]:
    """The steps of one rank; raises InputError for records that do not belong together."""
    held: dict[int, Mapping[str, Any]] = {}
    stray, layers = 0, None
    ends = dict.fromkeys((key for _, key in _SIDECARS.values()), 0)
    for number, value in enumerate(rank.values()):
        for key in ends:
            if (offset := value.get(f"{key}_offset", ends[key])) != ends[key]:
                where = f"{rank.name}, record {number}: {key}_offset"
                raise InputError(f"{where} {offset}, expected {ends[key]}, where the record before ends")
            ends[key] += value.get(f"{key}_bytes", 0)
        if value.get("block", "decoder") != "decoder":
            stray += 1
            continue
        if held and (value["step"] != next(iter(held.values()))["step"] or value["layer"] in held):
            layers = layers or sorted(held)
            yield _step(held, layers, rank)
            held = {}
        if type(value["layer"]) is not int or type(value["step"]) is not int:
            raise InputError(f"{rank.name}, record {number}: layer {value['layer']!r:.20}, expected a whole number")
        held[value["layer"]] = value
    if held:
        yield _step(held, layers or sorted(held), rank)
    if stray:
        record.notes.append(_STRAY.format(stray))


def _step(held: Mapping[int, Mapping[str, Any]], layers: list[int], rank: _Rank) -> _Step:
    number = next(iter(held.values()))["step"]
    where = f"{rank.name}, step {number}"
    if sorted(held) != layers:
        raise InputError(f"{where}: layers {sorted(held)!s:.60}, expected {layers!s:.60} as in the first step")
    parts = [np.array(held[layer]["top_indices"]) for layer in layers]
    for layer, part in zip(layers, parts, strict=True):
        wanted = (held[layer]["num_tokens"], held[layer]["topk"])
        if part.shape != wanted or part.dtype.kind != "i" or part.shape != parts[0].shape or not part.size:
            raise InputError(f"{where}, layer {layer}: top_indices of shape {part.shape}, expected {wanted} of each")
    beside = {}
    for name, (_, key) in _SIDECARS.items():
        if all(f"{key}_offset" in held[layer] for layer in layers):
            beside[name] = [_sidecar(rank, held[layer], name, len(parts[0])) for layer in layers]
    return _Step(number, np.stack(parts, axis=1), beside)


def _sidecar(rank: _Rank, record: Mapping[str, Any], name: str, rows: int) -> np.ndarray:
    """(n, H or E) bfloat16 rows of one record."""
    file, key = _SIDECARS[name]
    offset, size, shape = record[f"{key}_offset"], record[f"{key}_bytes"], record[f"{key}_shape"]
    if len(shape) != 2 or shape[0] != rows or size != 2 * shape[0] * shape[1] or offset < 0:
        raise InputError(f"{rank.name}: {key}_shape {shape} of {size} bytes for {rows} tokens")
    place = rank.path.parent / file.format(record["rank"])
    if place.name not in rank.beside:
        rank.beside[place.name] = Sidecar(place, rank.name)
    return rank.beside[place.name].rows(offset, shape)


def _number(rank: _Rank) -> int:
    return int(by_number(rank.path)[1])


def _recognises(source: Source) -> bool:
    if source.nature == "folder":
        return bool(source.inside(_NAME))
    return source.keys >= {"step", "layer", "rank", "num_tokens", "topk", "top_indices"}


FORM = Form("megatron", "router traces of Megatron (JSONL a rank)", _recognises, _read, together=True)
