"""Replay on a real device whose cache, queue, look-up, requests and waiting are those of compiled simulations.

Python launches kernels; all else of a layer call is a few calls of compiled functions, which run without the
interpreter lock (``sim.compiled.driven``). Rules of eviction that are only Python take ``RealRun`` itself.
"""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from realrun.device.copy_link import LONG_BYTES, PIECES_AHEAD
from realrun.device.devices import Device, Event
from realrun.device.driver import CLOCK, Driver
from realrun.device.faults import RunError
from realrun.device.host_store import HostStore
from realrun.device.slots import Room, SlotBuffer
from realrun.engine.loop import StopRequested
from realrun.engine.replay_loop import RealRun, Running
from sim.compiled import copies, driven
from sim.compiled.machine import build
from sim.compiled.records import address
from sim.machine.pieces import PIECE_BYTES, goes_whole
from sim.plan import Plan
from sim.run.terms import RunTerms
from sim.workload import Workload

SLICE_NS = 500_000
"""So long compiled code waits before Python is asked whether the run should end."""
SHORT_SLICE_NS = 20_000
"""The same while a prediction runs on the host beside the step: only Python can see its answer."""
KEPT = 1024
"""Events that are kept alive behind the last one: more than can be waited for at once."""


class Due(NamedTuple):
    """What the plan decides at a moment, by its number in the machine."""

    which: int
    predict_ns: int


