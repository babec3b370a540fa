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

from ground.errors import InputError
from realrun.__main__ import main
from realrun.device.open_device import open_device
from realrun.generate.expert_weights import ExpertWeights
from realrun.generate.live import LiveTrace, Planner, StackShape, check_basis, check_online
from realrun.generate.offloader import Generated, Offloader, resident_tokens
from realrun.generate.options import OffloadOptions
from sim.plan import Plan, Requests
from sim.policies import Policy, make_policy, policy_class
from sim.run.scene import bundled_traces
from sim.view import View
from tests.support import tiny_families, tiny_moe
from tests.support.worlds import World, worlds
from traces.capture.checkpoint import skeleton
from traces.capture.routers import parts, routed_layers
from traces.embeddings import Basis
from traces.schema import PREFILL
from traces.trace import Trace

LAW = next(path for path in bundled_traces() if path.name == "mixtral_law.npz")
PROMPT = [5, 9, 14, 7, 22, 31]


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


@cache
def resident(family: str) -> list[int]:
    with open_device("cpu") as device:
        return resident_tokens(tiny_families.model_of(family), device, PROMPT, 8, 2, set())


def generated(family: str, options: OffloadOptions) -> Generated:
    with open_device("cpu") as device, Offloader(tiny_families.model_of(family), device, options) as offloader:
        return offloader.generate(PROMPT, 8, 2, set())


@pytest.mark.parametrize("family", tiny_families.ALL)
@pytest.mark.parametrize("cache", ["1", "25%", "100%"])
def test_every_family_says_the_same_at_every_residency(family: str, cache: str) -> None:
    """Seen in EfficientMoE/MoE-Infinity#32, jundot/omlx#2595: does a wrong prefetch change the output?"""
    result = generated(family, OffloadOptions("lru", cache=cache, check=True))
    assert result.tokens == resident(family)
    told = result.summary()
    assert told["hits"] + told["late"] + told["misses"] == told["lookups"] > 0
    if cache == "1":
        assert told["hits"] == 0


LONG_PROMPT = [3 + (7 * i * i + i) % 60 for i in range(40)]


@pytest.mark.parametrize("tokens", [30, 40])
@pytest.mark.parametrize("kind", tiny_families.SCALED)
def test_positions_that_depend_on_length_give_the_tokens_of_generate_or_are_refused(kind: str, tokens: int) -> None:
    family, fields = tiny_families.SCALED[kind]
    prompt = LONG_PROMPT[:tokens]

    def model() -> Any:
        made = tiny_families.decoder(family, **fields)
        made.config.eos_token_id = made.generation_config.eos_token_id = None
        return made

    with open_device("cpu") as device, Offloader(model(), device, OffloadOptions(cache="50%")) as offloader:
        if "dropped" in kind and tokens == 30:
            with pytest.raises(InputError, match=r"^--tokens 8: at 32 tokens PhimoeForCausalLM prefills .* at most 2"):
                offloader.generate(prompt, 8, 2, set())
            return
        found = offloader.generate(prompt, 8, 2, set()).tokens
    said = model().generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=2)
    assert found == said[0, tokens:].tolist()


@pytest.mark.parametrize("cache", ["25%", "50%", "100%"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "switch"])
def test_a_wrong_predictor_changes_no_token(family: str, cache: str) -> None:
    """Seen in EfficientMoE/MoE-Infinity#32, jundot/omlx#2595: does a wrong prefetch change the output?"""
    result = generated(family, OffloadOptions("tests.realrun.generate.test_generate:Wrong", cache=cache, check=True))
    assert result.tokens == resident(family)
    assert sum(result.counters[-1].issued) > 0


@pytest.mark.parametrize("family", ["mixtral", "switch"])
def test_a_policy_that_holds_everything_copies_nothing_while_it_runs(family: str) -> None:
    result = generated(family, OffloadOptions("all-in-gpu", cache="1", check=True))
    assert result.tokens == resident(family)
    told = result.summary()
    assert told["hits"] == told["lookups"] > 0 and told["link_bytes"] == {"demand": 0, "prefetch": 0}
    assert "= 100.0% of all experts" in told["cache"]
    assert all(not np.any(found) for found in result.found)


@pytest.mark.parametrize("policy", ["previous-token", "cache-moe", "lfu,scope=layer"])
def test_policies_that_need_no_future_run_online(policy: str) -> None:
    name, *settings = policy.split(",")
    values: dict[str, object] = dict([settings[0].split("=")]) if settings else {}
    assert generated("mixtral", OffloadOptions(name, values, cache="50%", check=True)).tokens == resident("mixtral")


@pytest.mark.parametrize("family", tiny_families.ALL)
def test_a_skeleton_has_the_structure_of_the_model(family: str, tmp_path: Path) -> None:
    model = tiny_families.model_of(family)
    model.save_pretrained(tmp_path)
    bones = skeleton(tmp_path)
    assert all(parameter.is_meta for parameter in bones.parameters())
    for part in parts(model):
        shapes = [[(w.count, [p.shape for p in w.parts]) for w in map(ExpertWeights, routed_layers(one, part))]
                  for one in (model, bones)]  # fmt: skip
        assert shapes[0] == shapes[1]


def test_a_second_prompt_finds_what_the_first_left() -> None:
    options = OffloadOptions(cache="100%")
    with open_device("cpu") as device, Offloader(tiny_families.model_of("mixtral"), device, options) as offloader:
        first = offloader.generate(PROMPT, 8, 2, set()).tokens
        again = offloader.generate(PROMPT, 8, 2, set())
    assert first == again.tokens == resident("mixtral")
    assert int((again.found[-1] == 4).sum()) <= 24  # no expert is copied twice


