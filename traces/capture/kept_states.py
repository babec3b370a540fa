"""Where the hidden states of a text wait until all of it has been run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ground.errors import InputError
from ground.text import first_words
from traces.spool import Spool

if TYPE_CHECKING:
    import torch

# States of a text stay on a GPU while they take at most this share of what is free there: there may be many texts, and
# a basis is fitted to copies of them all.
_SHARE = 0.04
_ROWS = 1024  # rows of a file in memory at once


@contextmanager
def memory_named() -> Iterator[None]:
    """Turn a GPU's lack of memory for what is recorded into an InputError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = first_words(error, 200)
        raise InputError(
            f"out of memory for what is recorded, a smaller --batch or --chunk may help ({reason})"
        ) from None


class KeptStates:
    """Rows of states (n, ...) as batches give them: on their GPU while there is room, else as float32 in a file."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._file: Spool | None = None

    def add(self, rows: "torch.Tensor") -> None:
        """Append rows."""
        if self._file is None and self._fits(rows):
            self._blocks.append(rows)
            return
        if self._file is None:
            self._file = Spool()
        for block in (*self._blocks, rows):
            self._file.add(block.cpu().float().numpy())
        self._blocks.clear()

    def extend(self, other: "KeptStates") -> None:
        """Append the rows of another, which is at its end."""
        import torch

        for block in other._blocks:
            self.add(block)
        rows = other._file.read() if other._file is not None else ()
        for start in range(0, len(rows), _ROWS):
            self.add(torch.from_numpy(np.array(rows[start : start + _ROWS])))

    def read(self) -> Any:
        """All rows, which nothing is added to any more: a tensor where they stayed on a GPU, else a memory map."""
        import torch

        if self._file is not None:
            return self._file.read()
        return torch.cat(self._blocks) if self._blocks else np.empty(0, np.float32)

    def _fits(self, rows: "torch.Tensor") -> bool:
        """Whether these rows may stay where they are."""
        import torch

        if not rows.is_cuda:
            return False
        free = torch.cuda.mem_get_info(rows.device)[0]
        free += torch.cuda.memory_reserved(rows.device) - torch.cuda.memory_allocated(rows.device)
        return sum(block.nbytes for block in (*self._blocks, rows)) <= _SHARE * free
