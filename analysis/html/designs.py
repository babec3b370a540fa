"""What tells runs apart: the fields that vary, the place a run takes place in, and the label of a design."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.html.runs import Run
from analysis.html.wording import field_value
from sim.sweep.answer import short_name

WORKLOAD = ("trace", "mix", "model", "split", "domains", "cold", "seed", "profile")
"""Fields that say what work is done. They are no choice of a design, so no design beats another by them."""
_UNITS = {"batch": "batch (sequences)", "hardware.link.gbps": "link rate (GB/s)"}


def is_of_policy(field: str) -> bool:
    """Whether a field is the policy or one of its parameters."""
    return field == "policy" or field.startswith("set.")


def _together(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two columns say the same: where one has a value again, the other has its own again."""
    return len({*zip(one, other, strict=True)}) == len({*one}) == len({*other})


@dataclass(frozen=True)
class Designs:
    """Runs, and the fields in which they differ, in the order of their files.

    A figure of a profile that varies together with another field is told by that, as a model is by its trace.
    """

    runs: Sequence[Run]
    varying: Sequence[str]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Designs":
        """Of runs that are ok or not; the policy always counts, so that each design has a name."""
        names = dict.fromkeys(name for run in runs for name in run.fields)
        ok = [run for run in runs if run.ok]
        columns = {name: [_key(run.fields.get(name)) for run in ok] for name in names}
        varying: list[str] = []
        for name, values in columns.items():
            told = name == "model" or name.startswith(("hardware.", "software."))
            follows = told and any(_together(values, columns[other]) for other in varying)
            if len({*values} - {None}) > 1 and not follows:
                varying.append(name)
        return cls(runs, varying if "policy" in varying else [*varying, "policy"])

    @property
    def ok(self) -> list[Run]:
        """Runs that came to an end."""
        return [run for run in self.runs if run.ok]

    def label(self, run: Run, without: Iterable[str] = ()) -> str:
        """What a run is called: its policy, then other fields that vary, but for those of ``without``."""
        left_out = set(without)
        names = sorted((name for name in self.varying if name not in left_out), key=lambda name: name != "policy")
        return ", ".join(said(name, value) for name in names if (value := run.fields.get(name)) is not None)

    def values(self, field: str) -> list[Any]:
        """What a field is in the runs that are ok: numbers in rising order, others as they come."""
        found = list({_key(value): value for run in self.ok if (value := run.fields.get(field)) is not None}.values())
        numbers = {_key(value): place for value in found if (place := number(value)) is not None}
        return sorted(found, key=lambda value: numbers[_key(value)]) if len(numbers) == len(found) else found

    def workloads(self) -> dict[str, list[Run]]:
        """Runs that are ok by what work they do, in words; empty words where all do the same."""
        return self._by([name for name in self.varying if name in WORKLOAD])

    def places(self, but: str) -> dict[str, list[Run]]:
        """Runs that are ok by everything but their policy and the field ``but``: what bounds are alike for."""
        return self._by([name for name in self.varying if name != but and not is_of_policy(name)])

    def _by(self, names: Sequence[str]) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = {}
        for run in self.ok:
            where = ", ".join(said(name, value) for name in names if (value := run.fields.get(name)) is not None)
            found.setdefault(where, []).append(run)
        return found


def same_place(one: Run, other: Run) -> bool:
    """Whether two runs differ in nothing but their policy, of what is known of both: a cache counts by its bytes."""
    both = [
        {name: _key(value) for name, value in run.fields.items() if not is_of_policy(name)}
        | {"cache": run.values.get("cache_bytes") or run.fields.get("cache")}
        for run in (one, other)
    ]
    return all(both[0][name] == both[1][name] for name in both[0].keys() & both[1].keys())


def axis_title(field: str) -> str:
    """A field as the title of an axis, with its unit."""
    return _UNITS.get(field, "cache (GiB)" if field == "cache" else short_name(field))


def position(run: Run, field: str) -> float | None:
    """Where a run lies on the axis of a field; for the cache its size in GiB."""
    if field == "cache":
        return None if run.values.get("cache_bytes") is None else run.values["cache_bytes"] / 2**30
    return number(run.fields.get(field))


def number(value: Any) -> float | None:
    """What a field's value is as a number; a factor such as ``x1.5`` and a percentage count as theirs."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"x?(\d+(?:\.\d+)?)(?: ?(?:%|MiB|GiB))?", str(value))
    scale = 1 / 1024 if str(value).endswith("MiB") else 1
    return None if match is None else float(match[1]) * scale


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def said(name: str, value: Any) -> str:
    """A field with its value: ``link 25 GB/s``; of some the value alone says it."""
    if name == "hardware.link.gbps":
        return f"link {value:g} GB/s" if isinstance(value, int | float) else f"link {value}"
    plain = name in ("policy", "hardware", "trace", "model")
    return field_value(value) if plain else f"{short_name(name)} {field_value(value)}"
