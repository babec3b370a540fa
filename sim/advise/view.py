"""An answer as a person reads it."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ground.tables import Parts
from sim.advise.answer import Answer
from sim.advise.trial import Trial, prompt_rows
from sim.report.tables import number, percent

_GIB = 2**30
_FIGURES, _COMMANDS = 3, 3
_WAITS = {"launches": "launching kernels", "predictions": "predicting"}
"""What is waited for in words, where its name says too little."""
_LAUNCHED = {"CUDA graphs": "as CUDA graphs, many at once", "eager": "one by one"}
_HEADINGS = ("engine", "placement", "tokens/s", "95 % interval", "TTFT ms", "waits most for", "routing")


def view(answer: Answer) -> RenderableType:
    """Tables and sentences."""
    here = answer.here
    precision = f" in {answer.asked.quant}" if answer.asked.quant else ""
    ran = [one for one in answer.trials if one.report]
    table = Parts(
        f"{here.model.name}{precision} on {answer.asked.titled}, context {answer.asked.context:,}", _HEADINGS,
        [_row(one) for one in ran],
    )  # fmt: skip
    return Group(
        table, *map(Text, _about(answer)), Text(), *map(Text, _sure(answer)), Text(),
        Parts("with another part, the fastest is", ("part", "tokens/s", "by"),
              [[one.name, number(one.speeds[0]), one.source] for one in answer.parts]),
        Text(), *_commands(answer, ran), *map(Text, _left_out(answer)),
    )  # fmt: skip


def _row(one: Trial) -> list[str]:
    assert one.report is not None and one.binds is not None
    share = one.binds[one.bottleneck]
    hangs = "matters" if one.placement.routing else "hardly matters"
    return [
        one.engine.name, one.placement.name, number(one.speed), _span(one.low, one.high),
        number(one.report.ttft_ms.mean),
        f"{_WAITS.get(one.bottleneck, one.bottleneck)} ({percent(share)})", hangs,
    ]  # fmt: skip


def _span(low: float | None, high: float | None) -> str:
    """Both ends; a dash where there are none or they print alike."""
    ends = number(low), number(high)
    return "–" if ends[0] == ends[1] else " to ".join(ends)


def _about(answer: Answer) -> Iterator[str]:
    here, memory = answer.here, answer.here.memory
    whole = here.model.all_expert_bytes
    if memory is not None:
        parts = {"weights": memory.weights, **memory.beside}
        told = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
        yield (
            f"memory in GiB: card {memory.card / _GIB:.2f}: {told}; left for experts {here.budget / _GIB:.2f} of "
            f"{whole / _GIB:.2f}. The host holds {answer.best.host_bytes / _GIB:.1f} GiB of experts"
            f"{_host_memory(answer)}."
        )
    if answer.best.host_bytes:
        yield _threads(answer)
    kind = here.hardware.software.kind
    assumed = answer.asked.machine.loop is not None and answer.asked.loop is None
    yield f"Kernels are launched {_LAUNCHED.get(kind, kind)}{', as engines do' if assumed else ''} (--loop)."
    rows = prompt_rows(here)
    yield (
        f"TTFT, the time to the first token: of prompts of {rows:.0f} tokens on average; tokens/s: at the short "
        "contexts of the trace."
    )
    yield f"{answer.routes.words[0].upper()}{answer.routes.words[1:]}."
    if not answer.routes.own:
        yield "Your own routing may hit a cache more or less often: --trace takes it. The intervals do not hold that."


def _host_memory(answer: Answer) -> str:
    if not answer.best.host_bytes:
        return ""
    size = answer.asked.host_memory
    return f" in {size / _GIB:.1f}" if size else "; how much memory it has is unknown and not checked (--host-memory)"


def _threads(answer: Answer) -> str:
    host, name = answer.here.hardware.host, answer.asked.machine.host
    if name is not None and not name.endswith(".toml"):
        source = "as --host says" if ":" in name else f"assumed: --host {name}:16 says 16"
    else:
        source = "as its profile says" if host and host.cores else "assumed: its profile says no cores"
    return f"Threads on the host: {answer.best.filled['threads']}, {source}."


def _sure(answer: Answer) -> Iterator[str]:
    if answer.equal:
        names = ", ".join(f"{one.engine.name} ({one.placement.name})" for one in answer.equal)
        yield (
            f"About equal: {answer.best.engine.name} ({answer.best.placement.name}), {names}. Which is ahead hangs on "
            "the sequences drawn or on a figure that nobody measured: take the simpler."
        )
    low = min((min(one.speeds) for one in answer.figures), default=answer.best.speed)
    high = max((max(one.speeds) for one in answer.figures), default=answer.best.speed)
    if number(low) == number(high):
        yield "How sure: figures of this machine that nobody measured hardly move the fastest, one at a time."
        return
    yield (
        f"How sure: figures of this machine that nobody measured move the fastest, {number(answer.best.speed)} "
        f"tokens/s, to between {number(low)} and {number(high)}, one at a time. They matter in this order:"
    )
    for one in answer.figures[:_FIGURES]:
        low, high = sorted(one.speeds)
        span = _span(low, high)
        yield f"  {one.name}: {span}" + ("" if span == "–" else f" tokens/s. {one.source}")


def _commands(answer: Answer, ran: list[Trial]) -> Iterator[Text]:
    """The fastest of each engine, and of an engine whose recent builds alone have it what others have, as typed."""
    first: dict[str, Trial] = {}
    plain: dict[str, Trial] = {}
    for one in ran:
        first.setdefault(one.engine.name, one)
        if not one.placement.newer:
            plain.setdefault(one.engine.name, one)
    older = [plain[name] for name, one in first.items() if one.placement.newer and name in plain]
    for one in [*list(first.values())[:_COMMANDS], *older]:
        builds = ", for builds without the newer cache options" if one in older else ""
        yield Text(f"{one.engine.name}, {one.placement.name} ({number(one.speed)} tokens/s){builds}:")
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
