"""The released models that are built in, from `released.toml` beside this file, which says where each fact is from."""

import tomllib
from importlib import resources
from typing import Any

RELEASED: dict[str, dict[str, Any]] = tomllib.loads(
    (resources.files("traces.models") / "released.toml").read_text("utf-8")
)
