"""Latent caches with memory of their own: what a constructor may be given, and the memory."""

from __future__ import annotations

from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..errors import ArgumentError
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
from .on_arrays import MAX_LATENT_DIM
from .scales import describe_latent_scale

#: Formats of a latent cache's rows: 16 bits; e4m3 with one scale for all; `LATENT_656`, by vLLM's name.
LATENT_DTYPES: tuple[str, ...] = (*KV_ARRAY_DTYPES, "fp8", "fp8_ds_mla")


def check_latent(name: str, head_dim: Any, head_dim_v: Any, k_dtype: Any, others: dict[str, tuple[Any, Any]]) -> Any:
    """Formats of K and V, and element type and width of the rows' array.

    Parameters
    ----------
    name : str
        The constructor.
    head_dim, head_dim_v, k_dtype
        As the caller gave them.
    others : dict
        Arguments by name that latent caches do not have: (what the caller gave, what they are unless given).
    """
    for argument, (value, default) in others.items():
        if value is not default and (isinstance(value, (list, dict)) or not _is_equal(value, default)):
            received = repr(value) if isinstance(value, (str, int, bool)) else type(value).__name__
            raise ArgumentError(argument, f"{default!r} with head_dim_v", received, function=name)
    if not isinstance(k_dtype, str) or k_dtype not in LATENT_DTYPES:
        expected = " or ".join(map(repr, LATENT_DTYPES)) + ", with head_dim_v"
        raise ArgumentError("k_dtype", expected, repr(k_dtype), function=name)
    dim = arguments.check_int(head_dim, "head_dim", name)
    dim_v = arguments.check_int(head_dim_v, "head_dim_v", name, least=1)
    if k_dtype == "fp8_ds_mla":
        for argument, value, only in (("head_dim", dim, LATENT_656_DIM), ("head_dim_v", dim_v, LATENT_656_CODES)):
            if value != only:
                raise ArgumentError(argument, f"{only} with k_dtype {k_dtype!r}", f"{value}", function=name)
    step = 16 if k_dtype == "fp8" else 8
    if not (step <= dim <= MAX_LATENT_DIM and dim % step == 0):
        expected = f"a multiple of {step} from {step} to {MAX_LATENT_DIM}, with head_dim_v"
        raise ArgumentError("head_dim", expected, f"{dim}", function=name)
    if dim_v % 8 or dim_v >= dim:
        raise ArgumentError("head_dim_v", f"a multiple of 8 below {dim}, head_dim", f"{dim_v}", function=name)
    layout = {"fp8": IN_ORDER, "fp8_ds_mla": LATENT_656}.get(k_dtype, "fragment")
    dtype = "fp8" if k_dtype == "fp8_ds_mla" else k_dtype
    formats = [KVFormat(dtype, x, row_dim(x), False, key, layout) for x, key in ((dim, True), (dim_v, False))]
    width = LATENT_ROW_BYTES if layout == LATENT_656 else dim
    return (*formats, KV_ARRAY_DTYPES.get(k_dtype, "uint8"), width)


def _is_equal(value: Any, default: Any) -> bool:
    """Whether a plain value is the default; arrays are not."""
    return isinstance(value, (str, int, bool)) and type(value) is type(default) and value == default


def latent_memory(
    cache: Any, name: str, ref: Tensor, head_dim: Any, k_dtype: Any, latent: tuple[Any, Any],
    others: dict[str, tuple[Any, Any]],
) -> Tensor:  # fmt: skip
    """The rows of a latent cache, as `from_arrays` takes them, where ``ref`` is; sets its attributes.

    Parameters
    ----------
    cache : KVCache
        Its extents are known.
    latent : (head_dim_v, k_scale)
        As the caller gave them, and the rest as in `check_latent`.
    """
    if cache.num_kv_heads != 1:
        expected = "1 with head_dim_v: all query heads share a latent cache's rows"
        raise ArgumentError("num_kv_heads", expected, f"{cache.num_kv_heads}", function=name)
    head_dim_v, k_scale = latent
    cache.k_format, cache.v_format, dtype, width = check_latent(name, head_dim, head_dim_v, k_dtype, others)
    cache.head_dim, cache.hadamard, cache.array_order = cache.k_format.head_dim, False, "NHD"
    cache.recent_window, cache.recent_slots, cache.recent_format = 0, 0, None
    rows = arrays.empty_like_framework(ref, (cache.num_blocks, cache.block_size, 1, width), dtype)
    rows.argument = "cache.k"
    cache._key_arrays = {}
    if k_scale is None:
        return rows
    if k_dtype != "fp8":
        raise ArgumentError("k_scale", "None but with k_dtype 'fp8'", type(k_scale).__name__, function=name)
    cache._key_arrays = {"k_scale": describe_latent_scale(k_scale, rows, name)}
    return rows
