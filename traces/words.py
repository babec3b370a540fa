"""Text that others wrote, made fit to be shown."""


def printable(text: object) -> str:
    r"""``str(text)`` with every control character, lone surrogate and unusual space as an escape such as ``\x1b``.

    What a file says must not move a terminal's cursor, change its colours or break a table's lines.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
