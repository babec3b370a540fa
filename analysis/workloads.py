"""The paper's workloads from traces at hand: law, banking, and a mixed one that interleaves all others."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from ground.errors import InputError
from ground.text import printable
from sim.run.scene import bundled_traces
from traces.plausibility import doubts
from traces.trace import Trace

MIXED = "mixed"
FIRST = ("law", "banking", MIXED)
"""Domains that the DoMoE paper runs by themselves; it interleaves its three others."""


@dataclass(frozen=True)
class Source:
    """One trace file, as far as finding workloads needs it."""

    path: str
    sha256: str
    model: str
    domains: tuple[str, ...]
    training_seed: int | None = None
    """Of the small model that was trained for it; None for a trace of another model."""
    profiled: bool = True
    """Whether it has a profile split."""

    @property
    def name(self) -> str:
        """The file's name, without the folder that it happens to lie in."""
        return Path(self.path).name

    def to_json(self) -> dict[str, str | int]:
        """Model, name, hash and, for a model trained for it, the training seed."""
        trained: dict[str, str | int] = {} if self.training_seed is None else {"training_seed": self.training_seed}
        return {"model": self.model, "trace": self.name, "sha256": self.sha256} | trained


@dataclass(frozen=True)
class ModelTraces:
    """All traces of one model.

    ``workloads`` are replayed, where several files of one take turns, and the profile splits of all are learned from.
    """

    name: str
    workloads: dict[str, tuple[Source, ...]]
    sources: tuple[Source, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the profile, sorted."""
        return tuple(sorted({domain for source in self.sources for domain in source.domains}))

    @property
    def mixed(self) -> str:
        """The mixed workload's name; the last one's, if there is no mixed one."""
        return MIXED if MIXED in self.workloads else [*self.workloads][-1]

    @property
    def profile(self) -> tuple[str, ...]:
        """Files whose profile splits policies learn from."""
        return tuple(source.path for source in self.sources if source.profiled)


@lru_cache(maxsize=8)
def loaded(path: str) -> Trace:
    """The trace at ``path``; the last few are kept, so that jobs of one model do not read it again and again."""
    return Trace.load(path)


def by_model(paths: Sequence[str | Path] | None = None) -> list[ModelTraces]:
    """The traces at ``paths`` (files, or folders of .npz files; default: the bundled ones), by model.

    Raises InputError for a file that cannot be read and for two traces of one model and domain.
    """
    found: dict[str, list[Source]] = {}
    for path in _files(paths):
        source = _source(path)
        found.setdefault(source.model, []).append(source)
    return [_model_traces(name, sources) for name, sources in sorted(found.items())]


def _files(paths: Sequence[str | Path] | None) -> list[Path]:
    if paths is None:
        return bundled_traces()
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not inside:
            raise InputError(f"--traces {path}: a folder without .npz files; expected traces")
        files += inside
    return files


@cache  # a report asks again for each of its parts
def _source(path: Path) -> Source:
    trace = Trace.load(path)
    for doubt in doubts(trace):
        print(f"warning: {printable(f'{path}: {doubt}')}", file=sys.stderr)
    trained = trace.meta.get("captured", {}).get("trained")
    seed = trained.get("seed") if isinstance(trained, dict) else None
    name, domains = str(trace.meta["model"]["name"]), tuple(sorted(set(trace.domain.tolist())))
    profiled = bool((trace.split == "profile").any())
    return Source(str(path), trace.sha256, name, domains, seed if isinstance(seed, int) else None, profiled)


def _model_traces(model: str, sources: Sequence[Source]) -> ModelTraces:
    workloads: dict[str, tuple[Source, ...]] = {}
    others: list[Source] = []
    for source in sources:
        name = source.domains[0] if len(source.domains) == 1 else MIXED
        if name not in FIRST:
            others.append(source)
        elif name in workloads:
            raise InputError(
                f"{source.path}: a second trace of {model}, {name}, beside {workloads[name][0].path}; "
                f"expected traces of one model, one a workload"
            )
        else:
            workloads[name] = (source,)
    if len(others) == 1 or MIXED in workloads:
        workloads |= {source.domains[0]: (source,) for source in others}
    elif others:
        workloads[MIXED] = tuple(others)
    order = sorted(workloads, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    return ModelTraces(model, {name: workloads[name] for name in order}, tuple(sources))
