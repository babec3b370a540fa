"""Under which conditions would the published ratios over the baselines hold?

Each condition is tried by itself, at the slots and batch that the paper names, or else at 4 slots and a batch of 16.
Over Cache-MoE: *lru* is that system without guesses, *code* what its published code does: no guesses, and the expert
that leaves is copied back to the host first. *One by one* loads a batch's experts in turn, and each may push out one
that the batch still needs; here the stalls of the code are multiplied by the misses that such an LRU has over one that
knows the batch (reckoned, not replayed). *Both as coded*: ExpertFlow's own code too, whose recorded tokens are fed
ahead of their time.

Both: copies in order and whole, as a simple stream makes them; slower and faster links; a loop of CUDA graphs, which
launches almost for free; an H200, whose figures were measured; a loop that stops after every expert, as ExpertFlow's
published code does, for half a millisecond each (assumed). *With the encoder*: each batch's prompts first pass the
encoder, whose experts cross the link once for it (reckoned; its routes are not in the traces, and a batch of prompts
needs nearly all).

ExpertFlow: its predictions for free; another eviction; and an oracle that is right as often as the row says, in the
place of its net.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from analysis.altered import Altered
from analysis.contest import verdict
from analysis.entries import distinct, having
from analysis.experiment import Data, Experiment
from analysis.experiments.expertflow_hits import one_by_one
from analysis.expertflow import at_claim, made, way
from analysis.jackknife import compared, fought
from analysis.options import ExperimentOptions
from analysis.pages.sheets import NOTHING, Sheet, interval, notes, number
from analysis.paper import EXPERTFLOW
from analysis.published import Claim, expertflow
from analysis.runs import scene_at
from analysis.services import Service, Way, designs, own_services
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report
from sim.run.scene import Scene

USUAL = (4, 16)
"""Slots and batch where the paper names none."""
ACCURACIES = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
SE_MOE, CACHE_MOE = "se-moe", "cache-moe"
EQUAL, LRU, CODE = "equal terms", "rival as lru", "rival as coded"
TURN, ENCODER = "rival as coded, one by one", "with the encoder"
STOPPING = str(resources.files("analysis") / "stopping.toml")


@dataclass(frozen=True)
class Condition:
    """A condition: both sides of a ratio under it."""

    name: str
    ours: Way
    rival: Way


def conditions(service: Service, over: str) -> Iterator[Condition]:
    """All of them, the equal terms first."""
    rivals = "se-moe,memory=own" if over == SE_MOE else over
    mine, rival = way(service), Way.of(rivals)
    yield Condition(EQUAL, mine, rival)
    if over == SE_MOE:
        yield Condition("rival at equal bytes", mine, Way.of(over))
    else:
        yield Condition(LRU, mine, Way.of("lru,scope=layer"))
        yield Condition(CODE, mine, Way.of("cache-moe,speculate=0,writeback=true"))
        coded = way(service, scene={"pipeline": "clairvoyant"}, code="true")
        yield Condition("both as coded", coded, Way.of("cache-moe,speculate=0,writeback=true"))
    name, values = mine.policy.name, mine.policy.values
    whole = Altered("", name, values, discipline="fifo", chunks=1)
    theirs = Altered("", over, rival.policy.values, discipline="fifo", chunks=1)
    yield Condition("copies in order and whole", Way(whole, mine.scene), Way(theirs, rival.scene))
    for link in ("pcie3x16", "pcie5x16"):
        yield Condition(link, way(service, scene={"link": link}), Way.of(rivals, link=link))
    for loop, label in (("graphs", "CUDA graphs"), (STOPPING, "stops after every expert")):
        yield Condition(label, way(service, scene={"loop": loop}), Way.of(rivals, loop=loop))
    measured = {"hardware": "h200", "loop": None}
    yield Condition("H200, measured", way(service, scene=measured), Way.of(rivals, **measured))
    yield Condition("free predictions", way(service, charge="free"), rival)
    yield Condition("evict lru", way(service, eviction="lru"), rival)
    perfect = Altered("", "perfect-lfu", {})
    evicted = Altered("", name, values, evicts_as=NamedPolicy(perfect.name, perfect.name))
    yield Condition("evict perfect-lfu", Way(evicted, mine.scene), rival)
    for accuracy in ACCURACIES:
        yield Condition(f"oracle {accuracy}", way(service, scene={"foreseen": accuracy}), rival)


def _places(options: ExperimentOptions) -> list[tuple[Service, str, int, int, Claim]]:
    """The first data set of each claim's model, in the predictor's own domain."""
    found = []
    for claim in [one for one in expertflow().claim if one.figure == "throughput" and one.over]:
        mine = [one for one in own_services(options) if one.model.name == claim.model]
        for service in mine[:1]:
            slots, batch = claim.slots or USUAL[0], claim.batch or min(USUAL[1], max(service.batches, default=1))
            if slots in service.slots and batch in service.batches:
                found.append((service, claim.over or "", slots, batch, claim))
    return found


def measure(options: ExperimentOptions) -> Data:
    """Every condition at every claim's place."""
    places = _places(options)
    trials = [list(conditions(service, over)) for service, over, *_ in places]
    bouts = [
        designs(
            service.place(options, slots, batch),
            {f"{c.name}, {side}": getattr(c, side) for c in those for side in _SIDES},
        )
        for (service, _, slots, batch, _), those in zip(places, trials, strict=True)
    ]
    cells = []
    outcomes = fought(bouts, options.processes, "conditions")
    for (service, over, slots, batch, _), those, ran in zip(places, trials, outcomes, strict=True):
        at = service.to_json() | {"over": over, "slots": slots, "batch": batch}
        for one in those:
            mine, rival = (ran[f"{one.name}, {side}"] for side in _SIDES)
            cells.append(at | {"condition": one.name} | compared("throughput", mine, rival).to_json())
            if mine and rival:
                here = scene_at(service.place(options, slots, batch))
                for name, value in _reckoned(one.name, mine.report, rival.report, here, slots):
                    cells.append(at | {"condition": name, "value": round(value, 4), "low": None, "high": None})
    return {"cells": cells, "made": made(options)}


