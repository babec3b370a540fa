"""Records in memory that compiled functions reach by address.

numba hands an array to a function as seven words; a machine of a dozen arrays would be copied at every call. Here one
record holds the addresses of the others, and a function is handed that record alone, by reference. Whoever makes an
address keeps its array alive for as long as compiled code may use it.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic


def records_of(dtype: np.dtype) -> Callable[[int, int], Any]:
    """A compiled function of an address and an index: the record of ``dtype`` there, to be read and written."""
    record = from_dtype(dtype)

    @intrinsic
    def at(typing: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base, place = arguments
            where = builder.add(base, builder.mul(place, ir.Constant(base.type, dtype.itemsize)))
            return builder.inttoptr(where, context.get_value_type(record))

        return record(types.int64, types.int64), generate

    return cast(Callable[[int, int], Any], at)


def address(array: np.ndarray) -> int:
    """Where the first record of ``array`` lies."""
    assert array.flags.c_contiguous
    return array.ctypes.data
