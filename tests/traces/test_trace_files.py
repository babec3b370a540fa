"""The trace as a file: damaged ones, killed writers, odd names, memory, and the commands that read it."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.places import REPOSITORY
from tests.support.strategies import make_trace
from tests.support.trace_files import full_trace, one_line, refused, stored
from traces import arrays
from traces.__main__ import main
from traces.statistics.info import describe
from traces.trace import Trace, validate

# --- unreadable files ---


def test_half_a_file_is_refused_in_one_line(tmp_path, capsys):
    """Seen in bowang-lab/MedSAM#112, paarthneekhara/text-to-image#69:
    half an archive was refused as "not a zip file" alone.
    """
    path = tmp_path / "half.npz"
    full_trace().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    line = refused(path, capsys)
    assert str(path) in line and f"({len(whole) // 2} bytes)" in line and "truncated or not an npz" in line


@pytest.mark.parametrize("kind", ["empty", "text", "folder", "missing", "other zip"])
def test_one_error_class_for_all_bad_files(kind, tmp_path, capsys):
    """Seen in bytedance/jaqmc#22: a loader caught the error of one kind of bad file and missed those of others."""
    path = tmp_path / "x.npz"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("no archive")
    elif kind == "folder":
        path.mkdir()
    elif kind == "other zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("experts.npy", "no array")
    with pytest.raises(InputError) as error:
        Trace.load(path)
    assert str(path) in one_line(error)
    line = refused(path, capsys)
    if kind in ("empty", "text", "other zip"):
        assert f"({path.stat().st_size} bytes): truncated or not an npz" in line


def test_a_file_that_changes_in_place_while_it_is_read_is_refused(tmp_path, monkeypatch):
    """The hash in a report must be that of the data which were read: neither of the old ones nor of the new."""
    path, other = tmp_path / "t.npz", tmp_path / "other.npz"
    make_trace([0, 1], n_experts=2).save(path)
    make_trace([1, 0], n_experts=2).save(other)
    members = arrays._members

    def changing(*arguments):
        path.write_bytes(other.read_bytes())
        yield from members(*arguments)

    monkeypatch.setattr(arrays, "_members", changing)
    with pytest.raises(InputError, match=r"t\.npz: changed while it was read"):
        Trace.load(path)


