"""The log of a sweep: whole rows whatever happens to process, disk and neighbours."""

import hashlib
import json
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.sweep.design import Design
from sim.sweep.log import LOG, TORN, Log
from sim.sweep.row import Row
from sim.sweep.run import carry_out
from sim.sweep.spec import Spec, with_axes
from sim.sweep.table import CSV, PARQUET, read_table, write_table
from sim.sweep.tasks import Batch
from sim.sweep.workers import run_here
from tests.support.replays import toy_trace


def row(key: str, speed: float = 1.0) -> Row:
    return Row(key, "ok", values={"tokens_per_s": speed})


def designs(trace: Path) -> list[Design]:
    axes = ["cache=20%:60%:10%", "policy=lru,lfu,on-demand", "hardware=l40,abacus"]
    return list(with_axes(Spec(), str(trace), axes).space.grid(100))


def tables(folder: Path) -> tuple[bytes, bytes]:
    return (folder / CSV).read_bytes(), (folder / PARQUET).read_bytes()


def lines(folder: Path) -> list[str]:
    return [json.loads(line)["key"] for line in (folder / LOG).read_bytes().splitlines()]


def swept(folder: Path, wanted: Sequence[Design]) -> None:
    with Log(folder) as log:
        write_table(log, carry_out(wanted, log, run_here))


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    toy_trace().save(folder / "toy.npz")
    swept(folder / "out", designs(folder / "toy.npz"))
    return folder


@settings(max_examples=15)
@given(st.data())
def test_a_sweep_that_is_killed_at_any_byte_goes_on_as_if_it_had_not(
    unbroken: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """As much of the log as had been written when it was killed, again and again, then a run to the end."""
    whole = (unbroken / "out" / LOG).read_bytes()
    folder = tmp_path_factory.mktemp("killed")
    cut = data.draw(st.integers(0, len(whole)))
    (folder / LOG).write_bytes(whole[:cut])
    begun: list[str] = []

    def counted(batches: Sequence[Batch]) -> Iterator[Row]:
        """The rows of the unbroken sweep, which are what running would give."""
        with Log(unbroken / "out") as log:
            for batch in batches:
                begun.extend(task.key for task in batch)
                yield from log.in_order(task.key for task in batch)

    wanted = designs(unbroken / "toy.npz")
    with Log(folder) as log:
        assert log.torn == bool(whole[:cut].rpartition(b"\n")[2])
        there = set(log.rows)
        write_table(log, carry_out(wanted, log, counted))
    assert not there.intersection(begun), "nothing is run twice"
    assert tables(folder) == tables(unbroken / "out")
    assert sorted(lines(folder)) == sorted(lines(unbroken / "out")), "no row is lost or doubled"
    torn = (folder / TORN).read_bytes() if (folder / TORN).exists() else b""
    assert torn.rstrip(b"\n") == whole[:cut].rpartition(b"\n")[2]


def test_what_ends_a_sweep_leaves_the_rows_before_it_and_the_table_before_that(unbroken: Path, tmp_path: Path) -> None:
    wanted = designs(unbroken / "toy.npz")
    swept(tmp_path, wanted[:3])
    before = tables(tmp_path)

    def ending(batches: Sequence[Batch]) -> Iterator[Row]:
        for number, one in enumerate(run_here(batches)):
            if number == 4:
                raise Killed
            yield one

    with pytest.raises(Killed), Log(tmp_path) as log:
        carry_out(wanted, log, ending)
    assert tables(tmp_path) == before
    assert len(lines(tmp_path)) >= 3 + 4
    swept(tmp_path, wanted)
    assert tables(tmp_path) == tables(unbroken / "out")


def test_lines_damaged_in_the_middle_are_set_aside_and_run_again(unbroken: Path, tmp_path: Path) -> None:
    whole = (unbroken / "out" / LOG).read_bytes().splitlines(keepends=True)
    whole[1], whole[4] = b'{"key": 1}\n', whole[4][:50] + b"\n"
    (tmp_path / LOG).write_bytes(b"".join(whole))
    with Log(tmp_path) as log:
        assert log.torn == 2
        write_table(log, carry_out(designs(unbroken / "toy.npz"), log, run_here))
    assert tables(tmp_path) == tables(unbroken / "out")
    assert len((tmp_path / TORN).read_bytes().splitlines()) == 2


def test_rows_of_another_trace_of_that_name_or_other_code_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "toy.npz"
    toy_trace().save(trace)
    wanted = designs(trace)[:3]
    swept(tmp_path / "out", wanted)
    old = tables(tmp_path / "out")
    toy_trace(phase=[0] * 2 + [1] * 8 + [0] * 5 + [1] * 15).save(trace)
    swept(tmp_path / "out", wanted)
    new = tables(tmp_path / "out")
    swept(tmp_path / "fresh", wanted)
    assert new == tables(tmp_path / "fresh") and new != old
    content = hashlib.sha256(trace.read_bytes()).hexdigest()
    assert set(read_table(tmp_path / "out").trace_sha256.dropna()) == {content}, "nor its routes, kept from before"
    count = len(lines(tmp_path / "out"))
    monkeypatch.setattr("sim.sweep.identity.code_version", lambda: "a later one")
    swept(tmp_path / "out", wanted)
    assert len(lines(tmp_path / "out")) == count + len(wanted)


def test_two_sweeps_do_not_write_into_one_folder_at_once(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.append(row("a"))
        with pytest.raises(InputError, match="another sweep is writing into it"), Log(tmp_path):
            pass
        log.append(row("b"))
    with Log(tmp_path) as log:
        assert set(log.rows) == {"a", "b"}


def test_a_failed_design_is_tried_again_and_its_last_row_counts(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.append(Row("a", "failed", "its process died"))
        log.append(row("a", 2.0))
        assert log.rows["a"].settled
    with Log(tmp_path) as log:
        assert [one.values["tokens_per_s"] for one in log.in_order(["a"])] == [2.0]


def test_columns_of_the_table_have_the_types_of_their_values(trace: Path, tmp_path: Path) -> None:
    axes = ["cache=40%", "batch=1,2", "hardware.link.gbps=25,x2", "software.search_us=1:2:0.5", "cold=false,true"]
    wanted = list(with_axes(Spec(), str(trace), axes).space.grid(100))
    swept(tmp_path / "out", wanted)
    frame = read_table(tmp_path / "out")
    kinds = {name: frame[name].dtype.kind for name in ("batch", "software.search_us", "cold", "hits", "run_ms")}
    assert kinds == {"batch": "i", "software.search_us": "f", "cold": "b", "hits": "f", "run_ms": "f"}
    assert sorted(set(frame["hardware.link.gbps"])) == ["25.0", "x2"], "mixed values are text"
    assert (frame.status == "refused").sum() == len(frame) / 4, "cold with a batch of 2"
    assert [str(value) for value in frame["software.search_us"]] == [
        str(one.fields["software.search_us"]) for one in wanted
    ], "in the order of the sweep"


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_no_row_that_was_written(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.append(row("a"))
        room = (tmp_path / LOG).stat().st_size
        for more in (0, 1, 40):
            with full_at(room + more), pytest.raises(OSError, match=re.escape(LOG)):
                log.append(row("b"))
            assert (tmp_path / LOG).stat().st_size == room
        log.append(row("c"))
    with Log(tmp_path) as log:
        assert (set(log.rows), log.torn) == ({"a", "c"}, 0)
