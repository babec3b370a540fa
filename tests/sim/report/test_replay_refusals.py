"""The command line: whatever is wrong is one line, status 2 and no file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from sim.plan import Plan, Prediction, Requests
from sim.run.terms import settle
from tests.support.replays import PROFILE, refused, reported, toy_trace, unexpected
from tests.support.strategies import make_trace
from tests.support.worlds import MS, handmade, toy_meta

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
    (["--cache", "0/layer"], "--cache '0/layer': 0 slots = 0.0% of all experts = 0 B cannot hold one expert"),
    (["--cache", "1.5/layer"], "--cache '1.5/layer': expected a whole number of slots"),
    (["--cache", "16/token"], "--cache '16/token': expected slots (64), a share (25%), slots of each layer (16/layer)"),
    (["--cache", "10 parsecs"], "--cache '10 parsecs': expected slots (64), a share (25%)"),
    (["--cache", "12,5%"], "--cache '12,5%': expected slots"),
    (["--cache", "12.5"], "--cache '12.5': expected a whole number of slots"),
    (["--cache", "nan"], "--cache 'nan': expected slots"),
    (["--cache", "-1"], "--cache '-1': expected slots"),
    (["--cache", "9" * 400], "expected slots"),
    (
        ["--cache", "3", "--set", "scope=layer"],
        "cache: 144.00 KiB split over 4 routed layers leave a layer without room for one expert of 48.00 KiB; give "
        "--cache 4 (slots), which is 192.00 KiB, or more",
    ),
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


def test_the_benchmark_knows_first_whether_it_can_write(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.bench.engines.run_bench", lambda *_: pytest.fail("the engines are being measured"))
    status, _, err = said("bench", "--json", "/proc/new/a.json")
    assert status == 2 and err.startswith("error: --json /proc/new/a.json: the folder /proc/new does not exist")


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
    refused(said, tmp_path, "; or say whose costs to charge, --model NAME", "replay", path)


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


def test_a_named_model_of_another_number_of_experts_a_token_is_refused(said: Any, trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "other.json"
    for top_k in (2, 3):
        config.write_text(json.dumps(toy_meta(4)["config"] | {"num_experts_per_tok": top_k}), encoding="utf-8")
        if top_k == 2:
            assert said("replay", trace, "--model", config)[0] == 0
        else:
            words = f"takes 3 experts a token; expected a model of 2, as {trace} has"
            refused(said, tmp_path, words, "replay", trace, "--model", config)
