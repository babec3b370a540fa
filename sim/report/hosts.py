"""Hosts by name, and what one expert takes on one of them in each format, as tables and as JSON."""

from typing import Any

from rich.table import Table

from sim.machine.assembly import Assembly
from sim.machine.hardware import DEFAULT_HARDWARE, HostCompute
from sim.machine.hosts import host_kinds, host_of
from sim.machine.unpacking import core_gweights
from traces.models.known import model_spec
from traces.models.quantised import quantised

FORMATS = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_xs", "mxfp4", "q2_k")
"""What `host_json` gives an expert in, if nothing is named."""


def hosts_json() -> list[dict[str, Any]]:
    """Every kind of host that is built in: what its name leaves open is None."""
    return [
        {"name": name, **kind.model_dump(mode="json"), "share": kind.share.value, "source": kind.share.source}
        for name, kind in host_kinds().items()
    ]


def hosts_table() -> Table:
    """The kinds of hosts that are built in, one a row."""
    table = Table(title="Hosts", caption="a channel moves 8 bytes a transfer")
    for heading in ("host", "MT/s", "channels", "sustained", "cores", "source"):
        table.add_column(heading, justify="left" if heading in ("host", "source") else "right")
    for kind in hosts_json():
        numbers = (str(kind[key] or "named") for key in ("transfers_mts", "channels"))
        table.add_row(kind["name"], *numbers, f"{kind['share']:.0%}", str(kind["cores"]), kind["source"])
    return table


def host_json(name: str, model: str, quant: str | None = None, link: str = "pcie4x16") -> dict[str, Any]:
    """What one expert of ``model`` takes on a host and to copy over ``link``, in one precision or in `FORMATS`.

    Microseconds: ``reading`` its weights, ``beside`` a copy too, ``row`` of arithmetic (None: not known), ``floor`` and
    ``one_row`` in all, and ``copy``. Raises as `host_of`, `link_of`, `model_spec` and `quantised` do.
    """
    machine = Assembly(DEFAULT_HARDWARE, link=link).load()
    host = host_of(name, machine.link_bytes_per_s)
    rows = []
    for form in FORMATS if quant is None else (quant,):
        spec = quantised(model_spec(model), form)
        size, rate = max(spec.expert_bytes), core_gweights(spec, host.core_gweights)
        row = None if rate is None or host.cores is None else spec.expert_parameters / (rate * host.cores) / 1e3
        reading, floor = size / host.host_gbps.value / 1e3, host.floor_us.value if host.floor_us else 0.0
        rows.append({
            "format": form, "bytes": size, "reading_us": reading, "beside_us": size / host.shared_gbps.value / 1e3,
            "row_us": row, "floor_us": floor, "one_row_us": max(reading, row or 0.0) + floor,
            "copy_us": machine.copy_ns(size) / 1e3,
        })  # fmt: skip
    return {"host": name, "model": model, "link": link, **_figures(host), "expert": rows}


def _figures(host: HostCompute) -> dict[str, Any]:
    return {
        "host_gbps": host.host_gbps.value, "shared_gbps": host.shared_gbps.value, "cores": host.cores,
        "source": host.host_gbps.source,
    }  # fmt: skip


def host_table(name: str, model: str, quant: str | None = None, link: str = "pcie4x16") -> Table:
    """What `host_json` gives, one format a row. Raises as it does."""
    found = host_json(name, model, quant, link)
    table = Table(
        title=f"One expert of {model} on {name}, microseconds",
        caption=f"{found['host_gbps']:g} GB/s, beside a copy over {link} {found['shared_gbps']:g}; "
        f"{found['cores'] or 'unknown'} cores; {found['source']}",
    )
    for heading in ("format", "MB", "reading", "beside a copy", "a row's arithmetic", "one row in all", "copy"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for row in found["expert"]:
        times = (row[key] for key in ("reading_us", "beside_us", "row_us", "one_row_us", "copy_us"))
        shown = ("unknown" if time is None else f"{time:.1f}" for time in times)
        table.add_row(row["format"], f"{row['bytes'] / 1e6:.2f}", *shown)
    return table
