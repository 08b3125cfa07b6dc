"""Caches on arrays of the caller: nothing is copied, and rows are wherever the arrays have them."""

from __future__ import annotations

import functools
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..arrays.strides import overlaps_itself
from ..errors import AlignmentError, ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from .formats import (
    IN_ORDER,
    KV_ARRAY_DTYPES,
    LATENT_656,
    LATENT_656_CODES,
    LATENT_656_DIM,
    LATENT_ROW_BYTES,
    KVFormat,
    row_dim,
)
from .places import CHUNK_BYTES, ORDERS, by_position, row_places
from .scales import describe_latent_scale, describe_scales

#: Rows (tokens times kv heads) of a cache: the kernels count them in 32 bits.
MAX_CACHE_ROWS = 2**32 - 1
#: Channels of a latent cache's rows at most.
MAX_LATENT_DIM = 576
#: Names of caches by the element types of arrays.
_DTYPES = {**{array: name for name, array in KV_ARRAY_DTYPES.items()}, "float8_e4m3fn": "fp8", "int8": "int8"}
#: Libraries whose arrays can be divided without a copy.
_WITH_VIEWS = ("torch", "numpy", "cupy")
#: What a cache knows that depends on its arrays' facts and not on their addresses: by those facts.
_known: dict[Any, dict[str, Any]] = {}
_MOST_KNOWN = 1024
#: Of a cache's attributes those that are not.
_ITS_OWN = frozenset(("_planes", "_key_arrays", "_addresses", "_operands", "_written", "_key", "_order"))


class OnArrays:
    """What makes a `KVCache` or `PagedKVCache` of the caller's arrays."""

    paged: bool

    @classmethod
    def from_arrays(
        cls,
        k: Any,
        v: Any = None,
        *,
        layout: str = "NHD",
        k_scale: Any = None,
        v_scale: Any = None,
        head_dim_v: int | None = None,
    ) -> Any:
        """A cache on arrays that are there already: K and V in 16 or 8 bits, of any strides; nothing is copied.

        Parameters
        ----------
        k, v : array, (blocks, tokens, heads, dim) for "NHD", (blocks, heads, tokens, dim) for "HND"
            float16, bfloat16, float8_e4m3fn or int8, on the CPU too. Blocks are those of a `PagedKVCache`, ``tokens``
            its block_size; of a `KVCache` they are the sequences. dim is contiguous, and from 8 to 512 a multiple of
            16 bytes, in 8 bits up to 256. All other strides are free, the same for k and v: positive multiples of 16
            bytes, and no two elements in one place. Addresses are multiples of 16 bytes. So a tensor (2, blocks, ...)
            or (blocks, 2, ...) is given as ``*pool.unbind(0)`` or ``*pool.unbind(1)``. Padding between rows, and tails
            of blocks that no token owns, may hold anything, NaN included.
            v None: k has K and V side by side in its rows, 2 * dim elements (torch, CuPy, NumPy).
        layout : "NHD" or "HND"
            Order of the dimensions. It is not the byte order that the constructors' ``layout=`` names.
        k_scale, v_scale : array, float32, both or none, optional
            Of 8-bit arrays: an element is its code times its scale, which is 1 unless given. Strides are free, the same
            for both. (1,): one for all; (heads,): one a head; (sequences, heads): one for each sequence of the calls on
            the cache and head (FlashAttention-3's descales), which `append` refuses. These are read only: `append`
            writes x / scale, rounded to nearest, and beyond the largest code that one; an int8 code of NaN is 0.
            The shape of k without dim: one for each token and head. `append` writes them: the largest absolute value
            over 448 (int8: 127), at least 2^-60; NaN, with codes of 0, for rows with values that are not finite.
            Scales below 2^-60 or beyond 2^60 are not what the kernels are made for.

        head_dim_v : int, optional
            A latent cache (multi-head latent attention, DeepSeek-V2 2024): k has one head, which all query heads share,
            v is None, and the value of a token is the first head_dim_v channels of its row. `decode` and
            `attention_with_kvcache` give o with as many. dim up to 576, head_dim_v a multiple of 8 below it; on a GPU
            576 and 512. `append` writes the rows, or your own code. They are float16 or bfloat16; or float8_e4m3fn,
            with a k_scale of shape (1,) or none; or, with head_dim_v 512, 656 bytes as uint8 or float8_e4m3fn, the last
            dimension (FlashMLA's and vLLM's "fp8_ds_mla"): 512 channels in e4m3, 4 fp32 scales of 128 channels each, 64
            channels in bf16. head_dim is 576 then.

        Returns
        -------
        KVCache or PagedKVCache
            Whose ``k`` and ``v`` are these arrays. It holds them, and is to be made anew for others; for arrays whose
            shapes, strides and distance are known that takes a few microseconds.

        Raises
        ------
        ArgumentError
            Or a subclass: names argument, what was expected and what came.
        UnsupportedError
            Rows or scales so far apart that the kernels cannot count them in 32 bits.

        Notes
        -----
        A read-only array can be decoded from, and `append` refuses it. Of JAX, whose arrays never change, the cache
        takes the arrays over as those of its own: nobody else may read them. Launches on arrays of JAX or another
        DLPack library are kept in order by their cache: one cache for an array. (Torch and CuPy have streams for that.)
        """
        return _on(cls, k, v, layout, {"k_scale": k_scale, "v_scale": v_scale}, head_dim_v)

    @property
    def k_scale(self) -> Any:
        """Scales of K in the caller's 8 bits, or None."""
        return self._scale("k_scale")

    @property
    def v_scale(self) -> Any:
        """Scales of V in the caller's 8 bits, or None."""
        return self._scale("v_scale")

    def _scale(self, name: str) -> Any:
        cache: Any = self
        given = cache.key_arrays.get(name)
        return cache._array(name) if given is None else given.obj


