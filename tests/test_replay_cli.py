"""The command line: reports for people and programs; whatever is wrong is one line, status 2 and no file."""

import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.__main__ import main
from sim.plan import Plan, Prediction, Requests
from sim.policies import policy_class, policy_classes
from sim.terms import settle
from tests.strategies import make_trace
from tests.worlds import MS, POLICIES, REPORT_FIELDS, handmade, toy_meta
from traces.errors import InputError
from traces.trace import Trace

PROFILE = """
name = "mine"
[gpu]
memory_gb = 8.0
bandwidth_gbps = 300.0
bandwidth_fraction = 1.0
tflops = 20.0
tflops_fraction = 1.0
[link]
name = "cable"
latency_us = 0.0
gbps = {gbps}
[software]
kind = "toy"
operation_us = 5.0
expert_floor_us = 20.0
layer_floor_us = 50.0
route_wait_us = 0.0
waits_for_route = true
"""
EXPERT = 3 * 64 * 128 * 2


def toy_trace(**changes: Any) -> Trace:
    """Two sequences, one of each split: 4 layers of 8 experts, two a token."""
    rng = np.random.default_rng(0)
    routes = rng.random((30, 4, 8)).argsort(axis=2)[:, :, :2]
    phase = [0] * 3 + [1] * 7 + [0] * 4 + [1] * 16
    given: dict[str, Any] = {"sequence": [0] * 10 + [1] * 20, "split": ["profile", "eval"], "phase": phase} | changes
    trace = make_trace(routes, n_experts=8, **given)
    trace.meta["model"] |= toy_meta(4)
    return trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "toy.npz"
    toy_trace().save(path)
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command and return (status, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    yield run


def unexpected(err: str) -> str:
    """Standard error without the lines that name what a trace cannot be compared under."""
    return "".join(
        line for line in err.splitlines(True) if not line.endswith("(the trace lacks what it learns from or reads)\n")
    )


def reported(said: Any, *arguments: object) -> Any:
    status, out, err = said(*arguments, "--json", "-")
    assert (status, unexpected(err)) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_has_every_field_and_adds_up(said: Any, trace: Path, policy: str) -> None:
    if policy_class(policy).needs:
        pytest.skip("needs arrays that this trace does not have")
    data = reported(said, "replay", trace, "--policy", policy, "--cache", "10", "--batch", "2")
    assert set(data) >= REPORT_FIELDS
    assert data["policy"] == policy
    assert data["clock"] == "simulated"
    assert (data["tokens"], data["prefill"]["tokens"]) == (16, 4)
    assert data["activations"] == 16 * 4 * 2
    for counts in (data, data["prefill"]):
        assert counts["lookups"] == counts["hits"] + counts["late"] + counts["misses"]
        fate = counts["prefetches"]
        assert fate["issued"] == sum(fate.values()) - fate["issued"]
        assert counts["time_ms"]["other"] == 0
    assert set(data["gpu_bytes"]) == {"experts", "resident_model", "policy", "kv"}
    told = data["provenance"]
    assert {"trace", "trace_sha256", "model", "hardware", "code", "seed"} <= set(told)
    assert (told["model"], told["hardware"], told["seed"]) == ("toy", "l40", 0)
    assert len(told["trace_sha256"]) == 64
    assert data["settings"]["cache"] == "10 slots = 31.2% of all experts = 0 MiB", "echoed in all three units"
    assert data["settings"]["cache_bytes"] == 10 * EXPERT


def test_two_runs_write_the_same_bytes(said: Any, trace: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        assert said("replay", trace, "--policy", "previous-token", "--json", tmp_path / name)[0] == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_tables_for_people(said: Any, trace: Path) -> None:
    status, out, err = said("replay", trace, "--cache", "10")
    assert (status, err) == (0, "")
    for words in ("simulated replay of", "10 slots = 31.2% of all experts", "link: assumed", "tokens/s", "misses"):
        assert words in out
    status, out, _ = said("compare", trace, "--policy", "lru,scope=layer", "clairvoyant")
    assert status == 0
    assert "lru (scope=layer)" in out
    assert "clairvoyant" in out


def test_compare_lists_all_that_the_trace_allows(said: Any, trace: Path, tmp_path: Path) -> None:
    able = {name: kind for name, kind in policy_classes().items() if not kind.needs}
    status, out, err = said("compare", trace, "--json", "-")
    assert status == 0
    rows = [(r["policy"], ",".join(f"{k}={v}" for k, v in r["settings"]["set"].items())) for r in json.loads(out)]
    assert rows == [(name, values) for name, kind in able.items() for values in ("", *kind.variants)]
    assert {("lru", "scope=layer"), ("lfu", "counts=always"), ("popularity", "by=domain")} <= set(rows)
    only = tmp_path / "only.npz"
    toy_trace(split="eval").save(only)
    status, out, err = said("compare", only, "--json", "-")
    assert "popularity" not in [r["policy"] for r in json.loads(out)]
    assert "left out: popularity" in err


def test_compare_leaves_out_what_the_cache_is_too_small_for(said: Any, trace: Path) -> None:
    status, out, err = said("compare", trace, "--cache", "3", "--json", "-")  # of four layers
    assert status == 0
    rows = [(r["policy"], ",".join(f"{k}={v}" for k, v in r["settings"]["set"].items())) for r in json.loads(out)]
    left = [line for line in err.splitlines() if "too small" in line]
    assert len(left) == 1
    assert "lru,scope=layer" in left[0] and ("lru", "scope=layer") not in rows and ("lru", "") in rows
    status, _, err = said("compare", trace, "--cache", "3", "--policy", "lru", "lru,scope=layer")
    assert status == 2 and "policy lru: cache: " in err and "leave a layer without room" in err
    status, _, err = said("compare", trace, "--cache", "0")
    assert status == 2 and "cannot hold one expert" in err


def test_compare_and_replay_agree(said: Any, trace: Path) -> None:
    data = reported(said, "compare", trace, "--policy", "lfu,counts=always", "fifo", "--cache", "7")
    alone = reported(said, "replay", trace, "--policy", "lfu", "--set", "counts=always", "--cache", "7")
    named = reported(said, "replay", trace, "--policy", "lfu,counts=always", "--cache", "7")
    assert named["lookups"] == alone["lookups"] and named["settings"] == alone["settings"]
    for report in (data[0], alone, named):
        assert report["parameters"] == {"scope": "global", "counts": "always"}
    assert {k: v for k, v in data[0].items() if k != "provenance"} == {
        k: v for k, v in alone.items() if k != "provenance"
    }


def test_files_are_written_beside_the_table(said: Any, trace: Path, tmp_path: Path) -> None:
    report, timeline = tmp_path / "r.json", tmp_path / "t.json.gz"
    status, out, _ = said("replay", trace, "--json", report, "--timeline", timeline)
    assert status == 0
    assert "tokens/s" in out
    assert json.loads(report.read_text(encoding="utf-8"))["policy"] == "lru"
    with gzip.open(timeline, "rt", encoding="utf-8") as text:
        assert json.load(text)["traceEvents"]
    assert {p.name for p in tmp_path.iterdir()} == {"toy.npz", "r.json", "t.json.gz"}, "nothing half-written is left"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10", 10 * EXPERT),
        ("25%", 8 * EXPERT),
        ("12.5%", 4 * EXPERT),
        (f"{EXPERT}B", EXPERT),
        ("1MiB", 2**20),
        ("0.5mib", 2**19),
        ("1MB", 10**6),
        ("2 GiB", 2**31),
        ("1000", 1000 * EXPERT),
    ],
)
def test_capacities(said: Any, trace: Path, text: str, size: int) -> None:
    data = reported(said, "replay", trace, "--cache", text)
    assert data["settings"]["cache_bytes"] == data["gpu_bytes"]["experts"] == size
    assert f"{size // EXPERT} slots" in data["settings"]["cache"]


