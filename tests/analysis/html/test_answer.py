"""The answer of a page: which design, what it beats, and how sure that is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from analysis.html.answer import answers, asked, caveat, rivals
from analysis.html.designs import Designs
from analysis.html.runs import Run
from sim.sweep.log import LOG
from sim.sweep.row import Row
from tests.analysis.html.rows import run, sized


def answer(*runs: Run) -> str:
    return " ".join(answers(Designs.of(runs)))


def test_rival_has_as_large_a_cache_and_is_in_its_best_form() -> None:
    best, other = rivals([sized(9, "domoe", 50), sized(7, "lfu", 50), sized(8, "lru", 50), sized(8.5, "lru", 40)])
    assert best is not None and other is not None
    assert (best.speed, other.speed) == (9, 8)


def test_policy_is_no_rival_of_itself() -> None:
    assert rivals([sized(9, "lru", 50), sized(8, "lru", 40)])[1] is None
    other = sized(8, "lru", 50, replayed_parameters='{"scope": "layer"}')
    assert rivals([sized(9, "lru", 50), other])[1] is other


def test_caches_of_as_many_bytes_are_the_same_whatever_they_are_called() -> None:
    as_reported = replace(sized(9, "domoe", 50), fields={"trace": "law.npz", "cache": "50.0 GiB", "policy": "domoe"})
    assert rivals([as_reported, sized(5, "lfu", 60), sized(4, "lru", 50)])[1] == sized(4, "lru", 50)


def test_rival_elsewhere_is_said_to_be_elsewhere() -> None:
    text = answer(sized(9, "domoe", 50), sized(6, "lru", 40))
    assert "No other policy ran with just this cache and card" in text and "lru, cache 40%" in text
    assert "1.50 times as fast" in text


def test_neither_references_nor_designs_beyond_the_limits_are_answers() -> None:
    runs = [sized(90, "told", 50, reference="knows the future"), sized(80, "lfu", 50, beyond=True),
            sized(8, "lru", 50)]  # fmt: skip
    text = answer(*runs)
    assert "The fastest design is lru: 8.00 tokens/s." in text
    assert "told, which knows the future, has 90.0 tokens/s" in text
    assert "A design has to keep to this: so much; 1 is beyond that and no answer." in asked(
        Designs.of(runs), "so much"
    )


def test_share_is_of_the_slower_bound() -> None:
    assert "That is 40.0 % of 20.0 tokens/s" in answer(sized(8, "lru", 40))


def test_without_sequences_the_answer_says_that_it_is_not_sure() -> None:
    assert "How sure that is cannot be said" in answer(sized(8, "lru", 40), sized(4, "lfu", 40))


def swept(folder: Path, *sequences: dict[str, list[int]]) -> list[Run]:
    rows = [Row(f"key{at}", "ok", sequences=one) for at, one in enumerate(sequences)]
    (folder / LOG).write_bytes(b"".join(row.to_line() for row in rows))
    speeds = [sum(one["tokens"]) * 1e9 / sum(one["ns"]) for one in sequences]
    return [replace(sized(speed, f"p{at}", 40, identity=f"key{at}"), source=folder) for at, speed in enumerate(speeds)]


def shares(ns: list[int]) -> dict[str, list[int]]:
    return {"tokens": [10] * len(ns), "ns": ns}


def test_interval_of_two_runs_tells_a_clear_order_from_an_unsure_one(tmp_path: Path) -> None:
    slow = [200, 220, 240, 260, 210, 230]
    clear = answer(*swept(tmp_path, shares([at // 2 for at in slow]), shares(slow)))
    assert "95 % interval 2.00 to 2.00" in clear and "does not explain it" in clear
    unsure = answer(*swept(tmp_path, shares([90, 400, 80, 410, 90, 270]), shares([300, 150, 310, 160, 290, 160])))
    assert "which of both is faster is not sure" in unsure


def test_each_workload_has_its_own_answer() -> None:
    found = answers(Designs.of([run(3, fields={"trace": "law.npz"}), run(2, fields={"trace": "code.npz"})]))
    assert [text.split(":")[0] for text in found] == ["For law", "For code"]


def test_caveat_says_what_is_simulated_and_what_is_assumed() -> None:
    def said(**values: Any) -> str:
        return caveat(Designs.of([run(3, **values)]))

    assert said() == "All times are simulated."
    assert "captured from a small model." in said(captured="a small model")
    assert "All times are measured." in said(clock="measured")
    assert "assumed, not measured" in said(link_source="assumed")
    assert "how much memory the card has" in said(gpu_memory_bytes=None)


def test_question_names_what_varies_and_what_could_not_be_run() -> None:
    text = asked(Designs.of([run(3), run(2, "lfu"), run(None, "domoe")]))
    assert "Which design is fastest for toy on card" in text and "2 designs were run; 1 other could not be run" in text
    assert "They differ in policy (lru and lfu)." in text
