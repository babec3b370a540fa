"""What a page of traces shows is what the traces hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.__main__ import main
from analysis.html.of_traces import Routing, routing, said, trace_plots
from analysis.workloads import by_model
from tests.support.analysis_worlds import DOMAINS, EXPERTS, LAYERS, domain_trace, domain_traces


@pytest.fixture(name="main")
def analysis() -> Any:
    """``said`` runs commands of the analysis here."""
    return main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return domain_traces(tmp_path_factory.mktemp("traces") / "toy")


@pytest.fixture(scope="module")
def found(folder: Path) -> Routing:
    (model,) = by_model([folder])
    return routing(model)


def test_use_is_counted_over_decode_rows_of_each_domain(found: Routing) -> None:
    assert found.domains == list(DOMAINS) and found.use.shape == (len(DOMAINS), LAYERS, EXPERTS)
    trace = domain_trace("law")
    routes = trace.experts[trace.phase == 1]
    by_hand = [[(routes[:, layer] == expert).sum() for expert in range(EXPERTS)] for layer in range(LAYERS)]
    np.testing.assert_allclose(found.use[2], np.array(by_hand) / (len(routes) * 2))


def test_plots_are_a_map_for_each_domain_then_layers_then_matching(found: Routing) -> None:
    plots = {plot.name: plot for plot in trace_plots(found)}
    assert list(plots) == [*(f"experts-{at}" for at in range(1, 5)), "similarity", "matching"]
    assert all(plots[f"experts-{at}"].span == plots["experts-1"].span for at in range(2, 5))
    assert np.sum(plots["experts-1"].values, axis=1) == pytest.approx(100, abs=0.01)  # type: ignore[arg-type]
    assert np.diagonal(np.array(plots["similarity"].values, float)) == pytest.approx(1, abs=1e-3)
    assert np.sum(plots["matching"].values, axis=1) == pytest.approx(100, abs=0.1)  # type: ignore[arg-type]
    assert list(plots["matching"].rows_of) == list(plots["matching"].columns_of) == list(DOMAINS)


def test_what_traces_do_not_hold_is_left_out_of_plots_and_sentences(found: Routing) -> None:
    bare = replace(found, cosine=None, matching=None)
    assert {plot.name.split("-")[0] for plot in trace_plots(bare)} == {"experts"}
    assert "cosine" in said(found) and "prompts" in said(found)
    assert "cosine" not in said(bare) and "prompts" not in said(bare)


def test_one_trace_without_embeddings_still_has_its_page(said: Any, tmp_path: Path) -> None:
    trace = replace(domain_trace("law"), embeddings=None, prefill_embeddings=None, embedding_scale=None)
    trace.save(tmp_path / "law.npz")
    assert said("trace", tmp_path, "-o", tmp_path / "t.html")[0] == 0
    text = (tmp_path / "t.html").read_text("utf-8")
    assert "Experts that law uses" in text and "Similarity of layers" not in text


def test_page_and_figures_are_written(said: Any, folder: Path, tmp_path: Path) -> None:
    two = [folder / f"toy_{domain}.npz" for domain in ("code", "law")]
    status, out, _ = said("trace", *two, "-o", tmp_path / "t.html", "--figures", tmp_path / "new" / "figures")
    assert status == 0 and out == ""
    names = {path.name for path in (tmp_path / "new" / "figures").iterdir()}
    assert {"matching.png", "matching.svg", "matching.csv", "similarity.csv"} <= names and len(names) == 12
    lines = (tmp_path / "new" / "figures" / "matching.csv").read_text("utf-8").splitlines()
    assert lines[0] == "domain of the prompt / domain of the table: share of prompts (%),code,law"


def test_folder_without_traces_is_one_line(said: Any, tmp_path: Path) -> None:
    status, _, err = said("trace", tmp_path, "-o", tmp_path / "t.html")
    assert status == 2 and "no .npz files" in err and err.count("\n") == 1
