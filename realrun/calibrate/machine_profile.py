"""Measure a machine and write its profile: what the simulator's ``--hardware`` loads.

Without the figures of its memory, its arithmetic and its link a machine has no profile. Every other part may be left
out: what does not fit, or fails, is named under ``details``, and the simulator has a formula or another figure for it.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from ground.errors import InputError
from ground.files import atomic_path, keep_apart
from ground.text import printable
from realrun.calibrate.copies import PLACES, SIZES, buffers, copy_times, together
from realrun.calibrate.ffn_times import ROWS, FfnTimes, Used, ffn_times, ffns
from realrun.calibrate.hosted_times import host_times
from realrun.calibrate.layer_times import CONTEXTS, PROMPTS, LayerTimes, charged, in_bf16, kind, layer_times, layers_of
from realrun.calibrate.lookup_costs import TABLES, Costs, Where, lookup_costs
from realrun.calibrate.loop_overheads import FIGURES, Loop, loop_times, shrunk
from realrun.calibrate.machine import Machine
from realrun.calibrate.memory import bandwidth
from realrun.calibrate.products import Launches, arithmetic, launches
from realrun.calibrate.profile_text import Table, curve, figure, spread, to_toml
from realrun.calibrate.timing import Timing
from realrun.engine.experts import AT_ONCE
from sim.machine.hardware import Hardware
from sim.model.spec import ModelSpec, builtin_models, load_model
from sim.run.scene import code_version
from traces.arrays import shown

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Thoroughness:
    """How much to measure: sizes of copies, rows of FFNs, contexts and prompts of layers, tables, buffers, hidden size
    and width of an expert on the host, runs; how often loops are timed again later, since a host shared with others has
    slow minutes.
    """

    copies: tuple[int, ...] = SIZES
    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = CONTEXTS
    prompts: tuple[int, ...] = PROMPTS
    tables: tuple[tuple[int, int], ...] = TABLES
    memory: int = 2**31
    square: int = 8192
    product: tuple[int, int, int] = (2048, 4096, 14336)
    together: int = SIZES[-2]
    places: tuple[int, int] = PLACES
    hosted: tuple[int, int] = (4096, 14336)
    repeats: int = 20
    later: int = 2


FULL = Thoroughness()
QUICK = Thoroughness(
    rows=(1, 16, 256), contexts=(64, 1024, 4096), prompts=(1, 16, 128, 1024), tables=TABLES[1:4], repeats=8, later=0
)
TINY = Thoroughness(
    copies=(2**14, 2**16, 2**18),
    rows=(1, 2, 4),
    contexts=(8, 32),
    prompts=(1, 8),
    tables=((50, 64), (200, 64)),
    memory=2**22,
    square=128,
    product=(64, 64, 128),
    together=2**18,
    places=(2**20, 2**20),
    hosted=(64, 128),
    repeats=3,
)
"""For a CPU, which is there to try things out."""


def calibrate_command(out: Path, models: Sequence[str] | None, *, quick: bool, device: str) -> None:
    """Measure, write ``out``, print what matters. Raises InputError before any work for what cannot be."""
    keep_apart(models or [], {"--out": out})
    specs = [load_model(name) for name in models or builtin_models()]
    machine = Machine(device)
    effort = TINY if not machine.cuda else QUICK if quick else FULL
    text = calibrate(machine, specs, effort, printable(shown(out.stem)))
    with atomic_path(out) as part:
        part.write_text(text, encoding="utf-8")
    _print(Hardware.parse(text, str(out)), out)


def calibrate(machine: Machine, models: Sequence[ModelSpec], effort: Thoroughness, name: str) -> str:
    """The profile of ``machine`` as TOML text that `Hardware` reads; progress goes to standard error.

    On a CPU FFNs and layers of ``models`` are not timed: the simulator models a GPU's.
    """
    machine.repeats = effort.repeats
    begin = time.monotonic()
    facts = machine.describe()
    source = f"{facts['device']}, {facts['date']}, torch {facts['torch']}"
    profile: Table = {"name": name, "description": f"{facts['device']}, measured by realrun calibrate"}
    profile["gpu"] = _step("memory and arithmetic", lambda: _gpu(machine, effort, source))
    starts = _step("launches", lambda: launches(machine))
    profile["link"], details = _step("copies", lambda: _link(machine, effort, source, facts.get("link", "as found")))
    parts, blocks = Parts(machine), _Blocks(machine, effort, source)
    if machine.cuda:
        profile["ffn"] = _ffns(parts, blocks, models)
        profile["layer"] = _layers(parts, blocks, models)
    profile["software"] = _software(starts, blocks, source)
    loops: dict[str, Loop] = {}
    if machine.cuda:
        loops = _loops(parts, models, profile, source)
        details["not_charged"] = _not_charged(parts, models, effort)
    hardware = Hardware.from_dict(profile)
    if (found := parts.try_to("look-ups", lambda: _lookups(machine, effort, source, hardware))) is not None:
        profile["lookups"], details["lookups"] = found
    if (found := parts.try_to("experts on the host", lambda: _host(machine, effort, source))) is not None:
        profile["host"], details["host_us"] = found
    for _ in range(effort.later if machine.cuda else 0):
        loops = _loops(parts, models, profile, source, loops)
    if loops:
        details["loop_us"] = {name: _rounded(loop) for name, loop in loops.items()}
    details["left_out"] = parts.left_out
    details["launches_us"] = {key: str(value) for key, value in vars(starts).items()}
    details |= blocks.details
    seconds = time.monotonic() - begin
    noise = {"host_interrupted": machine.interrupted()}
    details["machine"] = facts | noise | {"code": code_version(), "seconds": round(seconds, 1)}
    profile["details"] = details
    comment = (
        f"Measured by `python -m realrun calibrate` in {seconds:.0f} s: {', '.join(map(': '.join, facts.items()))}.\n"
        "Medians; what lies under details is for a person: [median, 10th, 90th percentile] in microseconds."
    )
    return to_toml(profile, comment)


def _step(what: str, work: Callable[[], _Result]) -> _Result:
    """Do one part, and say on standard error how long it took."""
    begin = time.monotonic()
    result = work()
    print(f"{what}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    return result


class Parts:
    """Parts that a profile can do without.

    Attributes:
        left_out: the reason of each that was left out, by name.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.left_out: dict[str, str] = {}

    def try_to(self, what: str, work: Callable[[], _Result]) -> _Result | None:
        """As `_step`; None if it cannot be done here. Raises InputError if the device does not go on after that."""
        try:
            return _step(what, work)
        except (InputError, RuntimeError, MemoryError, OSError, ImportError) as failed:
            reason = _first_line(failed)
        self.left_out[what] = reason
        print(f"{what}: left out: {reason}", file=sys.stderr, flush=True)
        gc.collect()  # its memory
        try:
            self.machine.synchronize()
        except RuntimeError as broken:
            raise InputError(f"{what}: {reason}; the device does not go on: {_first_line(broken)}") from None
        return None