_SIDES = ("ours", "rival")


def _reckoned(name: str, mine: Report, rival: Report, here: Scene, slots: int) -> Iterator[tuple[str, float]]:
    """What follows by hand from the runs of a condition."""
    speeds = mine.tokens_per_s or 0.0, rival.tokens_per_s or 0.0
    if name == CODE:
        yield TURN, speeds[0] / speeds[1] * _in_turn(rival, one_by_one(here.work, slots))
    if name == EQUAL and here.trace.meta["model"].get("part") == "decoder":
        # As many experts as the decoder has cross the link once for a batch's prompts.
        a_pass = here.model.all_expert_bytes / here.hardware.link_bytes_per_s
        more = a_pass / here.batch / (mine.decode.tokens / here.trace.n_sequences)
        yield ENCODER, (1 / speeds[1] + more) / (1 / speeds[0] + more)


def _in_turn(rival: Report, hits: float) -> float:
    """How many times as long a run takes if it has so many hits, and stalls grow with its misses."""
    decode = rival.decode
    stalled, whole = decode.time_ms["stall_demand"] + decode.time_ms["stall_late"], sum(decode.time_ms.values())
    missed = 1 - (decode.hit_ratio or 0.0)
    return (whole + stalled * ((1 - hits) / missed - 1)) / whole if missed and whole else 1.0


def sheets(data: Data) -> list[Sheet]:
    """A table a rival: conditions down, models across."""
    return [_table(data, over) for over in distinct(data["cells"], "over")]


def _table(data: Data, over: str) -> Sheet:
    mine = having(data["cells"], over=over)
    heads = list(dict.fromkeys((cell["model"], cell["slots"], cell["batch"]) for cell in mine))
    said = [next(iter(_said(over, *head)), None) for head in heads]
    rows = [["published", *(claim.text if claim else NOTHING for claim in said)]]
    for condition in distinct(mine, "condition"):
        cells = []
        for head, claim in zip(heads, said, strict=True):
            model, slots, batch = head
            found = having(mine, model=model, slots=slots, batch=batch, condition=condition)
            cells.append(_cell(found[0], claim) if found else NOTHING)
        rows.append([condition, *cells])
    columns = ["condition", *(f"{model}, {slots} / {batch}" for model, slots, batch in heads)]
    return Sheet(f"ExpertFlow's throughput over {over}'s", columns, rows, notes("expertflow-conditions"))


def _said(over: str, model: str, slots: int, batch: int) -> list[Claim]:
    here = [{"model": model, "slots": slots, "batch": batch}]
    claims = [one for one in expertflow().claim if one.figure == "throughput" and one.over == over]
    return [claim for claim in claims if at_claim(claim, here)]


def _cell(found: Data, claim: Claim | None) -> str:
    """A ratio, with a star where the published number lies in its interval."""
    if found["low"] is None:
        return number(found["value"], 3)
    return interval(found) + (" *" if claim and verdict(claim, found) == "inside" else "")


TITLE = "Conditions under which published ratios would hold"
EXPERIMENT = Experiment(270, "expertflow-conditions", TITLE, __doc__, measure, sheets, paper=EXPERTFLOW)
