"""Replay a trace under a policy: from names and files to a report."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ground.command_line import release
from ground.errors import InputError
from sim.bounds import Bounds, bounds
from sim.eviction import foresees
from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, Software
from sim.model.spec import ModelSpec, resolve_model
from sim.plan import Discipline, Plan, PlanError
from sim.policies import Policy, Setting, blaming, make_policy, policy_class
from sim.report.metrics import Report, report
from sim.run.blindness import check_blind
from sim.run.cache_size import describe_capacity, parse_capacity
from sim.run.engines import Engine, Execution, execute
from sim.run.kept_plans import declared, plan_of
from sim.run.link import Observer
from sim.run.terms import Terms, TooSmallError, least_slots, settle
from sim.view import View
from sim.workload import Workload, batched, cached_tokens, workload
from traces.mix import mix
from traces.trace import Trace

DEFAULT_CACHE = "25%"


@dataclass(frozen=True)
class Scene:
    """Everything of a run but the policy: what is replayed, on what, with how much memory.

    Made once by ``scene`` and shared by all policies of a comparison.
    """

    trace: Trace
    profile: tuple[Trace, ...]
    model: ModelSpec
    hardware: Hardware
    software: Software
    budget: int
    batch: int
    split: str
    seed: int
    work: Workload
    bound: Bounds


def bundled_traces() -> list[Path]:
    """The traces that come with the project."""
    folder = resources.files("traces")
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".npz"))


def scene(
    traces: str | Path | Sequence[str | Path],
    *,
    model: str | None = None,
    hardware: str = DEFAULT_HARDWARE,
    software: str = DEFAULT_SOFTWARE,
    cache_size: str = DEFAULT_CACHE,
    profile: Sequence[str | Path] | None = None,
    split: str = "eval",
    batch: int = 1,
    seed: int = 0,
    learns: bool = True,
) -> Scene:
    """Load a trace, or several of one model as one mixed workload, and set it up on a machine.

    Args:
        traces: the trace to replay; the sequences of several take turns (``traces.mix``).
        model: whose costs are charged, a built-in name or a config.json; by default what the trace says.
        hardware: a built-in profile or a toml file.
        software: what predictions cost, a built-in profile or a toml file.
        cache_size: GPU memory for experts, as ``sim.run.cache_size`` reads it.
        profile: traces from whose profile split policies learn; by default the bundled traces of the same model,
            and the traces themselves.
        split: eval, profile or all.
        batch: sequences that decode together.
        seed: for policies that draw at random.
        learns: False skips loading profiles that no policy of this run reads, unless they are named.

    Raises InputError for anything that a person got wrong.
    """
    if seed < 0:
        raise InputError(f"seed: {seed}; give at least 0")
    named = [traces] if isinstance(traces, str | Path) else traces
    replayed = [Trace.load(path) for path in named]
    whole = mix(replayed)
    try:
        spec = resolve_model(model if model is not None else whole.meta["model"], whole.n_layers)
    except InputError as wrong:
        if model is not None:
            raise
        raise InputError(f"{whole.source}: {wrong}; or say whose costs to charge, --model NAME") from None
    machine = Hardware.load(hardware)
    trace = whole.select(split)
    budget = parse_capacity(cache_size, spec.expert_bytes, spec.experts)
    work = workload(trace, spec, machine, batched(trace, batch))
    return Scene(
        trace=trace,
        profile=tuple(_profiles(whole, replayed, profile)) if learns or profile else (),
        model=spec,
        hardware=machine,
        software=Software.load(software, machine),
        budget=budget,
        batch=batch,
        split=split,
        seed=seed,
        work=work,
        bound=bounds(work, budget, machine.link_bytes_per_s),
    )


def _profiles(whole: Trace, replayed: Sequence[Trace], named: Sequence[str | Path] | None) -> list[Trace]:
    """The profile splits to learn from; a bundled trace counts if it is of the very model: name, checkpoint, shape."""
    found: dict[str, Trace] = {}
    if named is None:
        bundled = (p for p in bundled_traces() if _origin(Trace.load_meta(p)) == _origin(whole.meta))
        candidates = [*replayed, *(Trace.load(path) for path in bundled)]
        candidates = [t for t in candidates if _same_model(t, whole)]
    else:
        candidates = [Trace.load(path) for path in named]
        for other in candidates:
            if not _same_model(other, whole):
                raise InputError(
                    f"--profile {other.source}: {_shape(other)}; expected the shape and embedding basis of the trace, "
                    f"{_shape(whole)}"
                )
    for candidate in candidates:
        if (candidate.split == "profile").any():
            found.setdefault(candidate.sha256, candidate.select("profile"))
        elif named is not None:
            raise InputError(f"--profile {candidate.source}: no sequence of split profile; expected at least one")
    return list(found.values())


def _name(t: Trace) -> object:
    return t.meta["model"].get("name")


def _from_here(source: str) -> str:
    """A path below the present folder as seen from there: whose folders those are is nobody's business."""
    with suppress(OSError, ValueError):  # the folder may be gone
        return str(Path(source).relative_to(Path.cwd()))
    return source


