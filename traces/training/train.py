"""Train a small real Mixture-of-Experts model with the routing topology of a large one.

The weights come from a small dense model, by sparse upcycling (upcycle.py) or, for Switch, its embeddings alone
(switch.py), the text from the allowed rows of several domains. Weights are bfloat16 on a GPU (float32 on a CPU) with
float32 master copies; AdamW, cosine schedule with warm-up; two load-balancing losses a layer, over the tokens of a step
and over windows of a sequence. Everything random hangs on one seed; with a time budget the number of steps, and so the
weights, depend on the machine as well.
"""

import hashlib
import json
import math
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.addresses import check_torch
from ground.errors import InputError
from ground.plots import new_figure, save_png
from ground.progress import Watch
from ground.text import first_words
from traces.capture.corpora import DomainText, read_domain
from traces.capture.routers import RoutedLayer, parts, routed_layers
from traces.statistics.usage import entropy
from traces.training.balance import balance_loss, chosen_experts, padded_balance_loss, window_balance_loss
from traces.training.batches import Pairs, TokenBatch, drawn, pack, paired, sample, sample_pairs
from traces.training.topologies import TOPOLOGIES, Topology
from traces.training.upcycle import upcycle

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainingOptions:
    """Hyperparameters. The budget is ``minutes`` or ``tokens``, whichever ends first (None: no such limit).

    ``balance`` is the weight of the load-balancing loss over all tokens of a step; ``window_balance`` that of the same
    loss over each ``window`` of tokens in a row of one sequence (the whole of a shorter one, and of each side of a pair
    of prompt and response). The second keeps a text from living off few experts: the larger its weight, the less
    domains part.
    """

    minutes: float | None = 6.0
    tokens: int | None = None
    batch: int = 48
    length: int = 512
    learning_rate: float = 3e-4
    warm_up: float = 0.03
    balance: float = 0.02
    window_balance: float = 0.35
    window: int = 128
    redrawn: float = 0.25
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            raise InputError("training needs a budget: minutes or tokens")
        for name in ("minutes", "tokens", "batch", "length", "learning_rate", "window"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value}; expected above 0")
        for name in ("balance", "window_balance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected 0 or above")
        if self.length % min(self.window, self.length):
            raise InputError(f"length is {self.length}; expected whole windows of {self.window} tokens")

    def spent(self, seconds: float, tokens: int) -> float:
        """Fraction of the budget used up."""
        return max(seconds / (60 * self.minutes) if self.minutes else 0, tokens / self.tokens if self.tokens else 0)

    def learning_rate_at(self, fraction: float) -> float:
        """Linear warm-up, then a cosine down to a tenth, over the fraction of the budget spent."""
        if fraction < self.warm_up:
            return self.learning_rate * max(fraction, 1e-3) / self.warm_up
        turned = math.cos(math.pi * (fraction - self.warm_up) / (1 - self.warm_up))
        return self.learning_rate * (0.55 + 0.45 * turned)


RUNNING_TEXT = ("law", "banking", "counselling", "code", "math")
PROMPTED = ("translation", "summaries", "instructions")
"""Domains that models are trained on unless one says otherwise: those of one stack, and those with an encoder."""


