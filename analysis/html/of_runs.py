"""The plots of a page of runs: each function gives those for which the runs hold the data, and no others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from analysis.html.designs import WORKLOAD, Designs, axis_title, is_of_policy, position
from analysis.html.front import front, knee
from analysis.html.plots import AnyPlot, Axis, Bars, Curves, HeatMap, Series, Style
from analysis.html.runs import Run
from analysis.html.wording import counted, field_value, figure, percent

MOST_LINES, MOST_BARS, MOST_PLOTS, MOST_POINTS = 10, 24, 3, 2000
_WIDE = 8
"""Values that differ by more than this factor are shown on a logarithmic axis."""
_GIB = 2**30
_BOUNDS = {"compute bound": "compute_bound_tokens_per_s", "link bound": "link_bound_tokens_per_s"}
_PARTS = {
    "computing": "compute", "waiting for missing experts": "stall_demand", "waiting for late experts": "stall_late",
    "waiting for the host": "stall_host", "predicting": "predict", "other": "other",
}  # fmt: skip
TOKENS_PER_S = "throughput (tokens/s)"


def plots(designs: Designs) -> list[AnyPlot]:
    """All plots that the runs hold the data of."""
    field = _axis(designs)
    found: list[AnyPlot] = []
    if field is not None:
        found += _of_places(designs, field, lambda runs, where: _speed_curve(designs, runs, where, field))
    else:
        found += _of_places(designs, "", lambda runs, where: _speed_bars(designs, runs, where))
    found += _of_groups(designs.workloads(), lambda runs, where: _front(designs, runs, where))
    if field is not None:
        found += _of_places(designs, field, lambda runs, where: _misses(designs, runs, where, field))
    found += _of_groups(designs.workloads(), lambda runs, where: _times(designs, runs, where))
    return found + _of_groups(designs.workloads(), lambda runs, where: _heat_map(designs, runs, where))


def _axis(designs: Designs) -> str | None:
    """The field that throughput is drawn against: the cache, or the first other one of which there are numbers."""
    varying = [name for name in designs.varying if name not in ("policy", "seed")]
    for name in sorted(varying, key=lambda name: name != "cache"):
        if len({x for run in designs.ok if (x := position(run, name)) is not None}) > 1 and not is_of_policy(name):
            return name
    return None


def _of_places(designs: Designs, field: str, draw: Callable[[list[Run], str], AnyPlot | None]) -> list[AnyPlot]:
    return _of_groups(designs.places(field), draw)


def _of_groups(groups: dict[str, list[Run]], draw: Callable[[list[Run], str], AnyPlot | None]) -> list[AnyPlot]:
    """A plot for each group, the fastest first, at most `MOST_PLOTS`; names differ."""
    ordered = sorted(groups.items(), key=lambda entry: -max(run.speed for run in entry[1]))
    drawn = [plot for where, runs in ordered if (plot := draw(runs, where)) is not None]
    left_out = len(drawn) - MOST_PLOTS
    if left_out > 0:
        more = f" {counted(left_out, 'slower place is', 'slower places are')} left out."
        last = drawn[MOST_PLOTS - 1]
        drawn[MOST_PLOTS - 1] = _renamed(last, last.name, last.says + more)
    return [_renamed(plot, f"{plot.name}-{at}" if at > 1 else plot.name, plot.says)
            for at, plot in enumerate(drawn[:MOST_PLOTS], 1)]  # fmt: skip


def _renamed(plot: AnyPlot, name: str, says: str) -> AnyPlot:
    return replace(plot, name=name, says=says)


def _titled(what: str, where: str) -> str:
    return f"{what}: {where}" if where else what


def _log(values: Iterable[float | None]) -> bool:
    there = [value for value in values if value]
    return bool(there) and min(there) > 0 and max(there) / min(there) > _WIDE


def _lines(designs: Designs, runs: Sequence[Run], field: str) -> tuple[dict[str, list[Run]], int]:
    """Runs by policy in the order of the axis, the fastest policies first, and how many lines are left out."""
    lines: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: position(run, field) or 0):
        if position(run, field) is not None:
            name = designs.label(run, [name for name in designs.varying if not is_of_policy(name)])
            lines.setdefault(name, []).append(run)
    fastest = sorted(lines.items(), key=lambda line: -max(run.speed for run in line[1]))
    return dict(fastest[:MOST_LINES]), max(0, len(fastest) - MOST_LINES)


def _bound_series(runs: Sequence[Run], field: str, name: str, column: str) -> Series | None:
    """A bound over the axis: that of any run at a position, since it is the same for all; None where there is none."""
    at: dict[float, float] = {}
    for run in runs:
        x, y = position(run, field), run.values.get(column)
        if x is not None and y is not None:
            at[x] = max(y, at.get(x, 0.0))
    xs = sorted(at)
    return Series(name, xs, [at[x] for x in xs], "bound") if len(xs) > 1 else None


def _speed_curve(designs: Designs, runs: Sequence[Run], where: str, field: str) -> Curves | None:
    lines, rest = _lines(designs, runs, field)
    series = [
        Series(name, _xs(line, field), [run.speed for run in line], _style(line), [_about(run) for run in line])
        for name, line in lines.items()
    ]
    if max((len(set(one.x)) for one in series), default=0) < 2:
        return None
    bounds = [_bound_series(runs, field, name, column) for name, column in _BOUNDS.items()]
    series += [one for one in bounds if one is not None]
    says = (
        "Each line is a policy. Broken lines without marks are the bounds: no policy that runs its experts on "
        "the GPU can be above them. Dotted lines are references, which know the future or ignore the cache size."
    )
    more = f" The {MOST_LINES} fastest of {len(lines) + rest} policies are drawn." if rest else ""
    y = Axis(TOKENS_PER_S, _log(value for one in series for value in one.y))
    what = f"Throughput against {axis_title(field).split(' (')[0]}"
    return Curves(f"throughput-by-{field}", _titled(what, where), says + more, Axis(axis_title(field)), y, series)


def _xs(line: Sequence[Run], field: str) -> list[float]:
    return [x for run in line if (x := position(run, field)) is not None]


def _style(line: Sequence[Run]) -> Style:
    return "reference" if line[0].values.get("reference") else "line"


def _about(run: Run) -> str:
    """What else is worth knowing of a run."""
    v = run.values
    low, high = v.get("tokens_per_s_low"), v.get("tokens_per_s_high")
    parts = [f"95 % interval {figure(low)} to {figure(high)}" if low is not None else ""]
    parts += [f"hits {percent(v['hit_ratio'])}, late {percent(v['late_ratio'])}, misses {percent(v['miss_ratio'])}"]
    parts += [str(v.get("cache_slots") or ""), "beyond the limits" if run.beyond else ""]
    return "; ".join(filter(None, parts))


def _fastest(runs: Sequence[Run], most: int) -> tuple[list[Run], str]:
    """The fastest runs, and a sentence if there are more."""
    ordered = sorted(runs, key=lambda run: -run.speed)
    return ordered[:most], f" The {most} fastest of {len(ordered):,} are drawn." if len(ordered) > most else ""


def _speed_bars(designs: Designs, runs: Sequence[Run], where: str) -> Bars | None:
    if len(runs) < 2:
        return None
    shown, more = _fastest(runs, MOST_BARS)
    ends = [None if (low := run.values.get("tokens_per_s_low")) is None else (low, run.values["tokens_per_s_high"])
            for run in shown]  # fmt: skip
    marks = {name: max(found) for name, column in _BOUNDS.items()
             if (found := [run.values[column] for run in runs if run.values.get(column) is not None])}  # fmt: skip
    says = (
        "Lines across the bars are the bounds: no policy that runs its experts on the GPU can pass them. A star marks "
        f"references, which know the future or ignore the cache size.{more}"
    )
    return Bars(
        "throughput", _titled("Throughput of each design", where), says, Axis(TOKENS_PER_S), _names(designs, shown),
        {"throughput": [run.speed for run in shown]}, ends if any(ends) else (), marks,
    )  # fmt: skip


def _names(designs: Designs, runs: Sequence[Run]) -> list[str]:
    """A label for each run, a star behind references; those that would be the same are numbered."""
    seen: dict[str, int] = {}
    names = []
    for run in runs:
        name = designs.label(run, _of_work(designs)) + (" *" if run.values.get("reference") else "")
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _of_work(designs: Designs) -> list[str]:
    """Fields that a plot of one workload says in its title."""
    return [name for name in designs.varying if name in WORKLOAD]


def _front(designs: Designs, runs: Sequence[Run], where: str) -> Curves | None:
    systems = [run for run in runs if run.a_system and run.values.get("gpu_needed_bytes")]
    points = [(run.values["gpu_needed_bytes"] / _GIB, run.speed) for run in systems]
    best = front(points)
    if len(best) < 2:
        return None
    at_knee = knee([points[at] for at in best])
    names = _names(designs, systems)
    others = [at for at in range(len(points)) if at not in set(best)][:MOST_POINTS]

    def series(name: str, places: Sequence[int], style: Style) -> Series:
        xs, ys = [points[at][0] for at in places], [points[at][1] for at in places]
        return Series(name, xs, ys, style, [names[at] for at in places])

    drawn = [series("beaten by another", others, "points")] if others else []
    drawn.append(series("beaten by none", best, "front"))
    says = "A design on the front is beaten by none: none within the limits is faster with as little memory."
    if at_knee is not None:
        chosen = best[at_knee]
        drawn.append(series("knee", [chosen], "mark"))
        says += (
            f" At its knee, {names[chosen]} ({figure(points[chosen][1])} tokens/s in {figure(points[chosen][0])} GiB), "
            "more memory begins to buy less: it lies farthest above the straight line between the front's ends."
        )
    y = Axis(TOKENS_PER_S, _log(speed for _, speed in points))
    title = _titled("Throughput against GPU memory", where)
    return Curves("front", title, says, Axis("GPU memory needed (GiB)"), y, drawn)


def _misses(designs: Designs, runs: Sequence[Run], where: str, field: str) -> Curves | None:
    there = [run for run in runs if run.values.get("hit_ratio") is not None]
    lines, rest = _lines(designs, there, field)
    least = _bound_series(there, field, "MIN", "min_hit_ratio")
    series = [
        Series(name, _xs(line, field), [100 * (1 - run.values["hit_ratio"]) for run in line], _style(line),
               [_about(run) for run in line])
        for name, line in lines.items()
    ]  # fmt: skip
    if max((len(set(one.x)) for one in series), default=0) < 2:
        return None
    says = "The share of look-ups that wait: their expert is late or a miss when the route is known."
    if least is not None:
        series.append(replace(least, y=[100 * (1 - most) for most in least.y if most is not None]))
        says += " MIN (Belady) knows the future and loads nothing ahead of need; a policy that prefetches may be below."
    more = f" The {MOST_LINES} fastest of {len(lines) + rest} policies are drawn." if rest else ""
    y = Axis("awaited look-ups (%)")
    title = _titled(f"Awaited look-ups against {axis_title(field).split(' (')[0]} (miss-ratio curve)", where)
    return Curves("misses", title, says + more, Axis(axis_title(field)), y, series)


def _times(designs: Designs, runs: Sequence[Run], where: str) -> Bars | None:
    there = [run for run in runs if run.values.get("tokens") and run.values.get("time_compute_ms") is not None]
    if not there:
        return None
    shown, more = _fastest(there, MOST_BARS)
    parts = {
        name: [(run.values.get(f"time_{part}_ms") or 0.0) / run.values["tokens"] for run in shown]
        for name, part in _PARTS.items()
    }
    used = {name: values for name, values in parts.items() if any(values)}
    says = f"The mean decode time of a token, split by what the GPU did or waited for.{more}"
    title = _titled("Time of a token by part", where)
    return Bars("token-time", title, says, Axis("time of a token (ms)"), _names(designs, shown), used)


def _heat_map(designs: Designs, runs: Sequence[Run], where: str) -> HeatMap | None:
    work = _of_work(designs)
    fields = [name for name in designs.varying if name not in work and len(designs.values(name)) > 1]
    if len(fields) < 2:
        return None
    down, across = sorted(fields, key=lambda name: (-len(designs.values(name)), name != "cache"))[:2]
    if down == "cache" or is_of_policy(across):  # numbers across, names down
        down, across = across, down
    best: dict[tuple[str, str], Run] = {}
    for run in runs:
        if run.a_system or len(fields) == 2:
            cell = (str(run.fields.get(down)), str(run.fields.get(across)))
            if cell not in best or run.speed > best[cell].speed:
                best[cell] = run
    names = [[value for value in designs.values(field) if any(cell[at] == str(value) for cell in best)]
             for at, field in enumerate((down, across))]  # fmt: skip
    if min(map(len, names)) < 2 or len(best) < len(names[0]) * len(names[1]) / 2:  # of designs drawn at random: holes
        return None
    cells = [[best.get((str(row), str(column))) for column in names[1]] for row in names[0]]
    rest = len(fields) > 2
    says = "Throughput of each pair of values." + (
        " Other fields vary too; each cell is the fastest system among them, named under the pointer." if rest else ""
    )
    title = _titled(f"Throughput over {_plain(down)} and {_plain(across)}", where)
    return HeatMap(
        "heat-map", title, says, Axis(_plain(down)), Axis(_plain(across)),
        [field_value(value) for value in names[0]], [field_value(value) for value in names[1]],
        [[None if run is None else run.speed for run in row] for row in cells], TOKENS_PER_S,
        [["" if run is None else designs.label(run, work) for run in row] for row in cells] if rest else (),
    )  # fmt: skip


def _plain(field: str) -> str:
    return "cache size" if field == "cache" else axis_title(field)
