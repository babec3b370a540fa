"""Records as engines write them, small and of known routes: 5 layers x 16 experts, top 4, of a model in a config.json.

Each builder writes into a folder and returns what convert is given; `TRUTH` is what must come back.

Builders do without the engines' packages. These forms were built once by the engines' own classes too, and came back
exactly: vLLM 0.33.0 (`CompletionOutput`, the answers of both HTTP APIs), SGLang 0.5.23 (the recorder's gatherer and
accumulator, the answer with `SglExt`), verl 0.9.1 (`AgentLoopWorker`'s padding), moe-policylang 1.15.0
(`TraceRecording`). Megatron's is after its source, whose release 0.16.1 has no tracer yet. The others are after their
documentation or published files: vLLM 0.21, SGLang's other types, TensorRT-LLM, Dynamo, slime, FLAME-MoE, BigMoeOnEdge,
ESFT, gpt-oss.
"""

import base64
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.records import routes
from traces.convert.kinds import Given

CONFIG = {
    "model_type": "mixtral", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 32,
    "num_local_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100,
}  # fmt: skip
LENGTHS = ((6, 4), (3, 5), (5, 2))
"""Prompt tokens and sampled tokens of three requests; the last sampled one is not run."""
TRUTH = [routes(n + m - 1, 5, 4, 16, seed=n) for n, m in LENGTHS]
TOKENS = [np.random.default_rng(n).integers(0, 100, n + m) for n, m in LENGTHS]


def given(folder: Path) -> Given:
    """The model that the records are of, as a person names it."""
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "config.json").write_text(json.dumps(CONFIG))
    return Given(model=str(folder / "config"))


def npy(array: np.ndarray) -> str:
    """An array as vLLM encodes it."""
    written = io.BytesIO()
    np.save(written, array, allow_pickle=False)
    return base64.b64encode(written.getvalue()).decode()


def bare(array: np.ndarray) -> str:
    """An array as SGLang encodes it."""
    return base64.b64encode(array.tobytes()).decode()


def usage(i: int) -> dict[str, int]:
    return {"prompt_tokens": LENGTHS[i][0], "completion_tokens": LENGTHS[i][1]}


def ids(i: int) -> dict[str, list[int]]:
    n = LENGTHS[i][0]
    return {"prompt_token_ids": TOKENS[i][:n].tolist(), "token_ids": TOKENS[i][n:].tolist()}


def vllm_chat(i: int) -> dict[str, Any]:
    """vLLM from 0.22 on, /v1/chat/completions with return_token_ids."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
    choice |= {"token_ids": ids(i)["token_ids"], "routed_experts": npy(TRUTH[i].astype(np.uint8))}
    return {
        "id": f"chatcmpl-{i}", "object": "chat.completion", "choices": [choice], "usage": usage(i),
        "prompt_token_ids": ids(i)["prompt_token_ids"],
    }  # fmt: skip


def vllm_old(i: int) -> dict[str, Any]:
    """vLLM 0.21, /v1/completions: lists, the prompt's apart."""
    n = LENGTHS[i][0]
    choice = {"index": 0, "text": "x", **ids(i), "routed_experts": TRUTH[i][n:].tolist()}
    return {"object": "text_completion", "choices": [choice], "prompt_routed_experts": TRUTH[i][:n].tolist()}


def vllm_object(i: int) -> dict[str, Any]:
    """``RequestOutput`` of vLLM or TensorRT-LLM, as JSON."""
    output = {"index": 0, "text": "x", "token_ids": ids(i)["token_ids"], "routed_experts": TRUTH[i].tolist()}
    return {"request_id": str(i), "prompt_token_ids": ids(i)["prompt_token_ids"], "outputs": [output]}


def sglang(dtype: str) -> Callable[[int], dict[str, Any]]:
    """SGLang's own API, with its ids in ``dtype``."""

    def answer(i: int) -> dict[str, Any]:
        info = usage(i) | {"id": str(i), "routed_experts": bare(TRUTH[i].astype(dtype))}
        said = {} if dtype in ("int32", "int64") else {"routed_experts_dtype": dtype}
        return {"text": "x", "output_ids": ids(i)["token_ids"], "meta_info": info | said}

    return lambda i: {"request": {"input_ids": ids(i)["prompt_token_ids"]}, "response": answer(i)}


