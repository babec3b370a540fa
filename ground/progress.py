"""Progress of long work on standard error: a bar for a person at a terminal, a line now and then in a log."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_LOG_SECONDS = 10.0


def say(line: str) -> None:
    """A line on standard error, at once."""
    print(line, file=sys.stderr, flush=True)


class Watch:
    """Show how far one piece of work is; use as a context manager.

    ``Watch("training")`` then ``watch.at(fraction, "loss 2.1")`` as often as wanted, fraction in 0..1.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._last = 0.0
        self._started = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
                TextColumn("{task.description}"), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> "Watch":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def at(self, fraction: float, note: str = "") -> None:
        """Say that ``fraction`` of the work is done; ``note`` is a few words on its state."""
        if self._bar:
            self._bar.update(self._task, completed=min(fraction, 1.0), description=note)
            return
        now = time.monotonic()
        if now - self._last >= _LOG_SECONDS or fraction >= 1.0:
            self._last = now
            say(f"{self.what}: {100 * fraction:.0f} % after {now - self._started:.0f} s  {note}")
