"""Functions of other libraries, which compiled code calls by their addresses."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def _call(typing: Any, address: Any, arguments: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        where, numbers = given
        wide = ir.IntType(64)
        function = ir.FunctionType(ir.IntType(32), [wide] * len(arguments))
        result = builder.call(builder.inttoptr(where, function.as_pointer()), cgutils.unpack_tuple(builder, numbers))
        return builder.sext(result, wide)

    return types.int64(types.int64, arguments), generate


call = cast(Callable[[int, tuple[int, ...]], int], _call)
"""Calls the C function at an address with a tuple of 64-bit integers; returns its 32-bit result."""
