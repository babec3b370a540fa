"""Ask a running server for answers with their routes, and make a trace of them.

Every answer goes into a log beside the output as it comes, so a second run asks only for what is missing. Whatever
the server does, an answer is in the log, or its prompt is asked again.
"""

import hashlib
import http.client
import json
import os
import queue
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.files import atomic_path
from ground.progress import Watch, say
from traces.capture.prompts import read_prompts
from traces.convert.cleaning import trace_of
from traces.convert.forms.answers import exchanges, requests_of, with_model
from traces.convert.kinds import Given, convert_files
from traces.convert.request import Record
from traces.models.spec import ModelSpec
from traces.trace import Trace

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE = 30.0
# What vLLM, SGLang and what stands before them need to be told for routes and token ids; each ignores the others'.
_ASKED = {"return_routed_experts": True, "return_token_ids": True, "return_prompt_token_ids": True}


@dataclass(frozen=True)
class Asking:
    """How a server is asked: ``server`` is its address, ``served`` the model's name there (None: its first one)."""

    server: str
    served: str | None = None
    max_tokens: int = 256
    temperature: float = 0.8
    seed: int = 0
    concurrency: int = 8
    retries: int = 6
    timeout: float = 600.0
    pause: float = 1.0  # seconds before the first repetition, twice as long before each further one
    key_variable: str | None = None  # of the environment, with the key that the server wants

    @property
    def address(self) -> str:
        """The server's address up to and with its version."""
        server = self.server if "://" in self.server else f"http://{self.server}"
        return server.rstrip("/").removesuffix("/v1") + "/v1"


@dataclass(frozen=True)
class _Prompt:
    """One prompt: its place in the order, where it is sent, what is sent, and its domain."""

    number: int
    place: str
    body: dict[str, Any]
    domain: str

    @property
    def key(self) -> str:
        """What tells it from every other, and from the same prompt asked in another way."""
        asked = json.dumps([self.number, self.place, self.body, self.domain], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:24]


class _Refused(Exception):
    """The server says that a request is wrong; asking again would not help."""


def record(prompts: str | Path, output: str | Path, asking: Asking, given: Given | None = None) -> Trace:
    """Ask for an answer to each prompt of a file (see `read_prompts`), and write the trace of all to ``output``.

    The answers are in the file ``OUTPUT.answers.jsonl``, which convert reads too. Raises InputError where the server
    cannot be reached, has no routes, or tells of shapes that do not fit its tokens; what was answered stays there.
    """
    given = given or Given()
    texts = read_prompts(prompts)
    served = asking.served or _served(asking)
    rows = [row for text in texts for row in (*text.profile, *text.eval)]
    wanted = [
        _Prompt(
            number, "chat/completions" if row.messages else "completions",
            {
                "model": served, "max_tokens": asking.max_tokens, "temperature": asking.temperature,
                "seed": asking.seed + number, **_ASKED,
                **(
                    {"messages": [{"role": role, "content": content} for role, content in row.messages]}
                    if row.messages
                    else {"prompt": row.prompt}
                ),
            },
            row.domain,
        )
        for number, row in enumerate(rows)
    ]  # fmt: skip
    log = Path(f"{output}.answers.jsonl")
    done = _answered(log)
    missing = [prompt for prompt in wanted if prompt.key not in done]
    if missing:
        _ask_all(missing, len(wanted), log, asking, given)
    _put_in_order(log, [prompt.key for prompt in wanted])
    return convert_files([log], output, given=given)


