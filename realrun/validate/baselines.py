"""What a person would use today, on the same machine and with the same shapes: time per layer of a decoded token.

- Hugging Face accelerate's ``cpu_offload``: a model of a few layers of these dimensions, built by transformers, its
  weights in ordinary host memory and copied for each module's forward. transformers keeps the experts of a layer in one
  tensor, so all of them are copied for every token.
- Plain on-demand copies: only the routed experts, copied from memory that is not pinned, then computed; nothing kept.

Both are set against the measured runs of this project, by milliseconds of one layer.
"""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from ground.errors import InputError
from ground.files import keep_apart
from ground.output import written
from realrun.calibrate.machine import Machine
from realrun.device.devices import refuse_too_little
from realrun.device.host_memory import free_host_bytes
from realrun.engine.experts import expert_size, matrices
from realrun.engine.layers import feed_forward
from realrun.validate.record import as_written, made_by
from traces.capture.positions import cache_name
from traces.models.known import model_spec
from traces.models.spec import ModelSpec

LAYERS = 2
TOKENS = 3
CALLS = 12


def baselines(machine: Machine, model: ModelSpec, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of a layer: ``{ms: {name: ...}, ratios: {name: sentence}, left_out: {...}}``.

    ``reports`` are a validation's; its measured runs, by policy and cache, are what the baselines are divided by. What
    cannot be measured here is left out with its reason.
    """
    found: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, way in (("accelerate cpu_offload", accelerate_ms), ("on-demand copies, pageable", pageable_ms)):
        try:
            found[name] = way(machine, model)
        except (InputError, ModuleNotFoundError, RuntimeError) as reason:
            left_out[name] = str(reason).splitlines()[0]
    ours = _ours(reports, model)
    best = min(ours, key=ours.__getitem__, default=None)
    ratios = {name: f"{ms:.2f} ms a layer{_against(ms, ours, best)}" for name, ms in found.items()}
    return {"ms": found | ours, "ratios": ratios | left_out, "left_out": left_out}


def _ours(reports: Sequence[dict[str, Any]], model: ModelSpec) -> dict[str, float]:
    """Milliseconds of a layer in the measured runs."""
    return {
        f"{r['policy']} at {r['cache']}": r["measured"]["tpot_ms"]["mean"] / model.routed_layers
        for r in reports
        if r["measured"]["tpot_ms"]["mean"]
    }


def _against(ms: float, ours: dict[str, float], best: str | None) -> str:
    if best is None:
        return ""
    shown = [best, *(name for name in ours if name.startswith("on-demand ") and name != best)][:2]
    return "; " + ", ".join(f"{ms / ours[name]:.1f} times {name} ({ours[name]:.2f} ms)" for name in shown)


def accelerate_ms(machine: Machine, model: ModelSpec, layers: int = LAYERS, tokens: int = TOKENS) -> float:
    """A decoded token's time in one layer of a model of ``layers`` layers under ``accelerate.cpu_offload``.

    The difference to a model of one layer less, so that embedding and head do not count. Raises InputError for
    dimensions that transformers' Mixtral does not have or the host does not hold, or where the second layer seems to
    take no time, ModuleNotFoundError without accelerate or transformers.
    """
    need = layers * model.experts * expert_size(model)
    refuse_too_little(f"host memory for {layers} layers", need, free_host_bytes(), "not measured")
    more, less = (_offloaded_ms(machine, model, count, tokens) for count in (layers, layers - 1))
    if more <= less:
        raise InputError(f"{layers} layers took {more:.2f} ms, one less {less:.2f}: the machine is too busy to tell")
    return more - less


def _offloaded_ms(machine: Machine, model: ModelSpec, layers: int, tokens: int) -> float:
    from accelerate import cpu_offload

    torch = machine.torch
    made = _mixtral(machine, model, layers)
    name = cache_name(made)
    offloaded = cpu_offload(made, execution_device=machine.device)
    ids = torch.ones(1, 8, dtype=torch.int64, device=machine.device)
    samples = []
    with torch.no_grad():
        out = offloaded(ids, use_cache=True)
        for _ in range(tokens):
            machine.synchronize()
            begin = time.perf_counter()
            out = offloaded(ids[:, :1], use_cache=True, **{name: getattr(out, name)})
            machine.synchronize()
            samples.append((time.perf_counter() - begin) * 1e3)
    return median(samples)


def _mixtral(machine: Machine, model: ModelSpec, layers: int) -> Any:
    """A model of transformers' Mixtral class with these dimensions and random weights, in ordinary host memory."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    kind, _, numbers = model.attention.shape.partition(" ")
    if kind != "GQA" or model.expert_matrices != 3 or model.shared_ffn:
        raise InputError(f"{model.name}: no model of transformers' Mixtral class has these parts; not measured")
    heads, kv_heads, head_dim = map(int, numbers.split("/"))
    config = MixtralConfig(
        hidden_size=model.hidden, intermediate_size=model.expert_ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, num_local_experts=model.experts,
        num_experts_per_tok=model.top_k, vocab_size=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with machine.torch.device(machine.device):  # random numbers are made faster there
        made = AutoModelForCausalLM.from_config(config, dtype=machine.torch.bfloat16)
    return made.eval().to("cpu")


def pageable_ms(machine: Machine, model: ModelSpec, calls: int = CALLS) -> float:
    """One layer's routed experts, copied from ordinary memory, then computed: the host waits for each."""
    size = expert_size(model)
    torch, k = machine.torch, model.top_k
    stored = [machine.host(size, False) for _ in range(2 * k)]
    slots = [machine.bytes(size) for _ in range(k)]
    rows = machine.random(1, model.hidden, scale=1.0)
    shape = (model.hidden, model.expert_ffn, model.expert_matrices == 3)
    work = [partial(feed_forward, rows, *matrices(slot.view(torch.bfloat16), *shape)) for slot in slots]

    def layer(call: int) -> None:
        for index, (slot, compute) in enumerate(zip(slots, work, strict=True)):
            slot.copy_(stored[(call * k + index) % len(stored)])
            compute()
        machine.synchronize()

    samples = []
    for call in range(calls + 2):
        begin = time.perf_counter()
        layer(call)
        samples.append((time.perf_counter() - begin) * 1e3)
    return median(samples[2:])


def baseline_command(name: str, device: str, against: Path | None, out: Path | None, command: str) -> None:
    """Measure and print all of them for the model called ``name``, write ``out`` as JSON.

    ``against`` is the ``validation.json`` of runs of that model on this machine, ``command`` what a person typed.
    Raises InputError.
    """
    keep_apart([name, against], {"--json": out})
    model, machine = model_spec(name), Machine(device)
    reports, facts = ([], None) if against is None else _runs(against, model)
    with written(None if out is None else str(out)) as write:
        found = baselines(machine, model, reports)
        for way, line in found["ratios"].items():
            print(f"{way}: {line}")
        made = {"command": command, "provenance": {"model": model.name, **made_by(machine)}, "against": facts}
        write(made | found)


def _runs(path: Path, model: ModelSpec) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The reports of a validation, and what it says of itself: its profile, machine and code.

    Raises InputError for another file, or one of another model.
    """
    with as_written(path):
        data = json.loads(path.read_text(encoding="utf-8"))
        reports, of = list(data["reports"]), data["provenance"]["model"]
        facts = {"command": data.get("command"), "provenance": data["provenance"]}
        _ours(reports, model)
    if of != model.name:
        raise InputError(f"{path}: runs of {of}; expected {model.name}")
    return reports, facts
