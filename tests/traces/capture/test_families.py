"""Every router family: what capture records is what the experts module was given, whatever runs the experts."""

from contextlib import ExitStack

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from ground.errors import InputError
from tests.support.tiny_families import FAMILIES, decoder, switch
from tests.support.tiny_moe import llama
from traces.capture.batches import run_batch
from traces.capture.capture import Amount, capture_prompts
from traces.capture.checkpoint import load
from traces.capture.decoding import Decoding, Prompt
from traces.capture.recorder import Recorder, recorders
from traces.capture.routers import routed_layers
from traces.models.known import resolve_model
from traces.trace import Trace

GREEDY = Decoding(mode="greedy")
PROMPTS = [[5, 9, 14], [22, 7, 30, 41, 11], [8, 8, 19, 27], [33, 6]]
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
# Switch in 5.17 routes each token as a sequence of its own: nobody is ever beyond an expert's capacity.
SWITCH_DROPS = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


def run(model, prompts=PROMPTS, new_tokens=5, decoding=GREEDY, chunk=None):
    """Rows by part of the model."""
    given = [Prompt(ids, [12, 13, 14, 15], number) for number, ids in enumerate(prompts)]
    with ExitStack() as hooks:
        found = {part: hooks.enter_context(one) for part, one in recorders(model).items()}
        return run_batch(found, given, new_tokens, decoding, 2, set(), chunk)


def arrays(model, **more):
    return run(model, **more)[""].arrays


class Independent:
    """(ids, weights) that each experts module is called with, kept by hooks of the test's own."""

    def __init__(self, model, part=""):
        self.layers = routed_layers(model, part)
        self.calls = [[] for _ in self.layers]

    def __enter__(self):
        self.handles = [
            routed.experts.register_forward_pre_hook(
                lambda module, inputs, kept=kept: kept.append((inputs[1].clone(), inputs[2].clone()))
            )
            for routed, kept in zip(self.layers, self.calls, strict=True)
        ]
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def of(self, index):
        """(rows, layers, K) of ids (0) or weights (1)."""
        return torch.stack([torch.cat([call[index] for call in kept]) for kept in self.calls], dim=1)


