"""The trace file: what is accepted, what is refused and how, and that nothing is lost on the way."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.strategies import assert_same, make_trace, traces
from traces.__main__ import main
from traces.errors import InputError
from traces.info import describe
from traces.trace import Trace, validate


def stored(trace: Trace) -> dict[str, np.ndarray]:
    """The arrays of a trace file, to be changed and written by hand."""
    fields = {n: getattr(trace, n) for n in Trace.__dataclass_fields__ if n not in ("meta", "source", "sha256")}
    return {"meta": np.array(json.dumps(trace.meta))} | {n: a for n, a in fields.items() if a is not None}


def one_line(error: pytest.ExceptionInfo[InputError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run info on a bad file: status 2, one line that names it, no result file. Returns the line."""
    result = path.parent / "result.json"
    assert main(["info", str(path), "--json", str(result)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and path.name in err
    assert not result.exists()
    return err


FULL = {
    "experts": [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, -1], [0, 1]]],
    "phase": [0, 1, 1],
    "layers": [1, 3],
    "gates": np.array([[[0.5, 0.5], [1, 0]], [[0.5, 0.5], [1, 0]], [[0.5, 0], [1, 0]]], np.float16),
    "probs": np.zeros((3, 2, 3), np.uint8),
    "prob_experts": np.tile(np.array([3, 1, 0], np.int16), (3, 2, 1)),
    "embeddings": np.ones((2, 3, 4), np.int8),
    "prefill_embeddings": np.ones((1, 4), np.int8),
    "embedding_scale": np.ones(3, np.float32),
    "lookahead": np.array([[[0, 1], [-1, -1]]] * 3, np.int16),
    "expert_bytes": [100, 200],
    "meta": {"embedding": {"dims": 4, "prefill_layer": 0}},
}


def full_trace() -> Trace:
    """Three rows of one sequence with every optional array."""
    return make_trace(n_experts=4, **{k: v.copy() if isinstance(v, np.ndarray) else v for k, v in FULL.items()})


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
    for name in ("experts", "gates", "probs", "prob_experts", "lookahead", "token", "position", "phase"):
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
        for field in ("captured", "text", "decoding", "software", "embedding", "subset", "converted")
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


# --- K01 unreadable files ---


def test_g01_1_half_file(tmp_path, capsys):
    path = tmp_path / "half.npz"
    full_trace().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    line = refused(path, capsys)
    assert str(path) in line and f"({len(whole) // 2} bytes)" in line and "truncated or not an npz" in line


@pytest.mark.parametrize("kind", ["empty", "text", "folder", "missing", "other zip"])
def test_g01_2_one_error_class_for_all_bad_files(kind, tmp_path, capsys):
    path = tmp_path / "x.npz"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("no archive")
    elif kind == "folder":
        path.mkdir()
    elif kind == "other zip":
        import zipfile

        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("experts.npy", "no array")
    with pytest.raises(InputError) as error:
        Trace.load(path)
    assert str(path) in one_line(error)
    line = refused(path, capsys)
    if kind in ("empty", "text", "other zip"):
        assert f"({path.stat().st_size} bytes): truncated or not an npz" in line


def test_damaged_bytes_never_escape_as_another_error(tmp_path):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            Trace.load(path)
        except InputError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 200


def _digest(path: str) -> tuple[str, int]:
    trace = Trace.load(path)
    return trace.sha256, int(trace.experts.astype(np.int64).sum())


def test_g01_3_workers_open_their_own_file(tmp_path):
    rng = np.random.default_rng(1)
    routes = rng.random((3000, 8, 16)).argsort(axis=2)[:, :, :4]
    path = tmp_path / "t.npz"
    make_trace(routes, n_experts=16, gates=np.ones((3000, 8, 4), np.float16)).save(path)
    expected = _digest(str(path))
    with ProcessPoolExecutor(4) as pool:
        assert list(pool.map(_digest, [str(path)] * 20)) == [expected] * 20


def test_g01_4_no_object_array_is_written_or_read(tmp_path):
    path = tmp_path / "t.npz"
    trace = make_trace([0, 1], n_experts=2, meta={"captured": {"what": "toy", "seed": None}})
    trace.save(path)
    assert Trace.load(path).meta["captured"]["seed"] is None
    with np.load(path, allow_pickle=False) as archive:
        assert not any(archive[name].dtype.hasobject for name in archive.files)
    ragged = np.array([[1, 2], [3]], object)
    with pytest.raises(InputError, match="array 'experts': dtype object"):
        dataclasses.replace(trace, experts=ragged).save(tmp_path / "never.npz")
    assert not (tmp_path / "never.npz").exists()
    np.savez(path, **(stored(trace) | {"experts": ragged}), allow_pickle=True)
    with pytest.raises(InputError, match="array 'experts' holds Python objects; object arrays are not accepted"):
        Trace.load(path)


