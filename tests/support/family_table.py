"""The table of router families in docs/capture.md: what becomes of a tiny saved checkpoint of each.

``python -m tests.support.family_table`` writes it anew; the tests of capture compare it, row by row.
"""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from tests.support import tiny_families

DOCUMENT = Path(__file__).parents[2] / "docs/capture.md"
_BEGIN, _END = "<!-- families: python -m tests.support.family_table -->\n", "<!-- end of families -->\n"
_HEAD = (
    "| models | how they choose and weigh | captured | verified | simulated by its own configuration |\n"
    "|---|---|:-:|:-:|:-:|\n"
)


def row(family: str, checkpoint: Path, folder: Path) -> str:
    """The line of the table for a saved checkpoint; files are written in ``folder``."""
    from sim.__main__ import main as simulate
    from traces.__main__ import main
    from traces.capture.families import FAMILIES
    from traces.trace import Trace

    prompts, path = folder / "prompts.txt", folder / "mine.npz"
    prompts.write_text("the court\n\nclause party shall agree notice\nlaw judge card money\nbank account\n")
    options = ["--decoding", "greedy", "--new-tokens", "4", "--embedding", "8x4", "--basis", str(folder / "basis.npz")]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        done = [
            main(["capture", str(checkpoint), "--prompts", str(prompts), "-o", str(path), "--device", "cpu", *options]),
            main(["verify", str(path), "--model", str(checkpoint), "--device", "cpu"]),
            simulate(["replay", str(path), "--policy", "lru", "--cache", "50%", "--engine", "simpy"]),
        ]
    known = FAMILIES[Trace.load(path).meta["captured"]["router"]["class"]]
    said = ["yes" if status == 0 else "no" for status in done]
    return f"| {known.models} | {known.about} | {' | '.join(said)} |"


def rows() -> list[str]:
    """The lines that the document holds."""
    table = DOCUMENT.read_text("utf-8").partition(_BEGIN)[2].partition(_END)[0]
    return table.splitlines()[2:]


def write() -> None:
    """Write the table anew, in the order of the families."""
    from traces.capture.families import FAMILIES

    found = {}
    for family in tiny_families.ALL:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_families.saved(family, Path(folder) / "model")
            line = row(family, model, Path(folder))
        found[line.split(" | ")[0][2:]] = line
    table = "".join(f"{found[family.models]}\n" for family in FAMILIES.values())
    text = DOCUMENT.read_text("utf-8")
    DOCUMENT.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: _BEGIN + _HEAD + table + _END, text, flags=re.DOTALL))


if __name__ == "__main__":
    write()