def without_end(model):
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("the court\n\nclause party shall agree notice\nlaw judge card money\nbank account\n")
    return path


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_checkpoint_is_captured_as_its_experts_saw_it(family, implementation, checkpoints):
    """Left-padded batches against the experts' own record of generate(), one prompt at a time."""
    model, _ = load(checkpoints(family), implementation, "cpu")
    without_end(model)
    found = arrays(model)
    assert found["experts"].shape[:2] == (sum(len(ids) + 4 for ids in PROMPTS), len(FAMILIES[family][2]))
    for number, ids in enumerate(PROMPTS):
        with Independent(model) as record:
            said = model.generate(
                torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        mine = found["sequence"] == number
        assert found["token"][mine].tolist() == said[0, :-1].tolist()
        assert found["phase"][mine].tolist() == [0] * len(ids) + [1] * 4
        assert (found["experts"][mine] == record.of(0).numpy()).all()
        assert np.abs(found["gates"][mine] - record.of(1).float().detach().numpy()).max() < 2e-3 * 16


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_captured_as_its_experts_saw_it(family):
    """Seen in pytorch/pytorch#110285, TransformerLensOrg/TransformerLens#1346: numpy has no bfloat16."""
    model = without_end(decoder(family).to(torch.bfloat16))
    layers, given = routed_layers(model), [[] for _ in FAMILIES[family][2]]
    common = torch.randn(32, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for routed, kept in zip(layers, given, strict=True):
        with torch.no_grad():
            routed.router.weight += common  # brings the experts' scores close to each other, as bfloat16 counts
        routed.router.register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[0].flatten(0, -2)))
    with Independent(model) as record:
        rows = run(model, [[3 + (7 * i * i + i // 50) % 60 for i in range(400)]])[""]
    experts = rows.arrays["experts"]
    assert (experts == record.of(0).numpy()).all()
    assert (rows.arrays["gates"] == record.of(1).to(torch.float16).numpy()).all()
    assert rows.states.dtype == torch.bfloat16 and rows.states.isfinite().all()
    # Ids computed anew from these states, in a precision that is not the router's own (DeepSeek's is float32), differ:
    # had they been recorded, the comparison above would have shown it.
    other = torch.bfloat16 if family.startswith("deepseek") else torch.float32
    differ = 0
    for index, routed in enumerate(layers):
        bias = getattr(routed.router, "bias", None)
        scores = torch.nn.functional.linear(
            torch.cat(given[index]).to(other), routed.router.weight.to(other), None if bias is None else bias.to(other)
        )
        probs = routed.family.probs(routed.router, scores)
        eligible, _ = routed.family._eligible(routed.router, routed.family.choice(routed.router, scores, probs))
        anew = eligible.topk(experts.shape[2]).indices.numpy()
        differ += int((np.sort(anew, axis=1) != np.sort(experts[:, index], axis=1)).any(axis=1).sum())
    assert differ


@pytest.mark.parametrize("family", FAMILIES)
def test_probabilities_and_weights_are_what_the_trace_says(family):
    """Seen in huggingface/transformers#45120: "router_logits" are probabilities in some models."""
    model = decoder(family)
    rows = run(model)[""]
    decode = rows.arrays["phase"] == 1
    layers = routed_layers(model)
    for index, routed in enumerate(layers):
        facts = routed.family.facts(routed.router)
        states = rows.states[:, 1 + index].clone()
        logits = torch.nn.functional.linear(states, routed.router.weight, getattr(routed.router, "bias", None))
        sigmoid = facts["probabilities"].startswith("sigmoid")
        expected = (logits.sigmoid() if sigmoid else logits.softmax(dim=-1)).detach().numpy()
        stored = rows.arrays["probs"][decode, index] / 255
        assert np.abs(stored - expected).max() <= 0.5 / 255 + 1e-5
        assert (np.abs(stored.sum(axis=1) - 1) < 8 * 0.5 / 255 + 1e-6).all() != sigmoid
        sums = rows.arrays["gates"][:, index].astype(np.float32).sum(axis=1)
        exact = np.abs(sums - facts["weights_scaled_by"]) < 4e-3
        assert exact.all() if facts["weights_sum_to_1"] else not exact.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_look_ahead_is_what_the_next_router_itself_says_of_these_states(family):
    model = decoder(family)
    rows = run(model)[""]
    ahead = rows.arrays["lookahead"][rows.arrays["phase"] == 1]
    layers = routed_layers(model)
    for index, following in enumerate(layers[1:]):
        output = following.router(rows.states[:, 1 + index].clone())
        (ids,) = [one for one in output if not one.is_floating_point()]  # the order differs between versions
        assert (np.sort(ahead[:, index], axis=1) == ids.sort(dim=1).values.numpy()).all()
    assert (ahead[:, -1] == -1).all()


@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_the_norm_flag_changes_weights_alone_and_is_stored(family, value):
    """Seen in huggingface/transformers#41151, leonickson1/Swiftlet#6:
    a missing norm_topk_prob fell back to the wrong default.
    """
    model = decoder(family, **({} if value is None else {"norm_topk_prob": value}))
    family_default = family == "deepseek_v3"
    expected = family_default if value is None else value
    found = arrays(model)
    (first, *_) = routed_layers(model)
    assert first.family.facts(first.router)["weights_sum_to_1"] is expected
    sums = found["gates"].astype(np.float32).sum(axis=2) / first.family.scale(first.router)
    assert (np.abs(sums - 1) < 2e-3).all() == expected
    # Weights change the input of later layers and the tokens chosen, so only the prompt's first routes can be compared.
    other = arrays(decoder(family, norm_topk_prob=not expected))
    prompt, same = found["phase"] == 0, other["phase"] == 0
    assert (found["experts"][prompt, 0] == other["experts"][same, 0]).all()


def test_groups_are_kept_although_every_corrected_score_is_negative():
    """Seen in vllm-project/vllm#13474: masked groups set to 0 win where allowed scores are negative."""
    model = decoder("deepseek_v3", n_group=4, topk_group=1)
    for routed in routed_layers(model):
        routed.router.e_score_correction_bias.fill_(-2.0)
    rows = run(model)[""].arrays
    for name, layers in (("experts", 2), ("lookahead", 1)):
        groups = rows[name][:, :layers] // 2
        assert (groups == groups[:, :, :1]).all()


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_tie_between_groups_of_experts_is_counted_among_ties(family):
    """The best expert of a group, or both together, score as those of another group, of which one may be chosen."""
    (routed, *_) = routed_layers(decoder(family, n_group=4, topk_group=1))
    router = routed.router
    with torch.no_grad():
        router.weight.copy_(torch.eye(8, 32))
        if family == "deepseek_v3":
            router.e_score_correction_bias.zero_()
    hidden = torch.zeros(2, 32)
    hidden[:, 2:4], hidden[:, 6:8] = torch.tensor([3.0, 2.0]), torch.tensor([2.0, 3.0])
    hidden[1, 7] = 3.5
    found = routed.family.routing(router, hidden, router(hidden))
    assert found.tied.tolist() == [True, False]
    assert found.ids[1].sort().values.tolist() == [6, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_ties_are_flagged_in_every_family(family):
    """Seen in pytorch/pytorch#127196, #27542: equal scores have different top-k indices on CPU and GPU."""
    model = without_end(decoder(family))
    layers = routed_layers(model)
    with torch.no_grad():
        for tensor in (*layers[0].router.parameters(), *layers[0].router.buffers()):
            tensor.zero_()
    with Independent(model) as record:
        rows = run(model, [PROMPTS[1]])[""]
    assert rows.odd["tied"] == len(rows.arrays["experts"])
    assert (rows.arrays["experts"] == record.of(0).numpy()).all()


# Switch: an encoder and a decoder.


def test_encoder_and_decoder_are_two_traces_of_the_same_sequences(checkpoints, prompts_file, tmp_path):
    path = tmp_path / "mine.npz"
    paths = capture_prompts(
        checkpoints("switch"), prompts_file, path, amount=Amount(None, None, prompt_tokens=99, new_tokens=4),
        decoding=GREEDY, embedding="8x4", basis_path=tmp_path / "basis.npz",
    )  # fmt: skip
    assert paths == [path, tmp_path / "mine.encoder.npz"]
    decoded, encoded = (Trace.load(one) for one in paths)
    assert decoded.sequence_id.tolist() == encoded.sequence_id.tolist()
    assert (encoded.phase == 0).all() and encoded.n_rows == 2 + 5 + 4 + 2
    first = np.flatnonzero(np.diff(decoded.sequence, prepend=-1))
    assert (decoded.token[first] == 2).all() and (decoded.phase == 0).sum() == 4
    assert decoded.embeddings is not None and encoded.embeddings is None
    for trace, part in ((decoded, "decoder"), (encoded, "encoder")):
        assert trace.layers.tolist() == [1, 3] and trace.meta["model"]["part"] == part
        spec = resolve_model(trace.meta["model"], trace.layers)
        assert spec.name.endswith(f"({part})") and spec.moe_layers == (1, 3) and spec.top_k == 1


@pytest.mark.parametrize("drops", [False, True])
def test_switch_records_what_its_experts_were_given(drops):
    model = without_end(switch(expert_capacity=1 if drops else 64))
    found = run(model)
    for number, ids in enumerate(PROMPTS):
        with Independent(model, "encoder") as encoded, Independent(model, "decoder") as decoded:
            said = model.generate(
                torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        for part, record in (("encoder", encoded), ("decoder", decoded)):
            rows = found[part].arrays
            mine = rows["sequence"] == number
            served = record.of(0)[:, :, 0].numpy()
            expected = np.where(served.any(axis=2), served.argmax(axis=2), -1)
            assert (rows["experts"][mine, :, 0] == expected).all()
            gates = np.where(expected >= 0, record.of(1)[:, :, 0].detach().numpy(), 0)
            assert np.abs(rows["gates"][mine, :, 0] - gates).max() < 1e-3
        assert found["decoder"].arrays["token"][mine].tolist() == said[0, :-1].tolist()
    assert (found["encoder"].arrays["experts"] == -1).any() == (drops and SWITCH_DROPS)
    sums = found["decoder"].arrays["probs"].sum(axis=2)
    assert np.abs(sums / 255 - 1).max() < 8 * 0.5 / 255 + 1e-6  # probabilities, not the logits some versions call so


def test_an_expert_of_capacity_one_serves_one_of_four():
    """Seen in huggingface/transformers#48293, #48421: a Switch router's capacity dropped nobody any more."""
    model = switch(expert_capacity=1)
    (first, *_) = routed_layers(model, "encoder")
    with torch.no_grad():
        first.router.classifier.weight.zero_()
    rows = run(model, [[5, 9, 14, 22], [7, 30]])["encoder"].arrays
    expected = [[0, -1, -1, -1], [0, -1]] if SWITCH_DROPS else [[0, 0, 0, 0], [0, 0]]
    for number, ids in enumerate(expected):
        assert rows["experts"][rows["sequence"] == number, 0, 0].tolist() == ids
    assert ((rows["gates"] > 0) == (rows["experts"] >= 0)).all()


def test_switch_refuses_another_way_of_running_its_experts(checkpoints):
    with pytest.raises(InputError, match=r"does not support setting experts implementation"):
        load(checkpoints("switch"), "grouped_mm", "cpu")


# What cannot be recorded is refused by name.


@pytest.mark.parametrize("noise", [{"router_jitter_noise": 0.4}, {"input_jitter_noise": 0.4}])
def test_router_noise_is_off_whatever_mode_the_model_was_left_in(noise):
    """Seen in huggingface/transformers#33969, vllm-project/vllm#35499:
    routers jittered in a model left in training mode.
    """
    one, two = (arrays(decoder("phimoe", **noise).train()) for _ in range(2))
    assert all((one[name] == two[name]).all() for name in one)


def test_a_kernel_that_bypasses_the_router_is_refused_by_layer():
    """Seen in vllm-project/vllm#57793: a hook on a bypassed router captured nothing and said nothing."""
    model = decoder("gpt_oss")
    block = model.model.layers[2].mlp

    def kernel(hidden):
        flat = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.nn.functional.linear(flat, block.router.weight, block.router.bias)
        weights, ids = logits.topk(3)
        return block.experts(flat, ids, weights.softmax(dim=-1)).reshape(hidden.shape), weights

    block.forward = kernel
    with pytest.raises(InputError, match=r"layer 2 captured 0 rows of 20 \(model.layers.2.mlp.router: .*kernel"):
        arrays(model)


def test_packed_router_weights_are_refused():
    """Seen in huggingface/transformers#44588, unslothai/unsloth-zoo#850: loading in 4 bits packed routers too."""
    model = decoder("olmoe")
    gate = model.model.layers[1].mlp.gate
    gate.weight = torch.nn.Parameter(torch.zeros(128, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(InputError, match=r"layer 1: router model.layers.1.mlp.gate is quantised \(weight is uint8\)"):
        Recorder(model)


def test_a_router_replaced_by_quantisation_is_refused():
    """Seen in huggingface/transformers#44588, unslothai/unsloth-zoo#850: loading in 4 bits packed routers too."""
    class Linear4bit(torch.nn.Linear):
        pass

    model = decoder("phimoe")
    model.model.layers[1].mlp.router = Linear4bit(32, 8)
    with pytest.raises(InputError, match=r"router model.layers.1.mlp.router is a Linear4bit, of no known family"):
        Recorder(model)


def test_a_dense_model_is_refused_and_deepseek_is_not():
    """Seen in huggingface/trl#7222, huggingface/transformers#48886:
    MoE was told by a config field that DeepSeek lacks.
    """
    with pytest.raises(InputError, match="LlamaForCausalLM: no MoE layer with a known router"):
        recorders(llama())
    assert [routed.layer for routed in routed_layers(decoder("deepseek_v3"))] == [1, 2]


def test_a_value_that_sixteen_bits_cannot_hold_is_an_error_naming_the_layer():
    """Seen in pytorch/pytorch#110285, TransformerLensOrg/TransformerLens#1346: numpy has no bfloat16."""
    model = decoder("deepseek_v3", routed_scaling_factor=2e5)
    with pytest.raises(InputError, match=r"layer 1: router model.layers.1.mlp.gate gave a value that is not finite"):
        arrays(model)


def test_a_model_spread_by_accelerate_is_captured_alike(checkpoints):
    whole, _ = load(checkpoints("deepseek_v3"), device="cpu")
    spread, _ = load(checkpoints("deepseek_v3"), device="spread")
    one, two = (arrays(without_end(model)) for model in (whole, spread))
    assert all((one[name] == two[name]).all() for name in one)
