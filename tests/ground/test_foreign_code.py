"""Errors of others' code become one line that names whose they are."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from ground.foreign_code import DEBUG, errors_name


def told(wrong: BaseException, *arguments: str, **ours: tuple[type[Exception], ...]) -> str:
    with pytest.raises(InputError) as error, errors_name("the model", *arguments, **ours):
        raise wrong
    return str(error.value)


@given(st.sampled_from([ValueError, KeyError, RuntimeError, SystemExit]), st.text(max_size=3000))
def test_whatever_is_raised_is_one_short_line_with_its_kind(kind: type[Exception], text: str) -> None:
    for arguments in ((), ("its pass failed",)):
        line = told(kind(text), *arguments)
        assert re.match(r"the model: (its pass failed \()?" + kind.__name__, line) or "out of memory" in line
        assert len(line.splitlines()) <= 1 and len(line) < 1200


def test_the_place_is_said_where_nothing_else_says_what_failed() -> None:
    assert "test_foreign_code.py, line " in told(ValueError("x"))
    assert "line" not in told(ValueError("x"), "its pass failed")


@pytest.mark.parametrize("wrong", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 8 bytes")])
def test_too_little_memory_is_said_with_a_remedy(wrong: Exception) -> None:
    assert told(wrong, "its pass failed", "a smaller --batch may help").startswith(
        "the model: out of memory, a smaller --batch may help ("
    )
    assert told(wrong).startswith("the model: out of memory (")


def test_errors_of_the_project_s_own_go_on_as_they_are() -> None:
    assert told(InputError("mine")) == "mine"
    with pytest.raises(LookupError), errors_name("x", ours=(LookupError,)):
        raise KeyError
    with pytest.raises(KeyboardInterrupt), errors_name("x"):
        raise KeyboardInterrupt


def test_a_person_who_debugs_sees_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG, "1")
    with pytest.raises(ValueError, match=r"^x$"), errors_name("x"):
        raise ValueError("x")
