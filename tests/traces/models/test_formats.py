"""Bytes of models in other precisions: blocks, presets' mixes, published sizes of files, and files' own headers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.__main__ import main
from sim.machine.cost import Costs
from sim.machine.hardware import Hardware
from traces.models.blocks import BLOCKS, FORMATS, matrix_bytes
from traces.models.configs import read_config
from traces.models.gguf_mixes import Mix
from traces.models.known import builtin_models, model_spec
from traces.models.quantised import PARTS, PRESETS, quantised
from traces.models.released import RELEASED
from traces.models.spec import ModelSpec
from traces.models.weights import Weight, weights_of

gguf = pytest.importorskip("gguf")

# Sizes of files in GB (10^9 bytes) as their pages list them: bartowski/Qwen_Qwen3-30B-A3B-GGUF,
# mradermacher/Qwen3-30B-A3B-abliterated-GGUF (K_S, K_L, rounded up), bartowski/Mixtral-8x22B-v0.1-GGUF,
# bartowski/deepseek-ai_DeepSeek-V3-0324-GGUF, mradermacher/DeepSeek-V2-Lite-GGUF and
# second-state/DeepSeek-V2-Lite-Chat-GGUF, Qwen/Qwen3-Next-80B-A3B-Thinking-GGUF, unsloth/gpt-oss-120b-GGUF.
PUBLISHED = {
    "qwen3-30b-a3b": {
        "bf16": 61.10, "q8_0": 32.48, "q6_k": 25.10, "q5_k_m": 21.74, "q5_k_s": 21.10, "q4_k_m": 18.6, "q4_k_s": 17.6,
        "q3_k_l": 16.0, "q3_k_m": 14.8, "q3_k_s": 13.4, "iq4_xs": 16.6,
    },
    "mixtral-8x22b": {
        "q5_k_m": 99.96, "q5_k_s": 96.97, "q4_k_m": 85.58, "q4_k_s": 80.47, "iq4_xs": 76.35, "q3_k_l": 72.57,
        "q3_k_m": 67.78, "iq3_m": 64.49, "iq3_s": 61.49, "q3_k_s": 61.49, "iq3_xs": 58.22, "q2_k": 52.10,
    },
    "deepseek-v3": {"q8_0": 713.29, "q6_k": 550.80, "q5_k_m": 475.40, "q5_k_s": 461.81, "q4_k_m": 404.43},
    "deepseek-v2-lite": {
        "f16": 31.4, "q8_0": 16.7, "q6_k": 14.1, "q5_k_m": 11.9, "q5_k_s": 11.1, "q5_0": 10.8, "q4_k_m": 10.4,
        "q4_k_s": 9.53, "q4_0": 8.91, "iq4_nl": 8.98, "iq4_xs": 8.65, "q3_k_l": 8.46, "q3_k_m": 8.13, "q3_k_s": 7.49,
        "iq3_m": 7.55, "iq3_s": 7.49, "iq3_xs": 7.12, "q2_k": 6.43,
    },
    "qwen3-next-80b-a3b": {
        "bf16": 159.4, "q8_0": 84.8, "q6_k": 65.5, "q5_k_m": 56.7, "q5_0": 55.0, "q4_k_m": 48.4,
    },
    "gpt-oss-120b": {"mxfp4": 65.37, "mxfp4_moe": 63.38},
}  # fmt: skip


def all_bytes(spec: ModelSpec) -> int:
    return spec.resident_bytes + spec.all_expert_bytes


@pytest.mark.parametrize(("name", "quant"), [(name, quant) for name, sizes in PUBLISHED.items() for quant in sizes])
def test_bytes_are_those_of_published_files_within_a_hundredth(name: str, quant: str) -> None:
    assert all_bytes(quantised(model_spec(name), quant)) / 1e9 == pytest.approx(PUBLISHED[name][quant], rel=0.01)


def test_blocks_are_those_of_the_package_that_reads_and_writes_such_files() -> None:
    theirs = {kind.name.lower(): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for form, (weights, size) in BLOCKS.items():
        assert (weights * theirs[form][1], weights) == (size * theirs[form][0], weights), form


@given(st.sampled_from(FORMATS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 3))
def test_bytes_of_a_matrix(form: str, columns: int, rows: int, times: int) -> None:
    """Whole rows one after another, the more the more columns, and never less than two bits a weight."""
    size = matrix_bytes(form, 256 * columns, 8 * rows)
    assert matrix_bytes(form, 256 * columns + 1, 8 * rows) > size
    assert 1.5 / 8 < size / (256 * columns * 8 * rows) <= 4.05
    if form in BLOCKS:
        assert matrix_bytes(form, 256 * columns, 8 * rows * times) == times * size


def test_scales_beside_the_blocks() -> None:
    assert matrix_bytes("fp8", 256, 129) == 256 * 129 + 4 * 2 * 2
    assert matrix_bytes("int4-awq", 256, 16) == 256 * 16 // 2 + 2 * (2 * 16 + 4 * 2)
    assert matrix_bytes("int4-gptq", 256, 16) == matrix_bytes("int4-awq", 256, 16) + 4 * 256
    assert matrix_bytes("nvfp4", 64, 10) == 360 and matrix_bytes("mxfp4", 64, 10) == 340
    with pytest.raises(InputError, match="format 'q4' is unknown; expected one of f32"):
        matrix_bytes("q4", 1, 1)


models = st.sampled_from(builtin_models()).map(model_spec)


@given(models)
def test_the_matrices_of_a_model_are_all_its_weights(spec: ModelSpec) -> None:
    parts = dict.fromkeys(("experts", "attention", "ffn", "embeddings", "routers"), 0)
    for weight in weights_of(spec):
        parts[weight.part] += weight.matrix.weights
    experts = parts.pop("experts")
    assert sum(parts.values()) + experts * spec.experts == spec.total_parameters
    assert experts == spec.routed_layers * spec.expert_parameters


@given(models, st.sampled_from(["bf16", "f16"]))
def test_two_bytes_everywhere_are_what_config_files_without_quantisation_say(spec: ModelSpec, quant: str) -> None:
    """But for routers and convolutions, which such files keep in four."""
    four = [w.matrix.weights for w in weights_of(spec) if w.matrix.role in ("ffn_gate_inp", "ssm_conv1d")]
    assert all_bytes(quantised(spec, quant)) == 2 * (spec.total_parameters + sum(four))


@given(models, st.sampled_from(PRESETS), st.sampled_from(PARTS), st.sampled_from(["q8_0", "f32", "fp8"]))
def test_a_part_with_its_own_format_changes_that_part_alone(spec: ModelSpec, quant: str, part: str, form: str) -> None:
    plain, other = quantised(spec, quant), quantised(spec, f"{quant}+{part}={form}")
    same = {"experts": plain.expert_bytes == other.expert_bytes}
    assert plain.stored and other.stored
    for name in ("attention", "ffn", "routers"):
        same[name] = getattr(plain.stored, name) == getattr(other.stored, name)
    same["embeddings"] = (plain.stored.embedding, plain.stored.head) == (other.stored.embedding, other.stored.head)
    assert all(equal for name, equal in same.items() if name != part)


@given(models, st.sampled_from(PARTS))
def test_without_a_preset_all_other_parts_stay_as_they_are(spec: ModelSpec, part: str) -> None:
    other = quantised(spec, f"{part}=f32")
    times = spec.experts if part == "experts" else 1
    changed = times * sum(weight.matrix.weights for weight in weights_of(spec) if weight.part == part)
    kept = {
        "experts": spec.all_expert_bytes,
        "attention": sum(map(spec.attention_bytes, range(spec.layers))),
        "ffn": sum(map(spec.ffn_bytes, range(spec.layers))),
        "embeddings": spec.embedding_table_bytes + (0 if spec.tied else spec.head_bytes),
    }[part]
    assert all_bytes(other) == all_bytes(spec) - kept + 4 * changed


def test_fewer_bits_are_never_more_bytes() -> None:
    order = ["f32", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "iq3_m", "iq3_xxs"]
    for name in ("qwen3-30b-a3b", "mixtral-8x7b", "glm-4.5-air", "qwen3-next-80b-a3b", "gemma-4-26b-a4b"):
        sizes = [all_bytes(quantised(model_spec(name), quant)) for quant in order]
        assert sizes == sorted(sizes, reverse=True), name


@pytest.mark.parametrize(
    "quant", ["q4_k_x", "", "q4_k_m+q8_0", "q4_k_m+attention", "experts=q4", "routers=f16", "ffn=f16+ffn=f16", "fp8+"]
)
def test_no_quantisation(quant: str) -> None:
    with pytest.raises(InputError, match=r"--quant .*expected") as error:
        quantised(model_spec("olmoe-1b-7b"), quant)
    assert "\n" not in str(error.value)


# --- costs ---


@given(models, st.integers(1, 50))
def test_two_bytes_a_weight_cost_what_bf16_costs(spec: ModelSpec, rows: int) -> None:
    """Stored sizes take the way of all others through the formula: equal sizes, equal times."""
    experts = (2 * spec.expert_parameters,) * spec.routed_layers
    plain = replace(spec, weight_bytes=2, embedding_bytes=2, expert_bytes=experts)
    parts = "+".join(f"{part}=bf16" for part in PARTS)
    one, other = (Costs(model, Hardware.load("rtx-4090")) for model in (plain, quantised(plain, parts)))
    assert (one.layer_ns(rows, rows) == other.layer_ns(rows, rows)).all()
    assert (one.shared_ns(rows) == other.shared_ns(rows)).all() and (one.head_ns(rows) == other.head_ns(rows)).all()
    assert (one.expert_ns(rows, 0) == other.expert_ns(rows, 0)).all()


@given(models, st.sampled_from(["q8_0", "q4_k_m", "fp8", "awq"]), st.integers(1, 4000))
def test_quantised_weights_never_take_longer(spec: ModelSpec, quant: str, context: int) -> None:
    machine, layers = Hardware.load("rtx-4090").without_loop(), np.arange(spec.routed_layers)
    plain, fewer = Costs(quantised(spec, "bf16"), machine), Costs(quantised(spec, quant), machine)
    assert (fewer.layer_ns(1, context) <= plain.layer_ns(1, context)).all()
    assert (fewer.expert_ns(1, layers) <= plain.expert_ns(1, layers)).all()


# --- files ---


FAMILIES = {
    "qwen3moe": {**RELEASED["qwen3-30b-a3b"], "num_hidden_layers": 9, "hidden_size": 256, "moe_intermediate_size": 256,
                 "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "head_dim": 64},
    "qwen2moe": {**RELEASED["qwen1.5-moe-a2.7b"], "num_hidden_layers": 4, "hidden_size": 256, "num_experts": 6,
                 "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, "vocab_size": 512,
                 "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    "deepseek2": {**RELEASED["deepseek-v3"], "num_hidden_layers": 5, "hidden_size": 512, "n_routed_experts": 4,
                  "moe_intermediate_size": 256, "intermediate_size": 768, "num_experts_per_tok": 2, "vocab_size": 512,
                  "num_attention_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "quantization_config": None},
    "qwen3next": {**RELEASED["qwen3-next-80b-a3b"], "num_hidden_layers": 8, "hidden_size": 256, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
                  "vocab_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 2,
                  "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "gpt-oss": {**RELEASED["gpt-oss-20b"], "num_hidden_layers": 4, "hidden_size": 288, "intermediate_size": 288,
                "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512, "num_attention_heads": 8,
                "num_key_value_heads": 2},
    "gemma4": {**RELEASED["gemma-4-26b-a4b"], "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 256,
               "moe_intermediate_size": 256, "num_experts": 4, "top_k_experts": 2, "vocab_size": 512,
               "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 64,
               "global_head_dim": 128},
}  # fmt: skip


def metadata(family: str, spec: ModelSpec) -> dict[str, object]:
    """What a converter writes of ``spec``, as far as it is read."""
    config = FAMILIES[family]
    found: dict[str, object] = {"block_count": spec.layers, "expert_used_count": spec.top_k}
    found["attention.head_count"] = config["num_attention_heads"]
    if family == "deepseek2":
        found |= {"attention.kv_lora_rank": 256, "attention.q_lora_rank": 256, "rope.dimension_count": 64,
                  "attention.key_length": 320, "attention.key_length_mla": 192, "attention.value_length": 256,
                  "attention.value_length_mla": 128}  # fmt: skip
    if family == "qwen3next":
        found |= {"ssm.conv_kernel": 4, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.time_step_rank": 4,
                  "ssm.inner_size": 256}  # fmt: skip
    if family in ("gpt-oss", "gemma4"):
        found["attention.sliding_window"] = config["sliding_window"]
    if family == "gemma4":
        found["attention.sliding_window_pattern"] = [window > 0 for window in spec.windows]
    return {f"{family}.{key}": value for key, value in found.items()}


def name_of(weight: Weight, gemma: bool) -> str:
    """How llama.cpp calls a matrix."""
    role = weight.matrix.role
    if weight.part == "embeddings":
        return f"{role}.weight"
    if weight.part == "experts":
        role += "_exps"
    elif weight.part == "ffn" and weight.layer in weight_routed and not gemma:
        role += "_shexp"
    return f"blk.{weight.layer}.{role}.weight"


weight_routed: set[int] = set()


def write(path: Path, family: str, spec: ModelSpec, quant: str) -> int:
    """A GGUF file of ``spec`` as ``quant`` has it; returns the bytes of its tensors."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("tiny")
    for key, value in metadata(family, spec).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    mix, total = Mix(quant, spec), 0
    weight_routed.clear()
    weight_routed.update(spec.moe_layers)
    for weight in weights_of(spec):
        matrix, form = weight.matrix, mix.form(weight)
        count = spec.experts if weight.part == "experts" else matrix.count
        row = matrix_bytes(form, matrix.columns, 1)
        shape = (*((count,) if count > 1 else ()), matrix.rows, row)
        kind = gguf.GGMLQuantizationType[form.upper()]
        total += math.prod(shape)
        if form in ("f32", "f16"):
            data = np.zeros((*shape[:-1], matrix.columns), np.float32 if form == "f32" else np.float16)
            writer.add_tensor(name_of(weight, family == "gemma4"), data)
        else:
            writer.add_tensor(name_of(weight, family == "gemma4"), np.zeros(shape, np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quant", ["q4_k_m", "q8_0", "iq3_xs", "mxfp4_moe", "f16"])
def test_a_file_says_what_its_model_is_and_what_each_tensor_takes(family: str, quant: str, tmp_path: Path) -> None:
    spec = read_config(FAMILIES[family], "tiny")
    path = tmp_path / "tiny.gguf"
    total = write(path, family, spec, quant)
    found, expected = model_spec(str(path)), quantised(spec, quant)
    assert all_bytes(found) == all_bytes(expected) == total
    assert found.expert_bytes == expected.expert_bytes
    assert found.stored and expected.stored
    assert dict(found.stored.formats) == dict(expected.stored.formats)
    for name in ("attention", "ffn", "routers", "embedding", "head"):
        assert getattr(found.stored, name) == getattr(expected.stored, name), name
    same = (
        "layers moe_layers hidden experts top_k expert_ffn vocab tied shared_ffn dense_ffn expert_matrices windows "
        "total_parameters kv_bytes_per_token state_bytes_per_sequence"
    )
    for name in same.split():
        assert getattr(found, name) == getattr(spec, name), name
    one, other = (Costs(model, Hardware.load("rtx-3060")) for model in (found, expected))
    assert (one.layer_ns(1, 300) == other.layer_ns(1, 300)).all() and (one.head_ns(1) == other.head_ns(1)).all()


def test_a_header_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    total = write(path, "qwen3moe", read_config(FAMILIES["qwen3moe"], "tiny"), "q4_k_m")
    whole = model_spec(str(path))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size - total + 100])
    assert all_bytes(model_spec(str(cut))) == all_bytes(whole)