def test_a_cache_smaller_than_a_token_is_warned_of(said: Any, trace: Path) -> None:
    warned = "an LRU cache over all layers cycles"
    assert any(warned in note for note in reported(said, "replay", trace, "--cache", "7")["notes"])
    assert not any(warned in note for note in reported(said, "replay", trace, "--cache", "8")["notes"])


def test_splits_and_batches(said: Any, trace: Path) -> None:
    assert reported(said, "replay", trace, "--split", "profile")["tokens"] == 7
    assert reported(said, "replay", trace, "--split", "all")["tokens"] == 23
    one, two = (reported(said, "replay", trace, "--split", "all", "--batch", b) for b in (1, 2))
    assert two["lookups"] < one["lookups"], "a batch shares look-ups"
    assert two["activations"] == one["activations"]


def test_a_slow_link_is_slow(said: Any, trace: Path, tmp_path: Path) -> None:
    speeds = []
    for gbps in (0.001, 1.0):
        machine = tmp_path / f"{gbps}.toml"
        machine.write_text(PROFILE.format(gbps=gbps), encoding="utf-8")
        speeds.append(reported(said, "replay", trace, "--hardware", machine)["tokens_per_s"])
    assert speeds[0] < speeds[1] / 100


@pytest.mark.parametrize("command", ["policies", "models", "hardware", "software"])
def test_catalogues(said: Any, command: str, tmp_path: Path) -> None:
    status, out, _ = said(command)
    assert status == 0
    assert {"policies": "clairvoyant", "models": "mixtral-8x7b", "hardware": "l40", "software": "paper"}[command] in out
    data = reported(said, command)
    assert len(data) >= (2 if command == "software" else 8)
    file = tmp_path / "list.json"
    assert said(command, "--json", file)[0] == 0
    assert json.loads(file.read_text(encoding="utf-8")) == data


