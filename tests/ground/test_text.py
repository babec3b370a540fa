"""Other people's words, made fit to be shown."""

from hypothesis import given
from hypothesis import strategies as st

from ground.text import first_words


@given(st.text(alphabet="ab \n", max_size=80), st.integers(10, 40))
def test_what_is_left_out_of_a_long_line_is_whole_words(text, most):
    line, shown = " ".join(text.split()), first_words(text, most)
    assert len(shown) <= most
    if len(line) <= most:
        assert shown == line
    else:
        kept = shown.removesuffix(" ...")
        assert kept != shown and line.startswith(kept)
        assert line[len(kept)] == " " or " " not in line[: most - 3]