class _Pwn:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("array", ["meta", "domain", "extra"])
def test_g01_5_pickles_are_never_run(array, tmp_path, capsys):
    pwned, path = tmp_path / "pwned", tmp_path / "evil.npz"
    evil = np.array([_Pwn(str(pwned))], object)
    np.savez(path, **(stored(full_trace()) | {array: evil}), allow_pickle=True)
    pwned.unlink(missing_ok=True)
    assert array in refused(path, capsys)
    assert main(["convert", str(path), "-o", str(tmp_path / "o.npz")]) == 2
    assert not pwned.exists()


# --- K02 dtypes ---


def test_g02_1_512_experts_keep_their_ids(tmp_path):
    trace = make_trace([[300, 511], [44, 255]], n_experts=512)
    trace.save(tmp_path / "wide.npz")
    loaded = Trace.load(tmp_path / "wide.npz")
    assert loaded.experts.tolist() == [[[300, 511]], [[44, 255]]]
    assert describe(loaded)["distinct_experts"]["used"] == 4
    with np.load(tmp_path / "wide.npz") as archive:
        assert archive["experts"].dtype.itemsize >= 2


def test_g02_2_minus_one_in_unsigned_8_bits_is_not_expert_255(tmp_path):
    arrays = stored(make_trace([0, 1, 2, 2, 2], n_experts=256))
    arrays["experts"] = np.array([0, 1, -1, -1, -1]).astype(np.uint8).reshape(5, 1, 1)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 2, routed layer 0, slot 0: 255 in 8 bits may be -1"):
        Trace.load(tmp_path / "t.npz")


def test_g02_3_joining_narrow_and_wide_turns_keeps_id_300(tmp_path):
    one, two = stored(make_trace([199, 200], n_experts=512)), stored(make_trace([300, 7], n_experts=512))
    one["experts"] = one["experts"].astype(np.uint8)
    two["sequence_id"] = np.array(["later"])
    np.savez(tmp_path / "1.npz", **one)
    np.savez(tmp_path / "2.npz", **two)
    first = Trace.load(tmp_path / "1.npz")
    assert any("8 bits" in note for note in first.meta["notes"])
    joined = Trace.concat([first, Trace.load(tmp_path / "2.npz")])
    assert joined.experts.ravel().tolist() == [199, 200, 300, 7]


def test_g02_4_signed_8_bits_are_refused_by_row_and_layer(tmp_path):
    arrays = stored(make_trace([[[0], [1]], [[2], [3]]], n_experts=256))
    arrays["experts"] = np.array([[[0], [1]], [[2], [-56]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"'experts', row 1, routed layer 1, slot 0: expert -56, expected -1 to 255"):
        Trace.load(tmp_path / "t.npz")
    arrays["experts"] = np.array([[[0], [1]], [[2], [-1]]], np.int8)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="-1 in 8 bits may be expert 255"):
        Trace.load(tmp_path / "t.npz")


def test_g02_5_big_endian_equals_little_endian(tmp_path):
    trace = full_trace()
    arrays = {n: a if n == "meta" else a.astype(a.dtype.newbyteorder(">")) for n, a in stored(trace).items()}
    arrays["gates"] = trace.gates.astype(">f4")
    arrays["experts"] = trace.experts.astype(">i8")
    np.savez(tmp_path / "t.npz", **arrays)
    assert_same(Trace.load(tmp_path / "t.npz"), trace)


@pytest.mark.parametrize(
    ("array", "dtype", "value", "message"),
    [
        ("experts", np.int64, 2**16 + 1, r"'experts', row 0, routed layer 0, slot 0: 65537 does not fit"),
        ("token", np.uint64, 2**40, r"'token', row 0: 1099511627776 does not fit"),
        ("phase", np.int32, 256, r"'phase', row 0: 256 does not fit"),
        ("gates", np.float32, 1e6, r"'gates', row 0, routed layer 0, slot 0: 1000000.0 does not fit in float16"),
        ("position", np.float64, 0, r"'position': dtype float64, expected integers"),
    ],
)
def test_values_are_never_wrapped(array, dtype, value, message, tmp_path):
    arrays = stored(full_trace())
    arrays[array] = arrays[array].astype(dtype)
    arrays[array].flat[0] = value
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=message):
        Trace.load(tmp_path / "t.npz")


