"""Advice: ranked, within the card's memory, typed as engines take it, and better with better parts."""

import argparse
import io
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ground.errors import InputError
from sim.__main__ import main
from sim.advise.answer import Answer, advise, equal, trials
from sim.advise.asked import Asked, routed, served_by
from sim.advise.engines import engines
from sim.advise.routing import fitted, nearest, routing
from sim.advise.view import view
from sim.policies.named import NamedPolicy
from tests.support.strategies import traces
from traces.models.known import builtin_models, model_spec
from traces.schema import OPTIONAL
from traces.trace import Trace, validate

ASKED = Asked(
    model="qwen3-30b-a3b", quant="q4_k_m", hardware="rtx-3060", host="ddr4-3200x2", context=16384, sequences=2
)  # fmt: skip


@pytest.fixture(scope="module")
def answer() -> Answer:
    return advise(ASKED)


def test_placements_are_ranked_and_fit_the_card(answer: Answer) -> None:
    speeds = [one.speed for one in answer.trials]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > 0
    memory = answer.here.memory
    assert memory is not None
    for one in answer.trials:
        if one.report:
            assert sum(memory.beside.values()) + memory.weights + one.report.gpu_bytes["experts"] <= memory.card
            assert one.binds is not None and sum(one.binds.values()) == pytest.approx(1, abs=1e-3)
        else:
            assert one.reason and not one.command


def test_each_command_is_one_that_its_engine_takes(answer: Answer) -> None:
    options = {
        "llama-server": ["-m", "-ngl", "-c", "-ctk", "-ctv", "-t", "--n-cpu-moe", "--moe-cache-mib", "-lm",
                         "--moe-cache-cpu-share"],
        "python": ["-m", "--model", "--kt-weight-path", "--kt-method", "--kt-cpuinfer", "--kt-threadpool-count",
                   "--kt-num-gpu-experts", "--kt-expert-placement-strategy", "--init-expert-location",
                   "--context-length"],
        "ft": ["--model", "--moe-strategy", "--moe-cache-size", "--moe-cpu-threads", "--kv-reserve-tokens"],
        "vllm": ["--cpu-offload-gb", "--max-model-len"],
    }  # fmt: skip
    bf16 = trials(replace(ASKED, quant=None, hardware="rtx-4090"), routed(ASKED))
    typed = [one.command for one in [*answer.trials, *bf16] if one.report]
    assert {shlex.split(command)[0] for command in typed} == set(options)
    for command in typed:
        program, *words = shlex.split(command)
        parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
        for option in options[program]:
            parser.add_argument(option)
        parser.add_argument("--cpu-moe", action="store_true")
        parser.add_argument("--cpu-offload-params", nargs="+")
        parser.add_argument("words", nargs="*")
        assert parser.parse_args(words) and "{" not in command
    (kt,) = {command.split("--kt-cpuinfer")[0].split()[-1] for command in typed if "--kt" in command} - {"BF16"}
    assert kt == "LLAMAFILE"


def test_experts_that_an_engine_has_no_kernels_for_are_left_out() -> None:
    asked = Asked(model="gpt-oss-20b", hardware="rtx-3060", sequences=2)
    found = {one.engine.name: one for one in trials(asked, routed(asked))}
    assert "reads no such experts" in found["KTransformers"].reason and found["ik_llama.cpp"].report
    assert replace(asked, quant=" Q4_K_M").form == "q4_k_m" and replace(asked, model="some/file.gguf").form == "gguf"
    assert {one.name for one in engines() if one.reads("gguf")} == {"llama.cpp", "ik_llama.cpp", "KTransformers"}


@pytest.mark.parametrize(("more", "fits"), [(0, True), (-1, False)])
def test_experts_on_the_host_fit_its_memory(answer: Answer, more: int, fits: bool) -> None:
    one = next(one for one in answer.trials if one.placement.policy == "n-cpu-moe")
    asked = replace(ASKED, host_memory=one.host_bytes + 4 * 2**30 + more)
    found = trials(asked, answer.routes)
    for there in found:
        assert not there.report or there.host_bytes + 4 * 2**30 <= asked.host_memory  # type: ignore[operator]
        assert there.report or there.reason
    same = next(there for there in found if there.placement.policy == "n-cpu-moe")
    assert (same.report is not None) == fits and ("of host memory wanted" in same.reason) != fits


