"""Tiny models, a tokenizer and corpora made on the spot: real checkpoints and files, no download."""

import json
import lzma
from pathlib import Path
from typing import Any

_TEXT = """
the court clause party shall agree notice term law judge card money bank account transfer balance fee help feel sad
friend talk listen sleep worry def return if for in list value print class self import sum step answer total number
apples each half times plus equals problem solve customer agent client is a of and to my your what how
"""
WORDS = _TEXT.split()


def tokenizer(pad: str | None = "<pad>") -> Any:
    """Words as tokens: <unk>, <eos>, <pad>, then WORDS; white space and anything unknown is <unk>."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", "<pad>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    extra = {"pad_token": pad} if pad else {}
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", **extra)


def mixtral(layers: int = 3, experts: int = 8, top_k: int = 2, **more: Any) -> Any:
    """A random Mixtral, hidden size 32, float32, eval mode; the same weights every time."""
    import torch

    torch.set_num_threads(1)  # a tiny model runs no faster on more, and much slower on a busy machine
    from transformers import MixtralConfig, MixtralForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 3 + len(WORDS), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": experts,
        "num_experts_per_tok": top_k, "sliding_window": None, "eos_token_id": 1, "pad_token_id": 2, "bos_token_id": 1,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(7)
    return MixtralForCausalLM(MixtralConfig(**{**settings, **more})).eval()


def llama(layers: int = 3) -> Any:
    """A random dense Llama of the same size."""
    import torch

    torch.set_num_threads(1)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3 + len(WORDS), hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=2,
            bos_token_id=1,
        )
    )  # fmt: skip


def write_corpus(folder: Path, file: str, rows: list[tuple[str, str, str]]) -> None:
    """Write rows (source, prompt, response) as ``file``.jsonl.xz."""
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / f"{file}.jsonl.xz", "wt", encoding="utf-8") as lines:
        for source, prompt, response in rows:
            lines.write(json.dumps({"domain": file, "source": source, "prompt": prompt, "response": response}) + "\n")


def write_corpora(folder: Path, count: int = 160) -> Path:
    """Law and code with ``count`` allowed prompts each, of words that the tokenizer knows."""
    for file, source, start in (("law", "HazyResearch/legalbench:CUAD_X", 0), ("code", "CPython 3.11.7 stdlib", 28)):
        words = WORDS[start : start + 20]
        rows = []
        for number in range(count):
            chosen = [words[(number * 7 + i * i) % len(words)] for i in range(40)]
            rows.append((source, " ".join(chosen[: 3 + number % 5]) + f" {number}", " ".join(chosen[8:])))
        write_corpus(folder, file, rows)
    return folder
