"""Text that others wrote, made fit to be kept and shown."""

import re

from rich.text import Text

from ground.errors import InputError

_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")


def printable(text: object) -> str:
    r"""``str(text)`` with every control character, lone surrogate and unusual space as an escape such as ``\x1b``.

    What a file says must not move a terminal's cursor, change its colours or break a table's lines.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def printable_lines(text: str) -> str:
    """`printable`, but for the ends of lines, which stay."""
    return "\n".join(map(printable, text.split("\n")))


def first_words(text: object, most: int = 200) -> str:
    """``str(text)`` on one line of at most ``most`` characters: only whole words are left out, and dots say so."""
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    kept, space, _ = line[: most - 3].rpartition(" ")
    return f"{kept if space else line[: most - 4]} ..."


def utf8(stored: bytes, name: str) -> str:
    """The text of a file ``name``, a byte order mark left out. Raises InputError naming the line of other bytes."""
    try:
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{name}: line {place}: not UTF-8 ({error})") from None


def amount(size: int) -> str:
    """Bytes in the largest unit of which there is one at least: ``84.00 GiB``, ``1 B``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def as_is(text: object) -> Text:
    """Printable text that rich shows as it is: names may hold brackets."""
    return Text(printable(text))


def check_name(name: str, where: str) -> None:
    """Raise InputError, saying ``where``, if a name is empty or holds a control character or a lone surrogate."""
    if not name:
        raise InputError(f"{where}: empty, expected a text")
    if odd := _CONTROL.search(name):
        raise InputError(f"{where}: {name!r:.60} holds {odd[0]!r}, expected text without control characters")


def check_text(text: str, where: str) -> None:
    r"""Raise InputError, saying ``where``, if a text holds a lone surrogate, as JSON's ``\ud83d`` without its half."""
    if odd := next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None):
        raise InputError(f"{where} holds {odd!r}, half of a character (an unpaired surrogate); expected whole ones")
