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
_SPACE = re.compile(r"[\s,]*")


def json_values(handle: IO[bytes]) -> Iterator[Any]:
    """Yield the values of an open file; a list at the top is taken apart.

    Memory is that of one value. Raises InputError, with the number of the value, where the text is no JSON.
    """
    decode, text = json.JSONDecoder(parse_constant=_refuse).raw_decode, codecs.getincrementaldecoder("utf-8-sig")()
    buffer, at, number, listed, ended = "", 0, 0, False, False

    def more(least: int) -> None:
        nonlocal buffer, at, ended
        chunk = handle.read(max(least, _CHUNK))
        ended = not chunk
        buffer, at = buffer[at:] + text.decode(chunk, ended), 0

    try:
        while True:
            at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr] (it matches nothing too)
            if at == len(buffer):
                if ended:
                    break
                more(0)
            elif buffer[at] == "[" and not number and not listed:
                listed, at = True, at + 1
            elif buffer[at] == "]" and listed:
                listed, at = False, at + 1
            else:
                try:
                    value, at = decode(buffer, at)
                except json.JSONDecodeError as error:
                    if ended or not (error.msg.startswith("Unterminated") or len(buffer) - error.pos < 64):
                        raise
                    if len(buffer) - at > _LARGEST:
                        raise InputError(f"value {number}: more than {_LARGEST} characters, expected an answer") from None
                    more(len(buffer))
                    continue
                yield value
                number += 1
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).split(": line")[0]
        raise InputError(f"value {number}: not JSON ({reason}): was the file cut off?") from None
    if listed:
        raise InputError(f"value {number}: the list has no end: was the file cut off?")


def first_value(path: Path) -> Any:
    """The first value of a file; None where it has none. Raises InputError, OSError."""
    with path.open("rb") as handle:
        return next(json_values(handle), None)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
