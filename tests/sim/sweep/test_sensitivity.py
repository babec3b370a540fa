"""What becomes of a sweep's conclusions where a figure that a profile assumes is another."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sim.machine.assembly import Assembly
from sim.machine.hardware import Hardware, builtin_hardware
from sim.sweep.design import hardware_of
from sim.sweep.log import Log
from sim.sweep.row import Row
from sim.sweep.sensitivity import Range, Varied, assumed, effects, ranges, varied
from sim.sweep.table import read_table
from sim.sweep.workers import run_here
from tests.sim.sweep.test_rows import design


@pytest.mark.parametrize("name", builtin_hardware())
def test_every_figure_that_a_built_in_profile_assumes_has_a_range_within_which_it_is_valid(name: str) -> None:
    known = {figure for one in ranges() for figure in one.figures}
    assert assumed(Hardware.load(name)) | assumed(Assembly(name, "graphs").load()) <= known
    for loop in (None, "graphs"):
        for one in varied([("", design(trace="a.npz", hardware=name, loop=loop))]):
            assert hardware_of(Assembly(name, loop), one.design.changes("hardware")).name != name
    assert all(0 <= low < 1 < high for one in ranges() for low, high in one.figures.values())


def test_a_figure_that_the_sweep_sets_itself_is_not_varied() -> None:
    plain = {one.range.name for one in varied([("", design(trace="a.npz"))])}
    set_ = {one.range.name for one in varied([("", design(trace="a.npz", hardware__link__gbps=50.0))])}
    assert plain - set_ == {"link rate"}
    assert not list(varied([("", design(trace="a.npz", hardware="h200"))])), "which was measured"
    assert not list(varied([("", design(trace="a.npz", hardware="abacus"))])), "which cannot be run"


def row(key: str, ns: list[int]) -> Row:
    tokens = [10] * len(ns)
    speed = sum(tokens) * 1e9 / sum(ns)
    return Row(key, "ok", values={"tokens_per_s": speed, "reference": ""}, sequences={"tokens": tokens, "ns": ns})


def test_conclusions_hold_turn_or_become_unsure(tmp_path: Path) -> None:
    a, b = (design(trace="a.npz", policy=policy) for policy in ("lru", "lfu"))
    ends = {
        "held": ([11, 21, 31], [20, 40, 60]),
        "turned": ([40, 80, 120], [20, 40, 60]),
        "unsure": ([20, 40, 60], [25, 30, 70]),
    }
    with Log(tmp_path) as log:
        log.append(row("a", [10, 20, 30]))
        log.append(row("b", [20, 40, 60]))
        others: list[tuple[str, Varied]] = []
        for name, times in ends.items():
            for base, one, ns in zip("ab", (a, b), times, strict=True):
                log.append(row(f"{name} {base}", ns))
                others.append((f"{name} {base}", Varied(Range(name, {}, "a source"), "low", base, one)))
        found = {one.range: one for one in effects(log, [("a", a), ("b", b)], others)}
    assert {name: (one.conclusions, one.turned, one.unsure) for name, one in found.items()} == {
        "held": (1, 0, 0), "turned": (1, 1, 0), "unsure": (1, 0, 1),
    }  # fmt: skip
    assert found["turned"].examples == ["policy=lfu beats policy=lru"]
    assert (found["turned"].least, found["turned"].most) == (pytest.approx(0.25), pytest.approx(1.0))


def test_the_command_replays_each_design_at_both_ends(
    trace: Path, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("sim.sweep.command._workers", lambda *_: nullcontext(run_here))
    axes = ("policy=lru,on-demand", "cache=25%,psychic")
    status, out, _ = said("sweep", trace, "-o", tmp_path / "out", "--vary", *axes, "--sensitivity")
    assert status == 0 and "link rate" in out and "arXiv 2410.22134" in out
    frame = read_table(tmp_path / "out", "sensitivity")
    assert len(frame) == 4 * 2 * sum(one.loop in ("", Hardware.load("l40").software.kind) for one in ranges())
    assert (frame.status == "ok").sum() == len(frame) / 2
