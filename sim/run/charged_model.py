"""The model whose costs a scene charges: the trace's own or another, in the precision that was asked for."""

from collections.abc import Sequence
from dataclasses import replace

from ground.errors import InputError
from traces.models.known import as_traced, builtin, resolve_model
from traces.models.quantised import quantised
from traces.models.spec import KV_FORMATS, ModelSpec
from traces.trace import Trace


def charged_model(whole: Trace, named: str | None, quant: str | None, kv: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model, and a note where its experts are of another size than one would expect. Raises InputError."""
    model, notes = _released(whole, named)
    return in_precision(model, quant, kv), notes if quant is None else ()


def in_precision(model: ModelSpec, quant: str | None, kv: str) -> ModelSpec:
    """``model`` with its weights in ``quant`` and its keys and values in ``kv``. Raises InputError for another."""
    form = kv.strip().lower()
    if form not in KV_FORMATS:
        raise InputError(f"--kv {kv!r}: expected one of {', '.join(KV_FORMATS)}")
    return replace(model if quant is None else quantised(model, quant), kv_format=form)


def _released(whole: Trace, named: str | None) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model whose costs are charged, and a note where its experts are of another size than one would expect.

    Expert sizes that a trace states stay where its own model is charged, by default or by name, or where only the
    person knows that model's dimensions. Another model has its own. So with top_k: the trace's own model may be run
    with more or fewer experts a token than it was made for, and its routes say how many; another's must agree.
    """
    own = whole.meta["model"]
    known = builtin(str(own.get("name"))) is not None or own.get("config") is not None
    if named is not None and builtin(named) is not None:
        own = {**own, "config": None}  # a person who names a built-in model means its sizes
    if named is None or (known and named.lower() == str(own["name"]).lower()):
        try:
            spec = resolve_model(own, whole.layers)
        except InputError as wrong:
            if named is not None:
                raise
            raise InputError(f"{whole.source}: {wrong}; or say whose costs to charge, --model NAME") from None
        plain = resolve_model({**own, "expert_bytes": None}, whole.layers)
    else:
        spec = plain = resolve_model(named, whole.layers)
        if spec.experts == whole.n_experts and spec.top_k != whole.top_k:
            raise InputError(
                f"--model {named}: {spec.name} takes {spec.top_k} experts a token; expected a model of {whole.top_k}, "
                f"as {whole.source} has"
            )
        if not known and own.get("experts") == spec.experts:
            spec = as_traced(spec, own)
    stated = own.get("expert_bytes")
    if stated is None or tuple(stated) == plain.expert_bytes:
        return spec, ()
    mine, other = (_sizes(stated), _sizes(plain.expert_bytes))
    if spec.expert_bytes == tuple(stated):
        return spec, (f"experts of {mine}, as the trace states them; by its dimensions {plain.name} has {other}",)
    return spec, (f"experts of {other}, which are those of {spec.name}; the trace states {mine}",)


def _sizes(expert_bytes: Sequence[int]) -> str:
    return " to ".join(f"{size:,}" for size in sorted({min(expert_bytes), max(expert_bytes)})) + " bytes"
