"""Command line of the traces package: ``python -m traces``."""

if __name__ == "__main__":  # the imports below take a moment
    from ground.addresses import ends_if_few
    from ground.interrupts import ends_quietly

    ends_quietly()
    ends_if_few()

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from ground.command_line import Help, command_line, run
from ground.errors import InputError
from ground.files import check_regular, keep_apart
from ground.whole_number import WholeNumber
from traces.convert.commands import convert, record
from traces.paths.command import learn
from traces.predictor.commands import app as predictor
from traces.training.command import train

app = command_line("traces", "Record and read routing traces of Mixture-of-Experts models.")
app.command(convert)
app.command(record)
app.command(train)
app.command(learn)
app.command(predictor)

_Output = Annotated[Path, Help("the trace to write", "--output", "-o")]
_Adapter = Annotated[Path | None, Help("Python file with a router family of your own")]
_Device = Annotated[str, Help("cuda, cpu, auto, or spread over GPUs and host memory")]
_Implementation = Annotated[str | None, Help("eager, grouped_mm or batched_mm")]
_Sequences = Annotated[WholeNumber, Help("least number of evaluation sequences")]


@app.command
def capture(
    model: Annotated[
        str, Help("a Hugging Face checkpoint of a Mixture-of-Experts model: a folder, or its name on the hub")
    ],
    /,
    *,
    output: Annotated[Path, Help("the trace to make; a folder for several domains", "--output", "-o")],
    prompts: Annotated[
        Path | None, Help("your own text: one prompt a line, or .jsonl rows {prompt | messages, response, domain}")
    ] = None,
    corpora: Annotated[Path | None, Help("text by domain instead: a folder of DOMAIN.jsonl.xz")] = None,
    domain: Annotated[list[str] | None, Help("which domains of --corpora")] = None,
    licence: Annotated[str, Help("the licence of --prompts, for the record")] = "not stated",
    profile_tokens: Annotated[
        WholeNumber | None, Help("decode tokens wanted for the profile split; default: 1400 of --corpora, else all")
    ] = None,
    eval_tokens: Annotated[
        WholeNumber | None, Help("the same for the evaluation split; default: 600 of --corpora, else all")
    ] = None,
    eval_sequences: _Sequences = 40,
    prompt_tokens: Annotated[
        WholeNumber | None, Help("longer prompts are left out; default: 64 of --corpora, else 4096")
    ] = None,
    new_tokens: Annotated[WholeNumber, Help("tokens generated at most; the last of them is never run")] = 32,
    batch: Annotated[WholeNumber, Help("sequences run together, padded")] = 32,
    chunk: Annotated[
        WholeNumber,
        Help(
            "most rows that run together. Fewer need less memory and more time. A longer prompt runs in pieces, "
            "but whole through an encoder"
        ),
    ] = 4096,
    decoding: Annotated[str, Help("sampled, greedy or teacher-forced (on the text's own response)")] = "sampled",
    temperature: float = 0.8,
    top_p: float = 0.95,
    template: Annotated[str, Help("plain, or chat: the tokenizer's own template")] = "plain",
    embedding: Annotated[
        str, Help("how embeddings are stored: auto, none, or dimensions x bits such as 96x3")
    ] = "auto",
    probs: Annotated[
        WholeNumber | None, Help("keep so many router probabilities of each route, the largest; default: all")
    ] = None,
    basis: Annotated[Path | None, Help("file of the embeddings' projection; default: beside the checkpoint")] = None,
    statistics: Annotated[Path | None, Help("write routing statistics here as JSON")] = None,
    experts_implementation: _Implementation = None,
    adapter: _Adapter = None,
    device: _Device = "auto",
    seed: WholeNumber = 0,
) -> None:
    r"""Record which experts a real model takes: prefill and decoding of your prompts, or of domain text.

    Of an encoder-decoder model the decoder's trace is `-o`, the encoder's lies beside it as `.encoder.npz`.

    For example:

    ```
    python -m traces capture Qwen/Qwen1.5-MoE-A2.7B --prompts prompts.txt \
        -o mine.npz
    python -m traces capture minimoe --prompts chats.jsonl --new-tokens 128 \
        --device cuda -o chats.npz
    python -m traces capture minimoe --corpora corpora --domain law code math \
        -o traces --statistics routing.json
    ```
    """
    from dataclasses import replace

    from traces.capture.capture import Amount, capture_prompts
    from traces.capture.capture import capture as capture_domains
    from traces.capture.decoding import Decoding

    if (prompts is None) == (corpora is None) or (corpora is not None) != bool(domain):
        raise InputError("expected either --prompts FILE, or --corpora FOLDER and --domain NAME")
    several = corpora is not None and not (len(domain or []) == 1 and output.suffix == ".npz")
    new_basis = None if basis is None or basis.exists() else basis  # one that exists is read
    domains = dict.fromkeys(domain or [])
    names = [f"{name}{end}" for name in domains for end in (".npz", ".encoder.npz")]
    files: dict[str, Path | None] = {"--statistics": statistics, "--basis": new_basis}
    if not several:
        files |= {"--output": output, "--output, the encoder's:": output.parent / f"{output.stem}.encoder.npz"}
    keep_apart(
        [model, prompts, corpora, adapter, basis], files, folders={"--output": (output, names)} if several else {}
    )
    standard = Amount() if corpora else Amount(profile_tokens=None, eval_tokens=None, prompt_tokens=4096)
    wanted = {
        "profile_tokens": profile_tokens, "eval_tokens": eval_tokens, "eval_sequences": eval_sequences,
        "prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "batch": batch, "chunk": chunk,
    }  # fmt: skip
    settings = {
        "amount": replace(standard, **{name: value for name, value in wanted.items() if value is not None}),
        "decoding": Decoding(decoding, temperature, top_p, seed), "template": template, "embedding": embedding,
        "probs": probs, "basis_path": basis, "statistics_path": statistics,
        "experts_implementation": experts_implementation,
        "adapter": adapter, "device": device, "seed": seed,
    }  # fmt: skip
    if corpora:
        paths = capture_domains(model, corpora, domain or [], output, **settings)
    else:
        paths = capture_prompts(model, prompts or "", output, licence=licence, **settings)
    for path in paths:
        print(path)


