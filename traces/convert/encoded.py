"""Routes as engines put them into JSON: lists, the base64 of an .npy, the base64 of bare integers, or an envelope."""

import base64
import binascii
import io
import math
import tokenize
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ground.errors import InputError
from traces.convert.shapes import Given
from traces.models.known import builtin_decoder, builtin_models

_NAMES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_BARE = ("int32", "uint16", "uint8", "int64")  # SGLang's types, where it does not say which: the first at first


def decoded(value: Any, where: str, given: Given, *, rows: int | None = None, dtype: str | None = None) -> np.ndarray:
    """(rows, L, k) integers of one request. Bare integers are shaped by the model and by how many ``rows`` there are.

    Raises InputError.
    """
    if isinstance(value, dict):
        return _enveloped(value, where)
    if isinstance(value, list):
        try:
            array = np.array(value)
        except ValueError:
            raise InputError(f"{where}: lists of unequal lengths, expected (rows, layers, k)") from None
    elif isinstance(value, str):
        data = _bytes(value, where)
        if not data.startswith(npy.MAGIC_PREFIX):
            return _bare(data, where, given, rows, dtype)
        stream = io.BytesIO(data)
        try:
            array = npy.read_array(stream, allow_pickle=False)
        except (ValueError, EOFError, SyntaxError, TypeError, KeyError, tokenize.TokenError) as error:
            raise InputError(f"{where}: a damaged .npy in base64 ({str(error).splitlines()[0]:.80})") from None
        if stream.read(1):
            raise InputError(f"{where}: an .npy in base64 that is longer than its header says")
    else:
        raise InputError(f"{where}: {value!r:.40}, expected lists or base64 text")
    if array.dtype.kind not in "iu" or array.ndim != 3 or not array.size:
        raise InputError(f"{where}: {array.dtype} of shape {array.shape}, expected integers (rows, layers, k)")
    return _narrowed(array)


def _narrowed(array: np.ndarray) -> np.ndarray:
    """The same ids in 16 bits where lists made them wider."""
    fits = array.dtype.itemsize > 2 and array.min() >= -(2**15) and array.max() < 2**15
    return array.astype(np.int16) if fits else array


def _bytes(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{where}: no base64 text ({error})") from None


def _enveloped(value: dict[str, Any], where: str) -> np.ndarray:
    """The integers of an envelope {data, shape, dtype}, as Dynamo sends them."""
    shape, dtype = value.get("shape") or [], np.dtype(_integer(value.get("dtype"), where)).newbyteorder("<")
    whole = isinstance(shape, list) and len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)
    if not whole or not isinstance(value.get("data"), str):
        raise InputError(f"{where}: an envelope of shape {shape!s:.40}, expected data of (rows, layers, k)")
    data = _bytes(value["data"], where)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise InputError(f"{where}: {len(data)} bytes for shape {tuple(shape)} of {dtype}")
    return _narrowed(np.frombuffer(data, dtype).reshape(shape))


def _bare(data: bytes, where: str, given: Given, rows: int | None, dtype: str | None) -> np.ndarray:
    """Integers without a shape, as SGLang sends them: rows x layers x k of the model that fits."""
    names = _BARE if rows is not None else _BARE[:1]
    if dtype is not None:
        names = (_integer(dtype, where),)
    fits = set()
    for layers, k in _shapes(given):
        for name in names:
            count, rest = divmod(len(data), layers * k * np.dtype(name).itemsize)
            if not rest and count and (rows is None or count in (rows, rows + 1)):
                fits.add((count, layers, k, name))
    if len(fits) != 1 and rows is not None:  # a model of which both all layers and the routed ones would do is no doubt
        fits = {fit for fit in fits if fit[0] == rows} or fits
    if len(fits) != 1:
        many = f"{len(data)} bytes" + ("" if rows is None else f" for {rows} rows")
        which = "the shapes of several models" if fits else "no shape of " + (given.model or "a known model")
        raise InputError(f"{where}: {many} without a shape fit {which}, expected --model, a name or its config.json")
    ((count, layers, k, name),) = fits
    return _narrowed(np.frombuffer(data, np.dtype(name).newbyteorder("<")).reshape(count, layers, k))


def _integer(name: Any, where: str) -> str:
    """The name of an integer type, as engines call it; raises InputError."""
    plain = str(name).removeprefix("torch.").removeprefix("numpy.")
    if plain not in _NAMES:
        raise InputError(f"{where}: routes of dtype {name!s:.20}, expected one of {', '.join(_NAMES)}")
    return plain


def _shapes(given: Given) -> Iterator[tuple[int, int]]:
    """Layers, of a whole model or routed ones alone, and experts a token that routes may be of."""
    named = None if given.recorded is None else given.recorded.spec
    for spec in [named] if given.recorded is not None else map(builtin_decoder, builtin_models()):
        if spec is not None:
            yield from {(spec.layers, spec.top_k), (spec.routed_layers, spec.top_k)}
