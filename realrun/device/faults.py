"""What ends a real run: defects of the engine or of the machine, never of the input."""


class RunError(RuntimeError):
    """The run cannot go on: the device does not do what it was given."""


class SlotFault(RuntimeError):
    """A kernel read a slot that did not hold, from its beginning to its end, the expert that it was to compute."""
