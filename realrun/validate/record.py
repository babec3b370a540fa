"""The files of a validation: every figure as JSON and CSV, the table for a person, a plot of simulated over measured.

Table and data are written anew after each pair of runs, one right after the other once all are ready, so that what an
interruption leaves is complete as far as it goes. The plot is drawn at the end; one of earlier runs goes as soon as
there is a pair of these.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from ground.errors import InputError
from ground.files import atomic_path
from ground.output import by_entries, show
from ground.plots import new_figure, save_png
from ground.tables import Parts
from realrun.calibrate.machine import Machine
from realrun.validate import spread
from realrun.validate.agreement import PARTS, PREFILL_PARTS, Component, Summary, summarise, worst
from sim.report.metrics import Report
from sim.report.tables import percent
from sim.run.scene import Scene, code_version

HEADINGS = (
    "policy", "cache", "tokens/s sim", "measured", "error", "hits sim", "measured", "late sim", "measured",
    "misses sim", "measured", "GB/token sim", "measured", "TTFT error", "TPOT p95 error", "largest part error",
    "link used", "while busy",
)  # fmt: skip
LEAST = 1e-3
"""Of the largest time or rate that a plot shows: less is left out."""
FILES = ("validation.json", "validation.csv", "validation.md", "validation.png")
PROFILE = "profile.toml"
"""What the machine was measured to be, where a validation did so itself."""
Key = tuple[str, str, str]
"""A pair: policy, cache and trace, which is empty where all pairs are of one."""
LATENCIES = ("TTFT mean", "TPOT mean", "TPOT p50", "TPOT p95", "TPOT p99")


def made_by(machine: Machine) -> dict[str, str]:
    """Machine, date and code, as every record of measurements has them."""
    return {**machine.describe(), "host_interrupted": machine.interrupted(), "code": code_version()}


@contextmanager
def as_written(path: Path) -> Iterator[None]:
    """Around whatever reads the record at ``path``: one that is damaged, or no record, is an InputError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: expected the validation.json that validate writes") from None


