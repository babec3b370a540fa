"""Records as engines, batchers and recorders really leave them: read, or named for what they are in one line."""

import base64
import io
import json
import pickle
import zipfile

import numpy as np
import pytest

from ground.errors import InputError
from sim.__main__ import main as simulate
from tests.support.records import notes, routes
from tests.support.strategies import make_trace
from tests.support.trace_files import stored
from tests.traces.convert.test_convert_kinds import device
from traces.__main__ import main
from traces.convert.kinds import Given, convert_file
from traces.models.known import resolve_model
from traces.trace import Trace

GEMMA = {
    "model_type": "mixtral", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 32,
    "num_local_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "rope_theta": float("inf"),
}  # fmt: skip


def converted(tmp_path, model="toy", given=None, **record):
    layers = np.arange(record["routed_experts"].shape[-2:][0])
    record = {"n_experts": np.int64(8), "layer_ids": layers} | record
    np.savez(tmp_path / "chat.npz", **{name: array for name, array in record.items() if array is not None})
    return convert_file(tmp_path / "chat.npz", tmp_path / "out.npz", given=given or Given(model=model))


# --- what replay will need ---


def test_a_config_of_a_model_that_is_not_built_in_is_all_that_convert_and_replay_need(tmp_path, capsys):
    folder = tmp_path / "gemma-mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA))
    sizes = np.full(5, 20_000)
    np.savez(tmp_path / "run.npz", **device(routes=routes(5, 5, 4, 16), k=4, n_experts=16, expert_bytes=sizes))
    for model in (folder, folder / "config.json"):
        command = ["convert", str(tmp_path / "run.npz"), "-o", str(tmp_path / "t.npz"), "--model", str(model)]
        assert main(command) == 0
        assert "replay" not in capsys.readouterr().err
    trace = Trace.load(tmp_path / "t.npz")
    assert trace.meta["model"]["name"] == "gemma-mine" and trace.layers.tolist() == list(range(5))
    assert trace.meta["model"]["config"] == GEMMA | {"rope_theta": "Infinity"}
    assert simulate(["replay", str(tmp_path / "t.npz"), "--policy", "lru", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["lookups"] == 2 * 5 * 4


def test_a_config_beside_the_name_of_a_built_in_model_is_charged_as_it_says(tmp_path):
    folder = tmp_path / "mixtral-8x7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA))
    trace = converted(tmp_path, str(folder), routed_experts=routes(4, 5, 4, 16), n_experts=None)
    assert trace.meta["model"]["name"] == "mixtral-8x7b (config.json)"
    assert resolve_model(trace.meta["model"], trace.layers).hidden == 64


def test_convert_says_at_once_what_replay_will_need_of_an_unknown_model(tmp_path, capsys):
    np.savez(tmp_path / "run.npz", **device(routes=routes(5, 31, 6, 128), expert_bytes=np.full(31, 9)))
    command = ["convert", str(tmp_path / "run.npz"), "-o", str(tmp_path / "t.npz")]
    assert main(command) == 2
    assert "expected --model NAME or, of a model that is not built in, its config.json" in capsys.readouterr().err
    assert main([*command, "--model", "gemma-4"]) == 2
    assert "expected its config.json as --model, which replay needs too, or numbers" in capsys.readouterr().err
    assert main([*command, "--model", "gemma-4", "--layers", "0-30"]) == 0
    assert "warning: gemma-4 is not built in: replay will need --model" in capsys.readouterr().err


def test_a_config_that_replay_cannot_read_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA | {"model_type": "gemma4"}))
    with pytest.raises(InputError, match=r"config\.json: model_type is 'gemma4'; expected one of mixtral"):
        converted(tmp_path, str(tmp_path / "config.json"), routed_experts=routes(4))
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read: No such file"):
        converted(tmp_path, str(tmp_path / "nowhere.json"), routed_experts=routes(4))
    assert not (tmp_path / "out.npz").exists()


# --- arrays beside those of a record ---


