"""Turn routing records of other tools into traces: which form a record has, and the file that is written."""

import hashlib
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.progress import Watch
from traces.arrays import shown
from traces.convert.cleaning import trace_of
from traces.convert.form import Form
from traces.convert.forms import form_named, form_of, forms, replayed_forms
from traces.convert.request import Record, Request
from traces.convert.shapes import Given
from traces.convert.source import PACKED, Source, expanded
from traces.models.known import builtin, resolve_model
from traces.spool import pages_given_back
from traces.trace import Trace

__all__ = ["Given", "convert_file", "convert_files", "replay_needs"]

# What foreign bytes have been seen to raise in those who read them.
_DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, EOFError, RecursionError,
    NotImplementedError, MemoryError, struct.error, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError,
)  # fmt: skip

_LARGE = 2**26  # bytes of a record of which the progress is shown


def convert_file(path: str | Path, output: str | Path, *, kind: str | None = None, given: Given | None = None) -> Trace:
    """`convert_files` of one file or folder."""
    return convert_files([path], output, kind=kind, given=given)


def convert_files(
    paths: Sequence[str | Path], output: str | Path, *, kind: str | None = None, given: Given | None = None
) -> Trace:
    """Read the records at ``paths``, all of one form, write them as one trace to ``output`` and return it.

    The form is told by content when ``kind`` is None. What is doubtful but usable is in ``meta["notes"]``. Raises
    InputError, one line naming file, array or request, row and value, before anything is written;
    ModuleNotFoundError where a library that the form needs is not installed.
    """
    given = given or Given()
    name = shown(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    with named(name):
        form, sources, notes = _recognised(paths, kind)
    before = _hashes(sources, [])
    large = sum(source.size for source in sources) >= _LARGE
    with pages_given_back():
        with _watched(f"read {name}", large) as watch, named(name), _damage_named(form):
            record = _together(form, sources, given)
            folder = Path(output).absolute().parent
            stem = Path(shown(Path(paths[0]).absolute())).stem
            here = folder if folder.is_dir() else None
            trace = trace_of(record, given, stem, folder=here, seen=partial(_show, watch, sources, record))
        trace.meta["notes"] += notes
        after = _hashes(sources, record.files)
        for path, sha256 in before.items():
            if after[path] != sha256:
                raise InputError(f"{path}: changed while it was read; expected a file that nothing writes to")
        trace.meta["converted"] = _provenance(after, form)
        with _watched(f"write {shown(output)}", large) as watch:
            trace.save(output, seen=watch.at)
    return trace


def replay_needs(trace: Trace) -> list[str]:
    """What ``python -m sim replay`` will have to be told of this trace, in a line; none for a model that is known."""
    model = trace.meta["model"]
    try:
        resolve_model(model, trace.layers)
    except InputError as error:
        if builtin(model["name"]) is not None or "config" in model:
            return [f"replay will refuse it: {error}"]
        return [
            f"{model['name']} is not built in: replay will need --model, a built-in name or a config.json; convert "
            "with --model config.json writes it into the trace"
        ]
    return []


def _recognised(paths: Sequence[str | Path], kind: str | None) -> tuple[Form, list[Source], list[str]]:
    """The form of all sources that have one, these sources, and a note that names the others."""
    if kind is not None:
        return form_named(kind), [Source(path) for path in paths], []
    found: dict[str, list[Source]] = {}
    other = []
    for source in expanded(list(paths), lambda folder: form_of(folder) is not None):
        with named(source.name):
            form = form_of(source)
        if form is not None:
            found.setdefault(form.name, []).append(source)
        else:
            other.append(source)
    alone = [source for source in other if source.path in map(Path, paths)]
    if alone or not found:
        raise InputError(_unknown((alone or other)[0]))
    if len(found) > 1:
        some = ", ".join(f"{held[0].path.name} ({name})" for name, held in found.items())
        raise InputError(f"records of several forms: {some:.200}, expected one form at a time")
    notes = [f"files of no known form were passed over: {', '.join(s.path.name for s in other):.200}"] if other else []
    (form_name,) = found
    return forms()[form_name], found[form_name], notes


def _unknown(source: Source) -> str:
    """Why a source has no form, in a line."""
    if source.arrays >= {"meta", "experts", "layers"}:
        return "is a trace already"
    words = {
        "empty": "an empty file",
        "npz": f"arrays {', '.join(sorted(source.arrays))[:120]}" if source.arrays else _empty(source),
        "torch": "a PyTorch file (.pt) that holds no routes convert knows",
        "pickle": "a pickle, as .pt and .pkl files are; pickles are never read: save arrays by numpy.savez",
        "base64": "base64 text, as an engine answers: save the whole answer as JSON, which convert reads",
        "json": f"JSON, keys {', '.join(sorted(source.keys))[:120]}" if source.keys else "JSON without an object",
        "parquet": f"columns {', '.join(source.columns)[:120]}" if source.nature == "parquet" else "",
        "csv": f"columns {', '.join(source.columns)[:120]}",
        "text": "a text of other content", "binary": "binary data",
    }  # fmt: skip
    if source.nature in PACKED:
        return f"packed with {source.nature}: unpack it first, convert reads the file that is inside"
    what = words.get(source.nature, f"a file of {source.nature}")
    return f"{what}: of no known kind; expected one of {replayed_forms()} (docs/convert.md)"


def _empty(source: Source) -> str:
    return "an empty archive" if source.head.startswith(b"PK\x05\x06") else "an archive that is truncated or no npz"


def _together(form: Form, sources: list[Source], given: Given) -> Record:
    """One record of all sources."""
    if form.together or len(sources) == 1:
        return form.read(sources, given)
    first = form.read(sources[:1], given)

    def requests() -> Iterator[Request]:
        for number, source in enumerate(sources):
            with named(source.path.name):
                record = form.read([source], given) if number else first
                for fact in ("experts", "model", "expert_bytes"):
                    mine, others = getattr(record, fact), getattr(first, fact)
                    if mine != others:
                        raise InputError(f"{fact}: {mine!s:.60}, expected {others!s:.60} as in {sources[0].path.name}")
                yield from record

    return replace(first, requests=requests(), count=None)


class _Unwatched:
    """In the place of a `Watch` where work is over in a moment."""

    def at(self, fraction: float, note: str = "") -> None:
        """Show nothing."""


@contextmanager
def _watched(what: str, large: bool) -> Iterator[Any]:
    """Yield what shows how far this work is; it is at its end when the block is."""
    if not large:
        yield _Unwatched()
        return
    with Watch(what) as watch:
        yield watch
        watch.at(1.0)


def _show(watch: Watch, sources: Sequence[Source], record: Record, requests: int) -> None:
    """Show how far a record is read once so many of its requests are."""
    read = sum(source.share * source.size for source in sources)
    done = requests / record.count if record.count else read / max(sum(source.size for source in sources), 1)
    watch.at(min(done, 0.99), f"{requests} requests")


@contextmanager
def _damage_named(form: Form) -> Iterator[None]:
    """Turn what damaged bytes raise into an InputError that says what the record was taken for."""
    try:
        yield
    except InputError:
        raise
    except _DAMAGE as error:
        reason = str(error).split("\n")[0][:120] or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"{error.args[0]!r:.60} is missing"
        raise InputError(f"{form.what}, it seems, but damaged or not whole ({reason})") from error


@contextmanager
def named(name: str) -> Iterator[None]:
    """Put a file's name before the message of an InputError raised inside, unless it is there already."""
    try:
        yield
    except InputError as error:
        said = str(error).removeprefix(f"{Path(name).name}: ")
        raise (error if said.startswith(name) else InputError(f"{name}: {said}")) from None


def _hashes(sources: Sequence[Source], files: Sequence[Path]) -> dict[str, str]:
    """sha256 of every file that is read."""
    found = {}
    for path in dict.fromkeys([*(path for source in sources for path in source.files), *files]):
        with path.open("rb") as handle:
            found[shown(path)] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def _provenance(hashes: dict[str, str], form: Form) -> dict[str, object]:
    files = [{"file": Path(path).name, "sha256": sha256} for path, sha256 in hashes.items()]
    if len(files) == 1:
        return {**files[0], "kind": form.name}
    whole = hashlib.sha256("".join(f"{one['sha256']} {one['file']}\n" for one in files).encode()).hexdigest()
    return {"file": f"{len(files)} files", "sha256": whole, "kind": form.name, "files": files[:100]}