def test_g09_1_float_embeddings_are_refused(tmp_path):
    arrays = stored(full_trace())
    arrays["embeddings"] = np.full(arrays["embeddings"].shape, np.nan, np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="'embeddings': dtype float32, expected int8"):
        Trace.load(tmp_path / "t.npz")


# --- K06, K07, K08 routes ---


def test_g06_1_an_id_equal_to_the_number_of_experts():
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0, slot 1: expert 8, expected -1 to 7"):
        make_trace([[0, 8]], n_experts=8)


def test_g06_2_the_same_expert_twice_is_refused():
    with pytest.raises(InputError, match=r"'experts', row 0, routed layer 0: \[3, 3\] repeats an expert"):
        make_trace([[3, 3], [1, 2]], n_experts=4)


def test_g07_2_fewer_experts_than_slots():
    trace = make_trace([[0, -1, -1, -1], [3, 2, 1, 0], [-1] * 4, [-1, 2, -1, 1]], n_experts=4)
    facts = describe(trace)
    assert facts["activations"] == 7 and facts["none_ids"] == 9


def test_g07_3_routes_without_a_slot_axis_are_top_1(tmp_path):
    arrays = stored(make_trace([[[0], [1]], [[2], [0]]], n_experts=3))
    arrays["experts"] = arrays["experts"][:, :, 0]
    arrays["gates"] = np.ones((2, 2), np.float32)
    np.savez(tmp_path / "t.npz", **arrays)
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.top_k == 1 and trace.experts.tolist() == [[[0], [1]], [[2], [0]]]
    assert trace.gates.tolist() == [[[1], [1]], [[1], [1]]]


def test_g08_1_a_prompt_of_no_tokens_is_named(tmp_path):
    arrays = stored(make_trace([0, 1, 2], n_experts=3, sequence=[0, 1, 2]))
    arrays["sequence"] = np.array([0, 0, 2], np.int32)
    arrays["position"] = np.array([0, 1, 0], np.int32)
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match=r"sequence 1 \('s1'\) has no rows \(a prompt of 0 tokens\)"):
        Trace.load(tmp_path / "t.npz")


@pytest.mark.parametrize("sequences", [0, 1])
def test_g08_1_a_trace_without_rows_is_refused(sequences, tmp_path):
    arrays = stored(make_trace([0], n_experts=2))
    for name in ("experts", "token", "sequence", "position", "phase"):
        arrays[name] = arrays[name][:0]
    for name in ("domain", "split", "sequence_id"):
        arrays[name] = arrays[name][:sequences]
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InputError, match="no rows" if sequences else "no sequence"):
        Trace.load(tmp_path / "t.npz")


# --- G-21.7, K22, K23 ---

_SAVER = """
import sys, numpy as np
from tests.strategies import make_trace
gates = np.random.default_rng(0).random((40_000, 24, 4)).astype(np.float16)
trace = make_trace(np.tile(np.arange(4), (40_000, 24, 1)), n_experts=4, gates=gates)
print("ready", flush=True)
trace.save(sys.argv[1])
"""


