"""What safetensors files of this project say of themselves."""

import json
from typing import Any


def record_of(data: bytes, name: str) -> Any:
    """The JSON that a file's header holds under ``name``. Raises ValueError, LookupError or TypeError without one."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"][name])
