"""The host's one thread as a resource: both engines alike, slower hosts never faster, and no time where it has none."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.log import Log
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import HostTimes
from sim.plan import Plan, Requests
from sim.report.metrics import BINDS
from sim.run.prepared import PreparedRun, prepare
from sim.run.scene import Scene, scene
from tests.support.places import REPOSITORY
from tests.support.runs import compiled_log, simpy_run
from tests.support.worlds import PLANS_TAKE_LONG, World, arbitrary_plan, coarse, handmade, planned, undemanding, worlds

NS = st.sampled_from([0, 0, 1, 2, 3, 50, 20_000])
TIMES = st.builds(HostTimes, NS, NS, NS, NS, NS, st.integers(0, 1))
LAW = REPOSITORY / "traces" / "mixtral_law.npz"


def assert_same(one: Log, other: Log) -> None:
    for name in ("finish", "found", "stall_demand", "stall_late", "predict", "stall_host", "waited"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    assert one.counters == other.counters


@settings(max_examples=80, suppress_health_check=PLANS_TAKE_LONG)
@given(worlds(), st.integers(0, 2**32 - 1), st.integers(0, 150), TIMES)
def test_both_engines_give_the_same_integers(world: World, seed: int, wanted: int, times: HostTimes) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(seed)
    for slots in (1, 2, 3):
        some = {name: int(rng.integers(3)) for name in ("launch_ns", "beside_copy_ns")}
        work = dataclasses.replace(coarse(world.work, rng), **some, host_thread=times)
        here = dataclasses.replace(world, work=work, budget=slots * max(work.expert_bytes))
        plan = arbitrary_plan(rng, here, wanted)
        if not here.fits(plan):
            plan = undemanding(plan)
        arguments = work, plan, here.budget, here.discipline, here.chunks
        assert_same(simpy_run(*arguments).log(), compiled_log(*arguments))


@settings(max_examples=60, suppress_health_check=PLANS_TAKE_LONG)
@given(planned(), TIMES)
def test_policies_give_the_same_integers_and_no_time_changes_nothing(
    given: tuple[World, str, Plan], times: HostTimes
) -> None:
    pytest.importorskip("numba")
    world, _, plan = given
    arguments = plan, world.budget, world.discipline, world.chunks
    slow, free = (dataclasses.replace(world.work, host_thread=each) for each in (times, HostTimes()))
    assert_same(simpy_run(slow, *arguments).log(), compiled_log(slow, *arguments))
    assert_same(simpy_run(world.work, *arguments).log(), simpy_run(free, *arguments).log())


@settings(max_examples=25)
@given(worlds(), TIMES, TIMES)
def test_a_slower_host_is_never_faster_on_demand(world: World, times: HostTimes, more: HostTimes) -> None:
    """With requests, too, that ask for nothing new. (Where copies are made ahead, a later one may evict another.)"""
    slower = HostTimes(*(a + b for a, b in zip(vars(times).values(), vars(more).values(), strict=True)))
    work = world.work
    known = work.expert[: work.offsets[work.n_layers]]  # of the first step
    steps = np.repeat(np.arange(1, work.schedule.n_steps), len(known))
    asked = np.tile(known, work.schedule.n_steps - 1)
    calls = steps * work.n_layers + asked // work.n_experts
    again = Requests.build(steps * (work.n_layers + 1), calls, asked, calls) if len(steps) else None
    for plan, budget in ((Plan(), world.budget), (Plan(requests=again), sum(work.expert_bytes) * work.n_experts)):
        logs = [
            simpy_run(dataclasses.replace(work, host_thread=each), plan, budget).log() for each in (None, times, slower)
        ]
        for faster, behind in pairwise(logs):
            assert (behind.finish >= faster.finish).all()
            assert (behind.found == faster.found).all()


@pytest.mark.parametrize(
    ("times", "finish", "busy", "waits"),
    [
        (HostTimes(), 400, 0, 0),
        (HostTimes(launch_ns=1000), 7000, 7000, 6800),  # a layer, its two experts, a layer, its two experts, a head
        (HostTimes(look_up_ns=3), 412, 12, 12),
        (HostTimes(hand_over_ns=7), 414, 28, 0),  # the first of each call; the second while that is on the link
        # 1000 launched, 1006 looked up, 1013 and 1020 handed over, 2020 and 3020 launched; 4020 launched, 4026 looked
        # up, 4033 and 4040 handed over, 5040 and 6040 launched; 7040 launched. In all this the GPU waits for copies
        # from 1006 to 1113 and from 4026 to 4133.
        (HostTimes(0, 0, 7, 1000, 3), 7040, 7040, 7040 - 2 * 107),
    ],
)
def test_acts_take_their_time_in_order(times: HostTimes, finish: int, busy: int, waits: int) -> None:
    """A token through two layers of two experts, each copied in 100 ns; kernels take no time."""
    work = handmade([[[0, 1], [0, 1]]], 2, copy_ns=100, expert_bytes=10)
    log = simpy_run(dataclasses.replace(work, host_thread=times), Plan(), 40).log()
    counted = log.counters
    assert (log.finish.tolist(), counted.host_busy, counted.host_waits) == ([finish], [0, busy], [0, waits])


def test_requests_that_issue_no_copy_take_less() -> None:
    """Four experts are asked for as the second of two tokens begins, three of which are there."""
    work = handmade([[[0, 1, 2]], [[0, 1, 2]]], 4, copy_ns=100, expert_bytes=10)
    calls, moment = np.ones(4, np.int64), np.full(4, 2)
    plan = Plan(requests=Requests.build(moment, calls, np.arange(4), calls))
    log = simpy_run(dataclasses.replace(work, host_thread=HostTimes(request_ns=50, drop_ns=9)), plan, 40).log()
    assert log.finish.tolist() == [300, 300 + 50 + 3 * 9] and log.counters.host_busy == [0, 77]


def ready(here: Scene, policy: str, times: HostTimes | None) -> PreparedRun:
    return prepare(dataclasses.replace(here, work=dataclasses.replace(here.work, host_thread=times)), policy)


@pytest.fixture(scope="module")
def here() -> Scene:
    return scene(LAW, hardware="h200", cache="60%")


def test_reports_say_how_busy_the_host_is_and_when_it_binds(here: Scene) -> None:
    plain = ready(here, "previous-token", None).simulate()
    assert "host_thread" not in plain.settings and "host_thread" not in plain.decode.time_ms
    small = ready(here, "previous-token", HostTimes(request_ns=1, launch_ns=1)).simulate()
    shares = small.settings["host_thread"]["decode"]
    assert 0 < shares["busy_share"] < 1e-4 and not [note for note in small.notes if "binds" in note]
    slow = ready(here, "previous-token", HostTimes(launch_ns=2_000_000)).simulate()
    shares = slow.settings["host_thread"]["decode"]
    assert shares["waits_share"] > BINDS and any("host's thread binds: decode" in note for note in slow.notes)
    assert slow.decode.time_ms["host_thread"] == pytest.approx(
        shares["waits_share"] * sum(slow.decode.time_ms.values()), rel=1e-6
    )
    assert slow.tokens_per_s < small.tokens_per_s <= plain.tokens_per_s * 1.0001


def test_figures_of_a_profile_reach_the_run(tmp_path) -> None:
    text = (REPOSITORY / "sim/machine/profiles/h200.toml").read_text()
    profile = tmp_path / "slow.toml"
    profile.write_text(text + "\n[software.host_thread]\nrequest_ns = 200.5\nlaunch_ns = 5000\n")
    work = scene(LAW, hardware=str(profile), learns=False).work
    assert work.host_thread == HostTimes(request_ns=201, launch_ns=5000)
    assert Hardware.load("h200").without_loop().software.host_thread is None
