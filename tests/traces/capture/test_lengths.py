"""Positions that depend on how long a sequence is: captured as transformers' own generate runs each sequence alone."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers

from ground.errors import InputError
from tests.support.tiny_families import SCALED, decoder
from tests.traces.capture.test_families import run, without_end
from traces.capture.positions import LengthTables
from traces.capture.prompts import Offered, batches

# transformers 5.17 drops the cache where the cached frequencies end, and then runs the last token alone.
LOSES_CONTEXT = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)


def made(kind):
    family, fields = SCALED[kind]
    return without_end(decoder(family, **fields))


def prompt(tokens):
    return [3 + (7 * i * i + i) % 60 for i in range(tokens)]


@pytest.mark.parametrize("tokens", [20, 30, 33, 50])
@pytest.mark.parametrize("kind", SCALED)
def test_a_prompt_in_any_pieces_and_decoding_past_the_limit_are_those_of_generate(kind, tokens):
    model, new_tokens = made(kind), 8
    run(model, [prompt(70)], new_tokens=3)  # leaves the frequencies of a longer sequence behind
    whole = run(model, [prompt(tokens)], new_tokens=new_tokens)[""]
    for chunk in (7, 16, 4096):
        pieces = run(model, [prompt(tokens)], new_tokens=new_tokens, chunk=chunk)[""]
        for name in ("experts", "token", "position", "phase", "lookahead"):
            assert (pieces.arrays[name] == whole.arrays[name]).all(), (name, chunk)
    assert whole.arrays["position"].tolist() == list(range(tokens + new_tokens - 1))
    assert whole.arrays["phase"].tolist() == [0] * tokens + [1] * (new_tokens - 1)
    if LOSES_CONTEXT and "dropped" in kind and tokens == 30:
        return
    said = made(kind).generate(
        torch.tensor([prompt(tokens)]), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    assert whole.arrays["token"].tolist() == said[0, :-1].tolist()


@pytest.mark.parametrize("tokens", [30, 50])
def test_frequencies_of_another_length_would_route_otherwise(tokens):
    """So the test above can fail: the pieces run as they are, each by its own last position."""
    model = made("longrope")
    whole = run(model, [prompt(50)], new_tokens=1)[""].arrays
    short = run(model, [prompt(50)[:20]], new_tokens=1)[""].arrays
    assert (whole["experts"][:20] != short["experts"]).any()


def test_sequences_that_may_pass_the_limit_are_never_in_a_batch_with_others():
    model = made("longrope")
    assert LengthTables(model).limit == 32 and LengthTables(made("yarn")).limit is None
    with pytest.raises(InputError, match="grow over 32 tokens, where positions depend on length"):
        run(model, [prompt(30), prompt(4)], new_tokens=5)
    run(model, [prompt(28), prompt(4)], new_tokens=5)


def test_batches_leave_long_sequences_alone():
    class Words:
        def __call__(self, text, **_):
            return {"input_ids": text.split()}

    from traces.capture.corpora import TextRow

    given = [TextRow("law", "law", "MIT", "word " * count, "") for count in (4, 5, 30, 6, 7, 29, 31)]
    found = batches(Offered(given, Words(), "plain", "eval", 99), 8, 4096, 5, 32)
    assert [[len(one.prompt.ids) for one in batch] for batch in found] == [[4, 5], [30], [6, 7], [29], [31]]
