"""The plots of a page as files: PNG and SVG by matplotlib, and their numbers as CSV beside."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.html.plots import AnyPlot, Axis, Bars, Curves, HeatMap, Series
from analysis.html.wording import figure as short
from analysis.html.wording import lines_of
from analysis.pages.drawing import Figure, legend
from ground.files import atomic_path
from ground.plots import new_figure

KINDS = ("png", "svg", "csv")
_COLOURS = (
    "#0060a8",
    "#b3470a",
    "#00705a",
    "#8a3d92",
    "#7d6200",
    "#c2185b",
    "#2e7d32",
    "#5b4ed1",
    "#9b1c1c",
    "#4b5563",
)
_MARKERS = "osD^vP*X<>"
_FEW_CELLS, _MOST_TICKS, _LETTERS = 120, 32, 75


def names(plots: Sequence[AnyPlot]) -> list[str]:
    """The files that `write` makes."""
    return [f"{plot.name}.{kind}" for plot in plots for kind in KINDS]


def write(plots: Sequence[AnyPlot], folder: Path) -> None:
    """Write each plot into ``folder``, each file whole, the same for the same data.

    Raises OSError, and ModuleNotFoundError without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        with atomic_path(folder / f"{plot.name}.csv") as part, part.open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows([plot.header(), *plot.rows()])
        picture = drawn(plot)
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": plot.name}):
            for kind, made in (("png", {"Software": None}), ("svg", {"Date": None})):
                with atomic_path(folder / f"{plot.name}.{kind}") as part:
                    picture.savefig(part, format=kind, dpi=120, metadata=made)


def drawn(plot: AnyPlot) -> Figure:
    """A plot as a figure of matplotlib."""
    figure = new_figure(layout="constrained")
    if isinstance(plot, Curves):
        figure.set_size_inches(8, 4.4 + 0.15 * len({one.name for one in plot.series}))
        _curves(plot, figure.subplots())
    elif isinstance(plot, Bars):
        figure.set_size_inches(8, 1.8 + 0.16 * sum(1 + len(lines_of(name)) for name in plot.names))
        _bars(plot, figure.subplots())
    else:
        figure.set_size_inches(8, 2 + min(12, max(2.5, (0.4 if _few(plot) else 0.14) * len(plot.rows_of))))
        _heat_map(plot, figure)
    figure.suptitle(plot.title.replace("$", r"\$"), fontsize=11)
    legend(figure)
    return figure


def _curves(plot: Curves, ax: Any) -> None:
    _labelled(ax, plot.x, plot.y)
    areas = [one for one in plot.series if one.style == "area"]
    if areas:
        heights = [[y or 0 for y in one.y] for one in areas]
        ax.stackplot(areas[0].x, *heights, labels=[_plain(one.name) for one in areas], colors=_COLOURS)
    colours: dict[str, str] = {}  # what has one name has one colour
    for at, one in enumerate(plot.series):
        if one.style != "area":
            colour = colours.setdefault(one.name, _COLOURS[len(colours) % len(_COLOURS)])
            label = None if one.style == "dots" else _plain(one.name)
            ax.plot(one.x, _gaps(one), label=label, **_look(one, at, colour))
    if plot.y.zero and not plot.y.log:
        ax.set_ylim(bottom=0)


def _gaps(one: Series) -> list[float]:
    return [float("nan") if y is None else y for y in one.y]


def _look(one: Series, at: int, colour: str) -> dict[str, Any]:
    marker = {"marker": _MARKERS[at % len(_MARKERS)], "color": colour}
    looks: dict[str, dict[str, Any]] = {
        "line": marker, "reference": marker | {"linestyle": ":"},
        "bound": {"color": "black", "linestyle": "-." if "compute" in one.name else "--"},
        "points": {"color": "#545d68", "linestyle": "", "marker": ".", "markersize": 5},
        "dots": {"color": colour, "linestyle": "", "marker": ".", "markersize": 3, "alpha": 0.45},
        "front": marker | {"drawstyle": "steps-post"},
        "mark": {"color": colour, "linestyle": "", "marker": "*", "markersize": 15, "zorder": 3},
    }  # fmt: skip
    return looks[one.style]


def _labelled(ax: Any, x: Axis, y: Axis | None) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.grid(alpha=0.3)
    ax.set_xlabel(_plain(x.title))
    if y is not None:
        ax.set_ylabel(_plain(y.title))
    for name, axis in (("x", x), ("y", y)):
        if axis is not None and axis.log:
            getattr(ax, f"set_{name}scale")("log")
            scale = getattr(ax, f"{name}axis")
            scale.set_major_locator(LogLocator(subs=(1, 2, 5) if name == "y" else (1,)))
            scale.set_major_formatter(StrMethodFormatter("{x:,g}"))
            scale.set_minor_formatter(NullFormatter())


def _plain(text: str) -> str:
    """Text in which a dollar sign begins no formula, and which no legend hides for its underscore."""
    return f"\u200b{text}".replace("$", r"\$") if text.startswith("_") else text.replace("$", r"\$")


def _broken(label: str) -> str:
    return "\n".join(map(_plain, lines_of(label)))


def _bars(plot: Bars, ax: Any) -> None:
    _labelled(ax, plot.axis, None)
    left = np.zeros(len(plot.names))
    for (part, values), colour in zip(plot.parts.items(), _COLOURS, strict=False):
        widths = np.array([value or 0.0 for value in values])
        ax.barh(range(len(plot.names)), widths, left=left, color=colour, label=_plain(part))
        left += widths
    for at, end in enumerate(plot.ends):
        if end is not None:
            ax.plot(end, [at, at], color="black", linewidth=1)
    for name, value in plot.marks.items():
        ax.axvline(value, color="black", linestyle="-." if "compute" in name else "--", label=_plain(name))
    ax.set_yticks(range(len(plot.names)), [_broken(name) for name in plot.names], fontsize=8)
    ax.invert_yaxis()


def _few(plot: HeatMap) -> bool:
    return len(plot.rows_of) * len(plot.columns_of) <= _FEW_CELLS


def _heat_map(plot: HeatMap, figure: Figure) -> None:
    ax = figure.subplots()
    values = np.array([[float("nan") if v is None else v for v in row] for row in plot.values], float)
    low, high = plot.span or (None, None)
    image: Any = ax.imshow(values, aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest")
    figure.colorbar(image, ax=ax, label=_plain(plot.unit))
    ax.set_xlabel(_plain(plot.across.title))
    ax.set_ylabel(_plain(plot.down.title))
    for set_ticks, labels in ((ax.set_xticks, plot.columns_of), (ax.set_yticks, plot.rows_of)):
        step = -(-len(labels) // _MOST_TICKS)
        set_ticks(range(0, len(labels), step), [_broken(label) for label in labels[::step]], fontsize=8)
    longest = max(len(line) for label in plot.columns_of for line in lines_of(label))
    if longest * min(len(plot.columns_of), _MOST_TICKS) > _LETTERS:
        ax.tick_params(axis="x", rotation=90)
    if _few(plot):
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                ink = "black" if float(image.norm(value)) > 0.6 else "white"
                ax.text(column, row, short(value), ha="center", va="center", color=ink, fontsize=8)
