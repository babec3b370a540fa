"""A person's own prompts, from a text or JSON lines file, and prompts of any source as token ids in batches."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ground.errors import InputError
from ground.files import check_regular
from ground.text import check_name, check_text, utf8
from traces.arrays import shown
from traces.assemble import split_in_order
from traces.capture.corpora import DomainText, TextRow, normalised
from traces.capture.decoding import Prompt

TEMPLATES = ("plain", "chat")


def read_prompts(path: str | Path, licence: str = "not stated") -> list[DomainText]:
    """The prompts of a file, by domain in order of appearance: 70 % of each domain's profile, the rest evaluation.

    A ``.jsonl`` file has an object a line: ``prompt`` (text) or ``messages`` ([{"role", "content"}, ...], a whole
    conversation), and optionally ``response``, ``domain`` (default: the file's name), ``source`` and ``licence``. Any
    other file has one prompt a line; empty lines are skipped. Of a conversation everything up to its last user message
    is the prompt, so that each token is run once, and a last assistant message is the known response. Equal prompts
    are on the same side of the split; a lone prompt is for evaluation.

    Raises InputError naming the line and the field, or the file if it holds no prompt.
    """
    name = shown(path)
    check_regular(path)
    read = _json_row if Path(path).suffix in (".jsonl", ".json") else _text_row
    domains: dict[str, list[TextRow]] = {}
    for number, line in enumerate(StringIO(utf8(Path(path).read_bytes(), name), newline=None), 1):
        if line.strip():
            row = read(f"{name}: line {number}", line, Path(name).stem, shown(licence))
            check_name(row.domain, f"{name}: line {number}: domain")
            domains.setdefault(row.domain, []).append(row)
    if not domains:
        raise InputError(f"{name}: no prompt in it; expected one a line")
    return [_split(domain, rows, f"prompts of {Path(name).name}") for domain, rows in domains.items()]


def _text_row(where: str, line: str, domain: str, licence: str) -> TextRow:
    return TextRow(domain, domain, licence, line.strip(), "")


def _json_row(where: str, line: str, domain: str, licence: str) -> TextRow:
    """One line of JSON as a TextRow."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from None
    if not isinstance(found, dict) or ("prompt" in found) == ("messages" in found):
        raise InputError(f"{where}: expected an object with either 'prompt' or 'messages'")
    text = {"response": "", "domain": domain, "source": domain, "licence": licence} | {
        key: value for key, value in found.items() if key in ("prompt", "response", "domain", "source", "licence")
    }
    for key, value in text.items():
        if not isinstance(value, str) or (not value.strip() and key in ("prompt", "domain")):
            raise InputError(f"{where}: field {key!r} is {value!r:.40}; expected a text")
        check_text(value, f"{where}: field {key!r}")
    messages: tuple[tuple[str, str], ...] = ()
    if "messages" in found:
        messages, answer = _conversation(where, found["messages"])
        text["response"] = text["response"] or answer
        text["prompt"] = "\n".join(f"{role}: {content}" for role, content in messages)
    return TextRow(text["domain"], text["source"], text["licence"], text["prompt"], text["response"], messages)


def _conversation(where: str, messages: Any) -> tuple[tuple[tuple[str, str], ...], str]:
    """The messages up to the last one of the user, and the answer that follows it, if any."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: field 'messages' is {messages!r:.40}; expected a list of messages")
    turns = []
    for index, message in enumerate(messages):
        fields = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(field, str) for field in fields):
            raise InputError(f"{where}: message {index} is {message!r:.60}; expected 'role' and 'content', both texts")
        for key, field in zip(("role", "content"), fields, strict=True):
            check_text(str(field), f"{where}: message {index}: {key!r}")
        turns.append((str(fields[0]), str(fields[1])))
    last = max((index for index, (role, _) in enumerate(turns) if role == "user"), default=None)
    if last is None or len(turns) > last + 2:
        raise InputError(f"{where}: expected a user message, and at most one answer after the last of them")
    return tuple(turns[: last + 1]), turns[last + 1][1] if len(turns) > last + 1 else ""


def _split(domain: str, rows: list[TextRow], about: str) -> DomainText:
    """Rows of one domain on the two sides, in order."""
    groups: dict[str, list[TextRow]] = {}
    for row in rows:
        groups.setdefault(normalised(row.prompt), []).append(row)
    sides = split_in_order(np.array([domain] * len(groups)))
    both: dict[str, list[TextRow]] = {"profile": [], "eval": []}
    for side, group in zip(sides.tolist(), groups.values(), strict=True):
        both[side] += group
    return DomainText(domain, train=[], profile=both["profile"], eval=both["eval"], about=about)


class Given(NamedTuple):
    """A prompt that is to be run, and what it is of."""

    row: TextRow
    prompt: Prompt
    split: str


@dataclass
class Offered:
    """A split's prompts in order, as token ids, left out where a prompt has more than ``longest`` tokens or none.

    ``left_out`` counts while iterating.
    """

    rows: Sequence[TextRow]
    tokenizer: Any
    template: str
    split: str
    longest: int
    left_out: int = 0

    def __iter__(self) -> Iterator[Given]:
        for number, row in enumerate(self.rows):
            ids = prompt_ids(row, self.tokenizer, self.template)
            if not 0 < len(ids) <= self.longest:
                self.left_out += 1
                continue
            response = self.tokenizer(row.response, add_special_tokens=False)["input_ids"] if row.response else []
            seed = zlib.crc32(f"{row.domain}:{self.split}:{number}".encode())
            yield Given(row, Prompt(ids, list(response), seed), self.split)


def batches(
    prompts: Iterable[Given], most: int, chunk: int, new_tokens: int, together: int | None = None
) -> Iterator[list[Given]]:
    """Prompts in batches, in order: at most ``most`` a batch, and at most ``chunk`` rows once padded, in prefill and in
    all decode steps together.

    A prompt longer than ``chunk`` is alone in its batch, and so is one that may grow beyond ``together`` tokens (None:
    any may share one).
    """
    batch: list[Given] = []
    width, alone = new_tokens, False
    for given in prompts:
        length = len(given.prompt.ids)
        wider = max(width, length)
        long = together is not None and length + new_tokens - 1 > together
        if batch and (long or alone or len(batch) == most or wider * (len(batch) + 1) > chunk):
            yield batch
            batch, wider = [], max(new_tokens, length)
        width, alone = wider, long
        batch.append(given)
    if batch:
        yield batch


def prompt_ids(row: TextRow, tokenizer: Any, template: str) -> list[int]:
    """Token ids of a row's prompt: a conversation, and any prompt under ``chat``, in the tokenizer's own template.

    Raises InputError if that is wanted of a tokenizer that has none.
    """
    if template == "plain" and not row.messages:
        return list(tokenizer(row.prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the tokenizer has no chat template; give 'prompt' instead of 'messages', and --template plain"
        )
    turns = row.messages or (("user", row.prompt.strip()),)
    messages = [{"role": role, "content": content} for role, content in turns]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
