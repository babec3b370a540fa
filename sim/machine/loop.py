"""The loops that drive a card: what their software adds, apart from what the card is.

A loop is a TOML file with the fields of a profile's table ``software``; those in ``sim/machine/loops`` are built in.
``eager`` launches one kernel after the other from Python, ``graphs`` replays CUDA graphs.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from sim.machine.figures import Profile, builtin_names, profile_text
from sim.machine.loop_overheads import LoopOverheads

DEFAULT_LOOP = "graphs"
"""What drives a card whose profile has no loop of its own."""
_BUILT_IN = "sim.machine.loops"


class Loop(LoopOverheads, Profile):
    """One loop, from a file."""


def builtin_loops() -> tuple[str, ...]:
    """Names of the loops that are built in."""
    return builtin_names(_BUILT_IN)


@cache
def default_loop() -> dict[str, Any]:
    """The table ``software`` of a profile that has none."""
    return tomllib.loads(profile_text(_BUILT_IN, "loop", DEFAULT_LOOP).decode())


def load_loop(name_or_path: str | Path) -> LoopOverheads:
    """A built-in loop by name, or one from a TOML file.

    Raises InputError (one line: file, field, value, what is expected), OSError if a file cannot be read.
    """
    loop = Loop.parse(profile_text(_BUILT_IN, "loop", name_or_path), str(name_or_path))
    return LoopOverheads.model_validate(loop.model_dump(by_alias=True))
