"""How fast is ExpertFlow over the baselines of its paper, at the paper's settings?

Models, data sets, slots a layer and batches are the paper's, as far as it names them; the card is an A40. *Expertflow*
is the paper's form: a net predicts whole paths, two pairs of batches are in flight, their tokens are regrouped by
predicted paths, and slots are shared out by predicted need. *No scheduler* leaves tokens in the batches in which they
came. *Code* is what the published code does: slots split evenly, a layer that waits for all that is on its way to it,
no correction, and predictions that were made beforehand. Where a trace carries no predictions, an oracle stands in that
is right in 90 %, and there is no scheduler.

Two full batches are in a data set wherever tokens are regrouped. Where it has sequences for only one, that decodes
without a scheduler, and has no interval: three quarters of its sequences do not fill it.

Rivals: *cache-moe* is the paper of Mixtral-offloading, an LRU cache a layer and what the next layer's gate names; its
published *code* has the cache alone and copies the expert that leaves back to the host. *Lru* is that cache without
copying back. *Se-moe* has memory for two whole layers, whatever the slots; at *equal bytes* it copies a layer in waves.
*Pregated-moe* is told the next layer's routes: its model was trained for that. *All-in-gpu* ignores the slots.
"""

from analysis.contest import verdict
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.expertflow import (
    AT_PAPERS,
    CODE,
    ENGINE,
    OURS,
    RIVALS,
    at_claim,
    contest,
    label,
    made,
    ours,
    places,
    ratio,
    rivals,
    shown,
    way,
)
from analysis.options import ExperimentOptions
from analysis.pages.drawing import Figure, panels
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.published import expertflow
from analysis.services import services

SAID = {"se-moe": ("se-moe",), "cache-moe": ("cache-moe", "cache-moe, code")}
"""The rivals that may be meant by the paper's names."""


UNDRAWN = (CODE, "se-moe, equal bytes", "pregated-moe", "all-in-gpu")
"""Of which speeds are shown alone."""


def measure(options: ExperimentOptions) -> Data:
    """Every way on every data set with all slots and batches, and ExpertFlow's ratios over the others."""
    pairs = [(mine, over) for mine in (OURS, AT_PAPERS, ENGINE) for over in RIVALS]
    found = services(options)
    cells = contest(places(found), lambda one: ours(one) | rivals(), pairs, options, "throughput", UNDRAWN)
    alone = [(one, slots, batch) for one in found for slots in one.slots for batch in one.single_batches]
    ways = lambda one: {ENGINE: way(one, scheduled=False)} | rivals()  # noqa: E731
    single = contest(alone, ways, pairs, options, "throughput of one batch", (ENGINE, *RIVALS))
    return {"cells": cells, "single": single, "made": made(options)}


def sheets(data: Data) -> list[Sheet]:
    """Claims beside simulated ratios; ratios by slots and batch; then speeds."""
    by_place = [_by_place(data, over) for over in ("cache-moe", "se-moe", "lru")]
    return [_claims(data), *by_place, _single(data), _runs(data)]


def _claims(data: Data) -> Sheet:
    rows = []
    for claim in [one for one in expertflow().claim if one.figure == "throughput"]:
        cells = [cell for cell in at_claim(claim, data["cells"]) if cell["in_domain"] is not False]
        for over in SAID[claim.over or ""]:
            shown_both = []
            for mine in (OURS, AT_PAPERS):
                ratios = [ratio(cell, mine, over) for cell in cells]
                so = verdict(claim, ratios[0]) if len(ratios) == 1 else _within(claim.least, ratios)
                shown_both += [shown(ratios), so]
            place = f"{claim.slots or 'any'} / {claim.batch or 'any'}"
            rows.append([claim.model, over, place, claim.text, *shown_both])
    columns = ["model", "over", "slots / batch", "published", "simulated", "so", "right in 90 %", "so"]
    return Sheet("Published and simulated throughput over baselines", columns, rows, notes("expertflow-claims"))


def _within(published: float, ratios: list[Data]) -> str:
    """Where a number without slots or batch lies in the range of all of them."""
    values = [one["value"] for one in ratios if one["value"] is not None]
    if not values:
        return NOTHING
    return "inside" if min(values) <= published <= max(values) else "lower" if published < min(values) else "higher"


def _by_place(data: Data, over: str) -> Sheet:
    """ExpertFlow over one rival: a row a data set and slots, a column a batch."""
    batches = sorted(distinct(data["cells"], "batch"))
    rows = []
    for model, which, slots in dict.fromkeys((cell["model"], label(cell), cell["slots"]) for cell in data["cells"]):
        found = {c["batch"]: c for c in having(data["cells"], model=model, slots=slots) if label(c) == which}
        cells = [interval(ratio(found[batch], OURS, over)) if batch in found else NOTHING for batch in batches]
        rows.append([model, which, str(slots), *cells])
    columns = ["model", "data", "slots", *(f"batch {batch}" for batch in batches)]
    return Sheet(f"Simulated: ExpertFlow over {over}", columns, rows, long=True)


def _single(data: Data) -> Sheet:
    """Where a data set fills one batch: ExpertFlow without a scheduler over the rivals."""
    rows = [
        [cell["model"], label(cell), str(cell["slots"]), str(cell["batch"]),
         *(interval(ratio(cell, ENGINE, over)) for over in RIVALS)]
        for cell in data["single"]
    ]  # fmt: skip
    columns = ["model", "data", "slots", "batch", *RIVALS]
    return Sheet("Simulated: ExpertFlow without a scheduler over rivals, one full batch", columns, rows, long=True)


def _runs(data: Data) -> Sheet:
    names = [name for name in data["cells"][0]["runs"] if name]
    rows = [
        [c["model"], label(c), str(c["slots"]), str(c["batch"]),
         *(number(run["tokens_per_s"]) if (run := c["runs"][name]) else NOTHING for name in names)]
        for c in data["cells"]
    ]  # fmt: skip
    columns = ["model", "data", "slots", "batch", *names]
    return Sheet("Simulated: tokens/s", columns, rows, notes("expertflow-speeds"), long=True)


def draw(data: Data, figure: Figure) -> None:
    """Tokens/s over the batch, a panel a model, at the most slots; in the predictor's own domain."""
    usual = [cell for cell in data["cells"] if cell["in_domain"] is not False]
    models = distinct(usual, "model")
    axes = panels(figure, models, 2.4, 3.6, "sequences in a batch", ["tokens/s"])
    for (ax,), model in zip(axes, models, strict=True):
        mine = having(usual, model=model)
        most = max(cell["slots"] for cell in mine)
        for name in mine[0]["runs"]:
            at = [cell for cell in mine if cell["slots"] == most and cell["runs"][name]]
            speeds = [cell["runs"][name]["tokens_per_s"] for cell in at]
            ax.plot([cell["batch"] for cell in at], speeds, "o-", ms=3, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        batches = sorted(distinct(mine, "batch"))
        ax.set_xticks(batches, [str(batch) for batch in batches])
        ax.set_title(f"{model}, {most} slots", fontsize=8)


TITLE = "Throughput over the paper's baselines"
EXPERIMENT = Experiment(200, "expertflow-throughput", TITLE, __doc__, measure, sheets, draw, paper=EXPERTFLOW)
