"""The machine under measurement: a torch device, its clock and its memory.

On a GPU, times are taken between CUDA events, so that they are the device's own and launches overlap as they do in
use; on the CPU, where everything is synchronous, they are the host's. Every measurement warms up first and gives the
median of several runs with the spread around it. Where several things are timed, each has its turn several times, so
that what disturbs the machine for a moment is in few of a thing's runs and not in its median.
"""

import platform
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ground.errors import InputError
from realrun.calibrate.timing import Key, Timing, Work, bursts, host_ns
from realrun.device.cuda_graph import captured
from realrun.device.torch_device import the_device, the_torch

if TYPE_CHECKING:
    import torch

L2_BYTES = 192 * 2**20
"""Inputs that are used in turn cover at least this much, so that none is found in a cache (an H200's L2: 60 MB)."""
SHORT_SLEEP, LONG_SLEEP = 0.001, 0.064
"""Seconds for which a GPU sleeps while work is launched: at first, and at most."""
SLEEP_HZ = 1.8e9
"""About the rate of the clock that a sleep is counted in."""

PAUSE_NS = 10_000
"""Time between two looks at the clock that is longer went to another process."""


class Machine:
    """One torch device.

    Args:
        device: ``cuda``, ``cuda:N`` or ``cpu``.
        repeats: runs of each measurement.

    Raises InputError, in one line, where torch is missing, the name is no device of these, or there is no such GPU.
    """

    def __init__(self, device: str = "cuda", repeats: int = 20) -> None:
        self.torch = the_torch()
        self.device = the_device(device)
        self.cuda = self.device.type == "cuda"
        self.repeats = repeats
        if self.cuda:
            self.device = self.torch.device("cuda", self.device.index or 0)
            self.torch.cuda.set_device(self.device)

    # -- memory --------------------------------------------------------------------------------------------------

    def random(self, *shape: int, scale: float = 0.02) -> "torch.Tensor":
        """Normally distributed bf16 numbers on the device: arithmetic on zeros is faster than on real weights."""
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16) * scale

    def host(self, size: int, pinned: bool) -> "torch.Tensor":
        """``size`` bytes of host memory that have been written to; InputError where so much cannot be pinned."""
        try:
            return self.torch.empty(size, dtype=self.torch.uint8, pin_memory=pinned and self.cuda).fill_(7)
        except RuntimeError as failed:
            raise InputError(f"cannot get {size:,} bytes of {'pinned ' * pinned}host memory: {failed}") from failed

    def bytes(self, size: int) -> "torch.Tensor":
        """``size`` bytes of device memory."""
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.device).fill_(3)

    def copies(self, size: int) -> int:
        """How many inputs of ``size`` bytes to use in turn so that none is found in a cache."""
        return max(1, min(64, -(-L2_BYTES // max(1, size)))) if self.cuda else 1

    # -- time ----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.cuda:
            self.torch.cuda.synchronize()

    def time(self, *work: Callable[[], Any], repeats: int | None = None, alone: bool = False) -> Timing:
        """Time of one of ``work``, which are used in turn (the same operation on other inputs); see ``times``."""
        return self.times({None: work}, repeats, alone)[None]

    def times(
        self, work: Mapping[Key, Work], repeats: int | None = None, alone: bool = False, asleep: bool = False,
        rest: float = 0.0,
    ) -> dict[Key, Timing]:  # fmt: skip
        """Time of each of ``work`` in as many runs as ``repeats`` says, `BURSTS` or fewer of them at a time.

        With ``alone`` the device is idle before each run; otherwise runs follow each other as fast as they can be
        launched. With ``asleep`` those of a burst are launched while the device sleeps, so that what launching them
        takes the host is not in their time. So many seconds the device may ``rest`` before each of them.
        """
        runs = repeats or self.repeats
        samples: dict[Key, list[float]] = {key: [] for key in work}
        sleeps = dict.fromkeys(work, SHORT_SLEEP if asleep and self.cuda else 0.0)
        for number, size in enumerate(bursts(runs)):
            for key, each in work.items():
                again = 0 if alone else 2
                for run in range(again if number else max(3, len(each) if self.cuda else 0)):
                    each[run % len(each)]()  # what follows is launched before this is over
                some = [each[(len(samples[key]) + run) % len(each)] for run in range(size)]
                if self.cuda:
                    sleeps[key] = self._burst(some, samples[key], sleeps[key], alone, rest)
                else:
                    samples[key] += [host_ns(one) for one in some]
        return {key: Timing.of(found) for key, found in samples.items()}

    def _burst(self, work: Work, samples: list[float], seconds: float, alone: bool, rest: float) -> float:
        """Add the time of each of ``work`` to ``samples``; returns how long the device slept meanwhile, if it did.

        If it woke up before all was launched, that is done again with a longer sleep, up to `LONG_SLEEP`.
        """
        cuda = self.torch.cuda
        while True:
            events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in work]
            awake = cuda.Event()
            if seconds:
                cuda._sleep(int(seconds * SLEEP_HZ))
            awake.record()
            for one, (begin, end) in zip(work, events, strict=True):
                if alone:
                    cuda.synchronize()
                if rest:
                    cuda._sleep(int(rest * SLEEP_HZ))
                begin.record()
                one()
                end.record()
            too_short = bool(seconds) and awake.query()
            cuda.synchronize()
            if not too_short or seconds >= LONG_SLEEP:
                samples += [begin.elapsed_time(end) * 1e6 for begin, end in events]
                return seconds
            seconds *= 2

    def graph(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """``work`` as a CUDA graph, ready to be replayed; on the CPU ``work`` itself."""
        return captured(work) if self.cuda else work

    def interrupted(self, seconds: float = 0.25) -> str:
        """In words: how much of the time others have the processor of a thread that never rests, how long at most."""
        begin = last = time.perf_counter_ns()
        lost = longest = 0
        while last - begin < seconds * 1e9:
            now = time.perf_counter_ns()
            if now - last > PAUSE_NS:
                lost += now - last
                longest = max(longest, now - last)
            last = now
        return f"{lost / (last - begin):.1%} of {seconds:g} s, {longest / 1e3:.0f} us at most"

    # -- what it is ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """Device, driver, software and date, for the head of a profile."""
        facts = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "device": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": self.torch.__version__,
            "host": f"{platform.machine()}, {self.torch.get_num_threads()} threads",
        }
        if self.cuda:
            facts["device"] = self.torch.cuda.get_device_name(self.device)
            facts["cuda"] = str(self.torch.version.cuda)
            facts |= _told(self.device)
        return facts


def _told(device: "torch.device") -> dict[str, str]:
    """What the driver says of itself and of the GPU's link; nothing where it does not answer."""
    import subprocess

    asked = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        driver, generation, width = told.split(", ")
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return {"driver": driver, "link": f"PCIe {generation} x{width}"}