def sglang_openai(i: int) -> dict[str, Any]:
    """SGLang's /v1/completions."""
    choice = {"index": 0, "text": "x", "token_ids": ids(i)["token_ids"]}
    extension = {"routed_experts": bare(TRUTH[i].astype(np.int32)), "input_ids": ids(i)["prompt_token_ids"]}
    return {"choices": [choice], "usage": usage(i), "sglext": extension}


def dynamo(i: int) -> dict[str, Any]:
    """Dynamo's envelope."""
    array = TRUTH[i].astype(np.uint8)
    envelope = {"data": bare(array), "shape": list(array.shape), "start": 0, "dtype": "uint8"}
    choice = {"index": 0, "message": {"content": "x"}, "token_ids": ids(i)["token_ids"]}
    extension = {"engine_data": {"routed_experts": envelope}}
    return {"choices": [choice], "usage": usage(i), "nvext": extension, "prompt_token_ids": ids(i)["prompt_token_ids"]}


def batch(i: int) -> dict[str, Any]:
    """A line of an OpenAI batch's results."""
    response = {"status_code": 200, "request_id": str(i), "body": vllm_chat(i)}
    return {"id": str(i), "custom_id": f"request-{i}", "response": response, "error": None}


def _answers(answer: Callable[[int], dict[str, Any]], style: str) -> Callable[[Path], list[Path]]:
    def build(folder: Path) -> list[Path]:
        values = [answer(i) for i in range(3)]
        if style == "folder":
            (folder / "answers").mkdir()
            for i, value in enumerate(values):
                (folder / "answers" / f"{i}.json").write_text(json.dumps(value, indent=1))
            return [folder / "answers"]
        lines = "".join(json.dumps(value) + "\n" for value in values)
        (folder / "a.json").write_text(json.dumps(values) if style == "list" else lines)
        return [folder / "a.json"]

    return build


def serving(folder: Path) -> list[Path]:
    rows = [len(one) for one in TRUTH]
    np.savez(
        folder / "a.npz", routed_experts=np.concatenate(TRUTH).astype(np.uint8), offsets=np.cumsum([0, *rows]),
        prompt_lens=np.array([n for n, _ in LENGTHS]), token_ids=np.concatenate(TOKENS),
    )  # fmt: skip
    return [folder / "a.npz"]


def recorder(folder: Path, *, moved: bool = False, ranks: int = 1) -> list[Path]:
    """SGLang's recorder: two prompts in one pass, decoding, a third prompt, decoding of all that still run."""
    import torch

    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(16) if moved else np.arange(16) for _ in range(5)])
    back = np.argsort(table, axis=1)
    left = {i: LENGTHS[i][1] - 1 for i in range(3)}
    at = {i: LENGTHS[i][0] for i in range(3)}
    passes: list[dict[str, Any]] = []

    def run(mode: int, parts: list[tuple[int, int, int]]) -> None:
        ids = np.concatenate([TRUTH[i][a:b] for i, a, b in parts]).astype(np.int32)
        physical = np.take_along_axis(back[None], ids.reshape(len(ids), 5, 4).astype(int), axis=2)
        stored = torch.full((5, len(ids), 8), -1, dtype=torch.int32)
        stored[:, :, :4] = torch.from_numpy(physical.swapaxes(0, 1).astype(np.int32))
        passes.append(
            {
                "forward_pass_id": len(passes), "rank": 0, "gatherer_key": "primary", "forward_mode": mode,
                "input_ids": np.concatenate([TOKENS[i][a:b] for i, a, b in parts]).tolist(),
                "positions": np.concatenate([np.arange(a, b) for _, a, b in parts]).tolist(),
                "extend_seq_lens": [b - a for _, a, b in parts] if mode == 1 else None, "topk_ids_of_layer": stored,
                "misc_objects": [], "global_physical_count": torch.zeros(5, 16, dtype=torch.int32),
            }
        )  # fmt: skip

    def decode(some: list[int]) -> None:
        if some := [i for i in some if left[i]]:
            run(2, [(i, at[i], at[i] + 1) for i in some])
            for i in some:
                at[i], left[i] = at[i] + 1, left[i] - 1

    run(1, [(0, 0, 6), (1, 0, 3)])
    decode([0, 1])
    run(1, [(2, 0, 5)])
    for _ in range(4):
        decode([0, 1, 2])
    paths = []
    for rank in range(ranks):
        paths.append(folder / f"expert_distribution_recorder_17.5_{rank}.pt")
        records = [one | {"rank": rank} for one in passes]
        torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(table)}, paths[-1])
    return paths


