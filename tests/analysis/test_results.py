"""The committed pages of results are what the committed data give, and the verdict's numbers are theirs."""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.entries import having
from analysis.experiments.domoe_neighbours import _own_and_other
from analysis.pages import report
from analysis.paper import PAPERS
from tests.support.places import REPOSITORY

RESULTS = REPOSITORY / "docs/results"


def data(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def test_committed_pages_are_those_that_the_command_makes_of_the_committed_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    again = tmp_path / "docs/results"
    again.mkdir(parents=True)
    papers = [name for name in PAPERS if (RESULTS / f"{name}.md").exists()]
    for path in [*RESULTS.glob("*.json"), *(RESULTS / f"{name}.md" for name in papers)]:
        shutil.copy(path, again)
    # Another release of matplotlib draws other bytes: that each figure is there is all that is asked of it.
    monkeypatch.setattr(report, "draw", lambda experiment, data, path: path.touch())
    assert [main(["report", name, "-o", "docs/results", "--show"]) for name in papers] == [0] * len(papers)
    committed = {path.name for path in RESULTS.iterdir() if path.is_file()} - {"regimes.md"}  # a page of a sweep
    assert {path.name for path in again.iterdir()} == committed
    for name in sorted(committed):
        if not name.endswith(".png"):
            assert (again / name).read_bytes() == (RESULTS / name).read_bytes(), name


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in RESULTS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.parametrize("paper", PAPERS)
def test_the_verdict_is_short(paper: str) -> None:
    words = [word for word in (RESULTS / f"{paper}.md").read_text("utf-8").split() if re.search(r"\w", word)]
    assert len(words) < 1000


MIXTRAL, QWEN3 = "mixtral-8x7b", "qwen3-30b-a3b"
NEXT = "next layer's gate"


def _range(values: Iterable[float], digits: int = 2) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def _ratios(metric: str, over: str, *names: str, ours: str = "domoe") -> list[dict[str, Any]]:
    """Mean ratios with look-ups as slow as they must be, not as the paper's figures imply."""
    means = [mean for name in names for mean in having(data(name)["means"], metric=metric, ours=ours)]
    return [m for m in means if m["over"].startswith(over) and m["software"] != "implied"]


def _values(ratios: list[dict[str, Any]], **wanted: str) -> list[float]:
    return [ratio["value"] for ratio in having(ratios, **wanted)]


def _steps(step: str, metric: str, *softwares: str) -> list[float]:
    return [c["steps"][step][metric]["value"] for c in data("domoe-ablation")["cells"] if c["software"] in softwares]


def _right(model: str, predictor: str, learned_from: str) -> str:
    """Percent of all layers' experts that a predictor finds, mean over workloads."""
    judged = having(data("predictors")["judged"], model=model, predictor=predictor, learned_from=learned_from)
    return f"{100 * np.mean([j['recall_of_all_layers'] for j in judged]):.0f}"


def _pays(model: str) -> str:
    """The least accuracies, in percent, from which prefetching beats no prefetching at all."""
    found = data("anomalies")
    least = [
        min(a for a, mean in zip(found["accuracies"], m["mean"], strict=True) if mean > m["lru"])
        for m in having(found["models"], model=model)
    ]
    return _range((100 * a for a in least), 0)


def test_numbers_of_the_verdict_are_those_of_the_data() -> None:
    half, quarter = "domoe-overall-half", "domoe-overall"
    own = [np.divide(*_own_and_other(entry["matrix"]["voted"])) for entry in data("domoe-neighbours")["models"]]
    similar = [np.mean(entry["adjacent_in_full"]) for entry in data("domoe-similarity")["models"]]
    sizes = having(data("domoe-table-size")["points"], model=MIXTRAL)
    popular = [point["over"]["popularity, domain"]["value"] for point in data("domoe-cache-size")["points"]]
    routes = {table["model"]: table["own_over"] for table in data("real-routes")["tables"]}
    deepseek, gpt = (routes[model] for model in ("deepseek-v2-lite", "gpt-oss-20b"))
    infinity = {
        metric: [
            [m["value"] for m in _ratios(metric, "moe-infinity", name) if m["model"] != "all"]
            for name in (quarter, half)
        ]
        for metric in ("throughput", "hit ratio")
    }
    speed = {name: having(_ratios("throughput", "fmoe, N", name), software="fast") for name in (half, quarter)}
    hits = {name: _values(_ratios("hit ratio", "fmoe", name), model="all") for name in (half, quarter)}
    by_lru = _values(_ratios("hit ratio", "fmoe", half, ours="domoe, lru"), model="all")
    table, few = "table over trajectory", "table (T+M) over table"
    said = [
        f"| {_range(own, 1)} |",
        f"| {_range(hits[quarter])} | {_range(hits[half])} |",
        f"at half ({_range(by_lru)})",
        f"{_values(speed[quarter], model='all')[0]:.2f} or {_values(speed[half], model='all')[0]:.2f}",
        *(f"| {_range(at_quarter)} | {_range(at_half)} |" for at_quarter, at_half in infinity.values()),
        f"| {_range(_steps(table, 'throughput', 'fast', 'paper'))} |",
        f"{_range(_steps(table, 'hit ratio', 'fast', 'paper'))} times the hits",
        f"| {_range(_steps(few, 'throughput', 'fast', 'paper'))} |",
        f"With slow ones it gains {_range(_steps(few, 'throughput', 'implied'))}",
        f"| {_range(similar)} |",
        f"within {_range((100 * p['hit_ratio'] for p in sizes), 0)} %",
        f"from {_range((100 * (1 - p['miss_ratio']) for p in sizes), 0)} %",
        f"up to {1 / min(popular):.2f} times",
        f"in all of its guesses on Mixtral, at half in {_pays(MIXTRAL).removesuffix(' to 100')} %",
        f"on Qwen3 in {_pays(QWEN3)} %",
        f"in {_right(MIXTRAL, 'domain tables', 'own')} and {_right(QWEN3, 'domain tables', 'own')} %",
        f"in {_right(MIXTRAL, NEXT, '–')} and {_right(QWEN3, NEXT, '–')} %",
        f"finds {deepseek['other']['value']:.1f} and {gpt['other']['value']:.1f} times",
        f"{deepseek['previous token']['value']:.2f} and {gpt['previous token']['value']:.2f} times",
    ]
    text = " ".join((RESULTS / "domoe.md").read_text("utf-8").split())
    assert [phrase for phrase in said if phrase not in text] == []
    assert max(popular) < 1


def _flow(name: str, **wanted: Any) -> list[dict[str, Any]]:
    return having(data(f"expertflow-{name}")["cells"], **wanted)


def _over(cells: Iterable[dict[str, Any]], ours: str, over: str) -> list[float]:
    found = [one["value"] for cell in cells for one in having(cell["ratios"], ours=ours, over=over)]
    return [value for value in found if value is not None]


def _best_rivals(ours: str) -> list[float]:
    """Of each place the least ratio over what predicts nothing or asks the next layer's router."""
    rivals = ("lru", "lru, one pool", "perfect-lfu", "cache-moe, perfect-lfu")
    return [min(value for rival in rivals for value in _over([cell], ours, rival)) for cell in _flow("rivals")]


def _percent(values: Iterable[float], digits: int = 0) -> str:
    return _range((100 * value for value in values), digits)


def test_numbers_of_expertflows_verdict_are_those_of_the_data() -> None:
    flow, cache = "expertflow", "cache-moe"
    switches = [f"switch-base-{experts}" for experts in (32, 64, 128)]
    others = (MIXTRAL, "qwen1.5-moe-a2.7b", "deepseek-moe-16b")
    large = [_over(_flow("throughput", model=m, slots=16, batch=32, in_domain=True), flow, "se-moe") for m in switches]
    stops = {
        cell["model"]: cell["value"]
        for cell in _flow("conditions", over="se-moe", condition="stops after every expert", slots=16, batch=32)
    }
    over = {
        condition: {cell["model"]: cell["value"] for cell in _flow("conditions", over=cache, condition=condition)}
        for condition in ("rival as coded", "equal terms")
    }
    hits = {
        (slots, batch): _flow("hits", model=switches[0], slots=slots, batch=batch, in_domain=True)[0]["hits"]
        for slots, batch in ((16, 4), (16, 16), (8, 16))
    }
    own = having(data("expertflow-accuracy")["recorded"], in_domain=True)
    memory = having(data("expertflow-memory")["models"], model=switches[2])[0]
    split = [(cell, having(cell["ratios"], ours="kmeans, dual-batch", over="none, dual-batch")[0]["value"])
             for cell in _flow("scheduler")]  # fmt: skip
    saved = [
        1
        - cell["runs"]["kmeans, dual-batch"]["lookups_per_token"]
        / cell["runs"]["none, dual-batch"]["lookups_per_token"]
        for cell, _ in split
    ]
    most = {model: max(value for cell, value in split if cell["model"] == model) for model in switches}
    doubled = [value for cell, _ in split for value in _over([cell], "kmeans, dual-batch", "twice the batch")]
    whole = memory["resident_bytes"] + memory["expert_bytes"] + memory["kv_bytes"]
    cached = memory["resident_bytes"] + 4 * memory["slot_bytes"] + memory["predictor_bytes"]
    cached += memory["kv_bytes_in_flight"]
    said = [
        f"| 2.01, 3.19, 5.86 | {', '.join(f'{value:.1f}' for (value,) in large)} |",
        f"| 9.99 | {_range(_over(_flow('throughput', model=switches[2], slots=4), flow, 'se-moe'), 0)} |",
        f"| {_range(value for m in others for value in _over(_flow('throughput', model=m), flow, cache))} |",
        f"| over 90 % | {_percent(one['guesses']['predictor'][0] for one in own)} % a token |",
        f"| TLP {_percent(one['guesses']['TLP'][0] for one in own)} % |",
        *(f"| {100 * hit['plec']['hit ratio']['value']:.1f} over {100 * hit['lru']['hit ratio']['value']:.1f} % |"
          for hit in hits.values()),
        f"| up to {', '.join(f'{most[model]:.2f}' for model in switches)} |",
        f"| {whole / 1e9:.2f} to {cached / 1e9:.2f} GB |",
        f"it is {stops[switches[0]]:.1f}, {stops[switches[1]]:.1f} and {stops[switches[2]]:.1f}",
        *(f"{one[MIXTRAL]:.2f}, {one[others[1]]:.2f} and {one[others[2]]:.2f} times as fast" for one in over.values()),
        f"rise to {_percent(hit['plec']['hit or late']['value'] for hit in hits.values())} %",
        f"would be {100 * hits[16, 4]['plec, 90 %']['hit ratio']['value']:.0f} %",
        f"saves {_percent(saved)} % of the experts",
        f"gains {_range(v for c, v in split if (c['slots'], c['batch']) == (4, 32))} at batch 32 with 4 slots",
        *(f"{part} {_range(_over(_flow('parts'), name, 'whole'))}" for part, name in (
            ("keeps", "no correction"), ("without prefetch", "no prefetch"), ("without the scheduler", "no scheduler"),
        )),
        f"ExpertFlow is {_range(_best_rivals(flow))} times as fast",
        f"right in 90 % it is {_range(_best_rivals('expertflow, right in 90%'))}",
    ]  # fmt: skip
    text = " ".join((RESULTS / "expertflow.md").read_text("utf-8").split())
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)  # links read as their words
    assert [phrase for phrase in said if phrase not in text] == []
    assert max(doubled) < 1
    beside = having(data("expertflow-domoe")["cells"], model=MIXTRAL)
    for cell in (cell for cell in beside if cell["batch"] >= 16):
        for cache in ("25%", "50%"):
            alike = [cell["runs"][f"{name}, {cache}"]["tokens_per_s"] for name in (flow, "domoe, best", "lru, a layer")]
            assert max(alike) < 1.02 * min(alike)
    assert [v for c, v in split if (c["slots"], c["batch"]) == (16, 16)] == pytest.approx([1] * 3, abs=0.02)
