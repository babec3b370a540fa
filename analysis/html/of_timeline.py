"""What the link and the GPU did over time, from the file that ``sim replay --timeline`` writes."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.html.plots import Axis, Curves, Series
from analysis.html.wording import figure
from ground.errors import InputError
from ground.text import printable

BINS = 400
_GPU, _STALL, _LINK = 2, 3, 4  # tracks of sim.report.timeline
_LINK_KINDS = {
    "demands": "demand ", "prefetches that a call waits for": "joined ", "other prefetches": "prefetch ",
}  # fmt: skip
_GPU_KINDS = {
    "predicting": "predict ", "waiting for missing experts": "stall (demand) ",
    "waiting for late experts": "stall (late) ", "waiting for the host": "stall (host) ",
}  # fmt: skip
Slice = tuple[int, str, float, float]
"""Track, name, begin and end in microseconds."""


def read_timeline(path: Path) -> list[Slice]:
    """The slices of a timeline, plain or gzipped. Raises InputError for another file, OSError."""
    data = path.read_bytes()
    try:
        events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["traceEvents"]
        found = [(e["tid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
        if not any(track == _LINK for track, *_ in found):
            raise ValueError("nothing crosses a link")
    except (ValueError, LookupError, TypeError, OSError, EOFError, RecursionError) as wrong:
        raise InputError(
            f"--timeline {printable(path)}: not what `sim replay --timeline` writes ({printable(str(wrong)):.60})"
        ) from None
    return found


def timeline_plots(path: Path, number: int) -> list[Curves]:
    """How busy the link was over time, and what the GPU did; ``number`` is the timeline's among several, from 1."""
    slices = read_timeline(path)
    end = max(last for *_, last in slices)
    edges = np.linspace(0, end, BINS + 1)
    x = Axis("time since the run began (s)")
    suffix = "" if number == 1 else f"-{number}"
    each = f"Each point is the mean of {figure(end / BINS / 1e6)} s."
    link = _shares(slices, edges, {_LINK}, _LINK_KINDS, "other copies")
    gpu = _shares(slices, edges, {_GPU, _STALL}, _GPU_KINDS, "computing")
    drawn = {
        "link": ("Link over time", "Share of the link's time that copies take, by what they are for.",
                 Axis("link busy (%)"), link),
        "gpu": ("GPU over time", "Share of the GPU's time by what it does or waits for; the rest it is idle.",
                Axis("GPU time (%)"), gpu),
    }  # fmt: skip
    middle = ((edges[:-1] + edges[1:]) / 2e6).tolist()
    return [
        Curves(f"{name}-over-time{suffix}", f"{title}: {path.name}", f"{says} {each}", x, y,
               [Series(kind, middle, values, "area") for kind, values in shares.items()])
        for name, (title, says, y, shares) in drawn.items() if shares
    ]  # fmt: skip


def _shares(
    slices: Sequence[Slice], edges: np.ndarray, tracks: set[int], kinds: Mapping[str, str], other: str
) -> dict[str, list[float]]:
    """Of each kind, the share of every bin that its slices fill, in percent (BINS,); a name tells its kind."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for track, name, begin, end in slices:
        if track in tracks:
            kind = next((kind for kind, first in kinds.items() if name.startswith(first)), other)
            by_kind.setdefault(kind, []).append((begin, end))
    return {kind: busy(np.array(sorted(found)), edges).tolist() for kind, found in sorted(by_kind.items())}


def busy(stretches: np.ndarray, edges: np.ndarray) -> Any:
    """Percent of each bin between ``edges`` (B + 1,) that ``stretches`` (n, 2), apart and in order, fill (B,)."""
    times = stretches.reshape(-1)
    filled = np.cumsum(stretches[:, 1] - stretches[:, 0])
    until = np.stack([np.concatenate([[0], filled[:-1]]), filled], axis=1).reshape(-1)
    return 100 * np.diff(np.interp(edges, times, until)) / np.diff(edges)
