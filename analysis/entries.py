"""Lists of entries, as the data of experiments hold them."""

from collections.abc import Iterable
from typing import Any

Entry = dict[str, Any]


def distinct(entries: Iterable[Entry], key: str) -> list[Any]:
    """The values of ``key``, each once, in the order in which they come first."""
    return list(dict.fromkeys(entry[key] for entry in entries))


def having(entries: Iterable[Entry], **wanted: object) -> list[Entry]:
    """The entries whose values are those wanted."""
    return [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]
