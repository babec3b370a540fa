"""Pairs drawn at random: which policies at which cache sizes on which traces a validation is about.

So nobody chooses what is shown, and a profile that suits only what it was made with does not look better than it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ground.errors import InputError
from sim.policies.named import NamedPolicy
from sim.run.cache_size import parse_capacity
from sim.run.scene import Scene
from traces.schema import DECODE

BOUNDS = ("10%", "75%")
"""Cache sizes between which to draw where a person names none."""

Card = TypeVar("Card")


@dataclass(frozen=True)
class Asked:
    """One pair that is asked for: a policy and a cache size, as typed, on a trace, by its place among those given."""

    trace: int
    policy: NamedPolicy
    cache: str


def drawn(
    scenes: Sequence[Scene], policies: Sequence[NamedPolicy], count: int, seed: int, bounds: Sequence[str] = BOUNDS
) -> list[Asked]:
    """``count`` pairs of a policy, a trace and a cache size, drawn from ``seed``.

    Policies are dealt like cards, and traces likewise: nobody has a second turn before all others had their first.
    Sizes are shares of all experts, evenly between the two ``bounds``, but at least what the largest decode call of the
    trace takes, and a slot a layer. Raises InputError for bounds that are none.
    """
    random = np.random.default_rng(seed)
    players = dealt(policies, count, random)
    traces = dealt(range(len(scenes)), count, random)
    return [
        Asked(trace, policy, f"{random.uniform(*shares(scenes[trace], bounds)):.2f}%")
        for policy, trace in zip(players, traces, strict=True)
    ]


def dealt(cards: Sequence[Card], count: int, random: np.random.Generator) -> list[Card]:
    """``count`` of ``cards``, from a shuffled pack and then from the next."""
    packs = -(-count // len(cards))
    order = np.concatenate([random.permutation(len(cards)) for _ in range(packs)])[:count]
    return [cards[place] for place in order.tolist()]


def shares(scene: Scene, bounds: Sequence[str]) -> tuple[float, float]:
    """The least and the most percent of all experts to draw. Raises InputError for bounds that are none."""
    if len(bounds) != 2:
        raise InputError(f"--cache {' '.join(bounds)}: expected two sizes with --draw, the least and the most")
    model, work = scene.model, scene.work
    calls = np.diff(work.offsets)[np.repeat(work.schedule.phase == DECODE, work.n_layers)]
    slots = max(work.n_layers, int(calls.max(initial=1)))
    least, most = (parse_capacity(bound, model.expert_bytes, model.experts) for bound in bounds)
    least = max(least, slots * max(model.expert_bytes))
    if least > most:
        raise InputError(
            f"--cache {' '.join(bounds)}: {most:,} bytes at most; expected the larger size second, and at least "
            f"{least:,} bytes, for a call of {slots} experts"
        )
    # Rounded to two digits, the least is still enough.
    return np.ceil(1e4 * least / model.all_expert_bytes) / 100, 100 * most / model.all_expert_bytes


def refuse_calibrated_on(scene: Scene) -> None:
    """Raise InputError if the profile was calibrated on the very trace of ``scene``: no error there tells anything."""
    if scene.trace.sha256 in scene.hardware.calibrated_on:
        raise InputError(
            f"{scene.trace.source}: {scene.hardware.name} was calibrated on it; expected another trace, or a profile "
            f"that was not"
        )
