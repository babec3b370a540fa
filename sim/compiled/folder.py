"""Where compiled code is kept.

numba recognises a changed function by the file that it stands in, not by the files of what it calls. So the folder is
named after a digest of the whole package: code that changed anywhere is never run from an old cache.
"""

import hashlib
from functools import cache
from pathlib import Path

from sim.keep import cache_folder


def compiler_cache() -> Path | None:
    """The folder of this version's machine code, made if need be; None if it cannot be written or is switched off."""
    return cache_folder(f"compiled-{_source_digest()}")


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
