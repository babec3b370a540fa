"""Answers of engines as JSON, one or many a file: vLLM's and SGLang's HTTP APIs, Dynamo's, and Python objects as JSON.

An answer may stand alone or with its request: ``{"request": ..., "response": ...}``, with ``domain`` and
``conversation`` beside them where they are known. Results of OpenAI batches are read too. Fields are those of vLLM 0.21
to 0.33 (https://docs.vllm.ai/en/latest/training/routed_experts/), SGLang 0.5 (its OpenAI API has them in ``sglext``),
Dynamo 1.6 (``nvext``), and the ``CompletionOutput`` of vLLM and TensorRT-LLM.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ground.errors import InputError
from traces.convert.encoded import decoded
from traces.convert.form import Form
from traces.convert.json_values import json_values
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import Source
from traces.models.known import builtin_decoder

_NULL = (
    "has no routes: start vLLM or SGLang with --enable-return-routed-experts, and ask SGLang for return_routed_experts "
    "(an aborted request has none either)"
)
_MARKS = ({"choices"}, {"meta_info"}, {"outputs", "prompt_token_ids"}, {"routed_experts"})
_EXTENSIONS = ("sglext", "sgl_ext", "nvext", "engine_data")


@dataclass
class Exchange:
    """An answer, what was asked, and what a person said of both."""

    where: str
    answer: dict[str, Any]
    request: dict[str, Any] = field(default_factory=dict)
    domain: str | None = None
    conversation: int | str | None = None


@dataclass
class _Part:
    """One of the texts of an answer: its routes as they stand there, and what is known of its tokens."""

    where: str
    routes: Any
    early: Any = None  # the prompt's routes, where they stand apart
    prompt: list[int] | None = None
    output: list[int] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    start: int = 0
    dtype: str | None = None


def requests_of(exchange: Exchange, given: Given) -> Iterator[Request]:
    """The requests of one exchange, one a text; raises InputError."""
    asked = with_model(exchange, given)
    for part in _parts(exchange):
        yield _request(part, exchange, asked)


def with_model(exchange: Exchange, given: Given) -> Given:
    """What a person says, with the built-in model that the exchange names where the person names none."""
    model = given.model or _model(exchange)
    return given if model == given.model else Given(**given.stated | {"model": model})


def _model(exchange: Exchange) -> str | None:
    """The built-in model that an answer or its request names; None where it is of another name."""
    name = str(exchange.answer.get("model") or exchange.request.get("model") or "").rpartition("/")[2]
    spec = builtin_decoder(name)
    return None if spec is None else spec.name


def _parts(exchange: Exchange) -> Iterator[_Part]:
    answer, request = exchange.answer, exchange.request
    usage = _object(answer.get("usage") or {}, "usage")
    texts = answer.get("choices", answer.get("outputs"))
    alone = texts is None
    texts = [answer] if alone else texts
    if not isinstance(texts, list) or not texts:
        raise InputError(f"{exchange.where}: choices {texts!r:.40}, expected at least one")
    for number, text in enumerate(texts):
        text = _object(text, "choices")
        info = _object(text.get("meta_info") or {}, "meta_info")
        inside = [text, info, *_extensions(text)]
        shared = [] if alone else [answer, *_extensions(answer)]
        where = f"{exchange.where}, choice {number}" if len(texts) > 1 else exchange.where
        routes = _first("routed_experts", inside)
        if routes is None and (routes := _first("routed_experts", shared)) is not None and len(texts) > 1:
            raise InputError(f"{where}: the routes of one of {len(texts)} choices, expected n = 1 in the request")
        if routes is None:
            raise InputError(f"{where} {_NULL}")
        everywhere = [*inside, *shared]
        output = _first("token_ids", [text]) or _first("response_token_ids", [text]) or _first("output_ids", everywhere)
        if output and isinstance(output[0], list):
            output = output[number]
        prompt = _first("prompt_token_ids", everywhere) or _first("input_ids", [*everywhere, request])
        prompt = prompt or _first("prompt_token_ids", [request]) or _first("token_ids", [request])
        asked = request.get("prompt")
        if not prompt and isinstance(asked, list) and asked and all(type(one) is int for one in asked):
            prompt = asked
        start = routes.get("start") if isinstance(routes, dict) else None
        if start is None:
            start = request.get("routed_experts_prompt_start", request.get("routed_experts_start_len", 0))
        yield _Part(
            where, routes, _first("prompt_routed_experts", everywhere), prompt, output,
            _first("prompt_tokens", [info, usage]),
            _first("completion_tokens", [info] if len(texts) > 1 else [info, usage]),
            start, info.get("routed_experts_dtype") or _first("routed_experts_dtype", everywhere),
        )  # fmt: skip


def _request(part: _Part, exchange: Exchange, given: Given) -> Request:
    where = part.where
    prompt, output = _tokens(part.prompt, where, "prompt"), _tokens(part.output, where, "output")
    asked = _number(part.prompt_tokens, where, "prompt_tokens") if prompt is None else len(prompt)
    made = _number(part.output_tokens, where, "completion_tokens") if output is None else len(output)
    start = _number(part.start, where, "the start of routes") or 0
    total = None if asked is None or made is None else asked + made
    run = None if total is None or part.early is not None else total - 1 - start
    routes = decoded(part.routes, where, given, rows=run, dtype=part.dtype)
    if part.early is not None:
        early = decoded(part.early, f"{where}, prompt_routed_experts", given, rows=asked)
        if early.shape[1:] != routes.shape[1:]:
            raise InputError(f"{where}: routes of {routes.shape[1:]}, the prompt's of {early.shape[1:]}")
        if asked not in (None, len(early)):
            raise InputError(f"{where}: routes of {len(early)} prompt tokens, expected {asked}, as the prompt has")
        asked = len(early)
        routes = np.concatenate([early, routes])
    rows = len(routes)
    if total is not None and rows not in (total - 1 - start, total - start):
        hole = " (a prefix cache that skips tokens?)" if rows < total - 1 - start else ""
        begun = f" from position {start}" if start else ""
        raise InputError(
            f"{where}: {rows} rows of routes for {asked} prompt and {made} generated tokens{begun}, expected "
            f"{total - 1 - start}: the last one is not run{hole}"
        )
    tokens = np.full(rows + 1 if total is None else total - start, -1)
    if prompt is not None and output is not None:
        tokens = np.concatenate([prompt, output])[start:]
    return Request(
        routes, tokens=tokens, prompt=asked, start=start or None, conversation=exchange.conversation,
        domain=exchange.domain, where=where,
    )  # fmt: skip


def _tokens(ids: Any, where: str, what: str) -> np.ndarray | None:
    if ids is None or ids == []:
        return None
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise InputError(f"{where}: {what} token ids {ids!r:.40}, expected whole numbers")
    return np.array(ids, np.int32)


def _number(value: Any, where: str, what: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**31:
        raise InputError(f"{where}: {what} is {value!r:.40}, expected a whole number")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{what}: {value!r:.40}, expected an object")
    return value


def _first(name: str, places: Sequence[dict[str, Any]]) -> Any:
    """The first value of this name that is not null."""
    return next((place[name] for place in places if place.get(name) is not None), None)


def _extensions(place: dict[str, Any]) -> list[dict[str, Any]]:
    """What engines put beside the fields of OpenAI's API; one may lie in another."""
    found = [place[name] for name in _EXTENSIONS if isinstance(place.get(name), dict)]
    return [*found, *(inner for one in found for inner in _extensions(one))]