def test_harmless_arrays_are_named_and_passed_over(tmp_path):
    more = {"row_index": np.arange(5), "path": np.array("/data/run")}
    np.savez(tmp_path / "run.npz", **device(), **more)
    trace = convert_file(tmp_path / "run.npz", tmp_path / "o.npz")
    assert "arrays that are no part of such a record were passed over: path, row_index" in notes(trace)
    assert "passed over: path" in notes(converted(tmp_path, routed_experts=routes(5), path=np.array("here")))


@pytest.mark.parametrize("name", ["prompt_len", "Prompt_Lens", "offset", "weights", "phase"])
def test_an_array_that_looks_like_one_of_a_record_is_never_passed_over(name, tmp_path):
    with pytest.raises(InputError, match=f"unknown array '{name}', expected routed_experts"):
        converted(tmp_path, routed_experts=routes(5), **{name: np.arange(5)})


# --- shared experts in the last slots ---


@pytest.mark.parametrize("kind", ["from E on", "-1", "255"])
def test_shared_experts_in_the_last_slots_are_left_out(kind, tmp_path):
    real = routes(20, 26, 6, 64)
    last = {"from E on": [64, 65], "-1": [-1, -1], "255": [255, 255]}[kind]
    stored = np.concatenate([real, np.broadcast_to(np.array(last), (20, 26, 2))], axis=2)
    stored = stored.astype(np.uint8 if kind == "255" else np.int32)
    stored[18:] = 0  # padding after the real rows
    for model in ("deepseek-v2-lite", None):
        given = Given(model=model, layers="1-26")
        trace = converted(tmp_path, given=given, routed_experts=stored, n_experts=None, layer_ids=None)
        np.testing.assert_array_equal(trace.experts, real[:18])
        assert trace.meta["model"] == {"name": "deepseek-v2-lite", "experts": 64, "top_k": 6}
        assert f"the last 2 slots hold {last[0]}, {last[1]} in every route, as shared experts" in notes(trace)
    whole = np.concatenate([np.zeros_like(stored[:, :1]), stored], axis=1)  # with the dense layer that a buffer holds
    given = Given(model="deepseek-v2-lite", layers="1-26")
    trace = converted(tmp_path, given=given, routed_experts=whole, n_experts=None, layer_ids=None)
    np.testing.assert_array_equal(trace.experts, real[:18])


def test_a_last_slot_with_a_routed_expert_stays(tmp_path):
    ids = routes(20, 3, 2, 7)
    ids[..., 1], ids[..., 0] = 7, np.minimum(ids[..., 0], 6)
    assert converted(tmp_path, routed_experts=ids).top_k == 2  # a collapse, whose id is one of the 8 experts
    ids[0, 0, 1] = 5 if ids[0, 0, 0] != 5 else 4
    assert converted(tmp_path, routed_experts=ids).top_k == 2


def test_more_slots_than_experts_are_refused_though_none_hides_them(tmp_path, capsys):
    ids = np.full((5, 2, 6), -1)
    ids[..., :2] = routes(5, 2, 2, 4)
    ids[0, 0, 2:] = [-1, -1, -1, min(set(range(4)).difference(ids[0, 0, :2]))]
    with pytest.raises(InputError, match=r"meta\.model\.top_k: 6 experts of 4, expected at most all"):
        converted(tmp_path, routed_experts=ids, n_experts=np.int64(4))
    arrays = stored(make_trace(ids, n_experts=8))
    arrays["meta"] = np.array(str(arrays["meta"]).replace('"experts": 8', '"experts": 4'))
    np.savez(tmp_path / "t.npz", **arrays)
    assert main(["info", str(tmp_path / "t.npz")]) == 2
    assert "meta.model.top_k: 6 experts of 4" in capsys.readouterr().err


# --- forms that are not read yet ---


