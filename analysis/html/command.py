"""``python -m analysis page`` and ``trace``: pages to send to somebody."""

from pathlib import Path
from typing import Annotated

from analysis.html.answer import answers, asked, caveat
from analysis.html.designs import Designs
from analysis.html.of_runs import plots
from analysis.html.page import Page
from analysis.html.run_table import EXPLAINED, run_table
from analysis.html.runs import files_of, read_runs
from analysis.html.sources import HEADINGS, notes, sources
from analysis.pages.text import write_text
from ground.command_line import Help
from ground.files import keep_apart
from ground.progress import say
from ground.text import amount, printable


def page(
    runs: Annotated[list[Path], Help("what `sim replay --json` or `sim compare --json` wrote, or folders of sweeps")],
    /,
    *,
    output: Annotated[Path, Help("the page, .html", "--output", "-o")],
) -> None:
    """Write one page about runs, to send to somebody: question, answer, plots, a table to sort, and every source.

    The page loads nothing, so it opens without a network. For example:

    ```
    python -m sim sweep traces/mixtral_law.npz -o out \
        --vary cache=10%:90%:10% policy=lru,domoe
    python -m analysis page out -o report.html
    ```
    """
    keep_apart([file for path in runs for file in files_of(path)], {"-o": output})
    check()
    designs = Designs.of(read_runs(runs))
    lines, of_run = sources(designs.runs)
    made = Page(
        title=_title(designs), asked=asked(designs), answers=answers(designs), caveat=caveat(designs),
        plots=plots(designs), sources=(HEADINGS, lines), table=run_table(designs, of_run), table_about=EXPLAINED,
        notes=notes(designs.ok),
    )  # fmt: skip
    _written(made, output)


def _title(designs: Designs) -> str:
    models = dict.fromkeys(str(run.values.get("replayed_model")) for run in designs.ok)
    return f"{' and '.join(models)}: experts on the host, {len(designs.ok):,} runs"


def check() -> None:
    """Raise ModuleNotFoundError where plotly is not installed: called before any work is done."""
    import plotly  # noqa: F401


def _written(made: Page, output: Path) -> None:
    text = made.html()
    write_text(output, text)
    say(f"{printable(output)}: {amount(len(text.encode()))}, opens in any browser without a network")
