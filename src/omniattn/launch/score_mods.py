"""What ``attn_fwd_sm90`` and ``attn_int8_sm90`` are told of softcap, masks and scales.

Device code: ``kernels_cu/attention/score_mods.cuh``.
"""

from __future__ import annotations

import math

from ..problems import AttentionProblem
from ..problems.attention import is_plain_scale
from ..problems.memory import ITEMSIZE
from ..problems.split import PackGQA
from ..registry import KernelSpec
from ..runtime.record import TensorMap
from .host_struct import At
from .masks import MaskPlaces

#: `ScoreModFlag` of device code.
SOFTCAP, SCALED, BITS, KEY_BIAS, BIAS, MOD_TILES = 1, 2, 4, 8, 16, 32
_LOG2E = math.log2(math.e)
_LARGEST = 3.0e38  # below the largest fp32


def finite(x: float) -> float:
    return min(max(x, -_LARGEST), _LARGEST)


#: tanh(x) / x in powers of x^2, minimax of the relative error, for |x| up to the first number: 6e-7 and 8e-7.
_TANH = (0.5, (9.999994636e-01, -3.332631886e-01, 1.319029629e-01, -4.440221563e-02))
_TANH_NEAR = (0.28, (9.9999923e-01, -3.3315523e-01, 1.2720911e-01))


def _cap_polynomial(
    scale: float, cap: float, tanh: tuple[float, tuple[float, ...]] = _TANH
) -> tuple[float, tuple[float, ...]]:
    """``cap * log2(e) * tanh(s * scale / cap) / s`` in powers of s^2, and the largest s that it is for.

    Where a coefficient is no normal fp32 number (caps of 1e5 and more), the largest s is 0: kernels take tanh itself.
    """
    x = scale / cap
    largest, factors = tanh
    if 1e-15 < abs(x) < 1e15:
        poly = tuple(cap * _LOG2E * a * x ** (2 * i + 1) for i, a in enumerate(factors))
        if all(2.0**-120 < abs(p) < _LARGEST for p in poly):
            return largest / abs(x), poly
    return 0.0, (0.0,) * len(factors)


def score_mod_values(problem: AttentionProblem, masks: MaskPlaces | None) -> dict[str, object]:
    """The fields of ScoreModParams; ``masks``: where the tiles of a boolean mask, or the numbers of its keys, are."""
    capped = problem.softcap > 0.0
    factor = problem.softcap if capped else problem.softmax_scale
    encoding = problem.mask_encoding
    flags = {"none": 0, "bits": BITS, "keys": KEY_BIAS, "tiles": BIAS}[encoding] | (SOFTCAP if capped else 0)
    # A factor that is not positive, or infinite in base 2, goes into the scores, where it does no harm to the -inf of
    # hidden keys.
    scaled = 0 if is_plain_scale(factor) else SCALED
    own_tiles = MOD_TILES if masks is not None and masks.bias is None and encoding in ("none", "tiles") else 0
    limit, poly = _cap_polynomial(problem.softmax_scale, problem.softcap) if capped else (0.0, (0.0,) * 4)
    near_limit, near = (
        _cap_polynomial(problem.softmax_scale, problem.softcap, _TANH_NEAR) if capped else (0.0, (0.0,) * 3)
    )
    strides = problem.strides
    assert strides is not None
    return {
        "tiles": None if masks is None else masks.bits or masks.key_bias,
        "lists": None if masks is None else masks.lists,
        "tiles_stride_b": 0 if masks is None else masks.tiles_stride_b,
        "tiles_stride_h": 0 if masks is None else masks.tiles_stride_h,
        "tiles_stride_m": 0 if masks is None else masks.tiles_stride_m,
        "lists_stride_b": 0 if masks is None else masks.lists_stride_b,
        "lists_stride_h": 0 if masks is None else masks.lists_stride_h,
        "num_tiles": 0 if masks is None else masks.num_tiles,
        "flags": flags | scaled | own_tiles,
        "bias_batch": int(strides.mask[0] != 0),
        "bias_head": int(strides.mask[1] != 0),
        "cap_scale": finite(problem.softmax_scale / problem.softcap if capped else 0.0),
        "factor": factor,
        "factor2": finite(factor * _LOG2E),
        "cap_limit": limit,
        "cap_poly": poly,
        # None at all is below -1: the square of a small number is 0.
        "cap_near_limit": near_limit**2 if near_limit > 0.0 else -1.0,
        "cap_near": near,
    }


def bias_map(
    spec: KernelSpec,
    problem: AttentionProblem,
    fallback: TensorMap,
    masks: MaskPlaces | None = None,
    pack_gqa: PackGQA | None = None,
) -> TensorMap:
    """The tensor map of an additive mask's tiles; ``fallback``, which nobody reads, where there are none.

    pack_gqa: where keys are split, heads that share the rows of a tile, in a dimension of their own.
    """
    rows, keys = problem.mask_extent  # of packed sequences those of the longest
    if spec.bias_bytes == 0 or 0 in (problem.batch, rows, keys):
        return fallback
    assert problem.strides is not None
    b, h, q, _ = problem.strides.mask
    dtype = problem.mask_dtype
    item = ITEMSIZE[dtype]
    at = At("mask")
    if masks is not None and masks.bias is not None:
        at, (b, h, q) = masks.bias, masks.bias_strides
    columns, batch = 128 // item, problem.batch if b else 1
    if pack_gqa is not None:
        heads, pack = pack_gqa
        dims: tuple[int, ...] = (keys, heads, rows, problem.num_q_heads // heads if h else 1, batch)
        strides: tuple[int, ...] = (item * h, item * q, item * heads * h, item * b)
        box: tuple[int, ...] = (columns, pack, spec.block_m // pack, 1, 1)
        # All heads of a tile may have one mask: a stride of 0.
        strides = tuple(s if n > 1 else s or 16 for n, s in zip(dims[1:], strides, strict=True))
        return TensorMap(at.operand, at.offset, dtype, dims, strides, box)
    dims = (keys, rows, problem.num_q_heads if h else 1, batch)
    # The strides of extents of 1 are not used; a map wants multiples of 16 bytes.
    strides = tuple(item * s if n > 1 else item * s or 16 for n, s in zip(dims[1:], (q, h, b), strict=True))
    return TensorMap(at.operand, at.offset, dtype, dims, strides, (columns, spec.block_m, 1, 1))
