"""Binary heaps whose items can be found: added, taken from the top or from anywhere in O(log n).

Keys are (first, second) and must differ within a heap. An item is in one heap at most of those that share ``places``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.compiled.jit import inlined, inner
from sim.compiled.records import address, records_of

HEAP = np.dtype([("nodes", np.int64), ("places", np.int64), ("size", np.int64)])
_NODE = np.dtype([("first", np.int64), ("second", np.int64), ("item", np.int64)])
_PLACE = np.dtype([("index", np.int64)])  # of an item within its heap, -1 for none

_node = records_of(_NODE)
_place = records_of(_PLACE)


class Heaps:
    """Memory of a family of heaps over the same items; ``heaps`` (H,) HEAP are the heaps themselves."""

    def __init__(self, most: Sequence[int], items: int) -> None:
        """A heap for each entry of ``most``, which says how many of ``items`` items it may hold."""
        self._nodes = np.zeros(sum(most), _NODE)
        self._places = np.full(items, -1, np.int64)
        self.heaps = np.zeros(len(most), HEAP)
        start = np.cumsum(most) - most
        self.heaps["nodes"] = address(self._nodes) + start * _NODE.itemsize
        self.heaps["places"] = address(self._places)


@inner
def push(heap: Any, item: int, first: int, second: int) -> None:
    """Add ``item``."""
    heap.size += 1
    _rise(heap, heap.size - 1, first, second, item)


@inlined
def top(heap: Any) -> Any:
    """The node with the smallest key; the heap must not be empty."""
    return _node(heap.nodes, 0)


@inner
def largest(heap: Any) -> Any:
    """The node with the largest key; the heap must not be empty. It is one of those without children."""
    best = heap.size >> 1
    for index in range(best + 1, heap.size):
        node, found = _node(heap.nodes, index), _node(heap.nodes, best)
        if node.first > found.first or (node.first == found.first and node.second > found.second):
            best = index
    return _node(heap.nodes, best)


@inlined
def contains(heap: Any, item: int) -> bool:
    """Whether ``item`` is in one of the heaps that share places with this one."""
    return _place(heap.places, item).index >= 0


@inner
def remove(heap: Any, item: int) -> None:
    """Take out ``item``, which must be there."""
    place = _place(heap.places, item)
    hole = place.index
    place.index = -1
    heap.size -= 1
    if hole != heap.size:
        last = _node(heap.nodes, heap.size)
        first, second, moved = last.first, last.second, last.item
        _rise(heap, _sink(heap, hole, first, second), first, second, moved)


@inner
def _rise(heap: Any, hole: int, first: int, second: int, item: int) -> None:
    """Move the hole towards the top until the key fits there, and fill it."""
    while hole > 0:
        above = (hole - 1) >> 1
        node = _node(heap.nodes, above)
        if node.first < first or (node.first == first and node.second < second):
            break
        _fill(heap, hole, node.first, node.second, node.item)
        hole = above
    _fill(heap, hole, first, second, item)


@inner
def _sink(heap: Any, hole: int, first: int, second: int) -> int:
    """Move the hole away from the top while a child's key is smaller; returns where it ends."""
    while True:
        below = 2 * hole + 1
        if below >= heap.size:
            return hole
        node = _node(heap.nodes, below)
        if below + 1 < heap.size:
            other = _node(heap.nodes, below + 1)
            if other.first < node.first or (other.first == node.first and other.second < node.second):
                below, node = below + 1, other
        if first < node.first or (first == node.first and second < node.second):
            return hole
        _fill(heap, hole, node.first, node.second, node.item)
        hole = below


@inner
def _fill(heap: Any, hole: int, first: int, second: int, item: int) -> None:
    node = _node(heap.nodes, hole)
    node.first, node.second, node.item = first, second, item
    _place(heap.places, item).index = hole
