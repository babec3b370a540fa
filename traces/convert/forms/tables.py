"""Tables of routes: parquet of FLAME-MoE and moe-policylang (and its JSONL), and BigMoeOnEdge's CSV.

FLAME-MoE (https://huggingface.co/datasets/CMU-FLAME/FLAME-MoE-Traces): a folder ``iter_N`` with ``layer_NN.parquet``,
indices and scores of a token a row, and token ids in ``samples`` two folders up. moe-policylang (1.15,
``integrations/trace_recorder.py``): a row for each prompt, token and layer. BigMoeOnEdge
(https://github.com/Helldez/BigMoeOnEdge, ``--route-trace``): a line for each turn, phase, step, layer and slot.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.json_values import json_values
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source, by_number

_FLAME_FILES = "layer_*.parquet"
_FLAME_ROWS = 2048  # tokens of a training sequence (https://arxiv.org/abs/2505.20225, section 3)
_FLAME_EXPERTS = 64
_SHORT = {
    "p": "prompt_id", "t": "token_idx", "l": "layer_idx", "e": "selected_experts", "s": "router_scores",
    "sm": "router_softmax", "ti": "token_id", "ph": "phase", "dm": "domain_tag",
}  # fmt: skip
_EDGE = ("turn", "phase", "step", "layer", "slot", "expert", "weight")


def _flame(sources: Sequence[Source], given: Given) -> Record:
    """Routes while FLAME-MoE was trained. Megatron counts layers from 1, the trace from 0."""
    folder = sources[0]
    files = folder.inside(_FLAME_FILES)
    samples = sorted((folder.path.absolute().parent.parent / "samples").glob("*.parquet"), key=by_number)

    def requests() -> Iterator[Request]:
        layers = [_blocks([path], ("indices", "scores")) for path in files]
        tokens = _blocks(samples, ("token_id",)) if samples else None
        for number, parts in enumerate(zip(*layers, strict=True)):
            sizes = {len(part["indices"]) for part in parts}
            token = None if tokens is None else next(tokens, {"token_id": np.empty(0, int)})["token_id"]
            if len(sizes) > 1 or (token is not None and len(token) < min(sizes)):
                raise InputError(f"sequence {number}: layers of {sorted(sizes)} rows, expected as many as token ids")
            yield Request(
                np.stack([part["indices"] for part in parts], axis=1), prompt=0,
                gates=np.stack([part["scores"].astype(np.float32) for part in parts], axis=1),
                tokens=None if token is None else token[: min(sizes)], where=f"sequence {number}",
            )  # fmt: skip

    return Record(
        requests(), layers=np.array([int(by_number(path)[1]) - 1 for path in files]),
        experts=None if given.model or given.experts else _FLAME_EXPERTS,
        model="flame-moe" if given.model is None else None, captured="routes while it was trained",
        decoding="teacher-forced", buffers=False, files=[*files, *samples],
        notes=[
            f"the text is cut into sequences of {_FLAME_ROWS} tokens, as in training; all rows are read as decode",
            "layers are numbered from 0, as the model's config does",
        ],
    )  # fmt: skip


def _blocks(files: Sequence[Path], columns: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """The rows of one sequence after another of columns of numbers or of lists of numbers, from files one by one."""
    held: dict[str, np.ndarray] = {}
    for batch in _batches(files, columns, _FLAME_ROWS):
        for name in columns:
            column = batch.column(name)
            flat = column.flatten() if hasattr(column, "flatten") and column.type.num_fields else column
            if flat.null_count or column.null_count:
                raise InputError(f"column {name!r}: empty cells, expected numbers")
            array = flat.to_numpy(zero_copy_only=False)
            array = array.reshape(len(column), -1) if flat is not column else array
            held[name] = np.concatenate([held[name], array]) if name in held else array
        while len(held[columns[0]]) >= _FLAME_ROWS:
            yield {name: values[:_FLAME_ROWS] for name, values in held.items()}
            held = {name: values[_FLAME_ROWS:] for name, values in held.items()}
    if held and len(held[columns[0]]):
        yield held


def _batches(files: Sequence[Path], columns: Sequence[str], rows: int) -> Iterator[Any]:
    """Batches of so many rows at most of parquet files. Raises ModuleNotFoundError without pyarrow."""
    import pyarrow.parquet

    for path in files:
        try:
            with pyarrow.parquet.ParquetFile(path) as table:
                yield from table.iter_batches(rows, columns=list(columns))
        except (OSError, pyarrow.ArrowException) as error:
            raise InputError(f"{path.name}: a damaged parquet file ({str(error).splitlines()[0]:.80})") from None


def _policylang(sources: Sequence[Source], given: Given) -> Record:
    source, header = sources[0], {}
    if source.nature == "json":
        header = source.value
    record = Record((), experts=header.get("num_experts"), captured="routes as moe-policylang recorded them")
    record.buffers = False
    first = next(_prompts(source), None)
    if first is None:
        raise InputError("holds no row of routes")
    record.layers = np.array(sorted({row["layer_idx"] for row in first}))
    if record.experts is None and first[0].get("router_softmax"):
        record.experts = len(first[0]["router_softmax"])
    record.requests = (_prompt(rows, record.layers, number) for number, rows in enumerate(_prompts(source)))
    return record


def _prompts(source: Source) -> Iterator[list[dict[str, Any]]]:
    """The rows of one prompt after another."""
    for _, rows in groupby(_rows(source), lambda row: row["prompt_id"]):
        yield list(rows)


def _rows(source: Source) -> Iterator[dict[str, Any]]:
    if source.nature == "parquet":
        wanted = [name for name in _SHORT.values() if name in source.columns]
        for batch in _batches([source.path], wanted, 2**14):
            columns = [batch.column(name).to_pylist() for name in wanted]
            yield from (dict(zip(wanted, values, strict=True)) for values in zip(*columns, strict=True))
        return
    with source.open() as handle:
        values = json_values(handle)
        next(values)
        for value in values:
            yield {_SHORT[name]: value[name] for name in _SHORT if name in value}


def _prompt(rows: list[dict[str, Any]], layers: np.ndarray, number: int) -> Request:
    where = f"prompt {rows[0]['prompt_id']}"
    rows = sorted(rows, key=lambda row: (row["token_idx"], row["layer_idx"]))
    n, last = len(layers), rows[-1]["token_idx"]
    places = [(row["token_idx"], row["layer_idx"]) for row in rows]
    if places != [(token, int(layer)) for token in range(last + 1) for layer in layers]:
        raise InputError(f"{where}: {len(rows)} rows, expected {last + 1} tokens x {n} layers, each once")

    def column(name: str) -> np.ndarray | None:
        if rows[0].get(name) is None:
            return None
        return np.array([row[name] for row in rows], np.float32).reshape(last + 1, n, -1)

    routes = np.array([row["selected_experts"] for row in rows]).reshape(last + 1, n, -1)
    phase = [row.get("phase") for row in rows[::n]]
    tokens = [row.get("token_id") for row in rows[::n]]
    return Request(
        routes, gates=column("router_scores"), probs=column("router_softmax"), where=where,
        tokens=None if None in tokens else np.array(tokens), domain=rows[0].get("domain_tag"),
        prompt=phase.count("prefill") if "prefill" in phase else None,
    )  # fmt: skip


def _edge(sources: Sequence[Source], given: Given) -> Record:
    source = sources[0]
    about, sizes = _preamble(source)
    layers: list[int] = sorted(sizes)
    record = Record(
        (), experts=int(about["n_expert"]) if "n_expert" in about else None, reduced=True, buffers=False,
        captured="as a device ran it", hardware="a device streaming experts", split="eval",
    )  # fmt: skip
    if not layers:
        layers = sorted({row[3] for row in _edge_rows(source)})
    record.layers = np.array(layers)
    record.expert_bytes = [sizes[layer] for layer in layers] if sizes else None
    slots = int(about.get("n_expert_used", 0)) or 1 + max(row[4] for row in _edge_rows(source))

    def requests() -> Iterator[Request]:
        start = skipped = 0
        for turn, rows in groupby(_edge_rows(source), lambda row: row[0]):
            request = _turn(turn, list(rows), layers, slots, start)
            start += len(request.routes)
            skipped += int((request.routes < 0).all(axis=2).sum())
            yield request
        if skipped:
            record.notes.append(f"{skipped} (token, layer) pairs have no route: the device did not run them")

    record.requests = requests()
    return record


def _turn(turn: int, rows: list[tuple[Any, ...]], layers: list[int], slots: int, start: int) -> Request:
    """One turn: the prompt's new tokens, then those that were generated; it begins where the turn before ended."""
    steps = sorted({row[1:3] for row in rows})
    for one, other in pairwise(steps):
        if one[0] == other[0] and other[1] != one[1] + 1:
            raise InputError(f"turn {turn}, phase {one[0]}: step {other[1]} after {one[1]}: lines are missing")
    place, at = {step: i for i, step in enumerate(steps)}, {layer: i for i, layer in enumerate(layers)}
    routes = np.full((len(steps), len(layers), slots), -1, np.int32)
    gates = np.zeros(routes.shape, np.float32)
    for _, phase, step, layer, slot, expert, weight in rows:
        if layer not in at or not 0 <= slot < slots or phase not in (0, 1):
            raise InputError(f"turn {turn}, step {step}: phase {phase}, layer {layer}, slot {slot} of {slots}")
        where = place[phase, step], at[layer], slot
        if routes[where] >= 0:
            raise InputError(f"turn {turn}, step {step}, layer {layer}: slot {slot} is there twice")
        routes[where], gates[where] = expert, weight
    early = sum(phase == 0 for phase, _ in steps)
    last = np.flatnonzero((routes[:early, -1] >= 0).any(axis=1))
    alone = len(last) == 1 < early  # the last layer needs the prompt's last token only, and may count it as its first
    if alone:
        for array in (routes, gates):
            array[[early - 1, last[0]], -1] = array[[last[0], early - 1], -1]
    taken = (routes >= 0).sum(axis=2)
    may_lack = np.zeros(taken.shape, bool)
    may_lack[: early - 1, -1] = alone
    if (odd := (taken != slots) & ~((taken == 0) & may_lack)).any():
        row, layer = np.argwhere(odd)[0]
        what = f"{taken[row, layer]} experts, expected {slots}"
        raise InputError(f"turn {turn}, phase {steps[row][0]}, step {steps[row][1]}, layer {layers[layer]}: {what}")
    known = not np.isnan(gates).any()
    return Request(
        routes, gates=gates if known else None, prompt=start + early, start=start or None, where=f"turn {turn}"
    )


