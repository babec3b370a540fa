"""Figures are drawn on Agg canvases: the back-end that the environment asks for is of no account."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

DRAW = """
import os, sys
from pathlib import Path
from analysis.__main__ import main
from realrun.validate import record
from traces.training import train

folder = Path(sys.argv[1])
assert main(["figure", "domoe-similarity", "--data", sys.argv[2], "-o", str(folder / "figure.png")]) == 0
record.draw([], folder / "validation.png")
entry = {"curve": [{"tokens": 1, "loss": 2.0}], "entropy_bits": [1.0], "topology": {"experts": 8}}
train.draw(entry, folder / "training.png")
assert "matplotlib.pyplot" not in sys.modules
print(os.environ.get("MPLBACKEND"))
"""


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "no-such-back-end", "TkAgg"])
def test_a_back_end_that_the_environment_names_and_that_is_not_here_hinders_no_figure(
    backend: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRAW, tmp_path, REPOSITORY / "docs/results/domoe-similarity.json"],
        env=os.environ | {"MPLBACKEND": backend}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"\n{backend}\n")  # programs that are started from here still see it
    assert {path.name for path in tmp_path.iterdir()} == {"figure.png", "validation.png", "training.png"}
