"""The host's one thread as a resource: it asks for copies, hands them over, looks up and launches, one after the other.

Its acts are done in the order in which they come up, each in the time that the profile's loop gives it
(``sim.machine.loop_overheads.HostFigures``). The rules, which both engines follow:

- A look-up begins when the host is free; a layer, a head, or an expert that was waited for when it is launched, too.
- A copy begins when it has been handed over. All demands are handed over when they are made, whatever moves. A
  prefetch that follows another copy at once was handed over while that one moved: it takes the host's time and waits
  for nothing.
- With ``copies_ahead`` the copy that is to follow is chosen and handed over as soon as one begins, or as soon as there
  is any. It has its slot from then on, and nothing overtakes it, nor the one on the link. It begins when that one has
  ended and it has been handed over.
- Experts and the next layer are launched ahead, as soon as what comes before them is done.
"""

from sim.log import Counters
from sim.machine.loop_overheads import HostTimes


class HostThread:
    """What the thread has to do, and until when.

    Args:
        times: nanoseconds of each act.
        counters: where its time is counted, by the phase that runs.
    """

    def __init__(self, times: HostTimes, counters: Counters) -> None:
        self.times, self.counters = times, counters
        self.free_at = 0
        """When it will have done all that has come up so far, ns."""
        self._launched: list[int] = []

    def await_device(self, now: int) -> None:
        """It waits for a route or a token, which is there now: nothing that follows is done before."""
        self.free_at = max(self.free_at, now)

    def spend(self, ns: int, phase: int) -> None:
        """Have it do something more, behind all that has come up so far."""
        self.free_at += ns
        self.counters.host_busy[phase] += ns

    def wait_ns(self, now: int, phase: int) -> int:
        """How long the GPU waits for it from now on; counted."""
        wait = max(0, self.free_at - now)
        self.counters.host_waits[phase] += wait
        return wait

    def requests(self, now: int, issued: int, dropped: int, phase: int) -> None:
        """Requests come up: so many issue a copy, so many none."""
        self.await_device(now)
        self.spend(issued * self.times.request_ns + dropped * self.times.drop_ns, phase)

    def launch(self, at_once: int, awaited: int, phase: int) -> None:
        """A wave comes up: so many launches of what is there, then one for each expert that is waited for."""
        self.spend(at_once * self.times.launch_ns, phase)
        self._launched = [self.free_at + (place + 1) * self.times.launch_ns for place in range(awaited)]
        self.spend(awaited * self.times.launch_ns, phase)

    def until_launched(self, place: int, now: int, phase: int) -> int:
        """How long the GPU waits from now on until that expert of the wave's awaited ones is launched; counted."""
        wait = max(0, self._launched[place] - now)
        self.counters.host_waits[phase] += wait
        return wait

    def hand_over(self, now: int, phase: int) -> int:
        """A copy comes up to be handed over; returns when it will have been."""
        self.await_device(now)
        self.spend(self.times.hand_over_ns, phase)
        return self.free_at
