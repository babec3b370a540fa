"""Plots as plotly reads them. Colours are not said here: the page gives those of its theme."""

from collections.abc import Sequence
from html import escape
from typing import Any

from analysis.html.plots import AnyPlot, Axis, Bars, Curves, HeatMap, Series
from analysis.html.wording import figure, lines_of

_MODES: dict[str, dict[str, Any]] = {
    "line": {"mode": "lines+markers"},
    "reference": {"mode": "lines+markers", "line": {"dash": "dot"}},
    "bound": {"mode": "lines"},
    "points": {"mode": "markers"},
    "dots": {"mode": "markers", "opacity": 0.45, "showlegend": False},
    "front": {"mode": "lines+markers", "line": {"shape": "hv"}},
    "mark": {"mode": "markers"},
    "area": {"mode": "lines", "stackgroup": "all", "line": {"width": 1}},
}
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "pentagon", "star", "triangle-down", "hexagon")
_TICKS = [float(f"{first}e{power}") for power in range(-6, 9) for first in (1, 2, 5)]
"""Where a logarithmic axis has marks, across only every third; those of plotly leave out the powers of ten."""
_FEW_CELLS = 120
"""Of a heat map with at most so many cells, each says its value."""


def plotly_form(plot: AnyPlot) -> dict[str, Any]:
    """``data`` and ``layout`` of a plot; text that plotly would read as markup is escaped."""
    if isinstance(plot, Curves):
        return _curves(plot)
    return _bars(plot) if isinstance(plot, Bars) else _heat_map(plot)


def _safe(text: str) -> str:
    """Text in which plotly finds no markup; it knows no name for quotation marks."""
    return escape(text, quote=False)


def _curves(plot: Curves) -> dict[str, Any]:
    data = [_series(one, at, plot) for at, one in enumerate(plot.series)]
    down = _axis(plot.y, rangemode="tozero" if plot.y.zero else "normal")
    return {
        "data": data,
        "layout": {
            "xaxis": _axis(plot.x, _TICKS[::3]),
            "yaxis": down,
            "hovermode": "closest",
            "height": 440,
            "legend": {"traceorder": "normal"},
        },
    }


def _series(one: Series, at: int, plot: Curves) -> dict[str, Any]:
    notes = one.notes or [""] * len(one.x)
    said = [
        "<br>".join([f"<b>{_safe(one.name)}</b>", f"{_said(plot.x, x)}", f"{_said(plot.y, y)}", *_lines(note)])
        for x, y, note in zip(one.x, one.y, notes, strict=True)
    ]
    marker = {"symbol": "star" if one.style == "mark" else _SYMBOLS[at % len(_SYMBOLS)]}
    size = {"mark": 16, "points": 6, "dots": 4}.get(one.style, 8)
    return {
        "type": "scatter", "name": _safe(one.name), "x": list(one.x), "y": list(one.y), "text": said,
        "hoverinfo": "text", "marker": marker | {"size": size}, "meta": one.style, **_MODES[one.style],
        **({"line": {"dash": _dash(one.name)}} if one.style == "bound" else {}),
    }  # fmt: skip


def _dash(bound: str) -> str:
    """How a bound's line is broken, so that two in one plot differ."""
    return "dashdot" if "compute" in bound else "dash"


def _said(axis: Axis, value: float | None) -> str:
    return f"{_safe(axis.title)}: {figure(value)}"


def _lines(note: str) -> list[str]:
    return [_safe(part) for part in note.split("; ") if part]


def _axis(axis: Axis, marks: Sequence[float] = _TICKS, **more: Any) -> dict[str, Any]:
    kind = {"type": "log", "tickvals": list(marks), "ticktext": [f"{mark:,g}" for mark in marks]} if axis.log else {}
    # Without a distance plotly writes a title between labels, where it finds room.
    return {"title": {"text": _safe(axis.title), "standoff": 8}, "automargin": True, **kind, **more}


