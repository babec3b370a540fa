"""Speeds as bars in a terminal."""

from typing import Any

from rich.console import Console

from sim.sweep.draw import MOST_BARS, drawing


def drawn(records: list[dict[str, Any]], names: list[str]) -> list[str]:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(drawing(records, names))
    return console.export_text().splitlines()


def record(speed: float | None, **fields: Any) -> dict[str, Any]:
    usual = {"status": "ok", "reference": "", "tokens_per_s": speed, "bound_tokens_per_s": 8.0}
    return usual | fields


def test_bars_are_as_long_as_designs_are_fast_and_other_axes_show_their_best() -> None:
    records = [
        record(speed * link, policy=policy, cache=cache, link=link)
        for policy, most in (("lru", 1.0), ("domoe", 2.0))
        for cache, speed in (("10%", most), ("20%", 2 * most))
        for link in (0.5, 1.0)
    ]
    records += [record(9.0, policy="clairvoyant", cache="10%", link=1.0, reference="knows the future")]
    records += [record(None, policy="lfu", cache="10%", link=1.0, status="refused")]
    lines = drawn(records, ["policy", "cache", "link"])
    assert lines[0].strip() == "tokens/s (of the bound) over cache; of link the fastest"
    assert [(lines[at].split()[0], lines[at].count("█")) for at in (2, 3, 5, 6)] == [
        ("10%", 25), ("20%", 50), ("10%", 12), ("20%", 25),
    ]  # fmt: skip
    assert [lines[at].split() for at in (1, 4)] == [["policy", "domoe"], ["policy", "lru"]], "the fastest first"
    assert lines[3].endswith("4.00 of 8.00 ")
    assert not any("clairvoyant" in line or "lfu" in line for line in lines)


def test_names_with_brackets_and_many_bars_are_shown_as_they_are() -> None:
    lines = drawn([record(1.0, policy="[red]mine[/red]:A"), record(2.0, policy="b")], ["policy"])
    assert any(line.startswith("[red]mine[/red]:A") for line in lines)
    many = drawn([record(1.0 + n, batch=n) for n in range(MOST_BARS + 7)], ["batch"])
    assert many[-1].strip() == "7 more bars are left out"
    wide = [record(1.0 + n + b / 9, policy=f"p{n}", batch=b) for n in range(MOST_BARS) for b in range(7)]
    blocks = drawn(wide, ["policy", "batch"])
    assert [line.split()[1] for line in blocks if line.startswith("policy")] == [
        f"p{MOST_BARS - 1 - n}" for n in range(MOST_BARS // 7)
    ], "whole blocks, the fastest first"
    assert blocks[-1].strip() == f"{7 * (MOST_BARS - MOST_BARS // 7)} more bars are left out"
    assert drawn([], ["batch"])[0].strip() == "nothing to draw: no design was run"
