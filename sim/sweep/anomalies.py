"""Designs that a larger cache makes worse. It may: who leaves, and what waits for the link, change with the cache.

Belady, Nelson and Shedler found such anomalies of FIFO (CACM 12(6), 1969). A cache by recency a layer has none where
its slots hold a call; others may.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sim.report.tables import percent

SIZE = "cache"
"""The field that differs."""
MOST = 100_000
"""Rows that are kept, at most; of more nothing is said."""


@dataclass
class Anomalies:
    """Rows of designs that differ in their cache alone: each key has (bytes, decode misses, tokens/s)."""

    _rows: dict[tuple[Any, ...], list[tuple[int, int, float]]] = field(default_factory=lambda: defaultdict(list))
    _count: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one row that was run."""
        names = list(record)
        fields = names[: names.index("status")]
        if SIZE not in fields or record["tokens_per_s"] is None:
            return
        self._count += 1
        if self._count <= MOST:
            key = tuple(record[name] for name in fields if name != SIZE)
            self._rows[key].append((record["cache_bytes"], record["misses"], record["tokens_per_s"]))

    def to_json(self) -> dict[str, Any]:
        """How many pairs of sizes next to each other there are, and of how many the larger one is worse, and how much.

        Empty where there is no pair.
        """
        pairs, missing, slower = 0, [0.0], [0.0]
        for rows in self._rows.values() if self._count <= MOST else ():
            for (size, misses, speed), (larger, more, faster) in pairwise(sorted(rows)):
                if larger > size:
                    pairs += 1
                    missing += [more / misses - 1] if more > misses else []
                    slower += [1 - faster / speed] if faster < speed else []
        if not pairs:
            return {}
        return {
            "pairs": pairs, "more_misses": len(missing) - 1, "most_misses_more": max(missing),
            "slower": len(slower) - 1, "most_slower": max(slower),
        }  # fmt: skip

    def words(self) -> str:
        """The same for a person; empty where there is no pair."""
        found = self.to_json()
        if not found:
            return ""
        misses = f" (by {percent(found['most_misses_more'])} at most)" if found["more_misses"] else ""
        slower = f" (by {percent(found['most_slower'])} at most)" if found["slower"] else ""
        return (
            f"of {found['pairs']:,} steps to the next larger cache, {found['more_misses']:,} miss more{misses} and "
            f"{found['slower']:,} are slower{slower}"
        )
