"""Where the repository lies."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
