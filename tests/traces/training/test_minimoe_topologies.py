"""The small models of every published topology: made, trained a few steps, loaded by their real class, captured."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch

from tests.support.tiny_moe import llama, tokenizer, write_corpora
from traces.capture.batches import run_batch
from traces.capture.capture import Amount, capture
from traces.capture.checkpoint import load
from traces.capture.decoding import Decoding, Prompt
from traces.capture.recorder import Recorder
from traces.capture.routers import routed_layers
from traces.trace import Trace
from traces.training.topologies import TOPOLOGIES
from traces.training.train import TrainingOptions, train
from traces.training.upcycle import expert_weights, source_layers, upcycle

CLASSES = {
    "mixtral-8x7b": "MixtralForCausalLM",
    "phi-3.5-moe": "PhimoeForCausalLM",
    "qwen1.5-moe-a2.7b": "Qwen2MoeForCausalLM",
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "deepseek-moe-16b": "DeepseekV2ForCausalLM",
}
every_topology = pytest.mark.parametrize("name", CLASSES)


def tiny(name, **other):
    """The topology with few layers and experts, and experts of at least 4 of 32 neurons."""
    topology = TOPOLOGIES[name]
    small = {"layers": 4, "experts": 12, "width": max(topology.width, 1 / 8)}
    return replace(topology, **(small | other))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of each topology, trained for a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    llama().save_pretrained(folder / "dense")
    tokenizer().save_pretrained(folder / "dense")
    corpora = write_corpora(folder / "corpora", count=80)
    options = TrainingOptions(minutes=None, tokens=3000, batch=8, length=32, learning_rate=3e-3, redrawn=0.1)
    patch = pytest.MonkeyPatch()
    records = {}
    for name in CLASSES:
        patch.setitem(TOPOLOGIES, name, tiny(name))
        records[name] = train(
            folder / "dense",
            corpora,
            folder / name,
            topology=name,
            domains=("law", "code"),
            options=options,
            device="cpu",
        )
    patch.undo()
    return folder, corpora, records


@every_topology
def test_a_topology_is_that_of_the_published_model(name):
    topology = TOPOLOGIES[name]
    assert (topology.family, topology.layers, topology.experts, topology.top_k) == {
        "mixtral-8x7b": ("mixtral", 32, 8, 2),
        "phi-3.5-moe": ("phimoe", 32, 16, 2),
        "qwen1.5-moe-a2.7b": ("qwen2_moe", 24, 60, 4),
        "qwen3-30b-a3b": ("qwen3_moe", 48, 128, 8),
        "deepseek-moe-16b": ("deepseek_v2", 28, 64, 6),
    }[name]


def test_there_is_no_other_topology_but_those_with_an_encoder():
    assert {name for name, topology in TOPOLOGIES.items() if not topology.encoder_decoder} == set(CLASSES)


def test_layers_are_left_out_or_repeated_evenly():
    assert sorted(set(range(30)) - set(source_layers(24, 30))) == [2, 7, 12, 17, 22, 27]
    repeated = Counter(source_layers(48, 30))
    assert set(repeated) == set(range(30)) and set(repeated.values()) == {1, 2}


@every_topology
def test_an_upcycled_model_speaks_nearly_as_the_dense_one(name):
    dense = llama().eval()
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        said = dense(ids).logits.flatten(0, 1)
        for layers in (3, 5):  # each layer once; two of them twice
            sparse = upcycle(dense, tiny(name, layers=layers), redrawn=0).eval()
            again = sparse(ids).logits.flatten(0, 1)
            assert torch.nn.functional.cosine_similarity(said, again).mean() > 0.95


def test_experts_hold_the_neurons_that_they_are_given():
    matrix = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    neurons = torch.tensor([[0, 3, 5], [39, 1, 2]])
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    rows = expert_weights(matrix, neurons, nothing, 0, torch.Generator())
    assert torch.equal(rows, matrix[neurons])
    columns = expert_weights(matrix.T.contiguous(), neurons, nothing, 1, torch.Generator())
    assert torch.equal(columns, rows.transpose(1, 2))


def test_the_shared_expert_and_the_routed_ones_divide_the_dense_neurons():
    dense = llama()
    sparse = upcycle(dense, tiny("qwen1.5-moe-a2.7b", layers=3), redrawn=0)
    for layer, source in zip(sparse.model.layers, dense.model.layers, strict=True):
        known = {tuple(row.tolist()): number for number, row in enumerate(source.mlp.up_proj.weight)}
        shared = {known[tuple(row.tolist())] for row in layer.mlp.shared_expert.up_proj.weight}
        ups = layer.mlp.experts.gate_up_proj[:, 4:]  # four neurons an expert: its gate's rows, then its up's
        routed = [[known[tuple(row.tolist())] for row in expert] for expert in ups]
        assert len(shared) == 16 and all(len(set(expert)) == 4 for expert in routed)
        assert shared.isdisjoint(set().union(*routed))


def test_the_stand_in_for_deepseek_moe_has_ordinary_shared_experts_one_group_and_a_dense_first_layer():
    dense = llama()
    sparse = upcycle(dense, tiny("deepseek-moe-16b", layers=3), redrawn=0)
    config = sparse.config
    assert (config.topk_method, config.n_group, config.routed_scaling_factor) == ("greedy", 1, 1.0)
    assert config.n_shared_experts == 2 and config.first_k_dense_replace == 1
    assert torch.equal(sparse.model.layers[0].mlp.up_proj.weight, dense.model.layers[0].mlp.up_proj.weight)
    assert sparse.model.layers[1].mlp.shared_experts.up_proj.weight.shape[0] == 8


def test_normalised_queries_have_the_size_that_they_had():
    dense = llama().eval()
    sparse = upcycle(dense, tiny("qwen3-30b-a3b", layers=3), redrawn=0).eval()
    sizes = {}

    def keep(name, output):
        sizes[name] = output.square().mean().sqrt().item()

    dense.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *call: keep("dense", call[2]))
    sparse.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *call: keep("sparse", call[2]))
    with torch.no_grad():
        dense(torch.arange(60).reshape(2, 30)), sparse(torch.arange(60).reshape(2, 30))
    assert sizes["sparse"] == pytest.approx(sizes["dense"], rel=0.1)


@every_topology
def test_a_trained_checkpoint_has_the_real_class_and_its_record(trained, name):
    folder, _, records = trained
    model, _ = load(folder / name, device="cpu")
    assert type(model).__name__ == CLASSES[name]
    record = records[name]
    routed = len(routed_layers(model))
    assert record["topology"]["layers"] == 4 and routed == 4 - record["topology"]["dense"]
    assert len(record["entropy_bits"]) == routed and all(0 < bits <= np.log2(12) for bits in record["entropy_bits"])
    assert record["training"]["final_loss"] < record["training"]["first_loss"]
    assert (folder / name / "training.png").stat().st_size > 5000


@every_topology
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_recorded_ids_are_those_that_the_experts_module_was_given(trained, name, experts):
    folder, _, _ = trained
    model, _ = load(folder / name, experts, device="cpu")
    given = [[] for _ in routed_layers(model)]
    handles = [
        routed.experts.register_forward_pre_hook(lambda module, inputs, kept=kept: kept.append(inputs[1].clone()))
        for routed, kept in zip(routed_layers(model), given, strict=True)
    ]
    prompt = Prompt(list(range(5, 15)), [], 0)
    with Recorder(model) as recorder:
        rows = run_batch({"": recorder}, [prompt], 6, Decoding(mode="greedy"), 2, set())[""]
    for handle in handles:
        handle.remove()
    recorded = rows.arrays["experts"]
    assert len(recorded) == 10 + 5
    assert np.array_equal(recorded, np.stack([torch.cat(kept).numpy() for kept in given], axis=1))


@every_topology
def test_a_capture_is_whole_with_the_largest_probabilities_alone(trained, name, tmp_path):
    folder, corpora, _ = trained
    amount = Amount(20, 5, 2, 64, 6, 4)
    capture(folder / name, corpora, ["law"], tmp_path / "all.npz", amount=amount, embedding="16x3")
    capture(folder / name, corpora, ["law"], tmp_path / "law.npz", amount=amount, embedding="16x3", probs=5)
    whole, trace = Trace.load(tmp_path / "all.npz"), Trace.load(tmp_path / "law.npz")
    assert np.array_equal(whole.experts, trace.experts) and np.array_equal(whole.embeddings, trace.embeddings)
    assert trace.probs.shape == trace.prob_experts.shape == (trace.n_rows, 4 - TOPOLOGIES[name].dense, 5)
    kept = np.take_along_axis(whole.probs, trace.prob_experts.astype(int), axis=2)
    assert np.array_equal(kept, trace.probs)
    assert (kept.min(axis=2) >= np.sort(whole.probs, axis=2)[:, :, -5]).all()
    assert trace.meta["model"] == {"name": name, "experts": 12, "top_k": TOPOLOGIES[name].top_k}