@dataclass
class Record:
    """What a validation has found so far."""

    command: str
    provenance: dict[str, Any]
    rows: list[Component] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    """``{policy, cache, trace, simulated, measured}``; trace where there are several.

    Both are reports of ``sim``, without what each layer had, which would be half of the file; the provenance of both is
    that of the measured one.
    """
    link: dict[Key, list[float | None]] = field(default_factory=dict)
    """Shares of the link's own peak at which each measured run moved its bytes: in all, and while copies were made."""
    left_out: list[str] = field(default_factory=list)
    """Policies that could not run, and why."""
    baselines: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    interleaved: bool = False
    """All pairs were measured several times, in turn: they are shown with their spread."""
    profile: str = ""
    """The profile as text where it was measured for these runs."""

    def add(self, rows: list[Component], simulated: Report, measured: dict[str, Any], here: Scene) -> None:
        """A pair of runs of ``here``: what compares them, and both reports, the ``measured`` one as data.

        It takes the place of what was there of the same pair.
        """
        key = policy, cache, trace = rows[0].pair
        first = {key: value for key, value in simulated.to_json().items() if key not in ("per_layer", "provenance")}
        second = {key: value for key, value in measured.items() if key != "per_layer"}
        report: dict[str, Any] = {"policy": policy, "cache": cache, "simulated": first, "measured": second}
        report |= {"trace": trace} if trace else {}
        if key in self.link:
            self.rows[:] = [row for row in self.rows if row.pair != key]
            self.reports[:] = [each for each in self.reports if _key(each) != key]
        self.rows += rows
        self.reports.append(report)
        size = here.model.expert_bytes[0]
        in_a_row = size / max(1, here.hardware.copy_ns(size) - here.hardware.startup_ns(size)) * 1e9
        moved = measured["link_bytes"]["demand"] + measured["link_bytes"]["prefetch"]
        times_ms = sum(measured["time_ms"].values()), measured["settings"]["link_busy_ms"]
        self.link[key] = [moved / (ms / 1e3) / in_a_row if ms else None for ms in times_ms]

    def summary(self) -> Summary | None:
        """The targets' figures, None before the first pair."""
        return summarise(self.rows) if self.rows else None

    def write(self, folder: Path, plot: bool = False) -> None:
        """Write `FILES` into ``folder``, the last of them if ``plot`` says so; all of one state, or none.

        A process that is killed outright between two of them, within a moment, leaves files of two states, each whole.

        Before the first pair there is nothing to write, and what lies there of earlier runs stays.
        """
        summary = self.summary()
        if summary is None:
            return
        components = [row.to_json() for row in self.rows]
        data = {
            "command": self.command, "complete": self.complete, "provenance": self.provenance,
            "summary": asdict(summary), "components": components, "baselines": self.baselines,
            "left_out": self.left_out, "reports": self.reports,
        }  # fmt: skip
        if repeated := spread.several(self.rows):
            data["summary_of_medians"] = asdict(summarise([row.of_median for row in repeated]))
        texts = [by_entries(data), _csv(components), self.markdown()]
        named = dict(zip(FILES, texts, strict=False)) | ({PROFILE: self.profile} if self.profile else {})
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as files:
            for name, text in named.items():
                part = files.enter_context(atomic_path(folder / name))
                part.write_text(text, encoding="utf-8", errors="backslashreplace")  # names may hold any bytes
            if plot:
                draw(self.rows, files.enter_context(atomic_path(folder / FILES[-1])))
            else:
                (folder / FILES[-1]).unlink(missing_ok=True)

    def _pairs(self) -> dict[Key, dict[str, Component]]:
        """The components of each pair by their names."""
        pairs: dict[Key, dict[str, Component]] = {}
        for row in self.rows:
            pairs.setdefault(row.pair, {})[row.component] = row
        return pairs

    def _where(self, key: Key) -> str:
        """The cache of a pair, and its trace where there are several."""
        _, cache, trace = key
        return f"{cache}, {Path(trace).stem}" if len({row.trace for row in self.rows}) > 1 else cache

    def lines(self) -> list[list[str]]:
        """One line of the table for each pair, as text."""
        return [self._line(pair, found) for pair, found in self._pairs().items()]

    def of_runs(self) -> list[list[str]]:
        """One line under `spread.HEADINGS` for each pair that was measured several times."""
        pairs = sorted(self._pairs().items(), key=lambda pair: pair[0][0])
        return [spread.line(found, self._where(key)) for key, found in pairs if spread.several(list(found.values()))]

    def _line(self, key: Key, found: dict[str, Component]) -> list[str]:
        cells = [key[0], self._where(key), *_cells_of(found["throughput"], 3)]
        for share in ("hits", "late", "misses"):
            cells += [percent(found[share].simulated), percent(found[share].measured)]
        tokens = next(report for report in self.reports if _key(report) == key)["measured"]["tokens"]
        moved = found["bytes"]
        cells += [f"{(value or 0) / 1e9 / max(1, tokens):.3f}" for value in (moved.simulated, moved.measured)]
        cells += [percent(found[name].error, "+") for name in ("TTFT mean", "TPOT p95")]
        part = worst(list(found.values()), PARTS)
        cells.append("–" if part is None else f"{part.component} {percent(part.error, '+')}")
        return [*cells, *map(percent, self.link.get(key, (None, None)))]

    def details(self, components: Sequence[str]) -> list[list[str]]:
        """One line for each pair: of each component, in milliseconds, simulated, measured and the error."""
        return [
            [pair[0], self._where(pair), *(cell for name in components for cell in _cells_of(found[name], 2))]
            for pair, found in self._pairs().items()
        ]

    def table(self) -> Parts:
        """The pairs for a terminal, what was simulated and what was measured in one cell, or with their spread."""
        if self.complete and self.interleaved:
            return Parts("simulated against the runs of each pair", list(spread.HEADINGS), self.of_runs())
        single = [at for at, heading in enumerate(HEADINGS) if heading != "measured"]
        pairs = [at for at in single if at + 1 < len(HEADINGS) and HEADINGS[at + 1] == "measured"]
        headings = [HEADINGS[at].removesuffix(" sim") for at in single]
        rows = [[f"{line[at]} / {line[at + 1]}" if at in pairs else line[at] for at in single] for line in self.lines()]
        return Parts("decode: simulated / measured, and how far apart", headings, rows)

    def show(self) -> None:
        """Table and verdict on standard output."""
        show(Group(self.table(), *map(Text, self.verdict())), None)

    def verdict(self) -> list[str]:
        """The targets' figures in sentences."""
        summary = self.summary()
        if summary is None:
            return ["no pair of runs was finished"]
        return [
            f"{summary.pairs} pairs of runs{'' if self.complete else ' (interrupted: not all that was asked for)'}",
            *self._without_a_gpu(),
            f"throughput: off by {percent(summary.throughput_mean)} on average, "
            f"{percent(summary.throughput_worst)} at worst",
            f"hits, late, misses: off by {100 * summary.shares_worst:.2f} points at worst",
            f"parts of the time: off by {summary.parts_worst:.1%} at worst ({summary.parts_worst_of or 'none'})",
            f"TTFT: off by {summary.ttft_worst:.1%} at worst; its parts by {summary.prefill_worst:.1%} "
            f"({summary.prefill_worst_of or 'none'})",
            *(spread.verdict(self.rows) if self.interleaved else self._repeated()),
            *[f"left out: {line}" for line in self.left_out],
            *[f"{name}: {text}" for name, text in self.baselines.get("ratios", {}).items()],
        ]

    def _without_a_gpu(self) -> list[str]:
        """What errors are worth that were measured on a CPU."""
        if "torch" not in self.provenance or "cuda" in self.provenance:
            return []
        return [
            "measured on a CPU, to try things out: threads stand for a GPU's streams, and errors of times mean nothing"
        ]

    def _repeated(self) -> list[str]:
        """How far runs of the same pair were apart, where there were several."""
        runs = [report["measured"]["settings"].get("runs_tokens_per_s", []) for report in self.reports]
        slower = [1 - min(several) / max(several) for several in runs if len(several) > 1 and all(several)]
        if not slower:
            return []
        return [
            f"of {len(slower)} pairs several runs were measured and the fastest counts: the slowest one is "
            f"{sum(slower) / len(slower):.1%} below it on average, {max(slower):.1%} at worst"
        ]

    def markdown(self) -> str:
        """The table, the verdict and where it is from."""
        lines = ["# Simulated against measured", "", f"Made by `{self.command}`.", ""]
        lines += [f"- {key}: {value}" for key, value in self.provenance.items()] + [""]
        lines += [f"- {line}" for line in self.verdict()] + [""]
        if self.interleaved:
            lines += [_cells(spread.HEADINGS), _cells(["---"] * len(spread.HEADINGS)), *map(_cells, self.of_runs()), ""]
            return "\n".join([*lines, *spread.NOTE, ""])
        lines += [_cells(HEADINGS), _cells(["---"] * len(HEADINGS)), *map(_cells, self.lines()), ""]
        lines += [
            "Errors are simulated over measured, less 1. Link used: bytes moved in decode over its time, as a share",
            "of what copies of one expert in a row reach; while busy: over the time in which copies were under way, by",
            "the host's clock. The largest error of a part leaves out parts below 1 % of the time.",
            "",
        ]
        for title, components in _DETAILS:
            headings = ["policy", "cache", *(cell for name in components for cell in (name, "measured", "error"))]
            lines += [f"## {title}", "", _cells(headings), _cells(["---"] * len(headings))]
            lines += [*map(_cells, self.details(components)), ""]
        return "\n".join(lines)


