"""ExpertFlow and its rivals, as its experiments compare them.

Where a trace carries no predictions, an oracle stands in for the predictor: it is right as often as the paper says that
its own is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis.entries import having
from analysis.experiment import Data
from analysis.jackknife import compared, fought
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, interval, number
from analysis.published import Claim
from analysis.services import Service, Way, designs

OURS, ENGINE, CODE = "expertflow", "expertflow, no scheduler", "expertflow, code"
ASSUMED = 0.9
"""An oracle's accuracy: "over 90 % in most cases"."""
AT_PAPERS = f"expertflow, right in {ASSUMED:.0%}"
PIPELINE = "dual-batch"
"""The paper's: two pairs of batches in flight."""


def way(service: Service, *, scheduled: bool = True, scene: Mapping[str, Any] | None = None, **parameters: Any) -> Way:
    """ExpertFlow on a service, with its scheduler or without; ``scene`` has what is different of the scene."""
    text = ",".join(["expertflow", *(f"{key}={value}" for key, value in parameters.items())])
    order = {"regroup": "kmeans", "pipeline": PIPELINE} if scheduled else {}
    stand_in = {} if service.in_domain is not None else {"foreseen": ASSUMED}
    return Way.of(text, **(order | stand_in | dict(scene or {})))


def ours(service: Service) -> dict[str, Way]:
    """The paper's form, with its net and at the paper's accuracy; without scheduler; and as published code has it.

    That is fed predictions made beforehand.
    """
    return {
        OURS: way(service),
        AT_PAPERS: way(service, scene={"foreseen": ASSUMED}),
        ENGINE: way(service, scheduled=False),
        CODE: way(service, scheduled=False, code="true"),
    }


RIVALS = ("cache-moe", "cache-moe, code", "lru", "se-moe", "se-moe, equal bytes", "pregated-moe", "all-in-gpu")


def rivals() -> dict[str, Way]:
    """The paper's baselines. SE-MoE's ring holds two layers, whatever the slots; at equal bytes it runs in waves."""
    return {
        "cache-moe": Way.of("cache-moe"),
        "cache-moe, code": Way.of("cache-moe,speculate=0,writeback=true"),
        "se-moe": Way.of("se-moe,memory=own"),
        "se-moe, equal bytes": Way.of("se-moe"),
        "pregated-moe": Way.of("pregated-moe"),
        "lru": Way.of("lru,scope=layer"),
        "all-in-gpu": Way.of("all-in-gpu"),
    }


KEPT = ("tokens_per_s", "hit_ratio", "late_ratio", "miss_ratio", "lookups_per_token", "gib_per_token", "ttft_ms")
"""What is kept of each of the many runs of a contest."""

Place = tuple[Service, int, int]
"""A service, its slots a layer and its batch."""


def places(
    found: Iterable[Service], slots: Sequence[int] | None = None, batches: Sequence[int] | None = None
) -> list[Place]:
    """Every service with each of its slots and batches, or with those of them that are named."""
    return [
        (one, held, batch)
        for one in found
        for held in one.slots
        for batch in one.batches
        if (slots is None or held in slots) and (batches is None or batch in batches)
    ]


def contest(
    places: Sequence[Place], ways: Callable[[Service], Mapping[str, Way]], pairs: Sequence[tuple[str, str]],
    options: ExperimentOptions, what: str, undrawn: Iterable[str] = (),
) -> list[Data]:  # fmt: skip
    """The ways at every place: all runs, and throughput ratios of those of ``pairs`` that ran there.

    Those in ``undrawn`` have no intervals. Raises InputError.
    """
    bouts = [designs(one.place(options, slots, batch), ways(one)) for one, slots, batch in places]
    cells = []
    for (one, slots, batch), ran in zip(places, fought(bouts, options.processes, what, undrawn), strict=True):
        there = [(mine, over) for mine, over in pairs if mine in ran and over in ran and mine != over]
        ratios = [{"ours": m, "over": o} | compared("throughput", ran[m], ran[o]).to_json() for m, o in there]
        told = {name: found and found.to_json() for name, found in ran.items()}
        runs = {name: run and {key: run[key] for key in KEPT} for name, run in told.items()}
        cells.append(one.to_json() | {"slots": slots, "batch": batch, "runs": runs, "ratios": ratios})
    return cells


def ratio(cell: Data, mine: str, over: str) -> Data:
    """What a cell has of one pair; without a value where that did not run there."""
    found = having(cell["ratios"], ours=mine, over=over)
    return found[0] if found else {"value": None, "low": None, "high": None}


def made(options: ExperimentOptions) -> Data:
    """Where data comes from, without the cache size: experiments choose the slots."""
    return {key: value for key, value in options.made().items() if key != "cache"}


def label(cell: Data) -> str:
    """The data set of a cell, and how its routes are predicted."""
    how = {None: f"oracle {ASSUMED}", True: "same domain", False: "other domain"}
    return f"{cell['data']} ({how[cell['in_domain']]})"


def at_claim(claim: Claim, cells: Sequence[Data]) -> list[Data]:
    """The cells that a claim speaks of: of its model, slots and batch, as far as it names them.

    Data sets are not the paper's own, so a claim is held against those of the same kind: the predictor's own data set,
    or another.
    """
    wanted = {key: value for key in ("slots", "batch") if (value := getattr(claim, key)) is not None}
    return having(cells, model=claim.model, **wanted)


def shown(ratios: Sequence[Data]) -> str:
    """One ratio with its interval, or the range of several."""
    values = [one["value"] for one in ratios if one["value"] is not None]
    if len(ratios) == 1:
        return interval(ratios[0])
    return f"{number(min(values))} to {number(max(values))}" if values else NOTHING
