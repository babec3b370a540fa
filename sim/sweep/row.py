"""What became of a design: its status, and the figures of its replay by name, with units in the names."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from sim.report.metrics import Report, ratio
from sim.run.scene import Scene

Status = Literal["ok", "refused", "failed"]
"""Run; not run, since something about it is wrong, and always will be; or failed, and tried again by the next sweep."""


@dataclass(frozen=True)
class Row:
    """The outcome of one design.

    Attributes:
        key: the identity of the design.
        status, reason: whether it was run, and if not, why.
        values: the figures of its replay.
        sequences: what each sequence had of decode, ``tokens`` and ``ns``, where sequences ran one at a time.
        seconds: what it took. Not part of any result.
    """

    key: str
    status: Status
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    sequences: Mapping[str, list[int]] | None = None
    seconds: float = 0.0

    def to_line(self) -> bytes:
        """It as one line of JSON, with a check of all the rest at its end."""
        text = json.dumps(asdict(self), allow_nan=False, separators=(",", ":")).encode()
        return text[:-1] + _check(text)

    @classmethod
    def of_line(cls, line: bytes) -> Self | None:
        """The row of a line; None for a line that is damaged, be it by a digit."""
        text = line[: -len(_check(b""))] + b"}"
        if line != text[:-1] + _check(text):
            return None
        try:
            row = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        whole = isinstance(row.key, str) and row.status in ("ok", "refused", "failed") and isinstance(row.values, dict)
        return row if whole else None


def _check(text: bytes) -> bytes:
    """What ends a line whose other fields are those of ``text``."""
    return f',"check":"{zlib.crc32(text):08x}"}}\n'.encode()


def figures(report: Report, scene: Scene) -> dict[str, Any]:
    """The figures of a report side by side; counters are those of decode where nothing else is said."""
    p, s, needed = report.provenance, report.settings, sum(report.gpu_bytes.values())
    time, bounds = report.decode.time_ms, report.bounds
    return {
        "tokens_per_s": report.tokens_per_s,
        "compute_bound_tokens_per_s": bounds["compute_tokens_per_s"],
        "link_bound_tokens_per_s": bounds["link_tokens_per_s"],
        "joint_bound_tokens_per_s": bounds["joint_tokens_per_s"],
        "bound_tokens_per_s": min((b for name in ("compute_tokens_per_s", "link_tokens_per_s", "joint_tokens_per_s")
                                   if (b := bounds[name]) is not None), default=None),
        "min_hit_ratio": bounds["min_hit_ratio"],
        "efficiency_ratio": report.efficiency,
        **{f"ttft_{name}_ms": value for name, value in vars(report.ttft_ms).items()},
        **{f"tpot_{name}_ms": value for name, value in vars(report.tpot_ms).items()},
        **report.decode.columns(),
        "stall_over_compute_ratio": ratio(time["stall_demand"] + time["stall_late"], time["compute"]),
        **{f"prefill_{name}": value for name, value in report.prefill.columns().items()},
        "run_ms": report.run_ms,
        **{f"gpu_{name}_bytes": size for name, size in report.gpu_bytes.items()},
        "gpu_needed_bytes": needed,
        "gpu_memory_bytes": scene.hardware.gpu_bytes,
        "gpu_memory_ratio": ratio(needed, scene.hardware.gpu_bytes),
        "expert_bytes": max(scene.model.expert_bytes),
        "replayed_model": p["model"],
        "replayed_hardware": p["hardware"],
        "replayed_software": p["software"],
        "replayed_policy": report.policy,
        "replayed_parameters": json.dumps(report.parameters, sort_keys=True, default=str),
        "reference": s["reference"],
        "cache_slots": s["cache"],
        "cache_bytes": s["cache_bytes"],
        "link_discipline": s["discipline"],
        "link_chunks": s["chunks"],
        "link_source": p["link_source"],
        "trace_sha256": p["trace_sha256"],
        "code": p["code"],
        "clock": report.clock,
        "engine_used": s["engine"],
        "notes": " | ".join(report.notes),
    }  # fmt: skip
