"""What is replayed: a trace, its model and a machine, from names and files. ``sim.run.prepared`` adds a policy."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any

from cyclopts import Parameter

from ground.command_line import Help, release
from ground.errors import InputError
from ground.whole_number import WholeNumber
from sim.bounds import Bounds, bounds, joint_bounds, joint_loads
from sim.machine.assembly import Assembly
from sim.machine.hardware import DEFAULT_HARDWARE, Hardware
from sim.machine.prediction_costs import DEFAULT_SOFTWARE, PredictionCosts
from sim.plan import Host
from sim.policies import Policy
from sim.run.cache_size import AUTO, parse_capacity
from sim.run.charged_model import charged_model
from sim.run.host_costs import host_costs
from sim.run.memory import RESERVE, Memory, memory_of
from sim.schedules.grouping import REGROUPS, Regroup
from sim.schedules.kv_cache import cache_bytes, with_moves
from sim.schedules.lockstep import lockstep
from sim.schedules.pipeline import PIPELINES, Pipeline
from sim.view import PREDICTING
from sim.workload import Schedule, Workload, batched, without_loop, workload
from traces.mix import mix
from traces.models.spec import ModelSpec
from traces.plausibility import doubts
from traces.schema import DECODE, PREDICTED
from traces.trace import Trace

DEFAULT_CACHE = "25%"
CacheSize = Annotated[
    str,
    Help(
        "GPU memory for experts: 64 (slots), 16/layer, 25% (of all experts), 4000MiB, 16GiB, or auto: what the card "
        "leaves beside weights, --context, activations and --reserve"
    ),
]
Quantisation = Annotated[
    str | None,
    Help(
        "in what precision the model is: a preset of llama.cpp (q4_k_m, q8_0, iq4_xs, mxfp4_moe), fp8, mxfp4, nvfp4, "
        "awq, gptq; parts apart: q4_k_m+attention=q8_0, experts=mxfp4; default: as it was released",
        show_default=False,
    ),
]
Split = Annotated[str, Help("which sequences to replay: eval, profile or all")]


@dataclass(frozen=True)
class Scene:
    """Everything of a run but the policy: what is replayed, on what, with how much memory.

    Made once by ``scene`` and shared by all policies of a comparison.
    """

    trace: Trace
    profile: tuple[Trace, ...]
    model: ModelSpec
    hardware: Hardware
    software: PredictionCosts
    budget: int
    batch: int
    split: str
    seed: int
    work: Workload
    notes: tuple[str, ...] = ()
    """What a person should know of it, whatever the policy."""
    regroup: Regroup | None = None
    """How tokens of two batches in lockstep are regrouped; None where batches do not run in lockstep."""
    pipeline: Pipeline = "sequential"
    """How much of predicting and regrouping runs beside steps."""
    kv_more: int = 0
    """Bytes that sequences in flight beyond one batch take for keys, values and states; ``budget`` is without them."""
    ubatch: int | None = None
    """Rows of a prompt that run in one step, at most; None where prompts run whole."""
    memory: Memory | None = None
    """What the card's memory is for, where a person asked for what it leaves, or for room for a context."""

    def with_cache(self, cache: str) -> "Scene":
        """The same with a cache as a person writes it. Raises InputError for one that holds no expert."""
        if cache.strip().lower() == AUTO:
            run = self.trace, self.work.schedule, self.model, self.hardware, self.batch
            memory = self.memory or memory_of(*run, most=self.ubatch)
            return replace(self, budget=memory.fitting(self.model, self.hardware.name), memory=memory, kv_more=0)
        size, sizes = parse_capacity(cache, self.model.expert_bytes, self.model.experts), self.model.expert_bytes
        if size - self.kv_more < max(sizes):
            raise InputError(
                f"--cache {cache!r}: keys and values of sequences beyond --batch take {self.kv_more:,} of {size:,} "
                f"bytes, and no expert of {max(sizes):,} fits; give at least {self.kv_more + max(sizes):,}B"
            )
        return replace(self, budget=size - self.kv_more)

    @cached_property
    def bound(self) -> Bounds:
        """What no policy can beat."""
        bare = without_loop(self.work, self.trace, self.model, self.hardware)
        decode_ns = int(bare.compute_ns()[self.work.schedule.phase == DECODE].sum())
        return replace(bounds(self.work, self.budget, self.hardware.link_bytes_per_s), decode_bare_ns=decode_ns)

    def joint_bound(self, host: Host) -> Bounds:
        """What no policy can beat that may compute experts on ``host``."""
        costs = host_costs(self.work, host)
        return joint_bounds(self.work, self._joint_loads, self.hardware.link_bytes_per_s, costs.alone, costs.chosen)

    @cached_property
    def _joint_loads(self) -> tuple[int, int]:
        return joint_loads(self.work, self.budget)


