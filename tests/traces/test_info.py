"""info across traces and domains, and verify against a hash or the model itself."""

import json

import numpy as np
import pytest

from ground.errors import InputError
from traces.__main__ import main
from traces.assemble import assemble
from traces.capture.verify import verify
from traces.statistics.separation import separation
from traces.trace import Trace

L, E, D = 3, 8, 6


def domain_trace(domain, seed=0, basis="b", experts=E, embeddings=True):
    """Ten sequences of 2 prefill and 12 decode rows; embeddings tell the experts, each domain in its own way."""
    rng = np.random.default_rng([seed, sum(domain.encode())])
    kinds = rng.integers(0, 3, (10, 14))
    routes = rng.permutation(experts)[:6].reshape(3, 2)  # three kinds of token, two experts each
    centres = rng.normal(size=(3, L + 1, D)) * 40
    model = {"name": "toy", "experts": experts, "top_k": 2}
    trace = assemble(
        meta={"schema": 1, "model": model, "embedding": {"basis_sha256": basis}},
        layers=list(range(L)),
        experts=np.repeat(routes[kinds.ravel()][:, None], L, axis=1).astype(np.int16),
        lengths=np.full(10, 14),
        domain=np.array([domain] * 10),
        sequence_id=np.array([f"{domain}-{i}" for i in range(10)]),
        prefill=np.full(10, 2),
    )
    if not embeddings:
        return trace
    states = np.rint(centres[kinds.ravel()[trace.decode_rows]] + rng.normal(size=(120, L + 1, D)))
    fields = {name: getattr(trace, name) for name in trace.__dataclass_fields__}
    fields |= {"embeddings": np.clip(states, -127, 127).astype(np.int8), "embedding_scale": np.ones(L + 1, np.float32)}
    return Trace(**fields)


def test_neighbours_of_the_own_domain_tell_all_and_others_little():
    found = separation([domain_trace("law"), domain_trace("code")])
    for one, other in (("law", "code"), ("code", "law")):
        assert found["neighbour_recall"][one][one] == 1
        assert found["neighbour_recall"][one][other] < 0.7
    trace = domain_trace("law")
    rows = np.flatnonzero(trace.row_split("eval") & (trace.phase == 1))
    same = (trace.experts[rows][..., None] == trace.experts[rows - 1][:, :, None]).any(axis=3).mean()
    assert found["previous_token_recall"]["law"] == pytest.approx(same)


def test_the_cosine_of_adjacent_layers_is_that_of_the_stored_vectors():
    trace = domain_trace("law")
    states = trace.embeddings[:, 1:].astype(float)
    states /= np.linalg.norm(states, axis=2, keepdims=True)
    expected = (states[:, :-1] * states[:, 1:]).sum(axis=2).mean(axis=0)
    assert separation([trace])["adjacent_layer_cosine"] == pytest.approx(expected, abs=1e-4)


def test_one_trace_of_several_domains_equals_several_traces():
    traces = [domain_trace("law"), domain_trace("code")]
    assert separation([Trace.concat(traces)]) == separation([traces[1], traces[0]])


def test_a_sequence_that_starts_with_decode_has_no_previous_token_there():
    trace = domain_trace("law")
    phase = np.ones_like(trace.phase)
    fields = {name: getattr(trace, name) for name in trace.__dataclass_fields__}
    fields |= {"phase": phase, "embeddings": np.ones((140, L + 1, D), np.int8)}
    found = separation([Trace(**fields)])
    rows = np.flatnonzero(trace.row_split("eval"))
    first = np.isin(rows, trace.offsets[:-1])
    same = (trace.experts[rows][..., None] == trace.experts[rows - 1][:, :, None]).any(axis=3)
    assert found["previous_token_recall"]["law"] == pytest.approx(np.where(first[:, None, None], False, same).mean())


@pytest.mark.parametrize(
    ("traces", "why"),
    [
        ([domain_trace("law"), domain_trace("code", embeddings=False)], "no embeddings"),
        ([domain_trace("law"), domain_trace("code", basis="c")], "several models or embedding bases"),
        ([domain_trace("law"), domain_trace("code", experts=9)], "several models or embedding bases"),
        ([domain_trace("law").select("eval")], "no domain has decode rows of both splits"),
    ],
)
def test_what_cannot_be_compared_says_why(traces, why):
    assert why in separation(traces)