def _on(cls: Any, k: Any, v: Any, layout: Any, scales: dict[str, Any], head_dim_v: Any) -> Any:
    if layout not in ORDERS or not isinstance(layout, str):
        raise ArgumentError("layout", " or ".join(map(repr, ORDERS)), repr(layout), function=_name(cls))
    if head_dim_v is not None:
        first = second = arrays.describe_of(_name(cls), k, "k")
        head_dim_v = _check_latent(first, v, scales, head_dim_v, layout, _name(cls))
    elif v is not None:
        first, second = (arrays.describe_of(_name(cls), x, name) for x, name in ((k, "k"), (v, "v")))
    else:
        first, second = _halves(k, _name(cls))
    facts: tuple[Any, ...] = (
        cls, layout, second.ptr - first.ptr, first.ptr % CHUNK_BYTES, _facts_of(first), _facts_of(second), head_dim_v,
    )  # fmt: skip
    of_rows: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    if any(x is not None for x in scales.values()):
        if head_dim_v is not None:
            found = {"k_scale": describe_latent_scale(scales["k_scale"], first, _name(cls))}
        else:
            found = describe_scales(scales, first, _heads(first, layout), _name(cls))
        facts += tuple((t.ptr - first.ptr, _facts_of(t)) for t in found.values())
        # Those of rows are written by `append`, as K and V are.
        (of_rows if len(found["k_scale"].shape) == 3 else others).update(found)
    known = _known.get(facts)
    cache: Any = cls.__new__(cls)
    if known is None:
        most = arguments.MAX_HEAD_DIM if first.itemsize == 2 else arguments.MAX_QUANTIZED_HEAD_DIM
        _check(first, second, layout, _name(cls), most if head_dim_v is None else MAX_LATENT_DIM)
    cache.__dict__.update(_extents(first, layout, head_dim_v) if known is None else known)
    planes = {"k": first, **({"v": second} if head_dim_v is None else {}), **of_rows}
    for name, t in planes.items():
        t.argument = f"cache.{name}"
        t.readonly = t.readonly and t.framework != "jax"
    cache.__dict__["_key_arrays"] = others
    cache._settle(planes, is_known=known is not None)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[facts] = {name: x for name, x in cache.__dict__.items() if name not in _ITS_OWN}
    return cache


