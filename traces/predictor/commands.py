"""The commands of ``python -m traces predictor``."""

from pathlib import Path
from typing import Annotated

from cyclopts import App

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.whole_number import WholeNumber

app = App("predictor", help="Train a path predictor, write what it predicts into traces, and judge it.")

_Device = Annotated[str, Help("cuda, cpu, or auto")]


def _apart(traces: list[Path], outputs: dict[str, Path | str | None], *others: Path) -> None:
    keep_apart([*traces, *(path.with_suffix(".encoder.npz") for path in traces), *others], outputs)


@app.command
def train(
    traces: Annotated[list[Path], Help("traces of one model, with token ids; their profile splits are learnt from")],
    /,
    *,
    output: Annotated[Path, Help("the predictor to write, .safetensors", "--output", "-o")],
    epochs: WholeNumber = 30,
    batch: Annotated[WholeNumber, Help("sequences a step")] = 64,
    learning_rate: Annotated[float, Help("the highest learning rate of the schedule")] = 2e-4,
    seed: WholeNumber = 0,
    device: _Device = "auto",
) -> None:
    """Train a path predictor: a small T5 that tells all layers' experts of a token from the text.

    For example:

    ```
    python -m traces predictor train full/translation.npz -o predictor.safetensors
    ```
    """
    from traces.predictor.train import PredictorOptions, train_predictor

    _apart(traces, {"--output": output})
    options = PredictorOptions(epochs=epochs, batch=batch, learning_rate=learning_rate, seed=seed)
    record = train_predictor(traces, output, options, device)
    done = record["training"]
    print(
        f"{output}: {record['parameters']:,} weights, {done['steps']} steps in {record['seconds']:.0f} s, "
        f"epoch {done['kept_epoch']} kept, loss {done['loss'][0]:.4f} to {done['loss'][-1]:.4f}"
    )


@app.command
def predict(
    trace: Annotated[Path, Help("the trace whose evaluation rows are predicted")],
    /,
    *,
    predictor: Annotated[Path, Help("the predictor")],
    output: Annotated[Path, Help("the trace with predictions to write", "--output", "-o")],
    most: Annotated[WholeNumber | None, Help("experts kept a route; default: 2 K, at least 8")] = None,
    device: _Device = "auto",
) -> None:
    r"""Add a predictor's predictions to a trace.

    For example:

    ```
    python -m traces predictor predict full/translation.npz \
        --predictor predictor.safetensors -o predicted.npz
    ```
    """
    from traces.predictor.network import device_named, load_predictor
    from traces.predictor.predict import predicted
    from traces.predictor.sequences import load_with_prompts

    _apart([trace], {"--output": output}, predictor)
    stored = load_predictor(predictor, device_named(device))
    predicted(*load_with_prompts(trace), stored, most).save(output)
    print(output)


@app.command
def accuracy(
    traces: Annotated[list[Path], Help("traces with predictions")],
    /,
    *,
    profile: Annotated[
        list[Path] | None, Help("traces whose profile splits plain guesses learn from; default: each trace's own")
    ] = None,
    batch: Annotated[WholeNumber, Help("sequences that step together")] = 16,
    json: Annotated[
        str | None, Help("write the same as JSON here, - is standard output", allow_leading_hyphen=True)
    ] = None,
) -> None:
    """Show how often predictions are right, per token and for whole batches, beside plain guesses.

    For example:

    ```
    python -m traces predictor accuracy predicted.npz --batch 32
    ```
    """
    from traces.predictor.accuracy_table import show

    keep_apart([*traces, *(profile or [])], {"--json": json})
    show(traces, profile or [], batch, json)


@app.command
def bench(
    predictor: Annotated[Path, Help("the predictor")],
    /,
    *,
    batch: Annotated[list[WholeNumber] | None, Help("batch sizes; default: 1 4 16 32")] = None,
    prompt_tokens: Annotated[WholeNumber, Help("tokens of a prompt")] = 64,
    repeats: WholeNumber = 20,
    device: _Device = "auto",
) -> None:
    """Measure how long a predictor takes, as figures of a software profile (docs/hardware.md).

    For example:

    ```
    python -m traces predictor bench predictor.safetensors --device cpu
    ```
    """
    from traces.predictor.bench import machine, measure
    from traces.predictor.network import device_named, load_predictor

    if batch == []:
        raise InputError("--batch: no size; expected one or more")
    stored = load_predictor(predictor, device_named(device))
    found = measure(stored, batch or [1, 4, 16, 32], prompt_tokens, repeats=repeats)
    where = machine(stored)
    print(f"# {predictor.name}: {stored.record['parameters']:,} weights, on {where}; medians of {repeats}")
    for one in found:
        print(
            f"# batch {one['batch']}: {one['step_us']:,.0f} us a token of each sequence, "
            + (f"{one['graph_us']:,.0f} us as a CUDA graph, " if one["graph_us"] else "")
            + f"{one['prefill_us']:,.0f} us a prompt of {prompt_tokens}"
        )
    way, least = ("a step", "step_us") if found[0]["graph_us"] is None else ("a step as a CUDA graph", "graph_us")
    print(
        f"[path_us]\nvalue = {found[0][least]}\n"
        f'source = "path predictor of {stored.record["parameters"]:,} weights, {way} of batch {found[0]["batch"]} '
        f'on {where}"\nmeasured = true'
    )