def test_the_command_prints_and_writes_it(tmp_path, capsys):
    paths = [tmp_path / "law.npz", tmp_path / "code.npz"]
    for path in paths:
        domain_trace(path.stem).save(path)
    assert main(["info", *map(str, paths), "--json", str(tmp_path / "i.json")]) == 0
    shown = capsys.readouterr().out
    assert "recall of experts" in shown and "cosine of adjacent layers" in shown and "as stored" in shown
    facts = json.loads((tmp_path / "i.json").read_text())
    assert [fact["routing"]["neighbour_recall"]["law"]["law"] for fact in facts] == [1, 1]
    assert main(["info", str(paths[0]), "--json", "-"]) == 0
    assert list(json.loads(capsys.readouterr().out)[0]["routing"]["neighbour_recall"]) == ["law"]


def test_verify_compares_the_hash(tmp_path, capsys):
    path = tmp_path / "law.npz"
    domain_trace("law").save(path)
    digest = Trace.load(path).sha256
    assert main(["verify", str(path), "--sha256", digest.upper()]) == 0
    assert capsys.readouterr().out == f"{digest}  ok\n"
    assert main(["verify", str(path), "--sha256", "0" * 64]) == 2
    assert f"sha256 {digest}, expected {'0' * 64}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """Checkpoints of several families with a trace of each, batches of four."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.tiny_families import decoder, switch
    from tests.support.tiny_moe import WORDS, tokenizer
    from traces.capture.capture import Amount, capture_prompts

    folder = tmp_path_factory.mktemp("verify")
    prompts = folder / "p.txt"
    prompts.write_text("".join(" ".join(WORDS[i : i + 2 + i % 5]) + "\n" for i in range(12)))
    made = {}
    for family in ("mixtral", "deepseek_v3", "switch"):
        model = switch() if family == "switch" else decoder(family)
        model.save_pretrained(folder / family)
        tokenizer().save_pretrained(folder / family)
        path = folder / f"{family}.npz"
        amount = Amount(None, None, prompt_tokens=99, new_tokens=6, batch=4)
        paths = capture_prompts(folder / family, prompts, path, amount=amount, embedding="none")
        made[family] = (folder / family, paths)
    return made


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "switch"])
def test_verify_runs_the_model_again(captured, family):
    model, paths = captured[family]
    for path in paths:
        text = verify(path, model, sequences=5)
        assert "routes are equal (100.00%" in text and "of 4 sequences" in text
        assert "not those that the trace names" not in text


def test_verify_counts_what_differs_and_says_why(captured, tmp_path):
    model, (path,) = captured["mixtral"]
    trace = Trace.load(path)
    probs = trace.probs.copy().astype(int)
    experts = trace.experts.copy()
    order = np.argsort(-probs, axis=2, kind="stable")
    rows = trace.n_rows
    experts[::4, 0, 1] = order[::4, 0, 2]  # the third best in place of the second, in a quarter of one layer's routes
    changed = {name: getattr(trace, name) for name in trace.__dataclass_fields__} | {"experts": experts}
    Trace(**changed).save(tmp_path / "x.npz")
    text = verify(tmp_path / "x.npz", model, sequences=99)
    differ = len(range(0, rows, 4))
    assert f"{rows * 3 - differ:,} of {rows * 3:,} routes are equal" in text
    assert f"; {differ:,} differ, " in text and "another order" in text
    gap = probs[::4, 0][np.arange(differ), order[::4, 0, 1]] - probs[::4, 0][np.arange(differ), order[::4, 0, 2]]
    assert f"{(gap <= 0.02 * 255).sum():,} of them between experts" in text


def test_verify_refuses_another_model_and_what_cannot_be_run(captured, tmp_path, capsys):
    model, (path,) = captured["mixtral"]
    other, _ = captured["deepseek_v3"]
    with pytest.raises(InputError, match="routes"):
        verify(path, other)
    from tests.support.tiny_families import decoder
    from tests.support.tiny_moe import tokenizer

    changed = decoder("mixtral", initializer_range=0.2)
    for parameter in changed.parameters():
        parameter.data = parameter.data.roll(1, -1)
    changed.save_pretrained(tmp_path / "changed")
    tokenizer().save_pretrained(tmp_path / "changed")
    assert main(["verify", str(path), "--model", str(tmp_path / "changed")]) == 2
    error = capsys.readouterr().err
    assert "not routes of" in error and "weights are not those that the trace names" in error
    domain_trace("law").save(tmp_path / "law.npz")
    with pytest.raises(InputError, match="no sequence with all token ids"):
        verify(tmp_path / "law.npz", model)
    _, (decoded, _) = captured["switch"]
    (tmp_path / "alone.npz").write_bytes(decoded.read_bytes())
    with pytest.raises(InputError, match=r"its prompts are in the encoder's trace; expected .*alone.encoder.npz"):
        verify(tmp_path / "alone.npz", captured["switch"][0])
