"""Figures of matplotlib as small PNG files."""

from io import BytesIO
from pathlib import Path
from typing import Any

COLOURS = 64
"""More than a plot has; what lies between them smooths edges."""


def save_png(figure: Any, path: str | Path, dpi: int) -> None:
    """Write ``figure`` in `COLOURS` colours, a quarter of the bytes of all; the same bytes for the same figure."""
    from PIL import Image  # matplotlib needs it anyway

    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    with Image.open(buffer) as image:
        few = image.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, "PNG", optimize=True)
