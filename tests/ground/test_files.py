"""Outputs appear whole or not at all, under the very name asked for, and never in the place of an input."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ground.errors import InputError
from ground.files import atomic_path, keep_apart
from sim.__main__ import main as sim_main
from tests.support.places import REPOSITORY
from traces.__main__ import main as traces_main
from traces.capture.prompts import read_prompts
from traces.trace import Trace

LAW = REPOSITORY / "traces/mixtral_law.npz"
MACHINE = REPOSITORY / "sim/machine/profiles/l40.toml"


def write(path: Path | str, text: str = "new") -> None:
    with atomic_path(path) as part:
        part.write_text(text)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Inputs of every command in the current folder, and links to one of them."""
    monkeypatch.chdir(tmp_path)
    for name in ("trace.npz", "other.npz"):
        shutil.copy(LAW, name)
    shutil.copy(MACHINE, "machine.toml")
    for name in ("config.json", "record.npz", "prompts.txt", "statistics.json", "document.md"):
        Path(name).write_text("{}")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    for name in ("law.npz", "blob"):
        Path(name).write_text("{}")
    Path("snapshot").mkdir()  # as the hub's client keeps a checkpoint
    Path("snapshot/config.json").symlink_to("../blob")
    Path("soft").symlink_to("trace.npz")
    os.link("trace.npz", "hard")
    return tmp_path


REPLAY = ["replay", "trace.npz", "--profile", "other.npz", "--hardware", "machine.toml", "--model", "config.json"]
AMOUNTS = ["--profile-tokens", "1", "--eval-tokens", "1"]


@pytest.mark.parametrize(
    ("main", "arguments", "option"),
    [
        *[
            (sim_main, [*REPLAY, option, path], option)
            for option in ("--json", "--timeline")
            for path in ("trace.npz", "other.npz", "machine.toml", "config.json", "./trace.npz", "soft", "hard")
        ],
        (sim_main, [*REPLAY, "--json", "a", "--timeline", "a"], "--timeline"),
        (sim_main, ["replay", "trace.npz", "--json", str(LAW)], "--json"),  # a profile that nobody had to name
        (sim_main, ["compare", *REPLAY[1:], "--json", "other.npz"], "--json"),
        (sim_main, ["models", "config.json", "--json", "config.json"], "--json"),
        (sim_main, ["models", "model", "--json", "model/config.json"], "--json"),
        (sim_main, ["hardware", "machine.toml", "--json", "machine.toml"], "--json"),
        (traces_main, ["convert", "record.npz", "-o", "record.npz"], "--output"),
        (traces_main, ["subset", "trace.npz", "-o", "soft", *AMOUNTS], "--output"),
        (traces_main, ["info", "trace.npz", "other.npz", "--json", "other.npz"], "--json"),
        (traces_main, ["train", "model", "--corpora", ".", "-o", "model"], "--output"),
        (traces_main, ["capture", "model", "--prompts", "prompts.txt", "-o", "prompts.txt"], "--output"),
        (traces_main, ["capture", "model", "--prompts", "prompts.txt", "-o", "model/config.json"], "--output"),
        (traces_main, ["capture", "model", "--prompts", "prompts.txt", "-o", "a", "--statistics", "a"], "--output"),
        (traces_main, ["capture", "m", "--prompts", "prompts.txt", "-o", "a", "--adapter", "hard", "--basis", "soft",
                       "--statistics", "trace.npz"], "--statistics"),
        (traces_main, ["capture", "model", "--prompts", "prompts.txt", "-o", "config.npz", "--statistics",
                       "config.encoder.npz"], "--output,"),
        (traces_main, ["capture", "m", "--corpora", "model", "--domain", "law", "code", "-o", ".", "--basis",
                       "law.npz"], "--output"),
        (traces_main, ["capture", "snapshot", "--prompts", "prompts.txt", "-o", "snapshot/config.json"], "--output"),
        (traces_main, ["capture", "snapshot", "--prompts", "prompts.txt", "-o", "blob"], "--output"),
        (traces_main, ["compare-routing", "trace.npz", "--beside", "record.npz", "-o", "record.npz"], "--output"),
        (traces_main, ["compare-routing", "trace.npz", "--records", "statistics.json", "-o", "statistics.json"],
         "--output"),
        (traces_main, ["compare-routing", "trace.npz", "-o", "document.md", "--document", "document.md"], "--document"),
    ],
)  # fmt: skip
def test_no_command_overwrites_what_it_reads_or_writes_twice(files, main, arguments, option, capsys):
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} ") and error.count("\n") == 1
    assert "would overwrite an input" in error or "names too" in error
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before


