"""A machine put together: a card's profile, and the loop, the link and the host that take the place of its own."""

from typing import NamedTuple

from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.machine.hosts import host_of
from sim.machine.links import link_of


class Assembly(NamedTuple):
    """What a machine is put together from, each by name or, where there may be one, a file; None: the profile's own."""

    hardware: str = DEFAULT_HARDWARE
    loop: str | None = None
    link: str | None = None
    host: str | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """What may be read for it."""
        return tuple(name for name in (self.hardware, self.loop, self.host) if name is not None)

    def load(self) -> Hardware:
        """The machine, whose name tells what is not the profile's own.

        Raises InputError (one line: what it is of, field, value, what is expected), OSError if a file cannot be read.
        """
        machine = Hardware.load(self.hardware)
        if self.loop is not None:
            machine = machine.driven_by(self.loop)
        if self.link is not None:
            machine = machine.changed(link=link_of(self.link))
        if self.host is not None:
            machine = machine.changed(host=host_of(self.host, machine.link_bytes_per_s))
        others = {"loop": self.loop, "link": self.link, "host": self.host}
        named = ", ".join(f"{kind} {name}" for kind, name in others.items() if name is not None)
        return machine.changed(name=f"{machine.name} with {named}") if named else machine