# -- what is wrong -----------------------------------------------------------------------------------------------------


WRONG: list[tuple[list[str], str]] = [
    (["--policy", "nonsense"], "policy 'nonsense' is unknown; expected one of"),
    (["--policy", "sim.plan:Plan"], "not a sim.policies.Policy"),
    (["--set", "scope"], "--set 'scope': expected key=value"),
    (["--set", "=3"], "--set '=3': expected key=value"),
    (["--set", "scope=galaxy"], "policy lru: parameter scope = 'galaxy'"),
    (["--set", "slots=3"], "policy lru: parameter slots = 3"),
    (["--cache", "0"], "cannot hold one expert of 49152 bytes"),
    (["--cache", "49151B"], "cannot hold one expert of 49152 bytes"),
    (["--cache", "10 parsecs"], "--cache '10 parsecs': expected slots (64), a share (25%)"),
    (["--cache", "12,5%"], "--cache '12,5%': expected slots"),
    (["--cache", "12.5"], "--cache '12.5': expected a whole number of slots"),
    (["--cache", "nan"], "--cache 'nan': expected slots"),
    (["--cache", "-1"], "--cache '-1': expected slots"),
    (["--cache", "9" * 400], "expected slots"),
    (["--cache", "3", "--set", "scope=layer"], "leave a layer without room for one expert"),
    (["--model", "mixtral-8x7b"], "mixtral-8x7b: the trace has 4 routed layers; expected 32"),
    (["--model", "gpt-17"], "model 'gpt-17' is unknown"),
    (["--model", ""], "model '' is unknown"),
    (["--model", "docs"], "model 'docs': the folder holds no config.json"),
    (["--hardware", "abacus"], "hardware 'abacus' is unknown"),
    (["--batch", "0"], "batch: 0 sequences; give at least 1"),
    (["--batch", "-2"], "batch: -2 sequences; give at least 1"),
    (["--batch", "two"], "--batch"),
    (["--seed", "-1"], "seed: -1; give at least 0"),
    (["--policy", "oracle", "--set", "accuracy=nan"], "parameter accuracy = 'nan'; expected a finite number"),
    (["--policy", "fiddler,host_gbps=inf"], "parameter host_gbps = 'inf'; expected a finite number"),
    (["--chunks", "0"], "chunks: 0 pieces of a transfer; give at least 1"),
    (["--split", "test"], "split 'test': expected profile, eval or all"),
    (["--discipline", "lifo"], "--discipline"),
    (["--profile", "nowhere.npz"], "nowhere.npz"),
    (["--what"], "--what"),
    (["--policy", ".a:b"], "policy '.a:b': cannot import '.a:b'"),
    (["--policy", ":b"], "policy ':b': cannot import ':b'"),
    (["--policy", "a:"], "policy 'a:': cannot import 'a:'"),
    (["--set", "scope=layer", "scope=layer"], "--set 'scope=layer': scope is given twice"),
    (["--set", "scope=" + "[" * 100_000], "--set scope: nested too deep"),
    (["--policy", "previous-token", "--set", f"ahead={10**27}"], "parameter ahead = 1"),
    (["--policy", "previous-token", "--set", "ahead=1.5"], "parameter ahead = 1.5; expected a whole number"),
    (["--policy", "previous-token", "--set", "ahead=-1"], "parameter ahead = -1; expected 0 or more"),
    (["--batch", "1.9"], "'1.9'; expected a whole number"),
    (["--seed", "1.7"], "'1.7'; expected a whole number"),
    (["--chunks", "1.5"], "'1.5'; expected a whole number"),
    (["--chunks", "1000001"], "chunks: 1000001 pieces of a transfer; give at least 1, at most 1000000"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a)[:40] for a, _ in WRONG])
