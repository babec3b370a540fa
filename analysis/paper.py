"""The papers whose claims are held against replays, and what their experiments run on where nothing else is asked for.

What each reports is in ``papers/NAME.toml`` (``analysis.published``).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.machine.hardware import DEFAULT_HARDWARE
from sim.run.scene import bundled_traces
from traces.trace import Trace


@dataclass(frozen=True)
class Paper:
    """One paper: ``name`` of its report, the machine that it measured on, and the models of its traces here.

    ``embedded``: only traces that hold embeddings are its own.
    """

    name: str
    hardware: str
    models: tuple[str, ...]
    embedded: bool = False

    @property
    def traces(self) -> list[Path]:
        """The bundled traces of its models."""
        return [path for path in bundled_traces() if self._of_its_own(Trace.load_meta(path))]

    def _of_its_own(self, meta: dict[str, Any]) -> bool:
        return meta["model"]["name"] in self.models and ("embedding" in meta or not self.embedded)


DOMOE = Paper(
    "domoe", DEFAULT_HARDWARE, ("mixtral-8x7b", "phi-3.5-moe", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b"), embedded=True
)
EXPERTFLOW = Paper(
    "expertflow",
    "a40",
    (
        "switch-base-32", "switch-base-64", "switch-base-128", "deepseek-moe-16b", "qwen1.5-moe-a2.7b", "mixtral-8x7b",
    ),
)  # fmt: skip
STRANGERS = Paper("strangers", "each row's machine", ("mixtral-8x7b",))
"""No paper: speeds that strangers published, each on a machine of its own (strangers.toml)."""
PAPERS = {paper.name: paper for paper in (DOMOE, EXPERTFLOW, STRANGERS)}
