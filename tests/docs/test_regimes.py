"""The numbers that the page of regimes states are those of the data beside it."""

import csv
import gzip
import re
from statistics import median

from analysis.html.gains import LEAST, PAYS
from tests.support.places import REPOSITORY

RESULTS = REPOSITORY / "docs/results"
PAGE = (RESULTS / "regimes.md").read_text("utf-8")


def dots() -> dict[str, list[tuple[float, float]]]:
    """Stall over compute and gain at each place, by pair of policies, as the page has them in order."""
    found: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(RESULTS / "regimes/gain-by-stall.csv.gz", "rt", encoding="utf-8", newline="") as file:
        for name, stall, times, place in list(csv.reader(file))[1:]:
            if place:  # medians and the bound have none
                found.setdefault(name, []).append((float(stall), float(times)))
    return found


def test_medians_and_shares_by_stall_over_compute_are_those_of_the_data() -> None:
    rows = re.findall(r"^\| (?:(\S+) to (\S+)|above (\S+)) \| (.*\)) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8 and float(rows[0][0]) == LEAST
    for low, high, above, cells in rows:
        least, most = (float(above), float("inf")) if above else (float(low), float(high))
        for points, cell in zip(dots().values(), cells.split(" | "), strict=True):
            times = [y for x, y in points if least <= x < most]
            pays = sum(y >= PAYS for y in times) / len(times)
            assert cell == f"{median(times):.2f} ({100 * pays:.0f} %)", (low, cell)


def test_how_often_each_pays_and_where_is_that_of_the_data() -> None:
    rows = re.findall(r"\| (\d+) of 540 \| (\S+) \| (\S+) to (\S+) \|$", PAGE, re.MULTILINE)
    for points, (pays, best, low, high) in zip(dots().values(), rows, strict=True):
        where = sorted(x for x, y in points if y >= PAYS)
        hardly = int(pays) - len(where)  # places that wait less than the data's least
        assert 0 <= hardly < 5
        assert float(best) == round(max(y for _, y in points), 2)
        every = [0.0] * hardly + where
        for share, stated in ((0.05, low), (0.95, high)):
            assert f"{every[round(share * (len(every) - 1))]:.2g}" == f"{float(stated):.2g}"
