"""Texts that name a value: ``name=value``, as command lines take them."""

from collections.abc import Iterable

from ground.errors import InputError


def pairs(texts: Iterable[str], where: str, form: str = "key=value") -> dict[str, str]:
    """The values by name, in the order of ``texts``, which were typed at ``where``.

    Raises InputError for a text of another form and for a name that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{where} {text!r}: expected {form}")
        if name in found:
            raise InputError(f"{where} {text!r}: {name} is given twice; expected it once")
        found[name] = value
    return found
