"""Calls of every kind as selection sees them, without arrays: what a user can ask for, in few problems each.

Element types do not decide: all are of bfloat16, and a test holds both 16-bit types to the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from omniattn import KVCache, PagedKVCache
from omniattn.problems import (
    AppendProblem,
    AttentionProblem,
    AttentionStrides,
    CopyProblem,
    DecodeProblem,
    DequantizeProblem,
    Descale,
    Descales,
    Fp8,
    IndexLogitsProblem,
    Int4,
    Int8,
    MergeProblem,
    Pages,
    QuantizeCall,
    QuantizeProblem,
    TopKProblem,
    WithCacheProblem,
)
from omniattn.problems.backward import BackwardProblem, BackwardStrides
from omniattn.problems.precision import FP8_ARRAYS
from omniattn.problems.quantize import row_bias_of
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.problems.sparse_blocks import SparseBlocksProblem

DTYPE = "bfloat16"
#: head_dim, and that of v where it is another one.
WIDTHS = ((32, 0), (64, 0), (96, 0), (128, 0), (192, 0), (256, 0), (384, 0), (512, 0))
PAIRS = ((32, 16), (64, 32), (96, 64), (64, 128), (128, 64), (192, 128), (256, 192), (512, 256), (256, 512))
#: Batch, queries, keys, query heads, kv heads.
LONG, MIDDLE = (2, 8192, 8192, 8, 8), (4, 1000, 1000, 8, 4)
FEW, ONE, SOME = (1, 16, 16384, 8, 2), (1, 1, 65536, 8, 8), (2, 256, 16384, 4, 4)
TINY, SMALL, SHORT = (512, 16, 16, 8, 8), (512, 64, 64, 8, 8), (16, 256, 256, 8, 8)
#: One whose last tiles are split; one of packed sequences whose tiles are.
TAIL, WIDE = (1, 256 * 200, 256 * 200, 1, 1), (1, 64, 131072, 16, 2)
BLOCKS = BlockMaskProblem((1, 1), (0, 0, 128, 1))


def call(shape: tuple[int, int, int, int, int], width: tuple[int, int], mask: str = "none", **facts: Any) -> Any:
    """A call of contiguous arrays.

    mask: ``"none"``; ``"bool"``, ``"io"`` or ``"float32"``, in full; the same behind ``"keys "``: one for all queries.
    Behind ``"odd "`` no tensor map describes it.
    """
    batch, sq, sk, heads, heads_kv = shape
    packed = facts.pop("varlen", False)
    longest = (sq, sk) if packed else (0, 0)
    kind = mask.split()[-1]
    if packed:
        sq, sk = batch * sq, batch * sk
    p = AttentionProblem(
        DTYPE, batch, sq, sk, heads, heads_kv, width[0], -1, facts.pop("right", -1), 0.1, 0.0, kind, "none", packed,
        max_seqlen_q=longest[0], max_seqlen_k=longest[1], own_head_dim_v=width[1],
    )  # fmt: skip
    p = replace(p, **facts)
    rows, keys = p.mask_extent
    in_full = (heads * rows * keys, rows * keys, keys, 1)
    of_mask = (0, 0, 0, 0) if kind == "none" else (0, 0, 0, 1) if "keys" in mask else in_full
    is_mapped = kind in ("io", "float32") and mask == kind and p.tensor_maps

    def of(rows: int, heads: int, width: int) -> tuple[int, int, int]:
        return (0 if packed else rows * heads * width, heads * width, width)

    strides = AttentionStrides(
        of(sq, heads, p.head_dim), of(sk, heads_kv, p.head_dim), of(sk, heads_kv, p.head_dim_v),
        of(sq, heads, p.head_dim_v), (0 if packed else heads * sq, sq), of_mask,
    )  # fmt: skip
    return replace(p, strides=strides, mask_map=is_mapped)


def exact_calls(of_hopper: bool) -> Iterator[AttentionProblem]:
    """Forward: every width, with every option, of many lengths and few; strides that no tensor map describes.

    of_hopper: lengths and windows too that decide on Hopper alone.
    """
    options: list[dict[str, Any]] = [{}, {"softcap": 30.0}, {"mask": "bool"}]
    widths, shapes = (*WIDTHS, *PAIRS), [MIDDLE, FEW]
    if of_hopper:
        options += [{"right": 0}, {"right": 0, "window_left": 256}, {"mask": "bool", "softcap": 30.0}]
        options += [{"block_mask": BLOCKS}, *({"mask": mask} for mask in ("keys io", "io", "float32", "odd io"))]
        shapes += [LONG, ONE, SOME, TINY, SMALL, SHORT]
    for width, varlen, option, shape in itertools.product(widths, (False, True), options, shapes):
        if width not in PAIRS or shape in (LONG, MIDDLE, FEW):
            yield call(shape, width, varlen=varlen, **option)
    yield call(MIDDLE, (64, 0), block_mask=BLOCKS)
    yield call(MIDDLE, (64, 0), varlen=True, used=(True, True))
    for width, option, shape in itertools.product(WIDTHS, options[:3], shapes):
        yield call(shape, width, varlen=True, pages=Pages(16, 1000, 100, 100), **option)
    if of_hopper:
        yield from (call(TAIL, (64, 0)), call(WIDE, (128, 0), varlen=True))
        for width, option, shape in itertools.product(widths, options[:2], (MIDDLE, FEW)):
            yield call(shape, width, tensor_maps=False, **option)


def _precisions() -> Iterator[dict[str, Any]]:
    for kind, pv, sums, smooth_q in itertools.product((Int8, Int4), ("fp8", "fp16"), ("fp32", "fp16"), (False, True)):
        yield {"precision": kind(pv=pv, pv_accumulator=sums, smooth_q=smooth_q).precision}
    yield {"precision": Int8(smooth_q=True, hadamard=True).precision}
    yield {"precision": Int8(fast_exp=True).precision}
    for rotated, smooth_k in itertools.product((False, True), repeat=2):
        yield {"precision": Fp8(hadamard=rotated, smooth_k=smooth_k).precision}
    for kind_of_v in ("scalar", "per_block"):
        yield {"precision": FP8_ARRAYS, "descales": Descales(v=Descale(kind_of_v))}


def low_precision_calls(of_hopper: bool) -> Iterator[AttentionProblem]:
    """Forward on 8 and 4 bits: of arrays, of e4m3 with factors, of the caller's operands; see `exact_calls`."""
    options: list[dict[str, Any]] = [{}, {"softcap": 30.0}]
    if of_hopper:
        options += [{"lse": True}, {"softcap": 30.0, "lse": True}, {"mask": "bool"}, {"mask": "bool", "lse": True}]
        options += [{"mask": "io"}, {"mask": "float32"}]
    for head_dim, kind, option in itertools.product((64, 128, 256), _precisions(), options):
        yield call(MIDDLE, (head_dim, 0), **kind, **option)
        p = kind["precision"]
        # Hopper's own kernels have no others.
        if not of_hopper or p.pv == "fp16" or p.pv_accumulator == "fp16" or p.qk == "int4":
            continue
        yield from (call(shape, (head_dim, 0), **kind, **option) for shape in (FEW, SOME, LONG))
        if option.keys() <= {"lse"} and "descales" not in kind and not p.smooth_q:
            yield call(MIDDLE, (head_dim, 0), block_mask=BLOCKS, **kind, **option)
        if "mask" not in option:
            yield from (call(shape, (head_dim, 0), varlen=True, **kind, **option) for shape in (MIDDLE, FEW))
            yield call(MIDDLE, (head_dim, 0), tensor_maps=False, **kind, **option)
    products = itertools.product((64, 128, 256), ("fp8", "fp16"), ("fp32", "fp16"), (False, True), options[:2])
    for head_dim, pv, sums, smooth_q, option in products:
        yield operands_call(head_dim, pv, sums, smooth_q, **option)


