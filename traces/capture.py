"""Record routing traces of a Hugging Face Mixture-of-Experts model on domain text: real prefill, real decoding.

Rows are captured batch by batch: ids, gates and probabilities stay in memory (layers x (experts + 6 top_k) bytes a
row), full hidden states are spooled to a temporary file (4 x hidden size x (layers + 1) bytes a decode row) until the
model's embedding basis is known; no more than one batch of them is ever in memory.
"""

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from traces import routing
from traces.checkpoint import end_tokens, load, provenance
from traces.corpora import DOMAINS, DomainText, Row, read_domain
from traces.decoding import Decoding, Prompt, passes
from traces.embeddings import Basis
from traces.errors import InputError
from traces.files import atomic_path
from traces.pricing import Keyed, choose_basis
from traces.progress import Watch
from traces.recorder import Recorder
from traces.trace import Trace

TEMPLATES = ("plain", "chat")
BASIS_FILE = "embedding_basis.npz"

_STEPS = {"profile": "profile", "eval": "evaluation"}


@dataclass(frozen=True)
class Amount:
    """How much of a domain to capture; sequences are taken whole until both decode tokens and sequences suffice."""

    profile_tokens: int = 1400
    eval_tokens: int = 600
    eval_sequences: int = 40
    prompt_tokens: int = 64
    new_tokens: int = 32
    batch: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")

    def suffices(self, split: str, decode_rows: int, sequences: int) -> bool:
        """Whether this much of a split is enough."""
        if split == "eval":
            return decode_rows >= self.eval_tokens and sequences >= self.eval_sequences
        return decode_rows >= self.profile_tokens


@dataclass
class Captured:
    """One domain's rows in trace order, its states still whole: arrays as in Trace, states (Td, L+1, H) in a file."""

    domain: str
    arrays: dict[str, np.ndarray]
    sequence_id: list[str]
    split: list[str]
    states: np.ndarray
    prefill_states: np.ndarray
    sources: dict[str, str]
    ties: int
    samples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_eval(self) -> np.ndarray:
        """(T,) whether a row's sequence is of the evaluation split."""
        return (np.array(self.split) == "eval")[self.arrays["sequence"]]

    @property
    def decode(self) -> np.ndarray:
        """(T,) whether a row is a decode row."""
        return self.arrays["phase"] == 1

    def keyed(self) -> Keyed:
        """Decode rows for looking up neighbours."""
        return Keyed(self.states, self.arrays["experts"][self.decode], self.is_eval[self.decode])

    def previous(self) -> np.ndarray:
        """(Td, L, K): routes of the row before each decode row (a sequence's first row is never a decode row)."""
        return self.arrays["experts"][np.flatnonzero(self.decode) - 1]


