"""The one place where real runs import torch, and where a device's name is read."""

from typing import TYPE_CHECKING, Any

from ground.addresses import check_torch
from ground.errors import InputError

if TYPE_CHECKING:
    import torch


def the_torch() -> Any:
    """The torch module; InputError where it is not installed."""
    check_torch()
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError("torch is not installed; pip install 'moe-replay[torch]'") from None
    return torch


def the_device(name: str) -> "torch.device":
    """The torch device called ``name``; InputError unless it is the CPU or a GPU that is there."""
    torch = the_torch()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r}; expected cuda, cuda:N or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise InputError(f"device {name!r}; expected cuda, cuda:N or cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device {name!r}: torch {torch.__version__} finds no GPU here; name --device cpu to try")
        if (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device