def test_names_of_no_file_none_standard_output_and_devices_are_apart(files):
    keep_apart(["mixtral-8x7b", None, "trace.npz", "model"], {"--json": "-", "--timeline": None, "-o": "new.npz"})
    keep_apart(["model"], {"-o": "model/new.json"})
    keep_apart([], {"--json": "/dev/null", "--timeline": "/dev/null"})
    keep_apart(["model", "trace.npz"], {}, folders={"-o": ("new/folder", ["a.json", "b.json"]), "-p": (".", ["a"])})
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (".", "-o trace.npz: would overwrite an input of the command .soft."),
        ("model", "-o model: would overwrite an input"),
        ("full", "-o full/trace.npz: is a folder; expected the name of a file"),
        ("record.npz", "-o record.npz: is a file; expected a folder"),
        ("record.npz/new", "-o record.npz/new: record.npz is a file; expected a folder"),
        ("/proc/new", "-o /proc/new: the folder /proc may not be written"),
        ("gone", "-o gone: is a link to what is not there; expected a folder"),
        ("far", "-o far/trace.npz: is what --json names too"),
    ],
)
def test_files_of_a_folder_are_kept_apart_before_it_is_made(files, folder, why):
    Path("full/trace.npz").mkdir(parents=True)
    Path("far").mkdir()
    Path("gone").symlink_to("nowhere")
    with pytest.raises(InputError, match=f"^{why}"):
        keep_apart(["soft", "model"], {"--json": "far/trace.npz"}, folders={"-o": (folder, ["a.csv", "trace.npz"])})


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (sim_main, ["replay", "{}"]),
        (sim_main, ["replay", "trace.npz", "--profile", "{}"]),
        (sim_main, ["compare", "trace.npz", "--model", "{}"]),
        (sim_main, ["models", "{}"]),
        (sim_main, ["hardware", "{}"]),
        (traces_main, ["info", "{}"]),
        (traces_main, ["verify", "{}"]),
        (traces_main, ["convert", "{}", "-o", "new.npz"]),
        (traces_main, ["capture", "model", "--prompts", "{}", "-o", "new.npz"]),
        (traces_main, ["compare-routing", "trace.npz", "--records", "{}", "-o", "new.npz"]),
        (traces_main, ["compare-routing", "trace.npz", "--document", "{}", "-o", "new.npz"]),
    ],
)
@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_an_input_that_may_never_end_is_refused_at_once(files, main, arguments, path, capsys):
    os.mkfifo("pipe")  # nobody writes to it
    assert main([argument.format(path) for argument in arguments]) == 2
    assert f"{path}: must be a regular file" in capsys.readouterr().err


def test_readers_refuse_a_pipe_without_a_command_line(files):
    os.mkfifo("pipe")
    for read in (Trace.load, read_prompts):
        with pytest.raises(InputError, match="pipe: must be a regular file"):
            read("pipe")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("model", "is a folder"),
        (".", "is the current folder"),
        ("nowhere/a", "nowhere does not exist"),
        ("trace.npz/a", "trace.npz is a file; expected a folder"),
        ("trace.npz/a/b", "trace.npz is a file; expected a folder"),
        ("/proc/a", "/proc may not be written"),  # whatever its permissions say
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_work(files, path, why, capsys):
    # The record is no record: reading it would be told first.
    assert traces_main(["convert", "record.npz", "-o", path]) == 2
    assert why in capsys.readouterr().err
    with pytest.raises(InputError, match=why):
        write(path)


