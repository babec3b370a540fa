"""What predictors cost: searching a table, clustering a prompt, a small net; on the GPU and on the host.

Each is timed at several sizes and reduced to the two numbers that the simulator charges by
(`realrun.calibrate.lines`): a fixed time, and a rate for the bytes that are read (search, net) or the products that are
taken (clustering).

On the GPU a search and a net cost the whole trip, as a run makes it (`realrun.calibrate.trips`), and while copies keep
the link busy, since predictors that prefetch do so. Iterations of clustering follow one another and need no answer: the
search after the last one brings it.

On the host each library has its turn by itself (`realrun.calibrate.threads`), torch and FAISS with one thread, half of
them and all. Whatever has the least median is charged, with the 10th percentile of its times: others who share the
processors only ever add. Tables and nets are used in turn, so that none is found in a cache of either place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np

from realrun.calibrate.lines import Line, doubt
from realrun.calibrate.machine import Machine
from realrun.calibrate.threads import Way, by_threads, host_times, torch_ways
from realrun.calibrate.timing import Timing, Work
from realrun.calibrate.trips import Dimensions, trips
from realrun.engine.layers import feed_forward
from realrun.engine.lookup import Fused, eager
from sim.machine.hardware import Hardware

Where = Literal["gpu", "host"]
TABLES = ((512, 2048), (2048, 2048), (2048, 4096), (4032, 4096), (16000, 4096))
"""Entries, as many as runs make look-ups ready for, and their dimensions; 2 x 2,000 of Mixtral's are DoMoE's tables."""
NETS = ((2048, 1024, 128), (4096, 1024, 48), (4096, 4096, 768))
"""Input, hidden layer and output of two-layer nets."""
PROMPTS = ((64, 2048), (256, 4096), (1024, 4096))
"""Rows and dimensions of prompts that are clustered around `CENTRES` centres."""
CENTRES = 8
NEAREST = 8
HOST_BYTES = 2**29
"""What tables and nets on the host that are used in turn cover: more than its caches hold."""
MOST_INPUTS = 24
"""Of tables or nets that are used in turn."""

Ways = dict[str, dict[Dimensions, Timing]]
"""Times by way and size."""


@dataclass(frozen=True)
class LookupCosts:
    """One place, by ``search`` (one after the other), ``cluster`` (an iteration) and ``network``."""

    times: dict[str, dict[str, dict[str, Timing]]]
    """Each timing by way and size, in words. Under ``answered`` whole trips to the GPU and back, by what is answered
    and whether the link is idle or busy; none on the host."""
    lines: dict[str, Line]
    """Through the times that are charged."""
    how: dict[str, str]
    """What is charged, by how much the line misses it, and whether it is not to be trusted, in words."""


def lookup_costs(
    machine: Machine, where: Where, hardware: Hardware, tables: Sequence[tuple[int, int]] = TABLES
) -> LookupCosts:
    """Time all three at every size, on the device of ``machine`` or on its host.

    ``hardware`` says what the GPU reaches at all. On the host the way of each that is quickest over all sizes together
    is charged. Raises MemoryError if the host has no room for the tables.
    """
    on_gpu = where == "gpu"
    element, takes = (2, attrgetter("ns")) if on_gpu else (4, attrgetter("low"))
    ways = (_gpu_ways if on_gpu else _host_ways)(machine, tables)
    how = {what: _quickest(each) for what, each in ways.items()}
    charged = {what: ways[what][way] for what, way in how.items()}
    how["cluster"] += ", one after the other"
    ways["answered"] = {}
    if on_gpu:
        taken, sizes = trips(machine, hardware, tables, NETS), {"search": tables, "network": NETS}
        ways["answered"] = {
            f"{what}, link {link}": {size: taken[size, busy] for size in sizes[what]}
            for busy, link in ((False, "idle"), (True, "busy"))
            for what in sizes
        }
        charged |= {what: ways["answered"][f"{what}, link busy"] for what in sizes}
        how |= dict.fromkeys(sizes, "one, from launch to answer, copies on the link")
    work: dict[str, tuple[Callable[..., float], float]] = {
        "search": (lambda entries, dims: entries * dims * element, hardware.memory_bytes_per_s / 1e9),
        "cluster": (lambda rows, dims: 2.0 * rows * dims * (CENTRES + 1), hardware.flops_per_s / 1e9),
        "network": (lambda inner, hidden, out: (inner + out) * hidden * element, math.inf),
    }
    lines: dict[str, Line] = {}
    for what, (of, most) in work.items():
        rising = sorted(((of(*size), timing) for size, timing in charged[what].items()), key=itemgetter(0))
        points = [(amount, takes(timing)) for amount, timing in rising]
        line = lines[what] = Line.through(points, most if on_gpu else math.inf)
        doubts = doubt(line, [ns for _, ns in points], [timing for _, timing in rising], rises=not on_gpu)
        how[what] += "" if on_gpu else ", 10th percentile"
        how[what] += f"; misses by {line.worst:.0%} at most" + "; " * bool(doubts) + doubts
    more = {"cluster": f", {CENTRES} centres, an iteration"}
    times = {what: _in_words(each, more.get(what, "")) for what, each in ways.items()}
    return LookupCosts(times, lines, how)


def _quickest(ways: Ways) -> str:
    """The way that takes least over all sizes together, as a rule and not at its best: threads may be in their way."""
    return min(ways, key=lambda way: sum(math.log(timing.ns) for timing in ways[way].values()))


def _in_words(ways: Ways, more: str) -> dict[str, dict[str, Timing]]:
    """Sizes in words: a table or a prompt is rows x dimensions, a net input - hidden layer - output."""

    def words(size: Dimensions) -> str:
        return (" x " if len(size) == 2 else " - ").join(map(str, size)) + more

    return {way: {words(size): timing for size, timing in times.items()} for way, times in ways.items()}


def _gpu_ways(machine: Machine, tables: Sequence[tuple[int, int]]) -> dict[str, Ways]:
    """Searches, iterations of clustering and nets on the device."""
    torch, work = machine.torch, dict[tuple[str, Dimensions], Work]()
    for shape in tables:
        work |= {(name, shape): each for name, each in _gpu_searches(machine, *shape).items()}
    searches: Ways = {}
    for (name, size), taken in machine.times(work).items():
        searches.setdefault(name, {})[size] = taken
    cluster: dict[Dimensions, Work] = {
        shape: [_clustering(torch, machine.device, torch.bfloat16, *shape)] for shape in PROMPTS
    }
    nets: dict[Dimensions, Work] = {net: _gpu_network(machine, *net) for net in NETS}
    return {
        "search": searches,
        "cluster": {"torch": machine.times(cluster)},
        "network": {"torch, CUDA graph": machine.times(nets)},
    }


def _host_ways(machine: Machine, tables: Sequence[tuple[int, int]]) -> dict[str, Ways]:
    """The same on the host, every library by itself."""
    torch = machine.torch
    most = max(entries * dims for entries, dims in tables)
    most = max(most, *(hidden * (inner + out) for inner, hidden, out in NETS))
    drawn = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)
    pool = np.resize(drawn, max(most, HOST_BYTES // 4 if machine.cuda else 0))
    cluster: dict[Dimensions, Work] = {shape: [_clustering(torch, "cpu", torch.float32, *shape)] for shape in PROMPTS}
    nets: dict[Dimensions, Work] = {net: _host_network(torch, pool, *net) for net in NETS}
    return {
        "search": host_times(machine, _host_searches(machine, pool, tables)),
        "cluster": host_times(machine, torch_ways(machine, cluster)),
        "network": host_times(machine, torch_ways(machine, nets)),
    }


def _in_turn(pool: np.ndarray, count: int) -> list[np.ndarray]:
    """As many parts of ``count`` numbers as ``pool`` has, up to `MOST_INPUTS`."""
    return [pool[i * count : (i + 1) * count] for i in range(min(MOST_INPUTS, len(pool) // count))]


def _gpu_searches(machine: Machine, entries: int, dims: int) -> dict[str, list[Callable[[], Any]]]:
    tables = [machine.random(1, entries, dims) for _ in range(min(MOST_INPUTS, machine.copies(2 * entries * dims)))]
    query = machine.random(dims)
    plain: list[Callable[[], Any]] = [partial(eager, table, query, NEAREST) for table in tables]
    ways = {"torch, eager": plain}
    if machine.cuda:
        ways["torch, CUDA graph"] = [machine.graph(one) for one in plain]
        ways["Triton, CUDA graph"] = [Fused(table, query, NEAREST).graph() for table in tables]
    return ways


def _host_searches(machine: Machine, pool: np.ndarray, tables: Sequence[tuple[int, int]]) -> list[Way[Dimensions]]:
    """Every library's way of searching tables that are parts of ``pool``."""
    torch = machine.torch

    def ways(search: Callable[[np.ndarray], Any]) -> dict[Dimensions, Work]:
        return {
            (entries, dims): [partial(search, part.reshape(entries, dims)) for part in _in_turn(pool, entries * dims)]
            for entries, dims in tables
        }

    def by_numpy(table: np.ndarray) -> Any:
        scores = table @ table[0]
        return np.argpartition(scores, -NEAREST)[-NEAREST:]

    def by_torch(table: np.ndarray) -> Any:
        tensor = torch.from_numpy(table)
        return torch.mv(tensor, tensor[0]).topk(NEAREST)

    found = [Way("NumPy", ways(by_numpy)), *torch_ways(machine, ways(by_torch))]
    try:
        import faiss
    except ModuleNotFoundError:
        return found

    def by_faiss(table: np.ndarray) -> Any:
        return faiss.knn(table[:1], table, NEAREST, metric=faiss.METRIC_INNER_PRODUCT)

    return [*found, *by_threads("FAISS", faiss.omp_set_num_threads, faiss.omp_get_max_threads(), ways(by_faiss))]


