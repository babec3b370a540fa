"""What figures share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported where a figure is drawn


def panels(
    figure: Figure, titles: Sequence[str], width: float, height: float, below: str, beside: Sequence[str], **shared: Any
) -> Any:
    """Axes (titles, rows) with a grid: a column a title, a row each of the labels ``beside``; ``below`` is the x-axis.

    A panel is ``width`` inches wide, the figure ``height`` high; ``shared`` says, as matplotlib does, which axes share
    a scale.
    """
    figure.set_size_inches(1 + width * len(titles), height)
    axes: Any = figure.subplots(len(beside), len(titles), squeeze=False, **shared)
    for column, title in zip(axes.T, titles, strict=True):
        column[0].set_title(title, fontsize=9)
        column[-1].set_xlabel(below)
    for ax, label in zip(axes[:, 0], beside, strict=True):
        ax.set_ylabel(label)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    return axes.T


_LETTERS, _HANDLE = 15, 6
"""How many letters of a legend an inch holds, and how many an entry's sample of its line takes."""


def legend(figure: Figure) -> None:
    """One legend below all panels, each label once; none where nothing has a label."""
    found: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        room = int(figure.get_size_inches()[0] * _LETTERS / (max(map(len, found)) + _HANDLE))
        columns = max(1, min(5, len(found), room))
        figure.legend(found.values(), found, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
