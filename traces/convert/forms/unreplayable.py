"""Records that cannot be replayed, each named with the way to one that can."""

import re
from collections.abc import Callable, Sequence

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.request import Record
from traces.convert.shapes import Given
from traces.convert.source import Source

COUNTS_ONLY = (
    "which has counts of experts and no tokens, so there is nothing to replay: record with "
    "--expert-distribution-recorder-mode per_token, or ask for return_routed_experts"
)
_LLAMA = "run the model by python -m traces capture, or serve it with vLLM or SGLang and --enable-return-routed-experts"
_IMATRIX = f"an importance matrix of llama.cpp, which has sums over tokens and no routes: {_LLAMA}"


def _columns(*names: str) -> Callable[[Source], bool]:
    return lambda source: source.nature == "csv" and set(source.columns) == set(names)


def _holds_counts(source: Source) -> bool:
    value = source.value
    while isinstance(value, dict) and len(value) and not {"prob_density", "count_frequency"} & set(value):
        value = next((inner for inner in value.values() if isinstance(inner, dict)), None)
    return isinstance(value, dict)


_KINDS: dict[str, tuple[Callable[[Source], bool], str]] = {
    "sglang-recorder-counts": (
        lambda source: source.nature == "torch" and "logical_count" in source.torch_keys,
        f"SGLang's recorder in mode stat, {COUNTS_ONLY}",
    ),
    "llama-cpp-experts": (
        lambda source: _columns("layer", "expert")(source) or _columns("layer", "expert", "count")(source),
        f"a list of layers and experts as llama.cpp writes it, without tokens: steps cannot be told apart: {_LLAMA}",
    ),
    "imatrix": (
        lambda source: (
            re.match(rb".{4}.{4}blk\.\d+\.", source.head, re.DOTALL) is not None
            or (source.nature == "gguf" and b"imatrix" in source.head)
        ),
        _IMATRIX,
    ),
    "gguf": (
        lambda source: source.nature == "gguf" and b"imatrix" not in source.head,
        f"a GGUF file, a model's weights and no routes: {_LLAMA}",
    ),
    "gpt-oss-summary": (
        _holds_counts,
        "a summary of GPT-OSS-MoE-ExpertFingerprinting, which has how often experts were taken and no tokens: give the "
        "file of the same name that ends in _examples.json",
    ),
    "esft-config": (
        lambda source: source.keys >= {"experts", "shared_experts", "non_expert_modules"},
        "a list of experts that ESFT trains, without tokens: give the folder of expert_weights_N.txt",
    ),
    "verl-rollout": (
        lambda source: source.keys >= {"input", "output", "score"} and "routed_experts" not in source.keys,
        "a rollout that verl dumped as text, without routes: save the batch's routed_experts, see docs/convert.md",
    ),
}


def _refusing(words: str) -> Callable[[Sequence[Source], Given], Record]:
    def read(sources: Sequence[Source], given: Given) -> Record:
        raise InputError(words)

    return read


FORMS = tuple(
    Form(name, words.split(":")[0], known, _refusing(words), replayed=False) for name, (known, words) in _KINDS.items()
)
