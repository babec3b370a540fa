"""Saved checkpoints of tiny models, each made once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved checkpoint of a family with a tokenizer, made when first asked for."""
    from tests.support.tiny_families import saved

    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = saved(family, tmp_path_factory.mktemp(family))
        return made[family]

    return checkpoint