def test_left_padding_is_dropped_and_said(tmp_path):
    padded = np.zeros((2, 7, 2, 2), np.int16)
    padded[0, 2:6], padded[1, 1:6] = routes(4), routes(5, seed=1)
    trace = converted(tmp_path, routed_experts=padded)
    np.testing.assert_array_equal(trace.experts, np.concatenate([routes(4), routes(5, seed=1)]))
    assert "3 filler rows before the first real one" in notes(trace) and "2 filler rows at the end" in notes(trace)


def test_flat_routes_are_called_so(tmp_path):
    ids = routes(6, 48, 8, 128)
    more = {"n_experts": None, "layer_ids": None}
    for given in (Given(model="qwen3-30b-a3b"), Given()):
        with pytest.raises(InputError, match=r"48 layers x 8 slots in one axis.*reshape it to \(6, 48, 8\)"):
            converted(tmp_path, given=given, routed_experts=ids.reshape(6, -1), **more)
        with pytest.raises(InputError, match=r"a flat buffer of 2304 ids, expected \(rows, "):
            converted(tmp_path, given=given, routed_experts=ids.reshape(-1), **more)


def archive_of(**members: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return written.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"experts": [[1]]}).encode(), "JSON"),
        (base64.b64encode(routes(4).tobytes()), "base64 text, as an engine answers"),
        (pickle.dumps({"routes": [1]}), "a pickle, as .pt and .pkl files are; pickles are never read"),
        (archive_of(**{"trace/data.pkl": b"", "trace/data/0": b"1"}), "a PyTorch file (.pt)"),
        (archive_of(), "an empty archive"),
        (b"", "an empty file"),
    ],
)
def test_files_of_other_kinds_are_named_for_what_they_are(content, words, tmp_path, capsys):
    (tmp_path / "x.npz").write_bytes(content)
    for command in (["convert", str(tmp_path / "x.npz"), "-o", "o.npz"], ["info", str(tmp_path / "x.npz")]):
        assert main(command) == 2
        line = capsys.readouterr().err
        assert words in line and line.count("\n") == 1


def test_routes_as_base64_texts_in_an_archive_are_called_so(tmp_path):
    texts = np.array([base64.b64encode(routes(4).tobytes()).decode()])
    np.savez(tmp_path / "x.npz", routed_experts=texts)
    with pytest.raises(InputError, match="texts, such as the base64 of an engine's answer"):
        convert_file(tmp_path / "x.npz", tmp_path / "o.npz", given=Given(model="toy"))


# --- turns of a conversation ---


def test_answers_of_earlier_turns_that_become_prefill_are_said(tmp_path):
    more = {"conversation": np.zeros(2, int), "prompt_lens": np.array([4, 8])}
    trace = converted(tmp_path, routed_experts=routes(10), offsets=np.array([0, 6, 10]), start=np.array([0, 6]), **more)
    assert trace.phase.tolist() == [0] * 8 + [1] * 2
    assert "2 rows that earlier turns generated count as prefill" in notes(trace)
    ids = routes(10)
    trace = converted(tmp_path, routed_experts=np.concatenate([ids[:6], ids]), offsets=np.array([0, 6, 16]), **more)
    assert "2 rows that earlier turns generated count as prefill" in notes(trace)


def test_a_single_row_that_two_turns_share_must_agree(tmp_path):
    ids = routes(10)
    more = {"conversation": np.zeros(2, int), "start": np.array([0, 5]), "offsets": np.array([0, 6, 11])}
    same = converted(tmp_path, routed_experts=np.concatenate([ids[:6], ids[5:]]), **more)
    np.testing.assert_array_equal(same.experts, ids)
    other = np.concatenate([ids[:5], routes(1, seed=5), ids[5:]])
    with pytest.raises(InputError, match="positions 5 to 5 overlap the turn before and agree in 0% of routes"):
        converted(tmp_path, routed_experts=other, **more)
    # Where as many tokens as rows show that the last one was sampled and not run, its row is no route.
    told = converted(tmp_path, routed_experts=other, token_ids=np.array([*range(6), *range(5, 10)]), **more)
    np.testing.assert_array_equal(told.experts, ids)
