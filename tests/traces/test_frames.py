"""Traces as data frames."""

from hypothesis import given, settings

from tests.support.strategies import traces
from traces.schema import DECODE
from traces.trace import Trace


@given(traces())
@settings(max_examples=50)
def test_a_frame_has_a_row_for_each_token_and_layer_and_holds_every_route(trace: Trace) -> None:
    frame = trace.to_frame()
    assert len(frame) == trace.n_rows * trace.n_layers
    top_k = trace.experts.shape[2]
    ids = [f"e{place}" for place in range(top_k)]
    assert (frame[ids].to_numpy().reshape(trace.experts.shape) == trace.experts).all()
    gates = [f"gate{place}" for place in range(top_k)]
    if trace.gates is None:
        assert not set(gates) & set(frame)
    else:
        assert (frame[gates].to_numpy().reshape(trace.gates.shape) == trace.gates).all()
    for at, line in zip(range(len(frame)), frame.itertuples(index=False), strict=True):
        row, layer = divmod(at, trace.n_layers)
        sequence = trace.sequence[row]
        assert (line.row, line.layer) == (row, trace.layers[layer])
        assert (line.token, line.position) == (trace.token[row], trace.position[row])
        assert line.phase == ("decode" if trace.phase[row] == DECODE else "prefill")
        assert (line.sequence, line.domain, line.split) == (
            trace.sequence_id[sequence], trace.domain[sequence], trace.split[sequence],
        )  # fmt: skip
