"""Records that cannot be replayed, each named with the way to one that can."""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

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
_OTHER_COUNTS = "expert-counts"
_IMATRIX = f"an importance matrix of llama.cpp, which has sums over tokens and no routes: {_LLAMA}"


_COUNTED = re.compile(r"count|freq|usage|load|hits|histogram|utili[sz]ation|activations?$")
_ROUTED = re.compile(r"routed|route|topk|top_k|indices|token|position|step|records|samples|select")


def _names_counts(names: Collection[str]) -> bool:
    """Whether names are of how often experts were taken, and none of what a token took."""
    lower = [name.lower() for name in names]
    return any(map(_COUNTED.search, lower)) and not any(map(_ROUTED.search, lower))


def _is_table_of_counts(source: Source) -> bool:
    """Whether a CSV has layers and experts, and what is counted, and no column of tokens or steps."""
    columns = [name.strip().lower() for name in source.columns]
    layers, experts = (any(word in name for name in columns) for word in ("layer", "expert"))
    return source.nature == "csv" and layers and experts and not any(map(_ROUTED.search, columns)) and len(columns) < 6


def _is_grid(value: Any) -> bool:
    """Whether this is numbers by layer and expert: lists of lists, or objects of objects with numbers as names."""
    for _ in range(2):
        if isinstance(value, dict) and value and all(re.fullmatch(r"\D*\d+", str(name)) for name in value):
            value = next(iter(value.values()))
        elif isinstance(value, list) and value:
            value = value[0]
        else:
            return False
    return isinstance(value, int | float)


def _is_json_of_counts(source: Source) -> bool:
    value = source.value
    if isinstance(value, dict) and _names_counts(value):
        inside = list(value.values())
        return any(map(_is_grid, inside + [one for held in inside if isinstance(held, dict) for one in held.values()]))
    return _is_grid(value)


def _counts(source: Source) -> bool:
    """Whether a file has numbers of tokens by layer and expert, and is of no kind that has a name of its own."""
    if any(known(source) for name, (known, _) in _KINDS.items() if name != _OTHER_COUNTS):
        return False
    if source.nature == "safetensors":  # TensorRT-LLM's statistics, an array for each iteration and layer
        return re.search(rb'"\d+_\d+":\{"dtype":"[IF]', source.head) is not None
    if source.nature in ("npz", "torch"):
        return _names_counts(source.arrays | source.torch_keys)
    return _is_json_of_counts(source) if source.nature == "json" else _is_table_of_counts(source)


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
        lambda source: set(source.columns) == {"layer", "expert"},
        f"a list of layers and experts as llama.cpp writes it, without tokens: steps cannot be told apart: {_LLAMA}",
    ),
    _OTHER_COUNTS: (_counts, f"how often experts were taken, without tokens, so there is nothing to replay: {_LLAMA}"),
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
