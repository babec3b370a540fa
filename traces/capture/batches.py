"""What one batch of prompts gives: rows of a trace in order, and the states they were taken with."""

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from traces.capture.decoding import Decoding, Pass, Prompt, passes
from traces.capture.recorder import Recorder


@dataclass(frozen=True)
class BatchRows:
    """Trace arrays of a batch, ``sequence`` counted within it, and whole states (H numbers each).

    ``states`` (n, L+1, H) belong to the decode rows, ``prefill_states`` (n, H) to the prefill rows at
    :func:`prefill_level`; ``odd`` counts what `ODD_ROUTES` notes.
    """

    arrays: dict[str, np.ndarray]
    states: np.ndarray
    prefill_states: np.ndarray
    odd: Counter[str]


class Spool:
    """float32 rows of one shape written to a file as they come and read back as a memory map.

    The file lies where temporary files do but has no name there (on Windows: until it is closed), so a process that is
    killed leaves nothing behind.
    """

    def __init__(self) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="moe-capture-")  # noqa: SIM115 (it lives as long as its rows)
        self._rows, self._shape = 0, (0,)

    def add(self, rows: np.ndarray) -> None:
        """Append rows (n, ...)."""
        self._rows, self._shape = self._rows + len(rows), rows.shape[1:]
        self._file.write(np.ascontiguousarray(rows, np.float32).tobytes())

    def read(self) -> np.ndarray:
        """All rows; the file is no longer written."""
        if not self._rows:
            return np.empty((0, *self._shape), np.float32)
        self._file.flush()
        return np.memmap(self._file, np.float32, "r", shape=(self._rows, *self._shape))


def run_batch(
    recorders: Mapping[str, Recorder], prompts: list[Prompt], new_tokens: int, decoding: Decoding, pad: int,
    eos: set[int], chunk: int | None = None,
) -> dict[str, BatchRows]:  # fmt: skip
    """Run prompts through the model that ``recorders`` watch: the rows of each of its parts, see decoding.passes."""
    import torch

    model: Any = next(iter(recorders.values())).model
    gathered = {part: _BatchPart(recorder) for part, recorder in recorders.items()}
    with torch.inference_mode():
        for one in passes(model, prompts, new_tokens, decoding, pad, eos, chunk):
            # A stack without routed layers is not recorded.
            if one.part in gathered:
                gathered[one.part].add(one)
    return {part: rows.ordered() for part, rows in gathered.items()}


class _BatchPart:
    """The passes of one part of a model, one after another."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._level = prefill_level(len(recorder.layers))
        self._arrays: dict[str, list[np.ndarray]] = {}
        self._states: list[np.ndarray] = []
        self._prefill_states: list[np.ndarray] = []
        self._odd: Counter[str] = Counter()

    def add(self, one: Pass) -> None:
        """Take what the recorder holds of a pass."""
        import torch

        rows = self._recorder.take(one.valid, one.position, self._level if one.prefill else None)
        self._odd += rows.odd
        sequence = torch.arange(len(one.valid), device=one.valid.device).unsqueeze(1).expand_as(one.valid)
        found = {
            "experts": rows.experts, "gates": rows.gates, "probs": rows.probs, "lookahead": rows.lookahead,
            "token": one.ids[one.valid].int(), "sequence": sequence[one.valid].int(),
            "position": one.position.expand_as(one.valid)[one.valid].int(),
        }  # fmt: skip
        for name, tensor in found.items():
            self._arrays.setdefault(name, []).append(tensor.cpu().numpy())
        self._arrays.setdefault("phase", []).append(np.full(len(rows.experts), 0 if one.prefill else 1, np.uint8))
        (self._prefill_states if one.prefill else self._states).append(rows.states.float().cpu().numpy())

    def ordered(self) -> BatchRows:
        """Everything in the order of a trace: by sequence, then by position."""
        arrays = {name: np.concatenate(values) for name, values in self._arrays.items()}
        order = np.lexsort((arrays["position"], arrays["sequence"]))
        decode = arrays["phase"] == 1
        none = np.empty((0, len(self._recorder.layers) + 1, self._prefill_states[0].shape[-1]), np.float32)
        return BatchRows(
            {name: array[order] for name, array in arrays.items()},
            _reordered(np.concatenate(self._states) if self._states else none, decode, order),
            _reordered(np.concatenate(self._prefill_states), ~decode, order),
            self._odd,
        )


def _reordered(values: np.ndarray, mask: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Values of the rows in ``mask``, given in row order, in the order ``order`` of all rows."""
    place = np.cumsum(mask) - 1
    return values[place[order][mask[order]]]


def prefill_level(layers: int) -> int:
    """The level whose states prefill rows keep: the router input in the middle of the model, where the prompt's subject
    has been read and half of the prefill is still to come.
    """
    return max(1, layers // 2)
