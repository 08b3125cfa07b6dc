"""``seqused_q`` and ``seqused_k``: packed sequences of which only the first rows count.

No kernel reads them. Each sequence becomes two or three, one behind the other in the same arrays::

    both:       (used queries, used keys)  (other queries, no key)  (no query, other keys)
    seqused_q:  (used queries, all keys)   (other queries, no key)
    seqused_k:  (all queries, used keys)                            (no query, other keys)

Their starts are computed where the lengths lie, by one launch, or by the caller's framework where a trace or a
transform has to see it: no value is read on the host. Causal and window count from the end of the used rows,
quantization groups and means are those of the used rows, and queries without a key are rows that attend to nothing.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import arrays
from ..errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError
from ..frameworks import compiling
from ..plan.engine import is_describing
from ..problems import OPERANDS
from .parts import packed_parts
from .score_mod import ScoreMod

_LIBRARIES = ("torch", "cupy", "jax", "numpy")
_libraries: dict[type, str] = {}
_B = re.compile(r"\bb\b")
_mods: weakref.WeakKeyDictionary[ScoreMod, dict[int, ScoreMod]] = weakref.WeakKeyDictionary()


class Parts(NamedTuple):
    """A packed call without ``seqused_*``."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    descales: tuple[Any, ...]
    score_mod: Any
    parts: int


def split(
    function: str,
    starts: tuple[Any, Any],
    used: tuple[Any, Any],
    *,
    q: Any,
    mask: Any,
    descales: tuple[Any, ...] = (),
    score_mod: Any = None,
    stream: Any = None,
) -> Parts:
    """The call that computes the used rows.

    Parameters
    ----------
    starts : (array, array)
        cu_seqlens_q and cu_seqlens_k. Wrong ones come back as they are: the call itself says so.
    used : (array or None, array or None)
        seqused_q and seqused_k, one of them given.
    q, mask, descales, score_mod, stream
        As the caller gave them.

    Raises
    ------
    ArgumentError, UnsupportedError
        A wrong length array, on the CPU a wrong length; what has an entry for each sequence and cannot have two.
    """
    names = ("seqused_q", "seqused_k")
    first = names[0] if used[0] is not None else names[1]
    if q.__class__ in OPERANDS:
        expected = "None, because quantized operands bring their sequences"
        raise ArgumentError(first, expected, "an array", function=function)
    for name, x in zip(names, used, strict=True):
        if x is not None:
            _check_facts(x, name, function)
    same = Parts(*starts, descales, score_mod, 1)
    if not all(map(_is_starts, starts)):
        return same
    batch = int(starts[0].shape[0]) - 1
    for name, x in zip(names, used, strict=True):
        if x is not None and tuple(x.shape) != (batch,):
            raise ShapeError(name, f"shape (batch,) = ({batch},)", str(tuple(x.shape)), function=function)
    if batch > 1 and mask is not None and len(mask.shape) == 4 and mask.shape[0] != 1:
        raise UnsupportedError(
            f"{function}(): {first} with a mask for each sequence",
            instead="a mask that is the same for all sequences, or a ScoreMod with mask=",
        )
    if compiling():
        if score_mod is not None:
            from ..frameworks.torch.library import fail

            what = f"{function}(): {first} with a score_mod under torch.compile"
            fail("unsupported", what, instead="the call outside of the compiled function, or exact cu_seqlens")
        library = "torch"
    else:
        library = _library((*starts, *used), first, function)
        if _on_host(library, (*starts, *used)):
            if not _check_values(starts, used, names, function):
                return same
        elif starts[0].shape == starts[1].shape and _by_kernel(library, (*starts, *used)):
            made = packed_parts(*starts, *used, stream)
            count = 1 + (used[0] is not None) + (used[1] is not None)
            return Parts(*made, *_beside(library, batch, count, descales, score_mod), count)
    cu_q, cu_k = _starts_of_parts(library, starts, used)
    count = 1 + (used[0] is not None) + (used[1] is not None)
    return Parts(cu_q, cu_k, *_beside(library, batch, count, descales, score_mod), count)


def _starts_of_parts(library: str, starts: tuple[Any, Any], used: tuple[Any, Any]) -> tuple[Any, Any]:
    """By the functions of the arrays' library."""
    ends = tuple(None if u is None else _ends(library, s, u) for s, u in zip(starts, used, strict=True))
    (cu_q, cu_k), (end_q, end_k) = starts, ends
    begin_q, stop_q, begin_k, stop_k = cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]
    columns_q: list[Any] = [begin_q] if end_q is None else [begin_q, end_q]
    columns_k: list[Any] = [begin_k] if end_k is None else [begin_k, end_k]
    if end_q is not None:  # behind the keys that are used there is none
        columns_k.append(stop_k if end_k is None else end_k)
    if end_k is not None:
        columns_q.append(stop_q)
    return _interleaved(library, columns_q, cu_q[-1:]), _interleaved(library, columns_k, cu_k[-1:])


def _beside(library: str, batch: int, count: int, descales: tuple[Any, ...], score_mod: Any) -> tuple[Any, Any]:
    """Factors and the score modification of the parts."""
    mod = of_parts(score_mod, count) if isinstance(score_mod, ScoreMod) else score_mod
    return tuple(_repeated(library, x, batch, count) for x in descales), mod


