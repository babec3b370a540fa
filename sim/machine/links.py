"""Links by generation and lanes: what pinned copies reach, from measurements of all sixteen lanes."""

import re
import tomllib
from functools import cache
from importlib import resources

from ground.errors import InputError
from sim.machine.figures import Checked, Figure, Number
from sim.machine.hardware import Link

_LANES = 16


class _Generation(Checked):
    """What a generation of PCIe reaches."""

    x16_gbps: Number
    """GB/s of pinned copies over 16 lanes."""
    latency_us: Number
    """Microseconds that every copy takes whatever its size."""


@cache
def _generations() -> dict[str, _Generation]:
    text = resources.files("sim.machine").joinpath("links.toml").read_text("utf-8")
    return {name: _Generation.model_validate(table) for name, table in tomllib.loads(text).items()}


def link_of(name: str) -> Link:
    """The link that ``pcie4x8`` names: a generation, and 1, 2, 4, 8 or 16 lanes. Raises InputError for another name.

    Fewer lanes than 16 are taken to reach their share of what 16 reach.
    """
    match = re.fullmatch(r"(pcie\d)x(1|2|4|8|16)", name.strip().lower())
    known = _generations().get(match[1]) if match else None
    if match is None or known is None:
        raise InputError(
            f"link {name!r}: expected a generation and its lanes, such as pcie4x8: {', '.join(_generations())} and "
            "x1, x2, x4, x8, x16"
        )
    lanes, whole = int(match[2]), known.x16_gbps
    share = "" if lanes == _LANES else f"; {lanes} of its {_LANES} lanes"
    return Link(
        name=f"PCIe {match[1][-1]} x{lanes}",
        latency_us=known.latency_us,
        gbps=Figure(value=whole.value * lanes / _LANES, source=whole.source + share),
    )
