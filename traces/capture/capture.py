"""Record routing traces of a Hugging Face Mixture-of-Experts model on text: real prefill, real decoding.

Rows are captured batch by batch: ids, gates and probabilities stay in memory (layers x (experts + 6 top_k) bytes a
row), whole hidden states wait until the model's embedding basis is known, where `KeptStates` has them. A batch has at
most ``Amount.chunk`` rows.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ground.errors import InputError
from ground.files import atomic_path
from traces.capture.batches import prefill_level
from traces.capture.checkpoint import (
    basis_place,
    checkpoint_sha256,
    load,
    located,
    model_name,
    named_by_shape,
    provenance,
    say_unknown_costs,
    unchanged,
)
from traces.capture.corpora import DomainText, read_domain
from traces.capture.decoding import Decoding
from traces.capture.domain_run import Amount, DomainRows, DomainRun
from traces.capture.families import FAMILIES, read_families
from traces.capture.kept_states import memory_named
from traces.capture.prompts import TEMPLATES, read_prompts
from traces.capture.recorder import ODD_ROUTES, Recorder, recorders
from traces.embeddings import Basis, check_size
from traces.mix import joined_text
from traces.probabilities import keep_largest
from traces.statistics import routing
from traces.statistics.embedding_price import choose_basis
from traces.trace import Trace
from traces.validation import check_meta


@dataclass(frozen=True)
class CaptureOptions:
    """How to capture; every field has the same name on the command line.

    ``embedding`` is ``auto`` (the cheapest of embedding_price.CANDIDATES that loses at most MOST_LOSS recall),
    ``none``, or dimensions x bits such as ``96x3``. A basis already at ``basis_path`` (default: beside the checkpoint,
    or beside the output if that cannot be written) is used as it is, else the one fitted is saved there. ``probs``
    router probabilities of each route are kept, the largest (None: all). ``statistics_path`` receives statistics as
    JSON. ``adapter`` is a Python file with the router families of one's own.
    """

    amount: Amount = field(default_factory=Amount)
    decoding: Decoding = field(default_factory=Decoding)
    template: str = "plain"
    embedding: str = "auto"
    probs: int | None = None
    basis_path: str | Path | None = None
    statistics_path: str | Path | None = None
    experts_implementation: str | None = None
    adapter: str | Path | None = None
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise InputError(f"template {self.template!r}; one of {', '.join(TEMPLATES)}")
        _embedding(self.embedding)
        if self.probs is not None and self.probs < 1:
            raise InputError(f"probs is {self.probs}; expected at least 1")


def capture(
    model_dir: str | Path, corpora: str | Path, domains: Sequence[str], output: str | Path, **settings: Any
) -> list[Path]:
    """Capture ``domains`` of ``corpora`` with a checkpoint; one trace a domain, paths returned.

    ``model_dir`` is a folder or a name on the Hugging Face hub, ``output`` the file of a single domain or the folder of
    several, ``settings`` are fields of :class:`CaptureOptions`. Of an encoder-decoder model the decoder's trace has
    that name and the encoder's ends in ``.encoder.npz``.

    Raises InputError for anything wrong with the arguments, the text or the model, before anything is written.
    """
    options = CaptureOptions(**settings)
    texts = [read_domain(corpora, domain, options.seed) for domain in domains]
    targets = _targets(Path(output), domains)
    traces = _record(model_dir, texts, targets[0].parent, options)
    with ThreadPoolExecutor() as pool:  # compressing is most of it, and lets other threads run
        return [path for paths in pool.map(_save, traces, targets) for path in paths]


def capture_prompts(
    model_dir: str | Path, prompts: str | Path, output: str | Path, *, licence: str = "not stated", **settings: Any
) -> list[Path]:
    """Capture a person's own prompts (prompts.read_prompts), all domains in one trace; else as `capture`."""
    options = CaptureOptions(**settings)
    texts = read_prompts(prompts, licence)
    target = Path(output)
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"{target}: expected the name of a file in a folder that exists")
    traces = _record(model_dir, texts, target.parent, options)
    return _save({part: _joined([found[part] for found in traces]) for part in traces[0]}, target)


