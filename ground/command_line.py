"""What every command line of the project does around its commands: streams, errors, signals and exit statuses."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TextIO

from cyclopts import App, CycloptsError

from ground.errors import InputError
from ground.interrupts import Stoppable, Stopped
from ground.text import printable

_EXTRAS = dict.fromkeys(("torch", "transformers", "accelerate", "gguf", "tokenizers"), "torch")
_EXTRAS |= dict.fromkeys(("matplotlib", "scipy"), "analysis") | {"pandas": "pandas"}
_INTERRUPTED, _PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


def release() -> str:
    """The version of the project that is installed."""
    try:
        return version("moe-replay")
    except PackageNotFoundError:
        return "uninstalled"


def run(app: App, arguments: Sequence[str] | None = None, *, failures: tuple[type[Exception], ...] = ()) -> int:
    """Run one command of ``app`` (default: the process's arguments) and return the exit status of the process.

    0 is success. 2 is wrong input, an output that cannot be written, too little memory or one of ``failures``: one line
    ``error: ...`` on standard error. 130 is an interruption, 143 and 129 the signals TERM and HUP, 141 a reader of
    standard output that went away. Only a mistake of the program itself raises. Without standard error the messages are
    lost, nothing else.
    """
    refused: tuple[type[Exception], ...] = (InputError, CycloptsError, *failures)
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
    except ModuleNotFoundError as missing:
        extra = _EXTRAS.get((missing.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"error: {missing.name} is not installed; pip install 'moe-replay[{extra}]'", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return _quietly(_PIPE)
    except KeyboardInterrupt:
        return _quietly(_INTERRUPTED, "interrupted")
    except SystemExit as leaving:  # how rich and cyclopts pass on what came to them
        if isinstance(leaving.__context__, BrokenPipeError):
            return _quietly(_PIPE)
        if isinstance(leaving.__context__, KeyboardInterrupt):
            return _quietly(_INTERRUPTED, "interrupted")
        raise
    except Stopped as stop:
        return _quietly(128 + stop.number, "interrupted" if stop.number == signal.SIGINT else "stopped")
    except RecursionError:
        return _quietly(2, "error: the input is nested too deep")
    except MemoryError as error:
        why = f" ({error})" if str(error) else ""
        return _quietly(2, f"error: out of memory{why}; free some, or give the command less at once")
    except OSError as error:
        where = error.filename if error.filename is not None else "cannot read or write"
        return _quietly(2, f"error: {where}: {error.strerror}" if error.strerror else f"error: {error}")
    except refused as error:
        return _quietly(2, f"error: {error}")


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