def _served(asking: Asking) -> str:
    """The name of the first model that a server has; raises InputError."""
    try:
        models = _exchange(asking, "models", None)["data"]
        return str(models[0]["id"])
    except (_Refused, OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        reason = f"{_words(error)}; is the server up? (or say --served NAME)"
        raise InputError(f"{asking.address}/models: {reason}") from None


def _ask_all(prompts: list[_Prompt], of: int, log: Path, asking: Asking, given: Given) -> None:
    """Ask for all of these; raises InputError, once those under way have been answered, if some could not be used."""
    todo: queue.SimpleQueue[_Prompt] = queue.SimpleQueue()
    came: queue.SimpleQueue[tuple[_Prompt, Any] | None] = queue.SimpleQueue()
    stop = threading.Event()
    for prompt in prompts:
        todo.put(prompt)
    workers = min(asking.concurrency, len(prompts))
    for _ in range(workers):
        threading.Thread(target=_worker, args=(todo, came, asking, stop), daemon=True).start()
    kept = _Kept(asking, given)
    try:
        with Watch(f"record {asking.server}") as watch, log.open("ab") as file:
            while workers:
                if (one := came.get()) is None:
                    workers -= 1
                    continue
                _append(file, kept.entry(*one))
                if kept.wrong and not stop.is_set():
                    say(f"{kept.wrong}: waiting for the requests that are under way")
                    stop.set()
                done = kept.answers + len(kept.failed)
                watch.at((of - len(prompts) + done) / of, f"{kept.answers} answers, {len(kept.failed)} failed")
    finally:
        stop.set()
    if kept.wrong:
        raise InputError(f"{kept.wrong} (answers are kept in {log})")
    if kept.failed:
        raise InputError(
            f"{len(kept.failed)} of {of} prompts were not answered, first {kept.failed[0]}; the other answers are in "
            f"{log}: the same command asks for the missing ones"
        )


class _Kept:
    """What has come of all prompts so far, and what the log says of each."""

    def __init__(self, asking: Asking, given: Given) -> None:
        self._asking, self._given = asking, given
        self._shapes: set[tuple[int, ...]] = set()
        self.answers = 0
        self.failed: list[str] = []
        self.wrong = ""  # why no more need be asked

    def entry(self, prompt: _Prompt, answer: Any) -> dict[str, Any] | None:
        """What goes into the log: nothing of a request that may be sent again."""
        entry: dict[str, Any] = {"key": prompt.key, "request": prompt.body, "domain": prompt.domain}
        if isinstance(answer, Exception):
            self.failed.append(f"prompt {prompt.number}: {_words(answer)}")
            if isinstance(answer, urllib.error.HTTPError) and answer.code in (401, 403, 404):
                self.wrong = self.wrong or f"{self._asking.address}/{prompt.place}: {_words(answer)}"
            return entry | {"error": str(answer)} if isinstance(answer, _Refused) else None
        self.answers += 1
        whole = entry | {"response": answer}
        if wrong := _wrong(prompt, whole, self._given, self._shapes):
            self.wrong = self.wrong or wrong
            return entry | {"error": wrong, "refused": answer}
        if self.answers == 1:
            self.wrong = self.wrong or _foreseen(prompt, whole, self._given)
        return whole


def _worker(
    todo: "queue.SimpleQueue[_Prompt]", came: "queue.SimpleQueue[tuple[_Prompt, Any] | None]", asking: Asking,
    stop: threading.Event,
) -> None:  # fmt: skip
    """Ask for one prompt after another, each as often as it may fail; at the end say that this was all."""
    with suppress(queue.Empty):
        while not stop.is_set():
            prompt = todo.get_nowait()
            came.put((prompt, _persistent(prompt, asking, stop)))
    came.put(None)


def _persistent(prompt: _Prompt, asking: Asking, stop: threading.Event) -> Any:
    """The answer to a prompt, or the exception that the last attempt raised."""
    chance, pause = random.Random(prompt.number), asking.pause
    for left in range(asking.retries, -1, -1):
        try:
            return _exchange(asking, prompt.place, prompt.body)
        except (_Refused, OSError, http.client.HTTPException, ValueError) as error:
            status = error.code if isinstance(error, urllib.error.HTTPError) else _AGAIN[0]
            if isinstance(error, _Refused) or status not in _AGAIN or not left:
                return error
            if stop.wait(pause * (0.5 + chance.random() / 2)):
                return error
        pause = min(2 * pause, _LONGEST_PAUSE)
    return None


def _exchange(asking: Asking, place: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Send a request, and give the JSON object that comes back.

    Raises _Refused for a request that is wrong in itself, OSError, HTTPException or ValueError for what may pass.
    """
    headers = {"Content-Type": "application/json"}
    if asking.key_variable is not None:
        headers["Authorization"] = f"Bearer {os.environ.get(asking.key_variable, '')}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{asking.address}/{place}", data, headers)
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=asking.timeout) as response:
            answer = json.loads(_body(response, started + asking.timeout))
    except urllib.error.HTTPError as error:
        if error.code in (400, 413, 422):
            reason = error.read(300).decode("utf-8", "replace")
            raise _Refused(f"status {error.code}: {' '.join(reason.split())}") from None
        raise
    if not isinstance(answer, dict):
        raise ValueError("the answer is no JSON object")
    return answer


def _body(response: http.client.HTTPResponse, until: float) -> bytes:
    """All that a server sends; raises TimeoutError if it is not whole by then, however steadily it comes."""
    parts = []
    while part := response.read1(2**20):
        parts.append(part)
        if time.monotonic() > until:
            raise TimeoutError
    return b"".join(parts)


def _wrong(prompt: _Prompt, entry: dict[str, Any], given: Given, shapes: set[tuple[int, ...]]) -> str:
    """Why an answer cannot be used, in a line; empty where it can. ``shapes`` has that of the answers before."""
    where = f"prompt {prompt.number}"
    try:
        for exchange in exchanges(entry, where):
            model = with_model(exchange, given).recorded
            for request in requests_of(exchange, given):
                if request.routes.shape[1:] not in (shapes or {request.routes.shape[1:]}):
                    return f"{where}: routes of (layers, k) {request.routes.shape[1:]}, others have another shape"
                if model is not None and model.spec is not None and (odd := _beyond(request.routes, model.spec)):
                    return f"{where}: expert {odd}, expected 0 to {model.spec.experts - 1} of {model.name}"
                shapes.add(request.routes.shape[1:])
    except InputError as error:
        return str(error)
    return ""


def _beyond(routes: np.ndarray, spec: ModelSpec) -> int:
    """An id that is neither an expert's of the model nor filler; 0 where there is none. Shared experts stand last."""
    ids = routes[:, :, : spec.top_k]
    odd = ids[(ids >= spec.experts) & ~np.isin(ids, (255, np.iinfo(ids.dtype).max))]
    return int(odd[0]) if len(odd) else 0


def _foreseen(prompt: _Prompt, entry: dict[str, Any], given: Given) -> str:
    """What convert would say of all answers at the end, in a line, told from the first; empty where it takes them."""
    try:
        for exchange in exchanges(entry, f"prompt {prompt.number}"):
            trace_of(Record(list(requests_of(exchange, given))), with_model(exchange, given), "answer")
    except InputError as error:
        return str(error)
    return ""


def _append(file: Any, entry: dict[str, Any] | None) -> None:
    if entry is None:
        return
    file.write(json.dumps(entry).encode() + b"\n")
    file.flush()


def _lines(log: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """(place, line, entry) of each whole line of a log; one that a killed process left half-written is cut off."""
    if not log.exists():
        return
    with log.open("rb+") as file:
        at = 0
        for line in file:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                file.truncate(at)
                return
            yield at, line, entry
            at += len(line)


def _answered(log: Path) -> set[str]:
    """Keys of the prompts that need not be asked again: those that were answered, or refused for what they are."""
    return {str(entry.get("key")) for _, _, entry in _lines(log) if "refused" not in entry}


def _put_in_order(log: Path, keys: list[str]) -> None:
    """Write the log anew in the order of the prompts, without entries of other runs, unless it is so already."""
    places = {str(entry.get("key")): (at, len(line)) for at, line, entry in _lines(log) if "refused" not in entry}
    if list(places) == keys and sum(size for _, size in places.values()) == log.stat().st_size:
        return
    with atomic_path(log) as part, log.open("rb") as old, part.open("wb") as new:
        for key in keys:
            at, size = places[key]
            old.seek(at)
            new.write(old.read(size))


def _words(error: BaseException) -> str:
    """What went wrong, in a line."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
        return "no answer in time"
    return " ".join(str(getattr(error, "reason", None) or error or type(error).__name__).split())[:200]