def _origin(meta: Mapping[str, Any]) -> tuple[object, object]:
    """What a trace was captured from. Another checkpoint of the same architecture routes otherwise."""
    return meta["model"].get("name"), meta.get("captured", {}).get("checkpoint_sha256")


def _shape(t: Trace) -> str:
    return f"{_name(t)}, {t.n_layers} layers x {t.n_experts} experts"


def _same_model(a: Trace, b: Trace) -> bool:
    same = (a.n_layers, a.n_experts, _name(a)) == (b.n_layers, b.n_experts, _name(b))
    basis = [t.meta.get("embedding", {}).get("basis_sha256") for t in (a, b)]
    return same and (None in basis or basis[0] == basis[1])


def lacking(scene: Scene, kind: type[Policy]) -> str | None:
    """What a policy of this kind needs and the scene does not have, as the end of a sentence; None if nothing."""
    missing = [name for name in sorted(kind.needs) if getattr(scene.trace, name) is None]
    if missing:
        return f"the trace {scene.trace.source} has no array {missing[0]}, which it needs"
    if kind.learns and not scene.profile:
        return f"it learns from a profile split and {scene.trace.source} has none; name traces with --profile"
    return None


def plan_for(scene: Scene, policy: str, values: dict[str, object] | None = None) -> tuple[Plan, dict[str, Any]]:
    """The plan of ``policy`` for a scene, and its parameters in full.

    Raises InputError, and of its kinds ``sim.run.terms.TooSmallError`` where the cache is too small for the policy.
    """
    kind = policy_class(policy)
    if reason := lacking(scene, kind):
        raise InputError(f"policy {kind.name}: {reason}")
    setting = Setting(scene.model, scene.budget, scene.profile, scene.seed, scene.hardware, scene.software)
    made = make_policy(policy, declared(kind, setting), values)
    view = made.view(scene.trace, scene.work)
    run = {"trace": scene.trace.sha256, "split": scene.split, "batch": scene.batch, "code": code_version()}
    plan = plan_of(made, setting, view, run | {"steps": _digest(view)} if kind.dear else run)
    settle_for(kind, scene.work, plan, scene.budget)
    if foresees(plan.eviction) and not kind.clairvoyant:
        raise InputError(
            f"policy {kind.name}: its eviction rule {plan.eviction} is told the future; expected another rule, or a "
            f"policy that calls itself clairvoyant"
        )
    if not kind.clairvoyant and not kind.__module__.startswith("sim."):
        with blaming(f"policy {kind.name}: plan"):
            check_blind(made, scene.trace, scene.work, plan)
    return plan, made.parameters.model_dump()


def settle_for(kind: type[Policy], work: Workload, plan: Plan, budget: int) -> Terms:
    """What :func:`sim.run.terms.settle` makes of a policy's plan; errors, of the same kinds, name the policy."""
    try:
        return settle(work, plan, budget)
    except TooSmallError as wrong:
        helps = plan.gpu_bytes and kind.table_sizes and budget > least_slots(work, plan)
        smaller = f", or smaller tables (--set; parameters: {', '.join(kind.table_sizes)})" if helps else ""
        raise TooSmallError(f"policy {kind.name}: {wrong}{smaller}") from None
    except PlanError as wrong:
        raise PlanError(f"policy {kind.name}: {wrong}") from None


def _digest(view: View) -> str:
    """Tells apart which rows run in which order: a part of a trace carries the hash of the whole file."""
    digest = hashlib.sha256()
    for array in (view.step, view.decoding, view.sequence, view.route(view.n_layers)):
        digest.update(array.tobytes())
    return digest.hexdigest()


def replay(
    scene: Scene,
    policy: str,
    values: dict[str, object] | None = None,
    *,
    discipline: Discipline | None = None,
    chunks: int | None = None,
    observer: Observer | None = None,
    progress: Callable[[int], None] | None = None,
    engine: Engine = "auto",
) -> Report:
    """Run one policy over a scene and report. Raises InputError."""
    plan, parameters = plan_for(scene, policy, values)
    name = policy_class(policy).name
    # An eviction rule of the policy's own is as much other people's code as the policy.
    watch = nullcontext() if isinstance(plan.eviction, str) else blaming(f"policy {name}: eviction")
    with watch:
        done = execute(
            scene.work,
            plan,
            scene.budget,
            engine=engine,
            discipline=discipline,
            chunks=chunks,
            observer=observer,
            progress=progress,
        )
    terms = settle(scene.work, plan, scene.budget, discipline, chunks)
    return describe(scene, plan, name, parameters, values or {}, done, terms)


