"""The forms of records that convert knows, a file each, found by name."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ground.errors import InputError
from traces.convert.form import Form
from traces.convert.source import Source


@cache
def forms() -> dict[str, Form]:
    """All forms by name."""
    found: dict[str, Form] = {}
    for module in iter_modules(__path__, f"{__name__}."):
        held = vars(import_module(module.name))
        found |= {form.name: form for form in (*held.get("FORMS", ()), *([held["FORM"]] if "FORM" in held else ()))}
    return dict(sorted(found.items()))


def form_of(source: Source) -> Form | None:
    """The form of a source, None where no form knows it. Raises InputError for a text that is damaged."""
    return next((form for form in forms().values() if form.recognises(source)), None)


def replayed_forms() -> str:
    """The names of the forms that become traces."""
    return ", ".join(form.name for form in forms().values() if form.replayed)


def form_named(name: str) -> Form:
    """The form called ``name``; raises InputError that lists the names."""
    if name not in forms():
        raise InputError(f"kind {name!r}: expected {replayed_forms()}")
    return forms()[name]
