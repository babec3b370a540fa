"""Signals that end a command: what they do before it begins, and while it runs."""

import contextlib
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType, TracebackType

PATIENCE = 2.0
"""Seconds that an import is given to end after a signal."""
_AGAIN_SECONDS = 0.01


class Stopped(BaseException):
    """A signal asks the process to end; raised so that temporary files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def ends_quietly() -> None:
    """From now on Ctrl-C ends the process with status 130 and a word, until ``ground.command_line.run`` takes over."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # one that is ignored stays so
        signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    """What a signal does until then. An exception could come up anywhere in an import, and be lost or shown there."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)


class Stoppable:
    """Within it a signal that would end the process raises Stopped instead; one that is ignored (nohup) stays so.

    An exception is lost where C calls back into Python and in finalisers, and Python then calls ``sys.unraisablehook``:
    so it is raised again a moment later, by the timer. The import of a library may catch an exception, or end the
    process in words of its own: so one that ``caller``, a function's code, began is given time to end.
    """

    def __init__(self, caller: CodeType) -> None:
        self._caller = caller
        self._stopped: Stopped | None = None

    def __enter__(self) -> None:
        ending = (signal.SIG_DFL, signal.default_int_handler, _end)
        here = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if here else ()
        self._before = {each: handler for each in numbers if (handler := signal.getsignal(each)) in ending}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        for each in self._before:
            signal.signal(each, self._stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        if self._stopped is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._alarm)
        for each, handler in self._before.items():
            signal.signal(each, handler)
        if self._stopped is not None and error is None:
            raise self._stopped

    def _stop(self, number: int, frame: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not break the cleaning up
        self._stopped, self._until = Stopped(number), time.monotonic() + PATIENCE
        self._alarm = signal.signal(signal.SIGALRM, self._raise)
        self._raise(number, frame)

    def _raise(self, _: int, frame: FrameType | None) -> None:
        assert self._stopped is not None
        if time.monotonic() >= self._until or not self._importing(frame):
            raise self._stopped
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    def _lost(self, what: "sys.UnraisableHookArgs") -> None:
        if self._stopped is None or what.exc_value is not self._stopped:
            self._hook(what)
        else:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    def _importing(self, frame: FrameType | None) -> bool:
        """Whether ``frame`` belongs to an import that a command began."""
        while frame is not None and frame.f_code is not self._caller:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False
