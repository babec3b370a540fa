"""What the software of a run adds to what the hardware needs: launching kernels, and the loop around a decode step.

Here a figure of the loop is declared, with its meaning. `realrun.calibrate.loop_times` measures it, `Costs` gives
it to a workload, and the engines charge it.
"""

from dataclasses import dataclass
from math import ceil

from pydantic import Field

from sim.machine.figures import Checked, Number, Perhaps


class LoopFigures(Checked):
    """What the loop adds to a routed layer or to an expert, as `realrun.calibrate.loop_times` measures it.

    All are microseconds on the GPU's timeline. A figure that is None was not measured, and is not charged.
    """

    route_wait_us: Perhaps = None
    """Microseconds that a routed layer takes longer because the host waits for the router's answer."""
    launch_us: Perhaps = None
    """Microseconds from the moment a route is known until resident experts begin. Experts that are waited for are
    launched while their copies run. Left out where `route_wait_us` holds it."""
    awaited_extra_us: Perhaps = Field(None, alias="alone_us")
    """Microseconds that an expert that is waited for takes longer than a resident one. It runs alone; resident ones run
    together."""
    beside_copy_us: Perhaps = Field(None, alias="copying_us")
    """Microseconds that a routed layer takes longer if a copy is under way as its attention begins. The copy takes part
    of the GPU's memory bandwidth and of the host's time."""
    handover_us: Perhaps = None
    """Microseconds that an expert's copy takes longer in a run than a copy of its size by itself. The host hands it
    over while it does other things, and the computing stream has to see that it is there."""


LOOP_FIGURES = {name: field.alias or name for name, field in LoopFigures.model_fields.items()}
"""The key in a profile of each of the loop's figures."""


@dataclass(frozen=True)
class HostTimes:
    """What each act of the host's thread takes, whole nanoseconds, and how many copies it hands over ahead."""

    request_ns: int = 0
    drop_ns: int = 0
    hand_over_ns: int = 0
    launch_ns: int = 0
    look_up_ns: int = 0
    copies_ahead: int = 0


class HostFigures(Checked):
    """The host's one thread, which does one thing after the other; see `sim.run.host_thread`.

    Left out, an act takes no time. `realrun.calibrate.host_acts` fits those that runs tell apart.
    """

    request_ns: Perhaps = None
    """Nanoseconds of a request that issues a copy."""
    drop_ns: Perhaps = None
    """Nanoseconds of a request that issues none: its expert is there or asked for already, or its call has passed."""
    hand_over_ns: Perhaps = None
    """Nanoseconds of handing a copy to the driver."""
    launch_ns: Perhaps = None
    """Nanoseconds of launching a layer, a head, the resident experts of one row each, or any other expert."""
    look_up_ns: Perhaps = None
    """Nanoseconds of looking one expert of a call up. Left out where `route_wait_us` and `launch_us` hold it."""
    copies_ahead: int = Field(0, ge=0, le=1)
    """Copies of whole experts that are handed over beyond the one that moves, 0 or 1: a demand cannot overtake them."""

    def times(self) -> HostTimes:
        """The same in whole nanoseconds, rounded up."""
        figures = {name: getattr(self, name) for name in type(self).model_fields if name != "copies_ahead"}
        times = {name: ceil(figure.value) for name, figure in figures.items() if figure is not None}
        return HostTimes(**times, copies_ahead=self.copies_ahead)


class Launching(Checked):
    """What launching adds to blocks, and whether the host waits for the router's answer."""

    kind: str = Field(min_length=1)
    """The way of launching, in a word: ``eager`` is one kernel after the other from Python."""
    operation_us: Number
    """Microseconds added to the roofline time of each block: an expert's FFN, a layer's attention with router, the LM
    head."""
    expert_floor_us: Number
    """Microseconds that one FFN takes at least, however few its bytes, for its launches."""
    layer_floor_us: Number
    """Microseconds that attention and router of one layer take at least, for their launches and the loop's work for
    that layer."""
    route_wait_us: Number
    """Microseconds that a routed layer takes longer because the host waits for the router's answer."""
    waits_for_route: bool
    """Whether the host waits for the router's answer. Any policy that fetches what the router asks for must."""


class LoopOverheads(LoopFigures, Launching):
    """What the software adds to what the hardware needs: the profile's table ``software``."""

    host_thread: HostFigures | None = None
    """What the host's one thread takes for each of its acts. Left out, the host is no resource of its own."""
    route_wait_us: Number
    """Microseconds that a routed layer takes longer because the host waits for the router's answer."""

    @property
    def measured(self) -> bool:
        """Whether it was measured for this project."""
        return self.layer_floor_us.measured

    @property
    def origin(self) -> str:
        """Where its figures are from, in a word."""
        return "measured" if self.measured else self.layer_floor_us.source.split(":")[0]
