"""Every family that docs/capture.md names, from a saved tiny checkpoint, by its own class and cache."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file, save_file

from ground.errors import InputError
from tests.support.family_table import row, rows
from tests.support.tiny_families import ALL, FAMILIES, RELATED, decoder, model_of
from tests.support.tiny_moe import tokenizer
from tests.traces.capture.test_families import arrays, run, without_end
from traces.capture.checkpoint import in_words, load, load_model, provenance
from traces.capture.families import FAMILIES as ROUTERS
from traces.capture.routers import parts, routed_layers
from traces.models.configs import read_config
from traces.models.known import resolve_model
from traces.trace import Trace

INDEXED = ("deepseek_v32", "glm_moe_dsa")
MIXED = (*INDEXED, "minimax", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "gemma4")
"""Families with layers of linear attention, an index, or attention of two sizes."""


@pytest.mark.parametrize("family", ALL)
def test_one_command_captures_verifies_and_simulates_what_the_guide_s_table_says(family, checkpoints, tmp_path):
    """If a row differs: ``python -m tests.support.family_table`` writes the table of docs/capture.md anew."""
    assert row(family, checkpoints(family), tmp_path) in rows()
    if family == "switch":  # see below
        return
    trace = Trace.load(tmp_path / "mine.npz")
    assert trace.layers.tolist() == (FAMILIES | RELATED)[family].layers
    assert set(trace.split) == {"profile", "eval"}
    assert trace.embeddings.shape[1:] == (trace.n_layers + 1, 8)


def test_the_guide_s_table_holds_every_family_and_each_of_them_is_captured_in_these_tests():
    assert [line.split(" | ")[0] for line in rows()] == [f"| {known.models}" for known in ROUTERS.values()]
    with torch.device("meta"):
        captured = {type(routed.router).__name__ for name in ALL for routed in routers_of(model_of(name))}
    assert captured == set(ROUTERS)


def routers_of(model):
    return [routed for part in parts(model) for routed in routed_layers(model, part)]


@pytest.mark.parametrize("family", FAMILIES | RELATED)
def test_the_sizes_that_the_simulator_reads_are_those_of_the_model(family, checkpoints):
    folder = checkpoints(family)
    layers = (FAMILIES | RELATED)[family].layers
    model, _ = load(folder, device="cpu")
    config = provenance(folder, "mine", model, 0, "")["model"]["config"]
    spec = resolve_model({"name": "mine", "experts": 8, "top_k": 2, "config": config}, layers)
    assert spec.moe_layers == tuple(layers) and spec.experts == 8
    for index, routed in enumerate(routed_layers(model)):
        weights = sum(p.numel() * p.element_size() for n, p in routed.experts.named_parameters() if "bias" not in n)
        assert spec.expert_bytes[index] == weights // 8
    # The cost model leaves norms and biases out, which gpt-oss alone has many of, and all but the text part.
    named = [(name, p) for name, p in model.named_parameters() if "visual" not in name and "audio" not in name]
    matrices = sum(p.numel() for name, p in named if p.dim() > 1 and "shared_expert_gate" not in name)
    assert spec.total_parameters == pytest.approx(matrices, rel=0.03 if family == "gpt_oss" else 0)


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("tokens", [1, 7])
def test_keys_values_and_states_that_the_simulator_counts_are_those_in_the_cache_of_the_family_s_class(family, tokens):
    model = decoder(family).to(torch.bfloat16)
    said = model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=True)
    if family in INDEXED and said.past_key_values.layers[0].keys.shape[1] > 1:
        pytest.skip("transformers 5.17 caches what it expands the latent to")
    held = sum(t.numel() * t.element_size() for t in floats(said.past_key_values))
    spec = read_config(in_words(model.config.to_dict()), family)
    assert held == tokens * spec.kv_bytes_per_token + spec.state_bytes_per_sequence


def floats(cache):
    """Every tensor of numbers that a cache holds."""
    if isinstance(cache, torch.Tensor):
        return [cache] if cache.is_floating_point() else []
    if isinstance(cache, list | tuple | dict):
        return [found for inner in (cache.values() if isinstance(cache, dict) else cache) for found in floats(inner)]
    return floats(vars(cache)) if hasattr(cache, "__dict__") and not isinstance(cache, type) else []


@pytest.mark.parametrize("family", ALL)
def test_batches_and_pieces_route_as_generate_does_alone(family, checkpoints):
    """Each model with its own class and cache, also where its checkpoint asks for the outputs of training."""
    model, _ = load(checkpoints(family), "eager" if family != "switch" else None, "cpu")
    without_end(model)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.output_router_logits = config.output_hidden_states = True
    ids = [[3 + (7 * i * i) % 50 for i in range(23)], [5, 9, 14]]
    part = list(parts(model))[-1]
    found = run(model, ids)[part].arrays
    pieces = run(model, ids[:1], chunk=5)[part].arrays
    for name in ("experts", "token", "position", "phase"):
        assert (pieces[name] == found[name][found["sequence"] == 0]).all(), name
    for number, one in enumerate(ids):
        said = model.generate(torch.tensor([one]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
        assert found["token"][found["sequence"] == number].tolist() == said[0, :-1].tolist()


@pytest.mark.parametrize("asked", [{"output_router_logits": True}, {"return_dict": False}, {"use_cache": False}])
def test_outputs_of_training_that_a_checkpoint_asks_for_are_off(asked):
    found, plain = arrays(decoder("olmoe", **asked)), arrays(decoder("olmoe"))
    assert all((found[name] == plain[name]).all() for name in plain)


def test_the_thinker_of_a_model_that_also_speaks_is_loaded_from_its_whole_checkpoint(checkpoints, tmp_path):
    thinker = checkpoints("qwen3_omni_moe")
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(thinker / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    inner = json.loads((thinker / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": inner}))
    whole, alone = (arrays(without_end(load_model(folder, device="cpu"))) for folder in (tmp_path, thinker))
    assert all((whole[name] == alone[name]).all() for name in alone)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "exaone_moe"])
def test_routed_layers_are_those_that_the_configuration_lists_whatever_an_older_field_says(family, tmp_path):
    listed = {"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse"] * 2, "first_k_dense_replace": 2}
    decoder(family, **listed).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    assert row(family, tmp_path / "model", tmp_path).endswith("| yes | yes | yes |")
    trace = Trace.load(tmp_path / "mine.npz")
    assert trace.layers.tolist() == [1, 3]
    assert resolve_model(trace.meta["model"], trace.layers).moe_layers == (1, 3)
    with pytest.raises(InputError, match="2"):
        resolve_model(trace.meta["model"], [2, 3])


@pytest.mark.parametrize("family", ["glm4_moe_lite", "solar_open"])
def test_a_configuration_without_the_number_of_dense_layers_is_simulated_by_its_family_s_rule(family, checkpoints):
    folder = checkpoints(family)
    config = json.loads((folder / "config.json").read_text())
    for field in ("first_k_dense_replace", "mlp_layer_types"):
        config.pop(field, None)
    layers = RELATED[family].layers
    spec = resolve_model({"name": "mine", "experts": 8, "top_k": 2, "config": config}, layers)
    assert spec.moe_layers == tuple(layers)
