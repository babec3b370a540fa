"""How much a calibration measures: all of it, less of it, or next to nothing."""

from dataclasses import dataclass

from realrun.calibrate.copies import PLACES, SIZES
from realrun.calibrate.ffn_times import ROWS
from realrun.calibrate.layer_times import CONTEXTS, PROMPTS
from realrun.calibrate.lookup_costs import TABLES


@dataclass(frozen=True)
class Thoroughness:
    """How much to measure."""

    copies: tuple[int, ...] = SIZES
    """Bytes of copies."""
    rows: tuple[int, ...] = ROWS
    """Of FFNs."""
    contexts: tuple[int, ...] = CONTEXTS
    """Cached tokens of layers."""
    prompts: tuple[int, ...] = PROMPTS
    """Rows of layers."""
    tables: tuple[tuple[int, int], ...] = TABLES
    """Entries and dimensions of what is searched."""
    memory: int = 2**31
    """Bytes over which memory is timed."""
    square: int = 8192
    """Rows and columns of the largest product."""
    product: tuple[int, int, int] = (2048, 4096, 14336)
    """Rows, hidden size and width of a prompt's product with an expert."""
    at_once: int = SIZES[-2]
    """Bytes of copies that share the machine with others."""
    places: tuple[int, int] = PLACES
    """Bytes of host and device memory that copies are spread over."""
    hosted: int = 1
    """What widths of experts on the host are divided by."""
    repeats: int = 20
    """Runs of each measurement."""
    later: int = 2
    """How often loops are timed again later, since a host shared with others has slow minutes."""


FULL = Thoroughness()
QUICK = Thoroughness(
    rows=(1, 16, 256), contexts=(64, 1024, 4096), prompts=(1, 16, 128, 1024), tables=TABLES[1:4], repeats=8, later=0
)
TINY = Thoroughness(
    copies=(2**14, 2**16, 2**18), rows=(1, 2, 4), contexts=(8, 32), prompts=(1, 8), tables=((50, 64), (200, 64)),
    memory=2**22, square=128, product=(64, 64, 128), at_once=2**18, places=(2**20, 2**20), hosted=64, repeats=3,
)  # fmt: skip
"""For a CPU, which is there to try things out."""
