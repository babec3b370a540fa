"""``python -m analysis page`` and ``trace``: pages to send to somebody."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from analysis.html import figures as drawings
from analysis.html import of_traces
from analysis.html.answer import answers, asked, caveat
from analysis.html.designs import Designs
from analysis.html.gains import gain_answers, gain_plots, gains_of
from analysis.html.limits import limited, limits_of
from analysis.html.of_runs import plots
from analysis.html.of_timeline import timeline_plots
from analysis.html.page import Page
from analysis.html.run_table import EXPLAINED, run_table
from analysis.html.runs import files_of, read_runs
from analysis.html.sources import HEADINGS, notes, sources
from analysis.html.wording import listed
from analysis.pages.text import write_text
from analysis.workloads import by_model
from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.progress import say
from ground.text import amount, printable
from ground.whole_number import WholeNumber

_Output = Annotated[Path, Help("the page, .html", "--output", "-o")]
_Figures = Annotated[Path | None, Help("write each plot as PNG and SVG, and its numbers as CSV, into this folder")]


def page(
    runs: Annotated[list[Path], Help("what `sim replay --json` or `sim compare --json` wrote, or folders of sweeps")],
    /,
    *,
    output: _Output,
    timeline: Annotated[list[Path] | None, Help("what `sim replay --timeline` wrote: the link over time")] = None,
    limit: Annotated[
        list[str] | None, Help("what answers keep to: gpu_gib=24, ttft_ms=900, tpot_p99_ms=500; the card always")
    ] = None,
    gain: Annotated[
        list[str] | None, Help("where one policy pays over another: 'domoe over lru', both of these runs")
    ] = None,
    figures: _Figures = None,
) -> None:
    r"""Write one page about runs, to send to somebody: question, answer, plots, a table to sort, and every source.

    The page loads nothing, so it opens without a network. It weighs about 2 MB. For example:

    ```
    python -m sim sweep traces/mixtral_law.npz -o out \
        --vary cache=10%:90%:10% policy=lru,domoe
    python -m analysis page out -o report.html --limit tpot_p99_ms=500
    python -m analysis page lru.json domoe.json -o report.html --figures figures
    ```
    """
    read = [*(file for path in runs for file in files_of(path)), *(timeline or [])]
    keep_apart(read, {"-o": output})
    _check(figures)
    limits = limits_of(limit or [])
    designs = Designs.of(limited(read_runs(runs), limits))
    gains = gains_of(gain or [], designs)
    lines, of_run = sources(designs.runs)
    over_time = [plot for at, path in enumerate(timeline or [], 1) for plot in timeline_plots(path, at)]
    models = list(dict.fromkeys(str(run.values.get("replayed_model")) for run in designs.ok))
    made = Page(
        title=f"{listed(models, 3)}: experts on the host", asked=asked(designs, str(limits)),
        answers=[*gain_answers(gains), *answers(designs)], caveat=caveat(designs),
        plots=[*gain_plots(gains, designs), *plots(designs), *over_time], sources=(HEADINGS, lines),
        table=run_table(designs, of_run), table_about=EXPLAINED, notes=notes(designs.ok),
    )  # fmt: skip
    _write(made, output, figures, read)


def trace(
    traces: Annotated[list[Path], Help("traces, .npz, or folders of them")],
    /,
    *,
    output: _Output,
    figures: _Figures = None,
    seed: Annotated[WholeNumber, Help("of the tables that prompts are matched with")] = 0,
) -> None:
    """Write one page about traces: which experts each domain uses, how alike layers are, which domains are told apart.

    What a trace does not hold is left out: without embeddings there are the experts alone. For example:

    ```
    python -m analysis trace traces/mixtral_law.npz -o law.html
    python -m analysis trace traces/qwen3_*.npz -o qwen3.html --figures figures
    ```
    """
    files = [file for path in traces for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]
    if not files:
        raise InputError(f"{listed([printable(path) for path in traces])}: no .npz files; expected traces")
    keep_apart(files, {"-o": output})
    _check(figures)
    models = by_model(files)
    found = [of_traces.routing(model, seed) for model in models]
    drawn = [plot for at, one in enumerate(found, 1) for plot in of_traces.trace_plots(one, f"-{at}" if at > 1 else "")]
    made = Page(
        title=f"Routing in traces of {listed([one.model for one in found], 3)}",
        asked="Which experts does each domain use, how alike are layers, and can domains be told apart?",
        answers=[of_traces.said(one) for one in found],
        caveat=f"All numbers are counted in the traces. {of_traces.captured(models)}",
        plots=drawn, sources=(of_traces.HEADINGS, of_traces.source_lines(models)),
    )  # fmt: skip
    _write(made, output, figures, files)


def _check(figures: Path | None) -> None:
    """Raise ModuleNotFoundError, before any work, where what is needed to draw is not installed."""
    import plotly  # noqa: F401

    if figures is not None:
        import matplotlib  # noqa: F401


def _write(made: Page, output: Path, figures: Path | None, read: Sequence[Path]) -> None:
    """The page and its figures, which replace nothing that was read. Raises InputError, OSError."""
    folders = {} if figures is None else {"--figures": (figures, drawings.names(made.plots))}
    keep_apart(read, {"-o": output}, folders=folders)
    text = made.html()
    if figures is not None:
        drawings.write(made.plots, figures)
    write_text(output, text)
    say(f"{printable(output)}: {amount(len(text.encode()))}, opens in any browser without a network")