@pytest.mark.parametrize("path", ["closed/a.json", "open/protected.json", "dark/a.json"])
def test_what_may_not_be_written_is_told_by_its_own_name(path):
    code = (
        f"import os, sys; sys.path.insert(0, {str(LAW.parents[1])!r})\n"
        "from ground.files import atomic_path\n"
        "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)  # root may write anywhere\n"
        "try:\n  with atomic_path(sys.argv[1]): print('begun')\n"
        "except (ValueError, OSError) as error: print(error)\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for name, mode in (("closed", 0o555), ("open", 0o777), ("dark", 0o600)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        (folder / "open/protected.json").touch(0o444)
        command = [sys.executable, "-c", code, str(folder / path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert str(folder / path) in said and ".part" not in said and "begun" not in said


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_path(target) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# Begins a file, says so, and goes on when it is told to.
_WRITER = f"""
import sys; sys.path.insert(0, {str(LAW.parents[1])!r})
from ground.files import atomic_path
with atomic_path(sys.argv[1]) as part:
    part.write_text("half")
    print(part, flush=True)
    sys.stdin.readline()
    part.write_text("whole")
"""


def begun(target: Path) -> tuple[subprocess.Popen[str], Path]:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(target)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    return writer, Path(writer.stdout.readline().strip())


def test_the_next_write_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    target, beside = tmp_path / "a.json", tmp_path / "a.json.b"
    strangers = [tmp_path / name for name in (".a.json.part", ".a.json.notes.part", ".a.json.abcdefgh.part.gz")]
    for stranger in strangers:
        stranger.write_text("mine")
    writers = [begun(path) for path in (target, target, target, beside)]
    parts = [part for _, part in writers]
    assert all(part.read_text() == "half" for part in parts) and len(set(parts)) == 4
    for writer, _ in (writers[0], writers[3]):
        writer.kill()
        writer.wait()
    write(target)
    assert target.read_text() == "new"
    assert [part.exists() for part in parts] == [False, True, True, True], "two still run, one is of another file"
    for writer, _ in writers[1:3]:
        writer.communicate("\n", timeout=30)
        assert writer.returncode == 0
    assert target.read_text() == "whole"
    write(beside)
    assert sorted(tmp_path.iterdir()) == sorted([target, beside, *strangers])


def test_a_temporary_file_that_goes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, seen = fcntl.flock, []

    def late(handle: int, how: int) -> None:
        if not seen:
            seen.extend(tmp_path.iterdir())
            seen[0].unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic_path(tmp_path / "a") as part:
        assert part != seen[0]
        part.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_locks_keeps_what_may_be_in_use(tmp_path, monkeypatch):
    def unknown(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with atomic_path(tmp_path / "a") as part:
        part.write_text("first")
        write(tmp_path / "a", "second")
        assert part.exists()
    assert (tmp_path / "a").read_text() == "first" and len(list(tmp_path.iterdir())) == 1


def test_an_error_names_the_target_and_not_the_temporary_file(tmp_path):
    with pytest.raises(FileExistsError) as caught, atomic_path(tmp_path / "a") as part:
        part.open("x")
    assert caught.value.filename == str(tmp_path / "a")


def test_names_as_long_as_the_system_allows_work(tmp_path):
    target = tmp_path / ("x" * 255)
    write(target)
    assert target.read_text() == "new"
    with pytest.raises(OSError, match="name too long"):
        write(tmp_path / ("x" * 256))
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("exists", [True, False])
def test_the_file_behind_a_symbolic_link_is_replaced_and_the_link_stays(tmp_path, exists):
    (tmp_path / "far").mkdir()
    real, link = tmp_path / "far/real", tmp_path / "link"
    if exists:
        real.write_text("old")
    link.symlink_to(real)
    write(link)
    assert link.is_symlink() and real.read_text() == "new" and not real.is_symlink()


def test_devices_stay_devices(tmp_path):
    before = os.stat("/dev/null")  # noqa: PTH116
    write("/dev/null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode) and before.st_ino == Path("/dev/null").stat().st_ino
    with pytest.raises(OSError, match="No space left"):
        write("/dev/full")


def test_a_pipe_gets_the_bytes_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe)
    reader.join(10)
    assert got == ["new"] and pipe.is_fifo()


@pytest.mark.parametrize("to", ["| cat", "> out; cat out"])
def test_standard_output_by_its_path_goes_on_where_it_is(tmp_path, to):
    code = (
        f"import sys; sys.path.insert(0, {str(LAW.parents[1])!r}); from ground.files import atomic_path\n"
        "with atomic_path('/dev/stdout') as part: part.write_text('first ')\n"
        "print('then')"
    )
    (tmp_path / "code.py").write_text(code)
    said = subprocess.run(
        ["bash", "-c", f"{sys.executable} code.py {to}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout == "first then\n"


def test_new_files_are_as_open_as_any_and_old_ones_stay_as_they_are(tmp_path):
    umask = os.umask(0o022)
    try:
        write(tmp_path / "new")
        (tmp_path / "private").touch(0o600)
        write(tmp_path / "private")
    finally:
        os.umask(umask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "private")] == [0o644, 0o600]