def operands_call(head_dim: int, pv: str, sums: str, smooth_q: bool, **option: Any) -> AttentionProblem:
    """A call on 4-bit operands in the grouping of mma.sync, which no GPU newer than Ada makes by itself."""
    precision = Int4(pv=pv, pv_accumulator=sums, smooth_q=smooth_q).precision
    p = call(MIDDLE, (head_dim, 0), precision=precision, **option)
    whole = p.quantization(grouping="sm80", pv=pv, pv_accumulator=sums, unpacked=False)
    return replace(p, operands=whole)


def backward_calls() -> Iterator[BackwardProblem]:
    """Gradients, with every option."""
    everything = ("dq", "dk", "dv")
    wanted = (everything, ("dq",), ("dk", "dv"))
    options: tuple[dict[str, Any], ...] = (
        {}, {"softcap": 30.0}, {"mask": "keys bool"}, {"mask": "io"}, {"tensor_maps": False}, {"varlen": True},
        {"varlen": True, "softcap": 30.0}, {"block_mask": BLOCKS}, {"block_mask": BLOCKS, "softcap": 30.0},
        {"block_mask": BLOCKS, "mask": "io"},
    )  # fmt: skip
    for width, option, of, ordered in itertools.product(WIDTHS, options, wanted, (False, True)):
        yield gradients(call(MIDDLE, width, **option), of, ordered)
    for width in WIDTHS:
        yield gradients(call(MIDDLE, width, "float32"), (*everything, "dmask"), False)


