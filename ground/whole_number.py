"""Whole numbers on a command line."""

import re
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter, Token


def _whole(kind: object, tokens: Sequence[Token]) -> int:
    """A number as written; cyclopts itself would round 1.5 to 2 without a word."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?\d{1,18}", text.strip(), re.ASCII):
        raise ValueError(f"{text!r}; expected a whole number, at most 18 digits")
    return int(text)


WholeNumber = Annotated[int, Parameter(converter=_whole)]
"""An int flag that refuses fractions; to be annotated further, or made optional, as int is."""
