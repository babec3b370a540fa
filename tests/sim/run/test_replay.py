"""From a file to a report: what is learned from, what is charged, what memory is counted."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim.run.prepared
import sim.run.terms
from ground.errors import InputError
from sim.bounds import bounds
from sim.plan import Host
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from tests.support.strategies import make_trace
from tests.support.worlds import handmade, toy_meta
from traces.models.released import RELEASED
from traces.trace import Trace

H200 = {"hardware": "h200", "cache": "4"}


@pytest.fixture
def split_trace(tmp_path: Path) -> Path:
    """Profile sequences take experts 0 to 3, evaluation ones 4 to 7; prompts of 3 tokens at positions 0 to 2."""
    rng = np.random.default_rng(1)
    routes = rng.random((40, 2, 4)).argsort(axis=2)[:, :, :2] + np.repeat([0, 4], 20)[:, None, None]
    trace = make_trace(
        routes, n_experts=8, phase=([0] * 3 + [1] * 7) * 4, sequence=np.repeat([0, 1, 2, 3], 10).tolist(),
        split=["profile", "profile", "eval", "eval"], domain=["law"] * 4,
    )  # fmt: skip
    trace.meta["model"] |= toy_meta(2)
    path = tmp_path / "split.npz"
    trace.save(path)
    return path


@pytest.mark.parametrize("split", ["eval", "all"])
def test_policies_learn_from_the_profile_split_alone(split_trace: Path, split: str) -> None:
    here = scene(split_trace, split=split, **H200)
    values = prepare(here, "popularity").plan.values
    assert values is not None
    counts = values.table.reshape(-1, 2, 8)
    assert counts[:, :, :4].sum() == 2 * 14 * 2, "every decode token of the profile, two experts at each of two layers"
    assert counts[:, :, 4:].sum() == 0, "nothing of the evaluation split"


WRONG = {
    "model": st.integers(), "hardware": st.none(), "software": st.booleans(), "cache": st.integers() | st.none(),
    "profile": st.integers() | st.lists(st.none(), min_size=1), "split": st.none() | st.booleans(),
    "batch": st.floats() | st.text() | st.booleans(), "seed": st.floats() | st.none() | st.text(),
}  # fmt: skip


@given(named=st.sampled_from(sorted(WRONG)).flatmap(lambda name: st.tuples(st.just(name), WRONG[name])))
def test_a_value_of_another_type_is_refused_in_one_line_that_names_it(named: tuple[str, object]) -> None:
    name, value = named
    with pytest.raises(InputError) as refused:
        scene("no such file.npz", **{name: value})  # type: ignore[arg-type]
    assert str(refused.value).startswith(f"{name}: ") and "; expected " in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("traces", [5, [None], None])
def test_what_is_no_path_of_a_trace_is_refused(traces: Any) -> None:
    with pytest.raises(InputError, match=r"^traces: .*; expected a path"):
        scene(traces)


def test_a_prefill_is_charged_for_its_own_tokens(split_trace: Path) -> None:
    here = scene(split_trace, **H200)
    prefill = here.work.schedule.phase == 0
    # By hand for 3 tokens on the toy model (hidden 64, 4 heads of 16, 2 of them for keys and values): all blocks are so
    # small that floors and launches decide; the LM head reads 100 x 64 weights of 2 bytes, 3 ns, after one launch.
    software = here.hardware.software
    floor_us = software.layer_floor_us.value + software.route_wait_us.value
    assert (here.work.layer_ns.reshape(-1, 2)[prefill] >= floor_us * 1e3 - 1).all()
    assert np.abs(here.work.head_ns[prefill] - (software.operation_us.value * 1e3 + 3)).max() <= 1
    longer = scene(split_trace, split="all", **H200)
    assert longer.work.layer_ns.min() == here.work.layer_ns.min(), "the same prompt costs the same among others"


@pytest.mark.parametrize(("batch", "tokens"), [(1, 10), (2, 20)])
def test_the_memory_of_keys_and_values_is_that_of_all_running_tokens(
    split_trace: Path, batch: int, tokens: int
) -> None:
    here = scene(split_trace, batch=batch, **H200)
    # Keys and values of 2 heads of 16, 2 bytes each, at 2 layers; two sequences of 10 tokens.
    assert replay(here, "lru").gpu_bytes["kv"] == tokens * 2 * 2 * 16 * 2 * 2


# -- one run, prepared once --------------------------------------------------------------------------------------------


def test_a_run_is_settled_once_and_costs_of_the_host_are_computed_once(
    split_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, costed = [], []
    settle, costs = sim.run.prepared.settle, sim.run.terms.host_costs
    monkeypatch.setattr(sim.run.prepared, "settle", lambda *a: settled.append(a) or settle(*a))
    monkeypatch.setattr(sim.run.terms, "host_costs", lambda *a: costed.append(a) or costs(*a))
    run = prepare(scene(split_trace, **H200), "fiddler")
    assert isinstance(run.plan.host, Host)
    first, again = run.simulate(engine="simpy"), run.simulate()
    assert first.to_json() == again.to_json()
    assert (len(settled), len(costed)) == (1, 1)


def test_discipline_and_chunks_of_a_run_are_those_asked_for(split_trace: Path) -> None:
    run = prepare(scene(split_trace, **H200), "lru", discipline="preemptive", chunks=5)
    assert (run.terms.discipline, run.terms.chunks) == ("preemptive", 5)
    settings = run.simulate().settings
    assert (settings["discipline"], settings["chunks"]) == ("preemptive", 5)


# -- the hit ratio of MIN ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_the_hit_ratio_of_min_is_that_of_belady_who_loads_nothing_ahead(uses: list[int], slots: int) -> None:
    """A clairvoyant policy that prefetches has hits where MIN has misses, so its ratio is none to aim at."""
    work = handmade([[[expert]] for expert in uses], 6)
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for now, expert in enumerate(uses):
        if expert in held:
            hits += 1
            continue
        if len(held) == slots:
            later = {e: uses.index(e, now) if e in uses[now:] else len(uses) for e in held}
            del held[max(held, key=later.__getitem__)]
        held[expert] = None
    found = bounds(work, slots * work.expert_bytes[0], 1e9).decode_hit_ratio
    assert found == pytest.approx(hits / len(uses))


def test_a_report_tells_the_hit_ratio_of_min_beside_the_bounds(split_trace: Path) -> None:
    here = scene(split_trace, **H200)
    ratio = here.bound.decode_hit_ratio
    assert ratio is not None
    assert replay(here, "lru").bounds["min_hit_ratio"] == ratio >= replay(here, "lru").decode.hit_ratio
    assert replay(here, "all-in-gpu").bounds["min_hit_ratio"] is None, "it is held to no cache size"


# -- what a person should know -----------------------------------------------------------------------------------------


def device_trace(tmp_path: Path, **model: object) -> Path:
    """A trace of Mixtral whose experts were measured to have a tenth of their bytes."""
    routes = np.random.default_rng(0).random((40, 32, 8)).argsort(axis=2)[:, :, :2]
    sizes = [35_000_000] * 32
    trace = make_trace(routes, n_experts=8, phase=[0] * 4 + [1] * 36, name="mixtral-8x7b", expert_bytes=sizes)
    trace.meta["model"] |= model
    trace.save(tmp_path / "device.npz")
    return tmp_path / "device.npz"


def test_expert_sizes_that_a_trace_measured_stay_under_its_models_own_name(tmp_path: Path) -> None:
    """The option --model with the trace's own model name dropped them without a word."""
    path = device_trace(tmp_path)
    plain = scene(path, cache="4000MiB", learns=False)
    assert plain.model.expert_bytes == (35_000_000,) * 32
    for name in ("mixtral-8x7b", "Mixtral-8x7B"):
        named = scene(path, model=name, cache="4000MiB", learns=False)
        assert (named.model, named.notes) == (plain.model, plain.notes)
    assert plain.notes == (
        "experts of 35,000,000 bytes, as the trace states them; by its dimensions mixtral-8x7b has 352,321,536 bytes",
    )
    assert replay(plain, "lru").notes[:1] == list(plain.notes)


