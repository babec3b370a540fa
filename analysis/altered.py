"""Policies under other terms than their own: another's eviction, another order of the link's queue, other pieces."""

from dataclasses import dataclass, replace

from analysis.runs import Design, Replayed, scene_at
from sim.plan import Discipline
from sim.policies.named import NamedPolicy
from sim.report.shares import shares
from sim.run.prepared import PreparedRun, prepare, settle_for
from sim.run.scene import Scene
from sim.run.terms import TooSmallError


@dataclass(frozen=True)
class Altered(NamedPolicy):
    """A policy that keeps its requests and what they cost.

    ``evicts_as`` is the policy that decides in its place who is evicted; ``discipline`` another order of the link's
    queue than its own; ``chunks`` the pieces that a copy is cut into.
    """

    evicts_as: NamedPolicy | None = None
    discipline: Discipline | None = None
    chunks: int | None = None


def prepared(here: Scene, policy: NamedPolicy) -> PreparedRun:
    """What ``policy``, altered or as it is, decides in a scene, settled. Raises InputError."""
    if not isinstance(policy, Altered):
        return prepare(here, policy.name, policy.values)
    discipline, chunks = policy.discipline, policy.chunks
    run = prepare(here, policy.name, policy.values, discipline=discipline, chunks=chunks)
    if policy.evicts_as is None:
        return run
    other = prepare(here, policy.evicts_as.name, policy.evicts_as.values).plan
    plan = replace(run.plan, eviction=other.eviction, values=other.values, per_layer=other.per_layer)
    return replace(run, plan=plan, terms=settle_for(run.policy, here.work, plan, here.budget, discipline, chunks))


def replayed_altered(design: Design) -> Replayed:
    """Replay one design, of an altered policy or of one as it is. Raises InputError."""
    here = scene_at(design.scene)
    run = prepared(here, design.policy)
    done = run.execute()
    return Replayed(design, run.simulated(done), shares(here.trace, here.work, done.log))


def altered_unless_too_small(design: Design) -> Replayed | None:
    """The same, or None where the cache is too small for the policy. Raises InputError."""
    try:
        return replayed_altered(design)
    except TooSmallError:
        return None
