"""How fast cores unpack weights: measured products of a row with weights of each format, in a core's own cache."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from sim.machine.figures import Figure
from traces.models.spec import ModelSpec


@cache
def core_rates() -> Mapping[str, Figure]:
    """10^9 weights a second that one core multiplies with a row, by their format."""
    text = resources.files("sim.machine").joinpath("unpacking.toml").read_text("utf-8")
    tables = tomllib.loads(text)
    return {form: Figure(value=value, source=tables["source"]) for form, value in tables["gweights"].items()}


def expert_formats(model: ModelSpec) -> dict[str, int]:
    """Weights of the routed experts of ``model`` by format: as it is stored, or as their bytes tell."""
    if model.stored and model.stored.formats:
        return dict(model.stored.formats)
    weights = model.routed_layers * model.experts * model.expert_parameters
    bits = 8 * max(model.expert_bytes) / model.expert_parameters
    form = "f32" if bits > 16 else "bf16" if bits > 9 else "fp8" if bits > 7.9 else "mxfp4"
    return {form: weights}


def core_gweights(model: ModelSpec, rates: Mapping[str, Figure]) -> float | None:
    """10^9 weights of the experts of ``model`` a second and core; None if the rate of a format is not known.

    Of several formats the mean that the times add up to.
    """
    forms = expert_formats(model)
    if not forms or any(form not in rates for form in forms):
        return None
    return sum(forms.values()) / sum(count / rates[form].value for form, count in forms.items())
