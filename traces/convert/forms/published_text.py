"""Routes as their authors publish them in texts: ESFT's tables a layer, and examples of gpt-oss with their tokens.

ESFT (https://github.com/deepseek-ai/ESFT, ``results/expert_scores``): ``expert_weights_{layer}.txt``, a line a text,
first the ids of all its tokens, then two tabs and their weights. gpt-oss
(https://github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, ``data``): ``*_examples.json``, whose
``router_data`` has a token each.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import TextIOWrapper
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.json_values import json_values
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source, by_number
from traces.models.known import builtin_decoder

_TABLES = "expert_weights_*.txt"
_TOKEN, _LAYER = re.compile(r"token_(\d+)"), re.compile(r"layer_(\d+)")


def _esft(sources: Sequence[Source], given: Given) -> Record:
    source = sources[0]
    files = source.inside(_TABLES)
    layers = [int(by_number(path)[1]) for path in files]
    record = Record(
        (), layers=np.array(layers), model=None if given.model else "deepseek-v2-lite", buffers=False,
        captured="routes as published", decoding="teacher-forced", files=files,
        notes=["teacher-forced; where prompts end is not recorded, so all rows are read as decode"],
    )  # fmt: skip
    spec = builtin_decoder("deepseek-v2-lite") if given.recorded is None else given.recorded.spec
    if spec is None:
        raise InputError("how many experts a token takes is not in the file, expected --model, a name or a config.json")

    def requests() -> Iterator[Request]:
        with ExitStack() as stack:
            tables = [stack.enter_context(TextIOWrapper(source.open(path), "ascii")) for path in files]
            for number, lines in enumerate(zip(*tables, strict=True)):
                parts = [
                    _line(line, spec.top_k, f"{path.name}, line {number + 1}")
                    for path, line in zip(files, lines, strict=True)
                ]
                if len({len(ids) for ids, _ in parts}) > 1:
                    raise InputError(f"line {number + 1}: layers of {sorted({len(ids) for ids, _ in parts})} tokens")
                routes, gates = (np.stack(each, axis=1) for each in zip(*parts, strict=True))
                yield Request(routes, gates=gates, prompt=0, where=f"line {number + 1}")

    record.requests = requests()
    return record


def _line(line: str, k: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights (n, k) of one text."""
    texts = line.rstrip("\n").split("\t\t")
    if len(texts) != 2:
        raise InputError(f"{where}: {len(texts)} parts, expected ids and weights with two tabs between them")
    try:
        ids, weights = np.array(texts[0].split("\t"), int), np.array(texts[1].split("\t"), float)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    if len(ids) != len(weights) or not len(ids) or len(ids) % k:
        raise InputError(f"{where}: {len(ids)} ids and {len(weights)} weights, expected as many, a multiple of {k}")
    return ids.reshape(-1, k), weights.reshape(-1, k)


def _gpt_oss(sources: Sequence[Source], given: Given) -> Record:
    record = Record(
        (), among=("gpt-oss-20b", "gpt-oss-120b"), captured="decode routes as published", decoding="greedy",
        buffers=False, notes=["prompt rows are absent: decode only"],
    )  # fmt: skip

    def requests() -> Iterator[Request]:
        with sources[0].open() as handle:
            for number, example in enumerate(json_values(handle)):
                yield _example(example, f"example {number}", number)

    record.requests = requests()
    return record


def _example(example: dict[str, Any], where: str, number: int) -> Request:
    """The decode rows of one example, from the position that its first token names."""
    tokens = [(name, routed) for each in example["router_data"] for name, routed in each.items()]
    start, routes, gates = None, [], []
    for place, (name, routed) in enumerate(tokens):
        match = _TOKEN.fullmatch(name)
        at = int(match[1]) if match else -1
        start = at if start is None else start
        layers = [int(found[1]) if (found := _LAYER.fullmatch(layer)) else -1 for layer in routed]
        if at != start + place or layers != list(range(len(layers))):
            raise InputError(f"{where}: {name!r:.40} of {len(layers)} layers, expected token_{start + place} of all")
        routes.append([layer["selected_experts"] for layer in routed.values()])
        gates.append([layer["selected_probs"] for layer in routed.values()])
    if start is None:
        raise InputError(f"{where}: router_data is empty, expected its tokens")
    dataset, category = str(example.get("dataset", "")), str(example.get("category", ""))
    return Request(
        np.array(routes), gates=np.array(gates, float), start=start, prompt=start, where=where,
        domain=category or None, name=f"{dataset}/{category}/{example.get('row_index', number)}",
    )  # fmt: skip


FORMS = (
    Form(
        "esft-text", "ESFT's tables of experts and weights, a file a layer",
        lambda source: source.nature == "folder" and bool(source.inside(_TABLES)), _esft,
    ),
    Form(
        "gpt-oss-examples", "examples of GPT-OSS-MoE-ExpertFingerprinting with the routes of their tokens",
        lambda source: source.keys >= {"router_data"} and "choices" not in source.keys, _gpt_oss,
    ),
)  # fmt: skip
