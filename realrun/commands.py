"""``replay``, ``generate`` and ``lookup``: from what a person typed to a report on the terminal and in a file."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ground.errors import InputError
from ground.files import keep_apart
from ground.output import show, written
from ground.progress import Watch, say
from ground.text import printable_lines
from realrun.device.faults import RunError
from realrun.engine.replay import interruptible, run
from realrun.engine.rig import open_rig
from realrun.engine.small_scene import small_scene
from realrun.options import GenerateOptions, ReplayOptions, host_bytes_of
from sim.policies.named import NamedPolicy
from sim.report.metrics import Report
from sim.report.tables import Comparison, report_view
from sim.run.prepared import prepare


def replay_command(options: ReplayOptions) -> None:
    """Replay a trace under each policy on one rig, print the report (of several: a table), write JSON.

    Raises InputError; KeyboardInterrupt, after what was measured so far is out, where a person stopped it.
    """
    keep_apart(options.files, {"--json": options.json})
    if not options.policy:
        raise InputError("--policy: expected at least one")
    wanted = [NamedPolicy.of(label, "--set", options.set_) for label in options.policy]
    learns = any(one.kind.learns for one in wanted)
    here = small_scene(options, options.scale, options.steps, learns=learns)
    runs = [prepare(here, one.name, one.values) for one in wanted]
    limit, total = host_bytes_of(options.host_memory), here.work.schedule.n_steps
    reports: list[Report] = []
    with written(options.json) as write:
        with open_rig(
            here.model, options.device, shared=options.shared, limit=limit, seed=options.seed, say=say
        ) as rig, interruptible() as stop, Watch("replay") as watch:  # fmt: skip
            for one in runs:
                progress = lambda steps, name=one.policy.name: watch.at(steps / total, name)  # noqa: E731
                try:
                    reports.append(run(one, rig, check=options.check, stop=stop, progress=progress))
                except KeyboardInterrupt:  # before its first step was over
                    if not (stop() and reports):
                        raise
                if stop():
                    break
        show(Comparison(reports) if len(reports) > 1 else report_view(reports[0]), options.json)
        data = [report.to_json() for report in reports]
        write(data if len(runs) > 1 else data[0])  # after the report is out: a disk may be full
    if len(reports) < len(runs) or not reports[-1].settings["complete"]:
        raise KeyboardInterrupt


def generate_command(options: GenerateOptions) -> None:
    """Generate text with a model's experts offloaded, print it, and what it took on standard error.

    Whatever can be seen to be wrong before the model's weights are loaded is refused then.

    Raises InputError for a checkpoint or a policy that cannot be run so, SlotFault if a check fails, and with
    ``compare`` RunError if the tokens are not those of the resident model.
    """
    from realrun.device.devices import refuse_too_little
    from realrun.device.host_memory import free_host_bytes
    from realrun.device.open_device import open_device
    from realrun.generate.offloader import Offloader, refuse_new_prefill, resident_tokens
    from realrun.generate.options import OffloadOptions
    from traces.capture import checkpoint
    from traces.embeddings import Basis
    from traces.trace import Trace

    keep_apart([options.model or None, *options.profile], {"--json": options.json})
    if not options.model:
        raise InputError("--model '': expected a checkpoint's folder, or its name on the hub")
    if options.tokens < 1:
        raise InputError(f"--tokens {options.tokens}; expected at least 1")
    if options.seed < 0:
        raise InputError(f"--seed {options.seed}; expected at least 0")
    prompt = _text(options.prompt)
    policy = NamedPolicy.of(options.policy, "--set", options.set_)
    offload = OffloadOptions(
        policy.name, policy.values, options.cache,
        [Trace.load(path).select("profile") for path in options.profile], seed=options.seed, check=options.check,
        limit=host_bytes_of(options.host_memory),
    )  # fmt: skip
    offload.refuse()
    folder = checkpoint.located(options.model)
    keep_apart([folder], {"--json": options.json})
    known = folder / checkpoint.BASIS_FILE
    basis = Basis.load(known) if known.is_file() else None
    bones = checkpoint.skeleton(folder)
    offload.refuse_for(bones, basis)
    tokenizer = checkpoint.load_tokenizer(folder)
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError(f"--prompt {prompt!r}: no token in it; expected a text")
    _refuse_positions(bones, len(ids), options.tokens)
    refuse_new_prefill(bones, len(ids), options.tokens)
    weights = checkpoint.weight_bytes(folder)
    refuse_too_little(f"host memory for the weights of {folder}", weights, free_host_bytes(), "free some")
    with written(options.json) as write, open_device(options.device) as device:
        model = checkpoint.load_model(folder, device="cpu")
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        eos = checkpoint.end_tokens(model, tokenizer)
        expected = resident_tokens(model, device, ids, options.tokens, pad, eos) if options.compare else None
        with Offloader(model, device, offload, basis) as offloader:
            result = offloader.generate(ids, options.tokens, pad, eos)
        text = tokenizer.decode(result.tokens)
        if expected is not None and result.tokens != expected:
            raise RunError(f"the tokens are not those of the resident model: {result.tokens[:8]}, {expected[:8]}")
        summary = {"policy": policy.name, **result.summary(), "device": device.name, "compared": expected is not None}
        write({**summary, "text": text, "token_ids": result.tokens})
    if options.json != "-":
        print(printable_lines(text))
    say("; ".join(f"{key.replace('_', ' ')} {value}" for key, value in summary.items()))


def _text(prompt: str) -> str:
    """A prompt as it was typed, whatever the locale. Raises InputError where that is not UTF-8."""
    try:
        return os.fsencode(prompt).decode("utf-8")
    except UnicodeError:
        raise InputError(f"--prompt {prompt!r:.60}: not UTF-8; expected a text in it") from None


def _refuse_positions(model: Any, prompt: int, tokens: int) -> None:
    """Raise InputError for more tokens than ``model`` has positions for after a prompt of so many."""
    room = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    before = 1 if getattr(model.config, "is_encoder_decoder", False) else prompt  # an encoder takes the prompt
    if room is None or before + tokens <= room:
        return
    if before >= room:
        raise InputError(f"--prompt: {prompt} tokens; expected fewer than the {room} positions that the model has")
    raise InputError(f"--tokens {tokens}: the model has {room} positions; expected at most {room - before}")


def lookup_command(out: Path | None, device: str, command: str) -> None:
    """Time every way of looking up in two tables, print them, write ``out`` as JSON. Raises InputError."""
    from rich.console import Console
    from rich.table import Column, Table

    from realrun.calibrate.lookup_ways import DIMS, ENTRIES, NEAREST, TABLES, ways
    from realrun.calibrate.machine import Machine
    from realrun.validate.record import made_by

    keep_apart([], {"--json": out})
    machine = Machine(device)
    with written(None if out is None else str(out)) as write:
        found, floor = ways(machine)
        names = ("alone us", "in a row us", "over the floor", "largest error")
        table = Table(
            "way", *(Column(name, justify="right") for name in names),
            title=f"{TABLES} tables of {ENTRIES:,} x {DIMS:,} bf16, the {NEAREST} nearest of each; "
            f"{floor / 1e3:.1f} us by bytes at the rate that reading a matrix reaches",
        )  # fmt: skip
        for way in found:
            best = way.row or way.alone
            row = f"{way.row.ns / 1e3:.1f}" if way.row else "–"
            table.add_row(way.name, f"{way.alone.ns / 1e3:.1f}", row, f"{best.ns / floor:.2f}", f"{way.wrong:.1e}")
        Console(width=120).print(table)
        made = {"command": command, "provenance": made_by(machine)}
        write(made | {"floor_us": floor / 1e3, "ways": [asdict(way) for way in found]})
