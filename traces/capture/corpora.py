"""Domain text for training and capture: openly licensed English rows only, split so that no prompt is on both sides.

A folder of corpora holds ``<file>.jsonl.xz`` files; a line is ``{"domain", "source", "prompt", "response"}``.
``SOURCES`` below is the whole list of what may be used: a row whose source matches none of its prefixes is left out.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ground.errors import InputError
from ground.text import check_text


@dataclass(frozen=True)
class Source:
    """Rows of ``<file>.jsonl.xz`` whose ``source`` starts with ``prefix`` belong to ``domain`` under ``licence``."""

    domain: str
    file: str
    prefix: str
    licence: str


SOURCES = (
    Source("law", "law", "HazyResearch/legalbench:CUAD", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:corporate_lobbying", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:unfair_tos", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:overruling", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:hearsay", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:proa", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:personal_jurisdiction", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:abercrombie", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:rule_qa", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:diversity_6", "CC BY 4.0"),
    Source("law", "law", "HazyResearch/legalbench:statutory_reasoning_assessment", "MIT"),
    Source("banking", "finance", "PolyAI-LDN/task-specific-datasets:banking77", "CC BY 4.0"),
    Source("banking", "finance", "PolyAI-LDN/task-specific-datasets:nlupp", "CC BY 4.0"),
    Source("counselling", "counselling", "nbertagnolli/counsel-chat", "MIT"),
    Source("code", "code", "noahshinn/reflexion:humaneval", "MIT"),
    Source("code", "code", "noahshinn/reflexion:mbpp", "MIT (programs), CC BY 4.0 (MBPP)"),
    Source("code", "code", "SWE-agent/SWE-agent", "MIT"),
    Source("code", "code", "CPython", "PSF-2.0"),
    Source("code", "code", "human-eval", "MIT"),
    Source("math", "math", "PRM800K", "MIT"),
    Source("math", "math", "openai/grade-school-math", "MIT"),
    Source("math", "math", "QwenLM/Qwen2.5-Math:olympiadbench", "Apache-2.0 (OpenBMB/OlympiadBench)"),
    Source("math", "math", "QwenLM/Qwen2.5-Math:aqua", "Apache-2.0 (AQuA)"),
    Source("math", "math", "champ-dataset", "MIT"),
)

# What the texts are; which of the sources above a trace's rows are from stands in its meta.text.sources.
DOMAINS = {
    "law": "contract clauses, bills, terms of service and questions of law",
    "banking": "customers' queries to a bank and their intents, told as a conversation",
    "counselling": "questions of people in need and counsellors' answers",
    "code": "Python functions, agents' programming runs and debugging steps",
    "math": "problems and worked solutions",
}

# A customer's query and its intent are a dozen words: alone they make no text worth decoding. A conversation of
# several customers does, and it is how a bank's assistant meets them.
TURNS = {"banking": 6}

_CAPTURE_SHARE = {"counselling": 0.30}  # few questions: more of them are needed to capture enough sequences
_DEFAULT_CAPTURE_SHARE = 0.15
_PROFILE_SHARE = 0.70

# A captured sequence should have a short prompt and enough to decode; a prompt with many responses makes one
# sequence only, and is worth more in training.
_CAPTURE_PROMPT_CHARACTERS = 280
_CAPTURE_RESPONSE_CHARACTERS = 60
_CAPTURE_ROWS_A_PROMPT = 8

_BANKING_QUERY = re.compile(
    r"^Customer(?: query)?: (?P<query>.*)\n(?:What is the banking|List the) intent.*$", re.DOTALL
)


@dataclass(frozen=True)
class TextRow:
    """One prompt and its response, in the form that a model reads them, with where they come from.

    ``messages`` (role, content) is a conversation up to the turn that is answered; ``prompt`` is then its text.
    """

    domain: str
    source: str
    licence: str
    prompt: str
    response: str
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """Prompt and response as one text; a prompt ends with the white space that parts it from its response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class DomainText:
    """The rows of one domain: ``train`` for training, ``profile`` and ``eval`` for capture; no prompt is in two.

    ``about`` says in words what text it is.
    """

    domain: str
    train: list[TextRow]
    profile: list[TextRow]
    eval: list[TextRow]
    about: str = ""