def _first_line(failed: BaseException) -> str:
    return next(iter(str(failed).splitlines()), type(failed).__name__)


def _gpu(machine: Machine, effort: Thoroughness, source: str) -> Table:
    memory, products = bandwidth(machine, effort.memory), arithmetic(machine, effort.square, *effort.product)
    most, top = max(memory.copy, memory.read), max(products.square, products.ffn)
    square = f"product of {effort.square} squared"
    return {
        "memory_gb": figure(max(memory.total_gb, 1e-3), f"as the driver says, {source}"),
        "bandwidth_gbps": figure(
            most, f"copy within the device, {memory.copy:.0f}, or read, {memory.read:.0f}; {source}"
        ),
        "bandwidth_fraction": figure(min(1.0, max(0.01, memory.read / most)), f"matrix-vector product; {source}"),
        "tflops": figure(top, f"bf16, random numbers, {square}; {source}"),
        "tflops_fraction": figure(
            min(1.0, max(0.01, products.ffn / top)), f"{' x '.join(map(str, effort.product))}; {source}"
        ),
    }


def _link(machine: Machine, effort: Thoroughness, source: str, name: str) -> tuple[Table, Table]:
    memory = buffers(machine, effort.copies, effort.places)
    there = copy_times(machine, "h2d", memory, effort.copies)
    back = copy_times(machine, "d2h", memory, effort.copies)
    slow_there = copy_times(machine, "h2d", memory, effort.copies, pinned=False)
    slow_back = copy_times(machine, "d2h", memory, effort.copies, pinned=False)
    del memory
    shared = together(machine, effort.together)
    link = {
        "name": name,
        "h2d": curve(there.alone, f"pinned host to device, one alone; {source}"),
        "queued": curve(there.queued, f"pinned host to device, one in a row; {source}"),
        "d2h": curve(back.alone, f"device to pinned host, one alone; {source}"),
        "pageable": curve(slow_there.alone, f"host to device from memory that is not pinned; {source}"),
    }
    details = {
        "copies_us": {
            "h2d": spread(there.alone), "h2d_queued": spread(there.queued), "d2h": spread(back.alone),
            "d2h_queued": spread(back.queued), "pageable": spread(slow_there.alone),
            "pageable_queued": spread(slow_there.queued), "pageable_d2h": spread(slow_back.alone),
            "pageable_d2h_queued": spread(slow_back.queued),
        },
        "together_gbps": {key: round(value, 2) for key, value in vars(shared).items()},
    }  # fmt: skip
    return link, details


