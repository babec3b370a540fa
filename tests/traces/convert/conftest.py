"""Arrays made into traces."""

from typing import Any

import numpy as np
import pytest

from ground.errors import InputError
from traces.convert.kinds import Given, convert_file
from traces.trace import Trace


@pytest.fixture
def serve(tmp_path):
    """Convert a serving record of these arrays (toy model, layers 0..L-1, 8 experts unless said) to a Trace."""

    def convert(routed: Any, *, layer_ids: Any = "all", n_experts: Any = 8, given: Given | None = None, **more: Any):
        routed = np.asarray(routed)
        record = {"routed_experts": routed, **more}
        if isinstance(layer_ids, str):
            layer_ids = np.arange(1 if routed.ndim == 1 else routed.shape[-2 if routed.ndim > 2 else 1])
        if layer_ids is not None:
            record["layer_ids"] = np.asarray(layer_ids)
        if n_experts is not None:
            record["n_experts"] = np.int64(n_experts)
        np.savez(tmp_path / "chat.npz", **record)
        out = tmp_path / "out.npz"
        out.unlink(missing_ok=True)
        try:
            made = convert_file(tmp_path / "chat.npz", out, given=given or Given(model="toy"))
        except InputError as error:
            assert "\n" not in str(error) and str(error).startswith(f"{tmp_path / 'chat.npz'}: ")
            assert not out.exists()
            raise
        loaded = Trace.load(out)
        np.testing.assert_array_equal(made.experts, loaded.experts)
        return loaded

    return convert
