"""What every command line of the project does around its commands: streams, errors, signals and exit statuses."""

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import TextIO

from cyclopts import App, CycloptsError

from ground.errors import InputError
from ground.interrupts import end
from ground.text import printable

_STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ENDING = (signal.SIG_DFL, signal.default_int_handler, end)
_EXTRAS = dict.fromkeys(("torch", "transformers", "accelerate", "gguf", "tokenizers"), "torch")
_EXTRAS |= dict.fromkeys(("matplotlib", "scipy"), "analysis")
_PATIENCE = 2.0  # seconds that an import is given to end after a signal
_INTERRUPTED, _PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


def release() -> str:
    """The version of the project that is installed."""
    try:
        return version("moe-replay")
    except PackageNotFoundError:
        return "uninstalled"


class _Stopped(BaseException):
    """A signal asks the process to end; raised so that temporary files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(app: App, arguments: Sequence[str] | None = None, *, failures: tuple[type[Exception], ...] = ()) -> int:
    """Run one command of ``app`` (default: the process's arguments) and return the exit status of the process.

    0 is success. 2 is wrong input, an output that cannot be written or one of ``failures``: one line ``error: ...`` on
    standard error. 130 is an interruption, 143 and 129 the signals TERM and HUP, 141 a reader of standard output that
    went away. Only a mistake of the program itself raises. Without standard error the messages are lost, nothing else.
    """
    refused: tuple[type[Exception], ...] = (InputError, CycloptsError, *failures)
    if sys.stderr is None:  # print would write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 (the stream lives as long as the process)
    for stream in (sys.stdout, sys.stderr):
        # Names of files and domains may hold any character, whatever the locale.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        with _stoppable():
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
    except _Stopped as stop:
        return _quietly(128 + stop.number, "interrupted" if stop.number == signal.SIGINT else "stopped")
    except RecursionError:
        return _quietly(2, "error: the input is nested too deep")
    except OSError as error:
        where = error.filename if error.filename is not None else "cannot read or write"
        return _quietly(2, f"error: {where}: {error.strerror}" if error.strerror else f"error: {error}")
    except refused as error:
        return _quietly(2, f"error: {error}")


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Raise _Stopped where a signal would end the process at once; one that is ignored (nohup) stays so.

    What is raised while a compiler calls back into Python, or in a finaliser, is lost; so it is raised again. In the
    import of a library it may be lost as well, or end the process with the library's own words; so it waits a little.
    """
    stopped: list[_Stopped] = []
    patience: list[float] = []
    before = {n: signal.getsignal(n) for n in _STOPS} if threading.current_thread() is threading.main_thread() else {}
    before = {number: handler for number, handler in before.items() if handler in _ENDING}
    hook = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not break the cleaning up
        stopped.append(_Stopped(number))
        patience.append(time.monotonic() + _PATIENCE)
        again(number, frame)

    def lost(what: "sys.UnraisableHookArgs") -> None:
        if what.exc_value not in stopped:
            hook(what)
        else:
            soon()

    def soon() -> None:
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, again)
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    def again(_: int, frame: FrameType | None) -> None:
        if hasattr(signal, "setitimer") and _importing(frame) and time.monotonic() < patience[0]:
            soon()
        else:
            raise stopped[0]

    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = lost
    try:
        yield
        if stopped:
            raise stopped[0]
    finally:
        sys.unraisablehook = hook
        if stopped and hasattr(signal, "setitimer"):
            alarm = signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if alarm is again else alarm)
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` belongs to an import that a command began."""
    while frame is not None and frame.f_code is not run.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


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