class _Blocks:
    """FFNs and layers as a run computes them, and FFNs as plain products for comparison."""

    def __init__(self, machine: Machine, effort: Thoroughness, source: str) -> None:
        self.machine, self.effort, self.source = machine, effort, source
        self.least_ffn: list[Timing] = []
        self.least_layer: list[Timing] = []
        self.details: dict[str, Table] = {"ffn_us": {}, "layer_us": {}}

    def ffns(self, found: Sequence[Used]) -> list[Table]:
        """The profile's ``ffn``."""
        times = ffn_times(self.machine, found, self.effort.rows)
        return [self._ffn(used, times[used.ffn]) for used in found]

    def _ffn(self, used: Used, times: FfnTimes) -> Table:
        ffn = used.ffn
        self.least_ffn.append(times.charged[min(times.charged)])
        ways = {"times": times.charged, **({"waited": times.waited} if times.waited else {}), **times.others}
        self.details["ffn_us"][f"{ffn.hidden} x {ffn.width}"] = {name: spread(way) for name, way in ways.items()}
        sizes = {"hidden": ffn.hidden, "width": ffn.width, "matrices": ffn.matrices}
        how = {
            "routed": f"routed experts as a run computes them, {used.model.top_k} at once at one row, "
            f"{AT_ONCE} one after the other at more",
            "shared": "shared experts as a run computes them, launched beforehand",
            "dense": "dense ones as a run computes them",
        }
        table: Table = sizes | curve(times.charged, f"{how[used.use]}, not cached; {self.source}")
        if len(times.waited) > 1:
            table["waited"] = curve(times.waited, f"one routed expert, launched beforehand, not cached; {self.source}")
        return table

    def layer(self, model: ModelSpec) -> Table:
        """One entry of the profile's ``layer``."""
        times = layer_times(self.machine, model, self.effort.contexts, self.effort.prompts)
        self.least_layer.append(min(times.decode.values(), key=lambda t: t.ns))
        hidden, shape, experts = kind(model)
        self.details["layer_us"][f"{hidden}, {shape}, {experts}"] = _layer_spreads(times)
        sizes = {"hidden": hidden, "attention": shape, "experts": experts}
        source = f"a CUDA graph of one row, a prompt's kernels, launched beforehand, not cached; {self.source}"
        return sizes | {"decode": curve(times.decode, source), "prefill": curve(times.prefill, source)}