class Spool:
    """float32 rows of one shape written to a file as they come and read back as a memory map."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._rows, self._shape = 0, (0,)

    def add(self, rows: np.ndarray) -> None:
        """Append rows (n, ...)."""
        self._rows, self._shape = self._rows + len(rows), rows.shape[1:]
        self._file.write(np.ascontiguousarray(rows, np.float32).tobytes())

    def read(self) -> np.ndarray:
        """All rows; the file is no longer written."""
        self._file.close()
        if not self._rows:
            return np.empty((0, *self._shape), np.float32)
        return np.memmap(self._path, np.float32, "r", shape=(self._rows, *self._shape))


def capture(
    model_dir: str | Path,
    corpora: str | Path,
    domains: Sequence[str],
    output: str | Path,
    *,
    amount: Amount | None = None,
    decoding: Decoding | None = None,
    template: str = "plain",
    embedding: str = "auto",
    basis_path: str | Path | None = None,
    statistics_path: str | Path | None = None,
    experts_implementation: str | None = None,
    device: str = "auto",
    seed: int = 0,
) -> list[Path]:
    """Capture ``domains`` of ``corpora`` with the checkpoint in ``model_dir``; one trace a domain, paths returned.

    ``output`` is the file of a single domain or the folder of several. ``embedding`` is ``auto`` (the cheapest
    of pricing.CANDIDATES that loses at most MOST_LOSS recall), ``none``, or dimensions x bits such as ``96x3``; a basis
    already at ``basis_path`` (default: beside the checkpoint) is used as it is, else the one fitted is saved there.
    ``statistics_path`` receives routing statistics as JSON.

    Raises InputError for anything wrong with the arguments, the text or the model, before anything is written.
    """
    amount, decoding = amount or Amount(), decoding or Decoding()
    if template not in TEMPLATES:
        raise InputError(f"template {template!r}; one of {', '.join(TEMPLATES)}")
    wanted = _embedding(embedding)
    texts = [read_domain(corpora, domain, seed) for domain in domains]
    targets = _targets(Path(output), domains)
    model, tokenizer = load(model_dir, experts_implementation, device)
    place = Path(basis_path) if basis_path else Path(model_dir) / BASIS_FILE
    basis = Basis.load(place) if wanted != "none" and place.exists() else None
    with tempfile.TemporaryDirectory(prefix="moe-capture-") as spool, Recorder(model) as recorder:
        captured = [
            capture_domain(recorder, tokenizer, text, amount, decoding, template, Path(spool)) for text in texts
        ]
        experts = int(captured[0].arrays["probs"].shape[2])
        about: dict[str, Any] = {}
        if wanted != "none":
            size = None if isinstance(wanted, str) else wanted
            basis, about = choose_basis([one.keyed() for one in captured], experts, size, basis, seed)
            about["prefill_layer"] = prefill_level(len(recorder.layers))
            if not place.exists():
                basis.save(place)
        common = provenance(Path(model_dir), model, seed) | {"decoding": _decoding(decoding, amount, template)}
        for one, target in zip(captured, targets, strict=True):
            assemble(one, recorder, common, basis, about).save(target)
        if statistics_path:
            _write_statistics(Path(statistics_path), captured, experts, common, about)
    return targets


def capture_domain(
    recorder: Recorder,
    tokenizer: Any,
    text: DomainText,
    amount: Amount,
    decoding: Decoding,
    template: str,
    spool: Path,
) -> Captured:
    """Run one domain's profile and evaluation rows through the recorder's model."""
    states, prefill_states = Spool(spool / f"{text.domain}.decode"), Spool(spool / f"{text.domain}.prefill")
    parts: list[dict[str, np.ndarray]] = []
    result = Captured(text.domain, {}, [], [], np.empty(0), np.empty(0), {}, 0)
    with Watch(f"capture {text.domain}") as watch:
        for split in ("profile", "eval"):
            rows, decoded, sequences = getattr(text, split), 0, 0
            for batch in _batches(rows, tokenizer, template, amount, split, text.domain):
                prompts = [prompt for _, prompt in batch]
                arrays, batch_states, batch_prefill, ties = run_batch(recorder, prompts, amount, decoding, tokenizer)
                kept = _whole_sequences(arrays, len(batch), amount, split, decoded, sequences)
                inside = arrays["sequence"] < kept
                decode = arrays["phase"] == 1
                states.add(batch_states[inside[decode]])
                prefill_states.add(batch_prefill[inside[~decode]])
                arrays = {name: array[inside] for name, array in arrays.items()}
                if len(result.samples) < 3:
                    result.samples.append(_sample(tokenizer, batch[0][0], arrays))
                arrays["sequence"] = arrays["sequence"] + np.int32(len(result.sequence_id))
                parts.append(arrays)
                for number, (row, _) in enumerate(batch[:kept]):
                    result.sequence_id.append(f"{text.domain}-{split}-{sequences + number:04d}")
                    result.split.append(split)
                    result.sources[row.source] = row.licence
                decoded, sequences = decoded + int((arrays["phase"] == 1).sum()), sequences + kept
                result.ties += ties
                total = amount.profile_tokens if split == "profile" else amount.eval_tokens
                watch.at(min(1.0, decoded / total), f"{_STEPS[split]}: {sequences} sequences, {decoded} decode tokens")
                if amount.suffices(split, decoded, sequences):
                    break
            if not sequences:
                raise InputError(
                    f"domain {text.domain}: no {_STEPS[split]} prompt of at most {amount.prompt_tokens} tokens"
                )
            if not amount.suffices(split, decoded, sequences):
                result.notes.append(f"{_STEPS[split]} text ran out: {sequences} sequences, {decoded} decode tokens")
    result.arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    result.states, result.prefill_states = states.read(), prefill_states.read()
    return result


def run_batch(
    recorder: Recorder, prompts: list[Prompt], amount: Amount, decoding: Decoding, tokenizer: Any
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, int]:
    """One batch: trace arrays with ``sequence`` counted within the batch, states of decode rows (n, L+1, H), states of
    prefill rows (n, H) at :func:`prefill_level`, and how many choices hung on a tie.
    """
    import torch

    model: Any = recorder.model
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    gathered: dict[str, list[np.ndarray]] = {}
    states, prefill_states, ties = [], [], 0
    level = prefill_level(len(recorder.layers))
    with torch.inference_mode():
        for one in passes(model, prompts, amount.new_tokens, decoding, pad, end_tokens(model, tokenizer)):
            rows = recorder.take(one.valid)
            ties += rows.ties
            sequence = torch.arange(len(prompts), device=one.valid.device).unsqueeze(1).expand_as(one.valid)
            position = one.position.expand_as(one.valid)
            found = {
                "experts": rows.experts, "gates": rows.gates, "probs": rows.probs, "lookahead": rows.lookahead,
                "token": one.ids[one.valid].int(), "sequence": sequence[one.valid].int(),
                "position": position[one.valid].int(),
            }  # fmt: skip
            for name, tensor in found.items():
                gathered.setdefault(name, []).append(tensor.cpu().numpy())
            gathered.setdefault("phase", []).append(np.full(len(rows.experts), 0 if one.prefill else 1, np.uint8))
            if one.prefill:
                prefill_states.append(rows.states[:, level].float().cpu().numpy())
            else:
                states.append(rows.states.float().cpu().numpy())
            shape = (0, *rows.states.shape[1:])
    arrays = {name: np.concatenate(values) for name, values in gathered.items()}
    order = np.lexsort((arrays["position"], arrays["sequence"]))
    decode = arrays["phase"] == 1
    ordered = {name: array[order] for name, array in arrays.items()}
    return (
        ordered,
        _reordered(np.concatenate(states) if states else np.empty(shape, np.float32), decode, order),
        _reordered(np.concatenate(prefill_states), ~decode, order),
        ties,
    )


def _reordered(values: np.ndarray, mask: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Values of the rows in ``mask``, given in row order, in the order ``order`` of all rows."""
    place = np.cumsum(mask) - 1
    return values[place[order][mask[order]]]


