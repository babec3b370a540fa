"""Measure a machine and write its profile: what the simulator's ``--hardware`` loads.

Without the figures of its memory, its arithmetic and its link a machine has no profile. Every other part may be left
out: what does not fit, or fails, is named under ``details``, and the simulator has a formula or another figure for it.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from ground.files import atomic_path, keep_apart
from ground.text import printable
from realrun.calibrate.block_tables import Blocks, ffn_tables, layer_tables, not_charged
from realrun.calibrate.copies import buffers, copy_times, shared_rates
from realrun.calibrate.demand_acts import demand_acts
from realrun.calibrate.host_acts import host_acts
from realrun.calibrate.hosted_times import HostedRates, hosted_times
from realrun.calibrate.layer_times import charged, kind
from realrun.calibrate.lookup_costs import LookupCosts, Where, lookup_costs
from realrun.calibrate.loop_times import LoopTimes, loop_times, shrunk
from realrun.calibrate.machine import Machine
from realrun.calibrate.memory import bandwidth
from realrun.calibrate.parts import Parts, step
from realrun.calibrate.products import Launches, arithmetic, launches
from realrun.calibrate.profile_text import Table, curve, figure, spread, to_toml
from realrun.calibrate.thoroughness import FULL, QUICK, TINY, Thoroughness
from realrun.device.copy_link import PIECES_AHEAD
from realrun.engine.small_scene import scaled
from sim.machine.hardware import Hardware
from sim.machine.loop_overheads import LOOP_FIGURES
from sim.run.scene import code_version
from traces.arrays import shown
from traces.models.known import builtin_models, model_spec
from traces.models.spec import ModelSpec


def calibrate_command(out: Path, models: Sequence[str] | None, *, quick: bool, device: str) -> None:
    """Measure, write ``out``, print what matters. Raises InputError before any work for what cannot be."""
    keep_apart(models or [], {"--out": out})
    specs = [model_spec(name) for name in models or builtin_models()]
    machine = Machine(device)
    thorough = TINY if not machine.cuda else QUICK if quick else FULL
    text = calibrate(machine, specs, thorough, printable(shown(out.stem)))
    with atomic_path(out) as part:
        part.write_text(text, encoding="utf-8")
    _print(out)


def _print(out: Path) -> None:
    """The profile's figures as a table on standard output."""
    from rich.console import Console

    from sim.report.catalogue import machine_table

    Console().print(machine_table(out))
    print(printable(f"{out}: load it with --hardware {out}"), file=sys.stderr)


def calibrate(machine: Machine, models: Sequence[ModelSpec], thorough: Thoroughness, name: str) -> str:
    """The profile of ``machine`` as TOML text that `Hardware` reads; progress goes to standard error.

    On a CPU FFNs and layers of ``models`` are not timed: the simulator models a GPU's.
    """
    machine.repeats = thorough.repeats
    begin = time.monotonic()
    facts = machine.describe()
    source = f"{facts['device']}, {facts['date']}, torch {facts['torch']}"
    profile: Table = {"name": name, "description": f"{facts['device']}, measured by realrun calibrate"}
    profile["gpu"] = step("memory and arithmetic", lambda: _gpu(machine, thorough, source))
    starts = step("launches", lambda: launches(machine))
    profile["link"], details = step("copies", lambda: _link(machine, thorough, source, facts.get("link", "as found")))
    parts, blocks = Parts(machine), Blocks(machine, thorough, source)
    if machine.cuda:
        profile["ffn"] = ffn_tables(parts, blocks, models)
        profile["layer"] = layer_tables(parts, blocks, models)
    profile["software"] = _software(starts, blocks, source)
    if blocks.eager_ffn and blocks.eager_layer:
        profile["eager"] = _eager(starts, blocks, source)
    loops: dict[str, LoopTimes] = {}
    if machine.cuda:
        loops = _loops(parts, models, profile, source)
        details["not_charged"] = not_charged(parts, models, thorough)
    hardware = Hardware.from_dict(profile)
    if machine.cuda:
        details["host_acts_ns"] = _host_thread(parts, models, hardware, profile, source)
    if (found := parts.try_to("look-ups", lambda: _lookups(machine, thorough, source, hardware))) is not None:
        profile["lookups"], details["lookups"] = found
    if (found := parts.try_to("experts on the host", lambda: _host(machine, thorough, source))) is not None:
        profile["host"], details["host_us"] = found
    for _ in range(thorough.later if machine.cuda else 0):
        loops = _loops(parts, models, profile, source, loops)
    if loops:
        details["loop_us"] = {name: _rounded(loop) for name, loop in loops.items()}
    details["left_out"] = parts.left_out
    details["launches_us"] = {key: str(value) for key, value in vars(starts).items()}
    details |= blocks.details
    seconds = time.monotonic() - begin
    interrupted, code = machine.interrupted(), code_version()
    details["machine"] = facts | {"host_interrupted": interrupted, "code": code, "seconds": round(seconds, 1)}
    profile["details"] = details
    comment = (
        f"Measured by `python -m realrun calibrate` in {seconds:.0f} s: {', '.join(map(': '.join, facts.items()))}.\n"
        "Medians; what lies under details is for a person: [median, 10th, 90th percentile] in microseconds."
    )
    return to_toml(profile, comment)


