"""A Hugging Face checkpoint: load it for capture and say what it is."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import InputError

RECORD_FILE = "training.json"


def load(model_dir: str | Path, experts_implementation: str | None = None, device: str = "auto") -> tuple[Any, Any]:
    """A checkpoint's model (in its stored precision, eval mode) and tokenizer.

    Raises InputError if the folder is no checkpoint, or its router or experts are quantised.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(model_dir)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: no checkpoint of a model (config.json is not there)")
    options = {"experts_implementation": experts_implementation} if experts_implementation else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise InputError(f"{folder}: not a model that can be captured ({' '.join(str(error).split())[:200]})") from None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(torch.device(device))
    return model.eval(), tokenizer


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Every token id that ends a sequence, by the generation settings, the configuration and the tokenizer."""
    ends: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ends.update(value if isinstance(value, list) else [value] if value is not None else [])
    return ends


def provenance(folder: Path, model: Any, seed: int) -> dict[str, Any]:
    """What a trace's meta says of the model, the software and the hardware it was captured with."""
    import torch
    import transformers

    config = model.config
    record = folder / RECORD_FILE
    trained = json.loads(record.read_text("utf-8")) if record.is_file() else {}
    experts, top_k = _counts(model)
    captured: dict[str, Any] = {
        "what": trained.get("what") or f"{type(model).__name__} from {folder.name}, as published",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": str(model.dtype).removeprefix("torch."),
        "experts_implementation": getattr(config, "_experts_implementation", None),
        "checkpoint_sha256": checkpoint_sha256(folder),
        "seed": seed,
        "probabilities": "softmax of the router's logits over all experts",
    }
    if trained:
        captured["topology"] = trained["topology"]
        captured["trained"] = trained["training"]
        model_meta = {"name": trained["topology"]["name"], "experts": experts, "top_k": top_k}
    else:
        model_meta = {"name": folder.name, "experts": experts, "top_k": top_k, "config": _plain(config.to_dict())}
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


def _counts(model: Any) -> tuple[int, int]:
    """Experts of a layer and experts a token, from the configuration under the names in use."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    found = []
    for names in (
        ("num_local_experts", "num_experts", "n_routed_experts"),
        ("num_experts_per_tok", "num_experts_per_token", "top_k"),
    ):
        value = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)
        if value is None:
            raise InputError(f"{type(config).__name__}: none of {', '.join(names)} in the configuration")
        found.append(int(value))
    return found[0], found[1]


def _plain(value: Any) -> Any:
    """A configuration as strict JSON."""
    return json.loads(json.dumps(value, default=str))


def checkpoint_sha256(folder: Path) -> str:
    """Hash of a checkpoint's weight files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()
