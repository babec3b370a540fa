"""Run the text of one domain through a model batch by batch, until there is enough of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.progress import Watch
from traces.capture.batches import BatchRows, Spool, run_batch
from traces.capture.checkpoint import end_tokens
from traces.capture.corpora import DomainText, TextRow
from traces.capture.decoding import Decoding
from traces.capture.positions import LengthTables
from traces.capture.prompts import Batches
from traces.capture.recorder import Recorder
from traces.statistics.embedding_price import Keyed

_STEPS = {"profile": "profile", "eval": "evaluation"}


@dataclass(frozen=True)
class Amount:
    """How much of a domain to capture; sequences are taken whole until both decode tokens and sequences suffice.

    ``None`` tokens of a split are all that its text gives. ``chunk`` bounds the rows of one batch, in its prefill and
    in all its decode steps.
    """

    profile_tokens: int | None = 1400
    eval_tokens: int | None = 600
    eval_sequences: int = 40
    prompt_tokens: int = 64
    new_tokens: int = 32
    batch: int = 32
    chunk: int = 4096

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected at least 1")
        if self.chunk < self.new_tokens:
            raise InputError(f"chunk is {self.chunk}; expected at least new_tokens, {self.new_tokens}")

    def tokens(self, split: str) -> int | None:
        """Decode tokens wanted of a split; None: all."""
        return self.eval_tokens if split == "eval" else self.profile_tokens

    def suffices(self, split: str, decode_rows: int, sequences: int) -> bool:
        """Whether this much of a split is enough."""
        wanted = self.tokens(split)
        enough = wanted is not None and decode_rows >= wanted
        return enough and (split == "profile" or sequences >= self.eval_sequences)


@dataclass
class DomainRows:
    """One domain's rows of one part of a model in trace order, its states still whole.

    Arrays as in Trace, ``states`` (Td, L+1, H) and ``prefill_states`` (Tp, H) in a file.
    """

    domain: str
    about: str
    layers: list[int]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sequence_id: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    states: np.ndarray = field(default_factory=lambda: np.empty(0))
    prefill_states: np.ndarray = field(default_factory=lambda: np.empty(0))
    sources: dict[str, str] = field(default_factory=dict)
    odd: Counter[str] = field(default_factory=Counter)
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


@dataclass
class _DomainPart:
    """One part of a model while a domain is captured: what is known so far, and where its states go."""

    result: DomainRows
    decode: Spool
    prefill: Spool
    arrays: list[dict[str, np.ndarray]] = field(default_factory=list)

    def add(self, rows: BatchRows, kept: int) -> int:
        """Take the first ``kept`` sequences of a batch; how many decode rows they have."""
        inside, decode = rows.arrays["sequence"] < kept, rows.arrays["phase"] == 1
        self.decode.add(rows.states[inside[decode]])
        self.prefill.add(rows.prefill_states[inside[~decode]])
        arrays = {name: array[inside] for name, array in rows.arrays.items()}
        arrays["sequence"] = arrays["sequence"] + np.int32(len(self.result.sequence_id))
        self.arrays.append(arrays)
        self.result.odd += rows.odd
        return int((arrays["phase"] == 1).sum())

    def finished(self) -> DomainRows:
        """The domain's rows, once all batches are in."""
        self.result.arrays = {name: np.concatenate([one[name] for one in self.arrays]) for name in self.arrays[0]}
        self.result.states, self.result.prefill_states = self.decode.read(), self.prefill.read()
        return self.result


