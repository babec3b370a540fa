"""Tables of routes: parquet of FLAME-MoE and moe-policylang, and the JSONL of the latter.

FLAME-MoE (https://huggingface.co/datasets/CMU-FLAME/FLAME-MoE-Traces): a folder ``iter_N`` with ``layer_NN.parquet``,
indices and scores of a token a row, and token ids in ``samples`` two folders up. moe-policylang (1.15,
``integrations/trace_recorder.py``): a row for each prompt, token and layer.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
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
_PHASES = {"prefill": 1, "decode": 0}
_LISTS = {"selected_experts": "q", "router_scores": "f", "router_softmax": "f"}


def _flame(sources: Sequence[Source], given: Given) -> Record:
    """Routes while FLAME-MoE was trained. Megatron counts layers from 1, the trace from 0."""
    folder = sources[0]
    files = folder.inside(_FLAME_FILES)
    samples = sorted((folder.path.absolute().parent.parent / "samples").glob("*.parquet"), key=by_number)

    def requests() -> Iterator[Request]:
        layers = [_blocks([path], ("indices", "scores"), folder) for path in files]
        tokens = _blocks(samples, ("token_id",), folder) if samples else None
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


def _blocks(files: Sequence[Path], columns: Sequence[str], source: Source) -> Iterator[dict[str, np.ndarray]]:
    """The rows of one sequence after another of columns of numbers or of lists of numbers, from files one by one."""
    held: dict[str, np.ndarray] = {}
    for batch in _batches(files, columns, _FLAME_ROWS, source):
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


def _batches(files: Sequence[Path], columns: Sequence[str], rows: int, source: Source) -> Iterator[Any]:
    """Batches of so many rows at most of parquet files. Raises ModuleNotFoundError without pyarrow."""
    import pyarrow.parquet

    for path in files:
        try:
            with source.open(path) as handle:
                table = pyarrow.parquet.ParquetFile(handle, page_checksum_verification=True)
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
    layers = np.unique(first.layers)
    record.layers = layers
    if record.experts is None and first.lists["router_softmax"]:
        record.experts = first.widths["router_softmax"]
    record.requests = (prompt.request(layers) for prompt in _prompts(source))
    return record


class _Prompt:
    """The rows of one prompt, (token, layer) each, as flat arrays: as Python objects they may be larger than memory."""

    def __init__(self, first: dict[str, Any]) -> None:
        self.where, self.domain = f"prompt {first['prompt_id']}", first.get("domain_tag")
        self.tokens, self.layers, self.ids, self.early = array("q"), array("q"), array("q"), array("b")
        self.widths = {name: len(first.get(name) or ()) for name in _LISTS}
        self.lists = {name: array(code) for name, code in _LISTS.items()}
        self._named, self._phased = first.get("token_id") is not None, first.get("phase") is not None

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; raises InputError if it has other lists than the first one."""
        self.tokens.append(row["token_idx"])
        self.layers.append(row["layer_idx"])
        if self._named:
            self.ids.append(row["token_id"])
        if self._phased:
            self.early.append(_PHASES[row["phase"]])
        for name, held in self.lists.items():
            values = row.get(name) or ()
            if len(values) != self.widths[name]:
                place = f"{self.where}, token {row['token_idx']}, layer {row['layer_idx']}"
                raise InputError(f"{place}: {len(values)} {name}, expected {self.widths[name]} as in the first row")
            held.extend(values)

    def request(self, layers: np.ndarray) -> Request:
        """The request of these rows; raises InputError unless every token has every layer once."""
        tokens, found = np.array(self.tokens), np.array(self.layers)
        order = np.lexsort((found, tokens))
        rows = len(tokens) // len(layers)
        wanted = np.repeat(np.arange(rows), len(layers)), np.tile(layers, rows)
        if not (np.array_equal(tokens[order], wanted[0]) and np.array_equal(found[order], wanted[1])):
            raise InputError(
                f"{self.where}: {len(tokens)} rows up to token {tokens.max()}, expected all tokens from 0 on x "
                f"{len(layers)} layers, each once"
            )

        def column(name: str) -> np.ndarray | None:
            width = self.widths[name]
            return np.array(self.lists[name]).reshape(-1, width)[order].reshape(rows, -1, width) if width else None

        routes, firsts = column("selected_experts"), order[:: len(layers)]
        if routes is None:
            raise InputError(f"{self.where}: no selected_experts, expected those of each row")
        early = np.array(self.early)[order].reshape(-1, len(layers)) if self._phased else np.zeros((0, 1), bool)
        if (early != early[:, :1]).any() or (np.diff(early[:, 0]) > 0).any():
            raise InputError(f"{self.where}: phases of rows differ by layer, or a prompt's token follows a sampled one")
        return Request(
            routes, gates=column("router_scores"), probs=column("router_softmax"), where=self.where,
            tokens=np.array(self.ids)[firsts] if self._named else None, domain=self.domain,
            prompt=int(early[:, 0].sum()) if self._phased else None,
        )  # fmt: skip


def _prompts(source: Source) -> Iterator[_Prompt]:
    """One prompt after another."""
    for _, rows in groupby(_rows(source), lambda row: row["prompt_id"]):
        prompt: _Prompt | None = None
        for row in rows:
            prompt = prompt or _Prompt(row)
            prompt.add(row)
        if prompt is not None:
            yield prompt


def _rows(source: Source) -> Iterator[dict[str, Any]]:
    if source.nature == "parquet":
        wanted = [name for name in _SHORT.values() if name in source.columns]
        for batch in _batches([source.path], wanted, 2**12, source):
            columns = [batch.column(name).to_pylist() for name in wanted]
            yield from (dict(zip(wanted, values, strict=True)) for values in zip(*columns, strict=True))
        return
    with source.open() as handle:
        values = json_values(handle)
        next(values)
        for value in values:
            yield {_SHORT[name]: value[name] for name in _SHORT if name in value}


def _is_policylang(source: Source) -> bool:
    rows = source.nature == "parquet" and {"prompt_id", "token_idx", "layer_idx"} <= set(source.columns)
    return rows or source.keys >= {"model_name", "num_layers", "num_experts", "top_k", "num_entries"}


FORMS = (
    Form(
        "flame-moe", "FLAME-MoE's traces, a parquet file a layer",
        lambda source: source.nature == "folder" and bool(source.inside(_FLAME_FILES)), _flame,
    ),
    Form("policylang", "a trace of moe-policylang (parquet or JSONL)", _is_policylang, _policylang),
)  # fmt: skip
