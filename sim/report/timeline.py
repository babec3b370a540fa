"""A run as a Chrome trace, to look at in https://ui.perfetto.dev or chrome://tracing.

Tracks: steps; the GPU's compute; its stalls, by the expert waited for; the link, a slice a stretch of copying; instants
for prefetch requests and evictions; the path predictor and the token scheduler, where a run has them.
"""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

from ground.files import atomic_path

_TRACKS = {1: "steps", 2: "GPU compute", 3: "GPU stall", 4: "link (host to GPU)", 5: "requests", 6: "evictions"}
_BESIDE = {"predict": (7, "predictor"), "schedule": (8, "scheduler")}
"""Tracks that are there where a run has something on them."""


class Timeline:
    """Writes what it observes to ``out`` as it happens (an observer of ``sim.run.link``); memory does not grow."""

    def __init__(self, out: IO[str], n_layers: int, n_experts: int) -> None:
        self._out = out
        self._layers = n_layers
        self._experts = n_experts
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        out.write('{"ph":"M","pid":1,"name":"process_name","args":{"name":"moe-replay (simulated)"}}')
        self._named: set[int] = set()
        for track, name in _TRACKS.items():
            self._track(track, name)

    def _track(self, track: int, name: str) -> None:
        if track not in self._named:
            self._named.add(track)
            self._event('"ph":"M"', track, '"name":"thread_name"', f'"name":"{name}"')
            self._event('"ph":"M"', track, '"name":"thread_sort_index"', f'"sort_index":{track}')

    def _event(self, kind: str, track: int, what: str, args: str) -> None:
        self._out.write(f',\n{{{kind},"pid":1,"tid":{track},{what},"args":{{{args}}}}}')

    def _name(self, expert: int) -> str:
        layer, number = divmod(expert, self._experts)
        return f"L{layer} e{number}"

    def _slice(self, track: int, begin: int, end: int, name: str, args: str = "") -> None:
        self._event('"ph":"X"', track, f'"ts":{begin / 1e3:.3f},"dur":{(end - begin) / 1e3:.3f},"name":"{name}"', args)

    def _instant(self, track: int, now: int, name: str, args: str = "") -> None:
        self._event('"ph":"i","s":"t"', track, f'"ts":{now / 1e3:.3f},"name":"{name}"', args)

    def transfer(self, begin: int, end: int, expert: int, kind: str, whole: bool) -> None:
        """A stretch on the link."""
        self._slice(4, begin, end, f"{kind} {self._name(expert)}", f'"complete":{str(whole).lower()}')

    def written_back(self, begin: int, end: int, expert: int) -> None:
        """A stretch on the link, to the host."""
        self._slice(4, begin, end, f"to the host {self._name(expert)}")

    def evicted(self, now: int, victims: list[int], by: int) -> None:
        """Experts that left."""
        for victim in victims:
            self._instant(6, now, f"evict {self._name(victim)}", f'"for":"{self._name(by)}"')

    def compute(self, begin: int, end: int, what: str, call: int) -> None:
        """GPU work."""
        self._slice(2, begin, end, f"{what} L{call % self._layers}", f'"call":{call}')

    def beside(self, begin: int, end: int, what: str, step: int) -> None:
        """Predictor or scheduler at work."""
        track, name = _BESIDE[what]
        self._track(track, name)
        self._slice(track, begin, end, f"{what} for step {step}")

    def stall(self, begin: int, end: int, expert: int, call: int, kind: str) -> None:
        """GPU waiting."""
        self._slice(3, begin, end, f"stall ({kind}) {self._name(expert)}", f'"call":{call}')

    def requested(self, now: int, expert: int, call: int, outcome: str) -> None:
        """A prefetch request; those for residents are left out."""
        if outcome != "resident":
            self._instant(5, now, f"{outcome} {self._name(expert)}", f'"for_step":{call // self._layers}')

    def step(self, begin: int, end: int, step: int, prefill: bool) -> None:
        """One step."""
        self._slice(1, begin, end, f"{'prefill' if prefill else 'decode'} (step {step})")


@contextmanager
def timeline(path: str | Path, n_layers: int, n_experts: int) -> Iterator[Timeline]:
    """Write a timeline to ``path`` (gzipped if it ends in .gz), whole or not at all. Raises OSError.

    Equal runs give equal bytes: of a gzipped one neither the time nor the temporary file's name is kept.
    """
    with atomic_path(path) as part, ExitStack() as files:
        raw: IO[bytes] = files.enter_context(part.open("wb"))
        if str(path).endswith(".gz"):
            raw = cast(IO[bytes], files.enter_context(gzip.GzipFile("", "wb", fileobj=raw, mtime=0)))
        out = files.enter_context(TextIOWrapper(raw, encoding="utf-8"))
        yield Timeline(out, n_layers, n_experts)
        out.write("\n]}\n")
