import json
import math
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from tests.support.tiny_moe import llama, mixtral, tokenizer, write_corpora
from traces.capture.capture import Amount, capture
from traces.capture.corpora import DomainText, TextRow
from traces.capture.routers import routed_layers
from traces.trace import Trace
from traces.training import train as minimoe
from traces.training.balance import balance_loss, chosen_experts, expert_uses, window_balance_loss
from traces.training.batches import batches, pack
from traces.training.routers import FIRST_LOGITS
from traces.training.topologies import TOPOLOGIES, Topology
from traces.training.train import TrainingOptions, fit, load_base, train
from traces.training.upcycle import expert_weights, source_layers, upcycle

SMALL = Topology("small", "mixtral", 4, 4, 2)
OPTIONS = TrainingOptions(minutes=None, tokens=2000, batch=4, length=32)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_corpora(tmp_path_factory.mktemp("corpora"), count=80)


def blocks(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.integers(3, 40, (20, 32)).astype(np.int32) for name in ("law", "code")}


def test_mixtral_s_topology_is_there():
    topology = TOPOLOGIES["mixtral-8x7b"]
    assert (topology.layers, topology.experts, topology.top_k) == (32, 8, 2)


def test_layers_are_spread_evenly_and_none_is_left_out():
    spread = source_layers(32, 30)
    assert sorted(set(spread)) == list(range(30)) and spread == sorted(spread)
    assert [layer for layer in range(30) if spread.count(layer) == 2] == [7, 22]
    assert source_layers(3, 3) == [0, 1, 2]


def test_without_redrawn_neurons_the_upcycled_model_says_what_the_dense_one_says():
    dense = llama().eval()
    sparse = upcycle(dense, Topology("same", "mixtral", 3, 4, 2), redrawn=0).eval()
    ids = torch.tensor([[5, 9, 14, 22, 7]])
    with torch.no_grad():
        assert torch.allclose(dense(ids).logits, sparse(ids).logits, atol=1e-4)


def test_a_quarter_of_each_expert_s_neurons_is_redrawn():
    matrix = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    forgotten = torch.rand(3, 400, generator=torch.Generator().manual_seed(1)) < 0.25
    neurons = torch.arange(400).expand(3, -1)
    experts = expert_weights(matrix, neurons, forgotten, 0, torch.Generator().manual_seed(2))
    changed = (experts != matrix).any(dim=2)
    assert (changed == forgotten).all()
    assert experts.std().item() == pytest.approx(matrix.std().item(), rel=0.1)
    turned = expert_weights(matrix.T.contiguous(), neurons, forgotten, 1, torch.Generator().manual_seed(2))
    assert ((turned != matrix.T).any(dim=1) == forgotten).all()


def test_upcycling_is_a_function_of_its_seed_and_leaves_the_global_one_alone():
    dense = llama()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, three = (upcycle(dense, SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], three[name]) for name in one)


@pytest.mark.parametrize("redrawn", [-0.1, 1.1, float("nan")])
def test_impossible_shares_are_refused(redrawn):
    with pytest.raises(InputError, match="redrawn share is"):
        upcycle(llama(), SMALL, redrawn)


def test_an_unknown_family_is_refused():
    with pytest.raises(InputError, match="no way to upcycle to family 'odd'"):
        upcycle(llama(), Topology("odd", "odd", 4, 4, 2))


def test_balance_loss_is_k_when_experts_are_used_alike_and_more_when_one_takes_all():
    ids = torch.tensor([[0, 1], [2, 3]] * 8)
    assert balance_loss(torch.zeros(16, 4), expert_uses(ids, 4)).item() == pytest.approx(2)
    crowded = torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 16)
    assert balance_loss(crowded, expert_uses(torch.tensor([[0, 1]] * 16), 4)).item() == pytest.approx(4, abs=1e-3)


def test_the_balance_loss_pushes_probability_away_from_crowded_experts():
    logits = torch.zeros(8, 4, requires_grad=True)
    balance_loss(logits, expert_uses(torch.tensor([[0, 1]] * 8), 4)).backward()
    assert (logits.grad[:, :2] > 0).all() and (logits.grad[:, 2:] < 0).all()


