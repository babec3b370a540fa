"""Train a path predictor on the profile splits of traces: binary cross-entropy on which experts a token took.

A part of the sequences is held out, and the epoch that tells them best is kept. Seeded: on a CPU the same traces and
options give the same file.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ground.errors import InputError
from ground.progress import Watch
from traces.predictor.network import (
    LEAST_VOCABULARY,
    PathBatch,
    PathPredictor,
    PredictorShape,
    device_named,
    new_predictor,
    path_batch,
    save_predictor,
)
from traces.predictor.sequences import PathSequence, load_with_prompts, path_sequences
from traces.predictor.start import start_from_statistics
from traces.trace import Trace

# Batches are cut from so many sequences sorted by length, so that little of a batch is padding.
_SORTED_TOGETHER = 16


@dataclass(frozen=True)
class PredictorOptions:
    """Hyperparameters: ``batch`` sequences a step, AdamW, linear ``warm_up`` (a share of all steps), then a cosine.

    ``held_out`` is the share of sequences that choose the epoch.
    """

    epochs: int = 30
    batch: int = 64
    learning_rate: float = 2e-4
    warm_up: float = 0.1
    weight_decay: float = 1e-2
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; expected above 0")
        for name in ("held_out", "warm_up"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected 0 or more, below 1")


def train_predictor(
    paths: Sequence[str | Path], output: str | Path, options: PredictorOptions | None = None, device: str = "auto",
    **sizes: int,
) -> dict[str, Any]:  # fmt: skip
    """Train on the profile splits of ``paths``, write the predictor and return its record, with the ``seconds`` taken.

    ``sizes`` are fields of `PredictorShape` that differ from its defaults. Raises InputError for traces of different
    models, without token ids or without a profile split.
    """
    options = options or PredictorOptions()
    loaded = [load_with_prompts(path) for path in paths]
    head = _same_model([trace for trace, _ in loaded])
    sequences = [one for trace, prompts in loaded for one in path_sequences(trace, prompts, "profile")]
    if not sequences:
        raise InputError(f"{head.source}: no sequence in the profile split, of which predictors learn")
    largest = max(int(max(one.prompt.max(), one.tokens.max())) for one in sequences)
    shape = PredictorShape(max(LEAST_VOCABULARY, largest + 2), head.n_layers, head.n_experts, **sizes)
    net = new_predictor(shape, options.seed)
    started = time.monotonic()
    trained = fit(net, sequences, options, device_named(device))
    seconds = round(time.monotonic() - started, 1)
    record = {
        "model": {"name": head.meta["model"]["name"], "part": head.meta["model"].get("part", "")},
        "checkpoint_sha256": checkpoint_of(head),
        "top_k": head.top_k,
        "layers": head.layers.tolist(),
        "parameters": net.parameters_in_all,
        "trained_on": [_source(trace) for trace, _ in loaded],
        "training": {**asdict(options), **trained},
        "software": {"torch": torch.__version__},
    }
    save_predictor(net, record, output)
    return {"shape": asdict(shape), **record, "seconds": seconds}


def checkpoint_of(trace: Trace) -> str | None:
    """The hash of the weights that a trace was captured from; None where it names none."""
    found = trace.meta.get("captured", {}).get("checkpoint_sha256")
    return found if isinstance(found, str) else None


def _same_model(traces: Sequence[Trace]) -> Trace:
    """The first of the traces. Raises InputError unless all are of the same model, to its weights."""
    head = traces[0]
    for other in traces[1:]:
        for what, of in (
            ("model", lambda t: (t.meta["model"]["name"], t.meta["model"].get("part"))),
            ("checkpoint", checkpoint_of),
            ("topology", lambda t: (t.layers.tolist(), t.n_experts, t.top_k)),
        ):
            if of(head) != of(other):
                raise InputError(
                    f"{other.source}: its {what} is {of(other)!s:.60}, that of {head.source} is {of(head)!s:.60}; "
                    f"expected one model's traces"
                )
    return head


def _source(trace: Trace) -> dict[str, Any]:
    """What a predictor's record says of a trace that it learnt from."""
    return {
        "sha256": trace.sha256,
        "domains": sorted(set(trace.domain[trace.split == "profile"].tolist())),
        "sequences": int((trace.split == "profile").sum()),
        "rows": int(trace.row_split("profile").sum()),
        "licence": str(trace.meta.get("text", {}).get("licence", "not stated")),
    }


