"""What a form of record is: how it is recognised, and how its requests are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces.convert.request import Record
from traces.convert.shapes import Given
from traces.convert.source import Source


@dataclass(frozen=True)
class Form:
    """One form of record: a file in ``traces/convert/forms`` that holds it as ``FORM``, or some as ``FORMS``, adds it.

    ``recognises`` looks at a source's nature and names, and at nothing that costs more. ``read`` gets sources of this
    form: one, or all that were given where ``together`` says that they are parts of one record. It raises InputError
    for what it cannot read; KeyError, TypeError and such are taken for damage. ``arrays`` are the names of its arrays,
    where it has named ones. A form that cannot be ``replayed`` is known so that it can be named.
    """

    name: str
    what: str  # a person's words for it
    recognises: Callable[[Source], bool]
    read: Callable[[Sequence[Source], Given], Record]
    together: bool = False
    arrays: tuple[str, ...] = ()
    replayed: bool = True
