"""A run: a scene and a policy, planned, checked and settled once, and then executed and reported as often as wanted.

From Python::

    from sim.run.prepared import prepare
    from sim.run.scene import scene

    here = scene("traces/mixtral_law.npz", cache="25%", hardware="rtx-4090")  # see sim.run.scene.SceneOptions
    run = prepare(here, "popularity", {"by": "domain"})
    report = run.simulate()
    print(report.tokens_per_s, report.decode.hit_ratio, report.to_frame())

``run.plan`` is what the policy decided, ``run.execute().log`` all that happened. A real run executes the same object:
``realrun.engine.replay.run(run, rig)``.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.foreign_code import errors_name
from ground.text import amount
from sim.bounds import Bounds, bounds
from sim.eviction import foresees
from sim.log import Log
from sim.plan import Discipline, Plan, PlanError
from sim.policies import Policy, Setting, make_policy, policy_class
from sim.report.metrics import Report
from sim.report.metrics import report as report_of_log
from sim.run.blindness import check_blind
from sim.run.cache_size import describe_capacity
from sim.run.engines import Engine, Execution, execute
from sim.run.kept_plans import declared, kept_or_made
from sim.run.observer import Observer
from sim.run.scene import Scene, code_version, lacking
from sim.run.terms import RunTerms, TooSmallError, least_slot_bytes, settle
from sim.schedules.grouping import BY_PREDICTION
from sim.schedules.kv_cache import cache_bytes
from sim.schedules.pipeline import PATH_WEIGHTS, Preparation, preparation
from sim.view import View
from sim.workload import Workload


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """What a policy decided for a scene, and all that follows from it; see ``prepare``.

    Attributes:
        scene: everything of the run but the policy.
        policy: its class.
        parameters: of the policy, all of them.
        given: those of them that a person set.
        plan: what the policy decided; checked.
        terms: slots, order of the link, pieces of a transfer and costs on the host, settled.
    """

    scene: Scene
    policy: type[Policy]
    parameters: Mapping[str, Any]
    given: Mapping[str, object]
    plan: Plan
    terms: RunTerms

    def simulate(
        self, *, engine: Engine = "auto", observer: Observer | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Report:  # fmt: skip
        """``execute`` it and report. Raises InputError."""
        return self.simulated(self.execute(engine=engine, observer=observer, progress=progress))

    def execute(
        self, *, engine: Engine = "auto", observer: Observer | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Execution:  # fmt: skip
        """Execute it in simulated time.

        Args:
            engine: simpy, compiled, or auto, the faster of those that can.
            observer: told of everything that happens, as a timeline is.
            progress: told the number of steps done.

        Raises InputError if the policy's own eviction rule fails, or this engine cannot.
        """
        work = self.scene.work
        with self.naming_eviction():
            return execute(work, self.plan, self.terms, engine=engine, observer=observer, progress=progress)

    def naming_eviction(self, ours: tuple[type[Exception], ...] = ()) -> AbstractContextManager[None]:
        """Around an execution: an eviction rule of the policy's own is as much other people's code as the policy."""
        if isinstance(self.plan.eviction, str):
            return nullcontext()
        return errors_name(f"policy {self.policy.name}: eviction", ours=ours)

    def simulated(self, done: Execution) -> Report:
        """The report of an execution in simulated time."""
        return report(self, done.log, engine=done.engine, clock="simulated", notes=done.notes)


def prepare(
    scene: Scene, policy: str, values: Mapping[str, object] | None = None, *, discipline: Discipline | None = None,
    chunks: int | None = None,
) -> PreparedRun:  # fmt: skip
    """Have ``policy`` plan for ``scene``, check the plan and settle what it leaves open.

    Args:
        scene: see ``sim.run.scene.scene``.
        policy: a name, or ``module:Class``.
        values: the policy's parameters, those that are not to be the default.
        discipline: the order of the link's queue instead of the policy's own: fifo, demand-first or preemptive.
        chunks: into how many parts a transfer is cut, instead of the policy's own number.

    Raises InputError for anything wrong with policy, parameters or plan, and of its kinds
    ``sim.run.terms.TooSmallError`` where the cache is too small for the policy.
    """
    kind = policy_class(policy)
    if reason := lacking(scene, kind):
        raise InputError(f"policy {kind.name}: {reason}")
    setting = Setting(scene.model, scene.budget, scene.profile, scene.seed, scene.hardware, scene.software)
    given = dict(values or {})
    made = make_policy(policy, declared(kind, setting), given)
    with errors_name(f"policy {kind.name}"):
        view = made.view(scene.trace, scene.work)
        parameters = made.parameters.model_dump(mode="json")
    told = {"trace": scene.trace.sha256, "split": scene.split, "batch": scene.batch, "code": code_version()}
    plan = kept_or_made(made, setting, view, told | {"steps": _digest(view)} if kind.keeps_plan else told)
    regroups = scene.regroup in BY_PREDICTION
    if regroups and not plan.prediction.ahead:  # else the plan has them
        plan = replace(plan, gpu_bytes=plan.gpu_bytes + scene.software.table_bytes(_path_weights(scene)))
    if scene.ubatch is not None and plan.prediction.prompt_ns:
        raise InputError(f"policy {kind.name}: it predicts once a prompt, and --ubatch runs prompts in parts")
    terms = settle_for(kind, scene.work, plan, scene.budget, discipline, chunks)
    terms = replace(terms, preparation=_preparation(scene, plan))
    if foresees(plan.eviction) and not kind.clairvoyant:
        raise InputError(
            f"policy {kind.name}: its eviction rule {plan.eviction} is told the future; expected another rule, or a "
            f"policy that calls itself clairvoyant"
        )
    if not kind.clairvoyant and not kind.__module__.startswith("sim."):
        with errors_name(f"policy {kind.name}: plan"):
            check_blind(made, scene.trace, scene.work, plan)
    return PreparedRun(scene, kind, parameters, given, plan, terms)


def replay(
    scene: Scene, policy: str, values: Mapping[str, object] | None = None, *, discipline: Discipline | None = None,
    chunks: int | None = None, engine: Engine = "auto", observer: Observer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Report:  # fmt: skip
    """``prepare`` a run, and ``PreparedRun.simulate`` it. Raises InputError."""
    run = prepare(scene, policy, values, discipline=discipline, chunks=chunks)
    return run.simulate(engine=engine, observer=observer, progress=progress)


def _preparation(scene: Scene, plan: Plan) -> Preparation | None:
    """What steps of ``plan`` wait for before they begin."""
    weights = _path_weights(scene)
    experts = scene.trace.n_layers * scene.trace.n_experts
    found = preparation(
        scene.trace, scene.work.schedule, scene.pipeline, plan, regroups=scene.regroup in BY_PREDICTION,
        predict_ns=lambda rows: scene.software.path_ns(scene.hardware, weights, rows),
        schedule_ns=lambda rows: scene.software.regroup_time_ns(rows, experts),
    )  # fmt: skip
    if found is not None:
        scene.work.check_size(predicting_ns=int(found.ns.sum()))
    return found


def _path_weights(scene: Scene) -> int:
    """Of the predictor by whose predictions tokens are regrouped."""
    return int(scene.trace.meta.get("predictor", {}).get("parameters", PATH_WEIGHTS))


def settle_for(
    kind: type[Policy], work: Workload, plan: Plan, budget: int, discipline: Discipline | None = None,
    chunks: int | None = None,
) -> RunTerms:  # fmt: skip
    """What :func:`sim.run.terms.settle` makes of a policy's plan; errors, of the same kinds, name the policy."""
    try:
        return settle(work, plan, budget, discipline, chunks)
    except TooSmallError as wrong:
        helps = plan.gpu_bytes and kind.table_sizes and budget > least_slot_bytes(work, plan)
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


