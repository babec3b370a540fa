"""A sweep file: what is varied, what stays, which designs of it are run, and what a design has to keep to."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ground.errors import InputError
from ground.field_errors import expectation
from ground.pairs import pairs
from ground.text import utf8
from sim.policies.named import every_policy
from sim.sweep.fields import fitted
from sim.sweep.space import Axis, Space
from sim.sweep.values import Span, linked, typed_values, values_of

MOST_DESIGNS = 1_000_000
EVERY = "all"
"""As a policy to vary: every policy, with the variants that a comparison shows."""


class Limits(BaseModel):
    """What a design has to keep to; one that is left out sets no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gpu_gib: float | None = Field(default=None, gt=0)
    """GiB of GPU memory, everything included."""
    ttft_ms: float | None = Field(default=None, gt=0)
    """Mean time to first token in ms."""
    tpot_p99_ms: float | None = Field(default=None, gt=0)
    """99th percentile of the time per output token in ms."""

    fits: bool = True
    """Whether it has to fit its card's memory."""

    @property
    def columns(self) -> dict[str, float]:
        """The most that a column of the table may be, by its name."""
        size = None if self.gpu_gib is None else self.gpu_gib * 2**30
        own = 1.0 if self.fits else None
        limits = {
            "gpu_memory_ratio": own, "gpu_needed_bytes": size, "ttft_mean_ms": self.ttft_ms,
            "tpot_p99_ms": self.tpot_p99_ms,
        }  # fmt: skip
        return {name: most for name, most in limits.items() if most is not None}

    def __str__(self) -> str:
        """The limits in words, empty without any."""
        words = {
            "GPU memory at most {} GiB": self.gpu_gib, "TTFT at most {} ms": self.ttft_ms,
            "TPOT p99 at most {} ms": self.tpot_p99_ms,
        }  # fmt: skip
        parts = [text.format(f"{most:g}") for text, most in words.items() if most is not None]
        return ", ".join([*parts, *(["no more than the card's memory"] if self.fits else [])])


class Spec(BaseModel):
    """A sweep file as it is written."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    title: str = ""
    """The question, in words."""
    method: Literal["grid", "random", "search"] = "grid"
    """Which designs are run: every combination, some drawn at random, or those that a search asks for."""
    designs: int | None = Field(default=None, ge=1, le=MOST_DESIGNS)
    """How many: of a random draw or a search."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of a random draw or a search."""
    run: dict[str, Any] = {}
    """What all designs have in common, by the names of the options of ``sim replay``."""
    vary: dict[str, Any] = {}
    """The axes: fields and their values."""
    together: list[dict[str, Any]] = []
    """Fields that vary together: the first values of all, then the second ones."""
    limits: Limits = Limits()
    """What a design has to keep to, to be an answer."""
    goals: list[Literal["tokens_per_s", "gpu_needed_bytes", "ttft_mean_ms", "tpot_p99_ms"]] = Field(
        default=["tokens_per_s"], min_length=1
    )
    """What a search is for. With several, the designs that no other beats in all of them are shown."""

    @model_validator(mode="after")
    def _counted(self) -> "Spec":
        if (self.designs is None) == (self.method != "grid"):
            raise ValueError("designs with method random or search, and no designs with a grid")
        return self

    @property
    def space(self) -> Space:
        """Its axes, their values checked for kind. Raises InputError naming the field."""
        base = {name: fitted(name, value) for name, value in _flat(self.run).items()}
        axes = [_axis(name, values_of(given, f"vary: {name}")) for name, given in _flat(self.vary).items()]
        for number, fields in enumerate(self.together):
            values = linked(_flat(fields), f"together {number + 1}")
            columns = [[fitted(name, one) for one in each] for name, each in values.items()]
            if columns:
                axes.append(Axis(tuple(values), tuple(zip(*columns, strict=True))))
        names = [*base, *(name for axis in axes for name in axis.names)]
        _check_once(names)
        open_ended = [axis.names[0] for axis in axes if isinstance(axis.values, Span)]
        if open_ended and self.method == "grid":
            raise InputError(f"vary: {open_ended[0]} has no step; expected one, or method random or search")
        if not {"trace", "mix"}.intersection(names):
            raise InputError("the sweep sets neither trace nor mix; expected one of the two")
        return Space(base, tuple(axes))


def _axis(name: str, values: Sequence[Any] | Span) -> Axis:
    if isinstance(values, Span):
        fitted(name, values.at(0.0))
        return Axis((name,), values)
    if name == "policy" and EVERY in values:
        values = [*dict.fromkeys(one for value in values for one in (every_policy() if value == EVERY else [value]))]
    return Axis((name,), tuple((fitted(name, value),) for value in values))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as dotted names; a range is a value."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict) and "from" not in value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _check_once(names: Sequence[str]) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{twice}: is set twice in the sweep; expected once, in run, vary or together")


def load_spec(path: Path) -> Spec:
    """A sweep file. Raises InputError (file, field, value, what is expected), OSError if it cannot be read."""
    try:
        fields = tomllib.loads(utf8(path.read_bytes(), str(path)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not valid TOML: {error}") from error
    return spec_of(fields, str(path))


def spec_of(fields: Mapping[str, Any], name: str = "sweep") -> Spec:
    """The same from the tables of TOML."""
    try:
        return Spec.model_validate(fields)
    except ValidationError as wrong:
        fault = wrong.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the file"
        raise InputError(f"{name}: {where}: expected {expectation(fault)}") from None


def with_axes(spec: Spec, trace: str | None, vary: Sequence[str]) -> Spec:
    """``spec`` with a trace and axes as typed, ``field=values``, in place of those of the same name."""
    given = pairs(vary, "--vary", "field=values")
    axes = {name: _as_written(typed_values(values, f"--vary {name}")) for name, values in given.items()}
    run = {name: value for name, value in _flat(spec.run).items() if name not in axes}
    if trace is not None:
        run = {"trace": trace} | run
    old = {name: value for name, value in _flat(spec.vary).items() if name not in axes}
    return spec.model_copy(update={"run": run, "vary": old | axes})


def _as_written(values: Sequence[Any] | Span) -> Any:
    if isinstance(values, Span):
        scale = "log" if values.log else "linear"
        low, high = (f"{end:.15g}{values.unit}" for end in (values.low, values.high))
        return {"from": low, "to": high, "scale": scale}
    return list(values)
