"""Other people's words, made fit to be shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from ground.text import first_words, utf8


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


@given(st.integers(0, 9), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_bytes_that_are_no_utf8_are_refused_by_file_and_line(before, mark):
    assert utf8(mark + "é\n".encode() * before, "x") == "é\n" * before
    with pytest.raises(InputError, match=rf"^x: line {before + 1}: not UTF-8"):
        utf8(mark + "é\n".encode() * before + b"a \xff\nb\n", "x")
