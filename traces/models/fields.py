"""Typed access to the fields of a Hugging Face ``config.json``."""

from collections.abc import Mapping
from typing import Any

from ground.errors import InputError


class Fields:
    """Typed access to one config; every refusal names the config and the field."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def fail(self, key: str, expected: str) -> InputError:
        """The error for a field that is missing or impossible."""
        found = f"is {self.config[key]!r}" if key in self.config else "is missing"
        return InputError(f"{self.name}: {key} {found}; expected {expected}")

    def integer(self, *keys: str, least: int = 1, most: int = 10**9, default: int | None = None) -> int:
        """The first of ``keys`` that is there, a whole number from ``least`` to ``most``; null counts as missing."""
        key = next((key for key in keys if self.config.get(key) is not None), keys[0])
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.fail(key, f"a whole number from {least} to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A true or false field."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def layer_numbers(self, key: str, layers: int) -> tuple[int, ...] | None:
        """A list of distinct layer numbers, ascending, or None where the field is missing or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(n) is not int or not 0 <= n < layers for n in value):
            raise self.fail(key, f"a list of layer numbers from 0 to {layers - 1}")
        return tuple(sorted(set(value)))

    def words(self, key: str, length: int) -> list[str] | None:
        """A list of ``length`` strings, or None where the field is missing or null."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length or not all(isinstance(w, str) for w in value):
            raise self.fail(key, f"a list of {length} strings, one a layer")
        return list(value)
