"""Generating with offloaded experts: the tokens of the resident model, whatever the policy believes."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from realrun.__main__ import main
from realrun.device import open_device
from realrun.generate import Choice, Generated, Offloader, resident_tokens
from realrun.live import LiveTrace, Planner, Shape
from sim.engine import by_moment
from sim.log import PREFILL
from sim.plan import Plan, Requests
from sim.policies import Policy, make_policy
from sim.replay import bundled_traces
from sim.view import View
from tests import tiny_families, tiny_moe
from tests.worlds import World, worlds
from traces.errors import InputError

LAW = next(path for path in bundled_traces() if path.name == "mixtral_law.npz")
PROMPT = [5, 9, 14, 7, 22, 31]
FAMILIES = [*tiny_families.FAMILIES, "glm4_moe", "switch"]


class Wrong(Policy):
    """Asks for every expert that it has no reason to ask for, at every moment, and for none of the previous token's."""

    name = "wrong"

    def plan(self, view: View) -> Plan:
        moments, calls, experts = [], [], []
        taken = view.previous_route()
        for row, step in enumerate(view.step.tolist()):
            for layer in range(view.n_layers):
                others = np.setdiff1d(np.arange(view.n_experts), taken[row, layer])
                moments += [step * (view.n_layers + 1)] * len(others)
                calls += [step * view.n_layers + layer] * len(others)
                experts += (layer * view.n_experts + others).tolist()
        asked = Requests.build(np.array(moments), np.array(calls), np.array(experts))
        return Plan(eviction="fifo", requests=asked, chunks=3)


def model_of(family: str) -> Any:
    return tiny_families.switch() if family == "switch" else tiny_families.decoder(family)


@cache
def resident(family: str) -> list[int]:
    with open_device("cpu") as device:
        return resident_tokens(model_of(family), device, PROMPT, 8, 2, set())


def generated(family: str, choice: Choice) -> Generated:
    with open_device("cpu") as device, Offloader(model_of(family), device, choice) as offloader:
        return offloader.generate(PROMPT, 8, 2, set())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", ["1", "25%", "100%"])
def test_g_28_3_every_family_says_the_same_at_every_residency(family: str, cache: str) -> None:
    result = generated(family, Choice("lru", cache=cache, check=True))
    assert result.tokens == resident(family)
    told = result.summary()
    assert told["hits"] + told["late"] + told["misses"] == told["lookups"] > 0
    if cache == "1":
        assert told["hits"] == 0


@pytest.mark.parametrize("cache", ["25%", "50%", "100%"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "switch"])
def test_g_28_3_a_wrong_predictor_changes_no_token(family: str, cache: str) -> None:
    result = generated(family, Choice("tests.test_generate:Wrong", cache=cache, check=True))
    assert result.tokens == resident(family)
    assert sum(result.counters[-1].issued) > 0


@pytest.mark.parametrize("policy", ["previous-token", "cache-moe", "lfu,scope=layer"])
def test_policies_that_need_no_future_run_online(policy: str) -> None:
    name, *settings = policy.split(",")
    values: dict[str, object] = dict([settings[0].split("=")]) if settings else {}
    assert generated("mixtral", Choice(name, values, cache="50%", check=True)).tokens == resident("mixtral")


def test_a_second_prompt_finds_what_the_first_left() -> None:
    with open_device("cpu") as device, Offloader(model_of("mixtral"), device, Choice(cache="100%")) as offloader:
        first = offloader.generate(PROMPT, 8, 2, set()).tokens
        again = offloader.generate(PROMPT, 8, 2, set())
    assert first == again.tokens == resident("mixtral")
    assert int((again.found[-1] == 4).sum()) <= 24  # no expert is copied twice


def test_what_must_see_the_future_is_refused() -> None:
    with pytest.raises(InputError, match="policy clairvoyant: it is told what comes"):
        generated("mixtral", Choice("clairvoyant"))


def test_what_a_running_model_cannot_give_is_named() -> None:
    shape = Shape("toy", (0, 1), 4, 1, 256, 3)
    with pytest.raises(InputError, match="embedding_basis"):
        LiveTrace(shape, frozenset({"embeddings"}), None)
    with pytest.raises(InputError, match="the array answers"):
        LiveTrace(shape, frozenset({"answers"}), None)


