"""What the benchmark measured, as tables for people and as JSON for programs."""

from dataclasses import asdict, dataclass

from rich.console import Group
from rich.table import Table


@dataclass(frozen=True)
class EngineSpeed:
    """One measurement: decode tokens a second of an engine, and of what it is compared with where that was run."""

    engine: str
    policy: str
    model: str
    tokens: int
    slots: int
    miss_ratio: float
    tokens_per_s: float
    beside: str = ""
    beside_tokens_per_s: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class CacheSpeed:
    """Accesses a second of one cache and the share that missed; None where it is not installed."""

    what: str
    accesses: int
    slots: int
    miss_ratio: float | None = None
    accesses_per_s: float | None = None


def bench_view(rows: list[EngineSpeed], caches: list[CacheSpeed]) -> Group:
    """The measurements as tables."""
    speeds = _table("engine speed (decode tokens simulated a second)", "engine", "policy", "model", "tokens", "slots",
                    "misses", "tokens/s", "beside", "its tokens/s", "ratio")  # fmt: skip
    for row in rows:
        speeds.add_row(
            row.engine, row.policy, row.model, f"{row.tokens:,}", f"{row.slots:,}", f"{100 * row.miss_ratio:.1f}%",
            f"{row.tokens_per_s:,.0f}", row.beside,
            f"{row.beside_tokens_per_s:,.0f}" if row.beside_tokens_per_s else "",
            f"{row.ratio:,.2f}" if row.ratio else "",
        )  # fmt: skip
    alone = _table("the cache alone under LRU", "cache", "accesses", "slots", "misses", "accesses/s")
    for cache in caches:
        alone.add_row(
            cache.what, f"{cache.accesses:,}", f"{cache.slots:,}",
            "" if cache.miss_ratio is None else f"{100 * cache.miss_ratio:.1f}%",
            "" if cache.accesses_per_s is None else f"{cache.accesses_per_s:,.0f}",
        )  # fmt: skip
    return Group(speeds, alone if caches else "the compiled engine and the caches need numba: left out")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    words = ("engine", "policy", "model", "beside", "cache")
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    return table


def bench_json(rows: list[EngineSpeed], caches: list[CacheSpeed]) -> dict[str, list[dict[str, object]]]:
    """The measurements as data."""
    return {"engines": [asdict(row) for row in rows], "caches": [asdict(row) for row in caches]}