def _clustering(torch: Any, device: Any, kind: Any, rows: int, dims: int) -> Callable[[], Any]:
    """One iteration of k-means (Lloyd): the nearest centre of every row, then the mean of each centre's rows."""
    points = torch.randn(rows, dims, device=device, dtype=kind)
    centres = torch.randn(CENTRES, dims, device=device, dtype=kind)
    ones = torch.ones(rows, device=device, dtype=kind)

    def iteration() -> Any:
        nearest = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.zeros(CENTRES, device=device, dtype=kind).index_add_(0, nearest, ones)
        return sums / counts.clamp(min=1)[:, None]

    return iteration


def _gpu_network(machine: Machine, inner: int, hidden: int, out: int) -> Work:
    """A two-layer net on one row as a CUDA graph, which a fixed shape allows."""
    row = machine.random(1, inner)
    count = min(16, machine.copies(2 * hidden * (inner + out)))
    nets = [(machine.random(hidden, inner), machine.random(out, hidden)) for _ in range(count)]
    return [machine.graph(partial(feed_forward, row, *net)) for net in nets]


def _host_network(torch: Any, pool: np.ndarray, inner: int, hidden: int, out: int) -> Work:
    """The same on the host, weights parts of ``pool``."""
    row, first = torch.ones(1, inner), hidden * inner
    parts = [torch.from_numpy(part) for part in _in_turn(pool, first + hidden * out)]
    return [
        partial(feed_forward, row, part[:first].view(hidden, inner), part[first:].view(out, hidden)) for part in parts
    ]
