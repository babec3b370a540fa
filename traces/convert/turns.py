"""Turns of one conversation that each bring earlier rows again: every token is kept once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ground.errors import InputError

# A second run of the same tokens may differ in a few near-tied routes; another history differs nearly everywhere.
_SAME_HISTORY = 0.9


@dataclass
class Turn:
    """n rows of one request: ``rows`` by name, experts (n, L, K) among them, token ids (n,) if known, and tokens of the
    whole prompt up to its answer.

    ``unsure`` says that its last row is of a token that was sampled and not run, and so of no real route. ``start`` is
    the position of its first row, None for the beginning. Turns of one ``conversation`` belong together; None where it
    is not known. ``repeats`` says that such a turn may bring the rows of the one before again.
    """

    rows: dict[str, np.ndarray]
    tokens: np.ndarray | None
    prompt: int
    unsure: bool = False
    start: int | None = None
    conversation: int | str | None = None
    domain: str | None = None
    name: str | None = None
    repeats: bool = True

    @property
    def routes(self) -> np.ndarray:
        """(n, L, K)."""
        return self.rows["experts"]

    @property
    def prefill(self) -> int:
        """How many of the rows are of the prompt."""
        return max(0, self.prompt - (self.start or 0))

    def __len__(self) -> int:
        return len(self.routes)


def join_conversations(turns: Sequence[Turn], notes: list[str]) -> tuple[list[Turn], list[int]]:
    """Sequences with every token once, and for each the index of its last turn, in order of first turns.

    Where no turn tells its conversation or where it starts, one that begins with all rows of the turn before it
    continues that one. Raises InputError if turns overlap with other routes or leave a gap.
    """
    groups: dict[int | str | tuple[int], list[int]] = {}
    told = any(turn.conversation is not None or turn.start is not None for turn in turns)
    head = 0
    for i, turn in enumerate(turns):
        head = head if i and not told and turn.repeats and _continues(turns[i - 1], turn) else i
        groups.setdefault((head,) if turn.conversation is None else turn.conversation, []).append(i)
    sequences = [_join(turns, members) for members in groups.values()]
    rows, left = sum(map(len, turns)), sum(map(len, sequences))
    if left < rows:
        notes.append(f"turns contained earlier ones: {rows - left} of {rows} rows dropped, each token is kept once")
    answers = sum(_earlier_answers(turns, members) for members in groups.values())
    if answers:
        notes.append(
            f"{answers} rows that earlier turns generated count as prefill: a sequence has one prompt, and that of a "
            "conversation ends where its last turn's does"
        )
    return sequences, [members[-1] for members in groups.values()]


def _earlier_answers(turns: Sequence[Turn], members: list[int]) -> int:
    """Rows of a conversation that a turn generated and that lie in the prompt of a later one."""
    prompt = turns[members[-1]].prompt  # 0 where no prompt is known
    ends = {i: (turns[i].start or 0) + len(turns[i]) for i in members[:-1]}
    return sum(max(0, min(end, prompt) - turns[i].prompt) for i, end in ends.items())


def _continues(before: Turn, after: Turn) -> bool:
    """Whether ``after`` is longer and begins with all of ``before``, a copied last row (a dummy) aside."""
    rows = len(before)
    if rows > 1 and (before.routes[-1] == before.routes[-2]).all():
        rows -= 1
    if len(after) <= len(before) or rows < 2:
        return False
    if not _same_tokens(before.tokens, after.tokens):
        return False
    return _agreement(before.routes[:rows], after.routes[:rows]) >= (1 if before.tokens is None else _SAME_HISTORY)


def _same_tokens(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether two runs of tokens agree as far as both go; unknown ones do."""
    if one is None or other is None:
        return True
    both = min(len(one), len(other))
    return bool((one[:both] == other[:both]).all())


def _agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Share of (row, layer) routes that hold the same experts in the same order; 1 for no rows."""
    return float((one == other).all(axis=2).mean()) if len(one) else 1.0


def _join(turns: Sequence[Turn], members: list[int]) -> Turn:
    """One sequence of these turns; a later turn's rows replace earlier ones at their positions."""
    whole = turns[members[0]]
    if whole.conversation is not None and whole.start:
        raise InputError(f"array 'start', request {members[0]}: {whole.start}, expected 0 for a first turn")
    for i in members[1:]:
        turn, at = turns[i], turns[i].start or 0
        rows = len(whole)
        if at > rows:
            raise InputError(f"array 'start', request {i}: {at}, expected at most {rows}, the end of the turn before")
        if at + len(turn) < rows:
            raise InputError(
                f"array 'routed_experts', request {i}: ends at position {at + len(turn)}, expected at least "
                f"{rows}, the end of the turn before (give 'start' if turns hold new rows only)"
            )
        shared = max(rows - at - whole.unsure, 0)
        agreement = _agreement(whole.routes[at : at + shared], turn.routes[:shared])
        if agreement < _SAME_HISTORY:
            raise InputError(
                f"array 'routed_experts', request {i}: positions {at} to {at + shared - 1} overlap the turn before and "
                f"agree in {agreement:.0%} of routes, expected one history (give 'start' if turns hold new rows only, "
                "'token_ids' if the last row of a turn is of a token that was not run)"
            )
        tokens = None
        if whole.tokens is not None and turn.tokens is not None:
            if not _same_tokens(whole.tokens[at:], turn.tokens):
                raise InputError(f"array 'token_ids', request {i}: from position {at} not the earlier turn's")
            tokens = np.concatenate([whole.tokens[:at], turn.tokens])
        joined = {name: np.concatenate([whole.rows[name][:at], array]) for name, array in turn.rows.items()}
        whole = replace(turn, rows=joined, tokens=tokens, start=None)
    return whole
