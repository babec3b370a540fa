"""Several traces as one workload: sequences take turns, nothing is lost, and policies learn from all of them."""

import dataclasses
import json
import zipfile
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.run.scene import scene
from tests.support.strategies import assert_same, make_trace, traces
from tests.support.worlds import toy_meta
from traces.__main__ import main as traces_main
from traces.mix import mix
from traces.subset import thinned
from traces.trace import Trace, validate

ROW_ARRAYS = (
    "experts", "token", "position", "phase", "gates", "probs", "prob_experts", "lookahead", "predicted_experts",
    "predicted_probs",
)  # fmt: skip


def named(trace: Trace, name: str) -> Trace:
    """The trace with sequences of its own names."""
    return dataclasses.replace(trace, sequence_id=np.array([f"{name}{i}" for i in range(trace.n_sequences)]))


@st.composite
def families(draw: st.DrawFn) -> list[Trace]:
    """Traces that may be mixed: parts of one trace, in any order."""
    whole = draw(traces(max_sequences=9))
    parts = draw(st.lists(st.integers(0, 2), min_size=whole.n_sequences, max_size=whole.n_sequences))
    members = [np.flatnonzero(np.array(parts) == part) for part in sorted(set(parts))]
    return [named(whole.take(np.array(draw(st.permutations(own.tolist())))), "abc"[i]) for i, own in enumerate(members)]


def pieces(trace: Trace) -> dict[str, dict[str, bytes]]:
    """All that is stored of each sequence, by its name."""
    found = {}
    for index, name in enumerate(trace.sequence_id.tolist()):
        one = trace.keep(np.arange(trace.n_sequences) == index)
        arrays = {n: getattr(one, n) for n in (*ROW_ARRAYS, "embeddings", "prefill_embeddings", "domain", "split")}
        found[name] = {n: a.tobytes() for n, a in arrays.items() if a is not None}
    return found


@given(families())
@settings(max_examples=60, deadline=None)
def test_every_row_of_every_sequence_is_kept_in_its_order(parts):
    mixed = mix(parts)
    validate(mixed)
    assert pieces(mixed) == {name: piece for part in parts for name, piece in pieces(part).items()}
    assert mixed.n_rows == sum(part.n_rows for part in parts)


@given(families())
@settings(max_examples=60, deadline=None)
def test_sequences_of_each_split_take_turns(parts):
    if len(parts) == 1:
        return
    mixed = mix(parts)
    for split in ("profile", "eval"):
        queues = [part.sequence_id[part.split == split].tolist() for part in parts]
        turns = [name for turn in zip_longest(*queues) for name in turn if name is not None]
        assert mixed.sequence_id[mixed.split == split].tolist() == turns
    assert sorted(mixed.split.tolist(), reverse=True) == mixed.split.tolist()  # profile before eval


@given(traces())
@settings(max_examples=20, deadline=None)
def test_a_trace_mixed_with_nothing_is_itself(trace):
    assert mix([trace]) is trace


@given(traces(max_sequences=6), st.data())
@settings(max_examples=60, deadline=None)
def test_taking_sequences_in_any_order_and_back_changes_nothing(trace, data):
    order = np.array(data.draw(st.permutations(range(trace.n_sequences))))
    taken = trace.take(order)
    validate(taken)
    assert taken.sequence_id.tolist() == trace.sequence_id[order].tolist()
    assert_same(taken.take(np.argsort(order)), trace)