def bundled_traces() -> list[Path]:
    """The traces that come with the project."""
    folder = resources.files("traces")
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".npz"))


_KINDS: dict[str, tuple[type | UnionType, str]] = {
    "traces": (tuple, "a tuple of paths"),
    "model": (str | Path | None, "a name or a file of a model"),
    "quant": (str | None, "a text such as 'q4_k_m'"),
    "hardware": (str | Path, "a name or a .toml"),
    "loop": (str | Path | None, "eager, graphs, measured or a .toml"),
    "link": (str | None, "a text such as 'pcie4x8'"),
    "host": (str | Path | None, "a text such as 'ddr5-5600x2', or a .toml"),
    "software": (str | Path, "a name or a .toml"),
    "cache": (str, "a text: '64' (slots), '16/layer', '25%', '4000MiB' or 'auto'"),
    "context": (int | None, "a whole number"),
    "kv": (str, "a text such as 'q8_0'"),
    "reserve": (str | None, "a text such as '1024MiB'"),
    "profile": (tuple | None, "a tuple of paths"),
    "split": (str, "profile, eval or all"),
    "batch": (int, "a whole number"),
    "ubatch": (int | None, "a whole number"),
    "regroup": (str | None, f"one of {', '.join(REGROUPS)}"),
    "pipeline": (str, f"one of {', '.join(PIPELINES)}"),
    "seed": (int, "a whole number"),
}
"""Of each field of `SceneOptions`: what its value may be, and how a person is told so."""


