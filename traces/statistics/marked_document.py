"""Tables in Markdown, and where they stand in a document."""

from collections.abc import Sequence

from ground.errors import InputError


def between_marks(text: str, name: str, body: str) -> str:
    """``text`` with ``body`` (whole lines) in place of what is between the marks of ``name``, which are comments.

    Raises InputError where the document lacks them.
    """
    begin, close = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, mark, rest = text.partition(begin)
    _, end, after = rest.partition(close)
    if not mark or not end:
        raise InputError(f"the document lacks the marks {begin} and {close}")
    return f"{before}{begin}\n{body}{close}{after}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, its first column to the left and the others to the right."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