@app.command(name="bench-capture")
def bench_capture(
    *,
    layers: Annotated[WholeNumber, Help("routed layers of the random model")] = 32,
    intermediate: Annotated[WholeNumber, Help("width of an expert")] = 1024,
    prompts: Annotated[WholeNumber, Help("how many prompts of random tokens")] = 64,
    new_tokens: Annotated[WholeNumber, Help("tokens generated for each")] = 64,
    batch: Annotated[WholeNumber, Help("sequences run together")] = 32,
    repeats: Annotated[WholeNumber, Help("how often each is timed, after one run to warm up")] = 3,
    tiny: Annotated[bool, Help("a model that runs on a CPU in seconds, whatever the options above say")] = False,
    device: Annotated[str, Help("cuda, cpu or auto")] = "auto",
) -> None:
    """Measure what capturing costs beside plain generation: a random OLMoE of 13.6 billion parameters by default.

    For example:

    ```
    python -m traces bench-capture
    python -m traces bench-capture --tiny --device cpu
    ```
    """
    from rich.console import Console

    from traces.capture.bench import TINY, BenchShape, bench_view, run_bench

    shape = BenchShape(
        layers=layers, intermediate=intermediate, prompts=prompts, new_tokens=new_tokens, batch=batch, repeats=repeats
    )
    Console().print(bench_view(run_bench(TINY if tiny else shape, device)))


@app.command
def subset(
    traces: Annotated[list[Path], Help("trace file; the sequences of several take turns")],
    /,
    *,
    output: _Output,
    profile_tokens: Annotated[WholeNumber, Help("decode tokens wanted for the profile split")],
    eval_tokens: Annotated[WholeNumber, Help("decode tokens wanted for the evaluation split")],
    eval_sequences: _Sequences = 40,
    thin: Annotated[
        WholeNumber | None,
        Help(
            "make the file smaller: keep only so many router probabilities of a route, the largest, and of "
            "prefill rows none; leave out gates and the look-ahead of prefill rows; pack with LZMA"
        ),
    ] = None,
    routes_only: Annotated[
        bool, Help("leave out token ids and embeddings: for text that may not be passed on", "--routes-only")
    ] = False,
) -> None:
    r"""Make a smaller trace: the first sequences of each domain and split, until there are as many tokens as wanted.

    For example:

    ```
    python -m traces subset full/law.npz -o law.npz \
        --profile-tokens 3000 --eval-tokens 800
    python -m traces subset full/code.npz full/math.npz -o both.npz \
        --profile-tokens 200 --eval-tokens 100 --thin 4
    ```
    """
    from traces.mix import mix
    from traces.subset import first_sequences, thinned, without_text
    from traces.trace import Trace

    keep_apart(traces, {"--output": output})
    part = first_sequences(mix([Trace.load(path) for path in traces]), profile_tokens, eval_tokens, eval_sequences)
    part = without_text(part) if routes_only else part
    (part if thin is None else thinned(part, thin)).save(output, tight=thin is not None)