def gradients(forward: AttentionProblem, wanted: tuple[str, ...], deterministic: bool) -> BackwardProblem:
    """Of contiguous arrays."""
    s = forward.strides
    assert s is not None
    of_mask = (forward.batch, forward.num_q_heads, *forward.mask_extent) if "dmask" in wanted else ()
    strides = BackwardStrides(s.o, s.q, s.k, s.v, (0, 1), s.mask)
    return BackwardProblem(replace(forward, lse=True), wanted, False, of_mask, deterministic, strides)


def quantizer_calls() -> Iterator[QuantizeCall]:
    """``quantize_qk`` and ``quantize_v``."""
    formats = (("int8", "sm80"), ("int8", "sm90"), ("int4", "sm80"), ("float8_e4m3", "sm90"))
    for head_dim, (qk, grouping), hadamard in itertools.product((64, 128, 256), formats, (False, True)):
        e4m3 = qk == "float8_e4m3"
        for smooth in (False, True):
            whole = QuantizeProblem(
                DTYPE, 2, 500, 500, 4, 4, head_dim, False, qk, "per_block" if e4m3 else "per_thread", grouping,
                smooth_q=smooth and not e4m3, smooth_k=smooth, row_bias=row_bias_of(e4m3, smooth, False), v=False,
                hadamard=hadamard,
            )  # fmt: skip
            yield QuantizeCall(whole, ((1, 1, 1),) * 3, "NHD", 0)
        yield QuantizeCall(replace(whole, v=True).of_values, ((1, 1, 1),) * 3, "NHD", 0)


def caches() -> Iterator[KVCache]:
    """Of every format of which K and V are the same."""
    like = np.zeros(1, np.float16)
    for head_dim in (64, 128, 256, 512):
        shape = (1, 16, 1, head_dim)
        yield KVCache(*shape, like=like, k_dtype="bf16", v_dtype="bf16")
        if head_dim > 256:  # in 16 bits alone
            continue
        for dtype in (ml_dtypes.float8_e4m3fn, np.int8):
            yield KVCache.from_arrays(*(np.zeros((1, 16, 1, head_dim), dtype) for _ in "kv"))
        for groups in (1, 2, 4, 8):
            if head_dim // groups < 32:
                continue
            size = None if groups == 1 else head_dim // groups
            for dtype in ("fp8", "int8", "int4"):
                yield KVCache(*shape, like=like, k_dtype=dtype, v_dtype=dtype, group_size=size)
            if groups in (1, 4):
                yield KVCache(*shape, like=like, k_dtype="int4", v_dtype="int4", group_size=size, layout="fbgemm")


def cache_calls() -> Iterator[DecodeProblem | AppendProblem | CopyProblem]:
    """``decode`` of few rows and of many, ``append``, ``copy_blocks``."""
    for cache in caches():
        head_dim, rows_of = cache.facts.head_dim, (1, 16, 32, 64, 72)
        for rows in rows_of if cache.facts.k_format.bits == 16 else rows_of[:3]:
            strides = (rows * head_dim, rows * head_dim, head_dim, 1)
            yield DecodeProblem(
                DTYPE, cache.facts, 32, 1, rows, 1, head_dim, 8192, 8192, 32, 0, -1, 0.125, 0.0, "none", False, 0,
                False, strides, strides,
            )  # fmt: skip
        strides = (head_dim, head_dim, head_dim, 1)
        yield AppendProblem(
            DTYPE, cache.facts, 32, 32, 1, head_dim, 1, 8192, 8192, 32, 0, "none", 0, 0, strides, strides
        )
    yield CopyProblem(cache.facts, False, ((0, 1),))


