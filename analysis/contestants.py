"""The policies that several experiments compare DoMoE with, and DoMoE's own ways."""

from typing import Any

from analysis.entries import having
from analysis.experiment import Data
from analysis.options import ExperimentOptions
from analysis.pages.sheets import number
from analysis.runs import Design, run
from sim.policies.named import NamedPolicy

ENTRIES = 2000
"""N: the entries of a domain's table; the paper finds 2,000 best."""
DOMOE = "domoe"
CHOICES: dict[str, dict[str, Any]] = {
    DOMOE: {"eviction": "score"},
    "domoe, one key an entry": {"eviction": "score", "keys": "entry"},
    "domoe, lru": {"eviction": "lru"},
    "domoe, perfect-lfu": {"eviction": "perfect-lfu"},
}
"""What the paper leaves open: DoMoE's parameters; FMoE beside it evicts by the same rule.

The claims are held against the first: both evict what the entries of their tables take least.
"""
MOE_INFINITY = NamedPolicy("moe-infinity", "moe-infinity")
CONTROL = NamedPolicy("perfect-lfu", "perfect-lfu")
"""The control of every comparison: it counts the traffic at hand, without a profile, a label or a prediction."""
TABLELESS = [
    NamedPolicy("lru, a layer", "lru", {"scope": "layer"}),
    CONTROL,
    NamedPolicy("popularity, domain", "popularity", {"by": "domain"}),
    NamedPolicy("clairvoyant", "clairvoyant"),
]
"""Policies that predict nothing for a token, or know the future."""


def controls(options: ExperimentOptions) -> list[Data]:
    """The control's run on each model's first workload, for experiments that vary one policy alone."""
    firsts = [(model, next(iter(model.workloads.values()))) for model in options.models]
    done = run([Design(options.place(model, sources), CONTROL) for model, sources in firsts], 1, CONTROL.label)
    return [{"model": model.name} | one.to_json() for (model, _), one in zip(firsts, done, strict=True)]


def control_note(data: Data, model: str) -> list[str]:
    """The control's speed on a model's first workload, in a line."""
    runs = having(data.get("controls", []), model=model)
    return [f"{CONTROL.label}, which predicts nothing: {number(one['tokens_per_s'], 3)} tokens/s." for one in runs]
