"""Processes that run designs: as many as wanted give the same table, and one that dies costs one design."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sim.plan import Plan
from sim.policies import Policy
from sim.sweep.identity import identity
from sim.sweep.log import LOG
from sim.sweep.table import CSV, PARQUET, read_table
from sim.sweep.tasks import BATCH, Task, batches
from sim.sweep.workers import local_workers
from tests.sim.sweep.test_log import designs, swept
from tests.sim.sweep.test_rows import design
from tests.support.replays import EXPERT


def test_designs_that_share_a_plan_which_takes_long_go_to_one_worker_and_first() -> None:
    wanted = [
        design(trace="a.npz", policy=policy, cache=slots, hardware__link__gbps=float(gbps))
        for slots in range(10, 10 + 2 * BATCH)
        for policy in ("lru", "domoe")
        for gbps in (25, 50)
    ]
    found = batches(Task(str(number), one) for number, one in enumerate(wanted))
    shared = [{(t.design.fields["policy"], t.design.fields["hardware.link.gbps"]) for t in batch} for batch in found]
    assert all(len(one) == 1 for one in shared)
    assert [min(one)[0] for one in shared] == ["domoe"] * 2 + ["lru"] * 4
    assert sorted(task.key for batch in found for task in batch) == sorted(map(str, range(len(wanted))))


class Ends(Policy):
    """Ends its process, in a cache of one size."""

    name = "ends"

    def plan(self, view: Any) -> Plan:
        if self.setting.budget == 16 * EXPERT:
            os._exit(9)
        return Plan()


def test_a_design_that_ends_its_process_is_a_row_that_failed_and_the_others_are_run(trace: Path) -> None:
    wanted = [design(trace=str(trace), policy=f"{__name__}:Ends", cache=slots) for slots in (12, 14, 16, 18, 20)]
    tasks = [Task(identity(one), one) for one in wanted]
    (batch,) = batches(tasks)
    with local_workers(1) as run:
        rows = {row.key: row for row in run([batch])}
    found = [rows[task.key] for task in tasks]
    assert [row.status for row in found] == ["ok", "ok", "failed", "ok", "ok"]
    assert "died 2 times, the last time with status 9" in found[2].reason


def test_a_sweep_killed_half_way_and_gone_on_with_by_more_workers_gives_the_table_of_an_unbroken_one(
    trace: Path, tmp_path: Path, said: Any
) -> None:
    """kill -9 of the sweep itself while its worker is at work; the worker ends with it."""
    out, axes = tmp_path / "out", ("cache=20%:60%:10%", "policy=lru,lfu,on-demand", "hardware=l40,abacus")
    typed = ("sweep", trace, "-o", out, "--vary", *axes, "--workers")
    command = [sys.executable, "-m", "sim", *map(str, (*typed, 1))]
    running = subprocess.Popen(command, stderr=subprocess.PIPE)
    while running.poll() is None and _rows(out) < 20:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert said(*typed, 2)[0] == 0
    wanted = designs(trace)
    swept(tmp_path / "unbroken", wanted)
    for name in (CSV, PARQUET):
        assert (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert _rows(out) == len(wanted)


def _rows(folder: Path) -> int:
    log = folder / LOG
    return log.read_bytes().count(b"\n") if log.exists() else 0


def test_the_command_says_what_was_run_what_was_not_and_where_it_is(trace: Path, tmp_path: Path, said: Any) -> None:
    swept(tmp_path / "out", designs(trace))
    axes = ("cache=20%:60%:10%", "policy=lru,lfu,on-demand", "hardware=l40,abacus")
    status, out, err = said("sweep", trace, "-o", tmp_path / "out", "--vary", *axes)
    assert (status, err.splitlines()[-1]) == (0, f"{tmp_path / 'out' / PARQUET} and {CSV}: a row a design")
    assert _rows(tmp_path / "out") == 30, "nothing is run twice"
    assert (
        "30 designs: 15 run (15 of them earlier), 15 cannot be run" in out
        and "15 not run: hardware 'abacus' is unknown" in out
    )
    frame = read_table(tmp_path / "out")
    assert list(frame.columns[:6]) == ["trace", "cache", "policy", "hardware", "status", "reason"]
    assert len(frame) == 30 and (frame.status == "ok").sum() == 15
    best = frame[(frame.status == "ok")].sort_values("tokens_per_s").iloc[-1]
    assert f"{best.tokens_per_s:,.3f}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "-o: expected the folder"),
        (("-o", "OUT", "--workers", "0"), "--workers: 0; give at least 1"),
        (("-o", "OUT", "--vary", "cache"), "expected field=values"),
        (("-o", "OUT", "--vary", "cash=1"), "cash: no such field"),
    ],
)
def test_what_is_typed_wrong_is_one_line_and_leaves_nothing(
    trace: Path, tmp_path: Path, said: Any, arguments: tuple[str, ...], message: str
) -> None:
    given = [tmp_path / "out" if one == "OUT" else one for one in arguments]
    status, out, err = said("sweep", trace, *given)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_of_somebody_elses_is_not_overwritten(trace: Path, tmp_path: Path, said: Any) -> None:
    (tmp_path / CSV).write_text("mine")
    status, _, err = said("sweep", trace, "-o", tmp_path)
    assert status == 2 and "name another folder" in err
    assert (tmp_path / CSV).read_text() == "mine" and not (tmp_path / LOG).exists()
