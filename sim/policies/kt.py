"""KTransformers' static placement: some experts of every layer are on the GPU, the others are computed on the host.

doc/en/kt-kernel/experts-sched-Tutorial.md of github.com/kvcache-ai/ktransformers: ``uniform`` places as many in every
layer, ``frequency`` the most used of a profile wherever they are, ``front-loading`` whole layers from the first on.

With ``dynamic`` every prompt of ``stream_from`` rows or more, whose experts are copied anyway, leaves the most used of
each layer on the GPU, as many in every layer (the tutorial's ``--kt-enable-dynamic-expert-update``).

Decided here: as many are placed as fit, beside room for one copied expert; steps of many rows copy what they lack. Of
equally often used experts those stay that are there. What a prompt's last layers pushed out is copied again at its end.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from sim.plan import Plan, Requests
from sim.policies.hosting import HostingPolicy, HostParameters, placed
from sim.predictors.latest_values import latest_values
from sim.predictors.popularity import counts_by_domain
from sim.view import View


class KtParameters(HostParameters):
    """Parameters of kt."""

    place: Literal["uniform", "frequency", "front-loading"] = "uniform"
    """which experts are on the GPU."""
    dynamic: bool = False
    """whether each prompt chooses anew."""
    stream_from: int = Field(default=512, ge=0, le=2**30)
    """rows of a step from which experts are copied to the GPU rather than computed on the host; the tutorial's
    ``--kt-gpu-prefill-token-threshold``."""


class Kt(HostingPolicy):
    """A static mask of experts on the GPU."""

    name = "kt"
    summary = "KTransformers: a static choice of experts is on the GPU, the CPU computes the others"
    takes = KtParameters
    variants = ("place=frequency", "place=front-loading", "dynamic=True")
    parameters: KtParameters
    learns = True

    def plan(self, view: View) -> Plan:
        """Place experts for good, or until the next prompt."""
        given, total = self.parameters, view.n_layers * view.n_experts
        order = np.arange(total)
        if given.place == "uniform":
            order = order.reshape(view.n_layers, view.n_experts).T.ravel()
        elif given.place == "frequency":
            counts = np.sum([np.zeros(total, np.int64), *counts_by_domain(self.setting.profile).values()], axis=0)
            order = np.lexsort((order, -counts))
        kept = self._fitting(order)
        if given.place == "uniform":  # as many in every layer
            kept = kept[: len(kept) // view.n_layers * view.n_layers]
        if given.dynamic:
            return self._anew(view, kept)
        requests = placed(kept, view.n_layers, view.n_experts, view.n_steps)
        host = self._host(np.sort(kept), trips=self.setting.model.top_k, stream_from=given.stream_from)
        return Plan(eviction="fifo", keep=False, requests=requests, host=host)

    def _anew(self, view: View, kept: np.ndarray) -> Plan:
        """Begin with ``kept``, and choose anew in every prompt that copies its experts."""
        prompts, rows = view.prefill_steps(), np.bincount(view.step, minlength=view.n_steps)
        step = prompts[rows[prompts] >= self.parameters.stream_from]
        masks = np.zeros((1 + len(step), view.n_layers, view.n_experts), np.int64)
        masks[0].ravel()[kept] = 1
        for i, prompt in enumerate(step.tolist()):
            masks[i + 1] = self._most_used(view, prompt, masks[i], len(kept) // view.n_layers)
        # As a prompt begins what is there counts for little, and from a layer's route on its own choice for more.
        begin = np.append(0, step)
        number, layer = (part.ravel() for part in np.indices((len(begin), view.n_layers)))
        chosen = number > 0
        moments = view.moment(begin[number], 0), view.moment(begin[number], 1 + layer)[chosen]
        worth = masks[np.maximum(number - 1, 0), layer], 2 * masks[number, layer][chosen]
        values = latest_values(
            view.n_layers, np.concatenate(moments), np.append(layer, layer[chosen]), np.concatenate(worth)
        )
        asked = np.append(0, step + 1)  # as the step after the prompt begins: nobody knows yet whether that is a prompt
        until = np.maximum(np.append(step, view.n_steps) - 1, asked)
        stays = np.flatnonzero(asked < view.n_steps)
        which, layer, expert = np.nonzero(masks[stays])
        which = stays[which]
        requests = Requests.build(
            moment=view.moment(asked[which], 0),
            call=until[which] * view.n_layers + layer,
            expert=layer * view.n_experts + expert,
            priority=begin[which] * view.n_layers + layer,
        )
        host = self._host(trips=self.setting.model.top_k, stream_from=self.parameters.stream_from)
        return Plan(eviction="score", values=values, requests=requests, host=host)

    def _most_used(self, view: View, step: int, there: np.ndarray, count: int) -> np.ndarray:
        """So many experts of each layer that the rows of ``step`` used most (L, E), first those that are ``there``."""
        routes = view.route(view.n_layers)[view.step == step].astype(np.int64)
        mask = np.zeros_like(there)
        for layer in range(view.n_layers):
            used = routes[:, layer]
            uses = np.bincount(used[used >= 0], minlength=view.n_experts)
            mask[layer, np.lexsort((-there[layer], -uses))[:count]] = 1
        return mask