def _layer_spreads(times: LayerTimes) -> Table:
    return {
        "decode": spread(times.decode),
        "prefill": spread(times.prefill),
        "prefill_launched": spread(times.launched),
    }


def _ffns(parts: Parts, blocks: _Blocks, models: Iterable[ModelSpec]) -> list[Table]:
    """The profile's ``ffn``; if all of them together do not fit, one after the other."""
    found = ffns(models)
    together = parts.try_to("FFNs", lambda: blocks.ffns(found))
    if together is not None:
        return together
    alone = [parts.try_to(f"FFN {used.ffn.hidden} x {used.ffn.width}", partial(blocks.ffns, [used])) for used in found]
    return [table for tables in alone for table in tables or []]


def _layers(parts: Parts, blocks: _Blocks, models: Iterable[ModelSpec]) -> list[Table]:
    """The profile's ``layer``."""
    every = layers_of(filter(charged, models))
    tables = [parts.try_to(f"layer {_of(model)}", partial(blocks.layer, model)) for model in every]
    return [table for table in tables if table is not None]


def _not_charged(parts: Parts, models: Iterable[ModelSpec], effort: Thoroughness) -> Table:
    """Times, in bf16, of the dimensions of models that the simulator has its formula for; for a person.

    Their experts are not stored in bf16, or their layers have windows or an encoder, or other weights.
    """
    models = list(models)
    known_ffns, known_layers = {used.ffn for used in ffns(models)}, {kind(model) for model in models if charged(model)}
    ffn_us, layer_us = Table(), Table()
    for used in ffns(map(in_bf16, models)):
        if used.ffn not in known_ffns:
            what = f"{used.ffn.hidden} x {used.ffn.width}, {used.use}, {used.model.name}"
            taken = parts.try_to(f"FFN {what} as bf16", partial(ffn_times, parts.machine, [used], effort.rows))
            if taken is not None:
                ffn_us[what] = spread(taken[used.ffn].charged)
    for model in layers_of(map(in_bf16, models)):
        if kind(model) not in known_layers:
            what = f"{_of(model)}, {model.name}"
            some = effort.contexts[::2], effort.prompts[::2]
            times = parts.try_to(f"layer {what} as bf16", partial(layer_times, parts.machine, model, *some))
            if times is not None:
                layer_us[what] = _layer_spreads(times)
    return {"ffn_us": ffn_us, "layer_us": layer_us}


def _of(model: ModelSpec) -> str:
    return ", ".join(map(str, kind(model)))


def _software(starts: Launches, blocks: _Blocks, source: str) -> Table:
    """What launching costs blocks that were not measured: nothing above their floors where graphs are replayed."""
    ffn = min((t.ns for t in blocks.least_ffn), default=starts.kernel.ns)
    layer = min((t.ns for t in blocks.least_layer), default=starts.kernel.ns)
    return {
        "kind": "CUDA graphs" if blocks.machine.cuda else "eager",
        "operation_us": figure(starts.graphed.ns / 1e3, f"one small kernel in a graph; {source}"),
        "expert_floor_us": figure(ffn / 1e3, f"the shortest FFN that was timed; {source}"),
        "layer_floor_us": figure(layer / 1e3, f"the shortest layer that was timed; {source}"),
        "route_wait_us": figure(starts.wait.ns / 1e3, f"host waits for one kernel, then launches the next; {source}"),
        "waits_for_route": True,
    }


