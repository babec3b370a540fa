"""Flags that are whole numbers: a fraction is refused, not rounded."""

from typing import Annotated, Any

import pytest
from cyclopts import App, CycloptsError, Parameter

from ground.whole_number import WholeNumber


@pytest.fixture
def given() -> Any:
    app = App(help_on_error=False)
    seen: list[tuple[int, int | None]] = []

    @app.default
    def command(
        *, count: Annotated[WholeNumber, Parameter(help="how many")] = 1, most: WholeNumber | None = None
    ) -> None:
        seen.append((count, most))

    def run(*arguments: str) -> tuple[int, int | None]:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        return seen.pop()

    return run


def test_whole_numbers_pass(given: Any) -> None:
    assert given() == (1, None)
    assert given("--count", "12", "--most=-3") == (12, -3)
    assert given("--most", "+07") == (1, 7)


@pytest.mark.parametrize("text", ["1.5", "1.0", "1e3", "0x10", "", "two", "1_000", "٣", "9" * 19, "inf"])
@pytest.mark.parametrize("flag", ["--count", "--most"])
def test_anything_else_is_refused(given: Any, flag: str, text: str) -> None:
    with pytest.raises(CycloptsError, match="expected a whole number"):
        given(f"{flag}={text}")
