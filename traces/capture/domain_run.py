"""Run the text of one domain through a model batch by batch, until there is enough of it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ground.errors import InputError
from ground.progress import Watch
from traces.capture.batches import BatchRows, run_batch
from traces.capture.checkpoint import end_tokens
from traces.capture.corpora import DomainText
from traces.capture.decoding import Decoding
from traces.capture.kept_states import KeptStates
from traces.capture.positions import LengthTables
from traces.capture.prompts import Given, Offered, batches
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

    def suffices(self, split: str, decode_rows: float, sequences: int) -> bool:
        """Whether this much of a split is enough."""
        wanted = self.tokens(split)
        enough = wanted is not None and decode_rows >= wanted
        return enough and (split == "profile" or sequences >= self.eval_sequences)


@dataclass
class DomainRows:
    """One domain's rows of one part of a model in trace order, its states still whole.

    Arrays as in Trace, ``states`` (Td, L+1, H) and ``prefill_states`` (Tp, H) where `KeptStates` has them.
    """

    domain: str
    about: str
    layers: list[int]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sequence_id: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    states: Any = None
    prefill_states: Any = None
    sources: dict[str, str] = field(default_factory=dict)
    odd: Counter[str] = field(default_factory=Counter)
    samples: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def experts(self) -> int:
        """E, experts of a routed layer."""
        return int(self.arrays["probs"].shape[2])

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
class _PartRows:
    """What one split of a domain has of one part of a model so far."""

    arrays: list[dict[str, np.ndarray]] = field(default_factory=list)
    decode: KeptStates = field(default_factory=KeptStates)
    prefill: KeptStates = field(default_factory=KeptStates)

    def add(self, rows: BatchRows, numbers: list[int], before: int) -> None:
        """Take the sequences ``numbers`` of a batch, which come after ``before`` others."""
        import torch

        inside, decode = np.isin(rows.arrays["sequence"], numbers), rows.arrays["phase"] == 1
        for kept, states, mask in (
            (self.decode, rows.states, inside[decode]), (self.prefill, rows.prefill_states, inside[~decode])
        ):  # fmt: skip
            kept.add(states[torch.from_numpy(mask).to(states.device)])
        arrays = {name: array[inside] for name, array in rows.arrays.items()}
        arrays["sequence"] = (before + np.searchsorted(numbers, arrays["sequence"])).astype(np.int32)
        self.arrays.append(arrays)


@dataclass
class _Side:
    """One split of a domain while it is captured: what is offered of it, and what there is so far.

    ``decoded`` rows and ``sequences`` are those kept, ``pending`` sequences are about to be run.
    """

    offered: Offered
    amount: Amount
    parts: dict[str, _PartRows]
    upcoming: Iterator[Given] = field(init=False)
    sources: dict[str, str] = field(default_factory=dict)
    decoded: int = 0
    sequences: int = 0
    pending: int = 0

    def __post_init__(self) -> None:
        self.upcoming = iter(self.offered)

    @property
    def split(self) -> str:
        """Its name."""
        return self.offered.split

    def suffices(self, rows_each: float = 0.0) -> bool:
        """Whether there is enough, given that each pending sequence brings so many decode rows."""
        rows, sequences = self.decoded + self.pending * rows_each, self.sequences + self.pending
        return self.amount.suffices(self.split, rows, sequences)

    @property
    def done(self) -> float:
        """The share that there is."""
        wanted = self.amount.tokens(self.split)
        return min(1.0, self.decoded / wanted if wanted else self.sequences / len(self.offered.rows))


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
        """Run one domain's profile and evaluation rows, in batches that may hold both; what it gives by part.

        Raises InputError if no prompt is short enough.
        """
        amount, tokenizer = self.amount, self.tokenizer
        sides = {
            split: _Side(
                Offered(rows, tokenizer, self.template, split, amount.prompt_tokens), amount,
                {part: _PartRows() for part in self.recorders},
            )
            for split in ("profile", "eval") if (rows := getattr(text, split))
        }  # fmt: skip
        model: Any = self.recorders[self.main].model
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        eos = end_tokens(model, tokenizer)
        odd: dict[str, Counter[str]] = {part: Counter() for part in self.recorders}
        samples: list[str] = []
        with Watch(f"capture {text.domain}") as watch:
            for batch in self._batches(list(sides.values()), LengthTables(model).limit):
                prompts = [given.prompt for given in batch]
                rows = run_batch(self.recorders, prompts, amount.new_tokens, self.decoding, pad, eos, amount.chunk)
                if len(samples) < 3:
                    samples.append(_sample(tokenizer, prompts[0].ids, rows[self.main].arrays))
                _keep(sides, batch, rows, self.main)
                for part, one in rows.items():
                    odd[part] += one.odd
                about = (f"{_STEPS[s.split]}: {s.sequences} sequences, {s.decoded} rows" for s in sides.values())
                watch.at(sum(side.done for side in sides.values()) / len(sides), ", ".join(about))
        notes = [note for side in sides.values() for note in _shortage(side)]
        return {
            part: _whole(part, text, recorder, list(sides.values()), odd[part], samples, notes)
            for part, recorder in self.recorders.items()
        }

    def _batches(self, sides: list[_Side], together: int | None) -> Iterator[list[Given]]:
        """Batches until each side has enough, or its text ends."""
        amount, found = self.amount, True
        while found:
            found = False
            for batch in batches(self._wanted(sides), amount.batch, amount.chunk, amount.new_tokens, together):
                found = True
                if any(not side.suffices() for side in sides if any(given.split == side.split for given in batch)):
                    yield batch

    def _wanted(self, sides: list[_Side]) -> Iterator[Given]:
        """Prompts that are still needed if sequences go on to be as long as those so far were."""
        for side in sides:
            while not side.suffices(self._rows_each(sides)):
                given = next(side.upcoming, None)
                if given is None:
                    break
                side.pending += 1
                yield given

    def _rows_each(self, sides: list[_Side]) -> float:
        """Decode rows that a sequence has so far, or may have."""
        sequences = sum(side.sequences for side in sides)
        return sum(side.decoded for side in sides) / sequences if sequences else self.amount.new_tokens - 1


def _keep(sides: Mapping[str, _Side], batch: list[Given], rows: Mapping[str, BatchRows], main: str) -> None:
    """Give each side its sequences of a batch, whole and in order, until it has enough."""
    arrays = rows[main].arrays
    decode = np.bincount(arrays["sequence"][arrays["phase"] == 1], minlength=len(batch)).tolist()
    for split, side in sides.items():
        before, numbers = side.sequences, []
        for number, given in enumerate(batch):
            if given.split != split:
                continue
            side.pending -= 1
            if not side.amount.suffices(split, side.decoded, side.sequences):
                numbers.append(number)
                side.decoded, side.sequences = side.decoded + decode[number], side.sequences + 1
                side.sources[given.row.source] = given.row.licence
        if numbers:
            for part, one in rows.items():
                side.parts[part].add(one, numbers, before)


def _whole(
    part: str, text: DomainText, recorder: Recorder, sides: list[_Side], odd: Counter[str], samples: list[str],
    notes: list[str],
) -> DomainRows:  # fmt: skip
    """A domain's rows of one part, once all batches are in: its sides one after the other."""
    result = DomainRows(
        text.domain, text.about, [routed.layer for routed in recorder.layers], odd=odd, samples=samples, notes=notes
    )
    arrays: list[dict[str, np.ndarray]] = []
    first = sides[0].parts[part]
    for side in sides:
        rows = side.parts[part]
        before = np.int32(len(result.sequence_id))
        arrays += [one | {"sequence": one["sequence"] + before} for one in rows.arrays]
        if rows is not first:
            first.decode.extend(rows.decode)
            first.prefill.extend(rows.prefill)
        result.sequence_id += [f"{text.domain}-{side.split}-{number:04d}" for number in range(side.sequences)]
        result.split += [side.split] * side.sequences
        result.sources |= side.sources
    result.arrays = {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}
    result.states, result.prefill_states = first.decode.read(), first.prefill.read()
    return result


def _shortage(side: _Side) -> list[str]:
    """What to note where a split gave less than was wanted; raises InputError if it gave nothing."""
    rows, amount, step = side.offered.rows, side.amount, _STEPS[side.split]
    what = f"domain {rows[0].domain}"
    if not side.sequences:
        raise InputError(f"{what}: no {step} prompt of at most {amount.prompt_tokens} tokens")
    if amount.tokens(side.split) is not None:
        short = f"{step} text ran out: {side.sequences} sequences, {side.decoded} decode tokens"
        return [] if side.suffices() else [short]
    left_out = side.offered.left_out
    if not left_out:
        return []
    return [f"{what}: {left_out} of {len(rows)} {step} prompts left out, over {amount.prompt_tokens} tokens"]


def _sample(tokenizer: Any, prompt_ids: list[int], arrays: dict[str, np.ndarray]) -> str:
    """The first sequence of a batch as text, prompt and what the model went on to say."""
    first = arrays["sequence"] == 0
    prompt = tokenizer.decode(prompt_ids)
    said = tokenizer.decode(arrays["token"][first & (arrays["phase"] == 1)].tolist())
    return f"{prompt} >>> {said}"
