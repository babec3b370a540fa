"""The answer: placements ranked, what it hangs on, and what other parts would buy."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from ground.errors import InputError
from sim.advise.asked import Asked, Routing, routed, scene, served_by
from sim.advise.engines import Engine, Placement, engines
from sim.advise.trial import HOST_REST, Trial, prompt_rows, tried
from sim.machine.hardware import Hardware
from sim.run.scene import Scene
from sim.sweep.design import hardware_of
from sim.sweep.sensitivity import Range, assumed, ranges

_HOST = ("host.host_gbps", "host.shared_gbps")


@dataclass(frozen=True)
class Turn:
    """The fastest placement where one thing is another: at the ends of a figure's range, or with another part."""

    name: str
    speeds: tuple[float, ...]
    """tokens/s: of a figure at its low and high end, of a part one."""
    source: str = ""
    """Of a figure's range, or which placement is the fastest with a part."""


@dataclass
class Answer:
    """What was found.

    Attributes:
        trials: every placement, the fastest first, those that cannot be run last.
        figures: what the fastest does at the ends of each figure that the machine's profile assumes, the widest first.
        equal: other placements about as fast: their interval meets the fastest's, or they are as fast at such an end.
        parts: what the fastest placement is with another part, the best first.
    """

    asked: Asked
    here: Scene
    routes: Routing
    trials: list[Trial] = field(default_factory=list)
    figures: list[Turn] = field(default_factory=list)
    equal: list[Trial] = field(default_factory=list)
    parts: list[Turn] = field(default_factory=list)

    @property
    def best(self) -> Trial:
        """The fastest."""
        return self.trials[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        memory = self.here.memory
        return {
            "model": self.here.model.name, "quant": self.asked.quant, "hardware": self.here.hardware.name,
            "context": self.asked.context, "kv": self.asked.kv, "routing": self.routes.words,
            "own_routing": self.routes.own, "prompt_tokens": prompt_rows(self.here),
            "memory_bytes": None if memory is None else {
                "card": memory.card, "weights": memory.weights, **memory.beside, "experts": self.here.budget,
            },
            "all_experts_bytes": self.here.model.all_expert_bytes,
            "host_memory_bytes": self.asked.host_memory, "host_threads": self.best.filled["threads"],
            "placements": [one.to_json() for one in self.trials],
            "about_equal": [{"engine": one.engine.name, "placement": one.placement.name} for one in self.equal],
            "figures": [vars(one) for one in self.figures], "parts": [vars(one) for one in self.parts],
        }  # fmt: skip


def advise(asked: Asked, progress: Callable[[float, str], None] = lambda share, what: None) -> Answer:
    """Try every placement, vary what is assumed, and try other parts. Raises InputError."""
    routes = routed(asked)
    here = scene(asked, routes)
    answer = Answer(asked, here, routes)
    answer.trials = trials(asked, routes)
    if not answer.best.speed:
        nearest = min((one.host_bytes for one in answer.trials if one.host_bytes), default=0)
        reasons = dict.fromkeys(one.reason for one in answer.trials if one.host_bytes in (0, nearest))
        would = ", ".join(one.name for one in _parts(answer)) or "none of the parts that are tried"
        why = f"no placement can be run: {'; '.join(reasons)}; what would do: {would}"
        raise InputError(f"{here.model.name} on {asked.titled}: {why}")
    progress(0.3, "figures")
    answer.figures = sorted(_figures(answer), key=lambda one: max(one.speeds) / min(one.speeds), reverse=True)
    answer.equal = equal(answer)
    progress(0.6, "parts")
    answer.parts = sorted(_parts(answer), key=lambda one: one.speeds, reverse=True)
    progress(1.0, "")
    return answer


def trials(asked: Asked, routes: Routing, hardware: Hardware | None = None) -> list[Trial]:
    """Every placement of every engine that reads the precision, the fastest first. Raises InputError."""
    machine = hardware or asked.machine.load()
    done: list[tuple[Trial, tuple[str, Hardware]]] = []
    scenes: list[tuple[Hardware, Scene]] = []
    found = []
    for engine in engines():
        there = served_by(engine, asked, machine)
        here = next((kept for known, kept in scenes if known == there), None) or scene(asked, routes, there)
        scenes.append((there, here))
        for placement in engine.placements:
            if not engine.reads(asked.form) or (engine.methods and not engine.method(asked.form, here.model)):
                found.append(Trial(engine, placement, reason=f"reads no {asked.form or 'such experts as released'}"))
                continue
            same = next((one for one, known in done if known == (placement.policy, there)), None)
            if same is None or same.report is None:
                same = tried(engine, placement, here, asked)
                done.append((same, (placement.policy, there)))
            found.append(_of(engine, placement, same))
    return sorted(found, key=lambda one: one.speed, reverse=True)


def _of(engine: Engine, placement: Placement, same: Trial) -> Trial:
    """The trial of a placement whose policy another engine has too: its run, with its own command."""
    if (same.engine, same.placement) == (engine, placement):
        return same
    return replace(same, engine=engine, placement=placement, command=placement.command.format(**same.filled))


def _figures(answer: Answer) -> Iterator[Turn]:
    """The fastest placement at both ends of each range of which the machine assumes the figures."""
    for one in _open(answer):
        speeds = _at_ends(answer, answer.best, one)
        if min(speeds) > 0:
            yield Turn(one.name, speeds, one.source)


def _open(answer: Answer) -> Iterator[Range]:
    """The ranges of which the machine assumes the figures."""
    plain = hardware_of(answer.asked.machine, ())
    for one in (*(r for r in ranges() if r.loop in ("", plain.software.kind)), _host_range()):
        open_to = assumed(plain) | ({*_HOST} if plain.host else set())
        if open_to.issuperset(one.figures):
            yield one


def _at_ends(answer: Answer, trial: Trial, varied: Range) -> tuple[float, ...]:
    """The speed of a placement at both ends of a range."""
    speeds, asked = [], answer.asked
    for end in range(2):
        changes = tuple((name, f"x{factors[end]:g}") for name, factors in varied.figures.items())
        there = served_by(trial.engine, asked, hardware_of(asked.machine, changes))
        speeds.append(tried(trial.engine, trial.placement, scene(asked, answer.routes, there), asked).speed)
    return tuple(speeds)


def equal(answer: Answer) -> list[Trial]:
    """The placements that are not surely slower than the fastest."""
    best, ends = answer.best, {one.name: one.speeds for one in answer.figures}
    least = min([best.low or best.speed, *(min(speeds) for speeds in ends.values())])
    alike = {best.placement.policy: False}
    for one in answer.trials:
        if one.speed and one.placement.policy not in alike:
            meets = (one.high or one.speed) >= (best.low or best.speed)
            near = one.speed >= least  # else no end that slows the fastest is worth a replay
            alike[one.placement.policy] = meets or (near and any(
                other >= own for varied in _open(answer) if varied.name in ends
                for other, own in zip(_at_ends(answer, one, varied), ends[varied.name], strict=True)
            ))  # fmt: skip
    return [one for one in answer.trials if one.speed and alike[one.placement.policy]]


def _host_range() -> Range:
    text = resources.files("sim.advise").joinpath("parts.toml").read_text("utf-8")
    return Range(**tomllib.loads(text)["host_range"])


def _parts(answer: Answer) -> Iterator[Turn]:
    """The fastest placement with each other card, host and precision."""
    text = resources.files("sim.advise").joinpath("parts.toml").read_text("utf-8")
    known = tomllib.loads(text)
    asked = answer.asked
    changes: list[tuple[str, Asked]] = []
    card = Hardware.load(asked.hardware)
    for name in known["cards"]:
        other = Hardware.load(name)
        if other.gpu_bytes > card.gpu_bytes and other.name != card.name:
            changes.append((f"card {name}", replace(asked, hardware=name, link=None, loop=None)))
    changes += [(f"host {name}", replace(asked, host=name)) for name in known["hosts"] if name != asked.machine.host]
    wanted = answer.here.model.all_expert_bytes + HOST_REST
    if asked.host_memory is not None and asked.host_memory < wanted:
        changes.append((f"host memory {-(-wanted // 2**30)} GiB", replace(asked, host_memory=None)))
    if asked.form in known["precisions"]:
        smaller: Sequence[str] = known["precisions"][known["precisions"].index(asked.form) + 1 :]
        changes += [(f"precision {name}", replace(asked, quant=name)) for name in smaller[:2]]
    if asked.kv == "bf16":
        changes.append(("keys and values in q8_0", replace(asked, kv="q8_0")))
    for name, other_asked in changes:
        try:
            found = trials(other_asked, answer.routes)
        except InputError:
            continue
        if found[0].speed:
            yield Turn(name, (found[0].speed,), f"{found[0].engine.name}: {found[0].placement.name}")
