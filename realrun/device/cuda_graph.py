"""Work as a CUDA graph: launched as a whole, at little cost."""

from collections.abc import Callable
from typing import Any, TypeVar

from realrun.device.torch_device import the_torch

_Result = TypeVar("_Result")


def recorded(work: Callable[[], _Result], stream: Any = None) -> tuple[Any, _Result]:
    """A graph of ``work`` on ``stream``, by default one of its own, and what ``work`` returned as it was captured."""
    cuda = the_torch().cuda
    side = stream or cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):  # libraries allocate their workspaces outside the capture
        for _ in range(2):
            work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        return graph, work()


def captured(work: Callable[[], _Result]) -> Callable[[], _Result]:
    """``work``, ready to be replayed on the same tensors; a replay returns what ``work`` returned when captured."""
    graph, result = recorded(work)

    def replay(_inputs: Callable[[], _Result] = work) -> _Result:
        graph.replay()  # a graph knows addresses alone: what lies there must live as long
        return result

    return replay
