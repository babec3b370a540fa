"""Commands that list what is built in, or show one of it."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from rich.console import RenderableType

from ground.command_line import Help
from ground.errors import InputError
from ground.files import keep_apart
from ground.output import show, written
from ground.whole_number import WholeNumber
from sim.machine.hardware import DEFAULT_HARDWARE
from sim.run.scene import Quantisation

Json = Annotated[str | None, Help("write the report as JSON here, - is standard output", allow_leading_hyphen=True)]
_Toml = Annotated[bool, Help("print the profile's file, to begin one of yours with")]
_Shown = tuple[Callable[..., RenderableType], Callable[..., object]]
"""What shows something to a person, and to a program."""


def policies(
    name: Annotated[str | None, Help("one policy in full: a name or module:Class")] = None, /, *, json: Json = None
) -> None:
    """List the policies, their parameters and what they need of a trace, or show one with what its parameters mean.

    For example:

    ```
    python -m sim policies
    python -m sim policies popularity
    ```
    """
    from sim.report.catalogue import policies_json, policies_table, policy_json, policy_view

    _list(name, json, (policies_table, policies_json), (policy_view, policy_json))


def models(
    name: Annotated[
        str | None,
        Help("one model in full: a built-in name, a config.json, a .gguf, or the index of .safetensors"),
    ] = None, /, *,
    quant: Quantisation = None, json: Json = None,
) -> None:  # fmt: skip
    """List the built-in models, or show one with its sizes.

    For example:

    ```
    python -m sim models
    python -m sim models qwen3-30b-a3b
    python -m sim models qwen3-30b-a3b --quant q4_k_m
    ```
    """
    from sim.report.catalogue import model_json, model_table, models_json, models_table

    if quant is not None and name is None:
        raise InputError("--quant: expected the name of one model with it")
    one = partial(model_table, quant=quant), partial(model_json, quant=quant)
    _list(name, json, (models_table, models_json), one)


def hardware(
    name: Annotated[str | None, Help("one profile in full: a built-in name or a .toml file")] = None,
    /,
    *,
    toml: _Toml = False,
    json: Json = None,
) -> None:
    """List the built-in hardware profiles, or show one with the source of every figure.

    What each field means, with a card of one's own as an example: docs/hardware.md. For example:

    ```
    python -m sim hardware
    python -m sim hardware h200
    python -m sim hardware rtx-4090 --toml > mine.toml
    ```
    """
    from sim.machine.hardware import Hardware, hardware_text
    from sim.report.catalogue import hardware_json, hardware_table, machine_json, machine_table

    if toml:
        return _print_file(name, json, hardware_text, Hardware.parse)
    _list(name, json, (hardware_table, hardware_json), (machine_table, machine_json))


def hosts(
    name: Annotated[str | None, Help("what one expert takes on one host: ddr5-5600x2, or a .toml file")] = None,
    /,
    *,
    model: Annotated[str, Help("whose expert")] = "qwen3-30b-a3b",
    quant: Quantisation = None,
    link: Annotated[str, Help("what a copy of it crosses instead")] = "pcie4x16",
    json: Json = None,
) -> None:
    """List the hosts that can compute experts, or show what one expert takes on one of them.

    For example:

    ```
    python -m sim hosts
    python -m sim hosts ddr5-5600x2 --model qwen3-30b-a3b
    ```
    """
    from sim.report.hosts import host_json, host_table, hosts_json, hosts_table

    table = partial(host_table, model=model, quant=quant, link=link)
    data = partial(host_json, model=model, quant=quant, link=link)
    _list(name, json, (hosts_table, hosts_json), (table, data))


def software(
    name: Annotated[str | None, Help("one profile: a built-in name or a .toml file")] = None,
    /,
    *,
    toml: _Toml = False,
    json: Json = None,
) -> None:
    """List the software profiles, which say what predictions cost, or show one; every figure with its source.

    For example:

    ```
    python -m sim software
    python -m sim software paper
    python -m sim software paper --toml > mine.toml
    ```
    """
    from sim.machine.prediction_costs import PredictionCosts, software_text
    from sim.report.catalogue import costs_json, software_json, software_table

    if toml:
        return _print_file(name, json, software_text, PredictionCosts.parse)
    _list(name, json, (software_table, software_json), (software_table, costs_json))


def memory(
    model: Annotated[str, Help("a built-in name, a config.json, a .gguf, or the index of .safetensors")],
    /,
    *,
    hardware: Annotated[str, Help("the card: a built-in name or a profile, .toml")] = DEFAULT_HARDWARE,
    quant: Quantisation = None,
    kv: Annotated[str, Help("the format of cached keys and values: bf16, q8_0, q4_0, ...")] = "bf16",
    context: Annotated[list[WholeNumber] | None, Help("tokens of a sequence; default: 4096 to 131072")] = None,
    batch: Annotated[WholeNumber, Help("sequences at once")] = 1,
    reserve: Annotated[str | None, Help("what stays free; default: 1024MiB")] = None,
    json: Json = None,
) -> None:
    r"""Show what a card's memory leaves for experts, by the context that it keeps keys and values for.

    For example:

    ```
    python -m sim memory qwen3-30b-a3b --hardware rtx-3060 --quant q4_k_m
    python -m sim memory gpt-oss-20b --hardware rtx-4070 \
        --context 8192 131072 --kv q8_0
    ```
    """
    from sim.report.memory import CONTEXTS, memory_json, memory_table

    asked = model, hardware, quant, kv, tuple(context or CONTEXTS), batch, reserve
    with written(json) as write:
        write(memory_json(*asked))
    show(memory_table(*asked), json)


def _list(name: str | None, json: str | None, every: _Shown, one: _Shown) -> None:
    """Show all that there is of a kind, or the one that is named."""
    keep_apart([name], {"--json": json})
    (view, data), names = (every, ()) if name is None else (one, (name,))
    seen = view(*names)
    with written(json) as write:
        write(data(*names))
    show(seen, json)


def _print_file(
    name: str | None, json: str | None, read: Callable[[str], bytes], parse: Callable[[bytes, str], object]
) -> None:
    """Print the file of the profile that is named, if it is a valid one."""
    if name is None or json is not None:
        raise InputError("--toml: expected the name of one profile, and no --json")
    text = read(name)
    parse(text, name)
    print(text.decode("utf-8"), end="")