class CompiledLink:
    """What Python sees of a run's link: the memory of both records, and the functions that need nothing else."""

    def __init__(
        self, device: Device, store: HostStore, work: Workload, plan: Plan, terms: RunTerms, stamped: bool,
        room: Room | None,
    ) -> None:  # fmt: skip
        self.driver = Driver(device)
        self._machine = machine = build(work, plan, terms)
        self.arrays = arrays = dict(machine.arrays)
        every, most = work.n_layers * work.n_experts, len(arrays["pieces"])
        capacity = arrays["pools"]["free"].tolist()
        self.buffer = SlotBuffer(device, store.size, every, capacity, room)
        self.m: Any = machine.record
        self.m["real"], self.m["host_acts"], self.m["host_copies_ahead"] = True, False, 0
        self.m["score_beside"] = False  # what reckoning takes, the host's thread takes
        transfers = arrays["transfers"]
        transfers["body"], transfers["startup"] = store.size, 0
        places = [np.array(slots, np.int64) for slots in self.buffer.of_pools]
        arrays["pools"]["places"] = [address(part) for part in places]
        arrays["pools"]["n_places"] = [len(part) for part in places]
        self._places = places
        self._events = self.driver.events(every + copies.PIECE_EVENTS)
        held = 4 * most + 64
        ours = {
            "time": np.zeros(2, np.int64),
            "sources": np.array([store.expert(expert).data_ptr() for expert in range(every)], np.int64),
            "events": np.array(self._events[:every], np.int64),
            "piece_events": np.array(self._events[every:], np.int64),
            "holders": np.zeros(self.buffer.n_slots, np.int64),
            "flying": np.zeros(every + copies.PIECE_EVENTS, copies.FLIGHT),
            "holds": np.zeros(copies.HOLDS, copies.HOLD),
            "held": np.zeros(held, np.int64),
            "asides": np.zeros(len(arrays["moments"]), copies.ASIDE),
            "told": np.zeros(2 + 2 * max(most, work.n_experts), np.int64),
        }
        self._ours, self.told = ours, ours["told"]
        piece = store.size if goes_whole(store.size) else min(PIECE_BYTES, -(-store.size // terms.chunks))
        numbers = {
            **self.driver.functions,
            **{name: address(array) for name, array in ours.items()},
            "computing": self.driver.streams[0], "copying": self.driver.streams[1],
            "pause_us": self.driver.pause_us, "clock_number": CLOCK,
            "target": self.buffer.bytes.data_ptr(), "stamps": self.buffer.stamps.data_ptr(),
            "own_stamps": store.stamps.data_ptr(), "stamp_bytes": store.stamps[0].nbytes if stamped else 0,
            "piece_size": piece, "ahead": PIECES_AHEAD * piece, "long": LONG_BYTES, "n_held": held,
            "slice_ns": SLICE_NS,
        }  # fmt: skip
        record = np.zeros((), copies.COPIES)
        for name, number in numbers.items():
            record[name] = number
        self.c: Any = record[()]
        self.both: tuple[int, int] = (address(np.asarray(self.m)), address(np.asarray(self.c)))
        """Their addresses."""

    @property
    def phase(self) -> int:
        """Whether prompts or tokens are served."""
        return int(self.m["phase"])

    @phase.setter
    def phase(self, phase: int) -> None:
        self.m["phase"] = phase

    @property
    def transfers(self) -> list[int]:
        """The experts that are asked for."""
        found: list[int] = np.flatnonzero(self.arrays["transfers"]["live"]).tolist()
        return found

    def poll(self) -> None:
        """See what has arrived, and let more follow."""
        driven.poll_link(*self.both)

    def kick(self, some: bool = False) -> None:
        """See ``sim.compiled.copies.kick``."""
        driven.kick_link(*self.both, some)

    def busy_ns(self) -> int:
        """How long the copying stream has had something to do, by the host's clock."""
        since = time.perf_counter_ns() - int(self.c["busy_since"]) if self.m["flying"] else 0
        return int(self.c["busy_ns"]) + since

    def close(self) -> None:
        """The run is over: count what is left on its way."""
        driven.end_run(*self.both)

    def forget(self) -> None:
        """The device is at rest: let go of the driver's events."""
        self.driver.forget(self._events)

    def log(self) -> Any:
        """What ``sim.compiled.machine.Machine.log`` has of counters and look-ups."""
        return self._machine.log()


class CompiledRun(RealRun):
    """One replay, as ``RealRun``."""

    def _build(
        self, store: HostStore, terms: RunTerms, check: bool, room: Room | None, work: Workload | None
    ) -> None:  # fmt: skip
        assert work is not None
        self.link = CompiledLink(self.device, store, work, self.plan, terms, check, room)
        self.cache = self.link.buffer
        self._both: tuple[int, int] = self.link.both
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._late_asides: list[tuple[Event, int]] = []
        self._happened = 0

    def _prepare(self) -> None:
        for function, more in driven.CALLED.items():
            function.prepare(*self._both, *more)
        super()._prepare()

    def _moments(self) -> dict[int, Any]:
        moments = self.link.arrays["moments"]
        return {
            moment: Due(index, cost)
            for index, (moment, cost) in enumerate(
                zip(moments["moment"].tolist(), moments["cost"].tolist(), strict=True)
            )
        }

    def copy_all(self) -> None:
        """Have every expert there before the first step, which counts nowhere."""
        driven.demand_all(*self._both)
        self._wait(driven.await_link, "all experts before step", 0)
        self.link.arrays["counts"]["demand_bytes"] = 0

    def _end(self) -> None:
        super()._end()
        self.link.forget()
        self.counters = self.link.log().counters

    def _found(self) -> np.ndarray:
        found: np.ndarray = self.link.arrays["found"]
        return found

    # -- one call ------------------------------------------------------------------------------------------------

    def _call(self, call: Running, number: int, first: int) -> None:
        link, plan, both = self.link, self.plan, self._both
        needed, at = list(call.pairs), call.number
        decision = self._decide_before(self._at_moments.get(at + number + 1), number)
        size = driven.begin_call(*both, at)
        hosted: list[int] = []
        if plan.host is not None:
            told = link.told.tolist()
            hosted = [needed[i - first] for i in told[1 : 1 + told[0]]]
        end, ready, waiting = self._claim(at, 0, size)
        since = self.device.compute.mark() if waiting or end < size else None
        thought = self._think(decision) if decision is not None else None
        link.kick(some=True)
        if decision is not None and thought is not None:  # the step waits for the answer; a demand is on its way
            self._revalue(decision)
            self._answer(thought, number)
            since = None
        beside = self._begin_hosted(call, hosted) if plan.host is not None and plan.host.beside else None
        last = self._launch_wave(call, ready, waiting, since)
        link.kick()
        self._ask_in_call(at, decision, thought is None)
        self._launch_awaited(call, (0, end), waiting, last)
        while end < size:
            begin = end
            self._await_free()
            end, ready, waiting = self._claim(at, begin, size)
            link.kick()
            self._launch_awaited(call, (begin, end), waiting, self._launch_wave(call, ready, waiting, None))
        self._stand_still_for_others(at)
        if hosted:
            self._await_hosted(call, beside or self._begin_hosted(call, hosted))

    def _claim(self, at: int, begin: int, size: int) -> tuple[int, list[int], list[tuple[int, bool]]]:
        """Where the wave of a call ends, which of it is ready, and what is waited for and was late at the look-up."""
        end = driven.claim_wave(*self._both, at, begin, size)
        told = self.link.told[: 2 + 2 * (end - begin)].tolist()
        split = 2 + 2 * told[0]
        waiting = [(told[i], told[i + 1] > 0) for i in range(split, len(told), 2)]
        return int(end), told[2:split:2], waiting

    def _launch_wave(
        self, call: Running, ready: list[int], waiting: list[tuple[int, bool]], since: Event | None
    ) -> Event:  # fmt: skip
        """As ``_launch_ready``."""
        if not ready:
            return self.device.compute.mark() if since is None else since
        begin = self.device.compute.mark()
        if waiting and since is not None:
            stalls = self.times.stall_late if waiting[0][1] else self.times.stall_demand
            stalls.append((call.number, since, begin))
        return self._launch(call, ready, begin)

    def _launch_awaited(
        self, call: Running, wave: tuple[int, int], waiting: list[tuple[int, bool]], last: Event
    ) -> None:  # fmt: skip
        """As ``_launch_late``, for the pieces of a wave."""
        for expert, late in waiting:
            there = self._stand_still_until(call.number, [expert], late, last)
            last = self._launch(call, [expert], there)
        if wave[1] > wave[0]:
            self._kept.append(last)
            driven.hold(*self._both, self.link.driver.handle(last), *wave)
        if waiting:
            self.link.poll()

    def _stand_still_until(self, at: int, experts: list[int], late: bool, since: Event | None = None) -> Event:
        idle = self.device.compute.mark() if since is None else since
        for expert in experts:
            self._wait(driven.await_copy, "a slot for expert", expert, expert, since is not None)
        end: Event = self.device.compute.mark()
        (self.times.stall_late if late else self.times.stall_demand).append((at, idle, end))
        return end

    def _stand_still_for_others(self, call: int) -> None:
        if self.plan.ring or self.plan.insist:
            count = int(driven.still_under_way(*self._both, call))
            if count:
                self._stand_still_until(call, self.link.told[:count].tolist(), late=True)

    def _slots(self, experts: list[int]) -> list[int]:
        found: list[int] = self.link.arrays["slots"]["place"][experts].tolist()
        return found

    # -- waiting -------------------------------------------------------------------------------------------------

    def _wait(self, function: Any, what: str, number: int, *arguments: Any) -> None:
        """Call a function that waits for ``what`` until that is there. Raises as ``_until``."""
        self._waits_for, self._moved_at = (what, number), time.monotonic()
        while function(*self._both, *arguments) != driven.DONE:
            self._look_around()
        if self.link.c["failed"]:
            self._look_around()

    def _look_around(self) -> None:
        """What only Python can do while compiled code waits."""
        if failed := int(self.link.c["failed"]):
            raise RunError(f"a copy, or an event behind one, on {self.device.name}: error {failed} of the driver")
        self.device.breathe()
        for index, (event, moment) in enumerate(self._late_asides):
            if event.query():
                del self._late_asides[index]
                driven.answer_aside(*self._both, moment)
                self.link.kick()
                break
        if not self._late_asides:
            self.link.c["slice_ns"] = SLICE_NS
        if self.link.c["happened"] != self._happened:
            self._happened, self._moved_at = int(self.link.c["happened"]), time.monotonic()
        self._look_at_clock()

    def _look_after_link(self, some: bool = False) -> None:
        driven.look_after_link(*self._both)
        self._look_around()

    def _await(
        self, event: Event, what: str, number: int, demands_follow: bool = False, some: bool = False
    ) -> None:  # fmt: skip
        handle = self.link.driver.handle(event)
        if handle:
            self._wait(driven.await_event, what, number, handle, some, demands_follow)
        else:
            self._until(event.query, what, number, some)
        if not demands_follow and self._stop():
            raise StopRequested

    def _await_free(self) -> None:
        self._wait(driven.await_free, "earlier kernels in layer call", int(self.link.m["passed"]))

    # -- the policy ----------------------------------------------------------------------------------------------

    def _ask_in_call(self, at: int, decision: Any, new_values: bool) -> None:
        """The policy's turn in a layer call, and the next layer's experts where a plan streams them."""
        plan, both = self.plan, self._both
        if decision is not None:
            if new_values:
                self._revalue(decision)
            self._ask(decision)
        if streams := self._streams(at):
            driven.stream_layer(*both, at + 1)
        if plan.host is not None and plan.host.insert:
            driven.insert_hosted(*both, at)
        elif not streams and decision is None:
            return
        self.link.kick()

    def _streams(self, at: int) -> bool:
        if self.plan.ring:
            return at + 1 < self.work.n_calls
        return self.plan.stream_prefill and not self.link.phase and (at + 1) % self.n_layers != 0

    def _revalue(self, decision: Any) -> None:
        driven.revalue(*self._both, decision.which, not self._is_aside(decision))

    def _ask(self, decision: Any) -> None:
        if not self._is_aside(decision):
            driven.ask(*self._both, decision.which, 0)
            return
        event = self._predictions.begin(decision.predict_ns, critical=False)
        if handle := self.link.driver.handle(event):
            self._kept.append(event)
            driven.ask(*self._both, decision.which, handle)
        else:
            self._late_asides.append((event, decision.which))
            self.link.c["slice_ns"] = SHORT_SLICE_NS

    def _request_all(self) -> None:
        """Nothing is put off."""

    def _stream_layer(self, call: int) -> None:
        driven.stream_layer(*self._both, call)
