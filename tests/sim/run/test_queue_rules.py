"""ARC, S3-FIFO and W-TinyLFU against textbook forms of them, which own their cache, on streams of single requests."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.eviction_queues import ARC, S3FIFO, WTinyLFU
from sim.run.serve import serve
from sim.run.slots import ExpertCache

STREAM = st.lists(st.integers(0, 11), min_size=1, max_size=150)


def arc(stream: list[int], c: int) -> list[bool]:
    """Figure 4 of the paper, case by case; lists from the least to the most recent."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, hits = 0.0, []

    def replace(x: int) -> None:
        if t1 and ((x in b2 and len(t1) == p) or len(t1) > p):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in stream:
        hits.append(x in t1 or x in t2)
        if hits[-1]:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
        elif x in b1:
            p = min(c, p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            p = max(0, p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                replace(x)
            t1.append(x)
    return hits


def s3fifo(stream: list[int], c: int) -> list[bool]:
    """Algorithm 1 of the paper; lists from the oldest to the newest."""
    small: list[int] = []
    main: list[int] = []
    ghosts: list[int] = []
    uses: dict[int, int] = {}
    quota, hits = max(1, c // 10), []

    def evict() -> None:
        while small and (len(small) >= quota or not main):
            tail = small.pop(0)
            if uses[tail] <= 1:
                ghosts.append(tail)
                del ghosts[: max(0, len(ghosts) - (c - quota))], uses[tail]
                return
            main.append(tail)
            uses[tail] = 0
        while True:
            tail = main.pop(0)
            if not uses[tail]:
                del uses[tail]
                return
            main.append(tail)
            uses[tail] -= 1

    for x in stream:
        hits.append(x in uses)
        if hits[-1]:
            uses[x] = min(3, uses[x] + 1)
            continue
        if len(small) + len(main) == c:
            evict()
        if x in ghosts:
            ghosts.remove(x)
            main.append(x)
        else:
            small.append(x)
        uses[x] = 0
    return hits


def w_tinylfu(stream: list[int], c: int) -> list[bool]:
    """Window, filter and segmented LRU, with exact counters."""
    window: list[int] = []
    probation: list[int] = []
    protected: list[int] = []
    uses = [0] * 12
    room, counted, hits = max(1, c // 100), 0, []
    for x in stream:
        uses[x] = min(15, uses[x] + 1)
        counted += 1
        if counted >= 10 * c:
            uses, counted = [n // 2 for n in uses], counted // 2
        hits.append(x in window + probation + protected)
        if x in window:
            window.remove(x)
            window.append(x)
        elif x in protected:
            protected.remove(x)
            protected.append(x)
        elif x in probation:
            probation.remove(x)
            protected.append(x)
            if len(protected) > int((c - room) * 0.8):
                probation.append(protected.pop(0))
        else:
            window.append(x)
            if len(window) > room:
                enters = window.pop(0)
                if len(probation) + len(protected) < c - room:
                    probation.append(enters)
                elif (oldest := (probation or protected)) and uses[enters] > uses[oldest[0]]:
                    oldest.pop(0)
                    probation.append(enters)
    return hits


@pytest.mark.parametrize(("rule", "textbook"), [(ARC, arc), (S3FIFO, s3fifo), (WTinyLFU, w_tinylfu)])
@given(stream=STREAM, slots=st.integers(1, 10))
def test_hits_are_those_of_the_textbook(
    rule: type, textbook: Callable[[list[int], int], list[bool]], stream: list[int], slots: int
) -> None:
    cache = ExpertCache([10], 12, [slots * 10], [0], rule)
    offsets = np.arange(len(stream) + 1)
    assert serve(cache, offsets, np.array(stream, np.int64)).tolist() == textbook(stream, slots)


@given(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True), max_size=60), st.integers(4, 9))
def test_ghosts_are_no_more_than_the_papers_let_there_be(calls: list[list[int]], slots: int) -> None:
    offsets = np.cumsum([0, *map(len, calls)])
    stream = np.array([expert for call in calls for expert in sorted(call)], np.int64)
    one, other = (ExpertCache([10], 12, [slots * 10], [0], rule) for rule in (ARC, S3FIFO))
    serve(one, offsets, stream)
    serve(other, offsets, stream)
    arc_, s3 = one.rules[0], other.rules[0]
    assert isinstance(arc_, ARC) and isinstance(s3, S3FIFO)
    assert len(arc_.once) + len(arc_.once_ghosts) <= slots
    assert len(arc_.once) + len(arc_.once_ghosts) + len(arc_.often) + len(arc_.often_ghosts) <= 2 * slots
    assert len(s3.ghosts) <= slots - max(1, slots // 10)
