"""Reports as tables for a person."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ground.tables import fitting, framed
from sim.report.metrics import Counts, Report, Spread, ratio


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table, a dash for what is undefined."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, sign: str = "") -> str:
    """A ratio as a percentage, ``sign`` "+" for a difference."""
    return "–" if value is None else f"{value:{sign}.1%}"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.2f}"


def heading(report: Report, runs: int = 1) -> Text:
    """What was replayed, how many times, and on what."""
    p, s = report.provenance, report.settings
    text = Text()
    replays = f"{report.clock} replay" if runs == 1 else f"{runs} {report.clock} replays"
    text.append(f"{replays} of {p['trace']}", style="bold")
    machine = f"{p['hardware']} (link: {p['link_source']}; loop: {p['loop']}, {p['loop_source']})"
    model = p["model"] + (f" in {p['quant']}" if p["quant"] else "")
    costs = f"costs of {model} on {machine}, {p['software']} software"
    if report.clock == "measured":  # what is charged is then for the policies' plans alone
        costs = f"on {p['device']}; plans made with {costs}"
    text.append(f"\n  {costs}")
    rows = f", ubatch {s['ubatch']}" if "ubatch" in s else ""
    text.append(f"\n  cache {s['cache']}; batch {s['batch']}{rows}, split {s['split']}")
    if s["regroup"] or s["pipeline"] != "sequential":
        ahead = " (clairvoyant: recorded tokens are fed ahead)" if s["pipeline"] == "clairvoyant" else ""
        text.append(f"\n  regroup {s['regroup'] or 'no'}, pipeline {s['pipeline']}{ahead}")
    link = f"link {s['discipline']}, {s['chunks']} chunks"
    made = f"code {p['code']}, trace {p['trace_sha256'][:12]}"
    text.append(f"\n  engine {s['engine']}, {link}, seed {p['seed']}; {made}", style="dim")
    if p["captured"]:
        text.append(f"\n  trace: {p['captured']}", style="dim")
    return text


def report_view(report: Report) -> RenderableType:
    """One report in full."""
    parameters = ", ".join(f"{k}={v}" for k, v in report.parameters.items())
    summary = Table(
        title=f"{report.policy}{f' ({parameters})' if parameters else ''}", title_justify="left", show_header=False
    )
    summary.add_column(style="bold")
    summary.add_column(justify="right")
    summary.add_column(style="dim")
    d, b = report.decode, report.bounds
    summary.add_row("throughput", f"{number(report.tokens_per_s, 3)} tokens/s", f"{d.tokens:,} tokens decoded")
    bounded = b["compute_tokens_per_s"] is not None
    resident = f"everything resident; launches and waits {percent(b['loop_share'])} of it"
    for name, what in (("compute", resident), ("link", "fewest bytes any policy must move in this cache")):
        value = f"{number(b[f'{name}_tokens_per_s'], 3)} tokens/s"
        summary.add_row(f"{name} bound", *((value, what) if bounded else ("none", "experts run on the host too")))
    if (joint := b["joint_tokens_per_s"]) is not None:
        summary.add_row("joint bound", f"{number(joint, 3)} tokens/s", "link and host together, each at its best")
    most = percent(b["min_hit_ratio"])
    summary.add_row("hits of MIN", most, "Belady's MIN: it knows the future, and loads nothing ahead of need")
    summary.add_row("efficiency", percent(report.efficiency), "bound time / run time, prefill included")
    summary.add_row("TTFT", f"{number(report.ttft_ms.mean)} ms", _spread(report.ttft_ms))
    summary.add_row("TPOT", f"{number(report.tpot_ms.mean)} ms", _spread(report.tpot_ms))
    if thread := report.settings.get("host_thread"):
        shares = thread["decode"]
        waits = f"decode waits for it {percent(shares['waits_share'])} of the time"
        summary.add_row("host's thread", f"{percent(shares['busy_share'])} busy", waits)
    memory = ", ".join(f"{k.replace('_', ' ')} {gib(v)}" for k, v in report.gpu_bytes.items())
    summary.add_row("GPU memory", f"{gib(_memory(report))} GiB", memory)
    everything = report.settings["all_in_gpu_bytes"]
    summary.add_row("memory saved", percent(1 - _memory(report) / everything), f"of {gib(everything)} GiB, all in GPU")
    phases = Table(title="what look-ups found, and where the time went", title_justify="left")
    phases.add_column("")
    for name in ("decode", "prefill", "total"):
        phases.add_column(name, justify="right")
    columns = [_phase(report.decode), _phase(report.prefill), _phase(report.total)]
    for label in columns[0]:
        phases.add_row(label, *(column[label] for column in columns))
    notes = [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(heading(report), summary, phases, *notes)


def _memory(report: Report) -> int:
    """Bytes of GPU memory in all."""
    return sum(report.gpu_bytes.values())


def _spread(spread: Spread) -> str:
    return f"p50 {number(spread.p50)}, p95 {number(spread.p95)}, p99 {number(spread.p99)}"


def _phase(c: Counts) -> dict[str, str]:
    def share(count: int, ratio: float | None) -> str:
        return f"{count:,} ({percent(ratio)})"

    wall = sum(c.time_ms.values())
    fate = c.prefetches
    rows = {
        "look-ups": f"{c.lookups:,}",
        "  hits": share(c.hits, c.hit_ratio),
        "    reused": f"{c.reuse_hits:,}",
        "    prefetched": f"{c.prefetch_hits:,}",
        "  late": share(c.late, c.late_ratio),
        "    queued": f"{c.late_queued:,}",
        "    in flight": f"{c.late_in_flight:,}",
        "  misses": share(c.misses, c.miss_ratio),
        "    compulsory": f"{c.compulsory_misses:,}",
        "    run on the host": f"{c.hosted:,}",
        "    uploaded": f"{c.uploaded:,}",
        "evictions": f"{c.evictions:,}",
        "link, demand": f"{gib(c.link_bytes['demand'])} GiB",
        "link, prefetch": f"{gib(c.link_bytes['prefetch'])} GiB",
        "  of it wasted": f"{gib(c.link_bytes['wasted'])} GiB",
        **({"link, to the host": f"{gib(written)} GiB"} if (written := c.link_bytes.get("written_back")) else {}),
        "prefetches issued": f"{fate['issued']:,}",
        "  in time": f"{fate['useful']:,}",
        "  too late": f"{fate['late']:,}",
        "  never used": f"{fate['unused']:,}",
        "  cancelled": f"{fate['cancelled']:,}",
        "  under way at the end": f"{fate['in_flight']:,}",
    }
    for name, ms in c.time_ms.items():
        rows[f"time, {name.replace('_', ' ')}"] = f"{number(ms, 1)} ms ({percent(ratio(ms, wall))})"
    return rows


_COLUMNS: dict[str, Callable[[Report], str]] = {  # the most telling first: a narrow terminal shows no others
    "tokens/s": lambda r: number(r.tokens_per_s, 3),
    "hit": lambda r: percent(r.decode.hit_ratio),
    "late": lambda r: percent(r.decode.late_ratio),
    "miss": lambda r: percent(r.decode.miss_ratio),
    "eff.": lambda r: percent(r.efficiency),
    "on host": lambda r: percent(ratio(r.decode.hosted, r.decode.lookups)),
    "uploaded": lambda r: percent(ratio(r.decode.uploaded, r.decode.lookups)),
    "TPOT ms": lambda r: number(r.tpot_ms.mean, 1),
    "p99": lambda r: number(r.tpot_ms.p99, 1),
    "TTFT ms": lambda r: number(r.ttft_ms.mean, 0),
    "GiB/token": lambda r: gib(r.decode.moved / r.decode.tokens) if r.decode.tokens else "–",
    "wasted": lambda r: percent(ratio(r.decode.link_bytes["wasted"], r.decode.moved)),
    "prefetched": lambda r: percent(ratio(r.decode.prefetch_hits, r.decode.lookups)),
    "predict ms/token": lambda r: number(ratio(r.decode.time_ms["predict"], r.decode.tokens)),
    "GPU GiB": lambda r: gib(_memory(r)),
    "tables MiB": lambda r: number(r.gpu_bytes["policy"] / 2**20, 1),
}


_OF_HOST = ("on host", "uploaded")
"""Columns that are shown where some run computes experts on the host."""


def _named(report: Report) -> str:
    """The policy and the parameters that were set."""
    given = ", ".join(f"{k}={v}" for k, v in report.settings["set"].items())
    return report.policy + (f" ({given})" if given else "")


def marked(report: Report) -> str:
    """The policy and the parameters that were set, with a mark if it is a reference."""
    return _named(report) + (" *" if report.settings["reference"] else "")


class Comparison:
    """Reports of several policies over one scene, the fastest first; fewer columns where there is less room.

    ``failed`` are policies that could not be run, each with the reason; their rows come last.
    """

    def __init__(self, reports: Sequence[Report], failed: Mapping[str, str] | None = None) -> None:
        self.reports = sorted(reports, key=lambda r: -(r.tokens_per_s or 0))
        self.failed = failed or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield heading, table, bounds and notes."""
        hosts = any(report.total.hosted for report in self.reports)
        columns = {name: text for name, text in _COLUMNS.items() if hosts or name not in _OF_HOST}
        headings = ["policy", *columns]
        rows = [[marked(report), *(text(report) for text in columns.values())] for report in self.reports]
        rows += [[name, "failed", *["–"] * (len(columns) - 1)] for name in self.failed]
        shown, *more = fitting(headings, rows, options.max_width)
        title = "decode, at equal GPU bytes; efficiency with prefill"
        table = framed(headings, rows, shown, options.max_width, title=title)
        table.columns[0].style = "bold"
        yield heading(self.reports[0], len(self.reports))
        yield table
        if more:
            hidden = ", ".join(headings[at] for _, *part in more for at in part)
            yield Text(f"more where there is more room, or with --json: {hidden}", style="dim")
        if references := self._references():
            yield Text(f"* no system of equal means, a reference: {references}", style="dim")
        bound = next(
            (r.bounds for r in self.reports if r.bounds["link_tokens_per_s"] is not None), self.reports[0].bounds
        )
        compute, link = bound["compute_tokens_per_s"], bound["link_tokens_per_s"]
        loop = "" if bound["loop_share"] is None else f" ({percent(bound['loop_share'])} of it launches and waits)"
        yield Text(f"bounds: compute {number(compute, 3)} tokens/s{loop}, link {number(link, 3)} tokens/s", style="dim")
        if joint := self._joint():
            yield Text(f"bounds of link and host together: {joint} tokens/s", style="dim")
        hits = percent(bound["min_hit_ratio"])
        yield Text(f"hits of Belady's MIN, which loads nothing ahead of need: {hits}", style="dim")
        for note, whose in self._notes().items():
            yield Text(f"note: {self._subject(whose)}{note}", style="yellow")
        for name, reason in self.failed.items():
            yield Text(f"failed: {name}: {reason}", style="red")

    def _joint(self) -> str:
        """The bounds of those that run experts on the host, each with whose it is."""
        whose: dict[str, list[str]] = {}
        for report in self.reports:
            if (bound := report.bounds["joint_tokens_per_s"]) is not None:
                whose.setdefault(number(bound, 3), []).append(_named(report))
        return "; ".join(f"{bound} ({', '.join(names)})" for bound, names in whose.items())

    def _references(self) -> str:
        """What makes references of which policies."""
        whose: dict[str, list[str]] = {}
        for report in self.reports:
            if why := report.settings["reference"]:
                whose.setdefault(why, []).append(_named(report))
        return "; ".join(f"{', '.join(names)} {why}" for why, names in whose.items())

    def _subject(self, whose: Sequence[str]) -> str:
        """Whom a note is about, in as few names as there are."""
        others = [name for name in map(_named, self.reports) if name not in whose]
        if not others:
            return ""
        return f"{', '.join(whose)}: " if len(whose) <= len(others) else f"all but {', '.join(others)}: "

    def _notes(self) -> dict[str, list[str]]:
        """Each note, and the policies that it is about."""
        notes: dict[str, list[str]] = {}
        for report in self.reports:
            for note in report.notes:
                notes.setdefault(note, []).append(_named(report))
        return notes
