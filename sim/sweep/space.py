"""The space of designs: its axes, and which of its designs are run."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.sweep.design import Design
from sim.sweep.fields import fitted
from sim.sweep.values import Span


@dataclass(frozen=True)
class Axis:
    """One axis: the fields that vary together, and a tuple with a value of each for every point; or a span of one."""

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...] | Span

    def drawn(self, rng: np.random.Generator) -> dict[str, Any]:
        """A point of it at random."""
        if isinstance(self.values, Span):
            return {self.names[0]: fitted(self.names[0], self.values.at(rng.random()))}
        return dict(zip(self.names, self.values[rng.integers(len(self.values))], strict=True))


@dataclass(frozen=True)
class Space:
    """What all designs have, and the axes on which they differ."""

    base: Mapping[str, Any]
    axes: tuple[Axis, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that a design sets, in order."""
        return (*self.base, *(name for axis in self.axes for name in axis.names))

    @property
    def size(self) -> int:
        """Designs of the grid."""
        return math.prod(len(axis.values) for axis in self.axes if not isinstance(axis.values, Span))

    def grid(self, most: int) -> Iterator[Design]:
        """Every combination, the first axis changing slowest. Raises InputError for more than ``most``."""
        if self.size > most:
            raise InputError(f"the grid has {self.size:,} designs; expected at most {most:,}")
        points = [axis.values for axis in self.axes if not isinstance(axis.values, Span)]
        for number in range(self.size):
            fields = dict(self.base)
            for axis, values in zip(self.axes[::-1], points[::-1], strict=True):
                number, place = divmod(number, len(values))
                fields |= zip(axis.names, values[place], strict=True)
            yield self.design(fields)

    def random(self, count: int, seed: int) -> Iterator[Design]:
        """Up to ``count`` different designs; fewer where so many draws in a row bring nothing new."""
        seen: set[str] = set()
        for draw in range(20 * count):
            if len(seen) == count:
                return
            rng = np.random.default_rng([seed, draw])
            drawn = self.design(dict(self.base) | {k: v for axis in self.axes for k, v in axis.drawn(rng).items()})
            if (text := repr(drawn)) not in seen:
                seen.add(text)
                yield drawn

    def design(self, fields: Mapping[str, Any]) -> Design:
        """The design of these fields, in the order of the sweep."""
        return Design({name: fields[name] for name in self.names})
