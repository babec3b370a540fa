"""Generate text with a real model whose experts are offloaded, under any policy that can run online.

The tokens are those of the resident model, at every cache size and however wrong a prediction: only where weights lie
changes. Of a model with an encoder and a decoder each stack has slots and a policy of its own, sharing the budget by
their experts' bytes.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ground.errors import InputError
from realrun.device.devices import Device
from realrun.generate.options import OffloadOptions, stacks_of
from realrun.generate.stack import OffloadedStack
from sim.log import LATE_IN_FLIGHT, LATE_QUEUED, MISS, Counters
from traces.capture.decoding import Decoding, Prompt, passes
from traces.capture.positions import LengthTables
from traces.embeddings import Basis


@dataclass(frozen=True)
class Generated:
    """What came of a prompt: token ids (those that were run), times of steps in ns, and what look-ups found.

    ``found`` are codes of ``sim.log`` in the order of look-ups, ``counters`` the totals, one a stack, the decoder last.
    """

    tokens: list[int]
    step_ns: list[int]
    found: list[np.ndarray]
    counters: list[Counters]
    cache: str

    def summary(self) -> dict[str, Any]:
        """Plain data for a report."""
        found, counters = self.found[-1], self.counters[-1]
        late = int(np.isin(found, [LATE_QUEUED, LATE_IN_FLIGHT]).sum())
        misses = int((found == MISS).sum())
        decode = sum(self.step_ns[1:])
        return {
            "tokens": len(self.tokens),
            "ttft_ms": self.step_ns[0] / 1e6,
            "tokens_per_s": len(self.step_ns[1:]) * 1e9 / decode if decode else None,
            "lookups": len(found),
            "hits": len(found) - late - misses,
            "late": late,
            "misses": misses,
            "link_bytes": {"demand": sum(counters.demand_bytes), "prefetch": sum(counters.prefetch_bytes)},
            "cache": self.cache,
            "clock": "measured",
        }


class Offloader:
    """A model with its experts in host memory; a context, in which the model generates with them.

    Args:
        model: a causal language model or an encoder-decoder one, on the host, in eval mode.
        device: where it is to run; all but the experts is moved there.
        options: how.
        basis: of its embeddings, for policies that read them.

    Raises InputError if it has no known router, its experts are not of one size, memory is short, or the policy cannot
    run online.
    """

    def __init__(self, model: Any, device: Device, options: OffloadOptions, basis: Basis | None = None) -> None:
        self.model, self.device = model, device
        options.refuse()
        options.refuse_for(model, basis)
        _one_after_another(model)
        stacks = stacks_of(model)
        bytes_of = {part: sum(one.size * one.count for one in weights) for part, (_, weights) in stacks.items()}
        self.stacks: list[OffloadedStack] = []
        for part, (routed, weights) in stacks.items():
            share = bytes_of[part] / sum(bytes_of.values())
            self.stacks.append(OffloadedStack(model, part, routed, weights, device, options, share, basis))
        model.to(device.torch_device)

    def __enter__(self) -> "Offloader":
        with self.device.running():
            for stack in self.stacks:
                stack.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        for stack in self.stacks:
            stack.close()

    def generate(self, prompt: list[int], new_tokens: int, pad: int, eos: set[int]) -> Generated:
        """Decode greedily up to ``new_tokens`` tokens after ``prompt``, or up to one of ``eos``.

        Raises SlotFault if a check is on and finds a wrong expert, InputError as `refuse_new_prefill` does.
        """
        refuse_new_prefill(self.model, len(prompt), new_tokens)
        tokens: list[int] = []
        step_ns: list[int] = []
        with self.device.running():
            for stack in self.stacks:
                stack.begin_sequence()
            begin = time.perf_counter_ns()
            wanted = [Prompt(prompt, [], 0)]
            for one in passes(self.model, wanted, new_tokens + 1, Decoding("greedy"), pad, eos):
                now = time.perf_counter_ns()
                if one.prefill and one.part == "decoder":
                    step_ns[-1] += now - begin  # the encoder's pass and the decoder's first token
                else:
                    step_ns.append(now - begin)
                begin = now
                if not one.prefill:
                    tokens.append(int(one.ids[0, 0]))
            for stack in self.stacks:
                stack.check()
        found = [np.frombuffer(bytes(stack.loop.calls.found), np.uint8) for stack in self.stacks]
        counters = [stack.loop.counters for stack in self.stacks]
        return Generated(tokens, step_ns, found, counters, self.stacks[-1].described)


def refuse_new_prefill(model: Any, prompt: int, new_tokens: int) -> None:
    """Raise InputError where ``model`` would prefill its sequence again among so many tokens after a prompt.

    It does so where its positions change with length, see `traces.capture.positions`; a policy is not told of such a
    step. ``model`` may lack its weights.
    """
    tables = LengthTables(model)
    if tables.limit is not None and prompt <= tables.limit < prompt + new_tokens and tables.starts_anew():
        raise InputError(
            f"--tokens {new_tokens}: at {tables.limit} tokens {type(model).__name__} prefills its sequence again, "
            f"which is not done with offloaded experts; expected at most {tables.limit - prompt}, or a longer prompt"
        )


def resident_tokens(
    model: Any, device: Device, prompt: list[int], new_tokens: int, pad: int, eos: set[int]
) -> list[int]:
    """What the same model generates with all its experts on ``device``; it is on the host again afterwards."""
    _one_after_another(model)
    model.to(device.torch_device)
    with device.running():
        steps = passes(model, [Prompt(prompt, [], 0)], new_tokens + 1, Decoding("greedy"), pad, eos)
        tokens = [int(one.ids[0, 0]) for one in steps if not one.prefill]
    model.to("cpu")
    return tokens


def _one_after_another(model: Any) -> None:
    """Have experts modules loop over their experts; batched ways gather the weights of all."""
    for module in (model, *model.modules()):
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
