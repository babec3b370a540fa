"""Hosts by name: the memory that experts are read from, and the cores that compute them where they lie."""

import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path

from pydantic import Field

from ground.errors import InputError
from sim.machine.figures import Checked, Figure, Number, Profile
from sim.machine.hardware import HostCompute
from sim.machine.unpacking import core_rates

_BYTES = 8
_MOST_CHANNELS = 24
_LEAST = 0.1
"""Of the host's bandwidth that copies leave, however fast the link is: processors are never shut out."""
FLOOR = Figure(value=5, source="assumed: a choice; three products, after each of which all threads wait for each other")


class _Kind(Checked):
    """Hosts that differ in the number and speed of their memory channels."""

    transfers_mts: int | None = Field(None, ge=1)
    """Million transfers a second, where the name does not say."""
    channels: int | None = Field(None, ge=1)
    """How many channels, where the name does not say."""
    share: Number
    """Share of the channels' peak that is sustained."""
    cores: int = Field(ge=1)
    """How many cores compute, unless the name says."""


class HostProfile(HostCompute, Profile):
    """A host of one's own, from a file."""


@cache
def host_kinds() -> dict[str, _Kind]:
    """The kinds of hosts that are built in, by name."""
    text = resources.files("sim.machine").joinpath("hosts.toml").read_text("utf-8")
    return {name: _Kind.model_validate(table) for name, table in tomllib.loads(text).items()}


def host_of(name: str, link_bytes_per_s: float, share: Figure | None = None) -> HostCompute:
    """The host that ``ddr5-5600x2``, ``epyc-9004x12`` or ``ddr4-3200x2:16`` names, ``:16`` being cores; or a file's.

    ``share`` of the channels' peak is sustained, by default what memory tests find; a file's figures stay. While
    experts are copied, the link takes its part of the memory's bandwidth: what it leaves is ``shared_gbps``. Raises
    InputError for another name, OSError if a file cannot be read.
    """
    if name.endswith(".toml"):
        found = HostProfile.parse(Path(name).read_bytes(), name)
        return HostCompute.model_validate(found.model_dump())
    gbps, cores, source = _memory(name, share)
    left = max(_LEAST * gbps, gbps - link_bytes_per_s / 1e9)
    return HostCompute(
        host_gbps=Figure(value=gbps, source=source),
        shared_gbps=Figure(
            value=min(gbps, left), source=f"computed: what a copy over this link leaves of it; {source}"
        ),
        floor_us=FLOOR,
        cores=cores,
        core_gweights=dict(core_rates()),
    )


def _memory(name: str, share: Figure | None) -> tuple[float, int, str]:
    """Sustained GB/s of a named host, its cores, and where the share that is sustained is from."""
    text = name.strip().lower()
    kind = next((one for one in host_kinds() if re.match(rf"{re.escape(one)}(?=$|[-x:])", text)), None)
    match = None if kind is None else re.fullmatch(r"(?:-(\d{3,5}))?(?:x(\d{1,2}))?(?::(\d{1,3}))?", text[len(kind) :])
    if kind is None or match is None:
        raise _unknown(name)
    about = host_kinds()[kind]
    speed = about.transfers_mts if match[1] is None else int(match[1])
    channels = about.channels if match[2] is None else int(match[2])
    if speed is None or not channels or channels > _MOST_CHANNELS or match[3] == "0":
        raise _unknown(name)
    peak = speed * _BYTES * channels / 1e3
    share = share or about.share
    source = f"{share.value:.3g} of {peak:g} GB/s, {share.source}"
    return round(peak * share.value, 3), int(match[3] or about.cores), source


def _unknown(name: str) -> InputError:
    return InputError(
        f"host {name!r}: expected memory and channels, such as ddr5-5600x2, ddr4-3200x2:16 (16 cores) or epyc-9004x12, "
        f"of {', '.join(host_kinds())}; or a .toml with the fields of [host]"
    )