def test_expert_sizes_of_another_model_are_its_own_and_a_note_says_so(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(RELEASED["mixtral-8x7b"]))
    here = scene(device_trace(tmp_path), model=str(config), cache="50%", learns=False)
    assert here.model.expert_bytes == (352_321_536,) * 32
    (note,) = here.notes
    assert note == f"experts of 352,321,536 bytes, which are those of {config}; the trace states 35,000,000 bytes"


def test_a_trace_whose_dimensions_a_person_knows_alone_keeps_its_expert_sizes(tmp_path: Path) -> None:
    path = device_trace(tmp_path, name="nobody-knows-it")
    here = scene(path, model="mixtral-8x7b", cache="4000MiB", learns=False)
    assert here.model.expert_bytes == (35_000_000,) * 32
    assert "as the trace states them" in here.notes[0]


def test_a_trace_of_the_usual_sizes_has_no_note_of_them(split_trace: Path) -> None:
    assert scene(split_trace, **H200).notes == ()


def test_a_domain_without_a_profile_is_named_where_all_domains_stand_for_it(split_trace: Path, tmp_path: Path) -> None:
    """It fell back to all domains, and the report said nothing."""
    trace = Trace.load(split_trace)
    trace.domain[trace.split == "eval"] = "art"
    trace.save(tmp_path / "art.npz")
    noted = replay(scene(tmp_path / "art.npz", **H200), "popularity", {"by": "domain"}).notes
    assert "nothing profiled of art: all domains stand for it" in noted
    for path, values in ((tmp_path / "art.npz", {}), (split_trace, {"by": "domain"})):
        assert not any("nothing profiled" in note for note in replay(scene(path, **H200), "popularity", values).notes)


def test_what_is_doubtful_in_a_trace_is_told_by_every_replay_of_it(tmp_path: Path) -> None:
    """Only the conversion said that all rows took the same experts."""
    trace = make_trace(np.tile([0, 1], (40, 2, 1)), n_experts=8, phase=[0] * 4 + [1] * 36)
    trace.meta["model"] |= toy_meta(2)
    trace.save(tmp_path / "same.npz")
    report = replay(scene(tmp_path / "same.npz", **H200), "lru")
    assert any("all rows take the same experts in every layer" in note for note in report.notes)