def _key(report: dict[str, Any]) -> Key:
    """Which pair a report is of."""
    return report["policy"], report["cache"], report.get("trace", "")


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells_of(row: Component, digits: int) -> list[str]:
    """Simulated, measured, and the error."""
    values = ["–" if value is None else f"{value:.{digits}f}" for value in (row.simulated, row.measured)]
    return [*values, percent(row.error, "+")]


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row if name != "runs")
    writer = csv.DictWriter(text, list(names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def draw(rows: Sequence[Component], path: Path) -> None:
    """Throughput, hits and parts of the time as a PNG: simulated over measured, with the line where they agree.

    Rates and times have logarithmic axes, which leave out what is next to nothing on either clock.
    """
    figure = new_figure(figsize=(15, 5))
    from matplotlib.ticker import NullFormatter

    for axes, (title, components) in zip(figure.subplots(1, 3), _PANELS, strict=True):
        both = {
            name: [(r.measured or 0.0, r.simulated or 0.0) for r in rows if r.component == name] for name in components
        }
        most = max((max(pair) for pairs in both.values() for pair in pairs), default=1.0)
        low = 0.0 if title == _PANELS[1][0] else LEAST * most
        shown = {name: [pair for pair in pairs if min(pair) >= low] for name, pairs in both.items()}
        for name, pairs in shown.items():
            if pairs:
                axes.scatter(*zip(*pairs, strict=True), s=18, label=name, alpha=0.8)
        low = 0.8 * min((min(pair) for pairs in shown.values() for pair in pairs), default=low)
        axes.plot([low, most], [low, most], color="grey", linewidth=0.8)
        if low:
            axes.set(xscale="log", yscale="log")
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(NullFormatter())  # labels between powers of ten lie over each other
        axes.set(title=title, xlabel="measured", ylabel="simulated")
        if shown:
            axes.legend(fontsize=8)
    figure.tight_layout()
    save_png(figure, path, dpi=120)


_DETAILS = (
    ("Latency, ms", LATENCIES),
    ("Parts of a decoded token, ms", PARTS),
    ("Parts of all prefills, ms", PREFILL_PARTS),
)
_PANELS = (
    ("throughput, tokens/s", ("throughput",)),
    ("what look-ups found", ("hits", "late", "misses")),
    ("ms of a decoded token", PARTS),
)
