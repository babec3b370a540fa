"""Rotary positions whose frequencies depend on how long a sequence is: LongRoPE, dynamic NTK.

transformers takes the length of such a sequence from the largest position of a forward pass. So a prompt must pass by
the frequencies of its whole length, however it is cut, and a sequence must not share a pass with a longer one.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ground.errors import InputError


class LengthTables:
    """The rotary modules of ``model`` whose frequencies depend on length.

    ``limit``: sequences of up to so many tokens have the same ones; None where length never matters.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rotary = [(module, by) for module in model.modules() if (by := _limits(module))]
        self.limit: int | None = min((limit for _, by in self._rotary for limit in by.values()), default=None)

    def begin(self) -> None:
        """A batch begins: what a longer one before it left must not stay."""
        import torch

        first = torch.zeros(1, 1, dtype=torch.long, device=self._model.device)
        for module, by in self._rotary:
            for layer_type in by:
                module(first.float(), first, **({"layer_type": layer_type} if layer_type else {}))

    @contextmanager
    def as_long_as(self, length: int) -> Iterator[None]:
        """Let passes over pieces of a sequence of ``length`` tokens use the frequencies of the whole."""
        with ExitStack() as hooks:
            for module, _ in self._rotary:
                hooks.enter_context(module.register_forward_pre_hook(_lengthened(length), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(_shortened))
            yield

    def starts_anew(self) -> bool:
        """Whether transformers drops the KV cache where a sequence passes ``limit``, and prefills all of it again."""
        import torch
        from transformers import DynamicCache

        if self.limit is None:
            return False
        name, ids = cache_name(self._model), torch.zeros(1, self.limit + 1, dtype=torch.long)
        cache = DynamicCache(config=self._model.config)
        told = {"attention_mask": torch.ones_like(ids), "use_cache": True, name: cache}
        return self._model.prepare_inputs_for_generation(ids, **told).get(name) is None


def cache_name(model: Any) -> str:
    """The name that a model's forward gives its KV cache (transformers renamed it in 5.2x).

    Raises InputError if it has none.
    """
    names = inspect.signature(model.forward).parameters
    name = next((name for name in ("cache", "past_key_values") if name in names), None)
    if name is None:
        raise InputError(f"{type(model).__name__} takes no KV cache; a model that generates text is needed")
    return name


def _limits(module: Any) -> dict[str, int]:
    """Tokens up to which a rotary module's frequencies stay the same, by type of layer ("": of all layers)."""
    kinds: Any = getattr(module, "rope_type", None)
    found = {}
    for layer_type, kind in (kinds if isinstance(kinds, dict) else {"": kinds}).items():
        if kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters[layer_type] if layer_type else parameters
            found[layer_type] = int(parameters["original_max_position_embeddings"])
        elif isinstance(kind, str) and "dynamic" in kind:
            found[layer_type] = int(module.original_max_seq_len)
    return found


def _lengthened(length: int) -> Any:
    """A hook that adds the last position of a sequence of ``length`` tokens to those of a pass."""

    def hook(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in named:
            return inputs, {**named, "position_ids": _with_last(named["position_ids"], length)}
        states, positions, *more = inputs
        return (states, _with_last(positions, length), *more), named

    return hook


def _with_last(positions: Any, length: int) -> Any:
    import torch

    return torch.cat((positions, torch.full_like(positions[..., :1], length - 1)), dim=-1)


def _shortened(module: Any, inputs: Any, output: Any) -> Any:
    """Take the added position out again: outputs are (..., tokens, width)."""
    if isinstance(output, tuple):
        return tuple(one[..., :-1, :] for one in output)
    return output[..., :-1, :]