def _joined(traces: Sequence[Trace]) -> Trace:
    """One trace of the domains of one text."""
    whole = Trace.concat(traces)
    meta = {key: value for key, value in whole.meta.items() if key != "joined"} | {"text": joined_text(traces)}
    return replace(whole, meta=meta)


def _save(traces: Mapping[str, Trace], target: Path) -> list[Path]:
    """Write the parts of one captured text, the decoder or only part under the name asked for."""
    paths = []
    for part, trace in traces.items():
        paths.append(target.with_suffix(".encoder.npz") if part == "encoder" else target)
        trace.save(paths[-1])
    return sorted(paths, key=lambda path: path != target)


def _record(
    model_dir: str | Path, texts: Sequence[DomainText], beside: Path, options: CaptureOptions
) -> list[dict[str, Trace]]:
    """The traces of each text, by part of the model."""
    folder = located(model_dir)
    families = FAMILIES | (read_families(options.adapter) if options.adapter else {})
    with unchanged(folder):
        model, tokenizer = load(folder, options.experts_implementation, options.device)
        sha256 = checkpoint_sha256(folder)
    wanted = _embedding(options.embedding)
    place = Path(options.basis_path) if options.basis_path else basis_place(folder, beside)
    basis = Basis.load(place) if wanted != "none" and place.exists() else None
    with memory_named(), ExitStack() as hooks:
        found = {part: hooks.enter_context(one) for part, one in recorders(model, families).items()}
        main = list(found)[-1]
        about_model = provenance(folder, model_name(model_dir), model, options.seed, sha256)
        common = {part: _meta(about_model, recorder, options) for part, recorder in found.items()}
        _try_meta(common[main], texts)
        _try_embedding(wanted, basis, found[main])
        say_unknown_costs(common[main]["model"], [routed.layer for routed in found[main].layers])
        run = DomainRun(found, tokenizer, options.amount, options.decoding, options.template)
        captured = [run.domain(text) for text in texts]
        mains = [one[main] for one in captured]
        basis, about = settled_basis(mains, wanted, basis, options.seed)
        if basis and about and not place.exists():
            basis.save(place)
        traces: list[dict[str, Trace]] = []
        for one in captured:
            traces.append({})
            for part, rows in one.items():
                whole = trace_of_domain(rows, common[part], basis if part == main and about else None, about)
                traces[-1][part] = whole if options.probs is None else keep_largest(whole, options.probs)
        if options.statistics_path:
            _write_statistics(Path(options.statistics_path), mains, traces[0][main].meta, about)
    return traces


def settled_basis(
    mains: Sequence[DomainRows], wanted: str | tuple[int, int], basis: Basis | None, seed: int
) -> tuple[Basis | None, dict[str, Any]]:
    """The basis that the states of captured texts are stored with, and what a trace's meta says of it.

    That is empty, and nothing is stored, where ``wanted`` is ``none`` or no token was decoded.
    """
    if wanted == "none" or not any(one.decode.any() for one in mains):
        return basis, {}
    size = None if isinstance(wanted, str) else wanted
    basis, about = choose_basis([one.keyed() for one in mains], mains[0].experts, size, basis, seed)
    return basis, about | {"prefill_layer": prefill_level(len(mains[0].layers))}


def _meta(about_model: Mapping[str, Any], recorder: Recorder, options: CaptureOptions) -> dict[str, Any]:
    """What the meta of a model's part says whatever is captured; what its routes must tell is still missing."""
    first = recorder.layers[0]
    model = about_model["model"] | ({"part": recorder.part} if recorder.part else {})
    captured = about_model["captured"] | {"router": first.family.facts(first.router)}
    return {**about_model, "model": model, "captured": captured, "decoding": _decoding(options)}


def _try_meta(common: Mapping[str, Any], texts: Sequence[DomainText]) -> None:
    """Raise InputError for what a trace's meta cannot hold: now, and not when everything has been run."""
    shape = {"experts": 1, "top_k": 1}
    for text in texts:
        sources = {row.source: row.licence for row in (*text.profile, *text.eval)}
        check_meta({**common, "model": common["model"] | shape, "text": _text(text.domain, text.about, sources)})


