"""One placement tried on one machine: how fast it is, what binds it, and what is filled in into its command."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.advise.asked import Asked
from sim.advise.engines import Engine, Placement
from sim.plan import Plan
from sim.report.metrics import Report
from sim.report.shares import shares
from sim.run.prepared import PreparedRun, prepare
from sim.run.scene import Scene
from sim.sweep.intervals import interval
from traces.schema import PREFILL

HOST_REST = 4 * 2**30
"""Bytes of the host's memory that are not for experts: the system and the engine itself."""
_THREADS = 8
"""Where nothing says how many cores a host has."""
_LLAMA_KV = {"bf16": "f16"}
"""What llama.cpp's default is called where keys and values take two bytes."""


@dataclass(frozen=True)
class Trial:
    """A placement of an engine on a machine.

    Attributes:
        report: of the simulated run; None where it cannot be run, for ``reason``.
        low, high: 95 % interval of the speed, by which sequences were replayed; None where there are too few.
        binds: what a token waits for, as shares of its time.
        command: as a person types it, in words of the engine.
        host_bytes: of experts that lie on the host.
        filled: what the command's braces hold.
    """

    engine: Engine
    placement: Placement
    report: Report | None = None
    reason: str = ""
    low: float | None = None
    high: float | None = None
    binds: Mapping[str, float] | None = None
    command: str = ""
    host_bytes: int = 0
    filled: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Decode tokens/s; 0 where it cannot be run."""
        return (self.report.tokens_per_s or 0.0) if self.report else 0.0

    @property
    def bottleneck(self) -> str:
        """What a token waits for most."""
        return max(self.binds, key=lambda part: (self.binds or {})[part]) if self.binds else ""

    @property
    def notes(self) -> list[str]:
        """What a person should know of engine and placement."""
        return [note for note in (self.engine.note, self.placement.note) if note]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        report = self.report
        return {
            "engine": self.engine.name, "placement": self.placement.name, "policy": self.placement.policy,
            "tokens_per_s": report and report.tokens_per_s, "tokens_per_s_low": self.low,
            "tokens_per_s_high": self.high, "ttft_ms": report and report.ttft_ms.mean, "binds": self.binds,
            "hangs_on_routing": self.placement.routing, "host_bytes": self.host_bytes, "command": self.command,
            "notes": self.notes, "source": self.engine.source, "reason": self.reason,
        }  # fmt: skip


def tried(engine: Engine, placement: Placement, here: Scene, asked: Asked) -> Trial:
    """Replay one placement; whatever keeps it from running is its ``reason``."""
    whole = here.model.all_expert_bytes
    if placement.whole != (here.budget >= whole):
        short = (whole - here.budget) / 2**30
        lacking = f"{short:.1f} GiB too little on the card for all experts"
        reason = lacking if placement.whole else "all experts fit the card"
        return Trial(engine, placement, reason=reason)
    policy = placement.named()
    try:
        run = prepare(here, policy.name, policy.values)
        on_host = whole - (whole if placement.whole else _resident_bytes(run))
        if asked.host_memory is not None and on_host and on_host + HOST_REST > asked.host_memory:
            wanted, rest, there = (size / 2**30 for size in (on_host + HOST_REST, HOST_REST, asked.host_memory))
            reason = f"{wanted:.1f} GiB of host memory wanted, {rest:.0f} of it beside experts, and it has {there:.1f}"
            return Trial(engine, placement, reason=reason, host_bytes=on_host)
        done = run.execute()
    except InputError as wrong:
        return Trial(engine, placement, reason=str(wrong))
    report = run.simulated(done)
    low, high = None, None
    if here.batch == 1:
        parts = shares(here.trace, here.work, done.log)
        low, high = interval({"tokens": parts.tokens.tolist(), "ns": parts.ns.tolist()})
    filled = _filled(run, report)
    filled["method"] = engine.method(asked.form, here.model)
    command = placement.command.format(**filled)
    return Trial(engine, placement, report, "", low, high, _binds(here, report), command, on_host, filled)


def _binds(here: Scene, report: Report) -> dict[str, float]:
    """Shares of a token's time: reading weights on the GPU, launching, the link, the host's experts, predicting."""
    parts = report.decode.time_ms
    launching = here.bound.loop_share or 0.0
    compute = parts["compute"] + parts["other"]
    times = {
        "GPU memory": compute * (1 - launching),
        "launches": compute * launching,
        "link": parts["stall_demand"] + parts["stall_late"],
        "host": parts["stall_host"],
        "predictions": parts["predict"],
    }
    whole = sum(times.values()) or 1.0
    return {name: round(ms / whole, 4) for name, ms in times.items()}


def _resident_bytes(run: PreparedRun) -> int:
    """Bytes of experts that stay on the card for good; of a cache none, since the host keeps all that it holds."""
    placed = _placed(run.plan)
    return int(np.array(run.scene.model.expert_bytes, np.int64)[placed // run.scene.model.experts].sum())


def _placed(plan: Plan) -> np.ndarray:
    return np.zeros(0, np.int64) if plan.host is None else plan.host.reserved


def _filled(run: PreparedRun, report: Report) -> dict[str, Any]:
    """What commands may have in braces."""
    here, model = run.scene, run.scene.model
    held = np.bincount(_placed(run.plan) // model.experts, minlength=model.routed_layers)
    host, memory = here.hardware.host, here.memory
    hosted, copied = report.decode.hosted, report.decode.misses - report.decode.hosted
    return {
        "context": memory.context if memory and memory.context else int(here.trace.position.max()) + 1,
        "kv": _LLAMA_KV.get(model.kv_format, model.kv_format),
        "cpu_layers": int((held < model.experts).sum()) + model.moe_layers[0],
        "gpu_experts": int(held.mean()),
        "cache_mib": here.budget // 2**20,
        "slots": here.budget // max(model.expert_bytes),
        "cpu_share": f"{hosted / (hosted + copied):.2f}" if hosted + copied else "0",
        "threads": host.cores if host and host.cores else _THREADS,
        "host_gib": -(-int((model.all_expert_bytes - _resident_bytes(run)) // 2**20) // 1024),
    }


def prompt_rows(here: Scene) -> float:
    """Rows of a prompt of the scene, on average."""
    steps = here.work.schedule.phase == PREFILL
    return float(np.diff(here.work.schedule.offsets)[steps].mean()) if steps.any() else 0.0
