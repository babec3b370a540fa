"""The folder where results that take long to make are kept between runs; losing it only costs time."""

import os
import tempfile
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """The folder ``name`` of the project's cache, made if need be; None if it cannot be written or is switched off.

    The cache lies where the environment variable MOE_REPLAY_CACHE says (``off`` for none), else in the user's cache
    folder as the XDG Base Directory Specification has it.
    """
    given = os.environ.get("MOE_REPLAY_CACHE", "")
    if given == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(given) if given else (Path(home) if home else Path.home() / ".cache") / "moe-replay"
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