def test_wrong_arguments_are_one_line_and_leave_no_file(
    said: Any, trace: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    refused(said, tmp_path, message, "replay", trace, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lru,,"], "--policy lru: '': expected key=value"),
        (["--policy", "lru,scope=layer,scope=global"], "--policy lru: 'scope=global': scope is given twice"),
    ],
)
def test_wrong_settings_of_a_comparison_name_the_policy(
    said: Any, trace: Path, arguments: list[str], message: str
) -> None:
    status, out, err = said("compare", trace, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--tokens", "-1"], ["--long", "-5"], ["--long", "3"]])
def test_the_benchmark_checks_its_sizes_first(said: Any, arguments: list[str]) -> None:
    status, out, err = said("bench", *arguments)
    assert (status, out) == (2, "")
    assert err == f"error: {arguments[0]}: {arguments[1]} decode tokens; expected 4 to 5,000,000\n"


def refused(said: Any, folder: Path, message: str, *arguments: object) -> None:
    before = sorted(folder.iterdir())
    status, out, err = said(*arguments, "--json", folder / "out.json", "--timeline", folder / "out.json.gz")
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(folder.iterdir()) == before, "no file is left"


@pytest.mark.parametrize("gbps", ["0.0", "-1.0", "nan", "inf", '"12,5"', "0"])
def test_a_link_without_a_speed_is_refused(said: Any, trace: Path, tmp_path: Path, gbps: str) -> None:
    machine = tmp_path / "mine.toml"
    machine.write_text(PROFILE.format(gbps=gbps), encoding="utf-8")
    refused(said, tmp_path, "mine.toml: link.gbps", "replay", trace, "--hardware", machine)


def test_a_run_longer_than_64_bits_hold_is_refused(said: Any, trace: Path, tmp_path: Path) -> None:
    machine = tmp_path / "slow.toml"
    curve = '[link.h2d]\npoints = [[1, 1], [2, 1000000000000000]]\nsource = "x"\n'
    plain = PROFILE.format(gbps=1.0).replace("latency_us = 0.0\ngbps = 1.0\n", "")
    machine.write_text(plain.replace("[software]", curve + "[software]"), encoding="utf-8")
    for policy in ("lru", "all-in-gpu"):
        message = "the run is too long: up to"
        refused(said, tmp_path, message, "replay", trace, "--hardware", machine, "--policy", policy)
    config = tmp_path / "config.json"
    wide = toy_meta(4)["config"] | {"head_dim": 10**9, "num_attention_heads": 10**9}
    config.write_text(json.dumps(wide), encoding="utf-8")
    refused(said, tmp_path, "the run is too long: up to", "replay", trace, "--model", config)
    wide["hidden_size"] = 10**9
    config.write_text(json.dumps(wide), encoding="utf-8")
    refused(said, tmp_path, "one layer takes", "replay", trace, "--model", config)
    wide["intermediate_size"] = 10**9
    config.write_text(json.dumps(wide), encoding="utf-8")
    refused(said, tmp_path, "expected 1 to 1125899906842624 (1 PiB)", "replay", trace, "--model", config)
    refused(said, tmp_path, "bytes; expected at most 4.6e+18", "replay", trace, "--cache", "9" * 18)


def test_prefetches_and_predictions_count_towards_64_bits() -> None:
    work = handmade([[[0]]], 3, copy_ns=2**60)
    many = np.zeros(9, np.int64)
    asking = Plan(requests=Requests(many[:1], np.array([0, 9]), many, many, many))
    thinking = Plan(prediction=Prediction(np.zeros(1, np.int64), np.array([3 * 2**60])))
    settle(work, Plan(), MS)
    for plan in (asking, Plan(stream_prefill=True), thinking):
        with pytest.raises(InputError, match="the run is too long"):
            settle(work, plan, MS)


def test_a_run_of_no_time_has_no_efficiency(said: Any, trace: Path, tmp_path: Path) -> None:
    machine = tmp_path / "magic.toml"
    magic = PROFILE.format(gbps=1e9).replace("300.0", "1e9").replace("20.0\ntf", "1e9\ntf")
    for figure in ("operation_us = 5.0", "expert_floor_us = 20.0", "layer_floor_us = 50.0"):
        magic = magic.replace(figure, figure.split("=")[0] + "= 0.0")
    machine.write_text(magic, encoding="utf-8")
    data = reported(said, "replay", trace, "--hardware", machine, "--policy", "all-in-gpu")
    assert (data["run_ms"], data["efficiency"], data["tokens_per_s"]) == (0, None, None)
    status, _, err = said("compare", trace, "--hardware", machine)
    assert (status, unexpected(err)) == (0, "")


def test_bad_traces_are_refused(said: Any, trace: Path, tmp_path: Path) -> None:
    whole = trace.read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "zero.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("not a trace", encoding="utf-8")
    (tmp_path / "folder.npz").mkdir()
    for name in ("half", "zero", "text", "folder", "missing"):
        refused(said, tmp_path, f"{name}.npz", "replay", tmp_path / f"{name}.npz")


def test_an_output_that_cannot_be_written_is_refused_before_the_run(said: Any, trace: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "x.json"
    timeline = tmp_path / "t.json"
    status, out, err = said("replay", trace, "--json", nowhere, "--timeline", timeline)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "does not exist; make it first" in err
    assert not timeline.exists()
    status, out, err = said("replay", trace, "--json", tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_model_that_is_wrong_in_the_trace_names_the_trace(said: Any, tmp_path: Path) -> None:
    path, odd = tmp_path / "odd.npz", toy_trace()
    odd.meta["model"]["config"]["torch_dtype"] = ["bfloat16"]
    odd.save(path)
    message = f"{path}: meta: model.config of toy: torch_dtype is ['bfloat16']; expected one of bfloat16"
    refused(said, tmp_path, message, "replay", path)


def test_a_split_that_is_not_there_is_refused(said: Any, tmp_path: Path) -> None:
    path = tmp_path / "only.npz"
    toy_trace(split="profile").save(path)
    refused(said, tmp_path, "no sequence in split eval; it has general (profile)", "replay", path)


def test_a_policy_that_learns_needs_something_to_learn_from(said: Any, tmp_path: Path) -> None:
    path, other = tmp_path / "only.npz", tmp_path / "other.npz"
    toy_trace(split="eval").save(path)
    toy_trace().save(other)
    refused(said, tmp_path, "it learns from a profile split", "replay", path, "--policy", "popularity")
    assert reported(said, "replay", path, "--policy", "popularity", "--profile", other)["misses"] >= 0
    refused(said, tmp_path, "no sequence of split profile", "replay", path, "--policy", "popularity", "--profile", path)
    narrow = make_trace([[0]], n_experts=8, split="profile")
    narrow.meta["model"] |= toy_meta(1)
    narrow.save(other)
    refused(
        said, tmp_path, "1 layers x 8 experts; expected", "replay", path, "--policy", "popularity", "--profile", other
    )


def test_a_failed_run_keeps_the_old_report(said: Any, trace: Path, tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old", encoding="utf-8")
    assert said("replay", trace, "--cache", "3", "--set", "scope=layer", "--json", old)[0] == 2
    assert old.read_text(encoding="utf-8") == "old"


# -- other people's policies -------------------------------------------------------------------------------------------

PLUGIN = '''
from sim.plan import Plan
from sim.policies import Parameters, Policy


class Settings(Parameters):
    """Parameters.

    Attributes:
        rule: an eviction rule.
    """

    rule: str = "fifo"


class Mine(Policy):
    """A policy of somebody else."""

    name = "{name}"
    summary = "somebody else's"
    takes = Settings

    def plan(self, view):
        return Plan(eviction=self.parameters.rule)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a package that registers a policy, without pip: a module and its dist-info on the path."""
    folder = tmp_path / "site"

    def install(name: str, value: str = "outsider:Mine") -> None:
        info = folder / "outsider-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "outsider.py").write_text(PLUGIN.format(name=name), encoding="utf-8")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[moe_replay.policies]\n{name} = {value}\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        policy_classes.cache_clear()

    yield install
    sys.modules.pop("outsider", None)
    policy_classes.cache_clear()


def test_a_policy_of_another_package_is_found_by_name(said: Any, trace: Path, plugin: Any) -> None:
    plugin("outsider-policy")
    data = reported(said, "replay", trace, "--policy", "outsider-policy", "--set", "rule=lru", "--cache", "9")
    assert data["policy"] == "outsider-policy"
    assert data["parameters"] == {"rule": "lru"}
    assert data["hits"] == reported(said, "replay", trace, "--policy", "lru", "--cache", "9")["hits"]
    assert "outsider-policy" in [p["name"] for p in reported(said, "policies")]
    assert "outsider-policy" in [r["policy"] for r in reported(said, "compare", trace)]
    by_path = reported(said, "replay", trace, "--policy", "outsider:Mine", "--cache", "9")
    assert by_path["parameters"] == {"rule": "fifo"}


def test_a_policy_of_another_package_that_takes_a_taken_name_is_left_out(said: Any, trace: Path, plugin: Any) -> None:
    plugin("lru")
    status, out, err = said("replay", trace, "--policy", "lru", "--json", "-")
    assert status == 0
    assert json.loads(out)["parameters"] == {"scope": "global"}, "the project's own"
    assert "warning: left out: entry point 'lru' (outsider:Mine): the policy name 'lru' is taken" in err


def test_an_entry_point_to_nothing_stops_only_who_names_it(said: Any, trace: Path, plugin: Any, tmp_path: Path) -> None:
    plugin("broken", "outsider:Absent")
    status, _, err = said("replay", trace, "--policy", "lru", "--json", "-")
    assert status == 0
    assert "warning: left out: entry point 'broken': cannot import 'outsider:Absent'" in err
    refused(said, tmp_path, "policy 'broken' is unknown", "replay", trace, "--policy", "broken")


def test_a_policy_with_a_bad_plan_is_named(said: Any, trace: Path, plugin: Any, tmp_path: Path) -> None:
    plugin("outsider-policy")
    for rule, message in (("belady", "eviction 'belady' is unknown"), ("next-use", "is told the future")):
        refused(said, tmp_path, message, "replay", trace, "--policy", "outsider-policy", "--set", f"rule={rule}")


BAD = """
import sys

from sim.plan import Plan
from sim.policies import Policy


class Bad(Policy):
    name = "bad"

    def plan(self, view):
        {body}


{top}
"""
CANNOT = "policy 'bad_policy:Bad': cannot import 'bad_policy:Bad': "
FAULTS = [
    ("raise KeyError('boom')", "", "policy bad: plan: KeyError: 'boom' (bad_policy.py, line 12; MOE_REPLAY_DEBUG=1"),
    ("sys.exit(0)", "", "policy bad: plan: SystemExit: 0"),
    ("return None", "", "policy bad: plan returned NoneType; expected a sim.plan.Plan"),
    ("return Plan(gpu_bytes=-1)", "", "policy bad: plan: gpu_bytes is -1; expected"),
    ("return Plan(eviction='belady')", "", "policy bad: plan: eviction 'belady' is unknown; expected one of lru"),
    ("return Plan(eviction='score')", "", "policy bad: plan: values is None; expected Values"),
    ("view.future()", "", "policy bad: plan: PermissionError"),
    ("return Plan(eviction=rule)", "rule = lambda first_call: 1 / 0", "policy bad: eviction: ZeroDivisionError"),
    ("def (:", "", CANNOT + "SyntaxError"),
    ("return Plan()", "sys.exit(0)", CANNOT + "SystemExit: 0"),
    ("return Plan()", "1 / 0", CANNOT + "ZeroDivisionError"),
    ("return Plan()", "Bad = 3", "'bad_policy:Bad' is not a sim.policies.Policy"),
]


@pytest.fixture
def bad_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def write(body: str, top: str) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "bad_policy.py").write_text(BAD.format(body=body, top=top), encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield write
    sys.modules.pop("bad_policy", None)


@pytest.mark.parametrize(("body", "top", "message"), FAULTS, ids=[message[-40:] for _, _, message in FAULTS])
def test_whatever_a_policy_does_is_one_line(
    said: Any, trace: Path, tmp_path: Path, bad_policy: Any, body: str, top: str, message: str
) -> None:
    bad_policy(body, top)
    refused(said, tmp_path, message, "replay", trace, "--policy", "bad_policy:Bad")


def test_the_traceback_of_a_policy_can_be_had(
    said: Any, trace: Path, bad_policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad_policy("raise KeyError('boom')", "")
    monkeypatch.setenv("MOE_REPLAY_DEBUG", "1")
    with pytest.raises(KeyError, match="boom"):
        said("replay", trace, "--policy", "bad_policy:Bad")


def test_names_are_shown_as_they_are_and_move_no_cursor(said: Any, trace: Path, tmp_path: Path, plugin: Any) -> None:
    plugin("a[red]b")
    odd = tmp_path / "odd \x1b[31m :smile: [bold]name.npz"
    shutil.copy(trace, odd)
    named = "a[red]b"
    for command in (
        ["replay", odd, "--policy", "outsider:Mine"],
        ["compare", odd, "--policy", "outsider:Mine"],
        ["policies"],
    ):
        status, out, err = said(*command)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert named in out
        assert command[0] == "policies" or "odd \\x1b[31m :smile: [bold]name.npz" in out


# -- locales -----------------------------------------------------------------------------------------------------------


def test_names_of_any_script_under_an_ascii_locale(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "é 追跡"
    folder.mkdir()
    shutil.copy(trace, folder / "trace é 日本.npz")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(__file__).parents[1]
    environment["PYTHONPATH"] = str(root)
    name, report = str(folder / "trace é 日本.npz"), folder / "報告.json"
    command = [sys.executable, "-m", "sim", "replay", name, "--json", str(report), "--timeline", str(folder / "é.json")]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(report.read_text(encoding="utf-8"))["provenance"]["trace"] == name
    assert json.loads((folder / "é.json").read_text(encoding="utf-8"))["traceEvents"]
    command = [sys.executable, "-m", "sim", "compare", name, "--policy", "lru", "on-demand"]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, b"")
