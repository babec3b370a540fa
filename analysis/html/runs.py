"""The runs that a page is about: reports of ``sim replay`` and ``sim compare`` as JSON, and folders of ``sim sweep``.

All become rows alike, with the names that the table of a sweep gives its columns.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.text import printable
from sim.sweep.log import LOG
from sim.sweep.row import Row
from sim.sweep.table import PARQUET
from traces.trace import Trace

_STATUS = "status"  # the first column of a sweep's table that is no field of its designs
_PROVENANCE = ("trace_sha256", "code", "link_source", "clock", "engine_used", "notes")
_REPLAYED = ("model", "hardware", "software", "policy", "parameters")
_FIGURES = (
    "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "compute_bound_tokens_per_s", "link_bound_tokens_per_s",
    "min_hit_ratio", "efficiency_ratio", "ttft_mean_ms", "tpot_mean_ms", "tpot_p99_ms", "tokens", "lookups", "hits",
    "hit_ratio", "late_ratio", "miss_ratio", "hosted", "link_demand_bytes", "link_prefetch_bytes", "link_wasted_bytes",
    "time_compute_ms", "time_stall_demand_ms", "time_stall_late_ms", "time_stall_host_ms", "time_predict_ms",
    "time_other_ms", "gpu_needed_bytes", "gpu_memory_bytes", "reference", "cache_slots",
    "cache_bytes", "expert_bytes", "identity", "reason", _STATUS,
)  # fmt: skip
WANTED = (*_FIGURES, *_PROVENANCE, *(f"replayed_{name}" for name in _REPLAYED))
"""Columns that pages read; a run may lack some."""


@dataclass(frozen=True)
class Run:
    """One run: ``fields`` say what was run, ``values`` what came out, ``source`` is the file or folder it is from.

    One that is ``beyond`` the limits is no answer.
    """

    fields: Mapping[str, Any]
    values: Mapping[str, Any]
    source: Path
    beyond: bool = False

    @property
    def ok(self) -> bool:
        """Whether it was run, to a speed."""
        return self.values[_STATUS] == "ok" and self.values["tokens_per_s"] is not None

    @property
    def speed(self) -> float:
        """Decode tokens a second of a run that is `ok`."""
        return float(self.values["tokens_per_s"])

    @property
    def a_system(self) -> bool:
        """Whether it is ok, no reference and within the limits."""
        return self.ok and not self.values.get("reference") and not self.beyond


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all ``paths``. Raises InputError for anything else, OSError, ModuleNotFoundError without pyarrow."""
    runs = [run for path in paths for run in (_swept(path) if path.is_dir() else _reported(path))]
    if not any(run.ok for run in runs):
        raise InputError(f"{', '.join(map(printable, paths))}: no run that came to an end; expected one at least")
    return runs


def files_of(path: Path) -> list[Path]:
    """The files that are read of one path."""
    return [path / PARQUET, path / LOG] if path.is_dir() else [path]


def _reported(path: Path) -> Iterator[Run]:
    try:
        data = json.loads(path.read_text("utf-8"))
        for report in data if isinstance(data, list) else [data]:
            yield _of_report(report, path)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as wrong:
        raise InputError(
            f"{printable(path)}: not what `sim replay --json` or `sim compare --json` writes "
            f"({type(wrong).__name__}: {printable(str(wrong)):.80})"
        ) from None


