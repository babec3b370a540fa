"""Into how many pieces an expert's copy is cut: the same for a real run, which hands them over, and a simulated one.

A prefetch that is being copied gives way to a demand at the end of a piece. A real run hands copies to the driver piece
by piece, so a piece is short beside a layer's time, and long beside what handing it over takes the host.
"""

PIECE_BYTES = 8 * 2**20
"""A piece at most: about 150 us on PCIe 5 x16."""
SMALL_BYTES = 12 * 2**20
"""An expert up to this size goes whole: to hand a copy over takes the host 10 to 15 us, and it has layers to launch."""


def goes_whole(size: int) -> bool:
    """Whether an expert of ``size`` bytes is handed over whole, whatever pieces are asked for."""
    return size <= SMALL_BYTES


def pieces_of(size: int, matrices: int) -> int:
    """Equal pieces of an expert of ``size`` bytes: of each of its ``matrices`` as few as `PIECE_BYTES` allow."""
    return 1 if goes_whole(size) else matrices * -(-size // (matrices * PIECE_BYTES))