def fit(
    net: PathPredictor, sequences: Sequence[PathSequence], options: PredictorOptions, device: str
) -> dict[str, Any]:
    """Train ``net`` in place, leave it with the best epoch's weights in eval mode, and return what came of it."""
    order = np.random.default_rng([options.seed, 1]).permutation(len(sequences)).tolist()
    held = round(options.held_out * len(sequences))
    held_out, learnt = [sequences[i] for i in order[:held]], [sequences[i] for i in order[held:]]
    if not learnt:
        raise InputError(f"{len(sequences)} profile sequences leave none to learn from; expected more")
    start_from_statistics(net, learnt, options.seed)
    net.to(device).train()
    groups = [
        {"params": weights, "factor": factor, "weight_decay": options.weight_decay} for weights, factor in _groups(net)
    ]
    optimiser = torch.optim.AdamW(groups, lr=options.learning_rate)
    random = np.random.default_rng([options.seed, 2])
    steps = options.epochs * math.ceil(len(learnt) / options.batch)
    best, kept, curve, step = math.inf, 0, [], 0
    best_weights: dict[str, torch.Tensor] = {}
    with Watch("path predictor") as watch:
        for epoch in range(options.epochs):
            losses = []
            for chosen in _batches([len(one.tokens) + len(one.prompt) for one in learnt], options.batch, random):
                rate = options.learning_rate * _rate(step / steps, options.warm_up)
                losses.append(_step(net, optimiser, rate, [learnt[i] for i in chosen]))
                step += 1
            loss, held_loss = float(torch.stack(losses).mean()), mean_loss(net, held_out, options.batch)
            curve.append((loss, held_loss))
            if not math.isfinite(loss):
                raise InputError(f"training diverged: loss {loss}; try a lower learning_rate")
            if held_loss is None or held_loss < best:
                best, kept = math.inf if held_loss is None else held_loss, epoch
                best_weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
            watch.at((epoch + 1) / options.epochs, f"loss {loss:.4f}, held out {held_loss or math.nan:.4f}")
    if best_weights:
        net.load_state_dict(best_weights)
    net.eval()
    return {
        "steps": step,
        "kept_epoch": kept + 1,
        "loss": [round(loss, 6) for loss, _ in curve],
        "held_out_loss": [None if held_loss is None else round(held_loss, 6) for _, held_loss in curve],
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
    }


def _step(net: PathPredictor, optimiser: Any, rate: float, sequences: Sequence[PathSequence]) -> torch.Tensor:
    """One optimiser step on a batch; its loss."""
    for group in optimiser.param_groups:
        group["lr"] = group["factor"] * rate
    batch = path_batch(sequences, net.shape.vocabulary, next(net.parameters()).device)
    loss = path_loss(net(batch.prompt, batch.prompt_valid, batch.tokens), batch)
    optimiser.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimiser.step()
    return loss.detach()


def _groups(net: PathPredictor) -> list[tuple[list[torch.nn.Parameter], float]]:
    """Weights, and by how much they learn faster than the rest, whose steps would drown what tokens say."""
    embedding, head = list(net.stacks.shared.parameters()), list(net.head.parameters())
    special = {id(weight) for weight in (*embedding, *head)}
    return [([one for one in net.parameters() if id(one) not in special], 1.0), (embedding, 10.0), (head, 10.0)]


def path_loss(logits: torch.Tensor, batch: PathBatch) -> torch.Tensor:
    """Binary cross-entropy a (row, layer, expert), over the layers in which a row has a route."""
    taken, routed = _labels(logits, batch)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, taken, reduction="none").mean(dim=-1)
    return (losses * routed).sum() / routed.sum().clamp(min=1)


def mean_loss(net: PathPredictor, sequences: Sequence[PathSequence], size: int) -> float | None:
    """The loss of sequences, a row and layer alike; None without any."""
    device = next(net.parameters()).device
    total, count = 0.0, 0.0
    net.eval()
    with torch.inference_mode():
        for start in range(0, len(sequences), size):
            batch = path_batch(sequences[start : start + size], net.shape.vocabulary, device)
            routed = float((batch.routes >= 0).any(dim=-1).sum())
            total += float(path_loss(net(batch.prompt, batch.prompt_valid, batch.tokens), batch)) * routed
            count += routed
    net.train()
    return total / count if count else None


def _labels(logits: torch.Tensor, batch: PathBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S, L, E) 1 where an expert was taken, and (B, S, L) whether there is a route."""
    experts = logits.shape[-1]
    ids = batch.routes.masked_fill(batch.routes < 0, experts)
    taken = torch.zeros(*logits.shape[:-1], experts + 1, device=logits.device).scatter_(-1, ids, 1.0)
    return taken[..., :experts], (batch.routes >= 0).any(dim=-1)


def _batches(lengths: Sequence[int], size: int, random: np.random.Generator) -> Iterator[list[int]]:
    """All sequences once, in batches of alike lengths, in random order."""
    order = random.permutation(len(lengths))
    found = []
    for start in range(0, len(order), size * _SORTED_TOGETHER):
        together = sorted(order[start : start + size * _SORTED_TOGETHER].tolist(), key=lengths.__getitem__)
        found += [together[at : at + size] for at in range(0, len(together), size)]
    for place in random.permutation(len(found)):
        yield found[place]


def _rate(done: float, warm_up: float) -> float:
    """Share of the highest learning rate after the share ``done`` of all steps."""
    if done < warm_up:
        return max(done, 1e-3) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - warm_up) / (1 - warm_up)))