def _of_report(report: Mapping[str, Any], path: Path) -> Run:
    if "error" in report:
        return Run({"policy": report["policy"]}, {_STATUS: "refused", "reason": report["error"]}, path)
    made, settings, bounds = report["provenance"], report["settings"], report["bounds"]
    given = "".join(f",{name}={value}" for name, value in settings.get("set", {}).items())
    bytes_ = settings["cache_bytes"]
    fields = {
        "trace": " + ".join([made["trace"], *(str(one.get("trace", "")) for one in made.get("joined", []))]),
        "model": made["model"], "hardware": made["hardware"], "software": made["software"],
        **{name: settings[name] for name in ("batch", "split", "discipline", "chunks") if name in settings},
        "cache": f"{bytes_ / 2**30:.1f} GiB", "seed": made["seed"], "policy": f"{report['policy']}{given}",
    }  # fmt: skip
    values = {name: report[name] for name in ("tokens_per_s", "tokens", "lookups", "hits", "hosted", "clock")}
    values |= {name: report[name] for name in ("hit_ratio", "late_ratio", "miss_ratio")}
    values |= {f"link_{kind}_bytes": size for kind, size in report["link_bytes"].items()}
    values |= {f"time_{part}_ms": ms for part, ms in report["time_ms"].items()}
    values |= {f"replayed_{name}": made[name] for name in ("model", "hardware", "software")}
    values |= {
        _STATUS: "ok", "compute_bound_tokens_per_s": bounds["compute_tokens_per_s"],
        "link_bound_tokens_per_s": bounds["link_tokens_per_s"], "min_hit_ratio": bounds.get("min_hit_ratio"),
        "efficiency_ratio": report["efficiency"], "ttft_mean_ms": report["ttft_ms"]["mean"],
        "tpot_mean_ms": report["tpot_ms"]["mean"], "tpot_p99_ms": report["tpot_ms"]["p99"],
        "gpu_needed_bytes": sum(report["gpu_bytes"].values()), "reference": settings.get("reference", ""),
        "cache_slots": settings["cache"], "cache_bytes": bytes_, "trace_sha256": made["trace_sha256"],
        "captured": made.get("captured"), "code": made["code"], "link_source": made["link_source"],
        "engine_used": settings.get("engine"),
        "notes": " | ".join(report["notes"]), "replayed_policy": report["policy"],
        "replayed_parameters": json.dumps(report["parameters"], sort_keys=True),
    }  # fmt: skip
    return Run(fields, values, path)


def _swept(folder: Path) -> Iterator[Run]:
    from pyarrow import ArrowException, parquet

    path = folder / PARQUET
    if not path.is_file():
        raise InputError(f"{printable(path)}: not there; expected the folder of a sweep that has ended")
    try:
        names = parquet.read_schema(path).names
        fields = names[: names.index(_STATUS)]
        table = parquet.read_table(path, columns=[*fields, *(name for name in names if name in WANTED)])
    except (ArrowException, ValueError) as wrong:
        raise InputError(f"{printable(path)}: not the table of a sweep ({printable(str(wrong)):.80})") from None
    for row in table.to_pylist():
        design = {name: row.get(name) for name in fields}
        # What a sweep leaves to its defaults is told by what was replayed.
        told = {name: row.get(f"replayed_{name}") for name in ("model", "hardware", "software", "policy")}
        design |= {name: value for name, value in told.items() if not any(f.split(".")[0] == name for f in fields)}
        captured = _captured(str(design.get("trace") or ""), str(row.get("trace_sha256") or ""))
        yield Run(design, {name: row.get(name) for name in WANTED} | {"captured": captured}, folder)


@cache
def _captured(path: str, sha256: str) -> str | None:
    """What a trace says that it was captured from; None if the very file is not at hand."""
    try:
        with Path(path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return None
        what = Trace.load_meta(path).get("captured", {}).get("what")
    except (OSError, InputError):
        return None
    return None if what is None else str(what)


def sequences_of(run: Run) -> Mapping[str, list[int]] | None:
    """What each sequence had of a sweep's run, as `sim.sweep.row.Row` has it; None where that is not known."""
    key, log = run.values.get("identity"), run.source / LOG
    if not key or not log.is_file():
        return None
    found = None
    with log.open("rb") as file:
        for line in file:
            if key.encode() in line and (row := Row.of_line(line)) is not None and row.key == key:
                found = row.sequences  # of several rows of a design the last counts
    return found
