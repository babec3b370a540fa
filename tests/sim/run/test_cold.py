"""Replays in which each sequence begins with an empty cache."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.run.cold import replay_cold
from sim.run.prepared import replay
from sim.run.scene import Scene, scene
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta

POLICIES = st.sampled_from(["on-demand", "lru", "previous-token", "clairvoyant", "all-in-gpu"])


def made(folder: Path, seed: int, lengths: list[int]) -> Path:
    rng = np.random.default_rng(seed)
    routes = rng.random((sum(lengths), 3, 8)).argsort(axis=2)[:, :, :2]
    phase = np.concatenate([(np.arange(length) >= min(3, length - 1)) for length in lengths]).astype(int)
    trace = make_trace(routes, n_experts=8, phase=phase, sequence=np.repeat(np.arange(len(lengths)), lengths))
    trace.meta["model"] |= toy_meta(3)
    trace.save(folder / "trace.npz")
    return folder / "trace.npz"


def alone(here: Scene, path: Path, folder: Path) -> list[Scene]:
    """Each sequence in a file of its own."""
    found = []
    for number in range(here.trace.n_sequences):
        here.trace.take(np.array([number])).save(folder / f"{number}.npz")
        found.append(scene(folder / f"{number}.npz", cache="6", learns=False))
    return found


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(2, 9), min_size=1, max_size=4), POLICIES)
@settings(max_examples=25)
def test_counters_and_times_are_the_sums_of_each_sequence_alone(
    tmp_path_factory: pytest.TempPathFactory, seed: int, lengths: list[int], policy: str
) -> None:
    folder = tmp_path_factory.mktemp("cold")
    path = made(folder, seed, lengths)
    here = scene(path, cache="6", learns=False)
    cold = replay_cold(here, policy)
    single = [replay(one, policy) for one in alone(here, path, folder)]
    for phase in ("decode", "prefill", "total"):
        mine = getattr(cold, phase).columns()
        theirs = [getattr(one, phase).columns() for one in single]
        names = [name for name in mine if not name.endswith("_ratio")]
        assert [mine[name] for name in names] == pytest.approx([sum(one[name] for one in theirs) for name in names])
    assert cold.run_ms == pytest.approx(sum(one.run_ms for one in single))
    if cold.efficiency is not None:
        assert cold.efficiency <= 1 + 1e-9 or policy == "all-in-gpu"
    if len(lengths) == 1:
        warm = replay(here, policy).to_json()
        mine = cold.to_json()
        assert mine["settings"].pop("cold") is True
        assert mine.pop("notes") == [*warm.pop("notes"), "each sequence begins with an empty cache (--cold)"]
        assert mine.pop("bounds") == pytest.approx(warm.pop("bounds"), nan_ok=True)
        assert mine == warm


def test_both_engines_agree(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    here = scene(made(tmp_path, 1, [9, 7, 8]), cache="6", learns=False)
    reports = [replay_cold(here, "previous-token", engine=engine).to_json() for engine in ("simpy", "compiled")]
    assert [report["settings"].pop("engine") for report in reports] == ["simpy", "compiled"]
    assert reports[0] == reports[1]


def test_nothing_of_a_sequence_before_is_there(tmp_path: Path) -> None:
    """Two sequences that take the same experts: the second hits them all where the cache is kept, and none if not."""
    trace = make_trace([[0], [1], [0], [1]], n_experts=8, sequence=[0, 0, 1, 1])
    trace.meta["model"] |= toy_meta(1)
    trace.save(tmp_path / "twice.npz")
    here = scene(tmp_path / "twice.npz", cache="4", learns=False)
    assert replay(here, "lru").decode.hits == 2
    cold = replay_cold(here, "lru")
    assert (cold.decode.hits, cold.decode.misses, cold.decode.compulsory_misses) == (0, 4, 4)
    assert cold.bounds["min_hit_ratio"] == 0


def test_one_timeline_does_not_show_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = made(tmp_path, 1, [4])
    assert main(["replay", str(path), "--cold", "--timeline", "run.json"]) == 2
    assert "expected one of the two" in capsys.readouterr().err
    assert not (tmp_path / "run.json").exists()
    assert main(["compare", str(path), "--cold", "--cache", "6", "--policy", "lru", "--json", "cold.json"]) == 0
    (report,) = json.loads((tmp_path / "cold.json").read_text())
    assert report["settings"]["cold"] is True


def test_sequences_that_decode_together_share_a_cache(tmp_path: Path) -> None:
    here = scene(made(tmp_path, 1, [9, 7]), cache="6", batch=2, learns=False)
    with pytest.raises(InputError, match="expected --batch 1"):
        replay_cold(here, "lru")
