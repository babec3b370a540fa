"""A policy as typed: its name, its parameters and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ground.errors import InputError
from sim.policies.named import NamedPolicy


@given(entries=st.integers(1, 10**6), eviction=st.sampled_from(["score", "lru"]), as_set=st.booleans())
def test_what_is_typed_is_what_is_named(entries: int, eviction: str, as_set: bool) -> None:
    parts = [f"entries={json.dumps(entries)}", f"eviction={eviction}"]
    label = "fmoe" if as_set else ",".join(["fmoe", *parts])
    named = NamedPolicy.of(label, "--set", parts if as_set else ())
    assert named == NamedPolicy(label, "fmoe", {"entries": entries, "eviction": eviction})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("lru,scope", r"^--policy lru: 'scope': expected key=value$"),
        ("lru,scope=layer,scope=all", r"^--policy lru: 'scope=all': scope is given twice"),
        ("nobody", r"^policy 'nobody' is unknown"),
        ("nobody,scope", r"^policy 'nobody' is unknown"),
        ("lru,colour=red", r"^policy lru: parameter colour"),
        ("lru,scope=" + "[" * 100_000, r"^--policy lru: scope: nested too deep"),
    ],
)
def test_what_is_no_policy_or_parameter_is_refused_in_a_line(typed: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        NamedPolicy.of(typed)
