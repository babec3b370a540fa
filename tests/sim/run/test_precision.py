"""Replays of models in other precisions."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import main
from sim.run.prepared import prepare, replay
from sim.run.scene import scene
from sim.sweep.design import Design
from sim.sweep.execute import scene_at
from sim.sweep.identity import identity
from tests.support.strategies import make_trace
from traces.models.released import RELEASED
from traces.schema import DECODE

CONFIG = {
    **RELEASED["qwen3-30b-a3b"], "num_hidden_layers": 9, "hidden_size": 256, "moe_intermediate_size": 256,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
}  # fmt: skip
SPLITS = ["profile", "eval", "eval"]
QUANTS = ("q8_0", "q4_k_m", "iq3_xs", "q3_k_m+attention=f32", "experts=fp8", "awq")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a model whose presets give layers experts of unequal size."""
    routes = np.random.default_rng(5).random((60, 9, 8)).argsort(axis=2)[:, :, :2]
    phase = (np.arange(60) % 20 > 3).astype(int)
    trace = make_trace(routes, n_experts=8, phase=phase, sequence=np.repeat(np.arange(3), 20), split=SPLITS)
    trace.meta["model"] |= {"name": "tiny", "experts": 8, "top_k": 2, "config": CONFIG}
    file = tmp_path_factory.mktemp("precision") / "trace.npz"
    trace.save(file)
    return file


@given(
    st.sampled_from(QUANTS), st.sampled_from(["lru", "clairvoyant", "popularity", "on-demand", "fiddler"]),
    st.sampled_from(["12", "40%"]), st.sampled_from(["eager", "graphs"]),
    st.sampled_from([None, "ddr5-5600x2", "epyc-9004x12"]), st.sampled_from(["bf16", "q8_0"]),
)  # fmt: skip
@settings(max_examples=25)
def test_both_engines_agree(
    path: Path, quant: str, policy: str, cache: str, loop: str, host: str | None, kv: str
) -> None:
    machine = {"hardware": "rtx-3060", "loop": loop, "host": host}
    here = scene(path, quant=quant, cache=cache, kv=kv, **machine, profile=[path], split="all")
    run = prepare(here, policy)
    one, other = (run.execute(engine=engine).log for engine in ("simpy", "compiled"))
    for name in vars(one):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, name


def test_fewer_bits_move_fewer_bytes_and_never_make_a_bound_worse(path: Path) -> None:
    bounds = [scene(path, quant=quant, cache="4MB").bound for quant in ("bf16", "q8_0", "q6_k", "q4_k_s", "q3_k_s")]
    for name in ("compute_ns", "link_bytes", "decode_compute_ns", "decode_link_bytes"):
        values = [getattr(bound, name) for bound in bounds]
        assert values == sorted(values, reverse=True) and values[0] > values[-1], name


def test_a_report_says_in_what_precision_and_its_memory_is_that_of_it(path: Path) -> None:
    here = scene(path, quant="q4_k_m", cache="12")
    report = replay(here, "lru")
    assert report.provenance["quant"] == "q4_k_m" and replay(scene(path), "lru").provenance["quant"] is None
    assert report.gpu_bytes["resident_model"] == here.model.resident_bytes
    assert len(set(here.model.expert_bytes)) == 2 and not any("experts of" in note for note in report.notes)
    expected = here.work.lookup_bytes[(here.work.schedule.phase[here.work.call // 9] == DECODE)].sum()
    assert replay(scene(path, quant="q4_k_m", cache="12"), "on-demand").decode.moved == expected


def test_a_precision_is_an_axis_of_a_sweep(path: Path) -> None:
    designs = [Design({"trace": str(path), "quant": quant, "cache": "12"}) for quant in ("q8_0", "q4_k_m")]
    assert len({identity(design) for design in designs}) == 2
    one, other = (scene_at(design).model.all_expert_bytes for design in designs)
    assert one > other


def test_what_is_no_precision_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(path), "--quant", "q4"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "'q4' is no preset" in error
    assert main(["replay", str(path), "--quant", "q4_k_m", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["quant"] == "q4_k_m"