@dataclass(frozen=True)
class DomainRun:
    """How domains are captured: the recorders of a model by its parts, its tokenizer, and how much of what is run."""

    recorders: Mapping[str, Recorder]
    tokenizer: Any
    amount: Amount
    decoding: Decoding
    template: str

    @property
    def main(self) -> str:
        """The part whose decode rows count: the decoder, or the only one."""
        return list(self.recorders)[-1]

    def domain(self, text: DomainText) -> dict[str, DomainRows]:
        """Run one domain's profile and evaluation rows; what it gives by part of the model.

        Raises InputError if no prompt is short enough.
        """
        parts = {}
        for part, recorder in self.recorders.items():
            result = DomainRows(text.domain, text.about, [routed.layer for routed in recorder.layers])
            parts[part] = _DomainPart(result, Spool(), Spool())
        with Watch(f"capture {text.domain}") as watch:
            for split in ("profile", "eval"):
                rows = getattr(text, split)
                if rows:
                    self._split(rows, split, parts, watch)
        return {part: one.finished() for part, one in parts.items()}

    def _split(self, rows: list[TextRow], split: str, parts: Mapping[str, _DomainPart], watch: Watch) -> None:
        """Run rows of one split until they suffice."""
        amount, tokenizer = self.amount, self.tokenizer
        model: Any = self.recorders[self.main].model
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        eos, wanted = end_tokens(model, tokenizer), amount.tokens(split)
        batches = Batches(
            rows, tokenizer, self.template, split, amount.prompt_tokens, amount.batch, amount.chunk, amount.new_tokens,
            LengthTables(model).limit,
        )  # fmt: skip
        decoded = sequences = 0
        for batch in batches:
            prompts = [prompt for _, prompt in batch]
            given = run_batch(self.recorders, prompts, amount.new_tokens, self.decoding, pad, eos, amount.chunk)
            arrays, samples = given[self.main].arrays, parts[self.main].result.samples
            kept = _whole_sequences(arrays, len(batch), amount, split, decoded, sequences)
            if len(samples) < 3:
                samples.append(_sample(tokenizer, batch[0][1].ids, arrays))
            decoded += [one.add(given[part], kept) for part, one in parts.items()][-1]
            for one in parts.values():
                for number, (row, _) in enumerate(batch[:kept]):
                    one.result.sequence_id.append(f"{row.domain}-{split}-{sequences + number:04d}")
                    one.result.split.append(split)
                    one.result.sources[row.source] = row.licence
            sequences += kept
            done = decoded / wanted if wanted else sequences / len(rows)
            watch.at(min(1.0, done), f"{_STEPS[split]}: {sequences} sequences, {decoded} decode tokens")
            if amount.suffices(split, decoded, sequences):
                break
        note = _shortage(rows, split, amount, batches.left_out, decoded, sequences)
        for one in parts.values():
            one.result.notes += note


def _shortage(
    rows: list[TextRow], split: str, amount: Amount, left_out: int, decoded: int, sequences: int
) -> list[str]:
    """What to note where a split gave less than was wanted; raises InputError if it gave nothing."""
    what = f"domain {rows[0].domain}"
    if not sequences:
        raise InputError(f"{what}: no {_STEPS[split]} prompt of at most {amount.prompt_tokens} tokens")
    if amount.tokens(split) is not None:
        enough = amount.suffices(split, decoded, sequences)
        return [] if enough else [f"{_STEPS[split]} text ran out: {sequences} sequences, {decoded} decode tokens"]
    if not left_out:
        return []
    return [f"{what}: {left_out} of {len(rows)} {_STEPS[split]} prompts left out, over {amount.prompt_tokens} tokens"]


def _whole_sequences(
    arrays: dict[str, np.ndarray], batch: int, amount: Amount, split: str, decoded: int, sequences: int
) -> int:
    """How many of the batch's sequences, in order, are needed until the split has enough."""
    decode = np.bincount(arrays["sequence"][arrays["phase"] == 1], minlength=batch).cumsum()
    for number in range(batch):
        if amount.suffices(split, decoded + int(decode[number]), sequences + number + 1):
            return number + 1
    return batch


def _sample(tokenizer: Any, prompt_ids: list[int], arrays: dict[str, np.ndarray]) -> str:
    """The first sequence of a batch as text, prompt and what the model went on to say."""
    first = arrays["sequence"] == 0
    prompt = tokenizer.decode(prompt_ids)
    said = tokenizer.decode(arrays["token"][first & (arrays["phase"] == 1)].tolist())
    return f"{prompt} >>> {said}"
