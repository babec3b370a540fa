"""What a sweep says of its designs in a terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console

from sim.sweep.answer import answer, answer_view
from sim.sweep.log import Log
from sim.sweep.spec import Spec, with_axes
from sim.sweep.whole import Swept, sweep
from sim.sweep.workers import run_here


def shown(found: Any, names: list[str]) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(answer_view(found, names, ""))
    return console.export_text()


def swept(folder: Path, trace: Path, *axes: str) -> Swept:
    with Log(folder) as log:
        return sweep(with_axes(Spec(), str(trace), axes), log, run_here)


def test_designs_that_were_run_earlier_are_not_said_to_be_run_again(trace: Path, tmp_path: Path) -> None:
    assert "2 designs: 2 run\n" in shown(swept(tmp_path, trace, "cache=40%,50%").answer, ["cache"])
    more = swept(tmp_path, trace, "cache=40%,50%,60%,0%").answer
    assert "4 designs: 3 run (2 of them earlier), 1 cannot be run\n" in shown(more, ["cache"])
    assert more.to_json()["earlier"] == 2


def record(**fields: Any) -> dict[str, Any]:
    usual = {
        "status": "ok", "reference": "", "identity": str(fields), "tokens_per_s_low": None, "bound_tokens_per_s": None,
        "efficiency_ratio": None, "ttft_mean_ms": 1.0, "tpot_p99_ms": 1.0, "gpu_needed_bytes": 1, "expert_bytes": 10,
    }  # fmt: skip
    return usual | {"cache_bytes": 25, "tokens_per_s": 1.0, "tokens_per_s_high": None} | fields


def test_columns_in_which_designs_do_not_differ_are_said_once() -> None:
    rows = [record(**{"policy": policy, "hardware.link.gbps": 25.0, "set.scope": "layer"}) for policy in ("lru", "lfu")]
    text = shown(answer(rows, {}), ["policy", "hardware.link.gbps", "set.scope"])
    assert "the fastest designs, all with link.gbps 25, scope layer" in text
    assert [word for word in text.split("tokens/s")[0].split() if word.isalpha()][-2:] == ["policy", "slots"]
    assert "│    lru │     2 │" in text.replace("│ lru    │", "│    lru │")
    alone = shown(answer(rows[:1], {}), ["policy", "hardware.link.gbps"])
    assert "all with" not in alone and "link.gbps" in alone


def test_caches_that_are_larger_and_worse_are_counted_among_designs_that_differ_in_nothing_else() -> None:
    def rows(policy: str, *figures: tuple[int, int, float]) -> list[dict[str, Any]]:
        return [
            {"policy": policy, "cache": f"{size}B"} | record(cache_bytes=size, misses=misses, tokens_per_s=speed)
            for size, misses, speed in figures
        ]

    fifo = rows("fifo", (30, 12, 3.0), (10, 9, 4.0), (20, 8, 5.0))  # in order of size: 9, 8 and 12 misses
    found = answer([*fifo, *rows("lru", (10, 5, 1.0), (20, 5, 1.0))], {})
    assert found.to_json()["larger_caches"] == {
        "pairs": 3, "more_misses": 1, "most_misses_more": 0.5, "slower": 1, "most_slower": 0.4,
    }  # fmt: skip
    assert "of 3 steps to the next larger cache, 1 miss more (by 50.0% at most) and 1 are slower" in shown(
        found, ["cache"]
    )
    assert answer(rows("lru", (10, 5, 1.0)), {}).to_json()["larger_caches"] == {}
