"""A row is what a replay of its design reports, to the digit; and no row for another is ever taken for it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.command_line import Help
from ground.whole_number import WholeNumber
from sim.machine.assembly import Assembly
from sim.policies import Policy, policy_classes
from sim.run.replay_options import ReplayOptions
from sim.sweep.design import Design, hardware_of
from sim.sweep.execute import run_design
from sim.sweep.fields import fitted, options
from sim.sweep.identity import identity
from sim.sweep.row import Row
from sim.sweep.run import identified
from tests.support.replays import PROFILE, reported, toy_trace


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(PROFILE.format(gbps=1.0))
    return path


def design(**fields: Any) -> Design:
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return Design({name: fitted(name, value) for name, value in named.items()})


def row(one: Design) -> Row:
    return run_design(one, identity(one))


def agrees(one: Row, report: dict[str, Any]) -> None:
    """The row has every counter, time and bound of the report, and the report's own words for what was run."""
    assert one.status == "ok", one.reason
    values = one.values
    same = ("tokens_per_s", "lookups", "hits", "reuse_hits", "prefetch_hits", "late_queued", "late_in_flight",
            "misses", "hit_ratio", "late_ratio", "miss_ratio", "evictions", "run_ms")  # fmt: skip
    assert {name: values[name] for name in same} == {name: report[name] for name in same}
    for table, form in (
        ("ttft_ms", "ttft_{}_ms"), ("tpot_ms", "tpot_{}_ms"), ("gpu_bytes", "gpu_{}_bytes"),
        ("link_bytes", "link_{}_bytes"), ("prefetches", "prefetches_{}"), ("time_ms", "time_{}_ms"),
    ):  # fmt: skip
        assert {form.format(name): values[form.format(name)] for name in report[table]} == {
            form.format(name): value for name, value in report[table].items()
        }
    assert values["prefill_misses"] == report["prefill"]["misses"]
    assert values["compute_bound_tokens_per_s"] == report["bounds"]["compute_tokens_per_s"]
    assert values["link_bound_tokens_per_s"] == report["bounds"]["link_tokens_per_s"]
    assert values["efficiency_ratio"] == report["efficiency"]
    assert values["cache_slots"] == report["settings"]["cache"]
    assert (values["link_discipline"], values["link_chunks"]) == tuple(
        report["settings"][name] for name in ("discipline", "chunks")
    )
    assert json.loads(values["replayed_parameters"]) == report["parameters"]


@pytest.mark.parametrize("policy", sorted(policy_classes()))
def test_a_row_is_what_replay_reports(trace: Path, machine: Path, said: Any, policy: str) -> None:
    one = row(design(trace=str(trace), hardware=str(machine), policy=policy, cache="40%"))
    status, out, err = said(
        "replay", trace, "--hardware", machine, "--policy", policy, "--cache", "40%", "--json", "-"
    )  # fmt: skip
    if status == 0:
        agrees(one, json.loads(out))
    else:
        assert (one.status, f"error: {one.reason}\n") == ("refused", err)


def test_options_of_the_run_count_too(trace: Path, machine: Path, said: Any) -> None:
    fields = {"trace": str(trace), "hardware": str(machine), "policy": "previous-token"}
    typed = ("replay", trace, "--hardware", machine, "--policy", "previous-token")
    seen = set()
    for more, chosen in (
        ({}, ()),
        ({"discipline": "fifo", "chunks": 3}, ("--discipline", "fifo", "--chunks", 3)),
        ({"cache": "50%"}, ("--cache", "50%")),
        ({"batch": 2, "split": "all"}, ("--batch", 2, "--split", "all")),
        ({"cold": True, "split": "all"}, ("--cold", "--split", "all")),
        ({"split": "profile", "engine": "simpy"}, ("--split", "profile", "--engine", "simpy")),
        ({"quant": "q8_0"}, ("--quant", "q8_0")),
        ({"loop": "graphs", "link": "pcie4x8"}, ("--loop", "graphs", "--link", "pcie4x8")),
    ):
        one = design(**fields, **more)
        agrees(row(one), reported(said, *typed, *chosen))
        seen.add(identity(one))
    assert len(seen) == 8


def test_a_mix_and_parameters_of_the_policy(trace: Path, machine: Path, tmp_path: Path, said: Any) -> None:
    other = tmp_path / "other.npz"
    toy_trace(sequence_id=np.array(["c", "d"])).save(other)
    one = design(mix=[str(trace), str(other)], hardware=str(machine), policy="lru", set__scope="layer", cache="50%")
    typed = ("replay", "--mix", trace, other, "--hardware", machine, "--policy", "lru", "--set", "scope=layer")
    agrees(row(one), reported(said, *typed, "--cache", "50%"))


def test_a_figure_that_is_set_or_multiplied_is_that_of_a_profile_with_it(
    trace: Path, machine: Path, tmp_path: Path, said: Any
) -> None:
    faster = tmp_path / "faster.toml"
    faster.write_text(PROFILE.format(gbps=2.5))
    plain = {"trace": str(trace), "hardware": str(machine)}
    agrees(row(design(**plain)), reported(said, "replay", trace, "--hardware", machine))
    report = reported(said, "replay", trace, "--hardware", faster)
    for value in (2.5, "x2.5"):
        changed = row(design(**plain, hardware__link__gbps=value))
        agrees(changed, report)
        assert "link.gbps" in changed.values["replayed_hardware"]
    same = row(design(trace=str(trace), hardware=str(faster)))
    assert same.values["run_ms"] == report["run_ms"]


