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
from collections.abc import Callable, Mapping, Sequence
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
    """One place: each timing by way and size, in words, and the lines through those that are charged."""

    searches: dict[str, dict[str, Timing]]
    """One search after the other."""
    clusters: dict[str, dict[str, Timing]]
    networks: dict[str, dict[str, Timing]]
    answered: dict[str, dict[str, Timing]]
    """Whole trips to the GPU and back, by what is answered and whether the link is idle or busy; none on the host."""
    search_line: Line
    cluster_line: Line
    network_line: Line
    how: dict[str, str]
    """What is charged for ``search``, ``iteration`` and ``network``, by how much the line misses it, and whether it is
    not to be trusted, in words."""


def lookup_costs(
    machine: Machine, where: Where, hardware: Hardware, tables: Sequence[tuple[int, int]] = TABLES
) -> LookupCosts:
    """Time all three at every size, on the device of ``machine`` or on its host.

    ``hardware`` says what the GPU reaches at all. On the host the way of each that is quickest over all sizes together
    is charged. Raises MemoryError if the host has no room for the tables.
    """
    on_gpu = where == "gpu"
    most = (hardware.memory_bytes_per_s / 1e9, hardware.flops_per_s / 1e9) if on_gpu else (math.inf, math.inf)
    searches, clusters, networks = (_gpu_ways if on_gpu else _host_ways)(machine, tables)
    takes = attrgetter("ns" if on_gpu else "low")
    search, cluster, net = (_quickest(ways) for ways in (searches, clusters, networks))
    charged = {"search": searches[search], "iteration": clusters[cluster], "network": networks[net]}
    how = {"search": search, "iteration": f"{cluster}, one after the other", "network": net}
    answered = {}
    if on_gpu:
        idle, busy = trips(machine, hardware, tables, NETS)
        charged |= {"search": busy.searches, "network": busy.nets}
        how |= dict.fromkeys(("search", "network"), "one, from launch to answer, copies on the link")
        answered = {
            f"{what}, link {link}": {_words(size): timing for size, timing in times.items()}
            for link, found in (("idle", idle), ("busy", busy))
            for what, times in (("search", found.searches), ("network", found.nets))
        }
    element = 2 if on_gpu else 4
    work: dict[str, Callable[..., float]] = {
        "search": lambda entries, dims: entries * dims * element,
        "iteration": lambda rows, dims: 2.0 * rows * dims * (CENTRES + 1),
        "network": lambda inner, hidden, out: (inner + out) * hidden * element,
    }
    lines: dict[str, Line] = {}
    for what, limit in zip(work, (*most, math.inf), strict=True):
        rising = sorted(((work[what](*size), timing) for size, timing in charged[what].items()), key=itemgetter(0))
        points = [(amount, takes(timing)) for amount, timing in rising]
        line = lines[what] = Line.through(points, limit)
        doubts = doubt(line, [ns for _, ns in points], [timing for _, timing in rising], rises=not on_gpu)
        how[what] += "" if on_gpu else ", 10th percentile"
        how[what] += f"; misses by {line.worst:.0%} at most" + "; " * bool(doubts) + doubts
    return LookupCosts(
        _in_words(searches), _in_words(clusters, f", {CENTRES} centres, an iteration"), _in_words(networks), answered,
        lines["search"], lines["iteration"], lines["network"], how,
    )  # fmt: skip


def _quickest(ways: Ways) -> str:
    """The way that takes least over all sizes together, as a rule and not at its best: threads may be in their way."""
    return min(ways, key=lambda way: sum(math.log(timing.ns) for timing in ways[way].values()))


def _in_words(ways: Mapping[str, Mapping[Dimensions, Timing]], more: str = "") -> dict[str, dict[str, Timing]]:
    return {way: {_words(size) + more: timing for size, timing in times.items()} for way, times in ways.items()}


def _words(size: Dimensions) -> str:
    """A table or a prompt is rows x dimensions, a net input - hidden layer - output."""
    return (" x " if len(size) == 2 else " - ").join(map(str, size))


def _gpu_ways(machine: Machine, tables: Sequence[tuple[int, int]]) -> tuple[Ways, Ways, Ways]:
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
    return searches, {"torch": machine.times(cluster)}, {"torch, CUDA graph": machine.times(nets)}


def _host_ways(machine: Machine, tables: Sequence[tuple[int, int]]) -> tuple[Ways, Ways, Ways]:
    """The same on the host, every library by itself."""
    torch = machine.torch
    most = max(entries * dims for entries, dims in tables)
    most = max(most, *(hidden * (inner + out) for inner, hidden, out in NETS))
    pool = _numbers(max(most, HOST_BYTES // 4 if machine.cuda else 0))
    cluster: dict[Dimensions, Work] = {shape: [_clustering(torch, "cpu", torch.float32, *shape)] for shape in PROMPTS}
    nets: dict[Dimensions, Work] = {net: _host_network(torch, pool, *net) for net in NETS}
    return (
        host_times(machine, _host_searches(machine, pool, tables)),
        host_times(machine, torch_ways(machine, cluster)),
        host_times(machine, torch_ways(machine, nets)),
    )


def _numbers(count: int) -> np.ndarray:
    """Random numbers on the host, float32."""
    return np.resize(np.random.default_rng(0).standard_normal(2**20, dtype=np.float32), count)


def _in_turn(pool: np.ndarray, count: int) -> list[np.ndarray]:
    """As many parts of ``count`` numbers as ``pool`` has, up to `MOST_INPUTS`."""
    return [pool[i * count : (i + 1) * count] for i in range(min(MOST_INPUTS, len(pool) // count))]


def _gpu_searches(machine: Machine, entries: int, dims: int) -> dict[str, list[Callable[[], Any]]]:
    tables = [machine.random(1, entries, dims) for _ in range(min(24, machine.copies(2 * entries * dims)))]
    query = machine.random(dims)

    def plain(table: Any) -> Callable[[], Any]:
        return lambda: eager(table, query, NEAREST)

    ways: dict[str, list[Callable[[], Any]]] = {"torch, eager": [plain(table) for table in tables]}
    if machine.cuda:
        ways["torch, CUDA graph"] = [machine.graph(plain(table)) for table in tables]
        fused = [Fused(table, NEAREST) for table in tables]
        for one in fused:
            one.query.copy_(query)
        ways["Triton, CUDA graph"] = [one.graph() for one in fused]
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
    return [machine.graph(partial(_forward, machine.torch, row, *net)) for net in nets]


def _host_network(torch: Any, pool: np.ndarray, inner: int, hidden: int, out: int) -> Work:
    """The same on the host, weights parts of ``pool``."""
    row, first = torch.ones(1, inner), hidden * inner
    parts = [torch.from_numpy(part) for part in _in_turn(pool, first + hidden * out)]
    return [
        partial(_forward, torch, row, part[:first].view(hidden, inner), part[first:].view(out, hidden))
        for part in parts
    ]


def _forward(torch: Any, row: Any, first: Any, second: Any) -> Any:
    linear = torch.nn.functional.linear
    return linear(torch.relu(linear(row, first)), second)