def verl(folder: Path, *, archive: bool = False) -> list[Path]:
    """verl's batch: prompts padded on the left to 8, responses on the right to 6."""
    batch = {
        "routed_experts": np.zeros((3, 14, 5, 4), np.int16), "attention_mask": np.zeros((3, 14), np.int64),
        "input_ids": np.zeros((3, 14), np.int64), "prompts": np.zeros((3, 8), np.int64),
        "responses": np.zeros((3, 6), np.int64),
    }  # fmt: skip
    for i, (n, m) in enumerate(LENGTHS):
        batch["routed_experts"][i, 8 - n : 8 + m - 1] = TRUTH[i]
        batch["attention_mask"][i, 8 - n : 8 + m] = 1
        batch["input_ids"][i, 8 - n : 8 + m] = TOKENS[i]
    batch["prompts"], batch["responses"] = batch["input_ids"][:, :8], batch["input_ids"][:, 8:]
    if archive:
        np.savez(folder / "batch.npz", **batch)
        return [folder / "batch.npz"]
    import torch

    torch.save({name: torch.from_numpy(np.array(array)) for name, array in batch.items()}, folder / "batch.pt")
    return [folder / "batch.pt"]


def slime(folder: Path) -> list[Path]:
    import torch

    samples = [
        {
            "index": i, "prompt": "x", "tokens": TOKENS[i].tolist(), "response_length": LENGTHS[i][1],
            "rollout_routed_experts": TRUTH[i].astype(np.int32), "status": "completed", "metadata": {},
        }
        for i in range(3)
    ]  # fmt: skip
    torch.save({"rollout_id": 0, "samples": samples}, folder / "0.pt")
    return [folder / "0.pt"]


def megatron(folder: Path, *, beside: bool = True) -> list[Path]:
    """Megatron's router trace of one request after another, with logits that choose the routes and hidden states."""
    place = folder / "trace"
    place.mkdir()
    rng, step = np.random.default_rng(3), 0
    with (
        (place / "router_trace_rank0.jsonl").open("w") as lines,
        (place / "logits_rank0.bin").open("wb") as logits, (place / "hidden_states_rank0.bin").open("wb") as states,
    ):  # fmt: skip
        for (n, _), ids in zip(LENGTHS, TRUTH, strict=True):
            for part in (ids[:n], *(ids[i : i + 1] for i in range(n, len(ids)))):
                for layer in range(5):
                    record = {
                        "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0,
                        "num_tokens": len(part), "topk": 4, "top_indices": np.sort(part[:, layer], axis=1).tolist(),
                    }  # fmt: skip
                    if beside:
                        wanted = rng.normal(-4, 0.1, (len(part), 16))
                        np.put_along_axis(wanted, part[:, layer].astype(int), [[4.0, 3.0, 2.0, 1.0]], axis=1)
                        record |= _sidecar(logits, "logit", wanted)
                        record |= _sidecar(states, "hs", rng.normal(size=(len(part), 32)))
                    lines.write(json.dumps(record) + "\n")
                step += 1
    return [place]


def _sidecar(file: io.BufferedWriter, key: str, values: np.ndarray) -> dict[str, Any]:
    """Write values as bfloat16, and what the record says of them."""
    offset = file.tell()
    data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    file.write(data)
    return {f"{key}_offset": offset, f"{key}_bytes": len(data), f"{key}_shape": list(values.shape)}


def flame(folder: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = folder / "flame-moe-290m" / "actives" / "iter_5473"
    place.mkdir(parents=True)
    (folder / "flame-moe-290m" / "samples").mkdir()
    for layer in range(5):
        ids = TRUTH[0][:, layer]
        scores = pa.array(np.full(ids.shape, 0.25, np.float16).tolist(), pa.list_(pa.float16()))
        table = pa.table({"scores": scores, "indices": pa.array(ids.tolist(), pa.list_(pa.int16()))})
        pq.write_table(table, place / f"layer_{layer + 1:02d}.parquet")
    tokens = pa.table({"token_id": pa.array(TOKENS[0][:9].tolist(), pa.int32())})
    pq.write_table(tokens, folder / "flame-moe-290m" / "samples" / "000.parquet")
    return [place]


def _policylang_rows() -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": i, "token_idx": token, "layer_idx": layer, "selected_experts": TRUTH[i][token, layer].tolist(),
            "router_scores": [0.4, 0.3, 0.2, 0.1], "token_id": int(TOKENS[i][token]),
            "phase": "prefill" if token < LENGTHS[i][0] else "decode", "domain_tag": "code",
        }
        for i in range(3)
        for layer in range(5)
        for token in range(len(TRUTH[i]))
    ]  # fmt: skip


