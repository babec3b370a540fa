"""Which conclusions of a sweep turn where a figure that a hardware profile assumes is another.

A conclusion is that of a group of designs the fastest beats another one, by more than the draw of sequences explains.
A group is what differs in its policy alone; where a sweep has one policy, all designs are one group. Each figure that
is assumed is varied to both ends of its range (``ranges.toml``), and everything is replayed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from pydantic import TypeAdapter
from rich.console import Group, RenderableType
from rich.text import Text

from ground.errors import InputError
from ground.tables import Parts
from sim.machine.figures import Curve, Figure
from sim.machine.hardware import Hardware
from sim.report.tables import number, percent
from sim.sweep.design import Design, hardware_of
from sim.sweep.fields import PARAMETER
from sim.sweep.intervals import ratio_interval
from sim.sweep.log import Log
from sim.sweep.row import Row

_EXAMPLES = 3
_ENDS = ("low", "high")


@dataclass(frozen=True)
class Range:
    """How far figures may be off: a factor low and one high of each, and the source of these."""

    name: str
    figures: dict[str, tuple[float, float]]
    source: str
    loop: str = ""
    """The kind of loop whose figures these are; empty: of any."""


@cache
def ranges() -> tuple[Range, ...]:
    """The ranges that the project knows."""
    import tomllib

    text = resources.files("sim.sweep").joinpath("ranges.toml").read_text("utf-8")
    return TypeAdapter(tuple[Range, ...]).validate_python(tomllib.loads(text)["range"])


def assumed(hardware: Hardware) -> set[str]:
    """Dotted names of the figures of a profile that nobody measured: their source begins with "assumed"."""
    found: set[str] = set()

    def look(table: Any, prefix: str) -> None:
        for own, about in type(table).model_fields.items():
            name, value = about.alias or own, getattr(table, own)
            if isinstance(value, Figure | Curve):
                found.update([f"{prefix}{name}"] if value.source.startswith("assumed") else [])
            elif hasattr(value, "model_fields_set"):
                look(value, f"{prefix}{name}.")

    look(hardware, "")
    return found


@dataclass(frozen=True)
class Varied:
    """A design with the figures of one range at one of its ends."""

    range: Range
    end: str
    base: str
    design: Design


def varied(every: Iterable[tuple[str, Design]]) -> Iterator[Varied]:
    """Each design with each range of which its profile assumes all figures, and it sets none itself; at both ends."""
    for key, design in every:
        try:
            machine = hardware_of(design.options.machine, design.changes("hardware"))
        except (InputError, OSError):  # its own row says why it cannot be run
            continue
        open_to = assumed(machine) - {figure for figure, _ in design.changes("hardware")}
        for one in ranges():
            if one.loop in ("", machine.software.kind) and open_to.issuperset(one.figures):
                for place, end in enumerate(_ENDS):
                    ends = {f"hardware.{name}": f"x{factors[place]:g}" for name, factors in one.figures.items()}
                    yield Varied(one, end, key, Design(dict(design.fields) | ends))


@dataclass
class Effect:
    """What one end of one range did.

    Attributes:
        designs: how many were replayed with it.
        least, most: the smallest and the largest quotient of speed with it and without.
        conclusions: how many there are; ``turned`` of them came out the other way, ``unsure`` neither way.
        examples: some that turned, in words.
    """

    range: str
    end: str
    source: str
    designs: int = 0
    least: float | None = None
    most: float | None = None
    conclusions: int = 0
    turned: int = 0
    unsure: int = 0
    examples: list[str] = field(default_factory=list)


def effects(log: Log, every: Sequence[tuple[str, Design]], others: Sequence[tuple[str, Varied]]) -> list[Effect]:
    """Judge: ``every`` design with its identity, and every varied one with its own. All have rows in the log."""
    rows = {key: row for key, row in _rows(log, [key for key, _ in every]) if _counts(row)}
    conclusions = [(best, other) for group in _groups(every, rows) for best, other in _won(group, rows)]
    differ = _differing([design for _, design in every])
    names = {key: " ".join(f"{name}={design.fields[name]}" for name in differ) for key, design in every}
    by_end: dict[tuple[str, str], list[tuple[str, Varied]]] = {}
    for key, one in others:
        by_end.setdefault((one.range.name, one.end), []).append((key, one))
    found = []
    for (name, end), members in by_end.items():
        effect = Effect(name, end, members[0][1].range.source)
        there = dict(_rows(log, [key for key, _ in members]))
        now = {one.base: there[key] for key, one in members if one.base in rows and _counts(there[key])}
        quotients = [now[base].values["tokens_per_s"] / rows[base].values["tokens_per_s"] for base in now]
        effect.designs = len(now)
        effect.least, effect.most = min(quotients, default=None), max(quotients, default=None)
        for best, other in conclusions:
            if best in now and other in now:
                effect.conclusions += 1
                _judge(effect, now[best], now[other], f"{names[other]} beats {names[best]}")
        found.append(effect)
    return found


def _judge(effect: Effect, best: Row, other: Row, turned: str) -> None:
    low, high = _ratio(best, other)
    if high < 1:
        effect.turned += 1
        if len(effect.examples) < _EXAMPLES:
            effect.examples.append(turned)
    elif low <= 1:
        effect.unsure += 1


def _rows(log: Log, keys: Sequence[str]) -> Iterator[tuple[str, Row]]:
    return zip(keys, log.in_order(keys), strict=True)


def _counts(row: Row) -> bool:
    return row.status == "ok" and bool(row.values["tokens_per_s"]) and not row.values["reference"]


def _groups(every: Sequence[tuple[str, Design]], rows: Mapping[str, Row]) -> list[list[str]]:
    """Identities of what differs in its policy alone; of all designs where there is one policy."""
    groups: dict[str, list[str]] = {}
    for key, design in dict(every).items():
        place = {name: value for name, value in design.fields.items() if not _of_policy(name)}
        groups.setdefault(repr(place), []).extend([key] if key in rows else [])
    several = any(len(group) > 1 for group in groups.values())
    return list(groups.values()) if several else [[key for group in groups.values() for key in group]]


def _of_policy(name: str) -> bool:
    return name == "policy" or name.startswith(PARAMETER)


def _won(group: Sequence[str], rows: Mapping[str, Row]) -> Iterator[tuple[str, str]]:
    """The fastest of a group, with each that it beats surely."""
    if not group:
        return
    best = max(group, key=lambda key: rows[key].values["tokens_per_s"])
    for other in group:
        if other != best and _ratio(rows[best], rows[other])[0] > 1:
            yield best, other


def _ratio(one: Row, other: Row) -> tuple[float, float]:
    """The interval of the quotient of two speeds; the quotient itself where sequences cannot be told apart."""
    low, high = ratio_interval(one.sequences, other.sequences)
    if low is None or high is None:
        plain = one.values["tokens_per_s"] / other.values["tokens_per_s"]
        return plain, plain
    return low, high


def _differing(designs: Sequence[Design]) -> list[str]:
    """The fields in which designs differ."""
    first = designs[0].fields if designs else {}
    return [name for name in first if any(other.fields.get(name) != first[name] for other in designs)]


def effects_json(found: Sequence[Effect]) -> list[dict[str, Any]]:
    """The effects as plain data."""
    return [asdict(effect) for effect in found]


def effects_view(found: Sequence[Effect]) -> RenderableType:
    """The effects as a table for a person."""
    if not found:
        return Text("sensitivity: the profiles of this sweep assume no figure of which a range is known")
    rows = [
        [one.range, one.end, _speed(one), f"{one.conclusions:,}", f"{one.turned:,}", f"{one.unsure:,}"] for one in found
    ]
    headings = ("figure", "end", "speed", "conclusions", "turned", "unsure")
    table = Parts("sensitivity to figures that profiles assume", headings, rows)
    lines = [Text(f"turned with {one.range} at its {one.end} end: {each}") for one in found for each in one.examples]
    whole = sum(one.conclusions for one in found)
    held = percent(1 - sum(one.turned for one in found) / whole) if whole else "–"
    sources = dict.fromkeys((one.range, one.source) for one in found)
    return Group(
        table, Text("speed: with the figure at this end over speed without, over all designs"),
        Text(f"{held} of the comparisons of the fastest policy with another did not turn"), *lines,
        *(Text(f"{name}: {source}", style="dim") for name, source in sources),
    )  # fmt: skip


def _speed(one: Effect) -> str:
    return "–" if one.least is None or one.most is None else f"{number(one.least)} to {number(one.most)}"
