"""Scenes made smaller: a model of smaller widths, to try things out without a GPU, and the first steps of a run."""

from dataclasses import fields, replace
from typing import Any

import numpy as np

from ground.errors import InputError
from sim.run.cache_size import parse_capacity
from sim.run.scene import Scene, SceneOptions, scene_of
from sim.workload import Schedule, workload
from traces.models.attention import Attention, Matrix
from traces.models.spec import ModelSpec
from traces.schema import DECODE

WIDTHS = ", widths / "
"""What the name of a model whose widths were divided says."""


def small_scene(options: SceneOptions, scale: int, steps: int | None, *, learns: bool) -> Scene:
    """What ``sim.run.scene.scene_of`` makes of ``options``, its model ``scaled``, up to a decode step if given.

    What a cache size means is known once the model is. Raises InputError as those do.
    """
    if options.regroup is not None or options.pipeline != "sequential":
        raise InputError("--regroup, --pipeline: a real run predicts as its steps begin and regroups nothing")
    if options.ubatch is not None:
        raise InputError("--ubatch: real runs serve prompts whole; expected none")
    here = scene_of(options if scale == 1 else replace(options, cache="100%"), learns=learns)
    if scale != 1:
        here = with_model(here, scaled(here.model, scale), options.cache)
    return here if steps is None else first_steps(here, steps)


def first_steps(scene: Scene, decode_steps: int) -> Scene:
    """``scene`` up to its so-manyth decode step. Raises InputError unless that is at least 1."""
    if decode_steps < 1:
        raise InputError(f"--steps {decode_steps}; expected at least 1")
    decode = np.flatnonzero(scene.work.schedule.phase == DECODE)
    return scene if len(decode) <= decode_steps else cut(scene, int(decode[decode_steps - 1]) + 1)


def cut(scene: Scene, steps: int) -> Scene:
    """``scene`` up to its so-manyth step, prefills counted."""
    whole = scene.work.schedule
    schedule = Schedule(whole.phase[:steps], whole.offsets[: steps + 1], whole.rows[: whole.offsets[steps]])
    return replace(scene, work=workload(scene.trace, scene.model, scene.hardware, schedule))


def scaled(model: ModelSpec, divisor: int) -> ModelSpec:
    """``model`` with widths and vocabulary divided: the same layers, experts and routes, to try things out.

    Raises InputError if the divisor is below 1 or leaves no width.
    """
    if divisor < 1 or divisor > min(model.hidden, model.expert_ffn, model.vocab) // 4:
        raise InputError(f"--scale {divisor}; expected 1 to {min(model.hidden, model.expert_ffn, model.vocab) // 4}")
    if divisor == 1:
        return model

    def part(width: int) -> int:
        return max(2, width // divisor // 2 * 2) if width else 0

    def thinner(attention: Attention) -> Attention:
        widths = (field.name for field in fields(Attention) if field.name not in ("shape", "matrices"))
        less: dict[str, Any] = {name: part(getattr(attention, name)) for name in widths}
        whole = Matrix("all of them", 1, max(2 * hidden, attention.parameters // divisor**2))
        return replace(attention, matrices=(whole,), **less)

    hidden, inner = part(model.hidden), part(model.expert_ffn)
    return replace(
        model,
        name=f"{model.name}{WIDTHS}{divisor}",
        hidden=hidden,
        expert_ffn=inner,
        expert_bytes=(2 * model.expert_matrices * hidden * inner,) * model.routed_layers,
        attention=thinner(model.attention),
        other_attention=model.other_attention and thinner(model.other_attention),
        vocab=part(model.vocab),
        shared_ffn=part(model.shared_ffn),
        dense_ffn=part(model.dense_ffn),
        stored=None,
    )


def with_model(scene: Scene, model: ModelSpec, cache_size: str) -> Scene:
    """``scene`` with another model of the same shape, and the cache that ``cache_size`` means for it."""
    budget = parse_capacity(cache_size, model.expert_bytes, model.experts)
    work = workload(scene.trace, model, scene.hardware, scene.work.schedule)
    return replace(scene, model=model, budget=budget, work=work)