def policylang_parquet(folder: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = _policylang_rows()
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), folder / "t.parquet")
    return [folder / "t.parquet"]


def policylang_lines(folder: Path) -> list[Path]:
    short = dict(zip(_policylang_rows()[0], ("p", "t", "l", "e", "s", "ti", "ph", "dm"), strict=True))
    header = {"model_name": "x", "num_layers": 5, "num_experts": 16, "top_k": 4, "num_entries": 1}
    rows = [{short[name]: value for name, value in row.items()} for row in _policylang_rows()]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    return [folder / "t.jsonl"]


def edge(folder: Path) -> list[Path]:
    with (folder / "trace.csv").open("w", newline="") as text:
        text.write("# model=x.gguf arch=qwen3moe n_layer=5 n_expert=16 n_expert_used=4\n")
        text.writelines(f"# layer={layer} expert_bytes=1000 dense_bytes=5\n" for layer in range(5))
        table = csv.writer(text)
        table.writerow(("turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes"))
        for turn, (n, _) in enumerate(LENGTHS):
            for row, layer, slot in np.ndindex(TRUTH[turn].shape):
                step = row if row < n else row - n
                expert = TRUTH[turn][row, layer, slot]
                table.writerow((turn, int(row >= n), step, layer, slot, expert, 0.25, 0, 1000))
    return [folder / "trace.csv"]


def esft_text(folder: Path) -> list[Path]:
    place = folder / "law"
    place.mkdir()
    for layer in range(5):
        with (place / f"expert_weights_{layer}.txt").open("w") as text:
            for ids in TRUTH:
                weights = "\t".join(["0.25"] * ids[:, layer].size)
                text.write("\t".join(map(str, ids[:, layer].ravel())) + "\t\t" + weights + "\n")
    return [place]


def gpt_oss_examples(folder: Path) -> list[Path]:
    values = [
        {
            "row_index": i, "dataset": "gpqa", "category": "law", "router_data": [
                {
                    f"token_{100 + row}": {
                        f"layer_{layer}": {"selected_experts": route.tolist(), "selected_probs": [0.4, 0.3, 0.2, 0.1]}
                        for layer, route in enumerate(ids[row])
                    }
                    for row in range(len(ids))
                }
            ],
        }
        for i, ids in enumerate(TRUTH)
    ]  # fmt: skip
    (folder / "True_False_examples.json").write_text(json.dumps(values, indent=2))
    return [folder / "True_False_examples.json"]


BUILDERS: dict[str, Callable[[Path], list[Path]]] = {
    "vllm chat": _answers(vllm_chat, "lines"), "vllm old": _answers(vllm_old, "list"),
    "vllm object": _answers(vllm_object, "folder"), "tensorrt-llm": _answers(vllm_object, "list"),
    "sglang int32": _answers(sglang("int32"), "lines"),
    "sglang uint16": _answers(sglang("uint16"), "list"), "sglang uint8": _answers(sglang("uint8"), "folder"),
    "sglang int64": _answers(sglang("int64"), "lines"), "sglang uint64": _answers(sglang("uint64"), "lines"),
    "sglang openai": _answers(sglang_openai, "lines"), "dynamo": _answers(dynamo, "folder"),
    "openai batch": _answers(batch, "lines"), "serving": serving, "sglang recorder": recorder,
    "sglang recorder, moved": lambda folder: recorder(folder, moved=True),
    "sglang recorder, ranks": lambda folder: recorder(folder, ranks=2), "verl": verl,
    "verl archive": lambda folder: verl(folder, archive=True), "slime": slime, "megatron": megatron,
    "megatron, routes alone": lambda folder: megatron(folder, beside=False), "flame": flame,
    "policylang parquet": policylang_parquet, "policylang lines": policylang_lines, "edge": edge,
    "esft text": esft_text, "gpt-oss examples": gpt_oss_examples,
}  # fmt: skip
