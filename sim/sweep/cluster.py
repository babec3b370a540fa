"""Workers of a dask scheduler, on this machine or others, that run designs.

Files that designs name (traces, profiles) are sent along and kept by each worker: once a worker, not once a design. A
worker that has other code, or other bundled traces, refuses: identities say so.
"""

import hashlib
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from ground.files import atomic_path
from sim.sweep.design import Design
from sim.sweep.execute import run_design
from sim.sweep.row import Row
from sim.sweep.tasks import Batch, Runner, singles

if TYPE_CHECKING:
    from distributed import Client, Future

_SECONDS_TO_CONNECT = 10
_one_at_a_time = threading.Lock()


@contextmanager
def cluster_workers(address: str) -> Iterator[Runner]:
    """What runs designs on the workers of the scheduler at ``address``.

    A batch whose worker dies is run by another; a design that ends several is a row that failed. Raises InputError if
    there is no scheduler, ModuleNotFoundError where distributed is not installed.
    """
    from distributed import Client

    try:
        client = Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as wrong:
        why = " ".join(str(wrong).split())
        raise InputError(f"--scheduler {address}: {why}; expected a running dask scheduler") from None
    with client:
        yield lambda batches: _rows(client, batches)


def _rows(client: "Client", batches: Sequence[Batch]) -> Iterator[Row]:
    from distributed import as_completed

    # Sent as tasks: what a dead worker held is made again from the scheduler's copy.
    files = {path: client.submit(_kept, Path(path).read_bytes(), pure=False) for path in _files(batches)}

    def submit(batch: Batch) -> "Future":
        needed = list(_files([batch]))
        return client.submit(_run, batch, needed, *(files[path] for path in needed), pure=False)

    running = {submit(batch): batch for batch in batches}
    done = as_completed(running, loop=client.loop)
    for future in done:
        batch = running.pop(future)
        wrong = future.exception() if future.status == "error" else None
        if future.status == "finished":
            yield from future.result()
        elif len(batch) > 1:  # which of them was it?
            for one in singles(batch):
                running[again := submit(one)] = one
                done.add(again)
        else:
            reason = " ".join(str(wrong or "given up by the scheduler").split())
            yield Row(batch[0].key, "failed", f"on the cluster: {type(wrong).__name__}: {reason}")


def _files(batches: Iterable[Batch]) -> dict[str, None]:
    """The files that designs name."""
    values = (value for batch in batches for task in batch for value in task.design.fields.values())
    named = dict.fromkeys(text for value in values for text in _texts(value))
    return dict.fromkeys(text for text in named if Path(text).is_file())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from (one for one in value if isinstance(one, str))


# -- on a worker -----------------------------------------------------------------------------------------------------


def _kept(content: bytes) -> bytes:
    """What makes a file a result, which dask moves to each worker once."""
    return content


def _run(batch: Batch, names: Sequence[str], *contents: bytes) -> list[Row]:
    """Run a batch, the files that it names being sent along."""
    with _one_at_a_time:  # a worker may have several threads
        here = {name: _placed(name, content) for name, content in zip(names, contents, strict=True)}
        return [_told(run_design(_moved(task.design, here), task.key), here) for task in batch]


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where this process keeps the files that were sent to it; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="moe-replay-")


def _placed(name: str, content: bytes) -> str:
    """A file of this content, of the same name, for this process."""
    path = Path(_folder().name) / hashlib.sha256(content).hexdigest() / Path(name).name
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        with atomic_path(path) as part:
            part.write_bytes(content)
    return str(path)


def _moved(design: Design, here: Mapping[str, str]) -> Design:
    """The design with the files of this machine."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return here.get(value, value) if isinstance(value, str) else value

    return Design({name: moved(value) for name, value in design.fields.items()})


def _told(row: Row, here: Mapping[str, str]) -> Row:
    """The row in the words of whoever asked: with the names that files have there."""
    reason, notes = row.reason, str(row.values.get("notes", ""))
    for name, path in here.items():
        reason, notes = reason.replace(path, name), notes.replace(path, name)
    return replace(row, reason=reason, values=dict(row.values) | ({"notes": notes} if row.values else {}))
