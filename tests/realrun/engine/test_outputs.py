"""What real runs write: never over what they read, and refused before any work where it cannot be written."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from realrun.__main__ import main
from realrun.calibrate.profile_text import to_toml
from realrun.validate.agreement import Component
from realrun.validate.record import Record
from sim.machine.hardware import Hardware
from sim.run.scene import code_version
from tests.support import tiny_moe
from tests.support.places import REPOSITORY
from traces.trace import Trace

ROOT = REPOSITORY
LAW = str(ROOT / "traces/mixtral_law.npz")
SMALL = ["--device", "cpu", "--scale", "128", "--steps", "1"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs of every command in the current folder; nothing of them may be used, since everything is refused."""
    monkeypatch.chdir(tmp_path)
    for where in (
        "realrun.calibrate.machine_profile.calibrate", "realrun.validate.pairs.calibrate",
        "realrun.validate.pairs._measure", "realrun.commands.open_rig",
        "realrun.calibrate.lookup_ways.ways", "realrun.validate.baselines.baselines",
        "traces.capture.checkpoint.load_model", "realrun.validate.resimulate.for_device",
    ):  # fmt: skip
        monkeypatch.setattr(where, lambda *_, **__: pytest.fail("the work has begun"))
    shutil.copy(LAW, "trace.npz")
    shutil.copy(ROOT / "sim/machine/profiles/h200.toml", "machine.toml")
    tiny_moe.mixtral().save_pretrained("model")
    tiny_moe.tokenizer().save_pretrained("model")
    shutil.copy("model/config.json", "config.json")
    Path("out").mkdir()
    shutil.copy(ROOT / "docs/results/realrun/mixtral/validation.json", "out/validation.json")
    shutil.copy("machine.toml", "out/validation.csv")
    shutil.copy("trace.npz", "out/validation.md")
    Path("again").mkdir()
    Path("again/validation.json").symlink_to("../out/validation.json")
    Path("stuck/validation.json").mkdir(parents=True)
    Path("taken").touch()
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


VALIDATE = ["validate", "trace.npz", "--policies", "lru", *SMALL]
GENERATE = ["generate", "--model", "model", "--prompt", "law", "--device", "cpu"]
REPLAY = ["replay", "trace.npz", *SMALL]
RESIMULATE = ["resimulate", "out/validation.json", LAW]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["calibrate", "--model", "mixtral-8x7b", "config.json", "--out", "config.json"], "--out config.json"),
        (["calibrate", "--model", "model", "--out", "model/config.json"], "--out model/config.json"),
        ([*VALIDATE, "--hardware", "out/validation.csv", "-o", "out"], "-o out/validation.csv"),
        ([*VALIDATE, "--software", "out/validation.csv", "--hardware", "h200", "-o", "out"], "-o out/validation.csv"),
        ([*VALIDATE, "--model", "out/validation.json", "--hardware", "h200", "-o", "out"], "-o out/validation.json"),
        (["validate", "out/validation.md", *VALIDATE[2:], "-o", "out"], "-o out/validation.md"),
        ([*VALIDATE, "--profile", "trace.npz", "out/validation.md", "-o", "out"], "-o out/validation.md"),
        ([*RESIMULATE, "-o", "again"], "-o again/validation.json"),
        ([*RESIMULATE, "--hardware", "out/validation.csv", "-o", "./again/../out"], "holds validation.json itself"),
        (["resimulate", "again/validation.json", LAW, "-o", "out"], "holds validation.json itself"),
        ([*REPLAY, "--json", "trace.npz"], "--json trace.npz"),
        ([*REPLAY, "--hardware", "machine.toml", "--json", "machine.toml"], "--json machine.toml"),
        ([*GENERATE, "--json", "model/config.json"], "--json model/config.json"),
        ([*GENERATE, "--json", "model/model.safetensors"], "--json model/model.safetensors"),
        ([*GENERATE, "--profile", "trace.npz", "--json", "trace.npz"], "--json trace.npz"),
        (["baseline", "--device", "cpu", "--model", "config.json", "--json", "config.json"], "--json config.json"),
        (["baseline", "--device", "cpu", "--against", "out/validation.json", "--json", "again/validation.json"],
         "--json again/validation.json"),
    ],
)  # fmt: skip
def test_no_command_overwrites_what_it_reads(
    files: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(files)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}") or said in error
    assert "would overwrite an input" in error or "itself; expected another folder" in error
    assert error.count("\n") == 1 and contents(files) == before