def report(
    run: PreparedRun, log: Log, *, engine: str, clock: str, notes: Sequence[str] = (), bound: Bounds | None = None
) -> Report:
    """The report of ``run``, of which ``log`` says what happened.

    Whoever executed it says which ``engine`` that was, by which ``clock`` (simulated or measured), and what a person
    should know of it, and ``bound`` what no policy could beat, if not that of the scene. A measured run is one of a
    scene whose workload has the times that were measured.
    """
    scene, plan, model = run.scene, run.plan, run.scene.model
    every, left = model.all_expert_bytes, scene.budget - plan.gpu_bytes
    gpu = {
        "experts": every if plan.everything_resident else max(min(left, plan.most_bytes or left), plan.least_bytes),
        "resident_model": model.resident_bytes,
        "policy": plan.gpu_bytes,
        "kv": cache_bytes(scene.trace, scene.work.schedule, model),
        **(scene.memory.beside if scene.memory else {}),
    }
    settings = {
        "cache": describe_capacity(scene.budget, model.expert_bytes, model.experts), "cache_bytes": scene.budget,
        "batch": scene.batch, "split": scene.split, "discipline": run.terms.discipline, "chunks": run.terms.chunks,
        "all_in_gpu_bytes": every + sum(gpu.values()) - gpu["experts"] - plan.gpu_bytes - scene.kv_more,
        "engine": engine, "regroup": scene.regroup, "pipeline": scene.pipeline,
        "set": {name: run.parameters[name] for name in run.given if name in run.parameters},
        "reference": reference(run.policy, plan, scene),
        **({"ubatch": scene.ubatch} if scene.ubatch is not None else {}),
    }  # fmt: skip
    # A reference that holds more experts is not held to what a smaller memory must move.
    bound = bound or scene.bound
    if plan.least_bytes > scene.budget:
        larger = bounds(scene.work, plan.least_bytes, scene.hardware.link_bytes_per_s)
        names = ("link_bytes", "decode_link_bytes", "decode_hit_ratio")
        bound = replace(bound, **{name: getattr(larger, name) for name in names})
    if plan.everything_resident:
        bound = replace(bound, link_bytes=0, decode_link_bytes=0, decode_hit_ratio=None)
    joint = None if plan.host is None else scene.joint_bound(plan.host)
    return report_of_log(
        scene.work, log, bound if joint is None else None, joint=joint, policy=run.policy.name,
        parameters=dict(run.parameters), gpu_bytes=gpu, clock=clock, provenance=_provenance(scene), settings=settings,
        notes=[*_notes(scene, plan, gpu), *notes],
    )  # fmt: skip