def test_training_lowers_the_loss_and_trains_routers_too():
    model = upcycle(llama(), SMALL)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pattern = {"law": np.tile(np.arange(5, 13, dtype=np.int32), (20, 4))}
    record = fit(
        model, pattern, TrainingOptions(minutes=None, tokens=8000, batch=8, length=32, learning_rate=3e-3), "cpu"
    )
    assert record["training"]["final_loss"] < 0.5 * record["training"]["first_loss"]
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {f"model.layers.{layer}.mlp.gate.weight" for layer in range(4)} <= moved
    assert {f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(4)} <= moved
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_lower_precision_leaves_rotary_frequencies_as_a_loaded_checkpoint_has_them(tmp_path):
    model = minimoe.set_precision(upcycle(llama(), SMALL), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path)
    loaded, ids = type(model).from_pretrained(tmp_path, dtype="auto"), torch.arange(240).reshape(1, 240) % 60
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)


def test_training_is_a_function_of_its_seed():
    def weights(seed):
        model = upcycle(llama(), SMALL)
        fit(model, blocks(), TrainingOptions(minutes=None, tokens=600, batch=4, length=32, seed=seed), "cpu")
        return model.state_dict()["model.layers.2.mlp.gate.weight"]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_record_tells_the_use_of_experts():
    model = mixtral(layers=2, experts=4)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()  # every token takes the same two experts: 1 bit
    options = TrainingOptions(minutes=None, tokens=200, batch=4, length=32, learning_rate=1e-9, weight_decay=0)
    entropy = fit(model, blocks(), options, "cpu")["entropy_bits"]
    assert entropy[0] == pytest.approx(1) and 1 < entropy[1] <= 2


