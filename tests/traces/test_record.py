"""Asking a server for answers with their routes: a small one here that answers, fails, dawdles or lies."""

import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.engine_records import TRUTH, dynamo, given, npy, sglang_openai, vllm_chat, vllm_old
from tests.support.records import notes
from traces.__main__ import main
from traces.record import Asking, record
from traces.trace import Trace

Behaviour = Callable[[int, int, dict[str, Any]], Any]
"""What a server does about a prompt (its number, how often it came before, the request): an answer, a status, bytes to
send as they are or little by little, or None to hang up."""


class Server:
    """A server on this machine that behaves as it is told."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.seen: Counter[int] = Counter()
        self.requests: list[dict[str, Any]] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, json.dumps({"data": [{"id": "toy"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
                number = int(text.split()[-1])
                with lock:
                    before = outer.seen[number]
                    outer.seen[number] += 1
                    outer.requests.append(body | {"place": self.path})
                made = behaviour(number, before, body)
                if isinstance(made, int):
                    self.reply(made, b'{"error": "no"}')
                elif isinstance(made, Iterator):
                    self.drip(made)
                elif made is not None:
                    self.reply(200, made if isinstance(made, bytes) else json.dumps(made).encode())

            def reply(self, status: int, data: bytes) -> None:
                with contextlib.suppress(OSError):  # nobody may wait any more
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def drip(self, parts: Iterator[bytes]) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.end_headers()
                    for part in parts:
                        self.wfile.write(part)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Behaviour], Server]]:
    running: list[Server] = []

    def start(behaviour: Behaviour) -> Server:
        running.append(Server(behaviour))
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "say 0", "domain": "law"}, {"messages": [{"role": "user", "content": "say 1"}], "domain": "law"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, {"prompt": "say 2", "domain": "law"})))
    return path


def ask(server: Server, **changes: Any) -> Asking:
    return Asking(server.address, **{"pause": 0.01, "retries": 3, "concurrency": 2} | changes)


def check(trace: Trace) -> None:
    """All three answers, in the order of the prompts."""
    assert [int((trace.sequence == s).sum()) for s in range(3)] == [len(one) for one in TRUTH]
    np.testing.assert_array_equal(trace.experts, np.concatenate(TRUTH))
    assert trace.domain.tolist() == ["law"] * 3


@pytest.mark.parametrize("answer", [vllm_chat, vllm_old, sglang_openai, dynamo])
def test_answers_of_every_engine_become_a_trace(answer: Any, serve: Any, prompts: Path, tmp_path: Path) -> None:
    server = serve(lambda number, before, body: answer(number))
    check(record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path)))
    check(Trace.load(tmp_path / "o.npz"))
    assert {one["place"] for one in server.requests} == {"/v1/completions", "/v1/chat/completions"}
    assert all(one["model"] == "toy" and one["return_routed_experts"] for one in server.requests)
    record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path))  # all is in the log
    assert set(server.seen.values()) == {1}


def test_what_fails_is_asked_again(serve: Any, prompts: Path, tmp_path: Path) -> None:
    odd = [503, None, b'{"choices": [', 429]
    server = serve(lambda number, before, body: odd[before] if before < 3 else vllm_chat(number))
    check(record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path)))
    assert set(server.seen.values()) == {4}


def test_a_run_that_was_cut_off_goes_on_where_it_was(serve: Any, prompts: Path, tmp_path: Path) -> None:
    broken = serve(lambda number, before, body: 500 if number == 1 else vllm_chat(number))
    log = tmp_path / "o.npz.answers.jsonl"
    with pytest.raises(InputError, match="1 of 3 prompts were not answered, first prompt 1: status 500; the other"):
        record(prompts, tmp_path / "o.npz", ask(broken), given(tmp_path))
    assert log.read_text().count("\n") == 2 and not (tmp_path / "o.npz").exists()
    with log.open("a") as file:
        file.write('{"key": "half a li')
    whole = serve(lambda number, before, body: vllm_chat(number))
    check(record(prompts, tmp_path / "o.npz", ask(whole), given(tmp_path)))
    assert whole.seen == {1: 1}


def test_a_slow_server_is_given_up_at_last_and_several_are_asked_together(
    serve: Any, prompts: Path, tmp_path: Path
) -> None:
    together, ended = threading.Barrier(3), threading.Event()

    def slow(number: int, before: int, body: dict[str, Any]) -> Any:
        together.wait(60)  # only requests that are under way together come past this
        if number == 1:
            ended.wait(60)
        return vllm_chat(number)

    server = serve(slow)
    with pytest.raises(InputError, match="1 of 3 prompts were not answered, first prompt 1: no answer in time"):
        record(prompts, tmp_path / "o.npz", ask(server, timeout=2, retries=0, concurrency=3), given(tmp_path))
    ended.set()


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda i: TRUTH[i][:-2].astype(np.uint8), "7 rows of routes for 6 prompt and 4 generated tokens, expected 9"),
        (lambda i: TRUTH[i][:, :, None].astype(np.uint8), r"shape \(9, 5, 1, 4\), expected integers"),
        (lambda i: TRUTH[i].astype(float), "float64 of shape"),
    ],
)
def test_a_server_that_lies_about_shapes_is_told_at_once_and_nothing_is_lost(
    lie: Any, words: str, serve: Any, prompts: Path, tmp_path: Path
) -> None:
    def answer(number: int, before: int, body: dict[str, Any]) -> Any:
        made = vllm_chat(number)
        if number == 0:
            made["choices"][0]["routed_experts"] = npy(lie(number))
        return made

    with pytest.raises(InputError, match=f"prompt 0: .*{words}.*kept in"):
        record(prompts, tmp_path / "o.npz", ask(serve(answer), concurrency=1), given(tmp_path))
    log = [json.loads(line) for line in (tmp_path / "o.npz.answers.jsonl").read_text().splitlines()]
    assert log[0]["refused"]["choices"] and all("response" in entry for entry in log[1:])
    assert not (tmp_path / "o.npz").exists()
    honest = serve(lambda number, before, body: vllm_chat(number))
    check(record(prompts, tmp_path / "o.npz", ask(honest), given(tmp_path)))
    assert len(honest.seen) == 3 - len(log[1:])


def test_a_server_that_sends_a_byte_now_and_then_is_given_up_too(serve: Any, prompts: Path, tmp_path: Path) -> None:
    ended = threading.Event()

    def drip() -> Iterator[bytes]:
        while not ended.wait(0.05):
            yield b" "

    server = serve(lambda number, before, body: drip() if number == 1 else vllm_chat(number))
    with pytest.raises(InputError, match="first prompt 1: no answer in time"):
        record(prompts, tmp_path / "o.npz", ask(server, timeout=0.5, retries=0), given(tmp_path))
    ended.set()


def test_whatever_goes_wrong_every_prompt_is_in_the_trace_once_and_in_its_place(serve: Any, tmp_path: Path) -> None:
    chance, lock = random.Random(0), threading.Lock()

    def unreliable(number: int, before: int, body: dict[str, Any]) -> Any:
        with lock:
            odd = chance.choice([500, None, b"", b"[1]", 502, "good", "good"])
        return vllm_chat(number % 3) if odd == "good" or before > 8 else odd

    count = 40
    (tmp_path / "p.txt").write_text("".join(f"say {number}\n" for number in range(count)))
    server = serve(unreliable)
    asking = ask(server, retries=1, concurrency=7, pause=0.0)
    for _ in range(20):
        try:
            trace = record(tmp_path / "p.txt", tmp_path / "o.npz", asking, given(tmp_path))
            break
        except InputError as error:
            assert "prompts were not answered" in str(error)
    np.testing.assert_array_equal(trace.experts, np.concatenate([TRUTH[number % 3] for number in range(count)]))
    assert max(server.seen.values()) <= 10 and len(server.seen) == count


@pytest.mark.parametrize("odd", ["shape", "expert"])
def test_an_answer_that_does_not_fit_the_others_or_the_model_is_told_at_once_and_asked_again(
    odd: str, serve: Any, prompts: Path, tmp_path: Path
) -> None:
    def answer(number: int, before: int, body: dict[str, Any]) -> Any:
        made = vllm_chat(number)
        ids = TRUTH[number].astype(np.uint8)
        if number == 1 and not before:
            ids = ids[:, :3] if odd == "shape" else ids + 7
            made["choices"][0]["routed_experts"] = npy(ids)
        return made

    server = serve(answer)
    words = r"\(layers, k\) \(3, 4\), others" if odd == "shape" else r"expert \d+, expected 0 to 15"
    with pytest.raises(InputError, match=f"prompt 1: .*{words}.*kept in"):
        record(prompts, tmp_path / "o.npz", ask(server, concurrency=1), given(tmp_path))
    check(record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path)))
    assert server.seen == {0: 1, 1: 2, 2: 1}


def test_what_convert_would_say_at_the_end_is_said_after_the_first_answer_which_is_kept(
    serve: Any, prompts: Path, tmp_path: Path
) -> None:
    server = serve(lambda number, before, body: vllm_chat(number))
    with pytest.raises(InputError, match="5 layers, top-4 is of no known model, expected --model"):
        record(prompts, tmp_path / "o.npz", ask(server, concurrency=1))
    check(record(prompts, tmp_path / "o.npz", ask(server, concurrency=1), given(tmp_path)))
    assert set(server.seen.values()) == {1}


def test_a_request_that_the_server_refuses_is_noted_and_the_others_stay(
    serve: Any, prompts: Path, tmp_path: Path
) -> None:
    server = serve(lambda number, before, body: 400 if number == 0 else vllm_chat(number))
    with pytest.raises(InputError, match="1 of 3 prompts were not answered, first prompt 0: status 400"):
        record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path))
    trace = record(prompts, tmp_path / "o.npz", ask(server), given(tmp_path))
    assert trace.n_sequences == 2 and "1 answers are errors without routes" in notes(trace)
    assert server.seen == {0: 1, 1: 1, 2: 1}


def test_a_server_without_routes_or_without_a_life_is_said_in_a_line(
    serve: Any, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(lambda number, before, body: {"choices": [{"text": "x"}]})
    command = ["record", "--prompts", str(prompts), "-o", str(tmp_path / "o.npz")]
    assert main([*command, "--server", server.address]) == 2
    assert "has no routes: start vLLM or SGLang with --enable-return-routed-experts" in capsys.readouterr().err
    server.close()
    assert main([*command, "--server", server.address]) == 2
    err = capsys.readouterr().err
    assert "Connection refused; is the server up?" in err and err.count("\n") == 1
