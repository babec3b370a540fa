"""How a simulated run can fail."""


class SimulationError(RuntimeError):
    """The run cannot go on: a defect of the engine or of a policy's own eviction rule, never of the input."""

    def __str__(self) -> str:
        return f"the run cannot go on: {super().__str__()}"
