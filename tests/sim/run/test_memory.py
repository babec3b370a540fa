"""What a card's memory is for, and what of it is left for experts."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.machine.hardware import Hardware
from sim.run.memory import Memory, activation_bytes, kept_bytes, reserved
from sim.run.prepared import replay
from sim.run.scene import scene
from sim.sweep.design import Design
from sim.sweep.execute import scene_at
from tests.support.places import REPOSITORY
from traces.models.blocks import matrix_bytes
from traces.models.known import builtin_models, model_spec
from traces.models.quantised import quantised
from traces.models.spec import KV_FORMATS, ModelSpec

QWEN = str(REPOSITORY / "traces/qwen3_law.npz")
MIB = 2**20


def test_the_sum_is_what_llama_cpp_projects() -> None:
    # "projected to use 61807 MiB": Qwen3-30B-A3B in f16 with a context of 40960, tools/fit-params/README.md of
    # ggml-org/llama.cpp at build 6895. llama.cpp leaves the embedding on the host and stores routers in float32.
    model = quantised(model_spec("qwen3-30b-a3b"), "f16")
    whole = model.all_expert_bytes + model.resident_bytes - model.embedding_table_bytes
    assert (whole + kept_bytes(model, 1, 40960) + activation_bytes(model)) / MIB == pytest.approx(61807, abs=2)
    assert kept_bytes(model, 1, 40960) - kept_bytes(model, 1, 4096) == 3456 * MIB, "less memory in total, it says"


@pytest.mark.parametrize("name", builtin_models())
def test_keys_and_values_fill_windows_and_no_more(name: str) -> None:
    model = model_spec(name)
    token, window = model.kv_bytes_per_token, max(model.windows)
    assert model.cached_bytes(1) == token and model.cached_bytes(0) == 0
    grown = [model.cached_bytes(tokens) for tokens in (window, window + 1, window + 2)]
    assert token >= grown[1] - grown[0] == grown[2] - grown[1] >= 0
    assert grown[0] == token * window or len(set(model.windows)) > 2, "no window is full before"
    if not window:
        assert model.cached_bytes(1000) == 1000 * token


@given(st.sampled_from(builtin_models()), st.sampled_from(KV_FORMATS), st.integers(1, 10**6), st.integers(1, 64))
def test_keys_and_values_take_what_their_blocks_take(name: str, form: str, context: int, sequences: int) -> None:
    model = replace(model_spec(name), kv_format=form)
    full = replace(model, windows=(0,) * model.layers)
    widths = [
        width
        for layer in range(model.encoder_layers, model.layers)
        for width in (model.attention_of(layer).kv_width, model.attention_of(layer).index_kv_width)
    ]
    plain = context * sum(matrix_bytes(form, width, 1) for width in widths)
    assert kept_bytes(full, sequences, context) == sequences * (plain + model.state_bytes_per_sequence)
    assert kept_bytes(model, sequences, context) <= kept_bytes(full, sequences, context)
    assert kept_bytes(model, sequences, context) <= kept_bytes(model, sequences, context + 1)


def shown(model: ModelSpec, card: int, context: int, sequences: int, reserve: int, least: int = 1) -> Memory:
    parts = kept_bytes(model, sequences, context), activation_bytes(model, min(512, context)), reserve
    return Memory(card, model.resident_bytes, *parts, sequences, context, least)


@given(
    st.sampled_from(["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3-next-80b-a3b"]),
    st.sampled_from(["bf16", "q8_0"]), st.integers(1, 80), st.integers(1, 200_000), st.integers(1, 8),
    st.integers(0, 4 * 2**30),
)  # fmt: skip
@settings(max_examples=60)
def test_what_is_refused_fits_with_any_change_that_is_named(
    name: str, kv: str, gib: int, context: int, sequences: int, reserve: int
) -> None:
    model = replace(model_spec(name), kv_format=kv)
    held = shown(model, gib * 2**30, context, sequences, reserve)
    assert held.card == held.weights + held.kv + held.activations + held.reserve + held.left
    try:
        size = held.fitting(model, "a card")
    except InputError as refusal:
        assert held.left < max(model.expert_bytes) and "\n" not in str(refusal)
        for option, value in re.findall(r"--(reserve|kv|context|batch|quant) (\S+?)(?:;|$)", str(refusal)):
            other = model if option not in ("kv", "quant") else replace(model, kv_format=value) if option == "kv" else (
                quantised(model, value)
            )  # fmt: skip
            room = shown(
                other, held.card, int(value) if option == "context" else context,
                int(value) if option == "batch" else sequences, reserved(value) if option == "reserve" else reserve,
            )  # fmt: skip
            assert room.fitting(other, "a card") >= max(other.expert_bytes), (option, value)
            if option == "context":
                assert int(value) % 256 == 0
                longer = shown(model, held.card, int(value) + 256, sequences, reserve)
                assert int(value) + 256 > context or longer.left < max(model.expert_bytes), "the smallest change"
    else:
        assert max(model.expert_bytes) <= size <= min(held.left, model.all_expert_bytes)


def test_a_cache_that_fits_is_what_the_card_leaves() -> None:
    machine = Hardware.load("rtx-3060")
    here = scene(QWEN, hardware="rtx-3060", cache="auto", context=32768, quant="q4_k_m", kv="q8_0")
    report = replay(here, "lru")
    assert sum(report.gpu_bytes.values()) == machine.gpu_bytes and not any("needs" in note for note in report.notes)
    assert report.gpu_bytes["experts"] == report.settings["cache_bytes"] == here.budget
    assert report.gpu_bytes["kv"] == 32768 * 48 * 1024 * 34 // 32
    larger = scene(QWEN, hardware="rtx-3060", cache="auto", context=4096, quant="q4_k_m", kv="q8_0").budget
    assert larger - here.budget == (32768 - 4096) * 48 * 1024 * 34 // 32, "context against cache"
    assert scene(QWEN, hardware="h200", cache="auto").budget == here.model.experts * 48 * 3 * 2048 * 768 * 2


def test_a_context_takes_room_where_the_cache_is_given_too() -> None:
    one, other = (replay(scene(QWEN, cache="25%", **given), "lru") for given in ({}, {"context": 100_000}))
    assert other.gpu_bytes["kv"] == 100_000 * 98304 and other.gpu_bytes["reserve"] == 1024 * MIB
    assert one.tokens_per_s == other.tokens_per_s
    assert set(one.gpu_bytes) == {"experts", "resident_model", "policy", "kv"}


def test_fewer_bits_of_keys_and_values_are_read_sooner() -> None:
    times = [scene(QWEN, kv=kv, loop="graphs", hardware="rtx-3060").bound.compute_ns for kv in ("f32", "bf16", "q4_0")]
    assert times == sorted(times, reverse=True) and times[0] > times[1] > times[2]


def test_context_and_precision_of_keys_are_axes_of_a_sweep() -> None:
    axes = [("4096", "bf16"), ("32768", "bf16"), ("32768", "q8_0")]
    shared = {"trace": QWEN, "hardware": "rtx-3060", "cache": "auto", "quant": "q4_k_m"}
    few, more, small = (scene_at(Design({**shared, "context": int(n), "kv": kv})).budget for n, kv in axes)
    assert few > small > more


@pytest.mark.parametrize(("options", "message"), [
    (["--cache", "auto", "--context", "1"], r"--context 1: a sequence of the trace has \d+ tokens; expected at least"),
    (["--cache", "auto", "--context", "131072"], r"card.*--kv q8_0"),
    (["--kv", "q9"], r"--kv 'q9': expected one of f32, f16, bf16, q8_0"),
    (["--cache", "auto", "--reserve", "1024"], r"--reserve '1024': expected bytes with a unit, such as 1024MiB, or 0"),
    (["--cache", "auto", "--reserve", "9999GiB"], r"wanted in GiB: .*reserve 9999.00.*--reserve \d+MiB"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", QWEN, "--hardware", "rtx-3060", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message.replace("card", "rtx-3060 has 12.00 GiB"), error), error


def test_the_table_of_contexts_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["memory", "qwen3-30b-a3b", "--hardware", "rtx-3060", "--quant", "q4_k_m"]
    assert main([*command, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["contexts"]:
        held = sum(row[part] for part in ("weights", "kv", "activations", "reserve", "experts"))
        assert held == found["card"]
    experts = [row["experts"] for row in found["contexts"]]
    assert experts == sorted(experts, reverse=True) and experts[-1] < 0 == found["contexts"][-1]["slots"]
    here = scene(QWEN, hardware="rtx-3060", quant="q4_k_m", cache="auto", context=16384)
    assert [row["experts"] for row in found["contexts"] if row["context"] == 16384] == [here.budget]
    assert main([*command, "--kv", "q9"]) == 2
