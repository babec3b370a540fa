"""What one batch of prompts gives: rows of a trace in order, and the states they were taken with."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.capture.decoding import Decoding, NoTokenError, Pass, Prompt, passes
from traces.capture.recorder import Recorder

if TYPE_CHECKING:
    import torch


# Rows of decode passes that wait on the model's device before they are looked at together.
_HELD = 2048


@dataclass(frozen=True)
class BatchRows:
    """Trace arrays of a batch, ``sequence`` counted within it, and whole states (H numbers each).

    ``states`` (n, L+1, H) belong to the decode rows, ``prefill_states`` (n, H) to the prefill rows at
    :func:`prefill_level`, both where the model lies and in its precision; ``odd`` counts what `ODD_ROUTES` notes.
    """

    arrays: dict[str, np.ndarray]
    states: "torch.Tensor"
    prefill_states: "torch.Tensor"
    odd: Counter[str]


def run_batch(
    recorders: Mapping[str, Recorder], prompts: list[Prompt], new_tokens: int, decoding: Decoding, pad: int,
    eos: set[int], chunk: int | None = None,
) -> dict[str, BatchRows]:  # fmt: skip
    """Run prompts through the model that ``recorders`` watch: the rows of each of its parts, see decoding.passes."""
    import torch

    model: Any = next(iter(recorders.values())).model
    gathered = {part: _BatchPart(recorder) for part, recorder in recorders.items()}
    with torch.inference_mode():
        try:
            for one in passes(model, prompts, new_tokens, decoding, pad, eos, chunk):
                # A stack without routed layers is not recorded.
                if one.part in gathered:
                    gathered[one.part].add(one)
        except NoTokenError:
            for rows in gathered.values():
                rows.settle()  # a router that gave no numbers is the cause, and is named instead
            raise
        return {part: rows.ordered() for part, rows in gathered.items()}


class _BatchPart:
    """The passes of one part of a model, one after another."""

    def __init__(self, recorder: Recorder) -> None:
        recorder.discard()
        self._recorder = recorder
        self._level = prefill_level(len(recorder.layers))
        self._waiting: list[Pass] = []
        self._arrays: dict[str, list[np.ndarray]] = {}
        self._states: list[torch.Tensor] = []
        self._prefill_states: list[torch.Tensor] = []
        self._odd: Counter[str] = Counter()

    def add(self, one: Pass) -> None:
        """Take note of a pass; those of decoding wait for each other."""
        self._waiting.append(one)
        self._recorder.hold(one.valid, one.position)
        if one.prefill or self._recorder.rows_held >= _HELD:
            self.settle()

    def settle(self) -> None:
        """Take what the recorder holds of the passes that wait."""
        import torch

        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        prefill = waiting[0].prefill
        rows = self._recorder.take(self._level if prefill else None)
        self._odd += rows.odd
        numbers = torch.arange(len(waiting[0].valid), device=rows.keep.device).unsqueeze(1)
        of_row = {
            "token": [one.ids for one in waiting],
            "sequence": [numbers.expand_as(one.valid) for one in waiting],
            "position": [one.position.expand_as(one.valid) for one in waiting],
        }
        found = {
            "experts": rows.experts, "gates": rows.gates, "probs": rows.probs, "lookahead": rows.lookahead,
            **{name: torch.cat([each.reshape(-1) for each in of_pass]).index_select(0, rows.keep).int()
               for name, of_pass in of_row.items()},
        }  # fmt: skip
        for name, tensor in found.items():
            self._arrays.setdefault(name, []).append(tensor.cpu().numpy())
        self._arrays.setdefault("phase", []).append(np.full(len(rows.keep), 0 if prefill else 1, np.uint8))
        (self._prefill_states if prefill else self._states).append(rows.states)

    def ordered(self) -> BatchRows:
        """Everything in the order of a trace: by sequence, then by position."""
        import torch

        self.settle()
        arrays = {name: np.concatenate(values) for name, values in self._arrays.items()}
        order = np.lexsort((arrays["position"], arrays["sequence"]))
        decode = arrays["phase"] == 1
        prefilled = self._prefill_states[0]
        none = prefilled.new_empty((0, len(self._recorder.layers) + 1, prefilled.shape[-1]))
        return BatchRows(
            {name: array[order] for name, array in arrays.items()},
            _reordered(torch.cat(self._states) if self._states else none, decode, order),
            _reordered(torch.cat(self._prefill_states), ~decode, order),
            self._odd,
        )


def _reordered(values: "torch.Tensor", mask: np.ndarray, order: np.ndarray) -> "torch.Tensor":
    """Values of the rows in ``mask``, given in row order, in the order ``order`` of all rows."""
    import torch

    place = np.cumsum(mask) - 1
    return values[torch.from_numpy(place[order][mask[order]]).to(values.device)]


def prefill_level(layers: int) -> int:
    """The level whose states prefill rows keep: the router input in the middle of the model, where the prompt's subject
    has been read and half of the prefill is still to come.
    """
    return max(1, layers // 2)
