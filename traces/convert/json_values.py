"""JSON values of a file one by one, however they stand in it: one a line, one after another, or in one list."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ground.errors import InputError

_CHUNK = 2**20
_LARGEST = 2**27  # characters of one value: an answer of 100,000 tokens has fewer
_NEAR_THE_END = 64  # a value that is cut off is wrong there
_BETWEEN = re.compile(r"[^\s,]")


def json_values(handle: IO[bytes]) -> Iterator[Any]:
    """Yield the values of an open file; a list at the top is taken apart.

    Memory is that of one value. Raises InputError, with the number of the value, where the text is no JSON.
    """
    text, number, listed = _Text(handle), 0, False
    try:
        while letter := text.next_letter():
            if letter == "[" and not number and not listed:
                listed, text.at = True, text.at + 1
            elif letter == "]" and listed:
                listed, text.at = False, text.at + 1
            else:
                yield text.value()
                number += 1
    except InputError as error:
        raise InputError(f"value {number}: {error}") from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).split(": line")[0]
        raise InputError(f"value {number}: not JSON ({reason}): was the file cut off?") from None
    if listed:
        raise InputError(f"value {number}: the list has no end: was the file cut off?")


class _Text:
    """The part of a file's text that is being read, and the place in it."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle, self._decoder = handle, codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(parse_constant=_refuse)
        self._held, self._ended, self.at = "", False, 0

    def _more(self, least: int) -> None:
        chunk = self._handle.read(max(least, _CHUNK))
        self._ended = not chunk
        self._held, self.at = self._held[self.at :] + self._decoder.decode(chunk, self._ended), 0

    def next_letter(self) -> str:
        """The first letter that is neither space nor a comma, where the place then is; empty at the end."""
        while (found := _BETWEEN.search(self._held, self.at)) is None and not self._ended:
            self.at = len(self._held)
            self._more(0)
        if found is None:
            return ""
        self.at = found.start()
        return found[0]

    def value(self) -> Any:
        """The value that begins at the place; the place is then behind it."""
        while True:
            try:
                value, self.at = self._json.raw_decode(self._held, self.at)
                return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or len(self._held) - error.pos < _NEAR_THE_END
                if self._ended or not cut:
                    raise
            if len(self._held) - self.at > _LARGEST:
                raise InputError(f"more than {_LARGEST} characters, expected one answer")
            self._more(len(self._held))


def first_value(path: Path) -> Any:
    """The first value of a file; None where it has none. Raises InputError, OSError."""
    with path.open("rb") as handle:
        return next(json_values(handle), None)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
