"""What a design is: a hash of everything that its row depends on. Names of files are not in it, their content is."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sim.policies import parameters_of
from sim.run.kept_plans import source_digest
from sim.run.replay_options import ReplayOptions
from sim.run.scene import bundled_traces, code_version
from sim.sweep.design import Design, file_state, hardware_of, software_of

_READ = frozenset({"_", "traces", "mix", "profile", "model", "hardware", "loop", "link", "host", "software"})
"""Options that name what is read: their content counts."""


def identity(design: Design) -> str:
    """The hash of a design: options, parameters, content of every input, version of the code.

    Raises InputError for what is wrong with its fields, OSError for a file that cannot be read.
    """
    options, policy = design.options, design.policy
    machine = hardware_of(options.machine, design.changes("hardware"))
    costs = software_of(
        options.software, design.changes("software"), options.machine, design.changes("hardware")
    )  # fmt: skip
    about = {
        "code": code_version(),
        "options": {f.name: getattr(options, f.name) for f in fields(ReplayOptions) if f.name not in _READ},
        "traces": file_digests(options.traces),
        "profile": file_digests(_bundled() if options.profile is None else options.profile),
        "named profile": options.profile is not None,
        "model": _named(options.model),
        "hardware": _digest(machine.model_dump(mode="json")),
        "software": _digest(costs.model_dump(mode="json")),
        "policy": policy.kind.name,
        "source": source_digest(policy.kind) if ":" in policy.name else "",
        "parameters": parameters_of(policy.name, dict(policy.values)).model_dump(),
    }
    return _digest(about)


def refused_identity(design: Design, reason: str) -> str:
    """The hash of a design that cannot be run, so that its row is found again as long as the reason stays."""
    return _digest({"code": code_version(), "fields": dict(design.fields), "reason": reason})


def _digest(data: Any) -> str:
    text = json.dumps(to_jsonable_python(data, fallback=str), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _named(model: str | None) -> str | None:
    """A model as named, or the content of its file."""
    path = Path(model) if model is not None else None
    return model if path is None or not path.is_file() else file_digests((str(path),))[0]


@cache
def _bundled() -> tuple[str, ...]:
    return tuple(map(str, bundled_traces()))


def inputs(options: ReplayOptions) -> tuple[str, ...]:
    """The content of all traces and models that are read: what is made of them is kept under this."""
    files = [*options.traces, *(options.profile or _bundled()), *([options.model] if options.model else [])]
    return tuple(file_digests([path for path in files if Path(path).is_file()]))


def file_digests(paths: Sequence[str | Path]) -> list[str]:
    """The sha256 of files, read again only where a file has changed. Raises OSError for one that is not there."""
    return [_file_digest(str(path), file_state(path)) for path in paths]


@lru_cache(maxsize=1024)
def _file_digest(path: str, state: object) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
