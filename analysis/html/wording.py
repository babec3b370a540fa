"""Numbers and lists as a sentence, a label or a cell says them."""

from collections.abc import Sequence
from typing import Any

NOTHING = "–"


def figure(value: float | None, digits: int = 3) -> str:
    """A number with as many digits as a reader can use, thousands parted: ``26.9``, ``1,420``, ``0.412``."""
    if value is None:
        return NOTHING
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - max(whole, 1))}f}" if whole else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return NOTHING if value is None else f"{100 * value:.1f} %"


def listed(words: Sequence[str], most: int = 8) -> str:
    """``a, b and c``; of many the first ``most`` and how many more."""
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most:,} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 design``, ``30 designs``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def field_value(value: Any) -> str:
    """A field's value in a label: numbers without needless digits, of paths the file's name."""
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    parts = [part.rpartition("/")[2].removesuffix(".npz") if part.endswith(".npz") else part
             for part in text.split(" + ")]  # fmt: skip
    return " + ".join(parts)


def lines_of(label: str, width: int = 30) -> list[str]:
    """A label in lines of about ``width`` characters, broken after commas and before *over*."""
    lines = [""]
    for part in label.replace(" over ", ", over ").split(", "):
        joined = f"{lines[-1]}{'' if part.startswith('over ') else ','} {part}" if lines[-1] else part
        if lines[-1] and len(joined) > width:
            lines[-1] += "" if part.startswith("over ") else ","
            lines.append(part)
        else:
            lines[-1] = joined
    return lines
