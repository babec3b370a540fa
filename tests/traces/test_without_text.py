"""Traces of text that may not be passed on: nothing is left that it could be read from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

import traces as package
from tests.support.strategies import traces
from traces.__main__ import main
from traces.schema import OPTIONAL_ROW_ARRAYS
from traces.subset import without_text
from traces.trace import Trace, validate

BUNDLED = sorted(Path(package.__path__[0]).glob("*.npz"))


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_tokens_and_embeddings_go_and_routes_and_predictions_stay(trace):
    bare = without_text(trace)
    validate(bare)
    assert (bare.token == -1).all() and "embedding" not in bare.meta
    assert bare.embeddings is bare.prefill_embeddings is bare.embedding_scale is None
    for name in ("experts", "sequence", "position", "phase", *OPTIONAL_ROW_ARRAYS):
        np.testing.assert_array_equal(getattr(bare, name), getattr(trace, name))


def test_the_command_leaves_them_out(tmp_path):
    source = next(path for path in BUNDLED if path.name == "mixtral_law.npz")
    amounts = ["--profile-tokens", "20", "--eval-tokens", "20", "--eval-sequences", "1"]
    assert main(["subset", str(source), "-o", str(tmp_path / "t.npz"), *amounts, "--routes-only"]) == 0
    trace = Trace.load(tmp_path / "t.npz")
    assert (trace.token == -1).all() and trace.embeddings is None
    assert any("may not be passed on" in note for note in trace.meta["notes"])


def test_a_subset_without_profile_tokens_has_no_profile_sequence(tmp_path):
    source = next(path for path in BUNDLED if path.name == "mixtral_law.npz")
    amounts = ["--profile-tokens", "0", "--eval-tokens", "20", "--eval-sequences", "3"]
    assert main(["subset", str(source), "-o", str(tmp_path / "t.npz"), *amounts]) == 0
    assert Trace.load(tmp_path / "t.npz").split.tolist() == ["eval"] * 3


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_no_bundled_trace_holds_text_that_may_not_be_passed_on(path):
    licence = Trace.load_meta(path).get("text", {}).get("licence", "")
    if "routes alone" in licence:
        trace = Trace.load(path)
        assert (trace.token == -1).all() and trace.embeddings is trace.prefill_embeddings is None
