"""Policies under other terms than their own: with the eviction of another, or on a link with another order."""

from dataclasses import dataclass, replace

from analysis.runs import Design, Replayed, scene_at
from sim.plan import Discipline
from sim.policies.named import NamedPolicy
from sim.report.shares import shares
from sim.run.prepared import prepare, settle_for
from sim.run.terms import TooSmallError


@dataclass(frozen=True)
class Altered(NamedPolicy):
    """A policy that keeps its requests and what they cost.

    ``evicts_as`` is the policy that decides in its place who is evicted; ``discipline`` another order of the link's
    queue than its own.
    """

    evicts_as: NamedPolicy | None = None
    discipline: Discipline | None = None


def replayed_altered(design: Design) -> Replayed:
    """Replay one design, of an altered policy or of one as it is. Raises InputError."""
    here, policy = scene_at(design.scene), design.policy
    discipline = policy.discipline if isinstance(policy, Altered) else None
    run = prepare(here, policy.name, policy.values, discipline=discipline)
    if isinstance(policy, Altered) and policy.evicts_as is not None:
        other = prepare(here, policy.evicts_as.name, policy.evicts_as.values).plan
        plan = replace(run.plan, eviction=other.eviction, values=other.values, per_layer=other.per_layer)
        terms = settle_for(run.policy, here.work, plan, here.budget, discipline)
        run = replace(run, plan=plan, terms=terms)
    done = run.execute()
    return Replayed(design, run.simulated(done), shares(here.trace, here.work, done.log))


def altered_unless_too_small(design: Design) -> Replayed | None:
    """The same, or None where the cache is too small for the policy. Raises InputError."""
    try:
        return replayed_altered(design)
    except TooSmallError:
        return None