@Parameter(name="*")
@dataclass(frozen=True)
class SceneOptions:
    """What a person says of a scene: all of a run but its policy. The option of a command is named as its field."""

    traces: Annotated[tuple[str | Path, ...], Parameter(parse=False)] = ()
    """The trace to replay; the sequences of several take turns (``traces.mix``)."""
    _: KW_ONLY
    model: Annotated[
        str | None,
        Help(
            "the model whose costs are charged: a name, a config.json, a .gguf or the index of .safetensors; default: "
            "the trace's own"
        ),
    ] = None
    quant: Quantisation = None
    hardware: Annotated[str, Help("the machine: a built-in name or a profile, .toml")] = DEFAULT_HARDWARE
    loop: Annotated[
        str | None,
        Help(
            "what drives the card: eager (kernel by kernel), graphs (CUDA graphs), measured (as its profile has it) or "
            "a file, .toml; default: the profile's own",
            show_default=False,
        ),
    ] = None
    link: Annotated[
        str | None, Help("the card's link, such as pcie4x8; default: the profile's own", show_default=False)
    ] = None
    host: Annotated[
        str | None,
        Help(
            "the host that computes experts: ddr5-5600x2, ddr4-3200x2:16 (16 cores), epyc-9004x12, or a file, .toml; "
            "default: the profile's own",
            show_default=False,
        ),
    ] = None
    software: Annotated[
        str,
        Help(
            "what predictions cost: fast (on the GPU), paper (on the host), measured (on the GPU of --hardware), "
            "measured-host (on its host) or a profile, .toml"
        ),
    ] = DEFAULT_SOFTWARE
    cache: CacheSize = DEFAULT_CACHE
    context: Annotated[
        WholeNumber | None,
        Help("tokens of each sequence that memory is kept for; default: what the trace fills", show_default=False),
    ] = None
    kv: Annotated[str, Help("the format of cached keys and values: bf16, q8_0, q4_0, ...")] = "bf16"
    reserve: Annotated[
        str | None, Help(f"memory that --cache auto leaves free; default: {RESERVE}", show_default=False)
    ] = None
    profile: Annotated[
        tuple[str, ...] | None,
        Help("traces to learn from (their profile split); default: this one and the bundled ones of its model"),
    ] = None
    split: Split = "eval"
    batch: Annotated[WholeNumber, Help("sequences that decode together")] = 1
    ubatch: Annotated[WholeNumber | None, Help("rows of a prompt that run at once (-ub); default: all of them")] = None
    regroup: Annotated[
        Regroup | None,
        Help(
            "run two batches in lockstep and regroup their tokens by predicted routes: kmeans or exact; or random, or "
            "none, where they stay",
            show_default=False,
        ),
    ] = None
    pipeline: Annotated[
        Pipeline,
        Help(
            "what of predicting and regrouping runs beside steps: nothing (sequential), what can (overlapped), more "
            "with two pairs of batches in flight (dual-batch), or all, as if tokens were known ahead (clairvoyant)"
        ),
    ] = "sequential"
    seed: Annotated[WholeNumber, Help("for policies that draw at random")] = 0

    def __post_init__(self) -> None:
        """Refuse what Python may pass and no command line does: a value of another type. Raises InputError."""
        for name, (kinds, wanted) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InputError(f"{name}: {value!r:.80}; expected {wanted}")
        for name, known in (("regroup", REGROUPS), ("pipeline", PIPELINES)):
            if (value := getattr(self, name)) is not None and value not in known:
                raise InputError(f"{name}: {value!r:.80}; expected one of {', '.join(known)}")
        for name in ("traces", "profile"):
            for path in getattr(self, name) or ():
                if not isinstance(path, str | Path):
                    raise InputError(f"{name}: {path!r:.80}; expected a path")

    @property
    def files(self) -> list[str | Path | None]:
        """All that is read for it, and so no place for an output."""
        return [*self.traces, *(self.profile or bundled_traces()), self.model, *self.machine.files, self.software]

    @property
    def machine(self) -> Assembly:
        """What the machine is put together from."""
        return Assembly(self.hardware, self.loop, self.link, self.host)


def scene(
    traces: str | Path | Sequence[str | Path], *, learns: bool = True,
    profile: str | Path | Sequence[str | Path] | None = None, **options: Any,
) -> Scene:  # fmt: skip
    """Load a trace, or several of one model as one mixed workload, and set it up on a machine.

    The keywords are the fields of `SceneOptions`; for ``learns`` see ``scene_of``. Raises InputError as that does.
    """
    given = SceneOptions(_paths(traces), profile=None if profile is None else _paths(profile), **options)
    return scene_of(given, learns=learns)


