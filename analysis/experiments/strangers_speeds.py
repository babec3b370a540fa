"""Does the simulator give the speeds that strangers measured, on machines that this project never had?

Each row is a published speed, with the setting that its source states. The rows were listed before any of them was
simulated, and nothing was fitted to them: cards are as data sheets have them, a host's memory sustains the share that
others measured, the loop is that of CUDA graphs as on one H200. Where a row misses, single figures are multiplied until
the simulated speed is the measured one: what that takes says which figure may be wrong.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure
from analysis.pages.sheets import NOTHING, Sheet, notes, number, percent
from analysis.paper import STRANGERS
from analysis.runs import spread
from analysis.strangers import (
    Row,
    explaining,
    kernels_share,
    lacking_us,
    left_out,
    rows,
    with_kernels,
    with_round_trips,
)

NEAR = 0.25
"""How far off a speed may be before it counts as a miss, as a share of the measured one."""
ON_HOST, ON_CARD = "experts on the host", "all on the card"
NVIDIA, RADEON = "CUDA", "ROCm and Vulkan"
STAGES = {
    "as listed": "simulated",
    "corrected": "corrected",
    "round trips instead": "with_round_trips",
    "both": "with_both",
}
"""What a speed is simulated with, and the key that it has."""
KINDS = [f"{where}, {what}" for where in (ON_HOST, ON_CARD) for what in (NVIDIA, RADEON)]


def measure(options: ExperimentOptions) -> Data:
    """Every row's speed, that with the correction, and of those that miss what single figure would explain it."""
    return {
        "rows": spread(_judged, rows(), options.processes, "strangers"),
        "share": _rounded(kernels_share()),
        "made": {key: value for key, value in options.made().items() if key != "cache"},
    }


def _judged(row: Row) -> Data:
    speed = row.simulated()
    stages, prompt = _stages(row, speed), row.simulated_prompt()
    misses = abs(speed / row.measured - 1) > NEAR
    return {
        "name": row.name,
        "kind": f"{ON_CARD if row.resident else ON_HOST}, {NVIDIA if row.backend == 'CUDA' else RADEON}",
        "measured": row.measured,
        **{STAGES[stage]: _rounded(found) for stage, found in stages.items()},
        "eager": _rounded(row.simulated(row.driven_by("eager"))),
        "lacking_us": _rounded(lacking_us(row, speed)),
        "prompt": None
        if prompt is None
        else {"tokens": row.prompt_tokens, "measured": row.prompt, "simulated": _rounded(prompt)},
        "explained": {name: _rounded(by) for name, by in explaining(row).items()} if misses else {},
    }


def _stages(row: Row, speed: float) -> dict[str, float]:
    """Tokens/s of a row as it is listed, which are ``speed``, and with each correction where it is one for the row."""
    if not row.on_llama_host:
        return dict.fromkeys(STAGES, speed)
    plain, slower = row.machine, with_kernels(row, row.machine)
    machines = (slower, with_round_trips(plain), with_round_trips(slower))
    return dict(zip(STAGES, (speed, *map(row.simulated, machines)), strict=True))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def summary(data: Data, kind: str | None = None, key: str = "simulated") -> dict[str, float]:
    """Of the rows of a kind: how many there are, how many are near, and how far off they are.

    ``mean`` and ``median`` are of the errors' sizes, ``ratio`` is the median of simulated over measured; ``key`` is
    one of `STAGES`.
    """
    ratios = [row[key] / row["measured"] for row in data["rows"] if kind in (None, row["kind"])]
    sizes = [abs(ratio - 1) for ratio in ratios]
    near = sum(size <= NEAR for size in sizes)
    return {"rows": len(ratios), "near": near, "mean": fmean(sizes), "median": median(sizes), "ratio": median(ratios)}


