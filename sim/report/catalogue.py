"""The built-in models, machines, software profiles and policies, as tables for people and as JSON for programs."""

from pathlib import Path
from typing import Any

from docstring_parser import Docstring, DocstringStyle, ParseError, parse_from_object
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ground.foreign_code import errors_name
from sim.machine.figures import Curve, Figure
from sim.machine.hardware import Hardware, builtin_hardware
from sim.machine.loop_overheads import LOOP_FIGURES
from sim.machine.prediction_costs import PredictionCosts, builtin_software
from sim.policies import Parameters, policy_class, policy_classes
from traces.models.known import builtin_models, model_spec
from traces.models.quantised import quantised
from traces.models.spec import ModelSpec, Stored

_MODEL_FIELDS = (
    "name", "layers", "moe_layers", "hidden", "experts", "top_k", "expert_ffn", "expert_matrices", "expert_parameters",
    "expert_bytes", "all_expert_bytes", "routed_bytes_per_token", "resident_bytes", "kv_bytes_per_token", "shared_ffn",
    "dense_ffn", "attention", "windows", "vocab", "tied", "total_parameters", "active_parameters", "source",
)  # fmt: skip

_DERIVED = (
    "gpu_bytes", "memory_bytes_per_s", "flops_per_s", "link_bytes_per_s", "link_latency_ns", "link_measured",
)  # fmt: skip


def models_json() -> list[dict[str, Any]]:
    """Every built-in model, as `model_json` gives it."""
    return [model_json(name) for name in builtin_models()]


