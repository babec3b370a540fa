"""A measured machine as a profile that the simulator loads: figures with their source, curves that rise, as TOML."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from realrun.calibrate.timing import Timing

Table = dict[str, Any]


def figure(value: float, source: str, digits: int = 4) -> Table:
    """One measured number, rounded to ``digits`` significant ones."""
    shown = float(f"{value:.{digits}g}")
    return {"value": max(0.0, shown), "source": source, "measured": True}


def curve(times: Mapping[int, Timing], source: str) -> Table:
    """Medians over size as a curve that rises strictly: noise that makes more take less is levelled."""
    points: list[list[int]] = []
    for size, timing in sorted(times.items()):
        least = points[-1][1] + 1 if points else 1
        points.append([size, max(least, timing.ns)])
    return {"source": source, "measured": True, "points": points}


def spread(times: Mapping[Any, Timing]) -> Table:
    """Median and spread of each, in microseconds, for a person."""
    return {str(size): [round(ns / 1e3, 2) for ns in (t.ns, t.low, t.high)] for size, t in times.items()}


def to_toml(tables: Mapping[str, Any], comment: str = "") -> str:
    """TOML of nested tables, lists of tables and plain values; ``comment`` comes first, a line each.

    A table of plain values alone that fits a line is written on one.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    _table([], tables, lines)
    return "\n".join(lines) + "\n"


def _table(path: Sequence[str], table: Mapping[str, Any], lines: list[str]) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in table.items():
        tables = isinstance(value, list) and value and isinstance(value[0], Mapping)
        if tables or (isinstance(value, Mapping) and not _short(value)):
            later.append((key, value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in later:
        name = ".".join(_key(part) for part in [*path, key])
        for each in value if isinstance(value, list) else [value]:
            lines += ["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]"]
            _table([*path, key], each, lines)


def _short(table: Mapping[str, Any]) -> bool:
    plain = not any(isinstance(value, Mapping | list) for value in table.values())
    return plain and len(_value(dict(table))) <= 150


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key)
    return key if bare else _value(key)


def _value(value: Any) -> str:
    """Plain values and lists are written as in JSON, which is TOML too."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if value is None:
        raise TypeError("a profile holds no None")
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
