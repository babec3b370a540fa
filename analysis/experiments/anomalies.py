"""Is a more accurate predictor always faster? In the mean it is, in a single run it need not be.

The predictor is told the future and made to err. With accuracy a, each of its guesses is right with probability a. What
is wrong at one accuracy is wrong at every lower one of the same seed, so along a seed the predictor only gets better.

Copies still queue for one link, and experts for the same memory. One more right guess can push out an expert that would
have been used again, or delay a copy that is waited for. R. L. Graham found such anomalies in list scheduling (Bell
System Technical Journal 45, 1966).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from analysis.experiment import Data, Experiment
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure
from analysis.pages.sheets import Sheet, notes, number, percent
from analysis.runs import Design, Replayed, run
from sim.policies.named import NamedPolicy

ACCURACIES = tuple(round(0.02 * i, 2) for i in range(51))
SEEDS = 4
_COLUMNS = 2
_SHOWN = 5
"""Every so many accuracies stand in the table."""
LARGER = "50%"
"""A second cache size: one that holds what a token takes over all layers, and room to spare."""
POLICY = "oracle"


def measure(options: ExperimentOptions) -> Data:
    """Every accuracy under every seed, guessing at random, and no prefetch, on each model's first workload."""
    models: list[Data] = []
    accurate = [NamedPolicy(f"accuracy {a}", POLICY, {"accuracy": a}) for a in ACCURACIES]
    for model, cache in product(options.models, dict.fromkeys((options.cache, LARGER))):
        workload, sources = next(iter(model.workloads.items()))
        place = options.place(model, sources, cache=cache)
        places = [replace(place, seed=options.seed + index) for index in range(SEEDS)]
        designs = [
            *(Design(place, one) for place in places for one in accurate),
            *(Design(place, NamedPolicy("random", POLICY, {"random": True})) for place in places),
            Design(places[0], NamedPolicy("lru", "lru")),
        ]
        done = run(designs, options.processes, f"anomalies, {model.name}, {cache}")
        grid = [done[i * len(ACCURACIES) : (i + 1) * len(ACCURACIES)] for i in range(SEEDS)]
        what = {"model": model.name, "workload": workload, "cache": cache}
        models.append(what | _found(grid, done[-SEEDS - 1 : -1], done[-1]))
    return {"accuracies": list(ACCURACIES), "models": models, "made": options.made()}


def _found(grid: list[list[Replayed]], guessed: list[Replayed], without: Replayed) -> Data:
    """Throughput by seed and accuracy, and where it falls although accuracy rises."""
    speed = np.array([[outcome.tokens_per_s for outcome in row] for row in grid])
    time = np.array([[outcome.shares.ns for outcome in row] for row in grid])  # (seeds, accuracies, sequences)
    return {
        "tokens_per_s": [[float(f"{v:.6g}") for v in row] for row in speed],
        "mean": [float(f"{v:.6g}") for v in speed.mean(axis=0)],
        "wasted": [round(float(np.mean([row[a].to_json()["wasted"] for row in grid])), 4) for a in range(len(grid[0]))],
        "random": float(f"{np.mean([outcome.tokens_per_s for outcome in guessed]):.6g}"),
        "lru": float(f"{without.tokens_per_s:.6g}"),
        "runs": anomalies(-speed.T[:, :, None]),
        "sequences": anomalies(time.transpose(1, 0, 2)),
    }


def anomalies(time: np.ndarray) -> Data:
    """Pairs of neighbouring accuracies where the more accurate run takes longer; ``time`` (accuracies, runs, parts).

    ``worst`` is the largest such rise, of the time before it.
    """
    rise = np.diff(time, axis=0)
    worst = float((rise / np.abs(time[:-1])).max(initial=0))
    return {"pairs": int(rise.size), "slower": int((rise > 0).sum()), "worst": round(worst, 5)}


def sheets(data: Data) -> list[Sheet]:
    """Order of predictors and anomalies by model, then throughput by accuracy."""
    rows = [
        [m["model"], m["workload"], m["cache"],
         *(number(speed, 3) for speed in (m["mean"][0], m["random"], m["mean"][-1], m["lru"])),
         _pays(m, data["accuracies"]), _rises(m["mean"]), _slower(m["runs"]), _slower(m["sequences"])]
        for m in data["models"]
    ]  # fmt: skip
    columns = ["model", "workload", "cache", "inverted", "random", "perfect", "no prefetch (lru)", "pays from accuracy",
               "mean rises", "slower runs", "slower sequences"]  # fmt: skip
    shown = range(0, len(data["accuracies"]), _SHOWN)
    lines = [
        [m["model"], m["cache"], what, *cells] for m in data["models"] for what, cells in _by_accuracy(m, shown).items()
    ]
    heads = ["model", "cache", "of", *(f"{data['accuracies'][index]:.2f}" for index in shown)]
    return [
        Sheet("Accuracy and throughput", columns, rows, notes("anomalies", seeds=SEEDS)),
        Sheet("Tokens/s by accuracy", heads, lines, notes("anomalies-by-accuracy")),
    ]


def _by_accuracy(model: Data, shown: Sequence[int]) -> dict[str, list[str]]:
    """What a model has at each accuracy that is shown."""
    seeds = [[row[index] for row in model["tokens_per_s"]] for index in shown]
    return {
        "mean": [number(model["mean"][index], 3) for index in shown],
        "least": [number(min(column), 3) for column in seeds],
        "most": [number(max(column), 3) for column in seeds],
        "wasted": [percent(model["wasted"][index]) for index in shown],
    }


def _slower(found: Data) -> str:
    return f"{found['slower']:,} of {found['pairs']:,} (worst {percent(found['worst'], 2)})"


def _rises(mean: list[float]) -> str:
    """In how many steps of accuracy the mean rises."""
    steps = [later > earlier for earlier, later in pairwise(mean)]
    return f"{sum(steps)} of {len(steps)} steps"


def _pays(model: Data, accuracies: list[float]) -> str:
    paying = [a for a, mean in zip(accuracies, model["mean"], strict=True) if mean > model["lru"]]
    return f"{paying[0]:.2f}" if paying else "never"


def draw(data: Data, figure: Figure) -> None:
    """Throughput over accuracy: each seed thin, its anomalies marked, the mean thick."""
    models = data["models"]
    rows = -(-len(models) // _COLUMNS)
    figure.set_size_inches(9, 3.6 * rows)
    axes: Any = list(figure.subplots(rows, _COLUMNS, squeeze=False).flat)
    accuracies = np.array(data["accuracies"])
    for ax, model in zip(axes, models, strict=False):
        for index, row in enumerate(np.array(model["tokens_per_s"])):
            ax.plot(accuracies, row, color="0.75", lw=0.7, label="one seed" if index == 0 else None)
            fell = np.flatnonzero(np.diff(row) < 0)
            label = "slower than less accurate" if index == 0 else None
            ax.plot(accuracies[fell + 1], row[fell + 1], "r.", ms=5, label=label)
        ax.plot(accuracies, model["mean"], color="tab:blue", lw=2, label="mean")
        ax.axhline(model["lru"], color="k", ls="--", lw=0.8, label="no prefetch (lru)")
        ax.axhline(model["random"], color="tab:orange", ls=":", lw=1, label="random guesses")
        ax.set_title(f"{model['model']}, {model['workload']}, cache {model['cache']}", fontsize=9)
        ax.set_xlabel("accuracy of the prediction")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s")


TITLE = "Accuracy and throughput: nested errors, anomalies, waste"
EXPERIMENT = Experiment(110, "anomalies", TITLE, __doc__, measure, sheets, draw)
