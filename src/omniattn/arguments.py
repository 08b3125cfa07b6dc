"""Checks of single arguments, for every room that takes them from a caller: numbers, flags, addresses; limits."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from . import arrays
from .arrays import Tensor
from .errors import AlignmentError, ArgumentError

#: Channels of a head of q and k, and of v.
MAX_HEAD_DIM = 512
#: The same of what has 8 or 4 bits: quantized operands, e4m3 arrays, quantized caches.
MAX_QUANTIZED_HEAD_DIM = 256
#: Rows of one tensor; the kernels count rows in 32 bits and round up to whole tiles.
MAX_ROWS = 2**31 - 512
#: Sequences and heads: the kernels count them in 32 bits.
MAX_EXTENT = 2**31 - 1
#: What options are called that multiply the scores, here and in `compat`.
SCALES_OF_SCORES = frozenset({"softmax_scale", "scale", "sm_scale"})
#: Largest number that the kernels' fp32 arithmetic keeps.
_MOST_FP32 = 3.4028234e38


def shape_of(value: Any) -> Any:
    """The shape of an array; None of anything else, and of a nested tensor, which may not be asked for one."""
    try:
        return getattr(value, "shape", None)
    except RuntimeError:
        return None


def plain(value: Any, argument: str, function: str) -> Any:
    """The Python number in a scalar of any library: an array without dimensions, of torch, NumPy, CuPy or JAX, or a
    NumPy scalar. Anything else, and a tracer, comes as it is.

    Reading a value that lies on a GPU waits for that GPU.
    """
    if value is None or isinstance(value, (bool, int, float, str, tuple)) or shape_of(value) != ():
        return value
    if arrays.has_tracer((value,)):
        return value
    if arrays.needs_gradient((value,)):
        learned = "A scale of the scores that is learned belongs to q: multiply q by it"
        raise ArgumentError(
            argument, "a number, which has no gradient", "a tensor that requires a gradient", function=function,
            hint=learned if argument in SCALES_OF_SCORES else None,
        )  # fmt: skip
    try:
        return value.item()
    except Exception as error:
        expected = "a number, or an array of one that can be read now"
        raise ArgumentError(argument, expected, repr(value), function=function) from error


def kind_of(value: Any) -> str:
    """What an error says of a value where nothing may come: its type, and of a number that is no array the number."""
    name = type(value).__name__
    return f"the {name} {value}" if isinstance(value, numbers.Number) else name


def listed(value: Any) -> Any:
    """A list, or an array with dimensions, as a tuple of its numbers, which calls are found again by.

    Anything else, a tracer, and an array that cannot be read, come as they are. Reading an array that lies on a GPU
    waits for that GPU.
    """
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return value
    if isinstance(value, list):
        return tuple(value)
    if not shape_of(value) or not hasattr(value, "tolist") or arrays.has_tracer((value,)):
        return value
    if getattr(value, "requires_grad", False):  # what checks the argument says so
        return value
    try:
        found = value.tolist()
    except (RuntimeError, TypeError):  # nested, sparse, or without memory: what checks the argument says so
        return value
    return tuple(found) if isinstance(found, list) else found


def plain_options(options: Any, function: str) -> Any:
    """A named tuple of options with numbers in place of arrays that hold one; itself where there are none."""
    changed = {}
    for name, value in zip(getattr(options, "_fields", ()), options, strict=False):
        found = _plain_option(value, name, function)
        if found is not value:
            changed[name] = found
    return options._replace(**changed) if changed else options


def _plain_option(value: Any, argument: str, function: str) -> Any:
    if isinstance(value, (tuple, list)):
        inner = [_plain_option(x, argument, function) for x in value]
        return value if all(a is b for a, b in zip(inner, value, strict=True)) else tuple(inner)
    # A NumPy scalar has no such function: it never changes, and stays.
    return plain(value, argument, function) if hasattr(value, "__dlpack__") else value


def check_bool(value: Any, argument: str, function: str) -> bool:
    if not isinstance(value, bool):
        value = plain(value, argument, function)
    if isinstance(value, bool):
        return value
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
    value = plain(value, argument, function)
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