def latent_calls() -> Iterator[DecodeProblem]:
    """``decode`` over latent caches: every format of rows, few query rows and many, with tensor maps and without."""
    for array in (
        np.zeros((2, 64, 1, 576), ml_dtypes.bfloat16), np.zeros((2, 64, 1, 576), ml_dtypes.float8_e4m3fn),
        np.zeros((2, 64, 1, 656), np.uint8),
    ):  # fmt: skip
        cache = PagedKVCache.from_arrays(array, head_dim_v=512).facts
        for heads, maps in itertools.product((16, 32, 128), (True, False)):
            strides = (heads * 576, heads * 576, 576, 1)
            yield DecodeProblem(
                DTYPE, cache, 32, 1, heads, 1, 576, 8192, 64, 2, 128, -1, 0.125, 0.0, "none", False, 0, False, strides,
                strides, tensor_maps=maps,
            )  # fmt: skip
        if cache.k_format.dtype != "fp8" or array.shape[-1] == 656:
            yield DecodeProblem(
                DTYPE, cache, 1, 1, 128, 1, 576, 2048, 64, 2, 2048, -1, 0.125, 0.0, "none", False, 0, False, strides,
                strides, topk=2048, has_lengths=False,
            )  # fmt: skip


def latent_appends() -> Iterator[AppendProblem]:
    """``append`` to latent caches of every format."""
    like = np.zeros(1, np.float16)
    for k_dtype in ("bf16", "fp8", "fp8_ds_mla"):
        cache = PagedKVCache(2, 64, 1, 576, like=like, k_dtype=k_dtype, head_dim_v=512).facts
        yield AppendProblem(DTYPE, cache, 32, 32, 1, 576, 1, 128, 64, 2, 2, "none", 0, 0, (576, 576, 0, 1))


def prompt_calls() -> Iterator[WithCacheProblem]:
    """``attention_with_kvcache`` of prompts over quantized caches, and over padding in front of 512 channels."""
    for cache in caches():
        if cache.facts.k_format.quantized or cache.facts.head_dim > 256:
            dim = cache.facts.head_dim
            keys = DequantizeProblem(DTYPE, cache.facts, 32, 32 * 40, 40, 8192, 0, 8192, 32, -1)
            heads = (0, dim, dim)
            strides = AttentionStrides(heads, heads, heads, heads, (0, 1280), (0, 0, 0, 0))
            own = AttentionProblem(
                DTYPE, 32, 1280, 32 * 8192, 1, 1, dim, -1, 0, 0.125, 0.0, "none", "none", True, max_seqlen_q=40,
                strides=strides, queries_per_sequence=40,
            )  # fmt: skip
            yield WithCacheProblem(keys.attention(own), (32, 40, 1, dim), 8192, (-1, 0), "", keys=keys)


def other_calls() -> Iterator[MergeProblem | IndexLogitsProblem | TopKProblem | SparseBlocksProblem]:
    """``merge_states``, ``index_logits``, ``top_k`` and ``sparse_blocks``."""
    for head_dim in (64, 128, 256):
        own = (2048 * head_dim, 8 * head_dim, head_dim)
        yield SparseBlocksProblem(
            DTYPE, 2, 2048, 2048, 8, 8, head_dim, (128, 64), 0.5, None, -0.1, False, 0, "NHD", own, own
        )
    for dtype in (DTYPE, "float32"):
        yield MergeProblem(dtype, (2, 3, 4, 64), (((768, 256, 64),) * 3), (((12, 3, 1),) * 3))
    for size, new in ((64, 1), (64, 2), (64, 4), (64, 9), (7, 1)):
        q, k, scale = (8192 * new, 8192, 128), (132 * size, 128), (132 * size, 4)
        yield IndexLogitsProblem(
            32, new, 64, 4096, size, 3000, 600, q, k, scale, 128 * size, 64, 4096, (True, False, False)
        )
    few = ((1, 100_000), (1, 200_000), (1, 2_000_000), (90, 4096), (90, 200_000))
    for rows, width in (*few, (400, 4096), (400, 16384), (400, 20_000), (400, 40_000)):
        yield TopKProblem(rows, width, 2048, 1, 0, width, 2048, 0, width % 4 == 0, (False, True))