@pytest.mark.parametrize("existing", [False, True])
def test_g21_7_killed_while_saving_leaves_nothing_half_written(existing, tmp_path):
    path = tmp_path / "t.npz"
    if existing:
        full_trace().save(path)
    before = path.read_bytes() if existing else None
    root = Path(__file__).parent.parent
    saver = subprocess.Popen([sys.executable, "-c", _SAVER, str(path)], cwd=root, stdout=subprocess.PIPE)
    try:
        assert saver.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 100_000 for p in tmp_path.glob(".*.part")):
            assert saver.poll() is None and time.monotonic() < deadline, "the save ended before it could be killed"
            time.sleep(0.002)
        saver.send_signal(signal.SIGKILL)
        assert saver.wait() == -signal.SIGKILL
    finally:
        saver.kill()
        saver.wait()
        saver.stdout.close()
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    before = path.read_bytes()
    bad = dataclasses.replace(full_trace(), split=np.array(["never"]))
    with pytest.raises(InputError):
        bad.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_g22_1_odd_names_under_an_ascii_locale(tmp_path):
    folder = tmp_path / "é 数学 🙂"
    folder.mkdir()
    source, path, facts = folder / "in put.npz", folder / "tr ace ü.npz", folder / "facts é.json"
    np.savez(source, routed_experts=np.arange(12).reshape(6, 1, 2) % 4, n_experts=np.int64(4), layer_ids=np.arange(1))
    env = {k: v for k, v in os.environ.items() if k not in ("LANG", "PYTHONIOENCODING")}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0"}

    def run(*arguments: object) -> bytes:
        done = subprocess.run(
            [sys.executable, "-m", "traces", *map(str, arguments)],
            env=env, cwd=Path(__file__).parent.parent, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("convert", source, "-o", path, "--model", "toy", "--domain", "🙂 数学")
    assert Trace.load(path).domain.tolist() == ["🙂 数学"]
    shown = run("info", path, "--json", facts).decode("utf-8")
    assert "🙂 数学" in shown and "tr ace ü.npz" in shown
    assert json.loads(facts.read_bytes().decode("utf-8"))[0]["file"] == str(path)
    (fact,) = json.loads(run("info", path, "--json", "-").decode("utf-8"))
    assert fact["domains"] == {"🙂 数学": {"profile": 0, "eval": 1}}


def test_g22_3_undefined_figures_are_null_in_strict_json(tmp_path, capsys):
    path = tmp_path / "t.npz"
    make_trace([[-1], [-1]], n_experts=2, phase=[0, 0]).save(path)
    assert main(["info", str(path), "--json", "-"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (facts,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert facts["reused"] is None and facts["entropy_bits"]["mean"] is None
    assert facts["rows"] == {"prefill": 2, "decode": 0, "all": 2}


@pytest.mark.parametrize("dtype", [np.int16, np.int64])
def test_g23_memory_of_loading_is_bounded_by_the_stored_arrays(dtype, tmp_path):
    rows, layers, slots = 10_000, 48, 8
    routes = np.broadcast_to(np.arange(slots), (rows, layers, slots))
    arrays = stored(make_trace(routes, n_experts=128))
    arrays["experts"] = arrays["experts"].astype(dtype)
    np.savez(tmp_path / "t.npz", **arrays)
    size = (tmp_path / "t.npz").stat().st_size
    del arrays, routes
    tracemalloc.start()
    try:
        trace = Trace.load(tmp_path / "t.npz")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.experts.nbytes == rows * layers * slots * 2
    assert peak < 2 * size


def test_checking_is_linear_in_rows():
    def seconds(rows: int) -> float:
        routes = np.broadcast_to(np.arange(8, dtype=np.int16), (rows, 24, 8))
        trace = make_trace(routes, n_experts=64)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            validate(trace)
            best = min(best, time.process_time() - start)
        return best

    # Ten times the rows; a quadratic rule would take a hundred times as long.
    assert seconds(100_000) < 40 * max(seconds(10_000), 0.002)


# --- command line ---


def test_verify_prints_the_sha256_and_ok(tmp_path, capsys):
    path = tmp_path / "t.npz"
    full_trace().save(path)
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{Trace.load(path).sha256}  ok\n"


@pytest.mark.parametrize("line", ["info --nope x", "nope", "convert x", "convert x -o y --experts z", "verify"])
def test_wrong_flags_are_one_line_and_status_2(line, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_info_counts_by_hand(tmp_path, capsys):
    # Sequence s0: one prefill row and three decode rows; s1: two decode rows. One layer, k = 2.
    trace = make_trace(
        [[0, 1], [0, 1], [1, 2], [2, 1], [0, 1], [2, 3]], n_experts=4, phase=[0, 1, 1, 1, 1, 1],
        sequence=[0, 0, 0, 0, 1, 1], split=["profile", "eval"], domain=["law", "code"],
    )  # fmt: skip
    facts = describe(trace)
    # 1,2 after 0,1: one of two; 2,1 after 1,2: two of two; 2,3 after 0,1 of another sequence: none. 3 of 6.
    assert facts["reused"] == pytest.approx(3 / 6)
    # Uses of experts 0..3: 3, 5, 3, 1.
    share = np.array([3, 5, 3, 1]) / 12
    assert facts["entropy_bits"]["mean"] == pytest.approx(-(share * np.log2(share)).sum())
    assert facts["distinct_experts"] == {"used": 4, "of": 4}
    assert facts["domains"] == {"law": {"profile": 1, "eval": 0}, "code": {"profile": 0, "eval": 1}}
    path = tmp_path / "t.npz"
    trace.save(path)
    assert main(["info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"rows +6: 1 prefill, 5 decode", shown) and "50.0% of a decode token's experts" in shown
