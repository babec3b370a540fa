"""The values of an axis: a list, a range in equal steps or equal factors, or a span to draw from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ground.errors import InputError

MOST_VALUES = 100_000
"""Values of one range, at most."""

_NUMBER = r"([+-]?\d{1,15}(?:\.\d{1,15})?)"
_UNIT = r"([%a-zA-Z]*|/layer)"
_RANGE = re.compile(rf"{_NUMBER}{_UNIT}:{_NUMBER}{_UNIT}(?::(?:(x?){_NUMBER}{_UNIT}|(log)))?")
_TABLE = ("from", "to", "step", "factor", "points", "scale")


@dataclass(frozen=True)
class Span:
    """Everything between two numbers, evenly or (``log``) by their logarithm; ``unit`` follows each number."""

    low: float
    high: float
    log: bool = False
    unit: str = ""
    whole: bool = False

    def typed(self, number: float) -> Any:
        """A number of it as a person would write it: with four digits, which an axis never needs more of."""
        if self.whole:
            return round(number)
        rounded = min(max(float(f"{number:.4g}"), self.low), self.high)
        return f"{rounded:.12g}{self.unit}" if self.unit else rounded

    def at(self, share: float) -> Any:
        """The value ``share`` (0 to 1) of the way."""
        if self.log:
            return self.typed(self.low * (self.high / self.low) ** share)
        return self.typed(self.low + (self.high - self.low) * share)


Values = tuple[Any, ...] | Span


def values_of(given: Any, where: str) -> Values:
    """What stands for an axis in a sweep file: a value, a list of values and ranges, or one range.

    A range is a text, ``10%:90%:10%`` (steps), ``1:64:x2`` (factors), or a table with ``from``, ``to`` and one of
    ``step``, ``factor`` and ``points``, the last with ``scale`` "linear" or "log". Without any of the three it is a
    span, from which designs are drawn: ``0.1:10`` or, by its logarithm, ``0.1:10:log``. Raises InputError, which
    begins with ``where``.
    """
    if isinstance(given, dict):
        return _of_table(given, where)
    if isinstance(given, str) and (match := _RANGE.fullmatch(given.strip())):
        return _of_text(match, f"{where}: {given!r}")
    if not isinstance(given, list):
        return (given,)
    found: list[Any] = []
    for one in given:
        part = (one,) if isinstance(one, list) else values_of(one, where)
        if isinstance(part, Span):
            raise InputError(f"{where}: {one!r} has no step; in a list expected values, or ranges with one")
        found += part
    if not found:
        raise InputError(f"{where}: an empty list; expected at least one value")
    return tuple(found)


def typed_values(text: str, where: str) -> Values:
    """The same as typed: values and ranges with commas between them, or semicolons where a value has a comma."""
    parts = [part.strip() for part in text.split(";" if ";" in text else ",")]
    if "" in parts:
        raise InputError(f"{where}: {text!r}; expected values with commas between them")
    return values_of(parts if len(parts) > 1 else parts[0], where)


def _of_text(match: re.Match[str], where: str) -> Values:
    first, unit, last, other, times, step, third, log = match.groups()
    units = {unit, other} | ({third} if step and not times else set())
    if len(units) > 1 or (times and third):
        raise InputError(f"{where}; expected one unit in all of it")
    low, high = Decimal(first), Decimal(last)
    whole = not unit and all("." not in number for number in (first, last, step or "0"))
    if step is None:
        return _span(low, high, log is not None, unit, whole, where)
    return _stepped(low, high, Decimal(step), bool(times), unit, whole, where)


def _of_table(given: dict[str, Any], where: str) -> Values:
    odd = [name for name in given if name not in _TABLE]
    steps = [name for name in ("step", "factor", "points") if name in given]
    if odd or "from" not in given or "to" not in given or len(steps) > 1:
        raise InputError(
            f"{where}: {', '.join(map(str, given)) or 'an empty table'}; expected from, to and one of step, factor "
            f"and points (a range), or none of them (a span)"
        )
    if given.get("scale", "linear") not in ("linear", "log"):
        raise InputError(f"{where}: scale {given['scale']!r}; expected linear or log")
    log = given.get("scale") == "log"
    (low, unit), (high, other) = (_number(given[name], f"{where}: {name}") for name in ("from", "to"))
    step, third = _number(given.get(steps[0]) if steps else 0, f"{where}: {steps[:1]}")
    if unit != other or (third != unit and steps == ["step"]):
        raise InputError(f"{where}: {given['from']!r} to {given['to']!r}; expected one unit in all of it")
    whole = not unit and all(isinstance(given.get(name, 0), int) for name in ("from", "to", "step", "factor"))
    if not steps:
        return _span(low, high, log, unit, whole, where)
    if steps != ["points"]:
        return _stepped(low, high, step, steps == ["factor"], unit, whole, where)
    span = _span(low, high, log, unit, False, where)
    if not 2 <= step <= MOST_VALUES or step != int(step):
        raise InputError(f"{where}: {given['points']!r} points; expected a whole number, at least 2")
    return tuple(span.at(index / (int(step) - 1)) for index in range(int(step)))


def _number(given: Any, where: str) -> tuple[Decimal, str]:
    match = re.fullmatch(rf"\s*{_NUMBER}{_UNIT}\s*", f"{given:.15f}" if isinstance(given, float) else str(given))
    if match is None or isinstance(given, bool):
        raise InputError(f"{where} {given!r}; expected a number, or a text of a number and a unit")
    return Decimal(match[1]), match[2]


def _span(low: Decimal, high: Decimal, log: bool, unit: str, whole: bool, where: str) -> Span:
    if not low < high or (log and low <= 0):
        raise InputError(f"{where}: from {low} to {high}; expected the lower first{', above 0' if log else ''}")
    return Span(float(low), float(high), log, unit, whole)


def _stepped(
    low: Decimal, high: Decimal, step: Decimal, times: bool, unit: str, whole: bool, where: str
) -> tuple[Any, ...]:
    """From ``low`` on, each the one before plus (or ``times``) ``step``, as long as ``high`` is not passed."""
    if low > high or (times and (low <= 0 or step <= 1)) or (not times and step <= 0):
        wanted = "a factor above 1, from above 0" if times else "a step above 0"
        raise InputError(f"{where}: from {low} to {high}; expected the lower first, and {wanted}")
    found: list[Any] = []
    while low <= high:
        if len(found) == MOST_VALUES:
            raise InputError(f"{where}: more than {MOST_VALUES:,} values; expected fewer")
        plain = low.normalize()
        found.append(f"{plain:f}{unit}" if unit else int(plain) if whole else float(plain))
        low = low * step if times else low + step
    return tuple(found)


def linked(fields: dict[str, Any], where: str) -> dict[str, Sequence[Any]]:
    """The values of fields that vary together, equally many of each. Raises InputError."""
    found: dict[str, Sequence[Any]] = {}
    for name, given in fields.items():
        values = values_of(given, f"{where}: {name}")
        if isinstance(values, Span):
            raise InputError(f"{where}: {name} has no step; expected a list, or a range with one")
        found[name] = values
    counts = {name: len(values) for name, values in found.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise InputError(f"{where}: values vary together and differ in number ({each}); expected equally many")
    return found
