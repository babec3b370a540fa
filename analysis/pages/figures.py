"""Figures as files."""

from pathlib import Path

from analysis.experiment import Data, Experiment
from analysis.pages.drawing import legend
from ground.errors import InputError
from ground.files import atomic_path
from ground.plots import import_matplotlib, new_figure, save_png

FORMATS = (".png", ".svg", ".pdf")


def check(experiment: Experiment, path: str | Path) -> None:
    """Raise, before any work is done, InputError for a table or a name that no figure can be written under.

    ModuleNotFoundError without matplotlib.
    """
    if experiment.draw is None:
        raise InputError(f"{experiment.name} is a table; draw one of the figures of `python -m analysis experiments`")
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"-o {path}: a figure is a file ending in {', '.join(FORMATS)}")
    import_matplotlib()


def draw(experiment: Experiment, data: Data, path: str | Path) -> None:
    """Draw ``data`` into ``path``, the same bytes for the same data. Raises InputError as ``check`` does."""
    check(experiment, path)
    assert experiment.draw is not None
    from matplotlib import rc_context

    kind = Path(path).suffix.lower().lstrip(".")
    with rc_context({"svg.hashsalt": experiment.name, "font.size": 9}):
        figure = new_figure(layout="constrained")
        experiment.draw(data, figure)
        legend(figure)
        with atomic_path(path) as part:
            if kind == "png":
                save_png(figure, part, dpi=90)
            else:
                figure.savefig(part, format=kind, metadata={"Date" if kind == "svg" else "CreationDate": None})