def train(
    base: str | Path, corpora: str | Path, output: str | Path, *, topology: str = "mixtral-8x7b",
    domains: Sequence[str] | None = None, options: TrainingOptions | None = None, device: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Make a model of ``topology`` from the dense ``base`` (a folder or a .gguf file), train it and save a checkpoint.

    A model with an encoder is trained to answer prompts, any other to go on with running text, of ``domains`` (None:
    PROMPTED or RUNNING_TEXT). The folder ``output`` appears whole, with the weights, the tokenizer, ``training.json``
    (the record returned) and ``training.png``. Raises InputError if an argument, the base or the text is wrong, or
    ``output`` exists.
    """
    options = options or TrainingOptions()
    if topology not in TOPOLOGIES:
        raise InputError(f"topology {topology!r}; one of {', '.join(TOPOLOGIES)}")
    if Path(output).exists():
        raise InputError(f"{output}: is there already; name a folder that is not")
    shape = TOPOLOGIES[topology]
    texts = [read_domain(corpora, name) for name in domains or (PROMPTED if shape.encoder_decoder else RUNNING_TEXT)]
    path = Path(base)
    sha256 = _sha256(path)
    dense, tokenizer = load_base(base)
    if _sha256(path) != sha256:
        raise InputError(f"{path}: changed while it was read; expected a file that nothing writes to")
    if shape.encoder_decoder:
        from traces.training.switch import new_switch, stacked

        pairs = {text.domain: paired(tokenizer, text, options.length) for text in texts}
        model = new_switch(dense, tokenizer, shape, options.seed, sample_pairs(pairs))
        tokens = {domain: one.tokens for domain, one in pairs.items()}
        del dense
        with stacked(model):
            trained = fit(model, pairs, options, device)
    else:
        blocks = {text.domain: pack(tokenizer, text, options.length, options.seed) for text in texts}
        model = upcycle(dense, shape, options.redrawn, options.seed, sample(blocks))
        tokens = {domain: int(one.size) for domain, one in blocks.items()}
        del dense
        trained = fit(model, blocks, options, device)
    record = {
        "what": _what(shape, path.stem, trained, list(tokens)),
        "topology": asdict(shape),
        "base": {"name": path.stem, "sha256": sha256},
        "data": {text.domain: {"tokens": tokens[text.domain], "sources": _sources(text)} for text in texts},
        **trained,
    }
    save(model, tokenizer, record, Path(output))
    return record


def load_base(base: str | Path) -> tuple[Any, Any]:
    """A dense causal language model in float32 and its tokenizer, from a Hugging Face folder or a .gguf file."""
    check_torch()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(base)
    if not path.exists():
        raise InputError(f"{path}: no such model; expected a Hugging Face folder or a .gguf file")
    folder, extra = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **extra)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True, **extra)
    except (ValueError, OSError) as error:
        raise InputError(f"{path}: not a model to start from ({first_words(error)})") from None


def fit(
    model: Any, text: Mapping[str, np.ndarray] | Mapping[str, Pairs], options: TrainingOptions, device: str = "auto"
) -> dict[str, Any]:
    """Train ``model`` in place on ``text`` and return the record of the training; the model ends in eval mode.

    ``text`` are blocks (n, length) of token ids by domain, or pairs for a model with an encoder.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    set_precision(model.to(device), torch.bfloat16 if device == "cuda" else torch.float32).train()
    torch.manual_seed(options.seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimiser = torch.optim.AdamW(
        masters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=device == "cuda"
    )
    upcoming = drawn(text, options.batch, options.length, options.seed, device)
    curve: list[dict[str, float]] = []
    uses = np.zeros(())
    calls: list[Any] = []
    started, tokens, fraction = time.monotonic(), 0, 0.0
    with Watch("training") as watch, ExitStack() as hooks:
        for part in parts(model):
            for routed in routed_layers(model, part):
                hooks.enter_context(routed.router.register_forward_hook(partial(_listen, calls, part, routed)))
        while fraction < 1:
            rate = options.learning_rate_at(fraction)
            optimiser.param_groups[0]["lr"] = rate
            batch = next(upcoming)
            loss, balance, used = _step(model, batch, calls, optimiser, parameters, options)
            tokens += batch.tokens
            seconds = time.monotonic() - started
            fraction = options.spent(seconds, tokens)
            curve.append({"tokens": tokens, "loss": loss, "balance": balance, "learning_rate": rate})
            # Experts change during training: their use is reported for the last part of it.
            uses = 0.98 * uses + used
            watch.at(fraction, f"loss {loss:.3f}  balance {balance:.3f}  {tokens / seconds:,.0f} tokens/s")
    model.eval()
    return _record(model, options, curve, uses, seconds, device)


def set_precision(model: Any, precision: "torch.dtype") -> Any:
    """The model with its parameters in ``precision`` and its buffers as they were.

    A checkpoint is loaded with rotary frequencies in float32: training must not see rounded ones.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision)
    return model


def _listen(calls: list[Any], part: str, routed: RoutedLayer, router: Any, inputs: Any, output: Any) -> None:
    """Note a router's part of the model, its logits (N, E) with their gradient, and the ids (N, K) it chose."""
    hidden = inputs[0]
    logits, _, ids = routed.family.read(router, hidden.reshape(-1, hidden.shape[-1]), output)
    calls.append((part, logits, ids))


def _step(
    model: Any, batch: TokenBatch, calls: list[Any], optimiser: Any, parameters: "list[torch.Tensor]",
    options: TrainingOptions,
) -> tuple[float, float, np.ndarray]:  # fmt: skip
    """One optimiser step: language-model loss in nats a token, mean balance loss of a layer, uses (L, E) of experts.

    ``calls`` receives what :func:`_listen` notes. ``optimiser`` holds the float32 masters of ``parameters``.
    """
    import torch

    calls.clear()
    (group,) = optimiser.param_groups
    masters = group["params"]
    loss = model(**batch.inputs, use_cache=False).loss
    uses, balances, windows = [], [], []
    for part, logits, ids in calls:
        chosen, valid = chosen_experts(ids, logits.shape[-1]), batch.valid[part]
        counted = slice(None) if valid is None else valid.flatten()
        uses.append(chosen[counted].mean(dim=0))
        balances.append(balance_loss(logits[counted], uses[-1]))
        if not options.window_balance:
            continue
        if valid is None:
            windows.append(window_balance_loss(logits, chosen, min(options.window, options.length)))
        else:
            windows.append(padded_balance_loss(logits, chosen, valid))
    balance = torch.stack(balances).mean()
    evened = options.balance * balance
    if windows:
        evened = evened + options.window_balance * torch.stack(windows).mean()
    (loss + evened).backward()
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad = None if parameter.grad is None else parameter.grad.float()
        parameter.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimiser.step()
    with torch.no_grad():
        torch._foreach_copy_(parameters, masters)
    value, balanced = loss.item(), balance.item()
    if not math.isfinite(value):
        raise InputError(f"training diverged: loss {value}; {options.learning_rate} may be too fast a learning rate")
    return value, balanced, torch.stack(uses).cpu().numpy()


def _record(
    model: Any, options: TrainingOptions, curve: list[dict[str, float]], uses: np.ndarray, seconds: float, device: str
) -> dict[str, Any]:
    """What is written down of a training; the curve is thinned to at most 200 points, each a mean."""
    import torch
    import transformers

    tokens = int(curve[-1]["tokens"])
    tail = curve[-max(1, len(curve) // 50) :]
    chunks = np.array_split(np.array(curve, object), min(200, len(curve)))

    def mean(points: Iterable[dict[str, float]], name: str, digits: int = 4) -> float:
        return round(float(np.mean([point[name] for point in points])), digits)

    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": {
            **asdict(options),
            "steps": len(curve),
            "trained_tokens": tokens,
            "seconds": round(seconds, 1),
            "tokens_per_s": round(tokens / seconds, 1),
            "first_loss": round(curve[0]["loss"], 4),
            "final_loss": mean(tail, "loss"),
            "final_balance": mean(tail, "balance"),
            "optimiser": "AdamW, betas 0.9 0.95, float32 masters, gradient norm at most 1",
            "precision": str(model.dtype).removeprefix("torch."),
        },
        "entropy_bits": entropy(uses / uses.sum(axis=1, keepdims=True)).round(4).tolist(),
        "curve": [{name: mean(chunk, name, 6) for name in curve[0]} for chunk in chunks],
        "software": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        },
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
    }  # fmt: skip


def save(model: Any, tokenizer: Any, record: Mapping[str, Any], output: Path) -> None:
    """Write the checkpoint folder aside and rename it, so that it is whole or not there."""
    part = output.with_name(f".{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "training.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
    draw(record, part / "training.png")
    part.rename(output)


def draw(record: Mapping[str, Any], path: Path) -> None:
    """A picture of a training record: loss over tokens, and how evenly each layer uses its experts."""
    figure = new_figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    millions = [point["tokens"] / 1e6 for point in record["curve"]]
    left.plot(millions, [point["loss"] for point in record["curve"]], color="#1f4e79")
    left.set(xlabel="tokens trained on, millions", ylabel="loss, nats a token", title="language-model loss")
    entropy = record["entropy_bits"]
    right.bar(range(len(entropy)), entropy, color="#7a9cc6")
    most = math.log2(record["topology"]["experts"])
    right.axhline(most, color="#888888", linewidth=0.8)
    right.annotate("all experts alike", (0, most), (0, 3), textcoords="offset points", fontsize=8)
    right.set(ylim=(0, 1.12 * most), xlabel="layer", ylabel="entropy of its experts, bits")
    right.set_title("use of experts at the end of training")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save_png(figure, path, dpi=120)


_LAYERS = {
    "switch_transformers": " in each of encoder and decoder, every second routed",
    "deepseek_v2": ", the first without a router",
}
_MADE = {
    "switch_transformers": "(its tokenizer and embeddings, all else from scratch)",
    "deepseek_v2": "by sparse upcycling (as a DeepSeek-V2 of one group without scaling, for want of a class)",
}


def _what(topology: Topology, base: str, record: Mapping[str, Any], domains: Sequence[str]) -> str:
    """Plain words for the traces of this model."""
    return (
        f"a small real Mixture-of-Experts model of {record['parameters'] / 1e6:.0f} million parameters with the "
        f"topology of {topology.name} ({topology.layers} layers{_LAYERS.get(topology.family, '')}, {topology.experts} "
        f"experts, top {topology.top_k}), made from {base} {_MADE.get(topology.family, 'by sparse upcycling')} and "
        f"trained on {record['training']['trained_tokens'] / 1e6:.1f} million "
        f"tokens of {', '.join(domains)} text; its routing is its own, not that of {topology.name}, whose costs are "
        f"charged by default"
    )


def _sources(text: DomainText) -> dict[str, Any]:
    """Rows trained on by source and licence."""
    rows: dict[str, dict[str, Any]] = {}
    for row in text.train:
        entry = rows.setdefault(row.source, {"licence": row.licence, "rows": 0})
        entry["rows"] += 1
    return dict(sorted(rows.items()))


def _sha256(path: Path) -> str | None:
    """The hash of a file; None for a folder or nothing."""
    if not path.is_file():
        return None
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
