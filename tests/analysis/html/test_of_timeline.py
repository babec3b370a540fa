"""The link over time is what the slices of a timeline fill."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.html.of_timeline import busy, read_timeline, timeline_plots
from ground.errors import InputError
from sim.__main__ import main as simulate
from tests.support.analysis_worlds import domain_trace


@given(st.lists(st.integers(1, 50), min_size=2, max_size=20), st.integers(1, 12))
def test_bins_fill_as_counted_tick_by_tick(lengths: list[int], bins: int) -> None:
    ends = np.cumsum(lengths)
    stretches = np.stack([ends[:-1], ends[1:]], axis=1)[::2]  # every other stretch is idle
    last = int(ends[-1])
    ticks = np.zeros(last * bins)
    for begin, end in stretches.tolist():
        ticks[begin * bins : end * bins] = 100
    expected = ticks.reshape(bins, -1).mean(axis=1)
    np.testing.assert_allclose(busy(stretches.astype(float), np.linspace(0, last, bins + 1)), expected, atol=1e-9)


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline")
    domain_trace("law").save(folder / "law.npz")
    law = str(folder / "law.npz")
    path = folder / "run.json.gz"
    assert simulate(["replay", law, "--profile", law, "--policy", "domoe", "--timeline", str(path)]) == 0
    return path


def test_link_is_as_busy_as_all_its_copies_of_every_kind(timeline: Path) -> None:
    slices = read_timeline(timeline)
    whole = sum(end - begin for track, _, begin, end in slices if track == 4)
    end = max(last for *_, last in slices)
    link, gpu = timeline_plots(timeline, 1)
    found = np.sum([one.y for one in link.series], axis=0)  # type: ignore[arg-type]
    assert "other copies" not in {one.name for one in link.series}
    assert found.mean() / 100 * end == pytest.approx(whole) and found.max() <= 100 + 1e-6
    assert np.sum([one.y for one in gpu.series], axis=0).max() <= 100 + 1e-6  # type: ignore[arg-type]


def test_plain_and_gzipped_timelines_are_read_alike(timeline: Path, tmp_path: Path) -> None:
    plain = tmp_path / "run.json"
    plain.write_bytes(gzip.decompress(timeline.read_bytes()))
    assert read_timeline(plain) == read_timeline(timeline)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"traceEvents": []}', b"\x1f\x8bno", json.dumps({}).encode()])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not what `sim replay --timeline` writes"):
        read_timeline(path)
