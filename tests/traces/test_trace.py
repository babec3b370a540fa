"""The trace: what is accepted, what is refused and how, and that nothing is lost in splitting and joining."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings

from ground.errors import InputError
from tests.support.strategies import assert_same, make_trace, traces
from tests.support.trace_files import full_trace, one_line, stored
from traces.__main__ import main
from traces.schema import PREDICTED
from traces.trace import Trace, validate

# --- round trip ---


@settings(max_examples=150, deadline=None)
@given(trace=traces())
def test_saving_and_loading_changes_nothing(trace, tmp_path_factory):
    path = tmp_path_factory.mktemp("t") / "exact.name"
    trace.save(path)
    loaded = Trace.load(path)
    assert_same(trace, loaded)
    assert loaded.source == str(path) and len(loaded.sha256) == 64
    assert [p.name for p in path.parent.iterdir()] == ["exact.name"]
    first = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == first


@settings(max_examples=150, deadline=None)
@given(trace=traces())
def test_splitting_a_trace_and_joining_it_again_changes_nothing(trace):
    order = np.argsort(trace.split == "eval", kind="stable")
    parts = [trace.select(s) for s in ("profile", "eval") if (trace.split == s).any()]
    for part in parts:
        validate(part)
        assert part.n_rows == trace.row_split(str(part.split[0])).sum()
    joined = Trace.concat(parts)
    assert joined.sequence_id.tolist() == trace.sequence_id[order].tolist()
    rows = np.concatenate([np.flatnonzero(trace.sequence == s) for s in order])
    for name in ("experts", "gates", "probs", "prob_experts", "lookahead", *PREDICTED, "token", "position", "phase"):
        whole = getattr(trace, name)
        assert (whole is None) == (getattr(joined, name) is None)
        if whole is not None:
            np.testing.assert_array_equal(getattr(joined, name), whole[rows])
    if trace.embeddings is not None:
        place = np.cumsum(trace.phase == 1) - 1
        decode = rows[trace.phase[rows] == 1]
        np.testing.assert_array_equal(joined.embeddings, trace.embeddings[place[decode]])
        place = np.cumsum(trace.phase == 0) - 1
        prefill = rows[trace.phase[rows] == 0]
        np.testing.assert_array_equal(joined.prefill_embeddings, trace.prefill_embeddings[place[prefill]])


def test_select_by_domain_renumbers_sequences():
    trace = make_trace([0, 1, 2], n_experts=3, sequence=[0, 1, 2], domain=["law", "code", "law"])
    law = trace.select(domains=["law"])
    assert law.sequence.tolist() == [0, 1] and law.sequence_id.tolist() == ["s0", "s2"]
    assert law.experts.ravel().tolist() == [0, 2]


def test_select_of_nothing_says_what_there_is():
    with pytest.raises(InputError, match=r"no sequence in split profile; it has general \(eval\)"):
        make_trace([0], n_experts=2).select("profile")
    with pytest.raises(InputError, match="split 'test': expected profile, eval or all"):
        make_trace([0], n_experts=2).select("test")


def test_joining_traces_of_different_models_is_refused():
    small, large = make_trace([0], n_experts=2), make_trace([0], n_experts=3)
    with pytest.raises(InputError, match="different experts"):
        Trace.concat([small, large])
    with pytest.raises(InputError, match=r"sequence_id.*'s0' is there twice"):
        Trace.concat([small, small])


def test_joining_leaves_out_what_one_trace_lacks_and_says_so():
    one = make_trace([0], n_experts=2, gates=np.ones((1, 1, 1), np.float16))
    two = make_trace([1], n_experts=2, sequence_id=np.array(["other"]))
    joined = Trace.concat([one, two])
    assert joined.gates is None
    assert joined.meta["notes"] == ["gates left out: the joined traces do not all have it in one form"]


# --- every rule ---

MUTATIONS = {
    "experts range": ("experts", (1, 1, 0), 4, r"'experts', row 1, routed layer 1, slot 0: expert 4, expected -1 to 3"),
    "experts negative": ("experts", (2, 0, 0), -2, r"'experts', row 2, routed layer 0, slot 0: expert -2"),
    "experts twice": ("experts", (0, 1, 1), 2, r"'experts', row 0, routed layer 1: \[2, 2\] repeats"),
    "token": ("token", 1, -2, r"'token', row 1: -2"),
    "sequence": ("sequence", 2, 1, r"'sequence', row 2: 1, expected 0 to 0"),
    "position gap": ("position", 2, 3, r"'position', row 2: 3 after 1, expected 2"),
    "position repeated": ("position", 2, 1, r"'position', row 2: 1 after 1"),
    "position negative": ("position", 0, -1, r"'position', row 0: -1"),
    "phase value": ("phase", 1, 2, r"'phase', row 1: 2"),
    "phase order": ("phase", 2, 0, r"'phase', row 2: prefill \(0\) after decode"),
    "layers order": ("layers", 1, 1, r"'layers', entry 1: 1 after 1"),
    "layers negative": ("layers", 0, -1, r"'layers', entry 0: -1"),
    "gates NaN": ("gates", (1, 0, 1), np.nan, r"'gates', row 1, routed layer 0, slot 1: nan, expected a finite"),
    "gates infinite": ("gates", (0, 1, 1), np.inf, r"'gates', row 0, routed layer 1, slot 1: inf"),
    "gates of none": ("gates", (2, 0, 1), 0.25, r"'gates', row 2, routed layer 0, slot 1: 0.25, expected 0 where"),
    "prob_experts range": ("prob_experts", (0, 0, 0), -1, r"'prob_experts', row 0, routed layer 0, slot 0: expert -1"),
    "prob_experts twice": ("prob_experts", (2, 1, 2), 1, r"'prob_experts', row 2, routed layer 1: \[3, 1, 1\] repeats"),
    "scale": ("embedding_scale", 1, 0, r"'embedding_scale', entry 1: 0.0"),
    "scale NaN": ("embedding_scale", 2, np.nan, r"'embedding_scale', entry 2: nan"),
    "lookahead range": ("lookahead", (1, 0, 0), 9, r"'lookahead', row 1, routed layer 0, slot 0: expert 9"),
    "lookahead twice": ("lookahead", (1, 0, 0), 1, r"'lookahead', row 1, routed layer 0: \[1, 1\] repeats"),
    "lookahead last": ("lookahead", (1, 1, 1), 0, r"'lookahead', row 1, last routed layer: expert 0, expected -1"),
    "predicted range": ("predicted_experts", (1, 0, 1), 4, r"'predicted_experts', row 1, routed layer 0, slot 1: ex"),
    "predicted twice": ("predicted_experts", (1, 0, 1), 0, r"'predicted_experts', row 1, routed layer 0: \[0, 0\] re"),
    "predicted in part": (
        "predicted_experts",
        (2, 1, 0),
        3,
        r"'predicted_experts', row 2, routed layer 1: \[3, -1\], e",
    ),
    "predicted of none": ("predicted_probs", (2, 1, 0), 3, r"'predicted_probs', row 2, routed layer 1: \[3, 0\], exp"),
    "predicted order": ("predicted_probs", (0, 0, 1), 201, r"'predicted_probs', row 0, routed layer 0: \[200, 201\]"),
    "domain": ("domain", 0, "", r"'domain', sequence 0: empty"),
    "split": ("split", 0, "test", r"'split', sequence 0: 'test', expected profile or eval"),
    "sequence_id": ("sequence_id", 0, "", r"'sequence_id', sequence 0: empty"),
}


@pytest.mark.parametrize(("array", "index", "value", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_value_is_named_by_array_row_and_value(array, index, value, message, tmp_path):
    good = full_trace()
    values = np.asarray(getattr(good, array), "U8" if isinstance(value, str) else None)
    values[index] = value
    bad = dataclasses.replace(good, **{array: values})
    for check in (lambda: validate(bad), lambda: bad.save(tmp_path / "bad.npz")):
        with pytest.raises(InputError, match=message) as error:
            check()
        one_line(error)
    np.savez(tmp_path / "bad.npz", **stored(bad))
    with pytest.raises(InputError, match=rf"bad\.npz: array {message}") as error:
        Trace.load(tmp_path / "bad.npz")
    one_line(error)


@pytest.mark.parametrize("array", [n for n in stored(full_trace()) if n != "meta"])
def test_a_wrong_shape_is_named(array):
    good = full_trace()
    extra = np.concatenate([getattr(good, array)] * 2)
    if array == "layers":
        extra[2:] += 10
    if array == "sequence_id":
        extra[1] = "s1"
    if array == "sequence":
        extra = extra[:-1]
    with pytest.raises(InputError, match=r"array '\w+'.*shape|expert_bytes"):
        validate(dataclasses.replace(good, **{array: extra}))


@pytest.mark.parametrize("array", [n for n, a in stored(full_trace()).items() if a.dtype.kind != "U"])
def test_a_wrong_dtype_in_memory_is_named(array):
    good = full_trace()
    with pytest.raises(InputError, match=rf"array '{array}': dtype complex128, expected"):
        validate(dataclasses.replace(good, **{array: getattr(good, array).astype(complex)}))


@pytest.mark.parametrize("array", ["meta", "layers", "experts", "token", "sequence", "position", "phase", "domain"])
def test_a_missing_array_is_named(array, tmp_path):
    arrays = stored(full_trace())
    del arrays[array]
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=rf"t\.npz: array '{array}' is missing"):
        Trace.load(tmp_path / "t.npz")


def test_an_unknown_array_is_named(tmp_path):
    np.savez(tmp_path / "t.npz", **stored(full_trace()), gate=np.zeros(3))
    with pytest.raises(InputError, match="unknown array 'gate'"):
        Trace.load(tmp_path / "t.npz")


def test_arrays_that_need_each_other():
    good = full_trace()
    for missing, message in (
        ({"probs": None}, "'prob_experts': there without 'probs'"),
        ({"prob_experts": None}, r"'probs': shape \(3, 2, 3\), expected \(3, 2, 4\)"),
        ({"embedding_scale": None}, "'embedding_scale': missing"),
        ({"predicted_probs": None}, "'predicted_experts': there without 'predicted_probs'"),
        ({"predicted_experts": None}, "'predicted_probs': there without 'predicted_experts'"),
        ({"meta": good.meta | {"predictor": {}}}, "meta.predictor: no sha256"),
        ({"split": np.array(["profile"])}, r"'predicted_experts', row 0, routed layer 0: \[0, 1\], expected -1 in the"),
        ({"embeddings": None, "prefill_embeddings": None}, "'embedding_scale': there without"),
    ):
        with pytest.raises(InputError, match=message):
            validate(dataclasses.replace(good, **missing))


META = {
    "schema": ({"schema": 2}, "meta.schema: 2"),
    "schema true": ({"schema": True}, "meta.schema: True"),
    "schema 1.0": ({"schema": 1.0}, "meta.schema: 1.0"),
    **{
        f"{field} {value!r}": ({field: value}, re.escape(f"meta, field {field!r}: {value!r}, expected an object"))
        for field in ("captured", "text", "decoding", "software", "embedding", "subset", "converted", "predictor")
        for value in ("x", [1], None, 5)
    },
    "note": ({"notes": ["a", None]}, "meta.notes, entry 1: None"),
    "notes": ({"notes": None}, "field 'notes': None"),
    "basis": ({"embedding": {"basis_sha256": [1]}}, r"field 'basis_sha256': \[1\]"),
    "model name": ({"model": {"name": "a\x1b[31m", "experts": 4, "top_k": 2}}, r"meta.model.name: 'a\\x1b\[31m' holds"),
    "model config": ({"model": {"name": "a", "experts": 4, "top_k": 2, "config": 1}}, "field 'config': 1"),
    "model part": ({"model": {"name": "a", "experts": 4, "top_k": 2, "part": []}}, r"field 'part': \[\]"),
    "surrogate": ({"captured": {"what": "\ud800"}}, "meta: not strict JSON"),
    "surrogate key": ({"captured": {"\ud800": 1}}, "meta: not strict JSON"),
    "deep": ({"captured": {"what": json.loads("[" * 900 + "]" * 900)}}, "meta: nested too deep"),
    "no model": ({"model": None}, "meta.model: None"),
    "no name": ({"model": {"experts": 4, "top_k": 2}}, "meta.model.name: None"),
    "experts": ({"model": {"name": "x", "experts": 0, "top_k": 2}}, "meta.model.experts: 0"),
    "experts a bool": ({"model": {"name": "x", "experts": True, "top_k": 2}}, "meta.model.experts: True"),
    "top_k": ({"model": {"name": "x", "experts": 4, "top_k": 1}}, r"'experts': shape \(3, 2, 2\), expected"),
    "sizes": ({"model": {"name": "x", "experts": 4, "top_k": 2, "expert_bytes": [1]}}, "meta.model.expert_bytes"),
    "size NaN": (
        {"model": {"name": "x", "experts": 4, "top_k": 2, "expert_bytes": [1, float("nan")]}},
        "meta: not strict JSON",
    ),
    "size 0": (
        {"model": {"name": "x", "experts": 4, "top_k": 2, "expert_bytes": [1, 0]}},
        "meta.model.expert_bytes, entry 1: 0",
    ),
    "NaN": ({"loss": float("nan")}, "meta: not strict JSON"),
    "an array": ({"loss": np.ones(2)}, "meta: not strict JSON"),
    "dims": ({"embedding": {"dims": 5, "prefill_layer": 0}}, "meta.embedding: .*expected dims = 4"),
    "prefill layer": ({"embedding": {"dims": 4, "prefill_layer": 3}}, "meta.embedding.prefill_layer: 3"),
}


@pytest.mark.parametrize(("change", "message"), META.values(), ids=META)
def test_wrong_meta_is_named(change, message):
    good = full_trace()
    with pytest.raises(InputError, match=message):
        validate(dataclasses.replace(good, meta=good.meta | change))


@pytest.mark.parametrize("text", ["{", "[1]", '{"schema": NaN}', "null", '{"schema":' + "[" * 100_000, "9" * 5000])
def test_meta_that_is_not_a_json_object_is_refused(text, tmp_path):
    np.savez(tmp_path / "t.npz", **(stored(full_trace()) | {"meta": np.array(text)}))
    with pytest.raises(InputError, match=r"t\.npz: (array 'meta'|meta)"):
        Trace.load(tmp_path / "t.npz")


@pytest.mark.parametrize("array", ["domain", "sequence_id"])
@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "\x9b31m", "\ud800"])
def test_names_without_control_characters_only(array, name):
    good = full_trace()
    with pytest.raises(InputError, match=f"array '{array}', sequence 0: .* holds"):
        validate(dataclasses.replace(good, **{array: np.array([name])}))


def test_what_meta_says_reaches_no_terminal_raw(tmp_path, capsys):
    meta = {"notes": ["red \x1b[31m", "[/red]"], "captured": {"[bold]what": "a\rb [red]c"}}
    trace = make_trace([[[0], [1]]], n_experts=2, meta=meta)
    named = dataclasses.replace(trace, domain=np.array(["[red]é漢😀[/]"]))
    named.save(tmp_path / "[red]t.npz")
    assert main(["info", str(tmp_path / "[red]t.npz")]) == 0
    shown = capsys.readouterr().out
    for text in ("red \\x1b[31m", "[/red]", "[bold]what: a\\rb [red]c", "[red]é漢😀[/]", "[red]t.npz"):
        assert text in shown
    assert "\x1b" not in shown and "\r" not in shown


def test_meta_as_utf8_bytes_is_read(tmp_path):
    trace = full_trace()
    text = json.dumps(trace.meta | {"notes": ["é 数"]}, ensure_ascii=False).encode()
    np.savez(tmp_path / "t.npz", **(stored(trace) | {"meta": np.frombuffer(text, np.uint8)}))
    assert Trace.load(tmp_path / "t.npz").meta["notes"] == ["é 数"]


def test_many_slots_are_checked_for_repeats_too():
    routes = np.arange(40, dtype=np.int16).reshape(2, 1, 20)
    make_trace(routes, n_experts=40)
    routes[1, 0, 19] = routes[1, 0, 3]
    with pytest.raises(InputError, match="'experts', row 1, routed layer 0"):
        make_trace(routes, n_experts=40)
