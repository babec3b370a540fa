"""The shape of a sweep in a terminal: bars over one axis, a block for each value of another, the fastest blocks first.

Over all other axes the fastest design counts. References and what was not run are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from sim.report.bars import Speed, bars

MOST_BARS = 60


def drawing(records: Iterable[Mapping[str, Any]], names: Sequence[str]) -> RenderableType:
    """Bars of the records of a table; ``names`` are the fields that vary."""
    fastest: dict[tuple[str, ...], Mapping[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {name: {} for name in names}
    for record in records:
        if record["status"] == "ok" and not record["reference"] and record["tokens_per_s"] is not None:
            point = tuple(_text(record.get(name)) for name in names)
            for name, text in zip(names, point, strict=True):
                values[name].setdefault(text, record.get(name))
            if point not in fastest or record["tokens_per_s"] > fastest[point]["tokens_per_s"]:
                fastest[point] = record
    if not fastest:
        return Text("nothing to draw: no design was run")
    across, block = _axes(values)
    places = [names.index(name) for name in (block, across) if name is not None]
    best: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for point, record in fastest.items():
        seen = tuple(point[place] for place in places)
        if seen not in best or record["tokens_per_s"] > best[seen]["tokens_per_s"]:
            best[seen] = record
    longest = max(record["tokens_per_s"] for record in best.values())
    blocks: dict[str, list[Speed]] = {}
    for seen, record in best.items():
        title = f"{block} {seen[0]}" if block is not None else "tokens/s, of the bound"
        blocks.setdefault(title, []).append(Speed(seen[-1], record["tokens_per_s"], record["bound_tokens_per_s"]))
    others = [name for name in names if name not in (across, block) and len(values[name]) > 1]
    shown, left = _fastest(blocks)
    over = f"; of {', '.join(others)} the fastest" if others else ""
    head = Text(f"tokens/s (of the bound) over {across or 'the only design'}{over}", style="bold")
    tail = [Text(f"{left:,} more bars are left out")] if left else []
    return Group(head, *(bars(title, speeds, longest) for title, speeds in shown.items()), *tail)


def _fastest(blocks: Mapping[str, list[Speed]]) -> tuple[dict[str, list[Speed]], int]:
    """The blocks that hold the fastest bars, of the first as many bars as there is room for; how many are left out."""
    order = sorted(blocks, key=lambda title: -max(speed.tokens_per_s for speed in blocks[title]))
    shown: dict[str, list[Speed]] = {}
    room = MOST_BARS
    for title in order:
        if shown and len(blocks[title]) > room:
            break
        shown[title] = blocks[title][:room]
        room -= len(shown[title])
    return shown, sum(map(len, blocks.values())) - sum(map(len, shown.values()))


def _axes(values: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """The field that bars go over, numbers if there are some, and the one that each block has a value of."""
    several = [name for name, found in values.items() if len(found) > 1]
    numbers = [name for name in several if all(text[:1].isdigit() for text in values[name])]
    across = max(numbers or several, key=lambda name: len(values[name]), default=None)
    others = sorted((name for name in several if name != across), key=lambda name: name != "policy")
    return across, others[0] if others else None


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
