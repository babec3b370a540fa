"""The table of a sweep: a row a design, in the order of the sweep, as parquet and CSV.

The first columns are the fields that the sweep sets, then status and reason, then the figures of the replay. Their
units are in their names. Rows are read from the log a thousand at a time, so that memory does not grow with them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ground.files import atomic_path
from sim.sweep.design import Design
from sim.sweep.log import Log

if TYPE_CHECKING:
    import pandas
    import pyarrow

TABLE, SENSITIVITY = "table", "sensitivity"
PARQUET, CSV = f"{TABLE}.parquet", f"{TABLE}.csv"
_CHUNK = 1000


def check() -> None:
    """Raise ModuleNotFoundError where pyarrow is not installed: called before the replays that a table needs."""
    import pyarrow  # noqa: F401


def write_table(log: Log, designs: Sequence[tuple[str, Design]], name: str = TABLE) -> None:
    """Write the table of ``designs``, whose rows the log has, to the log's folder, whole or not at all."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    schema = _schema(log, designs)
    with (
        atomic_path(log.folder / f"{name}.parquet") as binary,
        atomic_path(log.folder / f"{name}.csv") as text,
        parquet.ParquetWriter(binary, schema) as one,
        csv.CSVWriter(text, schema) as other,
    ):
        for chunk in _chunks(log, designs):
            table = pa.Table.from_arrays([_column(chunk, field) for field in schema], schema=schema)
            one.write_table(table)
            other.write_table(table)


def read_table(folder: Path, name: str = TABLE) -> "pandas.DataFrame":
    """The table of a sweep, or that of its look at sensitivity.

    Raises ModuleNotFoundError without pandas and pyarrow, OSError if there is none.
    """
    import pandas

    return pandas.read_parquet(folder / f"{name}.parquet")


def records(log: Log, designs: Sequence[tuple[str, Design]]) -> Iterator[dict[str, Any]]:
    """The rows of the table as plain data, one in memory at a time."""
    rows = log.in_order(key for key, _ in designs)
    for (key, design), row in zip(designs, rows, strict=True):
        fields = {name: _typed(value) for name, value in design.fields.items()}
        head = {"status": row.status, "reason": row.reason, "identity": key}
        yield fields | head | {name: value for name, value in row.values.items() if name not in fields}


def _typed(value: Any) -> Any:
    """A field's value as one cell: several paths are one text."""
    if isinstance(value, list | tuple):
        return " + ".join(map(str, value))
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _chunks(log: Log, designs: Sequence[tuple[str, Design]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for record in records(log, designs):
        chunk.append(record)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _schema(log: Log, designs: Sequence[tuple[str, Design]]) -> "pyarrow.Schema":
    """Name and type of every column: whole numbers, numbers, true or false; text for whatever is mixed."""
    import pyarrow as pa

    kinds: dict[str, set[type]] = {}
    for record in records(log, designs):
        for name, value in record.items():
            kinds.setdefault(name, set()).update([] if value is None else [type(value)])
    types = {frozenset({int}): pa.int64(), frozenset({float}): pa.float64(), frozenset({bool}): pa.bool_(),
             frozenset({int, float}): pa.float64()}  # fmt: skip
    return pa.schema([(name, types.get(frozenset(found), pa.string())) for name, found in kinds.items()])


def _column(chunk: Sequence[Mapping[str, Any]], field: "pyarrow.Field") -> "pyarrow.Array":
    import pyarrow as pa

    values = [record.get(field.name) for record in chunk]
    if field.type == pa.string():
        values = [None if value is None else str(value) for value in values]
    return pa.array(values, field.type)
