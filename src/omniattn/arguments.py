"""Checks of single arguments, for every room that takes them from a caller: numbers, flags, addresses; limits."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from .arrays import Tensor
from .errors import AlignmentError, ArgumentError

MAX_HEAD_DIM = 256
#: Rows of one tensor; the kernels count rows in 32 bits and round up to whole tiles.
MAX_ROWS = 2**31 - 512
#: Sequences and heads: the kernels count them in 32 bits.
MAX_EXTENT = 2**31 - 1
#: Largest number that the kernels' fp32 arithmetic keeps.
_MOST_FP32 = 3.4028234e38


def check_bool(value: Any, argument: str, function: str) -> bool:
    # numpy.bool_ is no bool, but as good as one.
    if isinstance(value, bool) or (type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy"):
        return bool(value)
    raise ArgumentError(argument, "True or False", repr(value), function=function)


def check_int(value: Any, argument: str, function: str, *, least: int = 0, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool) or (most is not None and number > most):
        expected = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
        raise ArgumentError(argument, expected, repr(value), function=function)
    return number


def check_number(value: Any, argument: str, function: str, *, least: float | None = None) -> float:
    expected = "a finite number" if least is None else f"a finite number >= {least:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentError(argument, expected, repr(value), function=function)
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction beyond every float
        number = math.inf
    # Written so that NaN fails, and so that torch.compile, whose numbers may be symbols, can read it.
    if not (abs(number) <= _MOST_FP32 and (least is None or number >= least)):
        raise ArgumentError(argument, expected, repr(value), function=function)
    return number


def check_alignment(t: Tensor, function: str, multiple: int = 16) -> None:
    if t.ptr % multiple != 0 and 0 not in t.shape:
        raise AlignmentError(
            t.argument,
            f"an address that is a multiple of {multiple} bytes",
            hex(t.ptr),
            function=function,
            hint="A contiguous copy is aligned",
        )
