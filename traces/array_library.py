"""Arithmetic on arrays where they lie: NumPy's on the host, torch's for tensors on a GPU, by the same names."""

from typing import Any

import numpy as np


def library(array: Any) -> Any:
    """The module whose functions work on ``array``: numpy, or torch for a tensor."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def numbers(array: Any, kind: str = "float32") -> Any:
    """Numbers as those of ``kind``, where they lie."""
    return np.asarray(array, kind) if isinstance(array, np.ndarray) else array.to(getattr(library(array), kind))


def beside(array: np.ndarray, other: Any) -> Any:
    """An array of the host where ``other`` lies."""
    return array if isinstance(other, np.ndarray) else library(other).from_numpy(array).to(other.device)


def on_host(array: Any) -> np.ndarray:
    """An array as NumPy's."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu().numpy())


def alike(array: Any, other: Any) -> Any:
    """Numbers as float32 where ``other`` lies, whichever of the two is a tensor."""
    if isinstance(array, np.ndarray) == isinstance(other, np.ndarray):
        return numbers(array)
    return beside(np.array(on_host(numbers(array))), other)  # a copy: of a file that is read, torch would warn


def nearest(similarity: Any, count: int) -> tuple[Any, Any]:
    """Columns (n, count) of the largest values of each row, in no order, and the values."""
    if not isinstance(similarity, np.ndarray):
        values, columns = similarity.topk(count, dim=1)
        return columns, values
    columns = np.argpartition(-similarity, count - 1, axis=1)[:, :count]
    return columns, np.take_along_axis(similarity, columns, axis=1)


def best_first(scores: Any) -> Any:
    """Columns (n, m) of each row by falling value, lower ones first among equals."""
    if not isinstance(scores, np.ndarray):
        return scores.argsort(dim=1, descending=True, stable=True)
    return np.argsort(-scores, axis=1, kind="stable")
