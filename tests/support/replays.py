"""A small trace and a profile for the simulator's command line, and how to run it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.strategies import make_trace
from tests.support.worlds import toy_meta
from traces.trace import Trace

PROFILE = """
name = "mine"
[gpu]
memory_gb = 8.0
bandwidth_gbps = 300.0
bandwidth_fraction = 1.0
tflops = 20.0
tflops_fraction = 1.0
[link]
name = "cable"
latency_us = 0.0
gbps = {gbps}
[software]
kind = "toy"
operation_us = 5.0
expert_floor_us = 20.0
layer_floor_us = 50.0
route_wait_us = 0.0
waits_for_route = true
"""
EXPERT = 3 * 64 * 128 * 2


def toy_trace(**changes: Any) -> Trace:
    """Two sequences, one of each split: 4 layers of 8 experts, two a token."""
    rng = np.random.default_rng(0)
    routes = rng.random((30, 4, 8)).argsort(axis=2)[:, :, :2]
    phase = [0] * 3 + [1] * 7 + [0] * 4 + [1] * 16
    given: dict[str, Any] = {"sequence": [0] * 10 + [1] * 20, "split": ["profile", "eval"], "phase": phase} | changes
    trace = make_trace(routes, n_experts=8, **given)
    trace.meta["model"] |= toy_meta(4)
    return trace


def unexpected(err: str) -> str:
    """Standard error without the lines that name what a trace cannot be compared under."""
    return "".join(
        line for line in err.splitlines(True) if not line.endswith("(the trace lacks what it learns from or reads)\n")
    )


def reported(said: Any, *arguments: object) -> Any:
    status, out, err = said(*arguments, "--json", "-")
    assert (status, unexpected(err)) == (0, "")
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def refused(said: Any, folder: Path, message: str, *arguments: object) -> None:
    before = sorted(folder.iterdir())
    status, out, err = said(*arguments, "--json", folder / "out.json", "--timeline", folder / "out.json.gz")
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert sorted(folder.iterdir()) == before, "no file is left"