@pytest.mark.parametrize("options", [["calibrate", "--device", "cpu", "--out"], ["lookup", "--device", "cpu", "--json"],
                                     ["baseline", "--device", "cpu", "--json"], [*GENERATE, "--json"],
                                     [*REPLAY, "--json"]])  # fmt: skip
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/new.toml", "the folder /proc may not be written"),
        ("nowhere/a", "the folder nowhere does not exist"),
        ("out", "out: is a folder"),
        ("", "expected "),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_any_work(
    files: Path, options: list[str], path: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(files)
    assert main([*options, path]) == 2
    error = capsys.readouterr().err
    assert said in error and options[-1] in error and error.startswith("error: ") and error.count("\n") == 1
    assert contents(files) == before


@pytest.mark.parametrize("command", [VALIDATE, [*VALIDATE, "--hardware", "h200"], RESIMULATE])
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("stuck", "-o stuck/validation.json: is a folder"),
        ("/proc/new", "-o /proc/new: the folder /proc may not be written"),
        ("taken", "-o taken: is a file; expected a folder"),
        ("taken/new", "-o taken/new: taken is a file; expected a folder"),
        ("", "expected a name"),
    ],
)
def test_a_folder_that_cannot_be_written_is_told_before_any_work(
    files: Path, command: list[str], folder: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(files)
    assert main([*command, "-o", folder]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1
    assert contents(files) == before


def test_a_profile_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    h200 = Hardware.load("h200")
    made = "realrun.calibrate.machine_profile"
    monkeypatch.setattr(f"{made}.calibrate", lambda machine, specs, effort, name: to_toml({"name": name}, ""))
    monkeypatch.setattr(f"{made}.Hardware.parse", lambda text, name: h200)
    monkeypatch.setattr(f"{made}._print", lambda *_: None)
    for name, kept in (("\udcff", "\ufffd"), ('a"b\nc', 'a"b\\nc')):
        out = tmp_path / f"{name}.toml"
        assert main(["calibrate", "--device", "cpu", "--model", "mixtral-8x7b", "--out", str(out)]) == 0
        assert tomllib.loads(out.read_text("utf-8"))["name"] == kept


def test_what_looks_up_says_where_and_by_which_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from realrun.calibrate.lookup_ways import ways

    monkeypatch.setattr("realrun.calibrate.lookup_ways.ways", lambda machine: ways(machine, 2, 64, 32, 4))
    out = tmp_path / "lookup.json"
    assert main(["lookup", "--device", "cpu", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["command"].startswith("python -m realrun") and told["provenance"]["code"] == code_version()
    assert told["provenance"].keys() >= {"date", "device", "python", "torch", "host", "host_interrupted"}
    assert told["floor_us"] > 0 and [way["name"] for way in told["ways"]] == ["torch, eager"]
    assert "torch, eager" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("measured", {}),
        ("measured", float("inf")),
        ("runs_tokens_per_s", ["fast", 2]),
        ("time_ms", {"compute": float("nan")}),
    ],
)
def test_a_damaged_record_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, value: object
) -> None:
    whole = json.loads((ROOT / "docs/results/realrun/expertflow-mixtral/validation.json").read_text("utf-8"))
    whole["reports"] = whole["reports"][:1]
    report = whole["reports"][0]["measured"]
    report["provenance"]["trace_sha256"] = Trace.load(ROOT / "traces/mixtral_law.npz").sha256
    if where == "measured":
        whole["components"][0][where] = value
    else:
        (report["settings"] if where == "runs_tokens_per_s" else report)[where] = value
    source, folder = tmp_path / "damaged.json", tmp_path / "again"
    source.write_text(json.dumps(whole), "utf-8")
    assert main(["resimulate", str(source), str(ROOT / "traces/mixtral_law.npz"), "-o", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"error: {source}: expected the validation.json that validate writes"
    assert not folder.exists() and not said.out


def test_a_report_is_out_before_its_file_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no full disk here")
    assert main(["replay", LAW, "--policy", "on-demand", *SMALL, "--shared", "2", "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "on-demand" in said.out and "/dev/full" in said.err.splitlines()[-1]


def test_a_cache_in_bytes_is_of_the_model_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", LAW, "--policy", "on-demand", *SMALL, "--shared", "2", "--cache", "1MiB"]) == 0
    assert "1 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("facts, warned", [({"torch": "2"}, True), ({"torch": "2", "cuda": "13"}, False), ({}, False)])
def test_a_validation_on_a_cpu_says_what_its_errors_are_worth(facts, warned) -> None:
    record = Record("x", facts, [Component("lru", "25%", "throughput", "tokens/s", 2.0, 1.0)])
    assert any(line.startswith("measured on a CPU") for line in record.verdict()) == warned
