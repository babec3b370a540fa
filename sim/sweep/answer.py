"""What a sweep answers: the fastest designs within its limits, those that nobody beats in all, and what was not run."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from itertools import count
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ground.tables import Parts
from ground.text import printable
from sim.report.tables import number, percent
from sim.sweep.anomalies import Anomalies
from sim.sweep.fields import PARAMETER

SHOWN = 10
GOALS = {"tokens_per_s": True, "gpu_needed_bytes": False, "ttft_mean_ms": False, "tpot_p99_ms": False}
"""What a front is over: columns, and whether more is better."""
_WORDS = dict(zip(GOALS, ("speed", "GPU memory", "TTFT", "TPOT p99"), strict=True))

Record = Mapping[str, Any]

_HEADINGS = ("slots", "tokens/s", "95 % interval", "bound", "efficiency", "TTFT ms", "TPOT p99 ms", "GPU GiB")


@dataclass
class Answer:
    """What stands out among the rows, gathered in one pass.

    Attributes:
        goals: what the front is over.
        counts: rows by status.
        earlier: how many of those that are ok are of an earlier run of the sweep.
        reasons: why rows are not ok, and how many.
        within: how many rows are ok, no reference and within the limits.
        references: how many are references.
        fastest: the fastest of these, at most `SHOWN`, the fastest first.
        front: those of them that no other beats in one goal without being beaten in another.
        fastest_reference: the fastest reference, whatever its limits.
        anomalies: what larger caches make worse.
    """

    goals: Sequence[str] = tuple(GOALS)
    counts: dict[str, int] = field(default_factory=lambda: {"ok": 0, "refused": 0, "failed": 0})
    earlier: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    within: int = 0
    references: int = 0
    fastest: list[Record] = field(default_factory=list)
    front: list[Record] = field(default_factory=list)
    fastest_reference: Record | None = None
    anomalies: Anomalies = field(default_factory=Anomalies)

    @property
    def designs(self) -> int:
        """All rows."""
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """It as plain data; of the front the identities."""
        return {
            "designs": self.designs, "counts": self.counts, "earlier": self.earlier, "reasons": self.reasons,
            "within_limits": self.within,
            "fastest": [dict(record) for record in self.fastest],
            "front": [record["identity"] for record in self.front],
            "larger_caches": self.anomalies.to_json(),
        }  # fmt: skip


def answer(
    records: Iterable[Record], limits: Mapping[str, float], goals: Sequence[str] = tuple(GOALS),
    earlier: Container[str] = (),
) -> Answer:  # fmt: skip
    """Go through the rows of a table.

    ``limits``: the most that a column may be, by its name; ``goals``: what the front is over; ``earlier``: identities
    of the designs that had been run before.
    """
    found = Answer(goals=goals)
    best: list[tuple[float, int, Record]] = []
    turn = count(0, -1)  # of equally fast designs the first one stays
    for record in records:
        found.counts[record["status"]] += 1
        found.earlier += record["status"] == "ok" and record["identity"] in earlier
        if record["status"] != "ok":
            found.reasons[record["reason"]] = found.reasons.get(record["reason"], 0) + 1
            continue
        found.anomalies.add(record)
        if record["reference"]:
            found.references += 1
            if _speed(record) > _speed(found.fastest_reference):
                found.fastest_reference = record
        elif _within(record, limits):
            found.within += 1
            if record["tokens_per_s"] is None:
                continue
            entry = (record["tokens_per_s"], next(turn), record)
            if len(best) < SHOWN:
                heappush(best, entry)
            elif entry[:2] > best[0][:2]:
                heapreplace(best, entry)
            found.front = _with(found.front, record, goals)
    found.fastest = [record for *_, record in sorted(best, key=lambda entry: entry[:2], reverse=True)]
    return found


def _speed(record: Record | None) -> float:
    return -1.0 if record is None or record["tokens_per_s"] is None else record["tokens_per_s"]


def _within(record: Record, limits: Mapping[str, float]) -> bool:
    return all(record[name] is not None and record[name] <= most for name, most in limits.items())


def _with(front: list[Record], record: Record, goals: Sequence[str]) -> list[Record]:
    """The front with one more row: nothing if some row of it is as good in all, else without those that are worse."""
    mine = _worth(record, goals)
    if any(all(a >= b for a, b in zip(_worth(other, goals), mine, strict=True)) for other in front):
        return front
    stay = [other for other in front if any(a > b for a, b in zip(_worth(other, goals), mine, strict=True))]
    return [*stay, record]


def _worth(record: Record, goals: Sequence[str]) -> tuple[float, ...]:
    """What a row is worth by each goal: more is better."""
    return tuple(
        float("-inf") if record[name] is None else float(record[name]) * (1 if GOALS[name] else -1) for name in goals
    )


def answer_view(found: Answer, names: Sequence[str], limits: str) -> RenderableType:
    """The answer for a person: ``names`` are the fields that vary, ``limits`` what designs keep to, in words."""
    title = f"the fastest designs{f' with {limits}' if limits else ''}"
    fastest = _table(title, found.fastest, names)
    parts: list[RenderableType] = [Text(_summary(found), style="bold")]
    parts += [fastest] if found.fastest else [Text("no design is within the limits")]
    if beyond := found.counts["ok"] - found.within - found.references:
        parts.append(Text(f"{beyond:,} designs are beyond the limits", style="dim"))
    if best := found.fastest_reference:
        own = ", ".join(f"{short_name(name)} {_short(best.get(name))}" for name in names)
        speed = number(best["tokens_per_s"], 3)
        parts.append(Text(f"fastest reference, no system of equal means: {speed} tokens/s ({own})", style="dim"))
    if found.front:
        how_many = "1 design is" if len(found.front) == 1 else f"{len(found.front)} designs are"
        goals = f"{how_many} beaten by none in {' and '.join(_WORDS[goal] for goal in found.goals)} at once"
        shown = sorted(found.front, key=lambda record: -_speed(record))[: 2 * SHOWN]
        parts.append(Text(goals) if found.goals == tuple(GOALS) else _table(goals, shown, names))
    if words := found.anomalies.words():
        parts.append(Text(words, style="dim"))
    most = sorted(found.reasons.items(), key=lambda entry: -entry[1])
    parts += [Text(f"{number:,} not run: {reason}", style="yellow") for reason, number in most[:5]]
    if len(most) > 5:
        parts.append(Text(f"and {len(most) - 5:,} other reasons, in the table", style="yellow"))
    return Group(*parts)


def _table(title: str, records: Sequence[Record], names: Sequence[str]) -> Parts:
    """Some designs, one a row; what is the same for all of them is said above."""
    cells = {name: [_short(record.get(name)) for record in records] for name in names}
    same = [f"{short_name(name)} {values[0]}" for name, values in cells.items() if len(set(values)) == 1 < len(values)]
    differ = [name for name, values in cells.items() if len(set(values)) > 1] or list(names)
    rows = [
        [
            *(printable(cells[name][at]) for name in differ),
            f"{record['cache_bytes'] // record['expert_bytes']:,}",
            number(record["tokens_per_s"], 3), _interval(record), number(record["bound_tokens_per_s"], 3),
            percent(record["efficiency_ratio"]), number(record["ttft_mean_ms"], 0), number(record["tpot_p99_ms"], 1),
            number(record["gpu_needed_bytes"] / 2**30, 1),
        ]
        for at, record in enumerate(records)
    ]  # fmt: skip
    whole = f"{title}, all with {', '.join(same)}" if same else title
    return Parts(printable(whole), [*(printable(short_name(name)) for name in differ), *_HEADINGS], rows)


def short_name(name: str) -> str:
    """A field as a heading: without what says of what profile a figure is, or that it is a parameter."""
    return name.removeprefix(PARAMETER).removeprefix("hardware.").removeprefix("software.")


def _interval(record: Record) -> str:
    low, high = record["tokens_per_s_low"], record["tokens_per_s_high"]
    return "–" if low is None else f"{number(low)} to {number(high)}"


def _short(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _summary(found: Answer) -> str:
    counts = found.counts
    earlier = f" ({found.earlier:,} of them earlier)" if found.earlier else ""
    parts = [f"{found.designs:,} designs: {counts['ok']:,} run{earlier}"]
    parts += [f"{counts['refused']:,} cannot be run"] if counts["refused"] else []
    parts += [f"{counts['failed']:,} failed"] if counts["failed"] else []
    return ", ".join(parts)
