"""Where compiled code is kept.

numba recognises a changed function by the file that it stands in, not by the files of what it calls. So the folder is
named after a digest of the whole package, and of the files whose constants are compiled into it: code that changed
anywhere is never run from an old cache.
"""

import hashlib
import shutil
from functools import cache
from pathlib import Path

from ground.cache_folder import cache_folder

CONSTANTS_FROM = ("eviction.py", "log.py", "run/slots.py")
KEPT = 3
"""Folders of other versions that stay: checkouts side by side do not compile in turns."""


def compiler_cache() -> Path | None:
    """The folder of this version's machine code, made if need be; None if it cannot be written or is switched off.

    When one is made all but the latest few of other versions go.
    """
    folder = cache_folder(f"compiled-{_source_digest()}")
    if folder is not None and not any(folder.iterdir()):
        others = [other for other in folder.parent.glob("compiled-*") if other != folder]
        for old in sorted(others, key=_changed)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def drop_compiled() -> None:
    """Delete this version's machine code."""
    folder = compiler_cache()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _changed(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another process was faster
        return 0


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in [*sorted(here.glob("*.py")), *(here.parent / name for name in CONSTANTS_FROM)]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