def sheets(data: Data) -> list[Sheet]:
    """Speeds side by side, how far off they are, what sources state, and what was left out."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in data["rows"])]
    columns = ["row", "measured", "simulated", "error", "corrected", "error", "eager", "µs a layer"]
    speeds = [
        Sheet(f"Tokens/s: {kind}", columns, [_cells(row) for row in data["rows"] if row["kind"] == kind])
        for kind in kinds
    ]
    errors = [
        [kind or "all", when, *_summed(summary(data, kind, key))]
        for kind in (*kinds, None)
        for when, key in STAGES.items()
        if key == "simulated" or kind is None or kind.startswith(ON_HOST)
    ]
    heads = ["rows of", "", "rows", f"within {NEAR:.0%}", "mean error", "median error", "median ratio"]
    prompts = [[row["name"], *_prompt_cells(row["prompt"])] for row in data["rows"] if row["prompt"]]
    stated = [[row.name, row.states, row.unknown, row.source] for row in rows()]
    out = [[one["source"], one["what"], one["why"]] for one in left_out()]
    figures = list(dict.fromkeys(name for row in data["rows"] for name in row["explained"]))
    return [
        *speeds,
        Sheet("What one figure alone would have to be multiplied by", ["row", *figures], _explained(data, figures)),
        Sheet("How far off", heads, errors, notes("strangers", share=data["share"])),
        Sheet("Tokens/s of prompts", ["row", "tokens", "measured", "simulated", "error"], prompts),
        Sheet("What the sources state", ["row", "states", "unknown", "source"], stated, detail=True),
        Sheet("Found, and not simulated", ["source", "what", "why not"], out, detail=True),
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    changed = row["corrected"] != row["simulated"]
    return [
        row["name"],
        number(row["measured"], 1),
        number(row["simulated"], 1),
        _error(row, "simulated"),
        number(row["corrected"], 1) if changed else NOTHING,
        _error(row, "corrected") if changed else NOTHING,
        number(row["eager"], 1),
        number(row["lacking_us"], 0),
    ]


def _explained(data: Data, figures: Sequence[str]) -> list[list[str]]:
    """Of each row that misses, the factor of each figure that would give the measured speed."""
    missing = [row for row in data["rows"] if abs(row["simulated"] / row["measured"] - 1) > NEAR]
    shown = [[f"{row['explained'][name]:.2g}" if name in row["explained"] else NOTHING for name in figures]
             for row in missing]  # fmt: skip
    return [[row["name"], *factors] for row, factors in zip(missing, shown, strict=True)]


def _prompt_cells(prompt: Mapping[str, Any]) -> list[str]:
    return [
        f"{prompt['tokens']:,}",
        number(prompt["measured"], 0),
        number(prompt["simulated"], 0),
        _error(prompt, "simulated"),
    ]


def _error(row: Mapping[str, Any], key: str) -> str:
    return f"{100 * (row[key] / row['measured'] - 1):+.0f} %"


def _summed(found: Mapping[str, float]) -> list[str]:
    sizes = [percent(found["mean"], 0), percent(found["median"], 0), number(found["ratio"])]
    return [f"{found['rows']}", f"{found['near']}", *sizes]


def draw(data: Data, figure: Figure) -> None:
    """Simulated over measured tokens/s, with a band of 25 % about the diagonal; an arrow leads to the corrected."""
    figure.set_size_inches(7, 6)
    ax = figure.subplots()
    ends = _ends(data["rows"])
    ax.fill_between(ends, [(1 - NEAR) * end for end in ends], [(1 + NEAR) * end for end in ends], color="#dddddd", lw=0)
    ax.plot(ends, ends, "k", lw=0.8)
    for kind, style in zip(KINDS, ("C0o", "C1o", "C0s", "C1s"), strict=True):
        points = [(row["measured"], row["simulated"]) for row in data["rows"] if row["kind"] == kind]
        if points:
            ax.plot(*zip(*points, strict=True), style, ms=4, label=kind)
    for row in data["rows"]:
        if row["corrected"] != row["simulated"]:
            at = row["measured"]
            ax.annotate("", (at, row["corrected"]), (at, row["simulated"]), arrowprops={"arrowstyle": "->", "lw": 0.8})
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured tokens/s", ylabel="simulated tokens/s")
    ax.grid(alpha=0.3, which="both")


def _ends(found: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    speeds = [row[key] for row in found for key in ("measured", "simulated", "corrected")]
    return 0.7 * min(speeds), 1.4 * max(speeds)


TITLE = "Speeds that strangers published"
EXPERIMENT = Experiment(300, "strangers-speeds", TITLE, __doc__, measure, sheets, draw, paper=STRANGERS)
