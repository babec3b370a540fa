"""How a person may write what convert is told."""

import numpy as np
import pytest

from traces.__main__ import main
from traces.trace import Trace


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "MIXTRAL-8X7B"])
def test_a_known_model_may_be_named_in_any_case(name, tmp_path):
    np.save(tmp_path / "r.npy", np.tile(np.arange(2), (3, 32, 1)))
    arguments = ["convert", str(tmp_path / "r.npy"), "-o", str(tmp_path / "t.npz"), "--model", name]
    assert main(arguments) == 0
    assert Trace.load(tmp_path / "t.npz").meta["model"]["name"] == "mixtral-8x7b"


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "r.npy", "-o", "t", "--experts", "7.9"],
        ["subset", "t", "-o", "u", "--profile-tokens", "1.5", "--eval-tokens", "1"],
        ["verify", "t", "--sequences", "1.9"],
        ["capture", "m", "-o", "t", "--prompts", "p", "--batch", "1.9"],
        ["capture", "m", "-o", "t", "--prompts", "p", "--seed", "0.5"],
        ["train", "m", "-o", "t", "--corpora", "c", "--tokens", "1e3"],
    ],
)
def test_fractions_are_no_whole_numbers(arguments, capsys):
    assert main(arguments) == 2
    assert "expected a whole number" in capsys.readouterr().err
