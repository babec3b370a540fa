"""Figures of matplotlib, drawn without a window, and as small PNG files."""

import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = 64
"""More than a plot has; what lies between them smooths edges."""


def import_matplotlib() -> None:
    """Import matplotlib whatever MPLBACKEND says. Raises ModuleNotFoundError where it is not installed.

    The variable is meant for other programs, a notebook for example. Importing fails if it names a back-end that is
    not installed here.
    """
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib  # noqa: F401
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def new_figure(**options: Any) -> "Figure":
    """An empty figure on an Agg canvas, which needs no window; ``options`` are those of matplotlib's Figure.

    Raises ModuleNotFoundError where matplotlib is not installed.
    """
    import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**options)
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: "Figure", path: str | Path, dpi: int) -> None:
    """Write ``figure`` in `COLOURS` colours, a quarter of the bytes of all; the same bytes for the same figure."""
    from PIL import Image  # matplotlib needs it anyway

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    with Image.open(buffer) as image:
        few = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, "PNG", optimize=True)
