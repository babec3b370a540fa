"""Runs as a page reads them, with the fields and figures that a test says."""

from pathlib import Path
from typing import Any

from analysis.html.runs import WANTED, Run

GIB = 2**30


def run(speed: float | None, policy: str = "lru", fields: dict[str, Any] | None = None, **values: Any) -> Run:
    """A run of ``policy`` with ``speed`` tokens/s, None for one that could not be run."""
    said = {"trace": "law.npz", "cache": "25%"} | (fields or {}) | {"policy": policy}
    usual = {
        "status": "refused" if speed is None else "ok", "tokens_per_s": speed, "reference": "", "clock": "simulated",
        "replayed_policy": policy, "replayed_parameters": "{}", "replayed_model": "toy", "replayed_hardware": "card",
        "gpu_memory_bytes": 80 * GIB, "trace_sha256": "ab" * 32, "link_source": "measured",
    }  # fmt: skip
    beyond = bool(values.pop("beyond", False))
    return Run(said, dict.fromkeys(WANTED) | usual | values, Path("out"), beyond)


def sized(speed: float, policy: str, percent: int, **values: Any) -> Run:
    """A run with a cache of ``percent``, of as many GiB, with bounds, hits and times."""
    more = {
        "cache_bytes": percent * GIB, "gpu_needed_bytes": (percent + 2) * GIB, "compute_bound_tokens_per_s": 40.0,
        "link_bound_tokens_per_s": percent / 2, "hit_ratio": percent / 200, "late_ratio": 0.1, "miss_ratio": 0.2,
        "min_hit_ratio": percent / 100, "tokens": 10, "time_compute_ms": 100.0, "time_stall_demand_ms": 50.0,
    }  # fmt: skip
    return run(speed, policy, {"cache": f"{percent}%"}, **(more | values))
