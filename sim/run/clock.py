"""Simulated time: whole nanoseconds, and one rule for what comes first at one instant."""

from collections.abc import Callable
from typing import cast

from simpy import Environment, Event
from simpy.events import EventPriority

LANDING, ASIDE = EventPriority(-1), EventPriority(0)
"""At one instant: ends of transfers, then requests predicted beside the step, then (SimPy's NORMAL) the GPU."""


class Clock(Environment):
    """A SimPy environment whose time is an integer number of nanoseconds from 0."""

    def __init__(self) -> None:
        super().__init__(0)

    @property
    def now(self) -> int:
        """The present, ns. Whole because the start and all delays are."""
        return cast(int, self._now)

    def call(self, delay: int, priority: EventPriority, then: Callable[[Event], None]) -> Event:
        """Call ``then`` in ``delay`` ns, in the order that ``priority`` gives among events of that instant."""
        event = Event(self)
        event._ok = True
        event._value = None
        event.callbacks = [then]
        self.schedule(event, priority, delay)
        return event