def _preamble(source: Source) -> tuple[dict[str, str], dict[int, int]]:
    """What the lines before the table say of the model, and the bytes of an expert of each layer."""
    about: dict[str, str] = {}
    sizes: dict[int, int] = {}
    with source.path.open(encoding="utf-8") as text:
        for line in text:
            if not line.startswith("#"):
                break
            said = dict(part.split("=", 1) for part in line[1:].split() if "=" in part)
            if "expert_bytes" in said:
                if int(said["expert_bytes"]):  # 0 of a dense layer
                    sizes[int(said["layer"])] = int(said["expert_bytes"])
            else:
                about |= said
    return about, sizes


def _edge_rows(source: Source) -> Iterator[tuple[Any, ...]]:
    """(turn, phase, step, layer, slot, expert, weight) of each line."""
    with source.path.open(encoding="utf-8", newline="") as text:
        lines = csv.reader(line for line in text if not line.startswith("#"))
        columns = next(lines)
        for number, cells in enumerate(lines):
            if len(cells) != len(columns):
                raise InputError(f"row {number}: {len(cells)} cells, expected {len(columns)}: was the file cut off?")
            try:
                row = [int(cells[columns.index(name)]) for name in _EDGE[:-1]]
                yield (*row, float(cells[columns.index("weight")]))
            except ValueError as error:
                raise InputError(f"row {number}: {error}") from None


def _is_policylang(source: Source) -> bool:
    rows = source.nature == "parquet" and {"prompt_id", "token_idx", "layer_idx"} <= set(source.columns)
    return rows or source.keys >= {"model_name", "num_layers", "num_experts", "top_k", "num_entries"}


FORMS = (
    Form(
        "flame-moe", "FLAME-MoE's traces, a parquet file a layer",
        lambda source: source.nature == "folder" and bool(source.inside(_FLAME_FILES)), _flame,
    ),
    Form("policylang", "a trace of moe-policylang (parquet or JSONL)", _is_policylang, _policylang),
    Form(
        "edge", "a route trace of BigMoeOnEdge (CSV)",
        lambda source: source.nature == "csv" and set(_EDGE) <= set(source.columns), _edge,
    ),
)  # fmt: skip
