"""The commands that make traces of what engines write: ``convert`` and ``record``."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.text import check_name, printable
from ground.whole_number import WholeNumber

if TYPE_CHECKING:
    from traces.trace import Trace

_Output = Annotated[Path, Help("the trace to write", "--output", "-o")]
_Model = Annotated[
    str | None, Help("the model whose costs are charged: a built-in name, or the config.json of any other")
]
_Layers = Annotated[str | None, Help("model layers of the routed layers, e.g. 1-26 or 1,3,5")]


def convert(
    files: Annotated[list[Path], Help("what an engine wrote: files or folders of one form")],
    /,
    *,
    output: _Output,
    kind: Annotated[str | None, Help("the form of the files; default: by their content")] = None,
    model: _Model = None,
    experts: Annotated[WholeNumber | None, Help("routed experts of a layer, where the file does not say")] = None,
    layers: _Layers = None,
    domain: Annotated[str | None, Help("domain of all sequences; default: what the file says, else its name")] = None,
    source: Annotated[str | None, Help("which text was run")] = None,
    licence: Annotated[str | None, Help("the licence of that text")] = None,
) -> None:
    r"""Turn what an engine writes of its routing into a trace.

    The form is told by content: answers of vLLM, SGLang, TensorRT-LLM and Dynamo as JSON, SGLang's recorder, batches of
    verl and slime, Megatron's router traces, and others; or arrays that you saved. Doubtful rows are dropped or
    refused, and the trace's notes say what was noticed. docs/convert.md has a line to copy for each engine.

    For example:

    ```
    python -m traces convert answers.jsonl -o chat.npz --domain chat
    python -m traces convert routed_experts.npz -o code.npz \
        --model deepseek-v2-lite --layers 1-26 --domain code
    python -m traces convert device.npz -o mine.npz --model mine/config.json
    ```
    """
    from traces.arrays import shown
    from traces.convert.kinds import Given, convert_files

    keep_apart([*files, model], {"--output": output})
    # Under an ASCII locale arguments arrive as escaped bytes; the trace holds proper text.
    domain, source, licence = (text and shown(text) for text in (domain, source, licence))
    if domain is not None:
        check_name(domain, "--domain")
    given = Given(model=model, experts=experts, layers=layers, domain=domain, source=source, licence=licence)
    _tell(convert_files(files, output, kind=kind, given=given), output)


def record(
    *,
    server: Annotated[str, Help("address of an OpenAI-compatible server that returns routed experts (vLLM, SGLang)")],
    prompts: Annotated[Path, Help("one prompt a line, or .jsonl rows {prompt | messages, domain}")],
    output: _Output,
    served: Annotated[str | None, Help("the model's name on the server; default: its first one")] = None,
    model: _Model = None,
    layers: _Layers = None,
    max_tokens: Annotated[WholeNumber, Help("tokens generated at most")] = 256,
    temperature: float = 0.8,
    concurrency: Annotated[WholeNumber, Help("requests under way together")] = 8,
    retries: Annotated[WholeNumber, Help("how often a request that fails is repeated")] = 6,
    timeout: Annotated[float, Help("seconds that an answer may take")] = 600.0,
    key_variable: Annotated[str | None, Help("the environment variable with the server's API key")] = None,
    licence: Annotated[str | None, Help("the licence of the prompts, for the record")] = None,
    seed: WholeNumber = 0,
) -> None:
    r"""Ask a running server for answers with their routes, and make a trace of them.

    Answers go to `OUTPUT.answers.jsonl` as they come. After a broken connection the same command asks for the rest.

    For example:

    ```
    vllm serve Qwen/Qwen3-30B-A3B --enable-return-routed-experts
    python -m traces record --server http://localhost:8000 \
        --prompts prompts.txt -o chat.npz
    ```
    """
    from traces.arrays import shown
    from traces.convert.kinds import Given
    from traces.record import Asking
    from traces.record import record as record_answers

    keep_apart([prompts, model], {"--output": output, "--output, the answers:": f"{output}.answers.jsonl"})
    if concurrency < 1 or max_tokens < 1 or timeout <= 0 or temperature < 0:
        raise InputError("--concurrency, --max-tokens and --timeout: expected more than 0, --temperature at least 0")
    asking = Asking(
        server, served, max_tokens, temperature, seed, concurrency, retries, timeout, key_variable=key_variable
    )
    given = Given(model=model, layers=layers, source=shown(prompts.name), licence=licence and shown(licence))
    _tell(record_answers(prompts, output, asking, given), output)


def _tell(trace: "Trace", output: Path) -> None:
    """Say what is doubtful of a trace, and how large it is."""
    from traces.convert.kinds import replay_needs
    from traces.plausibility import doubts
    from traces.spool import pages_given_back

    with pages_given_back():
        notes = [*trace.meta["notes"], *doubts(trace), *replay_needs(trace)]
    for note in notes:
        print(f"warning: {printable(note)}", file=sys.stderr)
    print(f"{output}: {trace.n_rows} rows, {trace.n_sequences} sequences", file=sys.stderr)
