"""Checks of what says how K and V travel: the precision, and where documents begin. Without torch, for `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checks import values
from ..errors import ArgumentError, UnsupportedError
from ..problems import Fp8, Int8, Precision
from ..problems.products import products_of


def of_keys(precision: Precision, keys: int, function: str) -> Precision:
    """That of so many keys: exact for few."""
    short = precision.quantized and keys < precision.min_seqlen
    return values.check_precision("exact", function) if short else precision


def check_precision(precision: Any, window: tuple[int, int], keys: int, function: str) -> Precision:
    """The precision of so many keys, if K and V can travel in it."""
    named = isinstance(precision, str) and precision in ("exact", "int8", "fp8")
    if not named and not isinstance(precision, (Int8, Fp8)):
        expected = "'exact', 'int8', 'fp8', an Int8 or an Fp8"
        raise ArgumentError("precision", expected, repr(precision), function=function)
    found = values.check_precision(precision, function)
    used = of_keys(found, keys, function)
    for asked, what, instead in (
        (found.smooth_q, "smooth_q, which ties Q to one rank's K", "smooth_q=False"),
        (found.sparse is not None, "sparse", "sparse=None"),
        (found.pv == "exact", "pv='exact'", "pv='auto'"),
        (used.quantized and (window[0] >= 0 or window[1] > 0),
         "a window with a low precision", "precision='exact'"),
    ):  # fmt: skip
        if asked:
            raise UnsupportedError(f"{function}(): {what}", instead=instead)
    return used


def product_of(precision: Precision, cc: tuple[int, int]) -> tuple[str, str]:
    """Operands and accumulator of P V in which V travels between GPUs of this compute capability."""
    choices = (("fp8", "fp32"), *products_of(cc)[0]) if cc == (9, 0) else products_of(cc)[0]
    asked = (precision.pv, precision.pv_accumulator)
    fits = [pair for pair in choices if all(a in ("auto", b) for a, b in zip(asked, pair, strict=True))]
    if not fits:
        raise UnsupportedError(
            f"pv={asked[0]!r} with pv_accumulator={asked[1]!r} on compute capability {cc[0]}.{cc[1]}",
            instead="pv='auto' and pv_accumulator='auto'",
        )
    return fits[0]


def check_causal_lengths(window: tuple[int, int], rows: tuple[int, int], function: str) -> None:
    """Queries and keys of a low precision: chunks of both have to end at the same tokens where a window counts."""
    if window[1] >= 0 and rows[0] != rows[1]:
        raise UnsupportedError(
            f"{function}(): causal with {rows[0]} queries, {rows[1]} keys and a low precision",
            instead="as many queries as keys, or precision='exact'",
        )


def check_starts(starts: Any, function: str) -> tuple[int, ...]:
    """Where documents begin, as numbers of the host."""
    expected = "integers on the host: 0 first, never decreasing, the number of all tokens last"
    if getattr(getattr(starts, "device", None), "type", "cpu") != "cpu":
        raise ArgumentError("cu_seqlens", expected, f"a tensor on {starts.device}", function=function)
    try:
        found = starts.tolist() if hasattr(starts, "tolist") else list(starts)
    except TypeError:
        raise ArgumentError("cu_seqlens", expected, repr(starts), function=function) from None
    numbers = isinstance(found, Sequence) and all(isinstance(x, int) and not isinstance(x, bool) for x in found)
    if not numbers or not found or found[0] != 0 or found != sorted(found):
        raise ArgumentError("cu_seqlens", expected, repr(found), function=function)
    return tuple(found)
