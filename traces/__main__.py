"""Command line of the traces package: ``python -m traces``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from traces.errors import InputError

app = App(
    name="python -m traces",
    help="Record and read routing traces of Mixture-of-Experts models.",
    help_format="markdown",
    help_on_error=False,
)


@app.command
def convert(
    file: Annotated[Path, Parameter(help="routes of another tool, .npz or .npy")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="the trace to write")],
    kind: Annotated[str | None, Parameter(help="gpt-oss, esft, device or serving; default: told by its arrays")] = None,
    model: Annotated[str | None, Parameter(help="the model whose costs are charged, e.g. mixtral-8x7b")] = None,
    experts: Annotated[int | None, Parameter(help="routed experts of a layer, where the file does not say")] = None,
    layers: Annotated[str | None, Parameter(help="model layers of the routed layers, e.g. 1-26 or 1,3,5")] = None,
    domain: Annotated[
        str | None, Parameter(help="domain of all sequences; default: what the file says, else its name")
    ] = None,
    source: Annotated[str | None, Parameter(help="which text was run")] = None,
    licence: Annotated[str | None, Parameter(help="the licence of that text")] = None,
) -> None:
    """Turn the routing record of another tool into a trace.

    A record of a serving engine holds `routed_experts` (rows, layers, k) and, where known, `offsets`, `prompt_lens`,
    `token_ids`, `layer_ids`, `n_experts`; padded ones (requests, rows, layers, k) `lengths`; turns of conversations
    `conversation` and `start`. Doubtful rows are dropped or refused, and what was noticed goes to the trace's notes.

    For example:

    ```
    python -m traces convert routed_experts.npz -o chat.npz --model qwen3-30b-a3b --domain chat
    python -m traces convert routed_experts.npy -o code.npz --model deepseek-v2-lite --layers 1-26 --domain code
    ```
    """
    from traces.arrays import shown
    from traces.convert import Given, convert_file

    # Under an ASCII locale arguments arrive as escaped bytes; the trace holds proper text.
    domain, source, licence = (text and shown(text) for text in (domain, source, licence))
    given = Given(model=model, experts=experts, layers=layers, domain=domain, source=source, licence=licence)
    trace = convert_file(file, output, kind=kind, given=given)
    for note in trace.meta["notes"]:
        print(f"warning: {note}", file=sys.stderr)
    print(f"{output}: {trace.n_rows} rows, {trace.n_sequences} sequences", file=sys.stderr)


@app.command
def info(
    traces: Annotated[list[Path], Parameter(help="trace files")],
    /,
    *,
    json: Annotated[
        str | None,
        Parameter(help="write the same facts as JSON here, - is standard output", allow_leading_hyphen=True),
    ] = None,
) -> None:
    """Show what traces hold: rows, domains, arrays, where they come from and how their routing behaves.

    For example:

    ```
    python -m traces info chat.npz
    python -m traces info chat.npz code.npz --json - | jq '.[].rows'
    ```
    """
    from traces.info import show

    show(traces, json_to=json)


@app.command
def verify(trace: Annotated[Path, Parameter(help="trace file")], /) -> None:
    """Check a trace's every array and print its sha256 and ok.

    For example:

    ```
    python -m traces verify chat.npz
    ```
    """
    from traces.trace import Trace

    print(f"{Trace.load(trace).sha256}  ok")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit status.

    0 is success, 2 is wrong input: one line ``error: ...`` on standard error and no output file.
    """
    # Names of files and domains may hold any character, whatever the locale.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (InputError, OSError, CycloptsError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
