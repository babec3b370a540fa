"""Prompts that run in parts (--ubatch): the same work, more steps, and what each part attends to."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.log import HOSTED
from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from sim.policies import policy_class
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from sim.workload import batched, workload
from tests.sim.machine.test_cost import machine, small
from tests.sim.run.test_cache import BUNDLED
from tests.sim.test_view import acts, other_future
from tests.support.runs import compiled_log, simpy_run
from tests.support.worlds import CHOICES, POLICIES, World, digest, worlds
from traces.models.known import builtin_models, model_spec
from traces.schema import PREFILL
from traces.trace import Trace

WHOLE = [name for name in POLICIES if "prefill_embeddings" not in policy_class(name).needs]
"""Policies that do not read whole prompts."""


def in_parts(world: World, rows: int) -> World:
    """The same world, prompts running in parts of so many rows."""
    schedule = batched(world.trace, world.batch, rows)
    work = workload(world.trace, world.model, world.hardware, schedule)
    return dataclasses.replace(world, work=work, profile=world.trace)


def prompts(trace: Trace) -> list[int]:
    """Rows of each prompt that there is."""
    counts = np.bincount(trace.sequence, trace.phase == PREFILL, minlength=trace.n_sequences).astype(int)
    return counts[counts > 0].tolist()


@given(worlds(prefill=True), st.integers(1, 6))
@settings(max_examples=40)
def test_parts_hold_the_rows_of_the_prompts_in_order(world: World, rows: int) -> None:
    schedule, whole = in_parts(world, rows).work.schedule, batched(world.trace, world.batch)
    assert schedule.rows.tolist() == whole.rows.tolist()
    sizes = np.diff(schedule.offsets)[schedule.phase == PREFILL]
    assert sizes.max(initial=0) <= rows
    assert (schedule.phase == PREFILL).sum() == sum(-(-n // rows) for n in prompts(world.trace))
    begins = (schedule.phase == PREFILL) & ~schedule.part
    assert begins.sum() == len(prompts(world.trace)), "each prompt begins once"
    if rows >= max(prompts(world.trace), default=0):
        one, other = (workload(world.trace, world.model, world.hardware, s) for s in (schedule, whole))
        assert one.layer_ns.tolist() == other.layer_ns.tolist() and one.head_ns.tolist() == other.head_ns.tolist()


@given(worlds(prefill=True), st.integers(1, 3), st.data())
@settings(max_examples=25)
def test_both_engines_agree_and_nobody_peeks(world: World, rows: int, data: st.DataObject) -> None:
    pytest.importorskip("numba", reason="the compiled engine needs numba")
    name = data.draw(st.sampled_from(WHOLE))
    values = data.draw(st.sampled_from(CHOICES.get(name, [{}])))
    here = in_parts(world, rows)
    plan = here.plan(name, values)
    here = here.with_room(plan)
    arguments = here.work, here.plan(name, values), here.budget, here.discipline, here.chunks
    assert digest(simpy_run(*arguments).log()) == digest(compiled_log(*arguments))
    kind = policy_class(name)
    if not kind.clairvoyant and not plan.ring:
        step = data.draw(st.integers(0, here.work.schedule.n_steps - 1))
        other = other_future(here, step, 3)
        assert acts(here, kind, values, step) == acts(other, kind, values, step)


@given(st.sampled_from(builtin_models()), st.sampled_from(["h200", "l40"]), st.integers(2, 5000), st.integers(1, 5000))
@settings(max_examples=40)
def test_parts_cost_no_less_than_the_whole_and_read_what_came_before(
    name: str, hardware: str, prompt: int, rows: int
) -> None:
    costs = Costs(model_spec(name), Hardware.load(hardware))
    ends = np.minimum(np.arange(rows, prompt + rows, rows), prompt)
    counts = np.diff(ends, prepend=0)
    parts = costs.layer_ns(counts, ends, ends > rows)
    whole = costs.layer_ns([prompt], [prompt])
    assert (parts.sum(axis=0) >= whole[0] - len(counts)).all(), "rounded up, each"
    assert (np.diff(parts[counts == rows], axis=0) >= 0).all(), "later parts have more before them"
    heads = costs.head_ns(counts, ends, ends > rows, ends == prompt)
    none = costs.head_ns(counts, ends, ends > rows, np.zeros(len(ends), bool))
    assert (heads[:-1] == none[:-1]).all() and heads[-1] > none[-1], "the last part alone has logits"


def test_the_pairs_of_parts_are_those_of_the_prompt() -> None:
    costs = Costs(small(), machine())  # arithmetic counts, since these rows are many
    ends = np.array([300, 600, 1000])
    parts = costs.layer_ns(np.diff(ends, prepend=0), ends, [False, True, True])[:, 1]
    whole = int(costs.layer_ns([1000], [1000])[0, 1])
    assert whole <= parts.sum() <= whole + 3
    assert parts[0] < parts[1], "as many rows, and more before them"


def test_ttft_is_of_the_prompt_and_steps_of_few_rows_run_on_the_host() -> None:
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    whole, parts = (scene(BUNDLED[0], ubatch=rows) for rows in (None, 16))
    lru = [replay(here, "lru") for here in (whole, parts)]
    assert lru[0].total.activations == lru[1].total.activations
    assert lru[1].ttft_ms.mean is not None and lru[0].ttft_ms.mean is not None
    assert lru[1].ttft_ms.mean > lru[0].ttft_ms.mean
    assert lru[1].settings["ubatch"] == 16
    # From 32 rows on experts are copied: whole prompts are, parts of 16 rows are not.
    runs = [prepare(here, "lru-host") for here in (whole, parts)]
    hosted = [int((run.execute().log.found[run.scene.work.lookup_phase == PREFILL] == HOSTED).sum()) for run in runs]
    assert hosted[1] > hosted[0]


def test_what_does_not_go_with_parts_is_refused_in_a_line() -> None:
    if not BUNDLED:
        pytest.skip("no bundled traces beside the package")
    with pytest.raises(InputError, match="--ubatch 0; expected at least 1 row"):
        scene(BUNDLED[0], ubatch=0)
    with pytest.raises(InputError, match="--ubatch: prompts of batches in lockstep run whole; expected no --regroup"):
        scene(BUNDLED[0], ubatch=8, batch=2, regroup="none")
    with pytest.raises(InputError, match="policy domoe: it reads whole prompts, and --ubatch runs them in parts"):
        prepare(scene(BUNDLED[0], ubatch=8), "domoe")
