"""Work as a CUDA graph: launched as a whole, at little cost."""

from collections.abc import Callable
from typing import TypeVar

from realrun.device.torch_device import the_torch

_Result = TypeVar("_Result")


def captured(work: Callable[[], _Result]) -> Callable[[], _Result]:
    """``work``, ready to be replayed on the same tensors; a replay returns what ``work`` returned when captured."""
    cuda = the_torch().cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):  # libraries allocate their workspaces outside the capture
        for _ in range(2):
            work()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        result = work()

    def replay(_inputs: Callable[[], _Result] = work) -> _Result:
        graph.replay()  # a graph knows addresses alone: what lies there must live as long
        return result

    return replay