@settings(max_examples=40)
@given(worlds(prefill=True), st.sampled_from(["previous-token", "moe-infinity", "lru"]), st.data())
def test_decisions_moment_by_moment_are_those_of_a_whole_trace(world: World, name: str, data: st.DataObject) -> None:
    trace = world.trace.select("all")
    sequence = data.draw(st.integers(0, trace.n_sequences - 1))
    rows = np.flatnonzero(trace.sequence == sequence)
    if trace.phase[rows[0]] != PREFILL:
        return
    one = World(_only(trace, rows), world.model, world.hardware, 1, world.work, world.budget)
    policy = make_policy(name, one.setting)
    work = _work(one)
    whole = by_moment(policy.plan(policy.view(one.trace, work)), trace.n_experts)
    shape = Shape("toy", tuple(trace.layers.tolist()), trace.n_experts, trace.top_k, 64, 3)
    live = LiveTrace(shape, frozenset(), None)
    planner = Planner(policy, live)
    for step in range(work.schedule.n_steps):
        first, end = work.schedule.offsets[step : step + 2]
        planner.begin(int(end - first), int(work.schedule.phase[step]))
        for point in range(trace.n_layers + 1):
            if point:
                live.know(point - 1, experts=one.trace.experts[first:end, point - 1])
            decided = planner.decide(point)
            expected = whole.get(step * (trace.n_layers + 1) + point)
            assert _in_order(decided) == _in_order(expected)


def _in_order(decided: Any) -> list[tuple[int, int]]:
    """Requests (expert, call) as the link serves them; ranks are counted anew in each step."""
    requests = decided[2] if decided else []
    return [(expert, call) for expert, call, _ in sorted(requests, key=lambda request: request[2])]


def _only(trace: Any, rows: np.ndarray) -> Any:
    from tests.strategies import make_trace

    return make_trace(trace.experts[rows], n_experts=trace.n_experts, phase=trace.phase[rows], layers=trace.layers)


def _work(world: World) -> Any:
    from sim.workload import batched, workload

    return workload(world.trace, world.model, world.hardware, batched(world.trace, 1))


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    tiny_moe.mixtral().save_pretrained(folder)
    tiny_moe.tokenizer().save_pretrained(folder)
    yield folder


def test_the_command_prints_the_text_and_says_what_it_took(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    asked = ["--model", str(checkpoint), "--prompt", "the court clause", "--tokens", "6", "--device", "cpu"]
    assert main(["generate", *asked, "--policy", "previous-token", "--check", "--compare", "--json", str(told)]) == 0
    out = capsys.readouterr()
    assert len(out.out.split()) == 6
    assert "hits" in out.err and "compared True" in out.err
    assert '"token_ids"' in told.read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "clairvoyant"], "it is told what comes"),
        (["--policy", "nonsense"], "policy 'nonsense' is unknown"),
        (["--cache", "0"], "--cache '0'"),
        (["--tokens", "0"], "--tokens 0"),
        (["--device", "cuda"], "finds no GPU"),
        (["--policy", "fmoe"], "--profile"),
        (["--policy", "popularity", "--profile", str(LAW)], "32 layers x 8 experts; expected those of the model"),
        (["--seed", "-1"], "--seed -1; expected at least 0"),
        (["--host-memory", "1B"], "host memory for 24 experts"),
    ],
)
def test_the_command_refuses_in_one_line(
    checkpoint: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available() and "cuda" in more:
        pytest.skip("there is a GPU")
    device = [] if "--device" in more else ["--device", "cpu"]
    assert main(["generate", "--model", str(checkpoint), "--prompt", "the court", *device, *more]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert said in lines[0]


def test_a_model_that_differs_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.generate.resident_tokens", lambda *_: [1, 2, 3])
    asked = ["--model", str(checkpoint), "--prompt", "the court", "--tokens", "3", "--device", "cpu", "--compare"]
    assert main(["generate", *asked]) == 2