@app.command
def info(
    traces: Annotated[list[Path], Help("trace files")],
    /,
    *,
    json: Annotated[
        str | None, Help("write the same facts as JSON here, - is standard output", allow_leading_hyphen=True)
    ] = None,
    against: Annotated[str | None, Help("compare with this released model's published routing instead")] = None,
    document: Annotated[Path | None, Help("with --against: a document to write the table into, between marks")] = None,
) -> None:
    r"""Show what traces hold: rows, domains, arrays, where they come from and how their routing behaves.

    With `--against` all traces together are compared with what is published of a released model's routing, each figure
    with its source.

    For example:

    ```
    python -m traces info chat.npz
    python -m traces info chat.npz code.npz --json - | jq '.[].rows'
    python -m traces info traces/mixtral_*.npz --against mixtral-8x7b
    ```
    """
    keep_apart(traces, {"--json": json, "--document": document})
    if against is None:
        from traces.statistics.info import show

        if document is not None:
            raise InputError("--document: its table is that of --against MODEL, which is missing")
        show(traces, json_to=json)
    else:
        from traces.statistics.against import show as show_against

        if document is not None:  # read, and replaced
            check_regular(document)
        show_against(traces, against, json_to=json, document=document)


@app.command
def verify(
    trace: Annotated[Path, Help("trace file")],
    /,
    *,
    model: Annotated[str | None, Help("the checkpoint it was captured from, to run some sequences again")] = None,
    sha256: Annotated[str | None, Help("the hash that the file must have")] = None,
    sequences: Annotated[WholeNumber, Help("how many to run again")] = 4,
    experts_implementation: _Implementation = None,
    adapter: _Adapter = None,
    device: _Device = "auto",
) -> None:
    """Check every array of a trace, its hash, and its routes against the model that they came from.

    Sequences are run again one by one on the recorded tokens. A few routes may differ, because a batch of one adds in
    another order than the batch that was captured; what differs is counted and explained.

    For example:

    ```
    python -m traces verify chat.npz
    python -m traces verify chat.npz --model minimoe --sequences 8
    ```
    """
    from traces.capture.verify import show
    from traces.capture.verify import verify as verify_trace

    keep_apart([trace, model, adapter], {})
    show(
        verify_trace(
            trace, model, sha256=sha256, sequences=sequences, device=device, adapter=adapter,
            experts_implementation=experts_implementation,
        )
    )  # fmt: skip


@app.command
def compare_routing(
    traces: Annotated[list[Path], Help("traces of the small models")],
    /,
    *,
    output: Annotated[Path, Help("the statistics, JSON", "--output", "-o")],
    beside: Annotated[list[Path] | None, Help("traces, or records that convert reads, of other models")] = None,
    records: Annotated[list[Path] | None, Help("routing records of training seeds (capture --statistics)")] = None,
    document: Annotated[Path | None, Help("a document to write the tables into, between its marks")] = None,
) -> None:
    r"""Compare the routing of small trained models with that of published large ones, and of other training seeds.

    For example, with published records in the folder `routes`:

    ```
    python -m traces compare-routing traces/mixtral_*.npz --beside routes/*.npz \
        --records traces/records/mixtral_routing.json \
        traces/records/mixtral_seed1_routing.json \
        -o traces/records/comparison.json --document docs/traces.md
    ```
    """
    from traces.statistics.comparison import compare, tables

    keep_apart([*traces, *(beside or []), *(records or [])], {"--output": output, "--document": document})
    if document is not None:  # read, and replaced
        check_regular(document)
    print(tables(compare(traces, beside or [], records or [], output, document)), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status."""
    return run(app, arguments)


if __name__ == "__main__":
    sys.exit(main())
