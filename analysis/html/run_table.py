"""The table of a page of runs: what each run was, and its figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.html.designs import Designs, is_of_policy, number
from analysis.html.runs import Run
from analysis.html.wording import NOTHING, field_value, figure, percent

MOST_ROWS = 2000
_GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what it is sorted by: a number, or a text where there is none."""

    shown: str
    key: float | str | None


@dataclass(frozen=True)
class Table:
    """Headings, whether a column is of numbers, the rows, and how many rows are left out."""

    headings: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[Cell]]
    left_out: int = 0


def _gib_per_token(values: Mapping[str, Any]) -> float | None:
    moved = [size for kind in ("demand", "prefetch") if (size := values.get(f"link_{kind}_bytes")) is not None]
    return sum(moved) / values["tokens"] / _GIB if len(moved) == 2 and values.get("tokens") else None


def _needed(values: Mapping[str, Any]) -> float | None:
    return None if values.get("gpu_needed_bytes") is None else values["gpu_needed_bytes"] / _GIB


def _of(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda values: values.get(name)


_COLUMNS: dict[str, tuple[Callable[[Mapping[str, Any]], float | None], Callable[[float | None], str]]] = {
    "tokens/s": (_of("tokens_per_s"), figure),
    "95 % low": (_of("tokens_per_s_low"), figure),
    "95 % high": (_of("tokens_per_s_high"), figure),
    "compute bound": (_of("compute_bound_tokens_per_s"), figure),
    "link bound": (_of("link_bound_tokens_per_s"), figure),
    "efficiency": (_of("efficiency_ratio"), percent),
    "hit": (_of("hit_ratio"), percent),
    "late": (_of("late_ratio"), percent),
    "miss": (_of("miss_ratio"), percent),
    "GiB/token": (_gib_per_token, figure),
    "TTFT ms": (_of("ttft_mean_ms"), figure),
    "TPOT ms": (_of("tpot_mean_ms"), figure),
    "TPOT p99 ms": (_of("tpot_p99_ms"), figure),
    "GPU GiB": (_needed, figure),
}
EXPLAINED = (
    "Bounds are in tokens/s. Efficiency is the time of the slower bound over the time of the run, prefill included. A "
    "look-up is a hit, late or a miss: its expert was resident when the route was known, on its way, or neither. "
    "GiB/token is what crossed the link for a token of decode. TTFT is the mean time to the first token, TPOT the time "
    "per output token, p99 what 99 % of them stay below. A star marks references. From is a line of the sources below."
)


def run_table(designs: Designs, sources: Mapping[int, int]) -> Table:
    """All runs, the fastest first; ``sources`` is the line of the list of sources for each run, by its place."""
    order = sorted(range(len(designs.runs)), key=lambda at: -_speed(designs.runs[at]))
    shown = [(designs.runs[at], sources[at]) for at in order[:MOST_ROWS]]
    fields = sorted(designs.varying, key=lambda name: not is_of_policy(name))
    used = [name for name, (value, _) in _COLUMNS.items() if any(value(run.values) is not None for run, _ in shown)]
    failed = ["not run because"] if any(not run.ok for run, _ in shown) else []
    rows = [
        [
            *(_field(run, name) for name in fields),
            *(_figure(run, name) for name in used),
            *(Cell(str(run.values.get("reason") or ""), str(run.values.get("reason") or "")) for _ in failed),
            Cell(str(source), source),
        ]
        for run, source in shown
    ]
    texts = [not all(number(run.fields.get(name)) is not None for run, _ in shown) for name in fields]
    numeric = [*(not text for text in texts), *[True] * len(used), *[False] * len(failed), True]
    headings = [*(name.removeprefix("set.") for name in fields), *used, *failed, "from"]
    return Table(headings, numeric, rows, len(order) - len(shown))


def _speed(run: Run) -> float:
    return run.speed if run.ok else -1.0


def _field(run: Run, name: str) -> Cell:
    value = run.fields.get(name)
    star = " *" if name == "policy" and run.values.get("reference") else ""
    shown = NOTHING if value is None else field_value(value) + star
    return Cell(shown, None if value is None else number(value) if number(value) is not None else shown)


def _figure(run: Run, name: str) -> Cell:
    value, said = _COLUMNS[name]
    found = value(run.values)
    return Cell(said(found), found)
