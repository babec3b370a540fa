"""Plans that take long to make are kept on disk and shared by every run that they are the same for.

A policy says ``keeps_plan = True`` where predicting a whole trace takes long (clustering, searches, nets). Its plan is
then kept under a name made of everything that it depends on: the trace's content, the order of its steps, the policy's
code and parameters, its setting, the version of this project. What a policy lists in ``ignores`` of its setting (the
budget, say) is left out of the name and hidden from it, so that runs that differ in it alone share a plan.

A file is an npz without pickles, written aside and renamed. One that is damaged or of another form is made anew.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints
from weakref import WeakKeyDictionary
from zipfile import BadZipFile

import numpy as np
from pydantic_core import to_jsonable_python

from ground.cache_folder import cache_folder
from ground.errors import InputError
from ground.files import atomic_path
from ground.foreign_code import errors_name
from sim.plan import Plan
from sim.policies import Policy, Setting
from sim.view import View
from traces.trace import Trace

_PARTS: dict[str, Any] = {
    name: kind for name, hint in get_type_hints(Plan).items() for kind in (hint, *get_args(hint)) if is_dataclass(kind)
}
"""Fields of a plan that are records themselves, and their classes."""


def declared(kind: type[Policy], setting: Setting) -> Setting:
    """``setting`` as ``kind`` may see it: reading what the class says that it ignores is a defect of the class."""
    return cast(Setting, _Declared(setting, kind.ignores)) if kind.ignores else setting


def kept_or_made(policy: Policy, setting: Setting, view: View, run: Mapping[str, Any]) -> Plan:
    """What ``policy`` decides for ``view``, from disk if such plans are kept and it was decided before.

    ``run`` tells apart what neither policy nor ``setting`` do, as JSON: the trace's sha256 (without one nothing is
    kept), split, batch, version of the code. A clairvoyant policy sees costs too, and nothing of it is kept.
    """
    kind = type(policy)
    key = _key(policy, setting, run) if kind.keeps_plan and not kind.clairvoyant and run.get("trace") else None
    folder = cache_folder("plans") if key else None
    if key is None or folder is None:
        return _decide(policy, view)
    path = folder / f"{policy.name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    kept = _load(path, key)
    if kept is None:
        kept = _decide(policy, view)
        _save(path, key, kept)
    return kept


def _decide(policy: Policy, view: View) -> Plan:
    """Have the policy plan. Raises InputError that names it if it fails or returns something else."""
    with errors_name(f"policy {policy.name}: plan"):
        plan = policy.plan(view)
    if not isinstance(plan, Plan):
        raise InputError(f"policy {policy.name}: plan returned {type(plan).__name__}; expected a sim.plan.Plan")
    return plan


class _Declared:
    def __init__(self, setting: Setting, ignores: frozenset[str]) -> None:
        self._setting, self._ignores = setting, ignores

    def __getattr__(self, name: str) -> Any:
        if name in self._ignores:
            raise AttributeError(f"the policy reads setting.{name}, which its class says that it ignores")
        return getattr(self._setting, name)


def _key(policy: Policy, setting: Setting, run: Mapping[str, Any]) -> str:
    """Everything that the plan depends on, as JSON text."""
    kind = type(policy)
    depends = {field.name: getattr(setting, field.name) for field in fields(setting)}
    depends["profile"] = [_content_digest(trace) for trace in setting.profile]
    about = {
        "run": dict(run),
        "policy": f"{kind.__module__}:{kind.__qualname__}",
        "source": source_digest(kind),
        "parameters": policy.parameters,
        "setting": {name: value for name, value in depends.items() if name not in kind.ignores},
    }
    return json.dumps(to_jsonable_python(about, fallback=str), sort_keys=True)


def _content_digest(trace: Trace) -> str:
    """Digest of what a policy may read of ``trace``: a part of a file carries the hash of the whole file."""
    if trace not in _DIGESTS:
        _DIGESTS[trace] = _digested(trace)
    return _DIGESTS[trace]


_DIGESTS: WeakKeyDictionary[Trace, str] = WeakKeyDictionary()
"""Digests of the traces that are there: many runs learn from the same."""


def _digested(trace: Trace) -> str:
    digest = hashlib.sha256(json.dumps(trace.meta, sort_keys=True).encode())
    for field in fields(trace):
        if isinstance(array := getattr(trace, field.name), np.ndarray):
            digest.update(f"{field.name} {array.dtype.str} {array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def source_digest(kind: type[Policy]) -> str:
    """Digest of the files in which the class and its bases are written."""
    digest = hashlib.sha256()
    for name in sorted({base.__module__ for base in kind.__mro__}):
        file = getattr(sys.modules.get(name), "__file__", None)
        digest.update(name.encode() + (Path(file).read_bytes() if file else b""))
    return digest.hexdigest()


# -- a plan as a file ------------------------------------------------------------------------------------------------


def _save(path: Path, key: str, plan: Plan) -> None:
    """Keep ``plan``; a rule that is only Python, a scorer, or a disk that is full, is no reason to fail."""
    if not isinstance(plan.eviction, str) or plan.scorer is not None:
        return
    arrays: dict[str, np.ndarray] = {}

    def beside(value: Any) -> Any:
        """What JSON does not know: an array stands beside it, under the name that it is given here."""
        if not isinstance(value, np.ndarray):
            return int(value)
        arrays[name := f"array{len(arrays)}"] = value
        return {"array": name}

    text = json.dumps(asdict(plan), default=beside)
    try:
        with atomic_path(path) as part, part.open("wb") as file:
            np.savez(file, allow_pickle=False, key=np.array(key), plan=np.array(text), **arrays)
    except (OSError, InputError):
        return


def _load(path: Path, key: str) -> Plan | None:
    """The plan kept at ``path`` under this very key; None if there is none or it is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if str(arrays.pop("key")) != key:
            return None
        text = str(arrays.pop("plan"))
        if any(array.dtype.kind not in "iu" for array in arrays.values()):
            return None
        whole = json.loads(text, object_hook=lambda part: arrays[part["array"]] if "array" in part else part)
        parts = {name: kind(**whole[name]) for name, kind in _PARTS.items() if whole[name] is not None}
        return Plan(**whole | parts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error):
        return None