def _loops(
    parts: Parts, models: Iterable[ModelSpec], profile: Table, source: str, earlier: Mapping[str, Loop] | None = None
) -> dict[str, Loop]:
    """Give each layer of ``profile`` the engine's own time, and its software their medians; by model, what was timed.

    Of several models with the same layers the first one's is given. What was timed ``earlier`` counts where it took
    less. What the engine cannot run here, or the device cannot hold, is left out and said.
    """
    hardware, models = Hardware.from_dict(profile), list(models)
    layers = {(table["hidden"], table["attention"], table["experts"]): table for table in profile["layer"]}
    found = dict(earlier or {})
    for model in models:
        if charged(model) and kind(model) in layers:
            what = f"loop of {model.name}" + ", again" * (earlier is not None)
            rounds = 2 if earlier is None else 1
            loop = parts.try_to(what, partial(loop_times, parts.machine, model, hardware, rounds=rounds))
            if loop is not None:
                found[model.name] = loop.or_quieter(found.get(model.name, loop))
                parts.left_out.pop(f"loop of {model.name}", None)
    timed = [model for model in models if model.name in found]
    for model in reversed(timed):
        layers[kind(model)] |= _loop_figures([found[model.name]], f"loop of a real run, {model.name}; {source}")
    if found:
        profile["software"] |= _loop_figures(list(found.values()), f"median of {', '.join(found)}; {source}")
    return found


def _rounded(loop: Loop) -> Table:
    return {key: round(value, 2) for key, value in asdict(loop).items()}


def _loop_figures(loops: Sequence[Loop], source: str) -> Table:
    return {name: figure(median(getattr(loop, name) for loop in loops), source) for name in FIGURES}


def _lookups(machine: Machine, effort: Thoroughness, source: str, hardware: Hardware) -> tuple[Table, Table]:
    tables, details = Table(), Table()
    places: tuple[tuple[Where, int], ...] = (("gpu", 2), ("host", 4))
    for where, element_bytes in places:
        costs = lookup_costs(machine, where, hardware, effort.tables)
        tables[where] = _costs(costs, element_bytes, source)
        details[where] = {
            "search_us": {way: spread(times) for way, times in costs.searches.items()},
            "cluster_us": {way: spread(times) for way, times in costs.clusters.items()},
            "network_us": {way: spread(times) for way, times in costs.networks.items()},
            "answered_us": {what: spread(times) for what, times in costs.answered.items()},
        }
    return tables, details


def _costs(costs: Costs, element_bytes: int, source: str) -> Table:
    """As ``sim.machine.hardware.Lookups`` has them: bytes a nanosecond are GB/s, FLOP a nanosecond GFLOP/s."""
    search, cluster, network = costs.search_line, costs.cluster_line, costs.network_line
    most, how = 1e8, costs.how  # a rate that no size showed
    return {
        "element_bytes": element_bytes,
        "search_us": figure(search.fixed_ns / 1e3, f"{how['search']}; {source}"),
        "iteration_us": figure(cluster.fixed_ns / 1e3, f"{how['iteration']}; {source}"),
        "network_us": figure(network.fixed_ns / 1e3, f"{how['network']}; {source}"),
        "gbps": figure(min(most, search.rate), f"slope of the search over bytes, {how['search']}; {source}"),
        "gflops": figure(min(most, cluster.rate), f"slope of clustering over FLOPs, {how['iteration']}; {source}"),
    }


def _host(machine: Machine, effort: Thoroughness, source: str) -> tuple[Table, Table]:
    hidden, width = effort.hosted
    whole = load_model("mixtral-8x7b")
    size = 2 * hidden * width * whole.expert_matrices
    model = replace(whole, hidden=hidden, expert_ffn=width, expert_bytes=(size,) * whole.routed_layers)
    times = host_times(machine, shrunk(model, 1))
    what = f"an expert of {hidden} x {width}, one row, threads: {times.charged}"
    table = {
        "host_gbps": figure(max(1e-3, times.gbps(busy=False)), f"{what}, link idle; {source}"),
        "shared_gbps": figure(max(1e-3, times.gbps(busy=True)), f"{what}, beside copies to the device; {source}"),
    }
    details = {
        f"threads: {threads}": spread({"link idle": alone.idle, "link busy": alone.busy})
        for threads, alone in times.threads.items()
    }
    return table, details


def _print(hardware: Hardware, out: Path) -> None:
    """The profile's figures as a table on standard output."""
    from rich.console import Console

    from sim.report.catalogue import machine_table

    Console().print(machine_table(out))
    print(printable(f"{out}: load it with --hardware {out}"), file=sys.stderr)
