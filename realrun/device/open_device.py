"""A device by its name."""

from collections.abc import Iterator
from contextlib import contextmanager

from realrun.device.cuda_device import CudaDevice
from realrun.device.devices import Device
from realrun.device.host_device import HostDevice
from realrun.device.torch_device import the_device


@contextmanager
def open_device(name: str) -> Iterator[Device]:
    """``cuda``, ``cuda:1`` or ``cpu``. Raises InputError where torch is missing or there is no such device."""
    device = the_device(name)
    if device.type == "cuda":
        yield CudaDevice(device)
        return
    host = HostDevice()
    try:
        yield host
    finally:
        host.close()