def _check_facts(x: Any, name: str, function: str) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ArgumentError(name, "an int32 array of shape (batch,)", type(x).__name__, function=function)
    if str(x.dtype).removeprefix("torch.") != "int32":
        raise DtypeError(name, "int32", str(x.dtype).removeprefix("torch."), function=function)
    if len(x.shape) != 1:
        raise ShapeError(name, "shape (batch,)", str(tuple(x.shape)), function=function)


def _is_starts(x: Any) -> bool:
    """Whether this can be a cu_seqlens."""
    return len(getattr(x, "shape", ())) == 1 and x.shape[0] >= 1 and str(x.dtype).endswith("int32")


def _library(given: tuple[Any, ...], name: str, function: str) -> str:
    """Whose functions compute on these arrays."""
    found = {_library_of(type(x)) for x in given if x is not None}
    if found == {"jax", "numpy"}:
        return "jax"
    if len(found) > 1 or not found <= set(_LIBRARIES):
        kinds = ", ".join(sorted(found))
        expected = "an array of cu_seqlens' library: torch, CuPy, JAX or NumPy"
        raise ArgumentError(name, expected, f"arrays of {kinds}", function=function)
    if found == {"torch"} and len(devices := {x.device for x in given if x is not None}) > 1:
        shown = ", ".join(sorted(map(str, devices)))
        raise DeviceError(name, "an array on the device of cu_seqlens", shown, function=function)
    return found.pop()


def _library_of(cls: type) -> str:
    if cls not in _libraries:
        roots = [base.__module__.partition(".")[0].removesuffix("lib") for base in cls.__mro__]
        _libraries[cls] = next((root for root in _LIBRARIES if root in roots), cls.__module__)
    return _libraries[cls]


def _on_host(library: str, given: tuple[Any, ...]) -> bool:
    """Whether the values can be read at no cost."""
    present = [x for x in given if x is not None]
    if library == "cupy" or arrays.needs_operator(present):
        return False
    if library == "torch":
        return all(x.device.type == "cpu" for x in present)
    return all(device.platform == "cpu" for x in present if hasattr(x, "devices") for device in x.devices())


def _by_kernel(library: str, given: tuple[Any, ...]) -> bool:
    """Whether a launch of this package may compute on these arrays, which lie on a GPU: nobody has to see it."""
    return library in ("torch", "cupy") and not is_describing() and not arrays.needs_operator(given)


def _check_values(starts: tuple[Any, Any], used: tuple[Any, Any], names: tuple[str, str], function: str) -> bool:
    """Whether cu_seqlens are in order; if so, raise for lengths beyond them."""
    for cu, x, name in zip(starts, used, names, strict=True):
        begin = arrays.to_numpy(arrays.describe(cu, "cu_seqlens")).astype("int64")
        lengths = begin[1:] - begin[:-1]
        if begin[0] != 0 or (lengths < 0).any():
            return False
        if x is None:
            continue
        values = arrays.to_numpy(arrays.describe(x, name))
        for b, (value, most) in enumerate(zip(values.tolist(), lengths.tolist(), strict=True)):
            if not 0 <= value <= most:
                expected = f"from 0 to {most}, the rows of sequence {b}"
                raise ArgumentError(name, expected, str(value), function=function)
    return True


def _ends(library: str, cu: Any, used: Any) -> Any:
    """Where the used rows end: clamped to the sequence, which leaves none of a length near 2**31, whose sum wraps."""
    begin, end = cu[:-1], cu[1:]
    if library == "torch":
        import torch

        return torch.clamp(begin + used, begin, end)
    xp = _module(library)
    return xp.minimum(xp.maximum(begin + used, begin), end)


def _module(library: str) -> Any:
    import importlib

    return importlib.import_module("jax.numpy" if library == "jax" else library)


def _interleaved(library: str, columns: list[Any], last: Any) -> Any:
    """int32, (parts * batch + 1,)."""
    if library == "torch":
        import torch

        return torch.cat((torch.stack(columns, 1).flatten(), last))
    xp = _module(library)
    return xp.concatenate((xp.stack(columns, 1).reshape(-1), last)).astype("int32")


def _repeated(library: str, x: Any, batch: int, count: int) -> Any:
    """Factors of each sequence, for each of its parts."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    if len(shape) < 2 or shape[0] != batch:  # one for all; a wrong shape is told by the call itself
        return x
    return x.repeat_interleave(count, 0) if library == "torch" else x.repeat(count, axis=0)


def of_parts(mod: ScoreMod, count: int) -> ScoreMod:
    """The score modification with the caller's ``b`` in place of the part's; the same one at each call."""
    known = _mods.setdefault(mod, {})
    if count not in known:
        known[count] = ScoreMod(
            _text(mod.expression, count), None if mod.mask is None else _text(mod.mask, count),
            _function(mod.reference, count), None if mod.grad is None else _text(mod.grad, count),
            _function(mod.reference_grad, count), **mod.arrays,
        )  # fmt: skip
    return known[count]


def _text(text: str, count: int) -> str:
    # An expression has neither strings nor members, and no array is called b: the word is the sequence.
    return _B.sub(f"(b / {count})", text)


def _function(function: Callable[..., Any] | None, count: int) -> Callable[..., Any] | None:
    if function is None:
        return None

    def of_part(score: Any, b: Any, h: Any, q: Any, k: Any, **others: Any) -> Any:
        return function(score, b // count, h, q, k, **others)

    return of_part
