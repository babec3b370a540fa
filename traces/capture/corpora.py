"""Domain text for training and capture: rows in Latin script of known licence, no prompt on both sides of a split.

A folder of corpora holds ``<file>.jsonl.xz`` files; a line is ``{"domain", "source", "prompt", "response"}``.
``corpora.toml`` is the whole list of what may be used: a row whose source matches none of its prefixes is left out.
"""

import hashlib
import json
import lzma
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ground.errors import InputError
from ground.text import check_text


@dataclass(frozen=True)
class Domain:
    """Text of one domain: the rows of ``<file>.jsonl.xz`` whose source starts with a prefix in ``sources``."""

    about: str
    file: str
    sources: dict[str, str]
    """The licence of the rows of each prefix."""
    turns: int = 1
    """How many rows in a row make one text."""
    capture_share: float = 0.15


DOMAINS = {
    name: Domain(**fields)
    for name, fields in tomllib.loads((resources.files("traces.capture") / "corpora.toml").read_text("utf-8")).items()
}

_PROFILE_SHARE = 0.70

# A captured sequence should have a short prompt and enough to decode; a prompt with many responses makes one
# sequence only, and is worth more in training.
_CAPTURE_PROMPT_CHARACTERS = 280
_CAPTURE_RESPONSE_CHARACTERS = 60
_CAPTURE_ROWS_A_PROMPT = 8

_BANKING_QUERY = re.compile(r"^Customer(?: query)?: (.*)\n(?:What is the banking|List the) intent.*$", re.DOTALL)


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
    captured = max(2, round(DOMAINS[domain].capture_share * len(ordered)))
    profile = max(1, min(captured - 1, round(_PROFILE_SHARE * captured)))
    return DomainText(
        domain=domain,
        train=[row for prompt in ordered[captured:] for row in groups[prompt]],
        profile=[groups[prompt][0] for prompt in ordered[:profile]],
        eval=[groups[prompt][0] for prompt in ordered[profile:captured]],
        about=DOMAINS[domain].about,
    )


def documents(rows: Sequence[TextRow], domain: str) -> list[str]:
    """Texts for training: as many rows in a row make one text as the domain says."""
    turns = DOMAINS[domain].turns if domain in DOMAINS else 1
    return ["\n".join(row.text for row in rows[at : at + turns]) for at in range(0, len(rows), turns)]


def normalised(text: str) -> str:
    """Text without differences of case and white space."""
    return " ".join(text.casefold().split())


def _suits_capture(group: list[TextRow]) -> bool:
    """Whether a group of rows with one prompt makes a good captured sequence."""
    first = group[0]
    response = len(first.response) * DOMAINS[first.domain].turns
    return (
        len(group) <= _CAPTURE_ROWS_A_PROMPT
        and len(first.prompt) <= _CAPTURE_PROMPT_CHARACTERS
        and response >= _CAPTURE_RESPONSE_CHARACTERS
    )


def _read_rows(folder: Path, domain: str) -> Iterator[TextRow]:
    """The allowed English rows of ``domain`` in file order."""
    if domain not in DOMAINS:
        raise InputError(f"domain {domain!r} is unknown; one of {', '.join(DOMAINS)}")
    path = folder / f"{DOMAINS[domain].file}.jsonl.xz"
    sources = DOMAINS[domain].sources
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = _parse(path, number, line)
                licence = next((sources[prefix] for prefix in sources if row["source"].startswith(prefix)), None)
                if licence and _is_english(row["prompt"] + row["response"]):
                    prompt, response = _form(domain, row["prompt"], row["response"])
                    yield TextRow(domain, row["source"], licence, prompt, response)
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
        return f"Customer: {match[1].strip()}\nAgent:", f" {response}"
    # Code goes on at its own indentation; everything else starts a new line anyway.
    return f"{prompt}\n", response


def _is_english(text: str) -> bool:
    """Mostly Latin script. The allowed sources hold English and, in places, Chinese; no other Latin-script language."""
    letters = [character for character in text if character.isalpha()]
    return bool(letters) and sum(character < "\u0250" for character in letters) > 0.9 * len(letters)