def test_what_must_see_the_future_is_refused() -> None:
    with pytest.raises(InputError, match="policy clairvoyant: it is told what comes"):
        generated("mixtral", OffloadOptions("clairvoyant"))


def test_what_a_running_model_cannot_give_is_named() -> None:
    class Asking(Policy):
        name = "asking"
        needs = frozenset({"answers"})

    with pytest.raises(InputError, match="policy asking: it needs the array answers"):
        check_online(Asking)
    profile = Trace.load(LAW).select("profile")
    basis = Basis(np.eye(4, 3, dtype=np.float32), np.ones(3, np.float32), 6)
    check_basis(policy_class("lru"), None, [profile])
    check_basis(policy_class("fmoe"), basis, [])
    with pytest.raises(InputError, match=r"policy fmoe: .* has no embedding_basis\.npz"):
        check_basis(policy_class("fmoe"), None, [profile])
    with pytest.raises(InputError, match=rf"mixtral_law\.npz: embedding basis .* expected .* {basis.sha256[:8]}"):
        check_basis(policy_class("fmoe"), basis, [profile])


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
    whole = policy.plan(policy.view(one.trace, work)).by_moment(trace.n_experts)
    shape = StackShape("toy", tuple(trace.layers.tolist()), trace.n_experts, trace.top_k, 64, 3)
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
    from tests.support.strategies import make_trace

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
        (["--policy", "pregated-moe"], "it is told what comes"),
        (["--policy", "fiddler"], "it runs experts on the host, which only a replay does"),
        (["--policy", "nonsense"], "policy 'nonsense' is unknown"),
        (["--policy", "lru,scope=world"], "policy lru: parameter scope = 'world'; expected"),
        (["--policy", "lru", "--set", "colour=red"], "policy lru: parameter colour"),
        (["--policy", "fmoe"], "--profile"),
        (["--policy", "fmoe", "--profile", str(LAW)], "the checkpoint has no embedding_basis.npz"),
        (["--policy", "popularity", "--profile", str(LAW)], "32 layers x 8 experts; expected those of the model"),
        (["--policy", "popularity", "--profile", "absent.npz"], "absent.npz"),
        (["--cache", "0"], "--cache '0': expected room for one expert"),
        (["--cache", "0%"], "--cache '0%': expected room for one expert"),
        (["--cache", "2.5"], "--cache '2.5': expected a whole number of slots"),
        (["--cache", "much"], "--cache 'much': expected slots (64)"),
        (["--tokens", "0"], "--tokens 0"),
        (["--seed", "-1"], "--seed -1; expected at least 0"),
        (["--host-memory", "much"], "--host-memory 'much': expected bytes"),
        (["--device", "cuda"], "finds no GPU"),
        (["--device", "abacus"], "abacus"),
        (["--prompt", ""], "--prompt '': no token in it"),
        (["--prompt", "the \udcff court"], "--prompt 'the \\udcff court': not UTF-8"),
        (["--tokens", "100000000000"], "the model has 131072 positions; expected at most 131070"),
        (["--prompt", "the " * 131072], "--prompt: 131072 tokens; expected fewer than the 131072 positions"),
        (["--model", ""], "--model '': expected a checkpoint's folder"),
        (["--model", __file__], "test_generate.py: is a file; expected the folder of a checkpoint"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line_before_the_model_is_loaded(
    checkpoint: Path,
    more: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.is_available() and "cuda" in more:
        pytest.skip("there is a GPU")
    monkeypatch.setattr("traces.capture.checkpoint.load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    assert said in refusal(checkpoint, more, capsys)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--host-memory", "1B"],
            "host memory for 24 experts: needs 288.75 KiB and 1 B are free; give more --host-mem",
        ),
        (["--cache", "100B"], "cannot hold one expert of"),
        (["--cache", "1", "--policy", "lru,scope=layer"], "policy lru: cache: "),
    ],
)
def test_what_the_weights_decide_is_refused_in_one_line(
    checkpoint: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(checkpoint, more, capsys)


def test_memory_that_a_run_on_the_cpu_does_not_have_is_told_before_it_is_taken(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("host_device", "host_memory"):
        monkeypatch.setattr(f"realrun.device.{module}.free_host_bytes", lambda: 70_000)
    slots = "host memory for 6 expert slots: needs 72.00 KiB and 68.36 KiB are free; give a smaller --cache"
    with monkeypatch.context() as patched:
        patched.setattr("traces.capture.checkpoint.weight_bytes", lambda folder: 0)
        assert slots in refusal(checkpoint, [], capsys)
        assert main(["generate", "--model", str(checkpoint), "--prompt", "the", "--device", "cpu", "--cache", "5"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("traces.capture.checkpoint.load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    assert "host memory for the weights of" in refusal(checkpoint, [], capsys)


def test_a_dense_model_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_moe.llama().save_pretrained(tmp_path)
    monkeypatch.setattr("traces.capture.checkpoint.load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    assert "no MoE layer with a known router" in refusal(tmp_path, [], capsys)


def refusal(model: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line that the command ends with."""
    given = {"--prompt": "the court", "--device": "cpu"}
    given["--model"] = str(model)
    rest = [word for option, value in given.items() if option not in more for word in (option, value)]
    assert main(["generate", *rest, *more]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    return lines[0]


def test_a_model_that_differs_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.generate.offloader.resident_tokens", lambda *_: [1, 2, 3])
    asked = ["--model", str(checkpoint), "--prompt", "the court", "--tokens", "3", "--device", "cpu", "--compare"]
    assert main(["generate", *asked]) == 2
