"""Published speeds: the rows that are listed, how they are simulated, and that pages say what the data says."""

import json
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from analysis import strangers
from analysis.experiments.strangers_speeds import KINDS, NEAR, ON_CARD, ON_HOST, STAGES, _cells, summary
from analysis.strangers import (
    DECODED,
    Row,
    explaining,
    kernels_share,
    left_out,
    made_up,
    multiplied,
    rows,
    with_kernels,
    with_round_trips,
)
from tests.support.places import REPOSITORY
from traces.models.known import resolve_model
from traces.schema import DECODE

DATA: dict[str, Any] = json.loads((REPOSITORY / "docs/results/strangers-speeds.json").read_text("utf-8"))
HOST = "host's memory"
BY_NAME = {row.name: row for row in rows()}


def test_every_row_says_where_it_is_from_and_what_it_leaves_open() -> None:
    assert len(BY_NAME) == len(rows()) >= 14
    assert all(row.source and row.states and row.unknown for row in rows())
    assert all(set(one) == {"source", "what", "why"} and all(one.values()) for one in left_out())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_every_row_has_a_machine_that_holds_together(row: Row) -> None:
    machine = row.machine
    assert row.policy.kind.name == row.policy.name
    assert (machine.host is not None) == (row.host is not None)
    assert row.host is not None or (row.cpu_layers is None and row.gpu_experts is None)
    assert (row.cpu_layers or 0) <= row.spec.routed_layers
    assert (row.gpu_experts or row.slots or 0) <= row.spec.experts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": 2}, "one of cpu_layers"),
        ({"prompt": 5.0}, "prompt and prompt_tokens"),
        ({"measured": 0.0}, "measured"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    given = BY_NAME["RTX 2080, gpt-oss-20b"].model_dump() | changes
    with pytest.raises(ValidationError, match=said):
        Row.model_validate(given)


def test_which_experts_a_token_takes_does_not_matter_where_layers_live_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BY_NAME["RTX 2080, gpt-oss-20b"]
    speed, rng = row.simulated(), np.random.default_rng(1)

    def others(model: Any, prompt: int, sequences: int) -> Any:
        trace = made_up(model, prompt, sequences)
        decoded = trace.experts[trace.phase == DECODE]
        drawn = rng.random((*decoded.shape[:2], model.experts)).argsort(2)[:, :, : model.top_k]
        assert (drawn != decoded).any()
        trace.experts[trace.phase == DECODE] = drawn
        return trace

    monkeypatch.setattr(strangers, "made_up", others)
    assert row.simulated() == speed


def test_made_up_routes_reach_all_experts_and_name_none_twice() -> None:
    model = resolve_model("gpt-oss-20b")
    trace = made_up(model, 100)
    assert (trace.phase == DECODE).sum() == DECODED
    for part in (trace.experts[:100, 0], trace.experts[100:, 0]):
        assert {*part.ravel()} == {*range(model.experts)}
    assert all(len({*route}) == model.top_k for route in trace.experts[:, 3])


@pytest.mark.parametrize("name", ["RX 7900 XT, gpt-oss-20b, all", "RTX 4090, Mixtral Q3_K_M"])
def test_the_factors_that_explain_a_miss_give_the_measured_speed(name: str) -> None:
    row = BY_NAME[name]
    found = explaining(row)
    assert found
    for figure, by in found.items():
        assert row.simulated(multiplied(row.machine, figure, by)) == pytest.approx(row.measured, rel=0.015)


def test_the_correction_gives_hosts_the_share_of_their_peak_that_kernels_reach() -> None:
    row = BY_NAME["RTX 2080, Qwen3-30B"]
    corrected = with_kernels(row, row.machine)
    assert corrected.host is not None
    assert corrected.host.host_gbps.value == pytest.approx(kernels_share() * 3.2 * 8 * 4, rel=1e-4)
    assert 0.47 < kernels_share() < 0.76


def test_a_round_trip_takes_the_place_of_two_copies_of_a_row() -> None:
    row = BY_NAME["RTX 2080, gpt-oss-20b"]
    machine, layers, top_k = row.machine, 12, row.spec.top_k
    slower = 1 / row.simulated(with_round_trips(machine)) - 1 / row.simulated(machine)
    copies = top_k * -(-2 * machine.copy_ns(2 * row.spec.hidden) // top_k)
    assert slower == pytest.approx(layers * (150e-6 - copies / 1e9), rel=1e-3)


def test_the_committed_data_is_of_the_rows_that_are_listed() -> None:
    for row, found in zip(rows(), DATA["rows"], strict=True):
        assert (found["name"], found["measured"]) == (row.name, row.measured)
        assert found["kind"].startswith(ON_CARD if row.resident else ON_HOST)


@pytest.mark.parametrize("name", ["RTX 2080, Qwen3-30B", "RX 6800, GLM-4.5-Air", "RTX 5090, gpt-oss-20b"])
def test_the_committed_data_is_what_a_replay_gives(name: str) -> None:
    (found,) = (row for row in DATA["rows"] if row["name"] == name)
    row, speed = BY_NAME[name], found["simulated"]
    assert row.simulated() == pytest.approx(speed, rel=1e-3)
    assert row.simulated(row.driven_by("eager")) == pytest.approx(found["eager"], rel=1e-3)
    if row.on_llama_host:
        kernels = with_kernels(row, row.machine)
        assert row.simulated(kernels) == pytest.approx(found["corrected"], rel=1e-3)
        assert row.simulated(with_round_trips(row.machine)) == pytest.approx(found["with_round_trips"], rel=1e-3)
        assert row.simulated(with_round_trips(kernels)) == pytest.approx(found["with_both"], rel=1e-3)
    assert kernels_share() == pytest.approx(DATA["share"], rel=1e-3)
    if found["prompt"]:
        assert row.simulated_prompt() == pytest.approx(found["prompt"]["simulated"], rel=1e-3)


PAGE = (REPOSITORY / "docs/strangers.md").read_text("utf-8")
FOUND = {row["name"]: row for row in DATA["rows"]}


def _table(head: str) -> dict[str, list[str]]:
    """The cells of a table of the page by its first column."""
    lines = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_table_of_the_page_is_that_of_the_data() -> None:
    table = _table("| Row | Measured | Simulated | Error")
    assert {*table} == {*FOUND}
    for name, (*numbers, why) in table.items():
        assert numbers == _cells(FOUND[name])[1:6]
        assert (why == "–") == (abs(FOUND[name]["simulated"] / FOUND[name]["measured"] - 1) <= NEAR)


def test_the_prompts_of_the_page_are_those_of_the_data() -> None:
    prompts = {name: row["prompt"] for name, row in FOUND.items() if row["prompt"]}
    said = {name: [f"{one[key]:,.0f}" for key in ("tokens", "measured", "simulated")] for name, one in prompts.items()}
    assert _table("| Row | Tokens") == said


def test_the_errors_of_the_page_are_those_of_the_data() -> None:
    kinds = dict(zip(("host, CUDA", "host, ROCm", "card, CUDA", "card, ROCm and Vulkan"), KINDS, strict=True))
    for name, cells in _table("| Rows of").items():
        kind, host = kinds.get(name), not name.startswith("card")
        stages = [summary(DATA, kind, key) for key in STAGES.values()]
        means = [f"{100 * stages[at]['mean']:.0f} %" for at in (0, 3)]
        later = [f"{one['near']}" for one in stages[1:]] if host else ["–"] * 3
        assert cells == [f"{stages[0]['rows']}", f"{stages[0]['near']}", *later, means[0], means[1] if host else "–"]


def test_numbers_in_the_sentences_of_the_page_are_those_of_the_data() -> None:
    whole, host = ({key: summary(DATA, kind, key) for key in STAGES.values()} for kind in (None, KINDS[0]))
    as_listed, both = whole["simulated"], whole["with_both"]
    between = [row["eager"] <= row["measured"] <= row["simulated"] for row in DATA["rows"] if "T4" not in row["name"]]
    lacking = {name: FOUND[name]["lacking_us"] for name in FOUND}
    radeon = [row["lacking_us"] for row in DATA["rows"] if row["kind"] == KINDS[1]]
    ampere = [lacking[name] for name in FOUND if name.startswith(("RTX 3090", "RTX 4090"))]

    def gbps(name: str) -> str:
        gbps = BY_NAME[name].machine.host.host_gbps.value  # type: ignore[union-attr]
        return f"{gbps * FOUND[name]['explained'][HOST]:.0f}"

    said = [
        f"Of {as_listed['rows']} rows {as_listed['near']} are within 25 %",
        f"the mean error is {100 * as_listed['mean']:.0f} %, the median {100 * as_listed['median']:.0f} %",
        f"correction from elsewhere {whole['corrected']['near']} rows are within 25 %, and with two {both['near']}",
        f"falls from {100 * host['simulated']['median']:.0f} to {100 * host['with_both']['median']:.0f} % with both",
        f"The median, {DATA['share']:.2f}, is",
        f"Of {len(between)} rows {sum(between)} measured speeds lie between",
        f"{min(ampere):.0f} to {max(ampere):.0f} µs longer",
        f"up to {-lacking['RTX 5090, Qwen3.6-35B']:.0f} µs less",
        f"takes {lacking['RX 7900 XT, gpt-oss-20b']:.0f} µs longer than simulated",
        f"lack {min(radeon):.0f} to {max(radeon):,.0f} µs in each layer",
        f"if the host reads {gbps('RTX 2080, Qwen3-30B')} GB/s and not 102",
        f"with {FOUND['RTX A6000, Qwen3-235B Q8_0, 8K']['explained'][HOST]:.2f} of the 237 GB/s",
        f"row with {gbps('RTX 5090, Qwen3-30B BF16, 1K')} GB/s, not 504",
        f"to read {gbps('RTX 4060 Ti, Qwen3-30B BF16, all')} GB/s of 230",
        f"gives {FOUND['RTX 2080, Qwen3-30B']['eager']:.1f} there, measured 36.7",
        f"both rows are simulated at {FOUND['RTX 4080, Qwen3-30B, 8K']['simulated']:.1f} tokens/s",
        f"{len(left_out())} published speeds that were found",
    ]
    text = " ".join(PAGE.split())
    assert [phrase for phrase in said if phrase not in text] == []
    advice = " ".join((REPOSITORY / "docs/advise.md").read_text("utf-8").split())
    assert f"{DATA['share']:.2f} of the peak" in advice
    assert f"with a median error of {100 * host['with_both']['median']:.0f} %" in advice
