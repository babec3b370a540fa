"""What surrounds every command: streams that break, signals, and errors as one line."""

import inspect
import os
import signal
import subprocess
import sys
from importlib import import_module

import pytest
from cyclopts import App
from rich.console import Console

from ground.command_line import run
from ground.errors import InputError
from tests.support.places import REPOSITORY

TRACE = "traces/mixtral_law.npz"
TRACES = f"{sys.executable} -m traces"

# A command that has begun an output when the signal arrives.
WAITING = """
import sys, time
from pathlib import Path
from cyclopts import App
from ground.command_line import run
from ground.files import atomic_path
from tests.support.places import REPOSITORY
app = App()
@app.default
def work(path: Path) -> None:
    with atomic_path(path) as part:
        part.write_text("half")
        print("begun", flush=True)
        time.sleep(60)
sys.exit(run(app))
"""


def app_that(raises: BaseException) -> App:
    app = App()

    @app.default
    def command() -> None:
        raise raises

    return app


def shell(command: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=REPOSITORY, text=True, timeout=60, check=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("raises", "status", "line"),
    [
        (InputError("a\nb"), 2, "error: a b\n"),
        (InputError("colour \x1b[31m and \ud800"), 2, "error: colour \\x1b[31m and \\ud800\n"),
        (PermissionError(13, "Permission denied", "x.npz"), 2, "error: x.npz: Permission denied\n"),
        (OSError("odd"), 2, "error: odd\n"),
        (RecursionError("maximum depth"), 2, "error: the input is nested too deep\n"),
        (MemoryError(), 2, "error: out of memory; free some, or give the command less at once\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
    ],
)
def test_what_ends_a_command_is_a_status_and_at_most_one_line(raises, status, line, capsys):
    assert run(app_that(raises), []) == status
    assert capsys.readouterr().err == line


def test_failures_of_a_command_line_s_own_are_told_the_same_way(capsys):
    assert run(app_that(LookupError("stuck")), [], failures=(LookupError,)) == 2
    assert capsys.readouterr().err == "error: stuck\n"
    with pytest.raises(LookupError):
        run(app_that(LookupError("a mistake of ours")), [])


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("verify {trace} | true", 141, ""),
        ("--help | true", 141, ""),
        ("verify {trace} >&-", 2, "error: standard output is closed; open it, or send it to /dev/null\n"),
        ("verify {trace} >/dev/full", 2, "error: cannot read or write: No space left on device\n"),
        ("verify {trace} 2>&-", 0, ""),
        ("verify nothing 2>&-", 2, ""),
        ("verify nothing 2>/dev/full", 2, ""),
        ("verify {trace} >&- 2>&-", 2, ""),
    ],
)
def test_a_stream_that_cannot_be_written_is_told_by_the_status(command, status, said):
    code, error = shell(f"{TRACES} {command.format(trace=TRACE)}")
    assert code == status
    assert error == said


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGTERM, 143, "stopped\n"), (signal.SIGHUP, 129, "stopped\n"), (signal.SIGINT, 130, "interrupted\n")],
)
def test_a_signal_leaves_no_temporary_file(tmp_path, number, status, line):
    target = tmp_path / "out.json"
    target.write_text("old")
    running = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(target)], cwd=REPOSITORY, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: [signal.signal(signal.SIGINT, signal.default_int_handler),
                            signal.signal(signal.SIGHUP, signal.SIG_DFL)],  # nohup would have it ignored
    )  # fmt: skip
    assert running.stdout is not None and running.stdout.readline() == "begun\n"
    running.send_signal(number)
    _, error = running.communicate(timeout=30)
    assert (running.returncode, error) == (status, line)
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "old"


@pytest.mark.parametrize("package", ["traces", "sim", "analysis", "realrun"])
def test_ctrl_c_during_the_imports_is_one_word(tmp_path, package):
    (tmp_path / "cyclopts.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    interrupted(["-m", package, "--help"], tmp_path, "importing\n")


def interrupted(arguments, path, line):
    """What Python, run with ``arguments`` and modules from ``path``, prints once Ctrl-C follows its first ``line``."""
    running = subprocess.Popen(
        [sys.executable, *arguments], cwd=REPOSITORY, text=True, env=os.environ | {"PYTHONPATH": str(path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert running.stdout is not None and running.stdout.readline() == line
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=30)
    assert (running.returncode, error) == (130, "interrupted\n")
    return out


# A command that is interrupted where exceptions are lost: in a callback from C, and in a finaliser.
LOSING = """
import ctypes, os, signal, sys, time
from pathlib import Path
from cyclopts import App
from ground.command_line import run
from ground.files import atomic_path
app = App()
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
@ctypes.CFUNCTYPE(None)
def callback():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
@app.default
def work(path: Path, where: str) -> None:
    with atomic_path(path) as part:
        if where == "callback":
            callback()
        else:
            Dying()
        if where != "end":
            time.sleep(60)
sys.exit(run(app))
"""


@pytest.mark.parametrize("where", ["callback", "finaliser", "end"])
def test_an_interruption_that_gets_lost_is_raised_again(tmp_path, where):
    done = subprocess.run(
        [sys.executable, "-c", LOSING, str(tmp_path / "out.json"), where], cwd=REPOSITORY, text=True,
        capture_output=True, timeout=30,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert where == "end" or not list(tmp_path.iterdir())


# A command that is interrupted in the import of a library, which may catch whatever comes.
IMPORTING = """
import sys, time
import ground.interrupts
from ground.command_line import run
from cyclopts import App
app = App()
@app.default
def work(patience: float) -> None:
    ground.interrupts.PATIENCE = patience
    import library
    print("imported", flush=True)
    time.sleep(60)
sys.exit(run(app))
"""
LIBRARY = """
import time
try:
    print("begun", flush=True)
    time.sleep({})
except {}:
    print("caught", flush=True)
"""


@pytest.mark.parametrize(("seconds", "catches", "patience"), [(1, "BaseException", 60), (60, "ValueError", 0.2)])
def test_an_interruption_waits_for_the_end_of_an_import_but_not_for_long(tmp_path, seconds, catches, patience):
    (tmp_path / "library.py").write_text(LIBRARY.format(seconds, catches))
    (tmp_path / "main.py").write_text(IMPORTING)
    assert "caught" not in interrupted([tmp_path / "main.py", str(patience)], REPOSITORY, "begun\n")


def test_handlers_are_as_before_after_a_command():
    before = signal.getsignal(signal.SIGTERM)
    assert run(app_that(InputError("x")), []) == 2
    assert signal.getsignal(signal.SIGTERM) is before


def commands(app, before=()):
    """What to type for every command of ``app`` and of the groups in it, and what it runs."""
    found = []
    for name in app:
        if not name.startswith("-"):
            run = app[name].default_command
            found += commands(app[name], (*before, name)) if run is None else [([*before, name], run)]
    return found


@pytest.mark.parametrize("package", ["sim", "traces", "realrun", "analysis"])
def test_help_can_be_read_and_copied_at_80_columns(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No example is broken over lines but by a backslash; no name is lost as markup, no list shown as Python has it."""
    app = import_module(f"{package}.__main__").app
    found = commands(app)
    assert len(found) > 2
    for typed, command in found:
        app.help_print(typed, console=Console(width=80))
        shown = capsys.readouterr().out
        said = inspect.getdoc(command) or ""
        examples = [line.rstrip() for part in said.split("```")[1::2] for line in part.strip("\n").splitlines()]
        assert examples and all(any(line.strip() == each.strip() for line in shown.splitlines()) for each in examples)
        assert "--empty-" not in shown and "['" not in shown and "of .jsonl" not in shown
