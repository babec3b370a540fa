"""What a design must keep to in order to be an answer: the limits of a sweep, which its folder does not keep."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from analysis.html.runs import Run
from ground.errors import InputError
from ground.field_errors import expectation
from ground.pairs import pairs
from sim.sweep.spec import Limits


def limits_of(texts: Sequence[str]) -> Limits:
    """Limits from texts such as ``tpot_p99_ms=500``, named as in a sweep file. Raises InputError."""
    try:
        return Limits.model_validate(pairs(texts, "--limit", "name=value"))
    except ValidationError as wrong:
        fault = wrong.errors()[0]
        name = str(fault["loc"][0])
        if name not in Limits.model_fields:
            raise InputError(f"--limit {name}: unknown; expected one of {', '.join(Limits.model_fields)}") from None
        raise InputError(f"--limit {name}: {fault['input']!r:.40}; expected {expectation(fault)}") from None


def limited(runs: Sequence[Run], limits: Limits) -> list[Run]:
    """The runs, of which those beyond the limits say so. A card whose memory is not known is no limit."""
    return [replace(run, beyond=run.ok and not _within(run, limits)) for run in runs]


def _within(run: Run, limits: Limits) -> bool:
    needed, memory = run.values.get("gpu_needed_bytes"), run.values.get("gpu_memory_bytes")
    filled = 0.0 if needed is None or memory is None else needed / memory
    found = dict(run.values) | {"gpu_memory_ratio": filled}
    return all(found.get(name) is not None and found[name] <= most for name, most in limits.columns.items())
