"""What predictors cost: searching a table, clustering a prompt, a small net; on the GPU and on the host.

Each is timed at several sizes and reduced to the two numbers that the simulator charges by: a fixed time, and a rate
for the bytes that are read (search, net) or the products that are taken (clustering). Both come from a least-squares
line through the relative times, so that small sizes count as much as large ones.

On the GPU a search and a net cost the whole trip, as a run makes it (`realrun.measure.trips`), and while copies keep
the link busy, since predictors that prefetch do so. Iterations of clustering follow one another and need no answer: the
search after the last one brings it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from realrun.lookup import Fused, eager
from realrun.measure.machine import Key, Machine, Timing, Work
from realrun.measure.trips import trips
from sim.hardware import Hardware

Where = Literal["gpu", "host"]
TABLES = ((512, 2048), (2048, 2048), (2048, 4096), (4032, 4096), (16000, 4096))
"""Entries, as many as runs make look-ups ready for, and their dimensions; 2 x 2,000 of Mixtral's are DoMoE's tables."""
NETS = ((2048, 1024, 128), (4096, 1024, 48), (4096, 4096, 768))
"""Input, hidden layer and output of two-layer nets."""
PROMPTS = ((64, 2048), (256, 4096), (1024, 4096))
"""Rows and dimensions of prompts that are clustered around `CENTRES` centres."""
CENTRES = 8
NEAREST = 8


@dataclass(frozen=True)
class Line:
    """``fixed_ns + work / rate``, work in bytes or FLOP, rate in the same a nanosecond; the worst relative miss."""

    fixed_ns: float
    rate: float
    worst: float

    @staticmethod
    def through(points: Sequence[tuple[float, float]], most: float = math.inf) -> "Line":
        """The line through (work, ns) points that misses least in relative terms.

        Neither number is below 0, and the rate is at most ``most``: sizes that hardly differ in time say nothing of it.
        """
        work, ns = np.array(points, float).T
        # Dividing by the time makes each residual relative.
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / ns, work / ns], 1), np.ones(len(ns)), rcond=None)
        if slope <= 0:  # no size matters yet: launches are all
            fixed, slope = float(ns.max()), 0.0
        elif fixed < 0:
            fixed, slope = 0.0, float(np.mean(ns / work))
        if slope * most < 1:
            slope = 1 / most
            fixed = max(0.0, float(np.sum((ns - slope * work) / ns**2) / np.sum(1 / ns**2)))
        missed = np.abs((fixed + slope * work) / ns - 1)
        return Line(float(fixed), float(1 / max(slope, 1e-9)), float(missed.max()))


@dataclass(frozen=True)
class Costs:
    """One place: each timing by its size, in words, and the lines through those that are charged."""

    searches: dict[str, dict[str, Timing]]
    """Every way of searching, one search after the other."""
    cluster: dict[str, Timing]
    network: dict[str, Timing]
    answered: dict[str, dict[str, Timing]]
    """Whole trips to the GPU and back, by what is answered and whether the link is idle or busy; none on the host."""
    search_line: Line
    cluster_line: Line
    network_line: Line
    how: dict[str, str]
    """What is charged for ``search``, ``iteration`` and ``network``, in words."""


def lookup_costs(
    machine: Machine, where: Where, hardware: Hardware, tables: Sequence[tuple[int, int]] = TABLES
) -> Costs:
    """Time all three at every size, on the device of ``machine`` or on its host.

    ``hardware`` says what the GPU reaches at all. On the host the fastest way of searching is charged, taken over all
    sizes together.
    """
    most = (hardware.memory_bytes_per_s / 1e9, hardware.flops_per_s / 1e9) if where == "gpu" else (math.inf, math.inf)
    searches = search_times(machine, where, tables)
    fastest = min(searches, key=lambda way: sum(np.log(timing.ns) for timing in searches[way].values()))
    cluster = _times(machine, where, {shape: [_clustering(machine, where, *shape)] for shape in PROMPTS})
    network = _times(machine, where, {net: _network(machine, where, *net) for net in NETS})
    search, net, how, answered = searches[fastest], network, {"search": fastest, "network": "torch"}, {}
    if where == "gpu":
        idle, busy = trips(machine, hardware, tables, NETS)
        search, net = busy.searches, busy.nets
        trip = "from launch to answer, copies on the link"
        how = {"search": f"one, {trip}", "network": f"one, {trip}"}
        answered = {
            f"{what}, link {link}": {_words(size): timing for size, timing in times.items()}
            for link, found in (("idle", idle), ("busy", busy))
            for what, times in (("search", found.searches), ("network", found.nets))
        }
    element = 2 if where == "gpu" else 4
    return Costs(
        {way: {_words(size): timing for size, timing in times.items()} for way, times in searches.items()},
        {f"{_words(shape)}, {CENTRES} centres, an iteration": timing for shape, timing in cluster.items()},
        {_words(size): timing for size, timing in network.items()},
        answered,
        Line.through([(entries * dims * element, timing.ns) for (entries, dims), timing in search.items()], most[0]),
        Line.through([(2.0 * n * dims * (CENTRES + 1), timing.ns) for (n, dims), timing in cluster.items()], most[1]),
        Line.through([((a * b + b * c) * element, timing.ns) for (a, b, c), timing in net.items()]),
        how | {"iteration": "torch, one after the other"},
    )


def _words(size: tuple[int, ...]) -> str:
    """A table or a prompt is rows x dimensions, a net input - hidden layer - output."""
    return (" x " if len(size) == 2 else " - ").join(map(str, size))


def _times(machine: Machine, where: Where, work: Mapping[Key, Work]) -> dict[Key, Timing]:
    if where == "gpu":
        return machine.times(work)
    return machine.times_host({key: each[0] for key, each in work.items()})


def search_times(
    machine: Machine, where: Where, tables: Sequence[tuple[int, int]] = TABLES
) -> dict[str, dict[tuple[int, int], Timing]]:
    """Every way of searching the nearest of one table, by name, at every size (entries, dimensions)."""
    work: dict[tuple[str, tuple[int, int]], Work] = {}
    for shape in tables:
        searches = _gpu_searches(machine, *shape) if where == "gpu" else _host_searches(machine, *shape)
        work |= {(name, shape): each for name, each in searches.items()}
    ways: dict[str, dict[tuple[int, int], Timing]] = {}
    for (name, shape), taken in _times(machine, where, work).items():
        ways.setdefault(name, {})[shape] = taken
    return ways


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


def _host_searches(machine: Machine, entries: int, dims: int) -> dict[str, list[Callable[[], Any]]]:
    torch = machine.torch
    table = np.random.default_rng(0).standard_normal((entries, dims), dtype=np.float32)
    query = table[entries // 2].copy()
    tensor, vector = torch.from_numpy(table), torch.from_numpy(query)

    def numpy() -> Any:
        scores = table @ query
        return np.argpartition(scores, -NEAREST)[-NEAREST:]

    ways: dict[str, list[Callable[[], Any]]] = {
        "numpy": [numpy],
        "torch": [lambda: torch.mv(tensor, vector).topk(NEAREST)],
    }
    try:
        import faiss
    except ModuleNotFoundError:
        return ways
    index = faiss.IndexFlatIP(dims)
    index.add(table)
    ways["FAISS"] = [lambda: index.search(query[None], NEAREST)]
    return ways


def _clustering(machine: Machine, where: Where, rows: int, dims: int) -> Callable[[], Any]:
    """One iteration of k-means (Lloyd): the nearest centre of every row, then the mean of each centre's rows."""
    torch = machine.torch
    device = machine.device if where == "gpu" else "cpu"
    kind = torch.bfloat16 if where == "gpu" else torch.float32
    points = torch.randn(rows, dims, device=device, dtype=kind)
    centres = torch.randn(CENTRES, dims, device=device, dtype=kind)
    ones = torch.ones(rows, device=device, dtype=kind)

    def iteration() -> Any:
        nearest = (points @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        counts = torch.zeros(CENTRES, device=device, dtype=kind).index_add_(0, nearest, ones)
        return sums / counts.clamp(min=1)[:, None]

    return iteration


def _network(machine: Machine, where: Where, inner: int, hidden: int, out: int) -> list[Callable[[], Any]]:
    """A two-layer net on one row; on the GPU as a CUDA graph, which a fixed shape allows."""
    torch = machine.torch
    device = machine.device if where == "gpu" else "cpu"
    kind = torch.bfloat16 if where == "gpu" else torch.float32
    linear, relu = torch.nn.functional.linear, torch.relu
    row = torch.randn(1, inner, device=device, dtype=kind)

    def net() -> Callable[[], Any]:
        first = torch.randn(hidden, inner, device=device, dtype=kind)
        second = torch.randn(out, hidden, device=device, dtype=kind)
        return lambda: linear(relu(linear(row, first)), second)

    if where == "host":
        return [net()]
    size = 2 * hidden * (inner + out)
    return [machine.graph(net()) for _ in range(min(16, machine.copies(size)))]
