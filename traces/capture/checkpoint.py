"""A Hugging Face checkpoint: load it for capture and say what it is."""

import hashlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ground.addresses import check_torch
from ground.errors import InputError
from ground.foreign_code import DEBUG, errors_name
from ground.progress import say
from ground.text import first_words
from traces.arrays import shown
from traces.models.known import builtin_decoder, resolve_model

RECORD_FILE = "training.json"
BASIS_FILE = "embedding_basis.npz"

_NO_MODEL = "not a model that can be captured"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # never pickled weights


def located(model: str | Path) -> Path:
    """The folder of a checkpoint: ``model`` itself, or where the Hugging Face hub's client keeps its copy of that name.

    Raises InputError if it is neither a folder with a config.json nor a name that the hub gives.
    """
    folder = Path(model)
    if not folder.exists() and _HUB_NAME.fullmatch(str(model)):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(model), allow_patterns=list(_HUB_FILES)))
        except Exception as error:  # the hub's client raises errors of many libraries
            raise InputError(f"{model}: no such folder, and the hub does not give it ({first_words(error)})") from None
    if folder.is_file():
        raise InputError(f"{folder}: is a file; expected the folder of a checkpoint")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no checkpoint of a model (config.json is not there)")
    check_torch()  # which whoever asks is about to import
    return folder


def model_name(model: str | Path) -> str:
    """What to call a checkpoint: the last part of its name, that of the repository for a copy of the hub's."""
    path = Path(model)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.rpartition("--")[2]
    return path.resolve().name if path.exists() else path.name


def basis_place(folder: Path, beside: Path) -> Path:
    """Where a model's embedding basis lies: with the checkpoint, or ``beside`` the output if that cannot be written."""
    place = folder / BASIS_FILE
    return place if place.exists() or os.access(folder, os.W_OK) else beside / BASIS_FILE


def skeleton(folder: Path) -> Any:
    """A checkpoint's model without weights, on torch's meta device: what modules it has, before anything is loaded.

    Raises InputError if the folder is no checkpoint of a model.
    """
    import torch

    with errors_name(str(folder), _NO_MODEL, "free some"), _quietly(), torch.device("meta"):
        kind, config = _architecture(folder)
        return kind.from_config(config).eval()


def load_tokenizer(folder: Path) -> Any:
    """A checkpoint's tokenizer. Raises InputError if there is none that transformers can read."""
    from transformers import AutoTokenizer

    with errors_name(str(folder), "no tokenizer that can be read", "free some"), _quietly():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _architecture(folder: Path) -> tuple[Any, Any]:
    """The class that makes models of a checkpoint's kind, and its configuration: the part that writes text."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM, config
    config = getattr(config, "thinker_config", config)  # of a model that speaks as well
    # Models that see or hear as well as read have classes of their own.
    kinds: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    return next((kind for kind in kinds if type(config) in kind._model_mapping), kinds[0]), config


def load(folder: Path, experts_implementation: str | None = None, device: str = "auto") -> tuple[Any, Any]:
    """A checkpoint's model and tokenizer, as `load_model` and `load_tokenizer` give them."""
    return load_model(folder, experts_implementation, device), load_tokenizer(folder)