def prefill_level(layers: int) -> int:
    """The level whose states prefill rows keep: the router input in the middle of the model, where the prompt's subject
    has been read and half of the prefill is still to come.
    """
    return max(1, layers // 2)


def assemble(
    one: Captured, recorder: Recorder, common: Mapping[str, Any], basis: Basis | None, about: Mapping[str, Any]
) -> Trace:
    """The Trace of a captured domain; states become stored integers if there is a basis."""
    licences = sorted(set(one.sources.values()))
    notes = list(one.notes)
    if one.ties:
        notes.append(f"{one.ties} routes hung on two equal scores; the ids are those that the model used")
    meta = {
        **common,
        "text": {
            "source": f"{one.domain}: {DOMAINS.get(one.domain, one.domain)}",
            "sources": one.sources,
            "licence": "; ".join(licences),
        },
        "notes": notes,
    }
    arrays: dict[str, Any] = dict(one.arrays)
    if basis is not None:
        meta["embedding"] = dict(about)
        arrays["embeddings"] = basis.quantise(one.states)
        arrays["embedding_scale"] = basis.scale
        arrays["prefill_embeddings"] = basis.quantise(one.prefill_states, prefill_level(len(recorder.layers)))
    return Trace(
        meta=meta,
        layers=np.array([routed.layer for routed in recorder.layers], np.int32),
        domain=np.array([one.domain] * len(one.sequence_id)),
        split=np.array(one.split),
        sequence_id=np.array(one.sequence_id),
        **arrays,
    )


def _embedding(text: str) -> str | tuple[int, int]:
    """``auto``, ``none``, or (dims, bits)."""
    if text in ("auto", "none"):
        return text
    dims, times, bits = text.partition("x")
    if not (times and dims.isdigit() and bits.isdigit()):
        raise InputError(f"embedding {text!r}; expected auto, none or dimensions x bits such as 96x3")
    return int(dims), int(bits)


def _targets(output: Path, domains: Sequence[str]) -> list[Path]:
    """One output file a domain; folders are made."""
    if not domains or len(set(domains)) != len(domains):
        raise InputError(f"domains {', '.join(domains) or 'none'}: expected one or more, each once")
    if len(domains) == 1 and output.suffix == ".npz":
        return [output]
    output.mkdir(parents=True, exist_ok=True)
    return [output / f"{domain}.npz" for domain in domains]


def _batches(
    rows: Sequence[Row], tokenizer: Any, template: str, amount: Amount, split: str, domain: str
) -> Iterator[list[tuple[Row, Prompt]]]:
    """Batches of rows whose prompts are short enough, in order."""
    batch = []
    for number, row in enumerate(rows):
        if template == "chat":
            messages = [{"role": "user", "content": row.prompt.strip()}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(row.prompt)["input_ids"]
        if not 0 < len(ids) <= amount.prompt_tokens:
            continue
        response = tokenizer(row.response, add_special_tokens=False)["input_ids"]
        batch.append((row, Prompt(list(ids), list(response), zlib.crc32(f"{domain}:{split}:{number}".encode()))))
        if len(batch) == amount.batch:
            yield batch
            batch = []
    if batch:
        yield batch


def _whole_sequences(
    arrays: dict[str, np.ndarray], batch: int, amount: Amount, split: str, decoded: int, sequences: int
) -> int:
    """How many of the batch's sequences, in order, are needed until the split has enough."""
    decode = np.bincount(arrays["sequence"][arrays["phase"] == 1], minlength=batch).cumsum()
    for number in range(batch):
        if amount.suffices(split, decoded + int(decode[number]), sequences + number + 1):
            return number + 1
    return batch


def _decoding(decoding: Decoding, amount: Amount, template: str) -> dict[str, Any]:
    """What a trace's meta says of how its tokens came to be."""
    mode: dict[str, Any] = asdict(decoding) if decoding.mode == "sampled" else {"mode": decoding.mode}
    return {
        **mode, "template": template, "batch": amount.batch, "padding": "left", "kv_cache": True,
        "prompt_tokens_at_most": amount.prompt_tokens, "new_tokens_at_most": amount.new_tokens,
    }  # fmt: skip


def _sample(tokenizer: Any, row: Row, arrays: dict[str, np.ndarray]) -> str:
    """The first sequence of a batch as text, prompt and what the model went on to say."""
    first = arrays["sequence"] == 0
    prompt = tokenizer.decode(arrays["token"][first & (arrays["phase"] == 0)].tolist())
    said = tokenizer.decode(arrays["token"][first & (arrays["phase"] == 1)].tolist())
    return f"{prompt} >>> {said}"


def _write_statistics(
    path: Path, captured: Sequence[Captured], experts: int, common: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Routing statistics as JSON, and as tables for a person."""
    result = routing.statistics(
        {one.domain: one.keyed() for one in captured}, {one.domain: one.previous() for one in captured}, experts
    )
    passed = routing.show(result, Console(stderr=True))
    whole = {
        "model": common["model"], "captured": common["captured"], "decoding": common["decoding"],
        "software": common["software"], "hardware": common["hardware"], "embedding": dict(about),
        "routing": result, "passed": passed, "samples": {one.domain: one.samples for one in captured},
    }  # fmt: skip
    with atomic_path(path) as part:
        part.write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
