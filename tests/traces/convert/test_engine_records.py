"""Every form that an engine writes comes back as it was, and damaged it is refused in a line."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from tests.support.engine_records import (
    BUILDERS,
    LENGTHS,
    TOKENS,
    TRUTH,
    dynamo,
    given,
    megatron,
    npy,
    recorder,
    sglang_openai,
    vllm_chat,
)
from tests.support.records import notes
from traces.convert.json_values import json_values
from traces.convert.kinds import convert_files
from traces.convert.torch_file import read_torch
from traces.trace import Trace

UNORDERED = {"megatron, routes alone"}  # which has no logits to order a route's experts by
NO_TOKENS = {"edge", "esft text", "gpt-oss examples", "megatron", "megatron, routes alone"}
ALL_DECODE = {"flame", "esft text", "gpt-oss examples"}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_record_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    paths = BUILDERS[name](tmp_path)
    convert_files(paths, tmp_path / "o.npz", given=given(tmp_path))
    trace = Trace.load(tmp_path / "o.npz")
    truth = TRUTH[:1] if name == "flame" else sorted(TRUTH, key=len) if "recorder" in name else TRUTH
    order = [next(i for i in range(3) if TRUTH[i] is one) for one in truth]
    found = [trace.experts[trace.sequence == s] for s in range(trace.n_sequences)]
    if "recorder" in name:  # requests come in the order in which they end
        order = [next(i for i in range(3) if TRUTH[i].shape == one.shape) for one in found]
        truth = [TRUTH[i] for i in order]
    assert len(found) == len(truth)
    for s, (one, true, i) in enumerate(zip(found, truth, order, strict=True)):
        np.testing.assert_array_equal(one, np.sort(true, axis=2) if name in UNORDERED else true)
        mine = trace.sequence == s
        prefill = 0 if name in ALL_DECODE else LENGTHS[i][0]
        assert (trace.phase[mine] == 0).sum() == prefill
        if name not in NO_TOKENS:
            np.testing.assert_array_equal(trace.token[mine], TOKENS[i][: len(one)])
    assert trace.layers.tolist() == list(range(5)) and trace.n_experts == 16 and "as many rows as" not in notes(trace)
    assert trace.meta["converted"]["kind"] and len(trace.meta["converted"]["sha256"]) == 64


def test_answers_with_their_requests_have_domains_and_conversations(tmp_path: Path) -> None:
    rows = [{"response": dynamo(i), "domain": ("law", "code", "law")[i], "conversation": f"c{i}"} for i in range(3)]
    rows.insert(1, {"response": {"error": {"message": "overloaded"}}, "domain": "law"})
    rows.insert(0, {"id": "0", "custom_id": "0", "response": None, "error": {"message": "overloaded"}})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = convert_files([tmp_path / "a.jsonl"], tmp_path / "o.npz", given=given(tmp_path))
    assert trace.domain.tolist() == ["law", "code", "law"]
    assert "2 answers are errors without routes" in notes(trace)


def test_several_texts_of_one_answer_are_several_sequences(tmp_path: Path) -> None:
    answer = vllm_chat(0)
    answer["choices"] += [answer["choices"][0] | {"index": 1}]
    (tmp_path / "a.json").write_text(json.dumps(answer))
    assert convert_files([tmp_path / "a.json"], tmp_path / "o.npz", given=given(tmp_path)).n_sequences == 2
    shared = sglang_openai(0)
    shared["choices"] *= 2
    (tmp_path / "a.json").write_text(json.dumps(shared))
    with pytest.raises(InputError, match="answer 0, choice 0: the routes of one of 2 choices, expected n = 1"):
        convert_files([tmp_path / "a.json"], tmp_path / "o.npz", given=given(tmp_path))


def test_rows_that_a_request_did_not_ask_for_move_the_positions(tmp_path: Path) -> None:
    answer = vllm_chat(0)
    answer["choices"][0]["routed_experts"] = npy(TRUTH[0][2:].astype(np.uint8))
    exchange = {"request": {"routed_experts_prompt_start": 2}, "response": answer}
    (tmp_path / "a.json").write_text(json.dumps(exchange))
    trace = convert_files([tmp_path / "a.json"], tmp_path / "o.npz", given=given(tmp_path))
    assert trace.position[0] == 2 and (trace.phase == 0).sum() == 4
    assert "1 sequences begin after position 0" in notes(trace)
    np.testing.assert_array_equal(trace.token, TOKENS[0][2:9])


def test_records_of_several_forms_and_files_of_none(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "a.json").write_text(json.dumps(vllm_chat(0)))
    (tmp_path / "all" / "readme.txt").write_text("answers of monday")
    trace = convert_files([tmp_path / "all"], tmp_path / "o.npz", given=given(tmp_path))
    assert "files of no known form were passed over: readme.txt" in notes(trace)
    (tmp_path / "all" / "b.json").write_text('{"choices": [')
    with pytest.raises(InputError, match=r"all.b\.json: value 0: not JSON .*: was the file cut off"):
        convert_files([tmp_path / "all"], tmp_path / "o.npz", given=given(tmp_path))
    (tmp_path / "all" / "b.json").unlink()
    np.savez(tmp_path / "all" / "b.npz", routed_experts=TRUTH[0])
    with pytest.raises(InputError, match=r"several forms: a.json \(answers\), b.npz \(serving\), expected one form"):
        convert_files([tmp_path / "all"], tmp_path / "o.npz", given=given(tmp_path))


# --- what SGLang's recorder lacks ---


def _passes(tmp_path: Path, change: Any) -> list[Path]:
    import torch

    (path,) = recorder(tmp_path)
    held = torch.load(path, weights_only=True)
    change(held["records"])
    torch.save(held, path)
    return [path]


def _at_one_place(records: list[dict[str, Any]]) -> None:
    """Two requests of equal length decode together, and one of them ends."""
    first, decode = records[0], records[1]
    first |= {"positions": [*range(4), *range(5)], "extend_seq_lens": [4, 5]}
    decode |= {
        "positions": [5],
        "input_ids": decode["input_ids"][:1],
        "topk_ids_of_layer": decode["topk_ids_of_layer"][:, :1],
    }
    first |= {"positions": [*range(4), *range(4), 0], "extend_seq_lens": [4, 4, 1]}
    decode["positions"] = [4]
    del records[2:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_at_one_place, "request ids are missing, by which they could be told apart: record one request at a time"),
        (lambda records: records.pop(0), "no running request is at position 6; a pass is missing"),
        (
            lambda records: records[0].update(positions=[*range(2, 8), *range(3)]),
            "begins at position 2: the rows before",
        ),
        (lambda records: records[1].update(forward_mode=5), "rows of drafts that were rejected cannot be told"),
        (lambda records: records[1].update(input_ids=[1]), "1 tokens, \\(2,\\) positions|routes"),
        (
            lambda records: [one.pop("topk_ids_of_layer") for one in records],
            "mode per_pass, which has counts of experts",
        ),
    ],
)
def test_what_the_recorder_does_not_tell_is_said(change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        convert_files(_passes(tmp_path, change), tmp_path / "o.npz", given=given(tmp_path))


def test_a_prompt_that_comes_in_pieces_between_other_requests_is_one(tmp_path: Path) -> None:
    def cut(records: list[dict[str, Any]]) -> None:
        """The third prompt, of 5 tokens, comes in two passes with a decode pass of the others between them."""
        extend = next(one for one in records[1:] if one["forward_mode"] == 1)
        parts = []
        for rows in (slice(0, 2), slice(2, 5)):
            part = extend | {"extend_seq_lens": [rows.stop - rows.start]}
            part |= {name: extend[name][rows] for name in ("input_ids", "positions")}
            parts.append(part | {"topk_ids_of_layer": extend["topk_ids_of_layer"][:, rows]})
        records[:] = [records[0], parts[0], records[1], parts[1], *records[3:]]
        for number, one in enumerate(records):
            one["forward_pass_id"] = number

    trace = convert_files(_passes(tmp_path, cut), tmp_path / "o.npz", given=given(tmp_path))
    found = [trace.experts[trace.sequence == s] for s in range(trace.n_sequences)]
    assert {one.tobytes() for one in found} == {one.tobytes() for one in TRUTH}


def test_ranks_that_saw_other_tokens_add_their_requests(tmp_path: Path) -> None:
    import torch

    one, two = recorder(tmp_path, ranks=2)
    held = torch.load(two, weights_only=True)
    for record in held["records"]:
        record["input_ids"] = [token + 1 for token in record["input_ids"]]
    torch.save(held, two)
    assert convert_files([one, two], tmp_path / "o.npz", given=given(tmp_path)).n_sequences == 6


def _changed(path: Path, change: Any) -> None:
    import torch

    held = torch.load(path, weights_only=True)
    change(held["records"])
    torch.save(held, path)


@pytest.mark.parametrize("kept", [slice(0, 3), slice(3, None), slice(0, 0)])
def test_a_rank_that_has_a_part_of_anothers_passes_counts_once(kept: slice, tmp_path: Path) -> None:
    one, two = recorder(tmp_path, ranks=2)
    _changed(two, lambda records: records.__setitem__(slice(None), records[kept] or records[:1]))
    for paths in ([one, two], [two, one]):
        trace = convert_files(paths, tmp_path / "o.npz", given=given(tmp_path))
        found = [trace.experts[trace.sequence == s].tobytes() for s in range(trace.n_sequences)]
        assert sorted(found) == sorted(true.tobytes() for true in TRUTH)
        assert "2 ranks recorded 1 streams of passes" in notes(trace)
        assert "1 ranks lack passes that others have" in notes(trace)


def test_ranks_that_each_lack_passes_of_the_other_are_joined(tmp_path: Path) -> None:
    one, two = recorder(tmp_path, ranks=2)
    _changed(one, lambda records: records.__delitem__(slice(-2, None)))
    _changed(two, lambda records: records.__delitem__(slice(0, 2)))
    trace = convert_files([one, two], tmp_path / "o.npz", given=given(tmp_path))
    assert trace.n_sequences == 3 and trace.n_rows == sum(map(len, TRUTH))


def test_a_file_that_is_given_twice_counts_once_and_another_recording_of_the_rank_is_refused(tmp_path: Path) -> None:
    (one,) = recorder(tmp_path)
    two = tmp_path / "again.pt"
    two.write_bytes(one.read_bytes())
    assert convert_files([one, two], tmp_path / "o.npz", given=given(tmp_path)).n_sequences == 3
    _changed(two, lambda records: records[2].update(input_ids=[7] * len(records[2]["input_ids"])))
    with pytest.raises(InputError, match="rank 0: pass 2 is there twice, with other tokens or experts"):
        convert_files([one, two], tmp_path / "o.npz", given=given(tmp_path))


# --- Megatron's sidecars ---


def test_logits_and_hidden_states_become_probabilities_and_embeddings(tmp_path: Path) -> None:
    trace = convert_files(megatron(tmp_path), tmp_path / "o.npz", given=given(tmp_path))
    assert trace.probs is not None and trace.embeddings is not None and trace.prefill_embeddings is not None
    assert (np.take_along_axis(trace.probs, trace.experts.astype(int), axis=2)[..., 0] > 127).all()
    assert trace.embeddings.shape[:2] == (8, 6) and len(trace.prefill_embeddings) == 14
    assert (trace.embeddings[:, 0] == 0).all() and "level 0 of the embeddings is zero" in notes(trace)


def test_experts_that_the_logits_contradict_are_said(tmp_path: Path) -> None:
    (place,) = megatron(tmp_path)
    path = place / "router_trace_rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    taken = lines[0]["top_indices"][0]
    lines[0]["top_indices"][0] = [*taken[:3], min(set(range(16)).difference(taken))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = convert_files([place], tmp_path / "o.npz", given=given(tmp_path))
    assert "1 of 110 routes do not hold the experts of the largest logits" in notes(trace)


def test_sidecars_are_read_one_record_after_another(tmp_path: Path) -> None:
    (place,) = megatron(tmp_path)
    path = place / "router_trace_rank0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["hs_offset"] -= 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InputError, match=r"record 2: hs_offset 704, expected 768, where the record before ends"):
        convert_files([place], tmp_path / "o.npz", given=given(tmp_path))


def test_stages_of_a_pipeline_are_joined(tmp_path: Path) -> None:
    (place,) = megatron(tmp_path, beside=False)
    lines = [json.loads(line) for line in (place / "router_trace_rank0.jsonl").read_text().splitlines()]
    for rank, layers in enumerate(((0, 1), (2, 3, 4))):
        mine = [json.dumps(line | {"rank": rank}) + "\n" for line in lines if line["layer"] in layers]
        (place / f"router_trace_rank{rank}.jsonl").write_text("".join(mine))
    trace = convert_files([place], tmp_path / "o.npz", given=given(tmp_path))
    np.testing.assert_array_equal(trace.experts, np.sort(np.concatenate(TRUTH), axis=2))
    assert "2 ranks are 1 streams of tokens" in notes(trace)


# --- files of PyTorch ---


def test_a_pytorch_file_runs_nothing_and_objects_are_named(tmp_path: Path) -> None:
    import torch

    class Ends:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"samples": [Ends()], "rollout_id": 1}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"holds posix\.system, expected tensors, arrays and plain") as error:
        convert_files([tmp_path / "x.pt"], tmp_path / "o.npz", given=given(tmp_path))
    assert str(error.value).count("x.pt") == 1
    assert not (tmp_path / "ran").exists()


def test_tensors_of_every_kind_are_read(tmp_path: Path) -> None:
    import torch

    held = {
        "whole": torch.arange(12).reshape(3, 4), "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "short": torch.tensor([1, 9], dtype=torch.uint16),
        "part": torch.arange(10)[3:7:2], "none": torch.zeros(0, 3), "array": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)), "text": "x", "list": [1, (2, None), {"a": 1}],
        "scalar": np.float32(3), "long": np.arange(5000.0), "again": np.arange(5000.0),
        "empty": np.zeros((0, 3), np.int16),
    }  # fmt: skip
    torch.save(held, tmp_path / "x.pt")
    read = read_torch(tmp_path / "x.pt")
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        np.testing.assert_equal(read[name], value)


# --- large records ---


@pytest.mark.parametrize("name", BUILDERS)
def test_reading_and_writing_of_a_large_record_are_shown_to_their_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("traces.convert.kinds._LARGE", 1)
    monkeypatch.setattr("ground.progress._LOG_SECONDS", -1.0)  # a line each time
    convert_files(BUILDERS[name](tmp_path), tmp_path / "o.npz", given=given(tmp_path))
    lines = re.findall(r"^(read|write) .*: (\d+) % after", capsys.readouterr().err, re.MULTILINE)
    for work in ("read", "write"):
        shares = [int(share) for what, share in lines if what == work]
        assert shares == sorted(shares) and len(shares) > 1 and shares[-1] == 100 and min(shares) < 100


def test_arrays_inside_a_pickle_lie_in_a_file(tmp_path: Path) -> None:
    import torch

    torch.save({"samples": [{"ids": np.arange(9000)}, {"ids": np.arange(9000)}]}, tmp_path / "x.pt")
    for sample in read_torch(tmp_path / "x.pt")["samples"]:
        np.testing.assert_array_equal(sample["ids"], np.arange(9000))
        assert isinstance(sample["ids"], np.memmap)


def test_values_larger_than_what_is_read_at_once_are_whole(tmp_path: Path) -> None:
    values = [{"a": "x" * n, "b": [1, {"c": "]},["}]} for n in (3, 3_000_000, 0, 1_100_000)]
    for text in (json.dumps(values), "\n".join(map(json.dumps, values)), " ".join(map(json.dumps, values))):
        assert list(json_values(io.BytesIO(text.encode()))) == values
