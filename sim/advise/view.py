"""An answer as a person reads it."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ground.tables import Parts
from sim.advise.answer import Answer
from sim.advise.trial import Trial, prompt_rows
from sim.report.tables import number, percent

_GIB = 2**30
_FIGURES, _PARTS, _COMMANDS = 3, 5, 3
_HEADINGS = ("engine", "placement", "tokens/s", "95 % interval", "TTFT ms", "waits most for", "routing")


def view(answer: Answer) -> RenderableType:
    """Tables and sentences."""
    here = answer.here
    precision = f" in {answer.asked.quant}" if answer.asked.quant else ""
    ran = [one for one in answer.trials if one.report]
    table = Parts(
        f"{here.model.name}{precision} on {here.hardware.name}, context {answer.asked.context:,}", _HEADINGS,
        [_row(one) for one in ran],
    )  # fmt: skip
    return Group(
        table, *map(Text, _about(answer)), Text(), *map(Text, _sure(answer)), Text(),
        Parts("with another part, the fastest is", ("part", "tokens/s", "by"),
              [[one.name, number(one.speeds[0]), one.source] for one in answer.parts[:_PARTS]]),
        Text(), *_commands(answer, ran), *map(Text, _left_out(answer)),
    )  # fmt: skip


def _row(one: Trial) -> list[str]:
    assert one.report is not None and one.binds is not None
    span = "–" if one.low is None or one.high is None else f"{number(one.low)} to {number(one.high)}"
    share = one.binds[one.bottleneck]
    hangs = "matters" if one.placement.routing else "hardly matters"
    return [
        one.engine.name, one.placement.name, number(one.speed), span, number(one.report.ttft_ms.mean),
        f"{one.bottleneck} ({percent(share)})", hangs,
    ]  # fmt: skip


def _about(answer: Answer) -> Iterator[str]:
    here, memory = answer.here, answer.here.memory
    whole = here.model.all_expert_bytes
    if memory is not None:
        parts = {"weights": memory.weights, **memory.beside}
        told = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        yield (
            f"memory in GiB: card {memory.card / _GIB:.2f}: {told}; left for experts {here.budget / _GIB:.2f} of "
            f"{whole / _GIB:.2f}. The host holds {answer.best.host_bytes / _GIB:.1f} GiB of experts."
        )
    rows = prompt_rows(here)
    yield f"TTFT: of prompts of {rows:.0f} tokens on average; tokens/s: at the short contexts of the trace."
    yield f"{answer.routes.words[0].upper()}{answer.routes.words[1:]}."
    if not answer.routes.own:
        yield "Your own routing may hit a cache more or less often: --trace takes it. The intervals do not hold that."


def _sure(answer: Answer) -> Iterator[str]:
    low = min((min(one.speeds) for one in answer.figures), default=answer.best.speed)
    high = max((max(one.speeds) for one in answer.figures), default=answer.best.speed)
    yield (
        f"How sure: figures of this machine that nobody measured move the fastest, {number(answer.best.speed)} "
        f"tokens/s, to between {number(low)} and {number(high)}, one at a time. They matter in this order:"
    )
    for one in answer.figures[:_FIGURES]:
        low, high = sorted(one.speeds)
        yield f"  {one.name}: {number(low)} to {number(high)} tokens/s. {one.source}"


def _commands(answer: Answer, ran: list[Trial]) -> Iterator[Text]:
    """The fastest of each engine, as typed."""
    best = {one.engine.name: one for one in reversed(ran)}
    for one in sorted(best.values(), key=lambda one: -one.speed)[:_COMMANDS]:
        yield Text(f"{one.engine.name}, {one.placement.name} ({number(one.speed)} tokens/s):")
        yield Text(f"  {one.command}", style="bold")
        for note in one.notes:
            yield Text(f"  {note}")
        yield Text(f"  options: {one.engine.source}", style="dim")


def _left_out(answer: Answer) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for one in answer.trials:
        if not one.report:
            reasons.setdefault(one.reason, []).append(f"{one.engine.name} ({one.placement.name})")
    for reason, who in reasons.items():
        yield f"left out: {', '.join(who)}: {reason}"