@given(traces(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_thinning_touches_nothing_but_what_it_names(trace, probs):
    thin = thinned(trace, probs)
    validate(thin)
    rows = trace.decode_rows
    assert thin.gates is None and thin.meta["notes"][-1].startswith("left out: gates")
    assert (thin.experts == trace.experts).all()
    if trace.lookahead is not None:
        assert (thin.lookahead[rows] == trace.lookahead[rows]).all()
        assert (thin.lookahead[trace.prefill_rows] == -1).all()
    if trace.probs is not None:
        kept = np.sort(trace.probs[rows], axis=2)[:, :, ::-1][:, :, :probs]
        assert (np.sort(thin.probs[rows], axis=2)[:, :, ::-1] == kept).all()
        assert not thin.probs[trace.prefill_rows].any()
    if trace.predicted_experts is not None:
        most = min(max(2 * trace.top_k, 4), trace.predicted_experts.shape[2])
        assert thin.predicted_experts.shape[2] == most
        assert (thin.predicted_experts == trace.predicted_experts[:, :, :most]).all()
        lost = trace.predicted_probs[:, :, :most] - thin.predicted_probs
        assert (lost < 8).all() and (thin.predicted_probs % 8 == 0).all()


@given(traces())
@settings(max_examples=40, deadline=None)
def test_a_tight_file_holds_the_same_trace(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("tight")
    for name in ("a.npz", "b.npz"):
        trace.save(folder / name, tight=True)
    assert (folder / "a.npz").read_bytes() == (folder / "b.npz").read_bytes()
    assert_same(Trace.load(folder / "a.npz"), trace)
    assert Trace.load_meta(folder / "a.npz") == Trace.load(folder / "a.npz").meta
    with np.load(folder / "a.npz", allow_pickle=False) as stored:
        assert (stored["experts"] == trace.experts).all()


def test_a_damaged_tight_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "a.npz"
    trace = make_trace(np.arange(400).reshape(100, 1, 4), n_experts=400)
    trace.save(path, tight=True)
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 40):
        path.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        try:
            assert_same(Trace.load(path), trace)  # such as the date of a member
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(whole) // 80


def toy(name: str, domain: str, count: int, **meta: object) -> Trace:
    """``count`` sequences of each split of one domain; 4 layers of 8 experts, two a token."""
    rng = np.random.default_rng(len(domain) + count)
    rows = 6 * 2 * count
    routes = rng.random((rows, 4, 8)).argsort(axis=2)[:, :, :2]
    splits = ["profile"] * count + ["eval"] * count
    phase, sequence = [0, 0, 1, 1, 1, 1] * 2 * count, np.repeat(np.arange(2 * count), 6)
    made = make_trace(routes, n_experts=8, phase=phase, sequence=sequence, split=splits, domain=domain, meta=meta)
    made.meta["model"] |= toy_meta(4)
    return named(made, name)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.npz" for name in "abc"]
    for path, domain, count in zip(paths, ("code", "math", "talk"), (1, 2, 3), strict=True):
        toy(path.stem, domain, count).save(path)
    return paths


def test_a_mixed_scene_learns_from_every_trace_and_names_them_all(files):
    here = scene(files)
    assert here.trace.sequence_id.tolist() == ["a1", "b2", "c3", "b3", "c4", "c5"]
    assert [t.source for t in here.profile] == [str(path) for path in files]
    assert here.trace.sha256 != scene(files[::-1]).trace.sha256


def test_the_option_replays_and_compares_and_says_of_what(files, tmp_path, capsys):
    names = [str(path) for path in files]
    out = tmp_path / "r.json"
    assert main(["replay", "--mix", *names, "--policy", "popularity", "--json", str(out)]) == 0
    told = json.loads(out.read_text())["provenance"]
    assert [one["trace"] for one in told["joined"]] == names
    assert [one["sha256"] for one in told["joined"]] == [Trace.load(path).sha256 for path in files]
    assert told["trace"] == " + ".join(names)
    assert main(["compare", "--mix", *names, "--policy", "lru", "on-demand", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())) == 2
    capsys.readouterr()


def test_a_subset_of_several_takes_the_first_of_each_and_names_them(files, tmp_path):
    names, out = [str(path) for path in files], tmp_path / "s.npz"
    amounts = ["--profile-tokens", "4", "--eval-tokens", "4", "--eval-sequences", "1"]
    assert traces_main(["subset", *names, "-o", str(out), *amounts, "--thin", "2"]) == 0
    found = Trace.load(out)
    assert found.sequence_id.tolist() == ["a0", "b0", "c0", "a1", "b2", "c3"]
    assert [one["source"] for one in found.meta["joined"]] == names
    assert found.meta["subset"]["sequences"] == "6 of 12"
    with zipfile.ZipFile(out) as archive:
        assert {member.compress_type for member in archive.infolist()} == {zipfile.ZIP_LZMA}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a trace or --mix"),
        (["a.npz", "--mix", "b.npz"], "expected a trace or --mix"),
        (["--mix", "a.npz", "a.npz"], "both hold sequence 'a0'"),
        (["--mix", "a.npz", "other.npz"], "different models cannot be mixed: "),
        (["--mix", "one.npz", "foreign.npz"], "one.npz has toy, foreign.npz has other; expected traces of one model"),
        (["--mix", "one.npz", "two.npz"], "different embedding bases"),
        (["--mix", "a.npz", "nothing.npz"], "nothing.npz"),
    ],
)
def test_what_cannot_be_mixed_is_one_line(files, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    other = toy("o", "code", 1)
    other.meta["model"]["name"] = "other"
    other.save("other.npz")
    for name in ("one", "two"):
        toy(name, "code", 1, embedding={"basis_sha256": name * 8}).save(f"{name}.npz")
    foreign = toy("one", "code", 1, embedding={"basis_sha256": "f" * 8})  # its basis and its name are wrong too
    foreign.meta["model"]["name"] = "other"
    foreign.save("foreign.npz")
    assert main(["replay", *arguments, "--json", "r.json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not Path("r.json").exists()