def test_experts_of_unequal_layers_are_each_of_their_own_size(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3moe", read_config(FAMILIES["qwen3moe"], "tiny"), "q4_k_m")
    sizes = set(model_spec(str(path)).expert_bytes)
    matrix = 256 * 256 // 256
    assert sizes == {matrix * (144 * 2 + 144), matrix * (144 * 2 + 210)}


@pytest.mark.parametrize("damage", ["magic", "short", "dense"])
def test_no_such_file_is_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3moe", read_config(FAMILIES["qwen3moe"], "tiny"), "q4_k_m")
    content = path.read_bytes()
    broken = {"magic": b"XXXX" + content[4:], "short": content[:200], "dense": content.replace(b"_exps", b"_expt")}
    path.write_bytes(broken[damage])
    with pytest.raises(InputError, match=r"tiny\.gguf: .*expected|tiny\.gguf: not a GGUF") as error:
        model_spec(str(path))
    assert "\n" not in str(error.value)


def test_a_file_in_parts_needs_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "big-00001-of-00002.gguf"
    write(path, "qwen3moe", read_config(FAMILIES["qwen3moe"], "tiny"), "q8_0")
    with pytest.raises(InputError, match=r"big-00002-of-00002\.gguf is not beside it; expected all 2 parts"):
        model_spec(str(path))


def test_the_command_shows_a_model_in_another_precision_and_from_a_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3moe", read_config(FAMILIES["qwen3moe"], "tiny"), "q4_k_m")
    assert main(["models", "qwen3-30b-a3b", "--quant", "q4_k_m", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    matrix = 2048 * 768
    assert set(told["expert_bytes"]) == {3 * matrix * 144 // 256, 2 * matrix * 144 // 256 + matrix * 210 // 256}
    sixes = sum(size > min(told["expert_bytes"]) for size in told["expert_bytes"])
    assert told["formats"] == {"q4_k": 128 * matrix * (3 * 48 - sixes), "q6_k": 128 * matrix * sixes}
    assert main(["models", str(path)]) == 0
    assert "q4_k" in capsys.readouterr().out


# --- safetensors ---


def headers(folder: Path, config: dict, tensors: dict[str, tuple[str, list[int], int]], files: int = 1) -> Path:
    """Files of headers alone, an index and a config.json; returns the index."""
    names = list(tensors)
    where = {name: f"model-{n % files}.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        at, entries = 0, {}
        for name in (n for n in names if where[n] == file):
            form, shape, size = tensors[name]
            entries[name] = {"dtype": form, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text)
    (folder / "config.json").write_text(json.dumps(config))
    index = folder / "model.safetensors.index.json"
    total = sum(size for _, _, size in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return index


CONFIG = {**FAMILIES["qwen2moe"], "tie_word_embeddings": False}


def plain_tensors(experts: float = 2) -> dict[str, tuple[str, list[int], int]]:
    """The tensors of `CONFIG` in bf16, experts with so many bytes a weight."""
    spec, found = read_config(CONFIG, "tiny"), {}
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "gate_proj", "ffn_up": "up_proj",
             "ffn_down": "down_proj"}  # fmt: skip
    for weight in weights_of(spec):
        m, at = weight.matrix, f"model.layers.{weight.layer}."
        if weight.part == "embeddings":
            name = {"token_embd": "model.embed_tokens.weight", "output": "lm_head.weight"}[m.role]
        elif weight.part == "experts":
            for n in range(spec.experts):
                size = int(experts * m.columns * m.rows)
                found[f"{at}mlp.experts.{n}.{names[m.role]}.weight"] = ("BF16", [m.rows, m.columns], size)
            continue
        elif weight.part == "routers":
            name = f"{at}mlp.gate.weight"
        else:
            name = f"{at}{'mlp.shared_expert.' if weight.part == 'ffn' else ''}{names[m.role]}.weight"
        found[name] = ("BF16", [m.rows, m.columns], 2 * m.columns * m.rows)
    return found


@pytest.mark.parametrize("files", [1, 3])
def test_the_headers_of_safetensors_say_what_each_tensor_takes(files: int, tmp_path: Path) -> None:
    spec = read_config(CONFIG, "tiny")
    index = headers(tmp_path, CONFIG, plain_tensors(), files)
    found = model_spec(str(index))
    assert all_bytes(found) == all_bytes(spec) == json.loads(index.read_text())["metadata"]["total_size"]
    assert found.expert_bytes == spec.expert_bytes and found.stored and found.stored.formats[0][0] == "bf16"
    assert [found.ffn_bytes(n) for n in range(4)] == [spec.ffn_bytes(n) for n in range(4)]
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    assert all_bytes(model_spec(str(index))) == all_bytes(spec), "by the index's total and config.json"


def test_an_index_whose_total_config_json_does_not_explain_needs_its_files(tmp_path: Path) -> None:
    packed = CONFIG | {"quantization_config": {"quant_method": "awq"}}
    index = headers(tmp_path, packed, plain_tensors(0.52))
    found = model_spec(str(index))
    assert found.expert_bytes[0] == sum(int(0.52 * 256 * 256) for _ in range(3))
    assert found.stored and found.stored.formats[0][0] == "int4-awq"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(InputError, match=r"total_size is \d+, and by config\.json the model has .*expected the files"):
        model_spec(str(index))


def test_no_safetensors(tmp_path: Path) -> None:
    index = headers(tmp_path, CONFIG, plain_tensors())
    (tmp_path / "model-0.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InputError, match="expected a safetensors file"):
        model_spec(str(index))
    index.write_text("{}")
    with pytest.raises(InputError, match="weight_map is missing"):
        model_spec(str(index))

