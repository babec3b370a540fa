"""Regrouping and pipelines from the command line: what is charged, and how a run says what it is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from sim.run.prepared import prepare
from sim.run.scene import scene
from tests.support.replays import reported, toy_trace
from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.schema import DECODE, PREFILL
from traces.trace import Trace

ABOUT = {"predictor": {"sha256": "1" * 64, "parameters": 1000}}


def predicted_trace(sequences: int = 9, **more: Any) -> Trace:
    """Sequences of two kinds in turn, 3 rows of prompt and 5 to 8 decoded each; predicted rightly."""
    rng = np.random.default_rng(3)
    decoded = 5 + np.arange(sequences) % 4
    phase = np.concatenate([[PREFILL] * 3 + [DECODE] * count for count in decoded.tolist()])
    sequence = np.repeat(np.arange(sequences), decoded + 3)
    kind = (sequence % 2)[:, None, None]
    routes = (rng.random((len(phase), 4, 4)).argsort(axis=2)[:, :, :2] + 4 * kind).astype(np.int16)
    ranked = np.concatenate([routes, 7 - routes], axis=2)
    trace = make_trace(
        routes, n_experts=8, sequence=sequence, phase=phase, predicted_experts=ranked,
        predicted_probs=np.full(ranked.shape, 200, np.uint8), meta=ABOUT,
        domain=["general"] * sequences, split=["eval"] * sequences, **more,
    )  # fmt: skip
    trace.meta["model"] |= toy_meta(4)
    return trace


@pytest.fixture
def regroupable(tmp_path: Path) -> Path:
    path = tmp_path / "predicted.npz"
    predicted_trace().save(path)
    return path


def test_json_says_how_it_was_regrouped_and_what_that_takes(regroupable: Path, said: Any) -> None:
    plain, none, kmeans = (
        reported(said, "replay", regroupable, "--batch", 2, "--cache", 8, *more)
        for more in ((), ("--regroup", "none"), ("--regroup", "kmeans"))
    )
    assert [one["settings"]["regroup"] for one in (plain, none, kmeans)] == [None, "none", "kmeans"]
    assert {one["settings"]["pipeline"] for one in (plain, none, kmeans)} == {"sequential"}
    assert plain["activations"] == none["activations"] == kmeans["activations"]
    assert kmeans["lookups"] < none["lookups"], "tokens of one kind share experts"
    assert plain["time_ms"]["predict"] == none["time_ms"]["predict"] == 0 < kmeans["time_ms"]["predict"]
    assert none["gpu_bytes"]["policy"] == 0 < kmeans["gpu_bytes"]["policy"], "the predictor's weights"
    # Two more sequences are under way, and what they have cached is memory that experts do not have.
    more = none["gpu_bytes"]["kv"] - plain["gpu_bytes"]["kv"]
    assert more == plain["gpu_bytes"]["experts"] - none["gpu_bytes"]["experts"] > 0
    assert plain["settings"]["all_in_gpu_bytes"] == none["settings"]["all_in_gpu_bytes"]


def test_pipelines_hide_more_and_more(regroupable: Path, said: Any) -> None:
    waited = [
        reported(said, "replay", regroupable, "--batch", 2, "--cache", 8, "--regroup", "kmeans", "--pipeline", one)[
            "time_ms"
        ]["predict"]
        for one in ("sequential", "overlapped", "dual-batch")
    ]
    assert waited[0] > waited[1] > waited[2]


def test_a_clairvoyant_pipeline_calls_itself_that(regroupable: Path, said: Any) -> None:
    run = ("compare", regroupable, "--policy", "lru", "--regroup", "kmeans", "--pipeline", "clairvoyant", "--cache", 8)
    (found,) = reported(said, *run)
    assert found["settings"]["pipeline"] == "clairvoyant"
    assert found["settings"]["reference"] == "is fed recorded tokens ahead of their time"
    _, out, _ = said(*run)
    assert "lru *" in out
    assert "clairvoyant: recorded tokens are fed ahead" in " ".join(out.split())
    _, out, _ = said("replay", *run[1:2], *run[4:])
    assert "clairvoyant: recorded tokens are fed ahead" in " ".join(out.split())


def test_predictor_and_scheduler_are_on_the_timeline(regroupable: Path, said: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    said("replay", regroupable, "--batch", 2, "--cache", 8, "--regroup", "kmeans", "--pipeline", "dual-batch",
         "--timeline", path)  # fmt: skip
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    slices = {name: [e for e in events if e["ph"] == "X" and e["tid"] == tracks[name]] for name in tracks}
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in slices["steps"]]
    for name, what in (("predictor", "predict"), ("scheduler", "schedule")):
        assert slices[name]
        assert all(e["name"].startswith(f"{what} for step ") for e in slices[name])
        beside = [
            e for e in slices[name] if any(begin <= e["ts"] and e["ts"] + e["dur"] <= end for begin, end in steps)
        ]
        assert beside, f"the {name} works while steps run"


def test_both_engines_report_the_same(regroupable: Path, said: Any) -> None:
    run = ("replay", regroupable, "--batch", 2, "--cache", 8, "--regroup", "kmeans", "--pipeline", "dual-batch")
    one, other = (
        reported(said, *run, "--policy", "expertflow", "--engine", engine) for engine in ("simpy", "compiled")
    )
    for report in (one, other):
        del report["settings"]["engine"]
    assert one == other


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--pipeline", "dual-batch"), "needs two batches in lockstep; expected --regroup with it"),
        (("--regroup", "kmeans", "--cold"), "--cold: sequences run one by one; expected no --regroup"),
        (("--regroup", "exact", "--batch", "16"), "expected at most 16, as of --batch 8"),
        (("--regroup", "kmeans", "--cache", "1"), "keys and values of sequences beyond --batch take"),
    ],
)
def test_what_is_refused(tmp_path: Path, said: Any, more: tuple[str, ...], message: str) -> None:
    path = tmp_path / "predicted.npz"
    predicted_trace(40).save(path)
    status, out, err = said("replay", path, *more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_trace_without_predictions_can_be_regrouped_at_random_alone(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    toy_trace().save(path)
    with pytest.raises(InputError, match="has no array predicted_experts, by which tokens are regrouped"):
        scene(path, regroup="kmeans")
    with pytest.raises(InputError, match="regroup: 'means'; expected one of none, random, kmeans, exact"):
        scene(path, regroup="means")  # type: ignore[arg-type]
    assert prepare(scene(path, regroup="random"), "lru").simulate().tokens_per_s


def test_an_encoder_s_trace_is_prompts_alone_and_nothing_is_regrouped(tmp_path: Path) -> None:
    trace = predicted_trace()
    kept = trace.phase == PREFILL
    encoder = make_trace(
        trace.experts[kept], n_experts=8, sequence=trace.sequence[kept], phase=trace.phase[kept],
        predicted_experts=trace.predicted_experts[kept],  # type: ignore[index]
        predicted_probs=trace.predicted_probs[kept],  # type: ignore[index]
        meta=ABOUT, domain=["general"] * 9, split=["eval"] * 9,
    )  # fmt: skip
    encoder.meta["model"] |= toy_meta(4)
    encoder.save(path := tmp_path / "encoder.npz")
    one, other = (prepare(scene(path, batch=2, cache="8", regroup=way), "lru") for way in (None, "kmeans"))  # type: ignore[arg-type]
    np.testing.assert_array_equal(one.scene.work.schedule.rows, other.scene.work.schedule.rows)
    assert one.simulate().run_ms < other.simulate().run_ms, "the predictor reads prompts"


def test_dropped_tokens_and_rows_without_experts_run_with_the_others(tmp_path: Path) -> None:
    trace = predicted_trace()
    dropped = np.random.default_rng(0).random(trace.n_rows) < 0.3
    experts = np.where(dropped[:, None, None], -1, trace.experts).astype(np.int16)
    less = make_trace(
        experts, n_experts=8, sequence=trace.sequence, phase=trace.phase, predicted_experts=trace.predicted_experts,
        predicted_probs=trace.predicted_probs, meta=ABOUT, domain=["general"] * 9,
        split=["eval"] * 9,
    )  # fmt: skip
    less.meta["model"] |= toy_meta(4)
    less.save(path := tmp_path / "dropped.npz")
    trace.save(full := tmp_path / "full.npz")
    for pipeline in ("sequential", "dual-batch"):
        one, other = (
            prepare(scene(it, batch=2, cache="8", regroup="kmeans", pipeline=pipeline), "expertflow")  # type: ignore[arg-type]
            for it in (path, full)
        )
        np.testing.assert_array_equal(one.scene.work.schedule.rows, other.scene.work.schedule.rows)
        found, whole = one.simulate(), other.simulate()
        assert found.decode.tokens == whole.decode.tokens, "a dropped token is a token"
        assert found.total.activations == (experts >= 0).sum() < whole.total.activations