def test_an_archive_that_unpacks_to_far_more_than_routing_does_is_refused_unread(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arrays, "PLENTY", 2**20)
    monkeypatch.setattr(arrays, "_array", lambda *_: pytest.fail("an array was read"))
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, meta=np.array("{}"), gates=np.zeros(2**20, np.float16))
    assert "unpack to 2.00 MiB; expected at most 100 times as much" in refused(path, capsys)


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_of_another_size_than_its_header_says_is_refused_unmade(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_array", lambda *_: pytest.fail("an array was made"))
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i2", "fortran_order": False, "shape": (10**12,)})
    path = tmp_path / ("huge.npz" if packed else "huge.npy")
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("experts.npy", stream.getvalue() + bytes(100))
    else:
        path.write_bytes(stream.getvalue() + bytes(100))
    with pytest.raises(InputError, match=r"truncated or not an npz .array '(experts)?' has \d+ bytes, and \d+ by its"):
        arrays.read_arrays(path)


def test_damaged_bytes_never_escape_as_another_error(tmp_path):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            Trace.load(path)
        except InputError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 200


def _digest(path: str) -> tuple[str, int]:
    trace = Trace.load(path)
    return trace.sha256, int(trace.experts.astype(np.int64).sum())


def test_workers_each_open_the_file_for_themselves(tmp_path):
    """Seen in numpy/numpy#18124: workers that shared one open npz file failed its CRC checks."""
    rng = np.random.default_rng(1)
    routes = rng.random((3000, 8, 16)).argsort(axis=2)[:, :, :4]
    path = tmp_path / "t.npz"
    make_trace(routes, n_experts=16, gates=np.ones((3000, 8, 4), np.float16)).save(path)
    expected = _digest(str(path))
    with ProcessPoolExecutor(4) as pool:
        assert list(pool.map(_digest, [str(path)] * 20)) == [expected] * 20


def test_no_object_array_is_written_or_read(tmp_path):
    """Seen in obspy/obspy#2409: a None among the metadata became an object array that a newer numpy does not load."""
    path = tmp_path / "t.npz"
    trace = make_trace([0, 1], n_experts=2, meta={"captured": {"what": "toy", "seed": None}})
    trace.save(path)
    assert Trace.load(path).meta["captured"]["seed"] is None
    with np.load(path, allow_pickle=False) as archive:
        assert not any(archive[name].dtype.hasobject for name in archive.files)
    ragged = np.array([[1, 2], [3]], object)
    with pytest.raises(InputError, match="array 'experts': dtype object"):
        dataclasses.replace(trace, experts=ragged).save(tmp_path / "never.npz")
    assert not (tmp_path / "never.npz").exists()
    np.savez(path, **(stored(trace) | {"experts": ragged}), allow_pickle=True)
    with pytest.raises(InputError, match="array 'experts' holds Python objects; object arrays are not accepted"):
        Trace.load(path)


class _Pwn:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("array", ["meta", "domain", "extra"])
def test_pickles_are_never_run(array, tmp_path, capsys):
    """Seen in pynapple-org/pynapple#607: traces loaded with pickles allowed run code from the file."""
    pwned, path = tmp_path / "pwned", tmp_path / "evil.npz"
    evil = np.array([_Pwn(str(pwned))], object)
    np.savez(path, **(stored(full_trace()) | {array: evil}), allow_pickle=True)
    pwned.unlink(missing_ok=True)
    assert array in refused(path, capsys)
    assert main(["convert", str(path), "-o", str(tmp_path / "o.npz")]) == 2
    assert not pwned.exists()


# --- writing, names and memory ---

# Stands still when two arrays have been written.
_SAVER = """
import sys, time, zipfile
from tests.traces.test_trace_files import full_trace
plain, opened, members, start = zipfile.ZipInfo.FileHeader, [], [], zipfile.ZipFile.__init__
zipfile.ZipFile.__init__ = lambda archive, handle, *more: opened.append(handle) or start(archive, handle, *more)
def begin(member, *arguments):
    members.append(member)
    if len(members) == 3:
        opened[-1].flush()
        print("half-way", flush=True)
        time.sleep(600)
    return plain(member, *arguments)
zipfile.ZipInfo.FileHeader = begin
full_trace().save(sys.argv[1])
"""


@pytest.mark.parametrize("existing", [False, True])
def test_killed_while_saving_leaves_nothing_half_written(existing, tmp_path):
    """Seen in tum-esm/em27-retrieval-pipeline#117: a half-written file was taken as done because it exists."""
    path = tmp_path / "t.npz"
    if existing:
        full_trace().save(path)
    before = path.read_bytes() if existing else None
    root = REPOSITORY
    with subprocess.Popen([sys.executable, "-c", _SAVER, str(path)], cwd=root, stdout=subprocess.PIPE) as saver:
        try:
            assert saver.stdout.readline() == b"half-way\n"
            assert [part.stat().st_size > 0 for part in tmp_path.glob(".*.part")] == [True]
        finally:
            saver.send_signal(signal.SIGKILL)
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    before = path.read_bytes()
    bad = dataclasses.replace(full_trace(), split=np.array(["never"]))
    with pytest.raises(InputError):
        bad.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_odd_names_work_under_an_ascii_locale(tmp_path):
    """Seen in Telecominfraproject/oopt-gnpy#140, Festo-se/festo-cpx-io#32:
    other letters failed where the locale is not UTF-8.
    """
    folder = tmp_path / "é 数学 🙂"
    folder.mkdir()
    source, path, facts = folder / "in put.npz", folder / "tr ace ü.npz", folder / "facts é.json"
    np.savez(source, routed_experts=np.arange(12).reshape(6, 1, 2) % 4, n_experts=np.int64(4), layer_ids=np.arange(1))
    env = {k: v for k, v in os.environ.items() if k not in ("LANG", "PYTHONIOENCODING")}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0"}

    def run(*arguments: object) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "traces", *map(str, arguments)],
            env=env, cwd=REPOSITORY, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("convert", source, "-o", path, "--model", "toy", "--domain", "🙂 数学")
    assert Trace.load(path).domain.tolist() == ["🙂 数学"]
    shown = run("info", path, "--json", facts).decode("utf-8")
    assert "🙂 数学" in shown and "tr ace ü.npz" in shown
    assert json.loads(facts.read_bytes().decode("utf-8"))[0]["file"] == str(path)
    (fact,) = json.loads(run("info", path, "--json", "-").decode("utf-8"))
    assert fact["domains"] == {"🙂 数学": {"profile": 0, "eval": 1}}


