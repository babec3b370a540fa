"""What was asked and what came out, in sentences."""

from collections.abc import Sequence

from analysis.html.designs import WORKLOAD, Designs, is_of_policy, same_place
from analysis.html.runs import Run, sequences_of
from analysis.html.wording import counted, field_value, figure, listed, percent
from sim.sweep.intervals import ratio_interval

_MOST = 6
"""Workloads that get an answer of their own."""


def asked(designs: Designs, limits: str = "") -> str:
    """What the runs ask, over which values, and within which ``limits``, in words."""
    ok = designs.ok
    models, machines = (list(dict.fromkeys(str(run.values.get(f"replayed_{name}")) for run in ok))
                        for name in ("model", "hardware"))  # fmt: skip
    which = "Which design is fastest" if len(ok) > 1 else "How fast is this design"
    head = f"{which} for {listed(models, 4)} on {listed(machines, 4)}, when the experts do not all fit on the GPU?"
    axes = [f"{name.removeprefix('set.')} ({listed([field_value(value) for value in values])})"
            for name in designs.varying if len(values := designs.values(name)) > 1]  # fmt: skip
    other = len(designs.runs) - len(ok)
    run = f"{counted(len(ok), 'design')} {'was' if len(ok) == 1 else 'were'} run"
    left = f"; {counted(other, 'other')} could not be run" if other else ""
    differ = f" They differ in {listed(axes)}." if axes else ""
    out = sum(run.beyond for run in ok)
    beyond = (
        f" A design has to keep to this: {limits}; {counted(out, 'is', 'are')} beyond that and no answer."
        if out
        else ""
    )
    return f"{head} {run}{left}.{differ}{beyond}"


def answers(designs: Designs) -> list[str]:
    """A sentence or some for each workload: the fastest system, what it beats, by how much and how sure that is."""
    groups = designs.workloads()
    found = [_answer(designs, where, runs) for where, runs in list(groups.items())[:_MOST]]
    return [*found, *([f"{len(groups) - _MOST} other workloads are in the table."] if len(groups) > _MOST else [])]


def rivals(runs: Sequence[Run]) -> tuple[Run | None, Run | None]:
    """The fastest system, and the fastest of another policy: at the same place if there is any, or else anywhere.

    The same place is as large a cache and the same card. A policy with other parameters is another. None where there
    is none.
    """
    systems = [run for run in runs if run.a_system]
    best = max(systems, key=lambda run: run.speed, default=None)
    if best is None:
        return None, None
    others = [run for run in systems if _policy(run) != _policy(best)]
    there = [run for run in others if same_place(run, best)]
    return best, max(there or others, key=lambda run: run.speed, default=None)


def _policy(run: Run) -> tuple[object, ...]:
    return (run.values.get("replayed_policy"), run.values.get("replayed_parameters"))


def _answer(designs: Designs, where: str, runs: Sequence[Run]) -> str:
    best, other = rivals(runs)
    head = f"For {where}: " if where else ""
    if best is None:
        return f"{head}No design is an answer: what ran are references, or beyond the limits."
    work = [name for name in designs.varying if name in WORKLOAD]
    low, high = best.values.get("tokens_per_s_low"), best.values.get("tokens_per_s_high")
    sure = "" if low is None else f" (95 % interval {figure(low)} to {figure(high)})"
    subject = "The fastest design is" if len(runs) > 1 else "The design is"
    said = [f"{head}{subject} {designs.label(best, work)}: {figure(best.speed)} tokens/s{sure}."]
    if other is not None:
        said.append(_beaten(designs, best, other))
    said.append(_bounded(best, runs))
    return " ".join(filter(None, said))


def _beaten(designs: Designs, best: Run, other: Run) -> str:
    work = [name for name in designs.varying if name in WORKLOAD]
    if same_place(best, other):
        beside = "The next policy with as large a cache on the same card"
        name = designs.label(other, [name for name in designs.varying if not is_of_policy(name)])
    else:
        beside = "No other policy ran with just this cache and card. The fastest design of another policy"
        name = designs.label(other, work)
    speeds = f"{figure(other.speed)} tokens/s; the fastest is {best.speed / other.speed:.2f} times as fast"
    head = f"{beside} is {name} with {speeds}"
    same = best.values.get("trace_sha256") == other.values.get("trace_sha256")
    low, high = ratio_interval(sequences_of(best), sequences_of(other)) if same else (None, None)
    if low is None or high is None:
        return f"{head}. How sure that is cannot be said: these runs do not tell what each sequence had of them."
    verdict = "so the draw of sequences does not explain it" if low > 1 else "so which of both is faster is not sure"
    return f"{head} (95 % interval {low:.2f} to {high:.2f}), {verdict}."


def _bounded(best: Run, runs: Sequence[Run]) -> str:
    """How far the fastest is from what none can beat, and from the fastest reference."""
    bounds = [best.values.get(f"{name}_bound_tokens_per_s") for name in ("compute", "link")]
    there = [bound for bound in bounds if bound is not None]
    if there:
        least = min(there)
        part = f"That is {percent(best.speed / least)} of {figure(least)} tokens/s, the slower of its bounds."
    else:
        part = "It runs experts on the host, so neither bound holds for it."
    references = [run for run in runs if run.values.get("reference") and run.speed > best.speed]
    if not references:
        return part
    top = max(references, key=lambda run: run.speed)
    name = top.values.get("replayed_policy")
    return f"{part} The fastest reference, {name}, which {top.values['reference']}, has {figure(top.speed)} tokens/s."


def caveat(designs: Designs) -> str:
    """What the numbers are, and what an interval does not cover."""
    clocks = {run.values.get("clock") for run in designs.ok}
    what = {frozenset({"simulated"}): "All times are simulated.", frozenset({"measured"}): "All times are measured."}
    parts = [what.get(frozenset(map(str, clocks)), "Some times are simulated, some measured; the table says which.")]
    origins = dict.fromkeys(str(origin).rstrip(".") for run in designs.ok if (origin := run.values.get("captured")))
    parts += [f"The routing was captured from {origin}." for origin in list(origins)[:_MOST]]
    if any(run.values.get("link_source") == "assumed" for run in designs.ok):
        parts.append("The rate of a card's link is assumed, not measured.")
    if any(run.values.get("tokens_per_s_low") is not None for run in designs.ok):
        parts.append(
            "An interval covers which sequences were drawn. It does not cover other texts, another training of the "
            "model, that the machine is modelled, or that the fastest was picked among many."
        )
    if any(run.values.get("gpu_memory_bytes") is None for run in designs.ok):
        parts.append("These reports do not say how much memory the card has; check that a design fits.")
    return " ".join(parts)
