"""What figures share."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def panels(figure: "Figure", titles: Sequence[str], width: float, height: float, rows: int = 1, **shared: Any) -> Any:
    """Axes (rows, titles) with a grid, a title over each column.

    A panel is ``width`` inches wide, the figure ``height`` high; ``shared`` says, as matplotlib does, which axes share
    a scale.
    """
    figure.set_size_inches(1 + width * len(titles), height)
    axes: Any = figure.subplots(rows, len(titles), squeeze=False, **shared)
    for ax, title in zip(axes[0], titles, strict=True):
        ax.set_title(title, fontsize=9)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
    return axes


def legend(figure: "Figure", axes: Iterable[Any]) -> None:
    """One legend below all panels, each label once."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(), found, loc="outside lower center", ncols=min(5, len(found)), fontsize=8, frameon=False
    )