def model_json(name_or_path: str, quant: str | None = None) -> dict[str, Any]:
    """One model, built in or from a file, in a precision: sizes in bytes and weights.

    Raises as `model_spec` and `quantised` do.
    """
    spec = quantised(model_spec(name_or_path), quant)
    fields = {name: getattr(spec, name) for name in _MODEL_FIELDS} | {"attention": spec.attention.shape}
    if spec.other_attention and spec.other_layers:
        fields |= {"other_attention": spec.other_attention.shape, "other_layers": spec.other_layers}
        fields |= {"state_bytes_per_sequence": spec.state_bytes_per_sequence}
    if spec.stored:
        fields |= {"stored": spec.stored.label, "formats": dict(spec.stored.formats)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def models_table() -> Table:
    """The built-in models, one a row."""
    table = Table(
        title="Models", caption="GB and MB are decimal; active counts both embedding tables", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("model", no_wrap=True)
    table.add_column("layers x\nexperts/k", justify="right", no_wrap=True)
    for heading in ("MB an expert", "GB a token", "all GB", "rest GB", "total B", "active B"):
        table.add_column(heading, justify="right")
    for name in builtin_models():
        spec = model_spec(name)
        table.add_row(
            name, f"{spec.routed_layers}x{spec.experts}/{spec.top_k}", f"{spec.expert_bytes[0] / 1e6:.2f}",
            f"{spec.routed_bytes_per_token / 1e9:.2f}", f"{spec.all_expert_bytes / 1e9:.1f}",
            f"{spec.resident_bytes / 1e9:.2f}", f"{spec.total_parameters / 1e9:.2f}",
            f"{spec.active_parameters / 1e9:.2f}",
        )  # fmt: skip
    return table


def model_table(name_or_path: str, quant: str | None = None) -> Table:
    """One model in full, in a precision. Raises as `model_spec` and `quantised` do."""
    spec = quantised(model_spec(name_or_path), quant)
    table = Table(title=spec.name, show_header=False)
    for label, value in _model_rows(spec):
        table.add_row(label, value)
    return table


def _model_rows(spec: ModelSpec) -> list[tuple[str, str]]:
    dense = [layer for layer in range(spec.layers) if layer not in set(spec.moe_layers)]
    state = spec.state_bytes_per_sequence
    return [
        ("layers", f"{spec.layers}, of which {spec.routed_layers} routed" + (f"; dense: {dense}" if dense else "")),
        ("experts", f"{spec.experts} a layer, {spec.top_k} a token"),
        ("one expert", f"{spec.expert_matrices} matrices {spec.hidden} x {spec.expert_ffn}: {_sizes(spec)}"),
        ("shared experts", f"width {spec.shared_ffn}" if spec.shared_ffn else "none"),
        ("dense FFN", f"width {spec.dense_ffn}" if dense else "none"),
        ("attention", _attention(spec)),
        ("vocabulary", f"{spec.vocab}, embedding and head {'shared' if spec.tied else 'separate'}"),
        ("all experts", f"{spec.all_expert_bytes / 1e9:.3f} GB"),
        ("experts of one token", f"{spec.routed_bytes_per_token / 1e9:.3f} GB"),
        ("everything else", f"{spec.resident_bytes / 1e9:.3f} GB"),
        ("KV cache", f"{spec.kv_bytes_per_token} bytes a token" + (f", {state} a sequence" if state else "")),
        ("weights", f"{spec.total_parameters / 1e9:.3f} B, active {spec.active_parameters / 1e9:.3f} B"),
        ("stored as", _formats(spec.stored) if spec.stored else "one size a weight"),
        ("source", spec.source or "as given"),
    ]


def _formats(stored: Stored) -> str:
    """What a file or a quantisation is called, and what share of the routed experts' weights has which format."""
    total = sum(weights for _, weights in stored.formats)
    shares = (f"{weights / total:.0%} {form}" for form, weights in stored.formats)
    return f"{stored.label}; routed experts: {', '.join(shares)}"


def _attention(spec: ModelSpec) -> str:
    """What layers mix tokens by, and how many have a window."""
    text, windowed = spec.attention.shape, sum(window > 0 for window in spec.windows)
    if spec.other_attention and spec.other_layers:
        text += f"; {len(spec.other_layers)} layers {spec.other_attention.shape}"
    verb = "choose" if spec.attention.index_width else "reach"
    return text + (f"; {windowed} layers {verb} {max(spec.windows)}" if windowed else "")


def _sizes(spec: ModelSpec) -> str:
    megabytes = " or ".join(f"{size / 1e6:.2f}" for size in sorted(set(spec.expert_bytes)))
    return f"{spec.expert_parameters / 1e6:.2f} M weights, {megabytes} MB"


def hardware_json() -> list[dict[str, Any]]:
    """Every built-in machine, as `machine_json` gives it."""
    return [machine_json(name) for name in builtin_hardware()]


def machine_json(name_or_path: str) -> dict[str, Any]:
    """One machine: its profile, and what is derived from it under ``derived``. Raises as `Hardware.load` does."""
    hardware = Hardware.load(name_or_path)
    derived = {name: getattr(hardware, name) for name in _DERIVED}
    return {**hardware.model_dump(mode="json", exclude_none=True, by_alias=True), "derived": derived}


def hardware_table() -> Table:
    """The built-in machines, one a row."""
    table = Table(title="Hardware", caption="peaks; link: the largest pinned host-to-device bandwidth of the profile")
    table.add_column("hardware", no_wrap=True)
    for heading in ("memory GB", "GB/s", "bf16 TFLOP/s", "link GB/s"):
        table.add_column(heading, justify="right")
    table.add_column("link figure")
    for name in builtin_hardware():
        hardware = Hardware.load(name)
        peaks = (hardware.gpu.memory_gb, hardware.gpu.bandwidth_gbps, hardware.gpu.tflops)
        link = f"{hardware.link_bytes_per_s / 1e9:.1f}", hardware.link_source
        table.add_row(name, *(f"{peak.value:g}" for peak in peaks), *link)
    return table


def machine_table(name_or_path: str | Path) -> Table:
    """One machine in full, every figure with its source. Raises as `Hardware.load` does."""
    hardware = Hardware.load(name_or_path)
    table = Table(title=f"{hardware.name}: {hardware.description}")
    for heading in ("figure", "value", "measured", "source"):
        table.add_column(heading, no_wrap=heading == "figure", justify="right" if heading == "value" else "left")
    software = hardware.software
    for part in (hardware.gpu, hardware.link, software, software.host_thread or (), hardware.host or ()):
        for field, value in part:
            if isinstance(value, Figure):
                table.add_row(LOOP_FIGURES.get(field, field), f"{value.value:g}", *_origin(value))
    link = hardware.link
    curves = {"h2d": link.h2d, "h2d in a row": link.queued, "d2h": link.d2h, "pageable h2d": link.pageable}
    for label, curve in curves.items():
        origin: tuple[str, ...] = _origin(curve) if curve else ()
        for size, time in curve.points if curve else ():
            table.add_row(f"{label}, {size / 2**20:g} MiB", f"{size / time:.1f} GB/s", *origin)
            origin = ()
    waits = "yes" if hardware.software.waits_for_route else "no"
    table.add_row("host waits for the route", waits, "", f"{hardware.software.kind} software")
    return table


def _origin(figure: Figure | Curve) -> tuple[str, ...]:
    """Whether it was measured for this project, and its source."""
    return "yes" if figure.measured else "no", figure.source


def software_json() -> list[dict[str, Any]]:
    """Every built-in software profile, as `costs_json` gives it."""
    return [costs_json(name) for name in builtin_software()]


def costs_json(name_or_path: str) -> dict[str, Any]:
    """One software profile in full. Raises as `PredictionCosts.load` does."""
    return PredictionCosts.load(name_or_path).model_dump(mode="json", exclude_none=True)


def software_table(*names: str) -> Table:
    """What predictions cost in ``names`` (default: all that are built in). Raises as `PredictionCosts.load` does."""
    table = Table(title="Software: what predictions cost", caption="a search: 4,000 x 4,096 on an L40, one query")
    for heading in ("software", "figure", "value", "measured", "source"):
        table.add_column(heading, no_wrap=heading == "software", justify="right" if heading == "value" else "left")
    machine = Hardware.load("l40")
    for name in names or builtin_software():
        software = PredictionCosts.load(name)
        search = software.search_ns(machine, 4000, 4096) / 1e3
        table.add_row(software.name, "a search, us", f"{search:.1f}", "", f"{software.description} ({software.where})")
        for field, value in software:
            if isinstance(value, Figure):
                table.add_row("", field, f"{value.value:g}", *_origin(value))
    return table


def policies_json() -> list[dict[str, Any]]:
    """Every policy, as `policy_json` gives it."""
    return [policy_json(name) for name in policy_classes()]


def policy_json(name: str) -> dict[str, Any]:
    """One policy: summary, parameters as a JSON schema has them, variants, and what it needs. Raises InputError."""
    kind = policy_class(name)
    return {
        "name": kind.name,
        "summary": kind.summary,
        "parameters": _parameters(kind.takes),
        "variants": list(kind.variants),
        "needs": sorted(kind.needs),
        "learns": kind.learns,
        "self_taught": kind.self_taught,
        "clairvoyant": kind.clairvoyant,
        "foresight": kind.foresight,
        "module": kind.__module__,
    }


def policies_table() -> Table:
    """Every policy, its parameters with their defaults (the first of the values that it may take) and its needs.

    All that there is to say of one stands in one column, so that nothing is broken within a word at 80 characters.
    """
    table = Table(title="policies", title_justify="left", show_lines=True)
    table.add_column("name", style="bold", overflow="fold")
    table.add_column("what it does, its parameters and what it needs", overflow="fold")
    for name in policy_classes():
        entry = policy_json(name)
        lines = [entry["summary"]]
        if entry["parameters"]:
            lines.append(", ".join(_choices(key, schema) for key, schema in entry["parameters"].items()))
        if needs := _needs(entry):
            lines.append(f"needs {needs}")
        table.add_row(name, "\n".join(lines))
    return table


def policy_view(name: str) -> Group:
    """One policy in full: what it does, what its parameters mean, and the variants that a comparison shows as well."""
    kind, entry = policy_class(name), policy_json(name)
    said = _docstring(kind)
    about = [kind.summary or said.short_description or "", *(said.long_description or "").split("\n\n")]
    parts: list[Text | Table] = [Text(kind.name, style="bold"), *(Text(_flowing(part)) for part in about if part)]
    if entry["parameters"]:
        table = Table(title="parameters, as --set name=value", title_justify="left")
        table.add_column("name", style="bold", no_wrap=True)
        for column in ("default", "may be", "meaning"):
            table.add_column(column)
        for key, schema in entry["parameters"].items():
            default = str(schema["default"]) if "default" in schema else "must be given"
            table.add_row(key, default, _range(schema), schema.get("description", ""))
        parts += [Text(), table]
    if entry["variants"]:
        variants = "; ".join(entry["variants"])
        parts.append(Text(f"variants that a comparison of all policies shows as well: {variants}"))
    return Group(*parts, Text(f"needs: {_needs(entry) or '–'}"), Text(f"module: {entry['module']}", style="dim"))


def _parameters(takes: type[Parameters]) -> dict[str, dict[str, Any]]:
    """Parameters as a JSON schema has them, each described as its docstring, or that of its class, does."""
    kinds = [kind for kind in reversed(takes.__mro__) if issubclass(kind, Parameters)]
    told = (param for kind in kinds for param in _docstring(kind).params)
    meanings = {param.arg_name: {"description": _flowing(param.description or "")} for param in told}
    with errors_name(f"parameters {takes.__name__}"):
        schemas = takes.model_json_schema().get("properties", {})
    return {key: meanings.get(key, {}) | schema for key, schema in schemas.items()}


def _docstring(kind: type) -> Docstring:
    try:
        return parse_from_object(kind, DocstringStyle.GOOGLE)
    except (ParseError, TypeError):  # another package's, in a style of its own, or without its source
        return Docstring()


def _flowing(text: str) -> str:
    return " ".join(text.split())


_LIMITS = {
    "minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most", "exclusiveMaximum": "less than",
}  # fmt: skip


def _range(schema: dict[str, Any]) -> str:
    """The values that a parameter may take, if there is more to say than its type."""
    schema = next((kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"), schema)
    values = [False, True] if schema.get("type") == "boolean" else schema.get("enum")
    if values is not None:
        return ", ".join(map(str, values))
    return ", ".join(f"{words} {schema[key]:.15g}" for key, words in _LIMITS.items() if key in schema)


def _choices(key: str, schema: dict[str, Any]) -> str:
    """``key=default`` and the other values it may take."""
    values = [schema.get("default"), *(v for v in schema.get("enum", []) if v != schema.get("default"))]
    return f"{key}={'|'.join(map(str, values))}"


def _needs(entry: dict[str, Any]) -> str:
    wants = [*entry["needs"]]
    wants += ["a profile split, or none" if entry["self_taught"] else "a profile split"] if entry["learns"] else []
    wants += ["the future"] if entry["clairvoyant"] else []
    wants += [f"routes {entry['foresight']} layer ahead"] if entry["foresight"] else []
    return ", ".join(wants)
