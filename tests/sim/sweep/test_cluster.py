"""Workers of a dask scheduler give the rows that local processes give, though one of them is killed half-way."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sim.sweep.cluster import cluster_workers
from sim.sweep.log import Log
from sim.sweep.run import carry_out
from sim.sweep.table import CSV, PARQUET, write_table
from tests.sim.sweep.test_log import designs, swept

distributed = pytest.importorskip("distributed")


def test_a_worker_killed_half_way_loses_no_row_and_doubles_none(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = designs(trace)
    monkeypatch.setattr("sim.sweep.tasks.BATCH", 2)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        pids = [worker.pid for worker in cluster.workers.values()]

        def killing(batches: Any) -> Any:
            with cluster_workers(cluster.scheduler_address) as run:
                for number, row in enumerate(run(batches)):
                    if number == 3:
                        os.kill(pids[0], signal.SIGKILL)
                    yield row

        with Log(tmp_path / "out") as log:
            write_table(log, carry_out(wanted, log, killing))
            assert len(log.rows) == len(wanted)
    swept(tmp_path / "here", wanted)
    for name in (CSV, PARQUET):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_no_scheduler_is_said_in_a_line(
    trace: Path, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.sweep.cluster._SECONDS_TO_CONNECT", 0.2)
    status, _, err = said("sweep", trace, "-o", tmp_path / "out", "--scheduler", "tcp://127.0.0.1:9")
    assert status == 2 and "expected a running dask scheduler" in err.splitlines()[-1]