def _try_embedding(wanted: str | tuple[int, int], basis: Basis | None, recorder: Recorder) -> None:
    """Raise InputError for an embedding that the model's states cannot be stored as, before there are any."""
    model: Any = recorder.model
    hidden = model.get_input_embeddings().weight.shape[-1]
    if basis:
        basis.check_for(hidden, len(recorder.layers) + 1)
    elif not isinstance(wanted, str):
        check_size(*wanted, hidden)


def _text(domain: str, about: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """What a trace's meta says of its text."""
    licence = "; ".join(sorted(set(sources.values())))
    return {"source": f"{domain}: {about}", "sources": dict(sources), "licence": licence}


def trace_of_domain(one: DomainRows, common: Mapping[str, Any], basis: Basis | None, about: Mapping[str, Any]) -> Trace:
    """The Trace of a captured domain; states become stored integers if there is a basis."""
    notes = one.notes + [note.format(one.odd[kind]) for kind, note in ODD_ROUTES.items() if one.odd[kind]]
    dropped = int((one.arrays["experts"] < 0).sum())
    if dropped:
        notes.append(f"{dropped} of {one.arrays['experts'].size} ids are -1: their expert had no room for the token")
    shape = {"experts": one.experts, "top_k": int(one.arrays["experts"].shape[2])}
    meta = {
        **common,
        "model": named_by_shape(common["model"] | shape, len(one.layers)),
        "text": _text(one.domain, one.about, one.sources),
        "notes": notes,
    }
    arrays: dict[str, Any] = dict(one.arrays)
    if basis is not None:
        meta["embedding"] = dict(about)
        arrays["embeddings"] = basis.quantise(one.states)
        arrays["embedding_scale"] = basis.scale
        arrays["prefill_embeddings"] = basis.quantise(one.prefill_states, prefill_level(len(one.layers)))
    return Trace(
        meta=meta,
        layers=np.array(one.layers, np.int32),
        domain=np.array([one.domain] * len(one.sequence_id)),
        split=np.array(one.split),
        sequence_id=np.array(one.sequence_id),
        **arrays,
    )


def _embedding(text: str) -> str | tuple[int, int]:
    """``auto``, ``none``, or (dims, bits)."""
    if text in ("auto", "none"):
        return text
    dims, times, bits = text.partition("x")
    if not (times and dims.isdigit() and bits.isdigit()):
        raise InputError(f"embedding {text!r}; expected auto, none or dimensions x bits such as 96x3")
    return int(dims), int(bits)


def _targets(output: Path, domains: Sequence[str]) -> list[Path]:
    """One output file a domain; folders are made."""
    if not domains or len(set(domains)) != len(domains):
        raise InputError(f"domains {', '.join(domains) or 'none'}: expected one or more, each once")
    if len(domains) == 1 and output.suffix == ".npz":
        return [output]
    output.mkdir(parents=True, exist_ok=True)
    return [output / f"{domain}.npz" for domain in domains]


def _decoding(options: CaptureOptions) -> dict[str, Any]:
    """What a trace's meta says of how its tokens came to be."""
    amount, decoding = options.amount, options.decoding
    mode: dict[str, Any] = asdict(decoding) if decoding.mode == "sampled" else {"mode": decoding.mode}
    return {
        **mode, "template": options.template, "batch": amount.batch, "padding": "left", "kv_cache": True,
        "prompt_tokens_at_most": amount.prompt_tokens, "new_tokens_at_most": amount.new_tokens,
    }  # fmt: skip


def _write_statistics(
    path: Path, captured: Sequence[DomainRows], common: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Routing statistics as JSON, and as tables for a person."""
    result = routing.statistics(
        {one.domain: one.keyed() for one in captured},
        {one.domain: one.previous() for one in captured},
        captured[0].experts,
    )
    passed = routing.show(result, Console(stderr=True))
    whole = {
        "model": common["model"], "captured": common["captured"], "decoding": common["decoding"],
        "software": common["software"], "hardware": common["hardware"], "embedding": dict(about),
        "routing": result, "passed": passed, "samples": {one.domain: one.samples for one in captured},
    }  # fmt: skip
    with atomic_path(path) as part:
        part.write_text(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "utf-8")