def test_undefined_figures_are_null_in_strict_json(tmp_path, capsys):
    """Seen in NVIDIA/Fuser#1623, metaspace2020/metaspace#1079: JSON refused numpy's integers and took NaN."""
    path = tmp_path / "t.npz"
    make_trace([[-1], [-1]], n_experts=2, phase=[0, 0]).save(path)
    assert main(["info", str(path), "--json", "-"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (facts,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert facts["reused"] is None and facts["entropy_bits"]["mean"] is None
    assert facts["rows"] == {"prefill": 2, "decode": 0, "all": 2}


@pytest.mark.parametrize("dtype", [np.int16, np.int64])
def test_memory_of_loading_is_bounded_by_the_stored_arrays(dtype, tmp_path):
    """Seen in InternLM/xtuner#2046: ids of 64 bits took four times the memory."""
    rows, layers, slots = 10_000, 48, 8
    routes = np.broadcast_to(np.arange(slots), (rows, layers, slots))
    arrays = stored(make_trace(routes, n_experts=128))
    arrays["experts"] = arrays["experts"].astype(dtype)
    np.savez(tmp_path / "t.npz", **arrays)
    size = (tmp_path / "t.npz").stat().st_size
    del arrays, routes
    tracemalloc.start()
    try:
        trace = Trace.load(tmp_path / "t.npz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.experts.nbytes == rows * layers * slots * 2
    assert peak < 2 * size


class Counted(np.ndarray):
    """An array whose functions, and those of all that comes of it, count the numbers that they are given."""

    numbers = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        plain = [each.view(np.ndarray) if isinstance(each, Counted) else each for each in inputs]
        Counted.numbers += sum(np.size(each) for each in plain)
        found = getattr(ufunc, method)(*plain, **options)
        return found.view(Counted) if isinstance(found, np.ndarray) else found

    def __array_function__(self, function, types, arguments, options):
        Counted.numbers += sum(each.size for each in arguments if isinstance(each, np.ndarray))
        return super().__array_function__(function, types, arguments, options)


def test_checking_is_linear_in_rows():
    def work(rows: int) -> int:
        shape = (rows, 2, 4)
        trace = make_trace(
            np.broadcast_to(np.arange(4, dtype=np.int16), shape), n_experts=8, gates=np.full(shape, 0.25, np.float16),
            probs=np.full((rows, 2, 8), 31, np.uint8), lookahead=np.full(shape, -1, np.int16),
            phase=np.arange(rows) % 64 > 0, sequence=np.arange(rows) // 64,
        )  # fmt: skip
        arrays = {name: value.view(Counted) for name, value in vars(trace).items() if isinstance(value, np.ndarray)}
        before = Counted.numbers
        validate(dataclasses.replace(trace, **arrays))
        return Counted.numbers - before

    block = 8192  # rows that are checked at a time
    one, two, four = (work(blocks * block) for blocks in (1, 2, 4))
    assert one > block
    assert four - two == 2 * (two - one)


# --- command line ---


def test_verify_prints_the_sha256_and_ok(tmp_path, capsys):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{Trace.load(path).sha256}  ok\n"


@pytest.mark.parametrize("line", ["info --nope x", "nope", "convert x", "convert x -o y --experts z", "verify"])
def test_wrong_flags_are_one_line_and_status_2(line, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_info_counts_by_hand(tmp_path, capsys):
    # Sequence s0: one prefill row and three decode rows; s1: two decode rows. One layer, k = 2.
    trace = make_trace(
        [[0, 1], [0, 1], [1, 2], [2, 1], [0, 1], [2, 3]], n_experts=4, phase=[0, 1, 1, 1, 1, 1],
        sequence=[0, 0, 0, 0, 1, 1], split=["profile", "eval"], domain=["law", "code"],
    )  # fmt: skip
    facts = describe(trace)
    # 1,2 after 0,1: one of two; 2,1 after 1,2: two of two; 2,3 after 0,1 of another sequence: none. 3 of 6.
    assert facts["reused"] == pytest.approx(3 / 6)
    # Uses of experts 0..3: 3, 5, 3, 1.
    share = np.array([3, 5, 3, 1]) / 12
    assert facts["entropy_bits"]["mean"] == pytest.approx(-(share * np.log2(share)).sum())
    assert facts["distinct_experts"] == {"used": 4, "of": 4}
    assert facts["domains"] == {"law": {"profile": 1, "eval": 0}, "code": {"profile": 0, "eval": 1}}
    path = tmp_path / "t.npz"
    trace.save(path)
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"rows +6: 1 prefill, 5 decode", shown) and "50.0% of a decode token's experts" in shown
