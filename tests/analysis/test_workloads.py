"""Workloads are found among traces: law, banking, and a mixed one that interleaves the others."""

from pathlib import Path

import numpy as np
import pytest

from analysis.workloads import by_model
from ground.errors import InputError
from tests.support.strategies import make_trace
from traces.schema import DECODE, PREFILL


def written(folder: Path, domain: str | list[str], *, name: str = "toy", sequences: int = 3) -> Path:
    domains = [domain] * sequences if isinstance(domain, str) else domain
    count = len(domains)
    routes = np.random.default_rng(len(str(domain))).random((4 * count, 2, 4)).argsort(axis=2)[:, :, :2]
    trace = make_trace(
        routes,
        n_experts=4,
        name=name,
        domain=domains,
        sequence=np.repeat(np.arange(count), 4),
        phase=[PREFILL, DECODE, DECODE, DECODE] * count,
        split=["profile" if i % 2 else "eval" for i in range(count)],
        sequence_id=np.array([f"{domain}{i}" for i in range(count)]),
    )
    path = folder / f"{name}_{domain if isinstance(domain, str) else 'several'}.npz"
    trace.save(path)
    return path


def test_law_and_banking_stand_alone_and_the_rest_is_mixed(tmp_path: Path) -> None:
    for domain in ("math", "law", "code", "banking"):
        written(tmp_path, domain)
    (model,) = by_model([tmp_path])
    assert list(model.workloads) == ["law", "banking", "mixed"]
    assert [source.name for source in model.workloads["mixed"]] == ["toy_code.npz", "toy_math.npz"]
    assert model.domains == ("banking", "code", "law", "math")
    assert len(model.profile) == 4


def test_a_trace_without_a_profile_split_is_replayed_and_not_learned_from(tmp_path: Path) -> None:
    law = written(tmp_path, "law")
    written(tmp_path, "banking", sequences=1)  # its one sequence is for evaluation
    (model,) = by_model([tmp_path])
    assert list(model.workloads) == ["law", "banking"]
    assert model.profile == (str(law),)


def test_a_trace_of_several_domains_is_mixed_as_it_is(tmp_path: Path) -> None:
    written(tmp_path, ["code", "math", "code", "math"])
    written(tmp_path, "law")
    written(tmp_path, "law", name="other")
    one, other = by_model([tmp_path])
    assert (other.name, list(other.workloads)) == ("toy", ["law", "mixed"])
    assert (one.name, list(one.workloads)) == ("other", ["law"])
    assert [source.name for source in other.workloads["mixed"]] == ["toy_several.npz"]


def test_a_single_other_domain_is_a_workload_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "translation")
    assert list(by_model([tmp_path])[0].workloads) == ["translation"]


def test_two_traces_of_one_workload_are_refused(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    files = [written(tmp_path, "law"), written(tmp_path / "again", "law")]
    with pytest.raises(InputError, match="a second trace of toy, law"):
        by_model(files)
    with pytest.raises(InputError, match=r"a folder without \.npz files"):
        (tmp_path / "empty").mkdir()
        by_model([tmp_path / "empty"])


def test_a_doubtful_trace_is_warned_of_once_and_a_plausible_one_never(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, "law", sequences=8)
    fixed = np.broadcast_to(np.arange(2), (32, 2, 2))
    make_trace(fixed, n_experts=4, name="fixed", domain=["law"]).save(tmp_path / "fixed.npz")
    by_model([tmp_path])
    by_model([tmp_path])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / 'fixed.npz'}: all rows take the same experts in every layer")


def test_bundled_traces_are_not_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    assert by_model()
    assert capsys.readouterr().err == ""