def _gpu(machine: Machine, thorough: Thoroughness, source: str) -> Table:
    memory, products = bandwidth(machine, thorough.memory), arithmetic(machine, thorough.square, *thorough.product)
    most, top = max(memory.copy, memory.read), max(products.square, products.ffn)
    square = f"product of {thorough.square} squared"
    return {
        "memory_gb": figure(max(memory.total_gb, 1e-3), f"as the driver says, {source}"),
        "bandwidth_gbps": figure(
            most, f"copy within the device, {memory.copy:.0f}, or read, {memory.read:.0f}; {source}"
        ),
        "bandwidth_fraction": figure(min(1.0, max(0.01, memory.read / most)), f"matrix-vector product; {source}"),
        "tflops": figure(top, f"bf16, random numbers, {square}; {source}"),
        "tflops_fraction": figure(
            min(1.0, max(0.01, products.ffn / top)), f"{' x '.join(map(str, thorough.product))}; {source}"
        ),
    }


def _link(machine: Machine, thorough: Thoroughness, source: str, name: str) -> tuple[Table, Table]:
    memory = buffers(machine, thorough.copies, thorough.places)
    times = {
        "h2d": copy_times(machine, "h2d", memory, thorough.copies),
        "d2h": copy_times(machine, "d2h", memory, thorough.copies),
        "pageable": copy_times(machine, "h2d", memory, thorough.copies, pinned=False),
        "pageable_d2h": copy_times(machine, "d2h", memory, thorough.copies, pinned=False),
    }
    del memory
    shared = shared_rates(machine, thorough.at_once)
    link = {
        "name": name,
        "h2d": curve(times["h2d"].alone, f"pinned host to device, one alone; {source}"),
        "queued": curve(times["h2d"].queued, f"pinned host to device, one in a row; {source}"),
        "d2h": curve(times["d2h"].alone, f"device to pinned host, one alone; {source}"),
        "pageable": curve(times["pageable"].alone, f"host to device from memory that is not pinned; {source}"),
    }
    details = {
        "copies_us": {
            name + suffix: spread(each)
            for name, copies in times.items()
            for suffix, each in (("", copies.alone), ("_queued", copies.queued))
        },
        "together_gbps": {key: round(value, 2) for key, value in shared.items()},
    }
    return link, details


def _software(starts: Launches, blocks: Blocks, source: str) -> Table:
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


def _eager(starts: Launches, blocks: Blocks, source: str) -> Table:
    """The same of kernels that Python launches one after the other, on the same machine."""
    return {
        "kind": "eager",
        "operation_us": figure(starts.kernel.ns / 1e3, f"one small kernel in a row of launched ones; {source}"),
        "expert_floor_us": figure(min(t.ns for t in blocks.eager_ffn) / 1e3, f"the shortest launched FFN; {source}"),
        "layer_floor_us": figure(min(t.ns for t in blocks.eager_layer) / 1e3, f"the shortest launched layer; {source}"),
        "route_wait_us": figure(starts.wait.ns / 1e3, f"host waits for one kernel, then launches the next; {source}"),
        "waits_for_route": True,
    }


def _loops(
    parts: Parts, models: Iterable[ModelSpec], profile: Table, source: str,
    earlier: Mapping[str, LoopTimes] | None = None,
) -> dict[str, LoopTimes]:  # fmt: skip
    """Give each layer of ``profile`` the engine's own time, and its software their medians; by model, what was timed.

    Of several models with the same layers the first one's is given. What was timed ``earlier`` counts where it took
    less. What the engine cannot run here, or the device cannot hold, is left out and said.
    """
    # Without the host's thread: what it takes of a call is fitted beside these figures, not part of them.
    software = {name: value for name, value in profile["software"].items() if name != "host_thread"}
    hardware, models = Hardware.from_dict(profile | {"software": software}), list(models)
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


