"""Numbers of a profile, each with its origin, and how a profile is read from TOML.

What stands below a field is its description: errors and the documentation show it.
"""

import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from ground.errors import InputError
from ground.field_errors import expectation
from ground.text import utf8


class Checked(BaseModel):
    """A table of a profile: a field that it does not know, or of another type, is refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True,
        use_attribute_docstrings=True,
    )  # fmt: skip


class Figure(Checked):
    """One number with its origin."""

    value: float = Field(ge=0, le=1e9)
    """The number, in the unit that the field's name ends with."""
    source: str = Field(min_length=1)
    """Where it is from."""
    measured: bool = False
    """True only for what was measured for this project; other people's measurements are named in ``source``."""


def _bare_number(value: object) -> object:
    """A bare number in a person's own profile needs no further words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": value, "source": "as given in the profile"}
    return value


Number = Annotated[Figure, BeforeValidator(_bare_number)]
"""A figure, written as a bare number or as a table of value and source."""
Perhaps = Annotated[Figure | None, BeforeValidator(_bare_number)]
"""The same, or nothing."""


def positive(figure: Figure) -> Figure:
    """``figure`` if it is above 0. Raises ValueError otherwise."""
    # The least keeps every simulated time within 64 bits of nanoseconds.
    if figure.value < 1e-6:
        raise ValueError("above 0 (at least 1e-6)")
    return figure


class Curve(Checked):
    """A time over a size, measured."""

    points: list[list[int]] = Field(min_length=2)
    """Pairs of a size (bytes of a copy, rows of an FFN, tokens of a layer) and nanoseconds, both ascending."""
    source: str = Field(min_length=1)
    """Where the times are from."""
    measured: bool = False
    """True only for what was measured for this project."""

    @field_validator("points")
    @classmethod
    def _ascending(cls, points: list[list[int]]) -> list[list[int]]:
        before = [0, 0]
        for point in points:
            ascending = len(point) == 2 and point[0] > before[0] and point[1] > before[1]
            if not ascending or max(point) > 10**15:
                raise ValueError(
                    f"pairs of [bytes or rows, ns], both ascending, above 0 and at most 1e15 (wrong at {point})"
                )
            before = point
        return points


class Profile(Checked):
    """What a TOML file holds."""

    @classmethod
    def parse(cls, text: bytes | str, name: str = "profile") -> Self:
        """A profile from TOML text. Raises InputError, which ``name`` begins: field, value, what is expected."""
        decoded = utf8(text, name) if isinstance(text, bytes) else text
        try:
            fields = tomllib.loads(decoded)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: not valid TOML: {error}") from error
        return cls.from_dict(fields, name)

    @classmethod
    def from_dict(cls, fields: dict[str, Any], name: str = "profile") -> Self:
        """The same from the tables of TOML."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise InputError(f"{name}: {_first_fault(cls, error)}") from error


def builtin_names(package: str) -> tuple[str, ...]:
    """Names of the profiles that are built in: the TOML files of ``package``."""
    files = (file.name for file in resources.files(package).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def profile_text(package: str, kind: str, name_or_path: str | Path) -> bytes:
    """The TOML of a profile of ``package`` by name, or of a file.

    Raises InputError for a name that is unknown, OSError if a file cannot be read.
    """
    name, known = str(name_or_path), builtin_names(package)
    if name.lower() in known:
        return resources.files(package).joinpath(f"{name.lower()}.toml").read_bytes()
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise InputError(f"{kind} {name!r} is unknown; expected a .toml profile or one of {', '.join(known)}")
    return path.read_bytes()


def _first_fault(kind: type[BaseModel], error: ValidationError) -> str:
    """The first complaint as one line: field, value, what would be right."""
    fault = error.errors()[0]
    name = ".".join(str(part) for part in fault["loc"])
    field = _field(kind, fault["loc"])
    if fault["type"] == "missing":
        return f"{name} is missing; expected {_wanted(field)}"
    expected = expectation(fault)
    if fault["type"] == "model_type":
        expected = _wanted(field, ", with a decimal point, or a table of value and source")
    found = fault["input"]
    found = found.get("value", found) if isinstance(found, dict) else found  # a figure in full
    found = str(found).lower() if isinstance(found, bool) else repr(found)  # as TOML writes it
    whole = isinstance(fault["input"], dict) and "value" not in fault["input"] and fault["type"] == "value_error"
    return f"{name}{'' if whole else f' is {found}'}; expected {expected}"


def _field(kind: type[BaseModel], place: Sequence[int | str]) -> FieldInfo | None:
    """The field of ``kind`` that ``place`` leads to, through tables and lists; None for one that there is not."""
    field, table = None, kind
    for name in place:
        if isinstance(name, str):
            fields = {each.alias or own: each for own, each in table.model_fields.items()}
            field = fields.get(name)
            table = _table(field) or table
    return field


def _table(field: FieldInfo | None) -> type[BaseModel] | None:
    """The class of the table, or of each of the tables, that ``field`` holds."""
    kinds = [field.annotation, *get_args(field.annotation)] if field else []
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


_WORDS = {str: "a text", int: "a whole number", float: "a number, with a decimal point", bool: "true or false"}


def _wanted(field: FieldInfo | None, ways: str = "") -> str:
    """What ``field`` holds and, where its description says so, what that is; of a number the ``ways`` to write it."""
    if field is None:
        return "a value"
    table = _table(field)
    if table is Figure:
        wanted = f"a number{ways}"
    elif table is not None:
        needed = [name for name, each in table.model_fields.items() if each.is_required()]
        wanted = f"a table with {', '.join(needed)}"
    else:
        wanted = next((words for kind, words in _WORDS.items() if field.annotation is kind), "a value")
    about = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
    return f"{wanted}: {about[:1].lower()}{about[1:]}" if about else wanted