def _heads(t: Tensor, layout: str) -> int:
    """kv heads of an array, whatever its shape: `_check` is what says that it is wrong."""
    return t.shape[2 if layout == "NHD" else 1] if len(t.shape) == 4 else 0


@functools.cache
def _name(cls: Any) -> str:
    return f"{cls.__name__}.from_arrays"


def _facts_of(t: Tensor) -> tuple[Any, ...]:
    """What a cache depends on, of one of its arrays."""
    inference = t.framework == "torch" and t.obj.is_inference()
    return t.framework, t.device, t.ordinal, t.dtype, t.readonly, inference, tuple(t.shape), tuple(t.strides)


def _halves(k: Any, function: str) -> tuple[Tensor, Tensor]:
    """K's and V's halves of one array's rows."""
    both = arrays.describe_of(function, k, "k")
    if both.framework not in _WITH_VIEWS:
        raise UnsupportedError(
            f"{function}(): K and V in one array of a library without views", instead="two arrays, k and v"
        )
    if len(both.shape) != 4 or both.shape[3] % 2:
        expected = "4 dimensions, the last one with K and V side by side (v is None)"
        raise ShapeError("k", expected, f"shape {tuple(both.shape)}", function=function)
    dim = both.shape[3] // 2
    return arrays.describe(both.obj[..., :dim], "k"), arrays.describe(both.obj[..., dim:], "v")


def _check_latent(k: Tensor, v: Any, scales: dict[str, Any], head_dim_v: Any, layout: str, function: str) -> int:
    """What a latent cache's one array has to be besides. Returns head_dim_v."""
    for name, x in (("v", v), ("v_scale", scales["v_scale"])):
        if x is not None:
            expected = "None with head_dim_v: the value is a part of k's row"
            raise ArgumentError(name, expected, type(x).__name__, function=function)
    width = arguments.check_int(head_dim_v, "head_dim_v", function, least=1)
    if k.dtype not in (*KV_ARRAY_DTYPES.values(), "float8_e4m3fn", "uint8"):
        expected = f"float16, bfloat16, float8_e4m3fn, or uint8 rows of {LATENT_ROW_BYTES} bytes, with head_dim_v"
        raise DtypeError("k", expected, k.dtype, function=function)
    _check_rank(k, layout, function)
    has_own_scales = is_656(k)
    if k.dtype == "uint8" and not has_own_scales:
        expected = f"rows of {LATENT_ROW_BYTES} bytes, the last dimension, with uint8 and head_dim_v"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=function)
    if scales["k_scale"] is not None and has_own_scales:
        expected = f"None with rows of {LATENT_ROW_BYTES} bytes, which have their scales"
        raise ArgumentError("k_scale", expected, type(scales["k_scale"]).__name__, function=function)
    if has_own_scales and width != LATENT_656_CODES:
        expected = f"{LATENT_656_CODES} with rows of {LATENT_ROW_BYTES} bytes"
        raise ArgumentError("head_dim_v", expected, repr(head_dim_v), function=function)
    if width % 8 or width >= k.shape[3]:
        expected = f"a multiple of 8 below {k.shape[3]}, the rows' last dimension"
        raise ArgumentError("head_dim_v", expected, repr(head_dim_v), function=function)
    if _heads(k, layout) != 1:
        expected = "one head with head_dim_v, which all query heads share"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=function)
    return width


def is_656(k: Tensor) -> bool:
    """Whether a latent cache's array has rows of 656 bytes (`LATENT_656`): e4m3 rows are shorter."""
    return k.itemsize == 1 and k.shape[-1] == LATENT_ROW_BYTES