def test_more_of_the_hosts_memory_is_a_part_and_too_little_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "--model", "qwen3-30b-a3b", "--quant", "q4_k_m", "--hardware", "rtx-3060", "--sequences", "2"]
    assert main([*command, "--host-memory", "14GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "GiB of experts in 14.0." in said and "host memory 21 GiB" in said
    assert main([*command, "--host-memory", "6GiB"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error:") and error.count("of host memory wanted") == 1
    assert "what would do: card rtx-3090, card rtx-4090, card rtx-5090, host memory 21 GiB" in error
    for text in ("64", "0GiB", "x", "16/layer"):
        assert main([*command, "--host-memory", text]) == 2
        assert "expected bytes with a unit, such as 64GiB" in capsys.readouterr().err


def test_engines_use_less_of_the_hosts_memory_than_memory_tests_and_a_file_stays() -> None:
    machine = ASKED.machine.load()
    (llama,) = (engine for engine in engines() if engine.name == "llama.cpp")
    host = served_by(llama, ASKED, machine).host
    assert host is not None and machine.host is not None and host.call_us is not None
    assert host.host_gbps.value == pytest.approx(0.63 * 51.2) and host.call_us.value == 150
    assert host.shared_gbps.value / host.host_gbps.value == pytest.approx(
        machine.host.shared_gbps.value / machine.host.host_gbps.value
    )
    measured = replace(ASKED, hardware="h200", host=None)
    machine = measured.machine.load()
    host = served_by(llama, measured, machine).host
    assert host is not None and machine.host is not None and host.host_gbps == machine.host.host_gbps


def test_every_placement_names_a_policy() -> None:
    for engine in engines():
        for placement in engine.placements:
            assert isinstance(placement.named(), NamedPolicy)


@pytest.mark.parametrize(
    "better", [{"hardware": "rtx-3090"}, {"host": "ddr4-3200x4"}, {"link": "pcie5x16"}, {"kv": "q8_0"}]
)
def test_better_parts_are_no_worse(answer: Answer, better: dict[str, str]) -> None:
    asked = replace(ASKED, **better)  # type: ignore[arg-type]
    found = trials(asked, answer.routes)
    assert found[0].speed >= answer.best.speed * 0.999


def test_the_layers_that_llama_cpp_leaves_on_the_host_are_the_fewest(answer: Answer) -> None:
    one = next(one for one in answer.trials if one.placement.policy == "n-cpu-moe")
    layers, model = int(one.filled["cpu_layers"]), answer.here.model
    sizes = model.experts * np.array(model.expert_bytes)
    room = answer.here.budget - max(model.expert_bytes)
    assert sizes[layers:].sum() <= room < sizes[layers - 1 :].sum()


def test_what_does_not_fit_is_refused_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["advise", "--model", "mixtral-8x22b", "--hardware", "rtx-3060", "--context", "64k"]
    assert main(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert "would fit: --context" in line and "--context 65536" in line and "--cache" not in line
    assert main(["advise", "--model", "switch-base-32", "--hardware", "rtx-3060"]) == 2
    assert "expected a decoder alone" in capsys.readouterr().err


def test_the_command_says_how_sure_it_is_and_whose_routing_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "gpt-oss-20b", "--hardware", "rtx-3060", "--sequences", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No routing of gpt-oss-20b is at hand: made to its shape from that of" in said
    assert "How sure" in said and "--n-cpu-moe" in said
    assert "how much memory it has is unknown and not checked (--host-memory)" in said
    assert "Threads on the host: 8, assumed: --host ddr5-5600x2:16 says 16" in said
    assert "loop graphs" not in said and "Kernels are launched as CUDA graphs" in said
    assert main(["advise", "--model", "gpt-oss-20b", "--hardware", "rtx-3060", "--sequences", "2", "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["placements"][0]["tokens_per_s"] == max(one["tokens_per_s"] or 0 for one in data["placements"])


@pytest.mark.parametrize("text", ["0", "16m", "-1", "1.5k", ""])
def test_a_context_that_is_none_is_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--model", "gpt-oss-20b", "--hardware", "rtx-3060", "--context", text]) == 2
    assert "expected tokens, such as 16384 or 16k" in capsys.readouterr().err


def test_a_trace_of_ones_own_is_gone_by(answer: Answer, tmp_path: Path) -> None:
    bundled = nearest(model_spec("qwen3-30b-a3b"))
    own = replace(ASKED, trace=Path(shutil.copy(bundled, tmp_path)))
    assert routed(own).own and not answer.routes.own
    (tmp_path / "link").symlink_to(bundled.parent)
    assert not routed(replace(ASKED, trace=tmp_path / "link" / bundled.name)).own
    with pytest.raises(InputError, match="sequences 0"):
        replace(ASKED, sequences=0)


# -- what is read ------------------------------------------------------------------------------------------------------


def printed(answer: Answer) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(answer))
    return console.export_text()


def test_all_parts_are_shown_and_the_command_that_older_builds_take(answer: Answer) -> None:
    said = printed(answer)
    assert {one.name.split()[0] for one in answer.parts} == {"card", "host", "precision", "keys"}
    assert all(one.name in said for one in answer.parts)
    (older,) = [line for line in said.splitlines() if "for builds without the newer" in line]
    assert older.startswith("llama.cpp, layers on the CPU") and answer.best.placement.newer
    assert said.split(older)[1].split()[0] == "llama-server" and "--n-cpu-moe" in said.split(older)[1]


def test_placements_within_their_uncertainty_are_about_equal(answer: Answer) -> None:
    best, others = answer.best, [one for one in answer.trials if one.speed][1:]
    apart = replace(answer, figures=[], trials=[best, *(replace(one, low=0.1, high=0.2) for one in others)])
    assert equal(apart) == [] and "About equal" not in printed(replace(apart, equal=[]))
    met = replace(others[0], high=best.low)
    assert equal(replace(apart, trials=[best, met])) == [met]
    assert f"About equal: {best.engine.name} ({best.placement.name}), {met.engine.name}" in printed(
        replace(answer, equal=[met])
    )
    nearly = replace(best, low=best.speed, high=best.speed)
    rival = replace(others[0], low=others[0].speed, high=others[0].speed)
    (widest, *_) = answer.figures
    turned = replace(widest, speeds=(rival.speed * 0.5, best.speed))  # the fastest falls behind at the low end
    assert equal(replace(answer, figures=[turned], trials=[nearly, rival])) == [rival]


def test_an_interval_whose_ends_print_alike_is_a_dash(answer: Answer) -> None:
    same = replace(answer.best, low=answer.best.speed, high=answer.best.speed + 1e-4)
    shown = f"{same.low:,.2f}"
    assert f"{shown} to {shown}" not in printed(replace(answer, trials=[same], figures=[]))
    still = replace(answer.figures[0], speeds=(same.speed, same.speed))
    said = printed(replace(answer, trials=[same], figures=[answer.figures[0], still]))
    assert f"{still.name}: –\n" in " ".join(said.split(" "))
    assert "hardly move the fastest" in printed(replace(answer, figures=[still]))


# -- routes that are made to fit ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(trace=traces(), name=st.sampled_from(["gpt-oss-20b", "olmoe-1b-7b", "llama-4-scout", "qwen1.5-moe-a2.7b"]))
def test_routes_are_made_to_fit_any_model(trace: Trace, name: str) -> None:
    model = model_spec(name)
    made = fitted(trace, model)
    validate(made)
    assert made.experts.shape == (trace.n_rows, model.routed_layers, model.top_k)
    assert all(getattr(made, array) is None for array in OPTIONAL)
    for layer in range(model.routed_layers):
        routed_there = (trace.experts[:, layer * trace.n_layers // model.routed_layers] >= 0).any(axis=1)
        assert ((made.experts[:, layer] >= 0).all(axis=1) == routed_there).all()
        assert ((made.experts[:, layer] >= 0).any(axis=1) == routed_there).all()


def test_tokens_that_route_alike_still_do() -> None:
    loaded, _ = routing(nearest(model_spec("olmoe-1b-7b")), model_spec("olmoe-1b-7b"))
    again, _ = routing(nearest(model_spec("olmoe-1b-7b")), model_spec("olmoe-1b-7b"))
    np.testing.assert_array_equal(loaded.chosen.experts, again.chosen.experts)


@pytest.mark.parametrize("name", builtin_models())
def test_there_is_a_trace_for_every_model(name: str) -> None:
    assert nearest(model_spec(name)).exists()
