"""A page in HTML that holds everything it shows: text, tables, plots and the library that draws them."""

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib import resources

from analysis.html.plotly_form import plotly_form
from analysis.html.plots import AnyPlot
from analysis.html.run_table import Cell, Table

# Nothing may be loaded, so a page is the same offline, and what a name holds cannot call home.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_LONG = 40
_TOOLS = {"in": "Zoom in", "out": "Zoom out", "whole": "Show all", "save": "Save as PNG"}


@dataclass(frozen=True)
class Page:
    """What a page says, from top to bottom; all of it plain text.

    Attributes:
        title: its heading.
        asked: the question.
        answers: paragraphs.
        caveat: what the answers rest on.
        plots: as they follow each other; the ``name`` of each is its own.
        table, table_about: the table that can be sorted, and what its columns mean.
        sources: headings and lines of where the numbers come from.
        notes: sentences below them.
    """

    title: str
    asked: str
    answers: Sequence[str]
    caveat: str
    plots: Sequence[AnyPlot]
    sources: tuple[Sequence[str], Sequence[Sequence[str]]]
    table: Table | None = None
    table_about: str = ""
    notes: Sequence[str] = field(default_factory=list)

    def html(self) -> str:
        """It as one text, the same for the same content. Raises ModuleNotFoundError without plotly."""
        shown = {plot.name: {"form": plotly_form(plot), "header": plot.header(), "rows": list(plot.rows())}
                 for plot in self.plots}  # fmt: skip
        parts = [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(self.title)}</title>\n<style>\n{_own('page.css')}</style>\n</head>\n<body>",
            f"<header><h1>{escape(self.title)}</h1></header>\n<main>",
            f"<h2>Question</h2>\n{_paragraph(self.asked)}\n<h2>Answer</h2>",
            f'<div class="answer">{"".join(map(_paragraph, self.answers))}</div>',
            _paragraph(self.caveat, "soft"),
            *(["<h2>Plots</h2>", *map(_figure, self.plots)] if self.plots else []),
            *([_sortable(self.table, self.table_about)] if self.table is not None else []),
            _sources(*self.sources, self.notes),
            f"</main>\n<footer>{_paragraph(_FOOTER, 'soft')}</footer>",
            f'<script type="application/json" id="plots">{_embedded(shown)}</script>',
            *([f'<script type="text/plain" id="library">{_library()}</script>'] if self.plots else []),
            f"<script>\n{_own('page.js')}</script>\n</body>\n</html>\n",
        ]
        return "\n".join(parts)


_FOOTER = (
    "Made by moe-replay. Everything that this page shows is in it; it loads nothing. Plots are drawn by plotly.js (MIT "
    "licence). Drag over a plot to zoom, double-click to see all; values show under the pointer."
)


def _paragraph(text: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>" if text else ""


def _figure(plot: AnyPlot) -> str:
    name, title = escape(plot.name), escape(plot.title)
    tools = "".join(
        f'<button type="button" data-plot="{name}" data-zoom="{what}" aria-label="{label}: {title}">{label}</button>'
        for what, label in _TOOLS.items()
    )
    return (
        f'<figure>\n<h3>{title}</h3>\n<figcaption id="{name}-says">{escape(plot.says)}</figcaption>\n'
        f'<div class="plot" id="{name}" role="img" aria-label="{title}" aria-describedby="{name}-says"></div>\n'
        f'<div class="tools">{tools}</div>\n<details data-plot="{name}"><summary>The numbers of this plot</summary>'
        f'<div class="wide" tabindex="0" role="region" aria-label="Numbers: {title}"></div></details>\n</figure>'
    )


def _sortable(table: Table, about: str) -> str:
    marks = [' class="n"' if numeric else "" for numeric in table.numeric]
    heads = "".join(
        f'<th scope="col"{mark} aria-sort="none"><button type="button">{escape(heading)}</button></th>'
        for heading, mark in zip(table.headings, marks, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, mark) for cell, mark in zip(row, marks, strict=True))}</tr>" for row in table.rows
    )
    rest = f" {table.left_out:,} slower designs are left out." if table.left_out else ""
    return (
        f'<h2 id="runs">Runs</h2>\n{_paragraph(f"Press a heading to sort by it.{rest}")}\n'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="runs"><table class="sortable">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n{_paragraph(about, 'soft')}"
    )


def _cell(cell: Cell, mark: str) -> str:
    key = "" if cell.key is None else escape(str(cell.key))
    return f'<td{mark or _long(cell.shown)} data-key="{key}">{escape(cell.shown)}</td>'


def _sources(headings: Sequence[str], lines: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    heads = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    rows = "\n".join(
        "<tr>" + "".join(f"<td{_long(cell)}>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines
    )
    said = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<h2 id="sources">Where the numbers come from</h2>\n'
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="sources"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
        + (f'\n<p class="soft">The runs note:</p>\n<ul class="soft">{said}</ul>' if said else "")
    )


def _long(text: str) -> str:
    """What lets a cell be broken into lines."""
    return ' class="long"' if len(text) > _LONG else ""


def _embedded(data: object) -> str:
    """JSON that ends no script element, whatever its texts hold."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _own(name: str) -> str:
    return (resources.files("analysis.html") / name).read_text("utf-8")


@cache
def _library() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()
