"""The command line: reports for people and programs, of names in any script."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sim.policies import policy_class, policy_classes
from tests.support.places import REPOSITORY
from tests.support.replays import EXPERT, PROFILE, reported, toy_trace
from tests.support.worlds import POLICIES, REPORT_FIELDS

# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_has_every_field_and_adds_up(said: Any, trace: Path, policy: str) -> None:
    if policy_class(policy).needs:
        pytest.skip("needs arrays that this trace does not have")
    data = reported(said, "replay", trace, "--policy", policy, "--cache", "10", "--batch", "2", "--loop", "eager")
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
    assert (told["model"], told["hardware"], told["seed"]) == ("toy", "l40 with loop eager", 0)
    assert len(told["trace_sha256"]) == 64
    assert data["settings"]["cache"] == "10 slots = 31.2% of all experts = 480.00 KiB", "echoed in all three units"
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
    assert {("lru", "scope=layer"), ("perfect-lfu", ""), ("popularity", "by=domain")} <= set(rows)
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
    status, out, err = said("replay", trace, "--json", report, "--timeline", timeline)
    assert (status, err) == (0, f"{timeline}: to be opened in https://ui.perfetto.dev\n")
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
        ("3/layer", 12 * EXPERT),
        ("2 / Layer", 8 * EXPERT),
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


# -- locales -----------------------------------------------------------------------------------------------------------


def test_names_of_any_script_under_an_ascii_locale(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "é 追跡"
    folder.mkdir()
    shutil.copy(trace, folder / "trace é 日本.npz")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = REPOSITORY
    environment["PYTHONPATH"] = str(root)
    name, report = str(folder / "trace é 日本.npz"), folder / "報告.json"
    command = [sys.executable, "-m", "sim", "replay", name, "--json", str(report), "--timeline", str(folder / "é.json")]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=root)
    written = f"{folder / 'é.json'}: to be opened in https://ui.perfetto.dev\n"
    assert (done.returncode, done.stderr.decode("utf-8")) == (0, written)
    assert json.loads(report.read_text(encoding="utf-8"))["provenance"]["trace"] == name
    assert json.loads((folder / "é.json").read_text(encoding="utf-8"))["traceEvents"]
    command = [sys.executable, "-m", "sim", "compare", name, "--policy", "lru", "on-demand"]
    done = subprocess.run(command, env=environment, capture_output=True, cwd=root)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", ["replay", "compare"])
def test_a_full_disk_takes_the_file_and_not_the_table(said: Any, trace: Path, command: str) -> None:
    status, out, err = said(command, trace, "--policy", "lru", "--json", "/dev/full", "--cache", "10")
    assert status == 2 and err.endswith("error: /dev/full: No space left on device\n")
    assert "lru" in out and "tokens/s" in out
