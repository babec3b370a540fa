"""Ctrl-C while a command line's own modules are imported: nothing has begun yet, so the process just ends."""

import contextlib
import os
import signal


def ends_quietly() -> None:
    """From now on Ctrl-C ends the process with status 130 and a word, until ``ground.command_line.run`` takes over."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # one that is ignored stays so
        signal.signal(signal.SIGINT, end)


def end(*_: object) -> None:
    """What a signal does until then. An exception could come up anywhere in an import, and be lost or shown there."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)