def exchanges(value: Any, where: str) -> Iterator[Exchange]:
    """What one JSON value holds: an answer, a list of them, or one with its request. None of an answer that failed."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from exchanges(one, f"{where}.{number}")
        return
    value = _object(value, where)
    answer = value.get("response", value.get("answer"))
    if answer is None or any(mark <= set(value) for mark in _MARKS):
        if value.get("error") is None:
            yield Exchange(where, value)
        return
    request = value.get("request") or {}
    said: dict[str, Any] = {}
    for name, kinds in (("domain", str), ("conversation", int | str)):
        if (stated := value.get(name)) is not None and not isinstance(stated, kinds):
            raise InputError(f"{where}: {name} is {stated!r:.40}, expected a text")
        said[name] = stated
    if isinstance(answer, dict) and "body" in answer:  # of an OpenAI batch
        if answer.get("status_code", 200) != 200:
            return
        answer = answer["body"]
    for number, one in enumerate(answer if isinstance(answer, list) else [answer]):
        one = _object(one, where)
        if one.get("error") is None:
            name = f"{where}.{number}" if isinstance(answer, list) else where
            yield Exchange(name, one, _object(request, "request"), **said)


def _read(sources: Sequence[Source], given: Given) -> Record:
    record = Record(())
    first = next(exchanges(sources[0].value, "answer 0"), None)
    if first is not None:
        record.model = _model(first) if given.model is None else None
        heat = first.request.get("temperature")
        if isinstance(heat, int | float):
            record.decoding = f"sampled at temperature {heat:g}" if heat else "greedy"

    def requests() -> Iterator[Request]:
        failed = 0
        with sources[0].open() as handle:
            for number, value in enumerate(json_values(handle)):
                found = list(exchanges(value, f"answer {number}"))
                failed += not found
                for exchange in found:
                    yield from requests_of(exchange, given)
        if failed:
            record.notes.append(f"{failed} answers are errors without routes and were passed over")

    record.requests = requests()
    return record


def _recognises(source: Source) -> bool:
    value = source.value
    while isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return False
    inner = value.get("response", value.get("answer", value.get("error") and value.get("request")))
    return any(mark <= set(value) for mark in _MARKS) or isinstance(inner, dict | list) or "custom_id" in value


FORM = Form("answers", "answers of vLLM, SGLang, TensorRT-LLM or Dynamo as JSON", _recognises, _read)