def reference(kind: type[Policy], plan: Plan, scene: Scene) -> str:
    """Why a run is something to compare with and no system of equal means, to follow its policy's name; else empty."""
    if scene.pipeline == "clairvoyant":
        return "is fed recorded tokens ahead of their time"
    if scene.regroup == "exact":
        return "has its tokens regrouped by trying all splits, whose time is not charged"
    if kind.clairvoyant:
        return "knows the future"
    if kind.foresight:
        return "is told routes before their time"
    return "ignores the cache size" if plan.everything_resident or plan.least_bytes else ""


def _notes(scene: Scene, plan: Plan, gpu: dict[str, int]) -> list[str]:
    notes = [*scene.trace.meta.get("notes", []), *scene.notes, *filter(None, [plan.note])]
    model = scene.model
    if scene.kv_more:
        notes.append(
            f"keys and values of sequences beyond --batch take {amount(scene.kv_more)} of the cache, shown without"
        )
    if plan.everything_resident or plan.least_bytes > scene.budget:
        notes.append("ignores the cache size: a reference, not a system of equal memory")
    if plan.most_bytes and gpu["experts"] < scene.budget - plan.gpu_bytes:
        slots = describe_capacity(gpu["experts"], model.expert_bytes, model.experts)
        notes.append(f"has no use for the whole cache: {slots}")
    share = scene.bound.loop_share
    if share is not None and share > 0.5:
        loop = scene.hardware.software
        notes.append(
            f"launches and waits, not bytes, set the compute bound: {share:.0%} of it, by the {loop.kind} loop "
            f"({loop.origin}); --loop takes another"
        )
    if plan.host is not None:
        notes.append("runs experts on the host: the bounds of GPU and link alone do not hold, a joint one does")
    need, have = sum(gpu.values()), scene.hardware.gpu_bytes
    if need > have:
        left = max(0, have - need + gpu["experts"])
        notes.append(
            f"needs {need / 2**30:.1f} GiB of GPU memory; {scene.hardware.name} has {have / 2**30:.1f} GiB, "
            f"which leaves experts {describe_capacity(left, model.expert_bytes, model.experts)}"
        )
    if scene.budget > model.all_expert_bytes:
        notes.append(f"the cache is larger than all experts together ({model.all_expert_bytes / 2**20:,.0f} MiB)")
    token = sum(model.expert_bytes) * scene.trace.top_k
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
        "quant": scene.model.stored.label if scene.model.stored else None,
        "hardware": scene.hardware.name,
        "hardware_measured": scene.hardware.link_measured,
        "link_source": scene.hardware.link_source,
        "loop": scene.hardware.software.kind,
        "loop_source": scene.hardware.software.origin,
        "software": scene.software.name,
        "profile": [{"trace": _from_here(t.source), "sha256": t.sha256} for t in scene.profile],
        "code": code_version(),
        "seed": scene.seed,
    }


def _from_here(source: str) -> str:
    """A path below the present folder as seen from there: whose folders those are is nobody's business."""
    with suppress(OSError, ValueError):  # the folder may be gone
        return str(Path(source).relative_to(Path.cwd()))
    return source