def test_the_budget_ends_training(monkeypatch):
    record = fit(
        upcycle(llama(), SMALL), blocks(), TrainingOptions(minutes=None, tokens=1000, batch=4, length=32), "cpu"
    )
    assert record["training"]["trained_tokens"] == 1024 and record["training"]["steps"] == 8
    clock = count(100, 7)  # seconds, each time somebody looks
    monkeypatch.setattr(minimoe, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    timed = fit(upcycle(llama(), SMALL), blocks(), TrainingOptions(minutes=0.5, batch=4, length=32), "cpu")
    assert timed["training"]["seconds"] == 35 and timed["training"]["steps"] == 5


def test_the_learning_rate_warms_up_and_falls():
    options = TrainingOptions(learning_rate=1.0)
    rates = [options.learning_rate_at(fraction) for fraction in (0, 0.015, 0.03, 0.5, 1)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(1) and rates[2] > rates[3] > rates[4]
    assert rates[4] == pytest.approx(0.1)


def test_larger_domains_are_drawn_more_often_but_less_than_their_size():
    sizes = {"small": np.zeros((10, 4), np.int32), "large": np.ones((90, 4), np.int32)}
    share = next(batches(sizes, 4000, 0))[:, 0].mean()
    assert share == pytest.approx(0.75, abs=0.03)  # 3 to 1 for 9 to 1


def test_every_block_of_a_round_is_seen_once():
    rounds = batches({"law": np.arange(12, dtype=np.int32).reshape(12, 1)}, 12, 0)
    assert sorted(next(rounds)[:, 0].tolist()) == list(range(12))


def test_documents_are_packed_with_an_end_between():
    rows = [
        TextRow("law", "s", "MIT", "court shall\n", "agree"),
        TextRow("law", "s", "MIT", "party\n", "notice term law"),
    ]
    packed = pack(tokenizer(), DomainText("law", rows, [], []), 3, 0)
    words = tokenizer().convert_ids_to_tokens(packed.reshape(-1).tolist())
    assert packed.shape == (3, 3)
    ends = [" ".join(document.split()) for document in " ".join(words).split("<eos>")]
    assert sorted(ends) == ["", "court shall agree", "party notice term law"]
    with pytest.raises(InputError, match="9 training tokens do not fill one block of 10"):
        pack(tokenizer(), DomainText("law", rows, [], []), 10, 0)


def test_a_trained_checkpoint_is_whole_and_can_be_captured(base, corpora, tmp_path, monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "small", SMALL)
    output = tmp_path / "moe"
    record = train(base, corpora, output, topology="small", domains=("law", "code"), options=OPTIONS, device="cpu")
    assert json.loads((output / "training.json").read_text()) == record
    assert (output / "training.png").stat().st_size > 5000
    assert record["data"]["law"]["sources"]["HazyResearch/legalbench:CUAD_X"]["licence"] == "CC BY 4.0"
    assert math.isfinite(record["training"]["final_loss"]) and len(record["entropy_bits"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["moe"]
    capture(output, corpora, ["law"], tmp_path / "law.npz", amount=Amount(20, 5, 2, 64, 6, 4), embedding="16x3")
    trace = Trace.load(tmp_path / "law.npz")
    assert trace.meta["model"] == {"name": "small", "experts": 4, "top_k": 2}
    assert "its routing is its own, not that of small" in trace.meta["captured"]["what"]
    assert (output / "embedding_basis.npz").exists()


def test_an_interrupted_save_leaves_no_checkpoint(base, corpora, tmp_path, monkeypatch):
    monkeypatch.setitem(TOPOLOGIES, "small", SMALL)

    def fail(record, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(minimoe, "draw", fail)
    with pytest.raises(KeyboardInterrupt):
        train(base, corpora, tmp_path / "moe", topology="small", domains=("law",), options=OPTIONS, device="cpu")
    assert not (tmp_path / "moe").exists()


def test_wrong_arguments_are_refused_before_any_work(base, corpora, tmp_path):
    with pytest.raises(InputError, match="topology 'huge'"):
        train(base, corpora, tmp_path / "moe", topology="huge")
    with pytest.raises(InputError, match="is there already"):
        train(base, corpora, tmp_path)
    with pytest.raises(InputError, match="no such model"):
        load_base(tmp_path / "absent.gguf")
    with pytest.raises(InputError, match="not a model to start from"):
        load_base(corpora)
    for wrong in (
        {"minutes": None}, {"minutes": -1}, {"batch": 0}, {"learning_rate": math.inf}, {"window_balance": -0.1},
        {"length": 500}, {"window": 0},
    ):  # fmt: skip
        with pytest.raises(InputError):
            TrainingOptions(**wrong)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_the_loss_over_windows_is_the_mean_of_each_window_s_own(windows, length, experts, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(windows * length, experts, generator=generator)
    ids = logits.topk(2, dim=1).indices
    each = [
        balance_loss(part, expert_uses(taken, experts))
        for part, taken in zip(logits.split(length), ids.split(length), strict=True)
    ]
    given_ = window_balance_loss(logits, chosen_experts(ids, experts), length)
    assert given_.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_routers_start_without_what_all_tokens_share_and_with_logits_of_one_size(name):
    dense = llama().eval()
    sample = torch.randint(3, 40, (6, 40), generator=torch.Generator().manual_seed(1))
    sparse = upcycle(dense, Topology("same", name, 3, 4, 2), redrawn=0, sample=sample)
    inputs = []
    for layer in dense.model.layers:
        layer.mlp.register_forward_hook(lambda _, given, __: inputs.append(given[0].flatten(0, 1)))
    with torch.no_grad():
        dense(sample)
    for layer, seen in zip(sparse.model.layers, inputs, strict=True):
        router = layer.mlp.gate.weight
        assert (seen @ router.T).std().item() == pytest.approx(FIRST_LOGITS, rel=1e-4)
        largest = torch.linalg.svd(torch.nn.functional.normalize(seen, dim=1))[2][: len(seen.T) // 4]
        assert (router @ largest.T).abs().max() < 1e-4 * router.abs().max()


def test_routed_layers_come_in_order():
    layers = routed_layers(mixtral(layers=12))
    assert [routed.layer for routed in layers] == list(range(12))