def test_a_factor_of_a_measured_curve_multiplies_its_times_and_leaves_the_profile_as_it_is(trace: Path) -> None:
    size = 2**20
    plain = hardware_of(Assembly("h200"), ()).copy_ns(size)
    one = design(trace=str(trace), hardware="h200", hardware__link__h2d="x3", hardware__link__queued="x3")
    changed = hardware_of(Assembly("h200"), one.changes("hardware"))
    assert abs(changed.copy_ns(size) - 3 * plain) <= 3 and not changed.link_measured
    assert hardware_of(Assembly("h200"), ()).copy_ns(size) == plain
    assert row(one).values["tokens_per_s"] < row(design(trace=str(trace), hardware="h200")).values["tokens_per_s"]


def test_what_cannot_be_run_is_a_row_with_its_reason(trace: Path) -> None:
    for fields, reason in (
        ({"cache": "0%"}, "cannot hold one expert"),
        ({"hardware": "abacus"}, "hardware 'abacus' is unknown"),
        ({"policy": "psychic"}, "policy 'psychic' is unknown"),
        ({"policy": "on-demand", "set__scope": "layer"}, "parameter scope"),
        ({"hardware": "h200", "hardware__link__h2d": 3.0}, "expected a factor"),
        ({"hardware__host__host_gbps": "x2"}, "not there to be multiplied"),
        ({"cold": True, "batch": 2}, "--cold"),
        ({"seed": -1}, "seed: -1"),
    ):
        wanted = design(trace=str(trace), **fields)
        ((key, _, one),) = identified([wanted])
        one = one or run_design(wanted, key)
        assert one.status == "refused" and reason in one.reason and "\n" not in one.reason


class Greedy(Policy):
    name = "greedy"

    def plan(self, view: Any) -> Any:
        raise MemoryError


def test_a_design_that_runs_out_of_memory_has_failed_and_may_be_tried_again(trace: Path) -> None:
    one = row(design(trace=str(trace), policy=f"{__name__}:Greedy"))
    assert one.status == "failed" and "out of memory" in one.reason


def test_an_option_that_runs_get_later_is_an_axis_at_once(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(ReplayOptions):
        context: Annotated[WholeNumber, Help("tokens before the first")] = 0

    for module in ("fields", "design", "identity"):
        monkeypatch.setattr(f"sim.sweep.{module}.ReplayOptions", Later)
    options.cache_clear()
    try:
        few, many = (design(trace=str(trace), context=count) for count in ("16", 4096))
        assert isinstance(few.options, Later) and few.options.context == 16
        assert identity(few) != identity(many)
    finally:
        options.cache_clear()


def test_the_identity_is_what_a_row_depends_on(trace: Path, machine: Path, tmp_path: Path) -> None:
    plain = {"trace": str(trace), "hardware": str(machine), "policy": "lru"}
    first = identity(design(**plain))
    assert identity(design(**plain, batch=1, cache="25%", set__scope="global")) == first, "as it is by default"
    moved = tmp_path / "moved.npz"
    moved.write_bytes(trace.read_bytes())
    assert identity(design(**plain | {"trace": str(moved)})) == first, "content counts, not names"
    others = [identity(design(**plain | more)) for more in (
        {"cache": "30%"}, {"batch": 2}, {"seed": 1}, {"policy": "lfu"}, {"set__scope": "layer"}, {"split": "all"},
        {"chunks": 2}, {"discipline": "fifo"}, {"cold": True}, {"hardware__link__gbps": 2.0}, {"hardware": "l40"},
        {"software": "paper"}, {"model": "mixtral-8x7b"}, {"profile": [str(trace)]}, {"software__search_us": 1.0},
    )]  # fmt: skip
    assert len({first, *others}) == 1 + len(others)
    toy_trace(phase=[0] * 2 + [1] * 8 + [0] * 4 + [1] * 16).save(trace)
    assert identity(design(**plain)) != first, "another trace under the same name"


def test_a_file_that_changes_while_the_sweep_runs_gives_no_row_under_the_old_name(trace: Path, machine: Path) -> None:
    one = design(trace=str(trace), hardware=str(machine))
    key = identity(one)
    toy_trace(phase=[0] * 2 + [1] * 8 + [0] * 4 + [1] * 16).save(trace)
    late = run_design(one, key)
    assert (late.status, late.values) == ("failed", {}) and "has changed" in late.reason


def test_a_row_on_a_line_is_the_same_row(trace: Path, machine: Path) -> None:
    one = row(design(trace=str(trace), hardware=str(machine), split="all"))
    assert one.sequences is not None and sum(one.sequences["tokens"]) == one.values["tokens"]
    low, high = one.values["tokens_per_s_low"], one.values["tokens_per_s_high"]
    assert low <= one.values["tokens_per_s"] <= high
    line = one.to_line()
    assert Row.of_line(line) == one
    assert all(Row.of_line(line[:end]) is None for end in (0, 1, len(line) // 2, len(line) - 1))


@given(st.integers(0, 10**6), st.sampled_from(b"0123456789,}"))
def test_a_line_with_another_byte_is_no_row(place: int, byte: int) -> None:
    line = bytearray(Row("k" * 16, "ok", values={"tokens_per_s": 1234.5}, seconds=0.25).to_line())
    place %= len(line)
    same = line[place] == byte
    line[place] = byte
    assert (Row.of_line(bytes(line)) is not None) == same
