"""What makes a valid trace doubtful: filler in place of routes, layers that never vary or are copies, turns that are
counted twice, answers that were saved twice, prompts without their beginning, experts that take nearly all.

Real text can repeat, so these are doubts and no errors. They are counted from the routes alone, whatever wrote them.
"""

import hashlib
from itertools import pairwise

import numpy as np

from traces.layer_numbers import listed
from traces.schema import PREFILL
from traces.statistics.usage import expert_counts
from traces.trace import Trace

# The same row in this many places is no chance where a row holds this many ids.
_PLACES = 4
_ROW_IDS = 8
# From this many rows on a layer that never varies, or two layers that always agree, are no chance.
_ROWS = 16
# So large a share of a layer's activations for as few experts as a token takes is a collapse.
_COLLAPSED = 0.95
# Rows compared at once, which bounds memory.
_BLOCK = 8192


def doubts(trace: Trace) -> list[str]:
    """One line for each thing that no real run is expected to do; none for a plausible trace.

    Rows that stand identically in many places, layers in which all rows (or all rows of a sequence) take the same
    experts, layers without a route, with few experts or that copy each other, sequences that begin with all of the one
    before or in the middle of their prompt. Time is linear in the trace.
    """
    if trace.n_experts <= trace.top_k:  # every token takes every expert
        return []
    found = []
    fixed, steady = _constant_layers(trace)
    empty = fixed & (trace.experts[0] < 0).all(axis=1)
    for layers, what in (
        (empty, "no row has a route"),
        (fixed & ~empty, "all rows take the same experts"),
        (steady & ~fixed, "all rows of a sequence take the same experts"),
    ):
        if layers.any():
            where = "every layer" if layers.all() else f"layers {listed(trace.layers[layers].tolist())}"
            found.append(f"{what} in {where}: was the capture lost or overwritten?")
    for copies in _copied_layers(trace, ~(fixed | steady)):
        found.append(f"layers {listed(copies)} hold the same routes in every row: was one buffer read for all of them?")
    collapsed = _collapsed_layers(trace) & ~(fixed | steady)
    if collapsed.any():
        where = listed(trace.layers[collapsed].tolist())
        found.append(
            f"{trace.top_k} of {trace.n_experts} experts have more than {_COLLAPSED:.0%} of the activations of layers "
            f"{where}: a router that has collapsed, or ids that were cut?"
        )
    found += _broken_histories(trace)
    if not (fixed | steady).all() and (rows := _repeated_rows(trace)):
        found.append(
            f"{rows} of {trace.n_rows} rows are identical in every layer to rows elsewhere: padding, or rows that were "
            "never written? (routes of padding must be left out, by n_valid or lengths when converting)"
        )
    return found


def _collapsed_layers(trace: Trace) -> np.ndarray:
    """(L,) flags of the layers in which as few experts as a token takes have nearly all activations."""
    if trace.n_rows < _ROWS:
        return np.zeros(trace.n_layers, bool)
    blocks = range(0, trace.n_rows, _BLOCK)
    counts = sum(expert_counts(trace.experts[start : start + _BLOCK], trace.n_experts) for start in blocks)
    counts = np.sort(counts, axis=1)
    return counts[:, -trace.top_k :].sum(axis=1) > _COLLAPSED * counts.sum(axis=1)


def _broken_histories(trace: Trace) -> list[str]:
    """Sequences that hold the one before, and those whose prompt has lost its beginning."""
    found, offsets = [], trace.offsets
    lengths = np.diff(offsets)
    repeated = [
        s
        for s in range(1, trace.n_sequences)
        if _ROWS <= lengths[s - 1] < lengths[s]
        and (trace.experts[offsets[s] - 1] == trace.experts[offsets[s] + lengths[s - 1] - 1]).all()
        and (trace.experts[offsets[s - 1] : offsets[s]] == trace.experts[offsets[s] :][: lengths[s - 1]]).all()
    ]
    if again := _saved_twice(trace):
        found.append(f"{again} sequences are the same as one before them: answers that were saved twice?")
    if repeated:
        found.append(
            f"{len(repeated)} sequences begin with all rows of the one before: turns that count twice? (give "
            "'conversation' when converting)"
        )
    begin = offsets[:-1]
    holes = int(((trace.position[begin] > 0) & (trace.phase[begin] == PREFILL)).sum())
    if holes:
        found.append(f"{holes} sequences begin in the middle of their prompt: were rows left to a prefix cache?")
    return found


def _saved_twice(trace: Trace) -> int:
    """How many sequences have the routes and tokens of an earlier one, all of them."""
    known: set[bytes] = set()
    offsets = trace.offsets
    for start, end in pairwise(offsets):
        if end - start >= _ROWS and trace.experts[start].size >= _ROW_IDS:
            whole = hashlib.sha256(np.ascontiguousarray(trace.experts[start:end]).data)
            whole.update(np.ascontiguousarray(trace.token[start:end]).data)
            known.add(whole.digest())
        else:
            known.add(f"{start}".encode())
    return trace.n_sequences - len(known)


