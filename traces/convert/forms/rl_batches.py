"""Batches of reinforcement learning: verl's padded tensors and slime's samples.

verl (0.9.1, ``experimental/agent_loop``) pads prompts on the left and responses on the right and fills routes with 0;
masks say what is real. slime saves samples by ``--save-debug-rollout-data`` (``slime/utils/types.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.archive import opened
from traces.convert.cleaning import filler_rows
from traces.convert.form import Form
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source
from traces.convert.torch_file import read_torch

_BESIDE = ("attention_mask", "prompts", "responses", "input_ids", "response_mask")


def _verl(sources: Sequence[Source], given: Given) -> Record:
    arrays = opened(sources[0])
    routes = arrays["routed_experts"]
    if routes.ndim != 4 or routes.dtype.kind not in "iu" or not routes.size:
        raise InputError(f"routed_experts {routes.dtype} of shape {routes.shape}, expected integers (B, length, L, k)")
    count, length = routes.shape[:2]
    mask = arrays["attention_mask"]
    if mask.shape != (count, length) or mask.dtype.kind not in "iub":
        raise InputError(f"attention_mask {mask.dtype} of shape {mask.shape}, expected ({count}, {length})")
    for name, array in arrays.items():
        if name in _BESIDE and (array.ndim != 2 or len(array) != count or array.dtype.kind not in "iub"):
            raise InputError(f"{name} {array.dtype} of shape {array.shape}, expected integers ({count}, ...)")
    early = arrays["prompts"].shape[1] if "prompts" in arrays else None
    late = next((arrays[name].shape[1] for name in ("responses", "response_mask") if name in arrays), None)
    if early is None and late is not None:
        early = length - late
    if early is not None and (not 0 < early <= length or (late is not None and early + late != length)):
        raise InputError(f"prompts of {early} and responses of {late} places, expected {length} in all")
    tokens = _verl_tokens(arrays, count, length)

    def requests() -> Iterator[Request]:
        for i in range(count):
            real = np.flatnonzero(mask[i])
            where = f"routed_experts, sample {i}"
            if not len(real) or len(real) != real[-1] - real[0] + 1:
                raise InputError(f"{where}: attention_mask has {len(real)} tokens in pieces, expected one run of them")
            first, end = int(real[0]), int(real[-1]) + 1
            # The last token is not run; routes end earlier where a dialogue's last turn was a tool's.
            run = routes[i, first : end - 1]
            rows = len(run) - int(np.argmax(~filler_rows(run, 2)[::-1])) if len(run) else 0
            prompt = None if early is None else min(early, end) - first
            mine = None if tokens is None else tokens[i, first : first + rows + 1]
            yield Request(run[:rows], tokens=mine, prompt=prompt, where=where, row=first)

    return Record(requests(), count=count, captured="routes as verl's rollout kept them")


def _verl_tokens(arrays: Mapping[str, np.ndarray], count: int, length: int) -> np.ndarray | None:
    if "input_ids" in arrays:
        tokens = arrays["input_ids"]
    elif {"prompts", "responses"} <= set(arrays):
        tokens = np.concatenate([arrays["prompts"], arrays["responses"]], axis=1)
    else:
        return None
    if tokens.shape != (count, length):
        raise InputError(f"token ids of shape {tokens.shape}, expected ({count}, {length})")
    return tokens


def _slime(sources: Sequence[Source], given: Given) -> Record:
    samples = read_torch(sources[0].path)["samples"]
    if not isinstance(samples, list) or not samples:
        raise InputError(f"samples: {type(samples).__name__}, expected a list of them")
    record = Record((), count=len(samples), captured="routes as slime's rollout kept them")

    def requests() -> Iterator[Request]:
        missing = 0
        for i, sample in enumerate(samples):
            if sample.get("rollout_routed_experts") is None:
                missing += 1
                continue
            yield _sample(i, sample)
        if missing:
            record.notes.append(f"{missing} of {len(samples)} samples have no routes and were passed over")

    record.requests = requests()
    return record


def _sample(number: int, sample: Mapping[str, Any]) -> Request:
    where = f"sample {number}"
    routes, tokens = np.asarray(sample["rollout_routed_experts"]), np.array(sample["tokens"], np.int64)
    if routes.ndim != 3 or routes.dtype.kind not in "iu":
        raise InputError(f"{where}: {routes.dtype} of shape {routes.shape}, expected integers (length - 1, L, k)")
    answered = sample["response_length"]
    if type(answered) is not int or not 0 <= answered < len(tokens):
        raise InputError(f"{where}: a response of {answered!r:.20} of {len(tokens)} tokens")
    if len(routes) not in (len(tokens) - 1, len(tokens)):
        raise InputError(f"{where}: {len(routes)} rows of routes for {len(tokens)} tokens, expected {len(tokens) - 1}")
    return Request(routes, tokens=tokens, prompt=len(tokens) - answered, where=where)


def _is_verl(source: Source) -> bool:
    return source.arrays | source.torch_keys >= {"routed_experts", "attention_mask"}


def _is_slime(source: Source) -> bool:
    return source.nature == "torch" and source.torch_keys >= {"samples", "rollout_id"}


FORMS = (
    Form("verl", "a batch of verl: padded routed_experts with attention_mask", _is_verl, _verl, arrays=_BESIDE),
    Form("slime", "samples of a rollout of slime (.pt)", _is_slime, _slime),
)
