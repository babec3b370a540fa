"""What pydantic found wrong, in the words of the project's errors."""

from typing import Any

_EXPECTED = {
    "extra_forbidden": "no such field",
    "float_type": "a number, with a decimal point",
    "list_type": "a list",
    "string_type": "a text",
    "string_too_short": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "missing": "a value",
}


def expectation(fault: Any) -> str:
    """What one entry of ``ValidationError.errors()`` expects, to stand after "expected"."""
    bounds = fault.get("ctx", {})
    known = _EXPECTED | {
        "greater_than": f"more than {bounds.get('gt')}",
        "greater_than_equal": f"{_short(bounds.get('ge'))} or more",
        "too_short": f"at least {bounds.get('min_length')} of them",
        "less_than": f"less than {bounds.get('lt')}",
        "less_than_equal": f"at most {_short(bounds.get('le'))}",
    }
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return known.get(fault["type"], message[:1].lower() + message[1:])


def _short(bound: Any) -> str:
    return f"{bound:g}".replace("e+0", "e") if isinstance(bound, float) else str(bound)