def _constant_layers(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """(L,) flags of the layers with one route in all rows, and of those with one in all rows of each sequence."""
    experts, sequence = trace.experts, trace.sequence
    fixed = np.full(trace.n_layers, trace.n_rows >= _ROWS)
    steady = np.full(trace.n_layers, trace.n_rows - trace.n_sequences >= _ROWS)
    for start in range(1, trace.n_rows, _BLOCK):
        if not (fixed.any() or steady.any()):
            break
        now, before = experts[start : start + _BLOCK], experts[start - 1 : start - 1 + _BLOCK][: trace.n_rows - start]
        moved = sequence[start : start + _BLOCK] != sequence[start - 1 : start - 1 + _BLOCK][: trace.n_rows - start]
        same = (now == before).all(axis=2)
        fixed &= same.all(axis=0)
        steady &= (same | moved[:, None]).all(axis=0)
    return fixed, steady


def _copied_layers(trace: Trace, varying: np.ndarray) -> list[list[int]]:
    """Layer numbers of each group of ``varying`` (L,) layers that have equal routes in every row."""
    groups: dict[bytes, list[int]] = {}
    if trace.n_rows >= _ROWS:
        for place in np.flatnonzero(varying).tolist():
            # Other layers are looked at in full only where the first rows agree, which in real routes they never do.
            groups.setdefault(trace.experts[:_ROWS, place].tobytes(), []).append(place)
    whole: dict[bytes, list[int]] = {}
    for places in groups.values():
        for place in places if len(places) > 1 else ():
            whole.setdefault(trace.experts[:, place].tobytes(), []).append(int(trace.layers[place]))
    return [layers for layers in whole.values() if len(layers) > 1]


def _repeated_rows(trace: Trace) -> int:
    """How many rows stand identically in many places; rows without any route are not counted.

    Sequences that begin with the same tokens share their first rows rightly: places count as different if their
    positions differ, or the rows before them in most ids. Rows of shallow models recur by chance: many is measured by
    the median, and by how often each layer takes the row's experts elsewhere.
    """
    if trace.experts[0].size < _ROW_IDS:
        return 0
    rows = np.ascontiguousarray(trace.experts).reshape(trace.n_rows, -1)
    whole = rows.view(f"V{rows.shape[1] * rows.itemsize}")[:, 0]
    blocks = (whole[start : start + _BLOCK].tolist() for start in range(0, len(whole), _BLOCK))
    content = np.fromiter((hash(row) for block in blocks for row in block), np.int64, len(whole))
    order = np.lexsort((trace.position, content))
    new = np.diff(content[order], prepend=0) != 0
    new[0] = True
    group, first = np.cumsum(new) - 1, order[new]
    elsewhere = new | (np.diff(trace.position[order], prepend=-1) != 0)
    positions, members = np.bincount(group, elsewhere), np.bincount(group)
    least = _PLACES * np.median(positions)
    ends = np.cumsum(members)
    suspects = np.flatnonzero(members >= least)
    suspects = suspects[(rows[first[suspects]] >= 0).any(axis=1)]
    chance = _by_chance(trace, first[suspects], members[suspects])
    suspects = suspects[members[suspects] >= np.floor(_PLACES * (1 + 2 * chance))]
    return sum(
        int(members[g])
        for g in suspects
        if positions[g] >= least or _other_histories(trace, rows, order[ends[g] - members[g] : ends[g]]) >= least
    )


def _by_chance(trace: Trace, some: np.ndarray, members: np.ndarray) -> np.ndarray:
    """How often each of the rows ``some`` would come if layers did not depend on each other, as all other rows show it.

    ``members`` says how often it comes.
    """
    expected = np.full(len(some), float(trace.n_rows))
    for layer in range(trace.n_layers):
        if 2 * _PLACES * expected.max(initial=0) < 1:  # more layers cannot matter
            break
        code = np.zeros(trace.n_rows, np.int64)
        for slot in range(trace.top_k):
            code = code * (trace.n_experts + 1) + trace.experts[:, layer, slot]
        _, place, counts = np.unique(code, return_inverse=True, return_counts=True)
        expected *= (counts[place[some]] - members + 1) / (trace.n_rows - members + 1)
    return expected


def _other_histories(trace: Trace, rows: np.ndarray, mine: np.ndarray) -> int:
    """How many of the rows ``mine`` follow another row than the first of them does, and one for the first."""
    before = mine[trace.position[mine] > trace.position[trace.offsets[trace.sequence[mine]]]] - 1
    return 1 + int(((rows[before] == rows[before[:1]]).mean(axis=1) < 1 / 2).sum()) if len(before) else 0