def _check(k: Tensor, v: Tensor, layout: str, function: str, most: int) -> None:
    """Everything that a cache's arrays have to be. most: channels of a row."""
    arrays.require_same_device([k, v])
    has_own_scales = most == MAX_LATENT_DIM and is_656(k)
    for t in (k, v):
        if t.dtype not in _DTYPES and not has_own_scales:
            hint = "bytes are given as what they are: view(torch.float8_e4m3fn)" if t.dtype == "uint8" else None
            raise DtypeError(t.argument, " or ".join(_DTYPES), t.dtype, function=function, hint=hint)
        _check_rank(t, layout, function)
    if v.dtype != k.dtype:
        raise DtypeError("v", f"{k.dtype}, like k", v.dtype, function=function)
    if tuple(v.shape) != tuple(k.shape):
        raise ShapeError("v", f"shape {tuple(k.shape)}, like k", f"{tuple(v.shape)}", function=function)
    dim = k.shape[3]
    step = CHUNK_BYTES // k.itemsize
    if not (step <= dim <= most and dim % step == 0) and not has_own_scales:
        expected = f"head_dim, the last dimension, a multiple of {step} from {step} to {most}"
        raise ShapeError("k", expected, f"{dim}", function=function)
    extents, strides = by_position(k.shape, k.strides, layout)
    rows = extents[0] * extents[1] * extents[2]
    if min(extents) < 1 or max(extents) > arguments.MAX_ROWS or rows > MAX_CACHE_ROWS:
        expected = f"from 1 to {arguments.MAX_ROWS} of each of blocks, tokens and heads, {MAX_CACHE_ROWS} rows in all"
        raise ShapeError("k", expected, f"shape {tuple(k.shape)}", function=function)
    for t in (k, v):
        _check_strides(t, function)
    if by_position(v.shape, v.strides, layout)[1] != strides:
        raise StrideError("v", f"strides {tuple(k.strides)}, like k", f"{tuple(v.strides)}", function=function)
    row_places(strides, extents, dim, function, k.itemsize)


def _check_rank(t: Tensor, layout: str, function: str) -> None:
    if len(t.shape) != 4:
        names = "(blocks, tokens, heads, dim)" if layout == "NHD" else "(blocks, heads, tokens, dim)"
        raise ShapeError(t.argument, f"4 dimensions {names}", f"shape {tuple(t.shape)}", function=function)


def _check_strides(t: Tensor, function: str) -> None:
    received = f"strides {tuple(t.strides)}"
    if t.strides[3] != 1:
        raise StrideError(t.argument, "a contiguous last dimension", received, function=function)
    step = CHUNK_BYTES // t.itemsize
    outer = [s for s, n in zip(t.strides[:3], t.shape[:3], strict=True) if n > 1]
    if any(s % step or s < 0 for s in outer):
        raise StrideError(t.argument, f"positive strides that are multiples of {step}", received, function=function)
    if overlaps_itself(t.shape, t.strides):
        raise StrideError(t.argument, "elements that do not share memory", received, function=function)
    if t.ptr % CHUNK_BYTES:
        expected = f"an address that is a multiple of {CHUNK_BYTES} bytes"
        raise AlignmentError(t.argument, expected, hex(t.ptr), function=function)


def _extents(k: Tensor, layout: str, head_dim_v: int | None) -> dict[str, Any]:
    """A cache's attributes, but for those that `KVCache._settle` finds."""
    (blocks, heads, tokens), _ = by_position(k.shape, k.strides, layout)
    dim, dtype, order = k.shape[3], _DTYPES.get(k.dtype, "fp8"), "fragment" if k.itemsize == 2 else IN_ORDER
    if head_dim_v is not None and is_656(k):
        dim, order = LATENT_656_DIM, LATENT_656
    formats = {
        name: KVFormat(dtype, width, row_dim(width), False, is_key, order)
        for name, is_key, width in (("k_format", True, dim), ("v_format", False, head_dim_v or dim))
    }
    return {
        "num_blocks": blocks, "block_size": tokens, "num_kv_heads": heads, "head_dim": dim, **formats,
        "hadamard": False, "recent_window": 0, "recent_slots": 0, "recent_format": None, "array_order": layout,
        "_device": k.device, "_ordinal": k.ordinal, "_device_name": k.device_name,
    }  # fmt: skip
