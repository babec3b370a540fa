"""Real runs at their limits: no torch, no GPU, memory that is short or not to be pinned, slots taken, signals."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from ground.errors import InputError
from ground.progress import Watch
from realrun.__main__ import main
from realrun.device.host_device import HostDevice
from realrun.device.host_store import HostStore, checksum, host_bytes
from realrun.device.open_device import open_device
from realrun.device.slots import DeviceCache, Room
from realrun.engine.layers import Layers
from realrun.engine.replay import run
from realrun.engine.rig import open_rig
from realrun.engine.small_scene import scaled, with_model
from sim.run.prepared import PreparedRun
from sim.run.scene import scene
from sim.run.slots import LOADING, RESIDENT
from sim.run.terms import Slots
from tests.support.strategies import make_trace
from traces.models.known import model_spec

MIB = 2**20


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixtral's shape: 2 prompts of 3 tokens, 4 decode tokens each."""
    rng = np.random.default_rng(1)
    routes = rng.permuted(np.tile(np.arange(8), (14, 32, 1)), axis=2)[:, :, :2]
    made = make_trace(
        routes, n_experts=8, phase=[0, 0, 0, 1, 1, 1, 1] * 2, sequence=np.repeat([0, 1], 7), name="mixtral-8x7b"
    )
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    made.save(path)
    return path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["replay", *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err and not out
    return lines[0]


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_report_is_the_simulators_with_a_measured_clock(trace: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    assert main(["replay", str(trace), "--device", "cpu", "--scale", "128", "--check", "--json", str(told)]) == 0
    report = json.loads(told.read_text())
    assert report["clock"] == "measured"
    assert report["settings"]["complete"] is True
    assert report["settings"]["checked"] == report["lookups"] + report["prefill"]["lookups"]
    assert report["provenance"]["device"].startswith("CPU")
    assert any("warmed up" in note for note in report["notes"])
    assert report["tokens"] == 8 and report["tokens_per_s"] > 0
    assert min(report["time_ms"].values()) >= 0, "its parts are stretches of the run, one after another"


def test_several_policies_share_one_store(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "told.json"
    asked = ["--policy", "lru", "previous-token,ahead=2", "--device", "cpu", "--scale", "128", "--steps", "2"]
    assert main(["replay", str(trace), *asked, "--shared", "5", "--json", str(told)]) == 0
    reports = json.loads(told.read_text())
    assert [report["policy"] for report in reports] == ["lru", "previous-token"]
    assert [report["tokens"] for report in reports] == [2, 2]
    for report in reports:
        assert report["provenance"]["host_experts"] == 5
        assert any("5 of 256 experts in pinned host memory" in note for note in report["notes"])
    assert capsys.readouterr().err.count("host memory:") == 1


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--scale", "0"], "--scale 0"),
        (["--scale", "5000"], "--scale 5000"),
        (["--steps", "0"], "--steps 0"),
        (["--shared", "0"], "--shared 0"),
        (["--host-memory", "much"], "--host-memory 'much'"),
        (
            ["--host-memory", "1MiB"],
            "host memory for 256 experts: needs 21.01 MiB and 1.00 MiB are free; give --shared",
        ),
        (["--host-memory", "1"], "needs 21.01 MiB and 1 B are free; give --shared N to keep fewer"),
        (["--policy", "nonsense"], "policy 'nonsense' is unknown"),
        (["--policy"], "--policy: expected at least one"),
        (["--device", "tpu"], "device 'tpu'"),
        (["--json", "/nowhere/told.json"], "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    trace: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"--device": "cpu", "--scale": "64"}
    rest = [word for option, value in small.items() if option not in more for word in (option, value)]
    assert said in refused([str(trace), *rest, *more], capsys)


def test_without_a_gpu_there_is_one_line(trace: Path) -> None:
    """Seen in pytorch/pytorch#52675, sbi-dev/sbi#1093: without a GPU there was noise, and tests failed."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "realrun", "replay", str(trace), "--shared", "1"]
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert [line.startswith("error: device 'cuda'") for line in done.stderr.splitlines()] == [True]


def test_without_torch_there_is_one_line_and_the_simulator_runs(trace: Path) -> None:
    """Seen in pytorch/pytorch#52675, sbi-dev/sbi#1093: without a GPU there was noise, and tests failed."""
    block = "import sys; sys.modules['torch'] = None; from {0}.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", block.format("realrun"), "replay", str(trace), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "torch is not installed; pip install 'moe-replay[torch]'" in done.stderr
    command = [sys.executable, "-c", block.format("sim"), "replay", str(trace)]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def test_a_device_that_is_not_there_is_named(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen in GenerelSchwerz/llama.cpp#90: the expert cache was always on the first GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "device 'cuda:1': there are 1 GPUs" in refused([str(trace), "--device", "cuda:1"], capsys)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nothing_is_allocated_on_another_gpu(trace: Path) -> None:
    """Seen in GenerelSchwerz/llama.cpp#90: the expert cache was always on the first GPU."""
    assert main(["replay", str(trace), "--device", "cuda:1", "--scale", "16", "--steps", "2"]) == 0
    assert torch.cuda.memory_allocated(0) == 0


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure", [MemoryError("cudaHostRegister: error 2"), RuntimeError("CUDA error: out of memory")]
)
def test_failed_pinning_is_the_hosts_memory_with_the_bytes_asked_for(
    trace: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen in dvmazur/mixtral-offloading#18, #26: failed pinning was reported as GPU memory with GPU memory free."""
    def fail(self: Any, address: int, size: int) -> None:
        raise failure

    monkeypatch.setattr(HostDevice, "pin", fail)
    said = refused([str(trace), "--device", "cpu", "--scale", "64"], capsys)
    size = 256 * scaled(model_spec("mixtral-8x7b"), 64).expert_bytes[0]
    assert f"host memory: {size:,} bytes cannot be pinned" in said
    assert "not of the GPU" in said


def test_arenas_are_not_rounded_up_to_powers_of_two() -> None:
    """Seen in pytorch/pytorch#150517, #95823: pinned blocks are rounded up to powers of two."""
    size = 129_500_000
    assert 64 * size <= host_bytes(64, size) < 1.001 * 64 * size


def test_arenas_hold_what_was_predicted_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in pytorch/pytorch#150517, #95823: pinned blocks are rounded up to powers of two."""
    pinned: dict[int, int] = {}
    monkeypatch.setattr("realrun.device.host_store.ARENA_BYTES", 3 * MIB)
    monkeypatch.setattr(HostDevice, "pin", lambda self, address, size: pinned.update({address: size}))
    monkeypatch.setattr(HostDevice, "unpin", lambda self, address: pinned.pop(address))
    with open_device("cpu") as device:
        store = HostStore(device, 7, MIB + 4)
        assert len(pinned) == 4  # two an arena
        assert sum(pinned.values()) == host_bytes(7, MIB + 4)
        assert len({checksum(store.expert(number)) for number in range(7)}) == 7
        assert store.stamps[:, 1].tolist() == list(range(7))
        store.close()
    assert not pinned


def test_every_load_brings_the_bytes_of_its_source(trace: Path) -> None:
    """Seen in pytorch/pytorch#127612, #130785: a pinned source changed before its asynchronous copy ended."""
    with open_device("cpu") as device:
        store = HostStore(device, 4, 4096)
        cache = DeviceCache(device, 4096, 1, 4, Slots((2 * 4096,), (0,)))
        for expert in (0, 1, 2, 3, 0):
            assert cache.allot(expert, 0, demand=True) is not None
            device.copy(cache.bytes[cache.slot[expert]], store.expert(expert))
            device.synchronize()
            cache.landed(expert)
            assert torch.equal(cache.bytes[cache.slot[expert]], store.expert(expert))


def test_slots_that_the_device_cannot_hold_are_refused_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: MIB)
    with (
        open_device("cpu") as device,
        pytest.raises(InputError, match="host memory for 3 expert slots"),
    ):
        Room(device).of(3, MIB)


def test_a_cpu_s_memory_is_the_host_s() -> None:
    with open_device("cpu") as device:
        free = device.free_bytes()
    if not Path("/proc/meminfo").exists():
        assert free is None
    else:
        assert free is not None and 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("fits", "said"),
    [
        (0, "host memory for mixtral-8x7b, widths / 64 without its experts: needs 811.00 KiB and 1 B are free; use"),
        (1, "host memory for 64 expert slots: needs 5.25 MiB and 1 B are free; give a smaller --cache, --shared N or"),
    ],
)
def test_on_a_cpu_what_is_around_the_experts_and_slots_must_fit_beside_them(
    trace: Path, fits: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def free(self: Any) -> int:
        asked.append(1)
        return 2**40 if len(asked) <= fits else 1

    monkeypatch.setattr(HostDevice, "free_bytes", free)
    assert said in refused([str(trace), "--device", "cpu", "--scale", "64", "--policy", "lru"], capsys)


def test_slots_that_are_there_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_device("cpu") as device:
        store = HostStore(device, 9, 1024)
        monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 1024)
        assert store.refuse_slots(Slots((3 * 1024,), (0,)), "", held=2 * 1024) == 3 * 1024
        assert store.refuse_slots(Slots((9999 * 1024,), (0,)), "", held=9 * 1024) == 9 * 1024
        assert store.refuse_slots(Slots((1024,), (0,), reserved=(1, 2)), "", held=3 * 1024) == 3 * 1024
        with pytest.raises(
            InputError, match=r"^host memory for 4 expert slots: needs 4\.00 KiB and 3\.00 KiB .*; less$"
        ):
            store.refuse_slots(Slots((4 * 1024,), (0,)), "less", held=2 * 1024)
        store.close()


def test_layers_that_are_made_anew_still_serve_the_longer_of_both_runs(trace: Path) -> None:
    """Layers for a longer context were too small for the longer prompt of a run before."""
    model = scaled(model_spec("mixtral-8x7b"), 64)
    many = with_model(scene(trace, split="all", learns=False), model, "25%")
    with open_rig(model, "cpu", shared=8) as rig:
        whole = rig.layers_for(many)
        prompt, context = whole.prompt, whole.context
        assert rig.layers_for(many) is whole
        rig.layers = Layers(rig.device, model, context - 1, prompt + 5)
        longer = rig.layers_for(many)
        assert (longer.context, longer.prompt) == (context, prompt + 5)
        assert rig.layers_for(many) is longer


def test_a_rig_asks_for_the_memory_of_its_slots_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scaled(model_spec("mixtral-8x7b"), 64)
    with open_rig(model, "cpu", shared=8) as rig:
        room = rig.room_for(Slots((4 * rig.store.size,), (0,)))
        monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 1)
        assert rig.room_for(Slots((3 * rig.store.size,), (0,))) is room
        with pytest.raises(InputError, match="give a smaller --cache"):
            rig.room_for(Slots((5 * rig.store.size,), (0,)))


def test_the_same_slots_serve_one_run_after_another() -> None:
    with open_device("cpu") as device:
        room = Room(device)
        first = room.of(4, 1024)
        assert room.of(2, 1024).data_ptr() == first.data_ptr()
        assert room.of(5, 1024).shape == (5, 1024)


def test_experts_that_are_not_bf16_are_refused() -> None:
    with pytest.raises(InputError, match="compute in bf16"), open_rig(model_spec("gpt-oss-20b"), "cpu"):
        pass


# -- slots -----------------------------------------------------------------------------------------------------------


def test_pinned_and_loading_experts_are_never_evicted() -> None:
    """Seen in JustVugg/colibri#316: with every slot pinned or loading, slot 0 was evicted anyway."""
    with open_device("cpu") as device:
        cache = DeviceCache(device, 1024, 1, 5, Slots((2 * 1024,), (0,)))
        for expert in (0, 1):
            assert cache.allot(expert, 0, demand=True) == []
        assert cache.allot(2, 0, demand=True) is None, "a slot was taken from an expert on its way"
        for expert in (0, 1):
            cache.landed(expert)
            cache.pinned[expert] = 1
        assert cache.allot(2, 0, demand=True) is None, "a pinned expert was evicted"
        assert [cache.state[expert] for expert in (0, 1)] == [RESIDENT, RESIDENT]
        cache.pinned[1] = 0
        before = cache.slot[1]
        assert cache.allot(2, 0, demand=True) == [1]
        assert (cache.slot[2], cache.slot[1], cache.state[2]) == (before, -1, LOADING)


# -- signals ---------------------------------------------------------------------------------------------------------


INTERRUPTED = """
import os, signal, sys
from realrun.__main__ import main
from realrun.engine.compiled_run import CompiledRun
plain = CompiledRun._call
def call(self, running, *rest):
    if running.number == 5:
        os.kill(os.getpid(), signal.SIGINT)
    plain(self, running, *rest)
CompiledRun._call = call
sys.exit(main(sys.argv[1:]))
"""
"""A command that gets SIGINT in the sixth layer of its first prompt."""


def test_an_interrupted_prefill_ends_and_leaves_no_file(trace: Path, tmp_path: Path) -> None:
    """Seen in guqiong96/Lvllmds4#53: a run hung and could not be stopped."""
    asked = ["replay", str(trace), "--device", "cpu", "--scale", "16", "--shared", "1", "--cache", "8"]
    command = [sys.executable, "-c", INTERRUPTED, *asked, "--json", str(tmp_path / "told.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and "interrupted" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_before_an_interruption_is_reported_as_incomplete(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen in guqiong96/Lvllmds4#53: a run hung and could not be stopped."""
    finished: list[int] = []

    class Counting(Watch):
        def at(self, fraction: float, note: str = "") -> None:
            finished.append(1)

    @contextmanager
    def soon() -> Iterator[Callable[[], bool]]:
        yield lambda: len(finished) >= 3

    monkeypatch.setattr("realrun.commands.Watch", Counting)
    monkeypatch.setattr("realrun.commands.interruptible", soon)
    told = tmp_path / "told.json"
    asked = ["--policy", "lru", "fifo", "--device", "cpu", "--scale", "128", "--json", str(told)]
    assert main(["replay", str(trace), *asked]) == 130
    (report,) = json.loads(told.read_text())
    assert report["settings"]["complete"] is False
    assert report["tokens"] == 2  # a prefill and two decode steps
    assert any("INCOMPLETE: interrupted after 3 of 10 steps" in note for note in report["notes"])
    assert "interrupted" in capsys.readouterr().err


def test_policies_that_were_run_before_an_interruption_are_reported(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen in guqiong96/Lvllmds4#53: a run hung and could not be stopped."""
    begun: list[str] = []

    def once(prepared: PreparedRun, *rig: Any, **options: Any) -> Any:
        begun.append(prepared.policy.name)
        if begun[-1] == "fifo":
            raise KeyboardInterrupt
        return run(prepared, *rig, **options)

    @contextmanager
    def then() -> Iterator[Callable[[], bool]]:
        yield lambda: "fifo" in begun

    monkeypatch.setattr("realrun.commands.run", once)
    monkeypatch.setattr("realrun.commands.interruptible", then)
    told = tmp_path / "told.json"
    asked = ["--policy", "lru", "fifo", "lfu", "--device", "cpu", "--scale", "128", "--json", str(told)]
    assert main(["replay", str(trace), *asked]) == 130
    assert [(report["policy"], report["settings"]["complete"]) for report in json.loads(told.read_text())] == [
        ("lru", True)
    ]
    assert begun == ["lru", "fifo"]


@pytest.mark.parametrize("command", ["replay", "validate"])
def test_what_comes_before_the_first_run_is_interrupted_at_once(
    trace: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"replay": "commands", "validate": "validate.pairs"}[command]
    monkeypatch.setattr(f"realrun.{module}.interruptible", lambda: pytest.fail("an interruption would only be noted"))

    def pinning(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("realrun.engine.rig.HostStore", pinning)
    options = {"replay": ["--json", str(tmp_path / "told.json")], "validate": ["-o", str(tmp_path / "out")]}[command]
    named = {"replay": ["--policy", "lru"], "validate": ["--policies", "lru"]}[command]
    small = ["--hardware", "h200", "--device", "cpu", "--scale", "128"]
    assert main([command, str(trace), *named, *small, *options]) == 130
    assert not list(tmp_path.iterdir())


def test_an_eviction_rule_of_ones_own_that_fails_is_named(trace, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_rule.py").write_text(
        "from sim.eviction import LRU\nfrom sim.plan import Plan\nfrom sim.policies import Policy\n\n\n"
        "class Rule(LRU):\n    def candidates(self):\n        raise LookupError('nobody')\n\n\n"
        "class Own(Policy):\n    name = 'own'\n\n    def plan(self, view):\n        return Plan(eviction=Rule)\n"
    )
    command = ["replay", str(trace), "--policy", "own_rule:Own", "--device", "cpu", "--scale", "128", "--steps", "1"]
    assert main([*command, "--cache", "4"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: policy own: eviction: LookupError: nobody (own_rule.py, line 8")


def test_a_loop_in_python_is_told_of(trace, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rule.py").write_text(
        "from sim.eviction import LRU\nfrom sim.plan import Plan\nfrom sim.policies import Policy\n\n\n"
        "class Rule(LRU):\n    pass\n\n\n"
        "class Mine(Policy):\n    name = 'mine'\n\n    def plan(self, view):\n        return Plan(eviction=Rule)\n"
    )
    command = ["replay", str(trace), "--device", "cpu", "--scale", "128", "--steps", "1", "--cache", "4", "--check"]
    for policy, said in (("my_rule:Mine", True), ("lru", False)):
        assert main([*command, "--policy", policy, "--json", str(tmp_path / "told.json")]) == 0
        notes = json.loads((tmp_path / "told.json").read_text())["notes"]
        assert any("loop was Python: the eviction rule Rule is only Python" in note for note in notes) == said
    capsys.readouterr()


@pytest.mark.parametrize("more", [("--regroup", "none"), ("--pipeline", "clairvoyant")])
def test_a_real_run_regroups_nothing(trace: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str]) -> None:
    assert main(["replay", str(trace), "--policy", "lru", "--device", "cpu", *more]) == 2
    assert "a real run predicts as its steps begin and regroups nothing" in capsys.readouterr().err