def describe(
    scene: Scene,
    plan: Plan,
    policy: str,
    parameters: dict[str, Any],
    given: Mapping[str, object],
    done: Execution,
    terms: Terms,
) -> Report:
    """The report of a run of ``scene``; ``given`` are the parameters that a person set, ``terms`` what was settled."""
    model = scene.model
    every, left = model.all_expert_bytes, scene.budget - plan.gpu_bytes
    gpu = {
        "experts": every if plan.everything_resident else min(left, plan.most_bytes or left),
        "resident_model": model.resident_bytes,
        "policy": plan.gpu_bytes,
        "kv": _most_kv(scene),
    }
    settings = {
        "cache": describe_capacity(scene.budget, model.expert_bytes, model.experts),
        "cache_bytes": scene.budget,
        "batch": scene.batch,
        "split": scene.split,
        "discipline": terms.discipline,
        "chunks": terms.chunks,
        "engine": done.engine,
        "set": {name: parameters[name] for name in given if name in parameters},
    }
    # A reference that holds every expert is not held to what a smaller memory must move.
    unbound = replace(scene.bound, link_bytes=0, decode_link_bytes=0)
    bound = None if plan.host is not None else unbound if plan.everything_resident else scene.bound
    return report(
        scene.work,
        done.log,
        bound,
        policy=policy,
        parameters=parameters,
        gpu_bytes=gpu,
        clock="simulated",
        provenance=_provenance(scene),
        settings=settings,
        notes=[*_notes(scene, plan, gpu), *done.notes],
    )


def _most_kv(scene: Scene) -> int:
    """The most bytes of keys and values that the running sequences hold at once."""
    return int(cached_tokens(scene.trace, scene.work.schedule).max()) * scene.model.kv_bytes_per_token


def _notes(scene: Scene, plan: Plan, gpu: dict[str, int]) -> list[str]:
    notes = list(scene.trace.meta.get("notes", []))
    if plan.note:
        notes.append(plan.note)
    if plan.everything_resident:
        notes.append("ignores the cache size: a reference, not a system of equal memory")
    if plan.most_bytes and gpu["experts"] < scene.budget - plan.gpu_bytes:
        slots = describe_capacity(gpu["experts"], scene.model.expert_bytes, scene.model.experts)
        notes.append(f"has no use for the whole cache: {slots}")
    if plan.host is not None:
        notes.append("runs experts on the host: neither bound holds, since they need neither the GPU nor the link")
    need, have = sum(gpu.values()), scene.hardware.gpu_bytes
    if need > have:
        left = max(0, have - need + gpu["experts"])
        notes.append(
            f"needs {need / 2**30:.1f} GiB of GPU memory; {scene.hardware.name} has {have / 2**30:.1f} GiB, "
            f"which leaves experts {describe_capacity(left, scene.model.expert_bytes, scene.model.experts)}"
        )
    if scene.budget > scene.model.all_expert_bytes:
        notes.append(f"the cache is larger than all experts together ({scene.model.all_expert_bytes / 2**20:,.0f} MiB)")
    token = sum(scene.model.expert_bytes) * scene.trace.top_k
    if not plan.everything_resident and plan.keep and scene.budget < token:
        notes.append(
            f"the cache is smaller than what one token takes over all layers ({token / 2**20:,.0f} MiB): "
            f"an LRU cache over all layers cycles; one a layer does not (scope=layer)"
        )
    return notes


def _provenance(scene: Scene) -> dict[str, Any]:
    meta = scene.trace.meta
    return {
        "trace": scene.trace.source,
        "trace_sha256": scene.trace.sha256,
        "joined": [{"trace": one["source"], "sha256": one["sha256"]} for one in meta.get("joined", [])],
        "captured": meta.get("captured", {}).get("what"),
        "text": meta.get("text"),
        "model": scene.model.name,
        "hardware": scene.hardware.name,
        "hardware_measured": scene.hardware.link_measured,
        "link_source": scene.hardware.link_source,
        "software": scene.software.name,
        "profile": [{"trace": _from_here(t.source), "sha256": t.sha256} for t in scene.profile],
        "code": code_version(),
        "seed": scene.seed,
    }


@cache
def code_version() -> str:
    """Version of the project and a digest of the simulator's source: a report names the code that made it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{release()}+{digest.hexdigest()[:12]}"
