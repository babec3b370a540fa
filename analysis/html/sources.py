"""Where every number of a page comes from: one line for all runs that share trace, machine and code."""

from collections.abc import Sequence

from analysis.html.runs import Run

HEADINGS = ("", "file or folder", "trace", "trace sha256", "model", "hardware", "its link's rate", "software", "clock",
            "engine", "code")  # fmt: skip


def sources(runs: Sequence[Run]) -> tuple[list[list[str]], dict[int, int]]:
    """The lines, numbered from 1, and the line of each run by its place."""
    lines: dict[tuple[str, ...], int] = {}
    of_run = {at: lines.setdefault(_line(run), len(lines) + 1) for at, run in enumerate(runs)}
    return [[str(number), *line] for line, number in lines.items()], of_run


def _line(run: Run) -> tuple[str, ...]:
    values = run.values
    sha = str(values.get("trace_sha256") or "")
    told = [values.get(name) for name in ("replayed_model", "replayed_hardware", "link_source", "replayed_software",
                                          "clock", "engine_used", "code")]  # fmt: skip
    trace = run.fields.get("trace") or run.fields.get("mix") or ""
    return (str(run.source), str(trace), sha[:16], *("" if value is None else str(value) for value in told))


def notes(runs: Sequence[Run], most: int = 20) -> list[str]:
    """What the reports note for a person, each sentence once."""
    found = dict.fromkeys(note for run in runs for note in str(run.values.get("notes") or "").split(" | ") if note)
    return list(found)[:most]