def load_model(folder: Path, experts_implementation: str | None = None, device: str = "auto") -> Any:
    """A checkpoint's model, in its stored precision, eval mode.

    ``device`` is cuda, cpu, auto, or spread: over all GPUs and host memory, as accelerate does it. MXFP4 experts are
    unpacked: their kernels bypass the router. Raises InputError if the folder is no checkpoint that can be captured,
    or lacks weights, which transformers would make up.
    """
    import torch
    from transformers.utils.quantization_config import Mxfp4Config

    options: dict[str, Any] = {"experts_implementation": experts_implementation} if experts_implementation else {}
    if device == "spread":
        options["device_map"] = "auto"
    with errors_name(str(folder), _NO_MODEL, "--device spread may help"), _quietly():
        kind, config = _architecture(folder)
        quantised = getattr(config, "quantization_config", None) or {}
        if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        options |= {"ignore_mismatched_sizes": True, "output_loading_info": True, "local_files_only": True}
        model, found = kind.from_pretrained(folder, config=config, dtype="auto", **options)
        _refuse_made_up(folder, found)
    if device != "spread":
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        with errors_name(str(folder), f"cannot be moved to device {device!r}", "--device spread may help"):
            model.to(torch.device(device))
    return model.eval()


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' own words, and its bars where nobody watches: what is wrong is one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not os.environ.get(DEBUG):
        logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _refuse_made_up(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise InputError for tensors that the files lack or have in another shape; ``found`` is transformers' account."""
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        shapes = (" x ".join(map(str, shape)) for shape in (stored, wanted))
        raise InputError("{}: {} is {}; expected {} by config.json".format(folder, name, *shapes))
    if missing := sorted(found["missing_keys"]):
        raise InputError(f"{folder}: its files lack {len(missing)} tensors, {missing[0]} is one; expected all of them")


def weight_bytes(folder: Path) -> int:
    """Bytes of a checkpoint's weights as its files say, 0 where they do not."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        whole = folder / "model.safetensors"
        return whole.stat().st_size if whole.is_file() else 0


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every token id that ends a sequence, by the generation settings, the configuration and the tokenizer."""
    ends: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ends.update(value if isinstance(value, list) else [value] if value is not None else [])
    return ends


def provenance(folder: Path, name: str, model: Any, seed: int, sha256: str) -> dict[str, Any]:
    """What a trace's meta says of the model, whose weights have this ``sha256``, the software and the hardware.

    ``model`` still lacks what its routes tell, see :func:`named_by_shape`. Raises InputError for a record of training
    that cannot be read.
    """
    import torch
    import transformers

    trained = _training_record(folder)
    captured: dict[str, Any] = {
        "what": trained.get("what") or f"{type(model).__name__} from the checkpoint {in_words(name)}",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": str(model.dtype).removeprefix("torch."),
        "experts_implementation": getattr(model.config, "_experts_implementation", None),
        "checkpoint_sha256": sha256,
        "seed": seed,
    }
    if trained:
        captured |= {"topology": trained["topology"], "trained": trained["training"]}
        model_meta = {"name": trained["topology"]["name"]}
    else:
        model_meta = {"name": in_words(name), "config": _config(model, folder)}
    hardware = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else platform.processor()
    return {
        "schema": 1,
        "model": model_meta,
        "captured": captured,
        "software": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "numpy": np.__version__,
        },
        "hardware": hardware or platform.machine(),
    }  # fmt: skip


def _training_record(folder: Path) -> dict[str, Any]:
    """The record that ``python -m traces train`` left beside a checkpoint; empty where there is none."""
    path = folder / RECORD_FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found["topology"]["name"], str) and isinstance(found["training"], dict):
            return dict(in_words(found))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass
    raise InputError(f"{path}: no record of training; expected JSON with topology.name and training, or no such file")


def named_by_shape(model: dict[str, Any], layers: int) -> dict[str, Any]:
    """A meta's ``model`` with its experts and top_k, of ``layers`` routed layers.

    It has the checkpoint's name, unless that is a known model's of another shape, whose sizes it must not get.
    """
    known = builtin_decoder(model["name"])
    shape = layers, model["experts"], model["top_k"]
    if "config" not in model or known is None or (known.routed_layers, known.experts, known.top_k) == shape:
        return model
    return model | {"name": f"{model['name']} ({model['config'].get('model_type')} of another size)"}


def say_unknown_costs(model: Mapping[str, Any], layers: Sequence[int]) -> None:
    """Say on standard error if the simulator could not read costs of a meta's ``model`` with these routed layers."""
    try:
        resolve_model(model, layers)
    except InputError as wrong:
        reason = str(wrong).partition("; expected one of")[0]
        say(f"{reason}: what this model costs is unknown, so say whose costs to charge when you simulate: --model NAME")


def _config(model: Any, folder: Path) -> dict[str, Any]:
    """The configuration with its class's defaults filled in, as strict JSON, types of numbers by their plain names.

    What it says of quantisation is that of the file, whose bytes an expert costs, even if experts ran unpacked.
    """
    plain = in_words(model.config.to_dict())
    stored = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config")
    if stored:
        plain["quantization_config"] = in_words(stored)
    for part in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                part[key] = part[key].removeprefix("torch.")
    return dict(plain)


def in_words(value: Any) -> Any:
    """``value`` as strict JSON holds it: odd floats, bytes that are no UTF-8 and objects of any class as text."""
    if isinstance(value, dict):
        return {str(in_words(key)): in_words(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [in_words(inner) for inner in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return shown(str(value)).encode("utf-8", "backslashreplace").decode()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Refuse weight files that are written to, replaced or removed meanwhile: what is loaded is what is hashed.

    Raises InputError naming one of them.
    """
    before = _stamps(folder)
    yield
    if wrong := sorted(before.items() ^ _stamps(folder).items()):
        raise InputError(f"{folder / wrong[0][0]}: changed while it was read; expected a file that nothing writes to")


def _stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """What changes with a weight file, by name."""
    found = {path.name: path.stat() for path in folder.glob("*.safetensors")}
    return {
        name: (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for name, one in found.items()
    }


def checkpoint_sha256(folder: Path) -> str:
    """Hash of a checkpoint's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