def read_domain(folder: str | Path, domain: str, seed: int = 0) -> DomainText:
    """Read one domain's allowed English rows from ``folder`` and split them; the same seed gives the same split.

    Rows are grouped by normalised prompt. Groups that suit capture (short prompt, response long enough to decode, few
    rows) come first, each kind in the order of a seeded hash, so the split depends neither on the order of the file nor
    on other domains. The first groups are for capture (one row a group), 70 % of those in order profile and the rest
    evaluation; all rows of the other groups are for training.

    Raises InputError for an unknown domain, a file that is absent or broken, or a domain without allowed rows.
    """
    groups: dict[str, list[TextRow]] = {}
    for row in _read_rows(Path(folder), domain):
        groups.setdefault(normalised(row.prompt), []).append(row)
    if len(groups) < 3:
        raise InputError(f"{folder}: {len(groups)} allowed prompts of domain {domain}; at least 3 are needed")

    def order(prompt: str) -> tuple[bool, bytes]:
        return not _suits_capture(groups[prompt]), hashlib.sha256(f"{seed}:{domain}:{prompt}".encode()).digest()

    ordered = sorted(groups, key=order)
    share = _CAPTURE_SHARE.get(domain, _DEFAULT_CAPTURE_SHARE)
    captured = max(2, round(share * len(ordered)))
    profile = max(1, min(captured - 1, round(_PROFILE_SHARE * captured)))
    return DomainText(
        domain=domain,
        train=[row for prompt in ordered[captured:] for row in groups[prompt]],
        profile=[groups[prompt][0] for prompt in ordered[:profile]],
        eval=[groups[prompt][0] for prompt in ordered[profile:captured]],
        about=DOMAINS[domain],
    )


def documents(rows: Iterable[TextRow], turns: int = 1) -> Iterator[str]:
    """Texts for training: ``turns`` rows in a row make one text."""
    waiting: list[str] = []
    for row in rows:
        waiting.append(row.text)
        if len(waiting) == turns:
            yield "\n".join(waiting)
            waiting = []
    if waiting:
        yield "\n".join(waiting)


def normalised(text: str) -> str:
    """Text without differences of case and white space."""
    return " ".join(text.casefold().split())


def _suits_capture(group: list[TextRow]) -> bool:
    """Whether a group of rows with one prompt makes a good captured sequence."""
    first = group[0]
    response = len(first.response) * TURNS.get(first.domain, 1)
    return (
        len(group) <= _CAPTURE_ROWS_A_PROMPT
        and len(first.prompt) <= _CAPTURE_PROMPT_CHARACTERS
        and response >= _CAPTURE_RESPONSE_CHARACTERS
    )


def _read_rows(folder: Path, domain: str) -> Iterator[TextRow]:
    """The allowed English rows of ``domain`` in file order."""
    sources = [source for source in SOURCES if source.domain == domain]
    if not sources:
        raise InputError(f"domain {domain!r} is unknown; one of {', '.join(DOMAINS)}")
    path = folder / f"{sources[0].file}.jsonl.xz"
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _parse(path, number, line)
                source = next((source for source in sources if row["source"].startswith(source.prefix)), None)
                if source and _is_english(row["prompt"] + row["response"]):
                    prompt, response = _form(domain, row["prompt"], row["response"])
                    yield TextRow(domain, row["source"], source.licence, prompt, response)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; a corpora folder holds <domain>.jsonl.xz files") from None
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a whole xz file of UTF-8 lines ({error})") from None


def _parse(path: Path, number: int, line: str) -> dict[str, str]:
    """One line as a dict of texts, or InputError naming the line and the field."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: line {number}: not JSON ({error})") from None
    for field in ("source", "prompt", "response"):
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            raise InputError(f"{path}: line {number}: field {field!r} is missing or no text")
        check_text(row[field], f"{path}: line {number}: field {field!r}")
    return row


def _form(domain: str, prompt: str, response: str) -> tuple[str, str]:
    """Prompt and response as a model reads them, one after the other."""
    prompt, response = prompt.strip("\n"), response.strip("\n")
    if domain == "banking" and (match := _BANKING_QUERY.match(prompt)):
        return f"Customer: {match['query'].strip()}\nAgent:", f" {response}"
    # Code goes on at its own indentation; everything else starts a new line anyway.
    return f"{prompt}\n", response


def _is_english(text: str) -> bool:
    """Mostly Latin script. The allowed sources hold English and, in places, Chinese; no other Latin-script language."""
    letters = [character for character in text if character.isalpha()]
    return bool(letters) and sum(character < "\u0250" for character in letters) > 0.9 * len(letters)
