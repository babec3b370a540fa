"""Damaged records of every form are refused in a line, or read as what is whole of them."""

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.engine_records import BUILDERS, LENGTHS, TOKENS, TRUTH, given
from tests.support.records import notes
from traces.convert.kinds import convert_files
from traces.trace import Trace

DAMAGES = int(os.environ.get("MOE_REPLAY_DAMAGES", "8"))
"""How often each form is damaged; more by the environment variable."""


def _damaged(paths: list[Path], rng: random.Random) -> int:
    """Cut one of the files off, take a piece out of it, write over a piece, rename a field, or change a digit or a bit.

    Returns how many bytes were touched.
    """
    inside = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    file = rng.choice([file for file in inside if file.is_file() and file.stat().st_size])
    data = bytearray(file.read_bytes())
    at, size = rng.randrange(len(data)), rng.choice((1, 3, 40, 400))
    way = rng.choice(("cut", "out", "over", "fields", "digit", "digit"))
    if way == "fields" and file.suffix in (".json", ".jsonl"):
        text = data.decode()
        names = sorted({part for part in text.split('"')[1::2] if 2 < len(part) < 30 and part.isidentifier()})
        data = bytearray(text.replace(f'"{rng.choice(names)}"', '"renamed"').encode())
    elif way == "digit":
        size = 1
        if file.suffix in (".json", ".jsonl", ".csv", ".txt"):
            at = rng.choice([place for place, byte in enumerate(data) if 48 <= byte <= 57])
            data[at] = rng.choice([digit for digit in range(48, 58) if digit != data[at]])
        else:
            data[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[at:]
    elif way == "out":
        del data[at : at + size]
    else:
        data[at : at + size] = bytes(rng.randrange(128, 256) for _ in data[at : at + size])
    file.write_bytes(data)
    return size


def _wrong(trace: Trace, sequence: int) -> tuple[int, int, int]:
    """How many rows and tokens of a sequence are not those of the request it is most like, and the prefill rows of it.

    Experts of a route may stand in another order, and rows at the end may be missing.
    """
    mine = trace.sequence == sequence
    routes, tokens, prefill = trace.experts[mine], trace.token[mine], int((trace.phase[mine] == 0).sum())
    found = []
    for true, ids, (prompt, _) in zip(TRUTH, TOKENS, LENGTHS, strict=True):
        both = min(len(routes), len(true))
        assert routes.shape[1:] == true.shape[1:]
        odd = (np.sort(routes[:both], axis=2) != np.sort(true[:both], axis=2)).any(axis=(1, 2)).sum()
        other = ((tokens[:both] != ids[:both]) & (tokens[:both] >= 0)).sum()
        found.append((int(odd) + len(routes) - both, int(other), prefill - min(prompt, both) if prefill else 0))
    return min(found)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_damaged_record_is_refused_in_a_line_or_differs_where_it_was_damaged_alone(name: str, tmp_path: Path) -> None:
    # In texts nothing shows that a digit was changed: one route or one token may differ, where the digit is. In parquet
    # files many rows may share one value. A token that is missing is doubted, in a note.
    whole = tmp_path / "whole"
    whole.mkdir()
    built = BUILDERS[name](whole)
    model = given(tmp_path)
    for seed in range(DAMAGES):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "damaged")
        paths = [tmp_path / "damaged" / path.relative_to(whole) for path in built]
        touched = _damaged(paths, random.Random(seed))
        out = tmp_path / "o.npz"
        out.unlink(missing_ok=True)
        try:
            trace = convert_files(paths, out, given=model)
        except InputError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error), (seed, str(error))
            assert not out.exists()
        else:
            if "as many rows as tokens" in notes(trace):
                continue
            wrong = [_wrong(trace, sequence) for sequence in range(trace.n_sequences)]
            routes, tokens = (sum(one[i] for one in wrong) for i in range(2))
            shared = name in ("flame", "policylang parquet")
            assert shared or (routes <= 1 and routes + tokens <= touched), (seed, wrong)
            assert not any(moved for _, _, moved in wrong), (seed, wrong)
