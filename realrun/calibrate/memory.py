"""GPU memory bandwidth: of a copy within the device, and of a product that reads a weight matrix once."""

from dataclasses import dataclass

from realrun.calibrate.machine import Machine


@dataclass(frozen=True)
class Bandwidth:
    """GB/s."""

    copy: float
    """Bytes read and written by a copy within the device."""
    read: float
    """Bytes of a matrix that multiplies one vector: what an expert's FFN does at batch 1."""
    total_gb: float
    """The device's memory, decimal GB."""


def bandwidth(machine: Machine, size: int = 2**31) -> Bandwidth:
    """Copies and matrix-vector products over ``size`` bytes, far more than any cache holds."""
    source, target = machine.bytes(size), machine.bytes(size)
    columns = 4096
    matrix = machine.random(size // 2 // columns, columns)
    vector = machine.random(columns)
    work = {"copy": [lambda: target.copy_(source)], "read": [lambda: matrix @ vector]}
    taken = machine.times(work, repeats=max(3, machine.repeats // 2))
    total = machine.torch.cuda.get_device_properties(machine.device).total_memory / 1e9 if machine.cuda else 0.0
    return Bandwidth(2 * size / taken["copy"].ns, matrix.numel() * 2 / taken["read"].ns, total)