def _host_thread(parts: Parts, models: Iterable[ModelSpec], hardware: Hardware, profile: Table, source: str) -> Table:
    """Give the software of ``profile`` what requests take, timed with the model of most and smallest experts."""
    several = [model for model in models if charged(model)]
    if not several:
        return {}
    model = max(several, key=lambda one: one.routed_layers * one.experts / one.expert_bytes[0])
    found: dict[str, tuple[float, tuple[float, float]]] = {}
    details = Table()
    if (acts := parts.try_to("requests", lambda: host_acts(parts.machine, model, hardware))) is not None:
        found |= {"request_ns": (acts.request_ns, acts.request_spread), "drop_ns": (acts.drop_ns, acts.drop_spread)}
        details["missed_us"] = round(acts.missed_us, 1)
    if (demands := parts.try_to("launches", lambda: demand_acts(parts.machine, model, hardware))) is not None:
        found |= {"hand_over_ns": (demands.hand_over_ns, demands.hand_over_spread)}
        found |= {"launch_ns": (demands.launch_ns, demands.launch_spread)}
        details["missed_share"] = round(demands.missed, 4)
    how = f"fitted to runs of {model.name} with random routes"
    profile["software"]["host_thread"] = {
        name: figure(ns, f"{how}, {low:.0f} to {high:.0f} in several; {source}")
        for name, (ns, (low, high)) in found.items()
    } | {"copies_ahead": PIECES_AHEAD - 1}
    return {name: [round(ns, 1) for ns in spread] for name, (_, spread) in found.items()} | details


def _rounded(loop: LoopTimes) -> Table:
    return {LOOP_FIGURES.get(key, key): round(value, 2) for key, value in asdict(loop).items()}


def _loop_figures(loops: Sequence[LoopTimes], source: str) -> Table:
    return {key: figure(median(getattr(loop, name) for loop in loops), source) for name, key in LOOP_FIGURES.items()}


def _lookups(machine: Machine, thorough: Thoroughness, source: str, hardware: Hardware) -> tuple[Table, Table]:
    tables, details = Table(), Table()
    places: tuple[tuple[Where, int], ...] = (("gpu", 2), ("host", 4))
    for where, element_bytes in places:
        costs = lookup_costs(machine, where, hardware, thorough.tables)
        tables[where] = _costs(costs, element_bytes, source)
        details[where] = {
            f"{what}_us": {way: spread(times) for way, times in ways.items()} for what, ways in costs.times.items()
        }
    return tables, details


def _costs(costs: LookupCosts, element_bytes: int, source: str) -> Table:
    """As ``sim.machine.hardware.Lookups`` has them: bytes a nanosecond are GB/s, FLOP a nanosecond GFLOP/s."""
    search, cluster, network = costs.lines["search"], costs.lines["cluster"], costs.lines["network"]
    most, how = 1e8, costs.how  # a rate that no size showed
    return {
        "element_bytes": element_bytes,
        "search_us": figure(search.fixed_ns / 1e3, f"{how['search']}; {source}"),
        "iteration_us": figure(cluster.fixed_ns / 1e3, f"{how['cluster']}; {source}"),
        "network_us": figure(network.fixed_ns / 1e3, f"{how['network']}; {source}"),
        "gbps": figure(min(most, search.rate), f"slope of the search over bytes, {how['search']}; {source}"),
        "gflops": figure(min(most, cluster.rate), f"slope of clustering over FLOPs, {how['cluster']}; {source}"),
    }


def _host(machine: Machine, thorough: Thoroughness, source: str) -> tuple[Table, Table]:
    models = [scaled(model_spec(name), thorough.hosted) for name in ("mixtral-8x7b", "qwen3-30b-a3b")]
    measured = {model.name: hosted_times(machine, shrunk(model, 1)) for model in models}
    what = f"experts of {' and '.join(measured)}, bf16, torch's products, one row"
    measured[f"{models[1].name}, one a call"] = hosted_times(machine, replace(shrunk(models[1], 1), top_k=1))
    rates = HostedRates.of(*measured.values())
    what += f", threads: {next(iter(measured.values())).charged}"
    table = {
        "host_gbps": figure(max(1e-3, rates.alone), f"{what}, link idle; {source}"),
        "shared_gbps": figure(max(1e-3, rates.shared), f"the larger, beside copies to the device; {source}"),
        "floor_us": figure(rates.floor_ns / 1e3, f"{what}, the part that does not grow with size; {source}"),
        "call_us": figure(rates.call_ns / 1e3, f"what one a call takes more than one of several; {source}"),
    }
    details = {
        name: {
            f"threads: {threads}": spread({"link idle": by_busy[False], "link busy": by_busy[True]})
            for threads, by_busy in times.threads.items()
        }
        for name, times in measured.items()
    }
    return table, details
