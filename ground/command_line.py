"""What every command line of the project does around its commands: streams, errors, signals and exit statuses."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TextIO

from cyclopts import App, CycloptsError, Parameter

from ground.errors import InputError
from ground.interrupts import Stoppable, Stopped
from ground.text import printable

_EXTRAS = dict.fromkeys(("torch", "transformers", "accelerate", "gguf", "tokenizers"), "torch")
_EXTRAS |= dict.fromkeys(("matplotlib", "scipy"), "analysis") | {"pandas": "pandas"}
_EXTRAS |= {"plotly": "page", "pyarrow": "sweep", "optuna": "search", "distributed": "cluster", "dask": "cluster"}
_INTERRUPTED, _PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


def release() -> str:
    """The version of the project that is installed."""
    try:
        return version("moe-replay")
    except PackageNotFoundError:
        return "uninstalled"


def command_line(package: str, about: str, code: Callable[[], str] = release) -> App:
    """The command line ``python -m package``, without commands yet: a list's values follow its option, and no option
    has a negative form that it does not name.
    """
    return App(
        f"python -m {package}", version=code, help=about, help_format="markdown", help_on_error=False,
        default_parameter=Parameter(consume_multiple=True, negative=()),
    )  # fmt: skip


def Help(text: str, *names: str, **more: Any) -> Parameter:
    """What ``--help`` says of an option, its ``names`` where they are not those of its variable; see Parameter."""
    return Parameter(help=text, name=names or None, **more)


def run(app: App, arguments: Sequence[str] | None = None, *, failures: tuple[type[Exception], ...] = ()) -> int:
    """Run one command of ``app`` (default: the process's arguments) and return the exit status of the process.

    0 is success. 2 is wrong input, an output that cannot be written, too little memory or one of ``failures``: one line
    ``error: ...`` on standard error. 130 is an interruption, 143 and 129 the signals TERM and HUP, 141 a reader of
    standard output that went away. Only a mistake of the program itself raises. Without standard error the messages are
    lost, nothing else.
    """
    if sys.stderr is None:  # print would write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (the stream lives as long as the process)
    for stream in (sys.stdout, sys.stderr):
        # Names of files and domains may hold any character, whatever the locale.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        with Stoppable(run.__code__):
            if sys.stdout is None:
                raise InputError("standard output is closed; open it, or send it to /dev/null")
            app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()  # while a failure can still be told
        return 0
    except BaseException as ending:
        told = _told(ending, (InputError, CycloptsError, *failures))
        if told is None:
            raise
        return _quietly(*told)


def _told(ending: BaseException, refused: tuple[type[Exception], ...]) -> tuple[int, str] | None:
    """The exit status and the line, perhaps empty, of what ended a command; None for a mistake of the program."""
    if isinstance(ending, SystemExit) and isinstance(ending.__context__, BrokenPipeError | KeyboardInterrupt):
        ending = ending.__context__  # rich and cyclopts pass on so what came to them
    if isinstance(ending, BrokenPipeError):
        return _PIPE, ""
    if isinstance(ending, KeyboardInterrupt):
        return _INTERRUPTED, "interrupted"
    if isinstance(ending, Stopped):
        return 128 + ending.number, "interrupted" if ending.number == signal.SIGINT else "stopped"
    wrong = _wrong(ending, refused)
    return None if wrong is None else (2, f"error: {wrong}")


def _wrong(error: BaseException, refused: tuple[type[Exception], ...]) -> str | None:
    """What a person is told of an error that has its cause outside the program; None if it has not."""
    if isinstance(error, ModuleNotFoundError):
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        return None if extra is None else f"{error.name} is not installed; pip install 'moe-replay[{extra}]'"
    if isinstance(error, RecursionError):
        return "the input is nested too deep"
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"out of memory{why}; free some, or give the command less at once"
    if isinstance(error, OSError) and error.strerror:
        return f"{'cannot read or write' if error.filename is None else error.filename}: {error.strerror}"
    return str(error) if isinstance(error, (OSError, *refused)) else None


def _quietly(status: int, line: str = "") -> int:
    """Print a line on standard error; return ``status`` though nothing may be readable or writable any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is sys.stderr and line:
                print(printable(" ".join(line.split())), file=stream)
            if stream is not None:
                stream.flush()
        except OSError:
            _discard(stream)
    return status


def _discard(stream: TextIO) -> None:
    """Send what a stream that cannot be written still holds to nowhere, or the interpreter complains at exit."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