def _paths(given: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """One path or several, as texts; whatever is neither stays and is refused with the other values."""
    several = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    return tuple(str(path) if isinstance(path, Path) else path for path in several)


@dataclass(frozen=True)
class LoadedTraces:
    """What a scene reads of traces: its slowest part, and the same for scenes that differ in nothing else.

    Attributes:
        whole: all sequences.
        chosen: those that are replayed.
        profile: what policies learn from.
        doubts: what a person should know of the traces.
    """

    whole: Trace
    chosen: Trace
    profile: tuple[Trace, ...]
    doubts: tuple[str, ...]


def load_traces(
    paths: tuple[str | Path, ...], split: str, profile: tuple[str, ...] | None, learns: bool
) -> LoadedTraces:
    """Load what is replayed and, if a policy ``learns`` or they are named, the profiles. Raises InputError."""
    replayed = [Trace.load(path) for path in paths]
    whole = mix(replayed)
    profiles = tuple(_profiles(whole, replayed, profile)) if learns or profile else ()
    return LoadedTraces(whole, whole.select(split), profiles, tuple(doubts(whole)))


def scene_of(
    options: SceneOptions, *, learns: bool = True, load: Callable[..., LoadedTraces] = load_traces,
    hardware: Hardware | None = None, software: PredictionCosts | None = None,
) -> Scene:  # fmt: skip
    """The scene that ``options`` ask for.

    ``learns`` False skips loading profiles that no policy of this run reads, unless they are named. Whoever sets up
    many scenes may ``load`` traces once, by a `load_traces` that remembers, and give profiles that are no file as
    ``hardware`` and ``software``. Raises InputError for anything that a person got wrong.
    """
    if options.seed < 0:
        raise InputError(f"seed: {options.seed}; give at least 0")
    traces = load(options.traces, options.split, options.profile, learns)
    model, notes = charged_model(traces.whole, options.model, options.quant, options.kv)
    hardware = hardware or options.machine.load()
    schedule, kv_more = _scheduled(traces.chosen, model, options)
    work = with_moves(workload(traces.chosen, model, hardware, schedule), traces.chosen, model, hardware)
    software = software or PredictionCosts.load(options.software, hardware)
    here = Scene(
        traces.chosen, traces.profile, model, hardware, software, 0, options.batch, options.split, options.seed,
        work, notes=tuple(dict.fromkeys([*notes, *traces.doubts])), regroup=options.regroup, pipeline=options.pipeline,
        kv_more=kv_more, ubatch=options.ubatch,
    )  # fmt: skip
    if options.context is not None or options.reserve is not None:
        asked = options.batch, options.context, options.reserve, options.ubatch
        here = replace(here, memory=memory_of(traces.chosen, schedule, model, hardware, *asked))
    return here.with_cache(options.cache)


def _scheduled(trace: Trace, model: ModelSpec, options: SceneOptions) -> tuple[Schedule, int]:
    """The order of steps, and the bytes that its sequences have cached at most beyond those of one batch."""
    plain = batched(trace, options.batch, options.ubatch)
    if options.regroup is None:
        if options.pipeline == "dual-batch":
            raise InputError("--pipeline dual-batch: needs two batches in lockstep; expected --regroup with it")
        return plain, 0
    if options.ubatch is not None:
        raise InputError("--ubatch: prompts of batches in lockstep run whole; expected no --regroup")
    pairs = 2 if options.pipeline == "dual-batch" else 1
    schedule = lockstep(trace, options.batch, options.regroup, pairs=pairs, seed=options.seed)
    return schedule, max(0, cache_bytes(trace, schedule, model) - cache_bytes(trace, plain, model))


def _profiles(whole: Trace, replayed: Sequence[Trace], named: Sequence[str | Path] | None) -> list[Trace]:
    """The profile splits to learn from; a bundled trace counts if it is of the very model: name, checkpoint, shape."""
    found: dict[str, Trace] = {}
    if named is None:
        bundled = (p for p in bundled_traces() if _origin(Trace.load_meta(p)) == _origin(whole.meta))
        candidates = [*replayed, *(Trace.load(path) for path in bundled)]
        candidates = [t for t in candidates if _same_model(t, whole)]
    else:
        candidates = [Trace.load(Path(path)) for path in named]
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
        way = f"; {PREDICTING}" if missing[0] in PREDICTED else ""
        return f"the trace {scene.trace.source} has no array {missing[0]}, which it needs{way}"
    if scene.ubatch is not None and "prefill_embeddings" in kind.needs:
        return "it reads whole prompts, and --ubatch runs them in parts"
    if kind.learns and not kind.self_taught and not scene.profile:
        return f"it learns from a profile split and {scene.trace.source} has none; name traces with --profile"
    return None


@cache
def code_version() -> str:
    """Version of the project and a digest of the simulator's and the models' source: a report names what made it."""
    digest = hashlib.sha256()
    packages = Path(__file__).parents[2]
    for path in sorted([*packages.glob("sim/**/*.py"), *packages.glob("traces/models/*.py")]):
        digest.update(path.name.encode() + path.read_bytes())
    return f"{release()}+{digest.hexdigest()[:12]}"