def _wrapped(name: str) -> str:
    return "<br>".join(map(_safe, lines_of(name)))


def _bars(plot: Bars) -> dict[str, Any]:
    names = [_wrapped(name) for name in plot.names]
    data: list[dict[str, Any]] = []
    for part, values in plot.parts.items():
        text = [f"<b>{_safe(name)}</b><br>{_safe(part)}: {figure(value)}<br>{_safe(plot.axis.title)}"
                for name, value in zip(plot.names, values, strict=True)]  # fmt: skip
        bar: dict[str, Any] = {
            "type": "bar", "orientation": "h", "name": _safe(part), "y": names, "x": list(values), "hovertext": text,
            "hoverinfo": "text", "meta": "bar", "textposition": "none",
        }  # fmt: skip
        if plot.ends and len(plot.parts) == 1:
            bar["error_x"] = _errors(values, plot.ends)
        data.append(bar)
    for name, value in plot.marks.items():
        said = f"<b>{_safe(name)}</b><br>{_said(plot.axis, value)}"
        data.append({
            "type": "scatter", "mode": "lines", "name": _safe(name), "x": [value] * len(names), "y": names,
            "line": {"dash": _dash(name)}, "text": [said] * len(names),
            "hoverinfo": "text", "meta": "bound",
        })  # fmt: skip
    lines = sum(name.count("<br>") + 1 for name in names)
    layout = {
        "barmode": "stack", "xaxis": _axis(plot.axis, rangemode="tozero"), "height": 150 + 14 * len(names) + 16 * lines,
        "yaxis": {"autorange": "reversed", "automargin": True, "ticks": "", "type": "category"}, "hovermode": "closest",
        "showlegend": len(data) > 1, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _errors(values: Sequence[float | None], ends: Sequence[tuple[float, float] | None]) -> dict[str, Any]:
    both = [(0.0, 0.0) if end is None or value is None else (end[1] - value, value - end[0])
            for value, end in zip(values, ends, strict=True)]  # fmt: skip
    return {"type": "data", "symmetric": False, "array": [up for up, _ in both], "arrayminus": [low for _, low in both]}


def _heat_map(plot: HeatMap) -> dict[str, Any]:
    few = len(plot.rows_of) * len(plot.columns_of) <= _FEW_CELLS
    said = [[f"<br>{'<br>'.join(_lines(note))}" for note in row] for row in plot.notes]
    # One form for all cells, since a text for each of tens of thousands would weigh more than all else.
    down, across, unit = (_safe(text).replace("%{", "%") for text in (plot.down.title, plot.across.title, plot.unit))
    form = f"{down}: %{{y}}<br>{across}: %{{x}}<br><b>{unit}: %{{z:.3~g}}</b>{'%{hovertext}' if said else ''}"
    cells: dict[str, Any] = {
        "type": "heatmap", "z": [list(values) for values in plot.values], "x": [_wrapped(c) for c in plot.columns_of],
        "y": [_wrapped(row) for row in plot.rows_of], "meta": "heat",
        "hovertemplate": f"{form}<extra></extra>", "hovertext": said,
        "xgap": 1 if few else 0, "ygap": 1 if few else 0,
        "colorbar": {"title": {"text": _safe(plot.unit), "side": "right"}, "thickness": 14},
        "colorscale": "Cividis", **({} if plot.span is None else {"zmin": plot.span[0], "zmax": plot.span[1]}),
    }  # fmt: skip
    if few:
        cells |= {"text": [[figure(value) for value in values] for values in plot.values], "texttemplate": "%{text}"}
    rows = _axis(plot.down, type="category", autorange="reversed", ticks="")
    height = 160 + max(240, min(900, (30 if few else 12) * len(plot.rows_of)))
    columns = _axis(plot.across, type="category", autotickangles=[0, 90])
    return {"data": [cells], "layout": {"xaxis": columns, "yaxis": rows, "height": height}}
