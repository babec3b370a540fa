"""What a card's memory leaves for experts, context by context, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sim.machine.hardware import Hardware
from sim.run.charged_model import in_precision
from sim.run.memory import ROWS, Memory, activation_bytes, kept_bytes, reserved
from traces.models.known import model_spec

CONTEXTS = (4096, 16384, 32768, 65536, 131072)
_PARTS = ("weights", "kv", "activations", "reserve", "experts")


def memory_json(
    model: str, hardware: str, quant: str | None, kv: str, contexts: Sequence[int], batch: int, reserve: str | None
) -> dict[str, Any]:
    """Bytes of the card and of each part, for each context; ``slots`` are of the largest expert.

    ``experts`` is what is left, of all experts at the most, and below 0 what is lacking. Raises InputError for a model,
    a card, a precision or a reserve that there is not.
    """
    spec, card = in_precision(model_spec(model), quant, kv), Hardware.load(hardware)
    rows = []
    for context in contexts:
        held = Memory(
            card.gpu_bytes, spec.resident_bytes, kept_bytes(spec, batch, context),
            activation_bytes(spec, min(ROWS, context)), reserved(reserve), batch, context,
        )  # fmt: skip
        experts = min(held.left, spec.all_expert_bytes)
        rows.append({
            "context": context, "weights": held.weights, **held.beside, "experts": experts,
            "slots": max(0, experts // max(spec.expert_bytes)), "share": max(0.0, experts / spec.all_expert_bytes),
        })  # fmt: skip
    return {
        "model": spec.name, "quant": quant, "kv": spec.kv_format, "hardware": card.name, "batch": batch,
        "card": card.gpu_bytes, "all_experts": spec.all_expert_bytes, "contexts": rows,
    }  # fmt: skip


def memory_table(*asked: Any) -> Table:
    """What `memory_json` gives, one context a row. Raises as it does."""
    found = memory_json(*asked)
    precision = f" in {found['quant']}" if found["quant"] else ""
    table = Table(
        title=f"{found['model']}{precision} on {found['hardware']}: {found['card'] / 2**30:.2f} GiB",
        caption=f"GiB; keys and values in {found['kv']} of {found['batch']} sequences; all experts take "
        f"{found['all_experts'] / 2**30:.2f}",
    )
    for heading in ("context", *_PARTS, "slots", "of all experts"):
        table.add_column(heading, justify="right")
    for row in found["contexts"]:
        sizes = (f"{row[part] / 2**30:.2f}" for part in _PARTS)
        table.add_row(str(row["context"]), *sizes, f"{row['slots']:,}", f"{row['share']:.0%}")
    return table
