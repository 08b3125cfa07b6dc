"""Small calls of every tile class, for compute-sanitizer.

``python sanitizer_cases.py [few_masks | low_precision | few_low_precision | factors | few_factors | backward |
few_backward | cleared_backward | faulty]``: exact attention (`few_masks`: for a tool that does not know how masks are
read); or quantization and attention on integers (`few`: for tools that take long); or e4m3 arrays with a factor for
each 128 rows of v; or gradients (`few`: by the kernels of every GPU alone; `cleared`: by those that add to cleared
memory, for a tool that does not see bulk stores); or one call with a fault.

CuPy arrays in memory of their own (no pool), so that an access behind any of them is seen; moved by copies alone, so
that no kernel runs but omniattn's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np
from racecheck_rows import decode_by_rows_that_wait, generic
from sanitizer_arrays import check, poisoned, to_gpu
from sanitizer_packed import stream_k
from sanitizer_pools import eight_bits, indexer, latent, pools

import omniattn as oa
from omniattn import runtime
from omniattn.plan import attention as plan_attention
from omniattn.plan.engine import PLANS
from omniattn.plan.ways import describe_call
from omniattn.problems.split import SplitKV, TailSplit
from omniattn.reference.e4m3 import encode_e4m3
from omniattn.registry import KernelSpec, by_name
from omniattn.testing.frameworks import CupyFramework
from omniattn.testing.layout_cases import layout_cases

#: Schedule, and heads that share a tile.
ONE_SPLIT = SplitKV(1), 3
#: Whose registry attention chooses from; the package has a function of its name.
select: Any = importlib.import_module("omniattn.select.candidates")

HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512)
#: Below the tile: the last 8 channels of every row are outside.
BELOW = 8
HEADS, HEADS_KV = 2, 1
SEQLEN_Q, SEQLEN_K = 131, 195

#: What each call adds to a plain one; arrays are made by `options_for`.
CALLS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (40, 9)},
    "sinks": {"causal": True, "sinks": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float32", "causal": True},
    "keys": {"mask": "keys"},
    "aligned": {"mask": "aligned"},
    "io": {"mask": "io", "softcap": 5.0},
    "shifted": {"mask": "shifted"},
    "rows": {"mask": "rows", "causal": True},
}
#: At one head_dim: each is compiled.
MODIFIED: Mapping[str, Mapping[str, Any]] = {
    "score_mod": {"score_mod": True},
    "score_mod, causal": {"score_mod": True, "causal": True, "mask": "aligned"},
    "block_mask": {"block_mask": True},
}


def options_for(call: Mapping[str, Any], rng: np.random.Generator, seqlen_k: int = SEQLEN_K) -> dict[str, Any]:
    options = dict(call)
    if "sinks" in options:
        options["sinks"] = to_gpu(rng.standard_normal(HEADS), np.float32)
    if "score_mod" in options:  # arrays that end where the sequences do
        arrays = {
            "table": to_gpu(rng.standard_normal((SEQLEN_Q, seqlen_k)), np.float32),
            "slopes": to_gpu(rng.standard_normal(HEADS)),
            "shown": to_gpu(rng.random(seqlen_k) < 0.9, np.bool_),
        }
        options["score_mod"] = oa.ScoreMod("score + slopes[h] * table(q, k)", mask="shown[k] && k < q + 90", **arrays)
    if "block_mask" in options:
        blocks = (-(-SEQLEN_Q // 64), -(-seqlen_k // 64))
        options |= {"block_mask": to_gpu(rng.random(blocks) < 0.6, np.bool_), "block_size": 64}
    if options.get("mask") == "bool":
        options["mask"] = to_gpu(rng.random((SEQLEN_Q, seqlen_k)) < 0.7, np.bool_)
    elif options.get("mask") == "float32":
        options["mask"] = to_gpu(rng.standard_normal((HEADS, SEQLEN_Q, seqlen_k)), np.float32)
    elif options.get("mask") == "keys":
        options["mask"] = to_gpu(rng.standard_normal((1, seqlen_k)), np.float32)
    elif options.get("mask") == "shifted":  # ends where its memory ends
        options["mask"] = to_gpu(rng.standard_normal((HEADS, SEQLEN_Q, seqlen_k + 1)))[..., 1:]
    elif options.get("mask") == "rows":  # one number for all keys
        options["mask"] = cupy.broadcast_to(to_gpu(rng.standard_normal((SEQLEN_Q, 1))), (SEQLEN_Q, seqlen_k))
    elif "mask" in options:  # rows of whole 16 bytes
        dtype = np.float32 if options["mask"] == "aligned" else np.float16
        options["mask"] = to_gpu(rng.standard_normal((HEADS, SEQLEN_Q, -(-seqlen_k // 8) * 8)), dtype)[..., :seqlen_k]
    return options


def dense(head_dim: int, rng: np.random.Generator, few_masks: bool) -> None:
    for width, names in ((head_dim - BELOW, tuple(CALLS)), (head_dim, ("full", "mask"))):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        for name in names:
            # A warp's lanes all read the mask, and its first lane gives the buffer back behind a __syncwarp; racecheck
            # sees that lane's reads only. With one tile of keys no buffer is used twice.
            keys = 60 if few_masks and "mask" in CALLS[name] else SEQLEN_K
            k, v = (to_gpu(rng.standard_normal((1, keys, HEADS_KV, width))) for _ in range(2))
            options = options_for(CALLS[name], rng, keys)
            check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, **options))
    if head_dim != 128:
        return
    for call in MODIFIED.values():
        keys = 60 if few_masks and "mask" in call else SEQLEN_K
        k, v = (to_gpu(rng.standard_normal((1, keys, HEADS_KV, head_dim))) for _ in range(2))
        options = options_for(call, rng, keys)
        check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, **options))


def few_queries(rng: np.random.Generator, few_masks: bool) -> None:
    """Keys split over CTAs. Of a product that is NaN kernels read what hides the key, of rows that there are."""
    q = to_gpu(rng.standard_normal((1, 5, 8, 128)))
    k, v = (to_gpu(rng.standard_normal((1, 6000, 2, 128))) for _ in range(2))
    scores = {"softcap": "softcap", "mask": "masks", "io": "bias16"}
    hopper = runtime.device_info(0).cc == (9, 0)
    for name in ("full", "sinks", "softcap", *(() if few_masks else ("mask", "io"))):
        keys, options = k, {key: value for key, value in CALLS[name].items() if key not in ("mask", "sinks")}
        if name == "mask":
            options["mask"] = cupy.asarray(rng.random((1, 1, 5, 6000)) < 0.5)
        if name == "io":
            options["mask"] = to_gpu(rng.standard_normal((1, 8, 5, 6000)))
            options["mask"][..., 5::97], keys = -np.inf, k.copy()
            keys[:, 5::97] = np.nan
        if name == "sinks":
            options["sinks"] = to_gpu(rng.standard_normal(8), np.float32)
        # What this GPU gets, then the kernel of every GPU, then Hopper's with scores.
        kernels = ["", "attn_fwd_sm80_fp16_d128_split" + "_mods" * (name in scores)]
        if name in scores and hopper:
            kernels.append(f"attn_fwd_sm90_fp16_d128_m192n64_split_{scores[name]}")
        for kernel in kernels:
            os.environ["OMNIATTN_FORCE_KERNEL"] = kernel
            assert "split" in oa.explain(q, keys, v, **options).kernel
            check(*oa.attention(q, keys, v, out=poisoned(q.shape), return_lse=True, **options))
    del os.environ["OMNIATTN_FORCE_KERNEL"]
    if not hopper:
        return
    # One split, which writes O itself, of heads that share the 64 rows of a tile; then the last tiles of many.
    for batch, heads, lengths, width, rows in (
        (40, (6, 2), (2, 640), 128, "attn_fwd_sm90_fp16_d128_m64n64_split"),
        (1, (140, 14), (100, 1200), 256, "attn_fwd_sm90_fp16_d256_m128n64"),
    ):
        q = to_gpu(rng.standard_normal((batch, lengths[0], heads[0], width)))
        k, v = (to_gpu(rng.standard_normal((batch, lengths[1], heads[1], width))) for _ in range(2))
        described = describe_call(oa.attention, q, k, v, out=poisoned(q.shape), return_lse=True)
        ways = select.candidates(described.problem, described.target)
        own = [way for way in ways if way.row.name == rows]
        way = next(x for x in own if isinstance(x.schedule, TailSplit) or (x.schedule, x.pack_gqa[0]) == ONE_SPLIT)
        check(*described.in_way(way)())
    stream_k(rng)


def tokens(rng: np.random.Generator) -> None:
    """Sequences of a few tokens: tiles of one warp, dense and packed."""
    for width in (64, 56, 128, 120):
        q, k, v = (to_gpu(rng.standard_normal((40, 13, 16, width))) for _ in range(3))
        starts = to_gpu(np.arange(0, 40 * 13 + 1, 13), np.int32)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 13, "max_seqlen_k": 13}
        for causal in (False, True):
            check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, causal=causal))
            rows = [x.reshape(-1, 16, width) for x in (q, k, v)]
            out = poisoned(rows[0].shape)
            check(*oa.attention_varlen(*rows, out=out, return_lse=True, causal=causal, **packed))


def other_head_dim_v(rng: np.random.Generator) -> None:
    """v with a head_dim of its own: tiles made for it, and others."""
    for width, width_v in ((192, 128), (128, 64), (64, 128), (96, 64), (72, 40)):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k, v = (to_gpu(rng.standard_normal((1, 60, HEADS_KV, n))) for n in (width, width_v))
        for call in ({}, {"mask": "bool"}):
            out = poisoned((1, SEQLEN_Q, HEADS, width_v))
            check(*oa.attention(q, k, v, out=out, return_lse=True, **options_for(call, rng, 60)))


def varlen(
    head_dim: int, rng: np.random.Generator, precisions: tuple[oa.Int8 | oa.Int4, ...] = (), most_keys: int = SEQLEN_K
) -> None:
    lengths_q, lengths_k = (70, 0, 1, 129), tuple(min(n, most_keys) for n in (131, 5, 0, 66))
    q = to_gpu(rng.standard_normal((sum(lengths_q) + 3, HEADS, head_dim)))
    k, v = (to_gpu(rng.standard_normal((sum(lengths_k) + 3, HEADS_KV, head_dim))) for _ in range(2))
    starts = {
        "cu_seqlens_q": to_gpu([0, *np.cumsum(lengths_q)], np.int32),
        "cu_seqlens_k": to_gpu([0, *np.cumsum(lengths_k)], np.int32),
    }
    options_of_calls: list[dict[str, Any]] = [{"causal": True}, {"causal": True, "softcap": 5.0}]
    if precisions:
        options_of_calls = [{"causal": causal, "precision": p} for p in precisions for causal in (False, True)]
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    for options in options_of_calls:
        packed = {**starts, **longest, **options}
        check(*oa.attention_varlen(q, k, v, out=poisoned(q.shape), return_lse=True, **packed))
        if precisions:  # without the LSE it is another kernel
            check(oa.attention_varlen(q, k, v, out=poisoned(q.shape), **packed))
    used = {"seqused_q": to_gpu([64, 0, 1, 2**31 - 1], np.int32), "seqused_k": to_gpu([1, 5, -1, 65], np.int32)}
    for names in (("seqused_q",), ("seqused_k",), tuple(used)):
        packed = {**starts, **longest, **{name: used[name] for name in names}}
        check(*oa.attention_varlen(q, k, v, out=poisoned(q.shape), return_lse=True, **packed))


def merge(head_dim: int, rng: np.random.Generator) -> None:
    for dtype in (np.float16, np.float32):
        a, b = (to_gpu(rng.standard_normal((2, 77, 3, head_dim)), dtype) for _ in range(2))
        lse_a, lse_b = rng.standard_normal((2, 2, 3, 77))
        lse_a[0, 0, ::2] = lse_b[0, 0, ::4] = -np.inf
        check(*oa.merge_states(a, to_gpu(lse_a, np.float32), b, to_gpu(lse_b, np.float32)))


def quantizers(head_dim: int, rng: np.random.Generator, few: bool) -> None:
    """Every format; outputs are checked elsewhere."""
    for width in (head_dim,) if few else (head_dim - BELOW, head_dim):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k = to_gpu(rng.standard_normal((1, SEQLEN_K, HEADS_KV, width)))
        oa.quantize_qk(q, k, smooth_q=True, with_bias=True)
        oa.quantize_qk(q, k, dtype="int4", granularity="per_tensor", grouping="sm80")
        oa.quantize_qk(q, k, granularity="per_token")
        oa.quantize_v(k, smooth_v=True)
        oa.quantize_v(k, dtype="float16")
        cupy.cuda.runtime.deviceSynchronize()


def keys_of_all_stages(head_dim: int) -> int:
    """Keys that every int8 kernel for this head_dim holds without using a buffer twice; at most `SEQLEN_K`."""
    rings = [s for s in select.REGISTRY if s.family in ("attn_int8_sm90", "attn_int8_mbarrier_sm90")]
    rows = [s for s in rings if s.head_dim == head_dim]
    return min([SEQLEN_K, *(s.block_n * int(dict(s.defines)["NUM_STAGES"]) for s in rows)])


def low_precision(head_dim: int, rng: np.random.Generator, few: bool) -> None:
    """Quantization and attention together, in one workspace; and one behind the other, each array by itself."""
    precisions: tuple[oa.Int8 | oa.Int4, ...] = (oa.Int8(), oa.Int8(smooth_q=True, smooth_v=True), oa.Int4())[
        : 2 if few else 3
    ]
    generic = not any(spec.arch_specific for spec in select.REGISTRY)
    mods: tuple[str, ...] = ()
    if generic and not few:  # every product of the kernel on mma.sync that this GPU has, and what it alone serves
        newer = runtime.device_info(0).cc >= (8, 9)
        kinds = [(pv, acc) for pv in ("fp16", "fp8")[: 1 + newer] for acc in ("fp32", "fp16")]
        precisions += tuple(oa.Int8(pv=pv, pv_accumulator=acc) for pv, acc in kinds)
        mods = ("softcap", "mask")
    grouping = "sm80" if generic else "sm90"
    # Consumers read k_scale, delta_s and, in some kernels, Q themselves, and a warp's first lane gives the buffer back
    # for all 32 behind a __syncwarp. racecheck sees the order of that lane's reads only, so it gets no more keys than
    # there are buffers, and no second tile of queries. (A build in which all lanes give the buffer of K back is clean
    # with more.)
    seqlen_k = keys_of_all_stages(head_dim) if few else SEQLEN_K
    for width in (head_dim - BELOW,) if few else (head_dim - BELOW, head_dim):
        q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
        k, v = (to_gpu(rng.standard_normal((1, seqlen_k, HEADS_KV, width))) for _ in range(2))
        for precision in precisions:
            for name in ("causal",) if few else ("full", "causal", "window", "sinks", *mods):
                options = options_for(CALLS[name], rng)
                o, lse = oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, precision=precision, **options)
                check(o, lse)
                check(oa.attention(q, k, v, out=poisoned(q.shape), precision=precision, **options), lse)
            made = {"dtype": precision.qk, "smooth_q": precision.smooth_q, "grouping": grouping}
            qk = oa.quantize_qk(q, k, with_bias=True, **made)
            kind = "float16" if precision.pv == "fp16" else "float8_e4m3"
            values = oa.quantize_v(v, smooth_v=precision.smooth_v, dtype=kind)
            check(*oa.attention(qk.q, qk.k, values, out=poisoned(q.shape), return_lse=True))
    varlen(head_dim, rng, precisions[:1] if few else precisions, seqlen_k)
    if generic:
        return
    # Keys split over CTAs, with scores.
    q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, head_dim)))
    k, v = (to_gpu(rng.standard_normal((1, seqlen_k, HEADS_KV, head_dim))) for _ in range(2))
    for name, kind in (("softcap", "softcap"), ("mask", "masks"), ("io", "bias16"), ("aligned", "bias32")):
        os.environ["OMNIATTN_FORCE_KERNEL"] = f"attn_int8_sm90_fp16_d{head_dim}_m128n64_split_{kind}"
        options = options_for(CALLS[name], rng, seqlen_k) | {"precision": precisions[1]}
        check(*oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, **options))
    del os.environ["OMNIATTN_FORCE_KERNEL"]


def eight_bit_floats(head_dim: int, rng: np.random.Generator, few: bool) -> None:
    """e4m3: the quantizers with and without a rotation, attention, and what lays out V."""
    if runtime.device_info(0).cc < (8, 9):
        return
    seqlen_k = keys_of_all_stages(head_dim) if few else SEQLEN_K
    width = head_dim - BELOW
    q = to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, width)))
    k, v = (to_gpu(rng.standard_normal((1, seqlen_k, HEADS_KV, width))) for _ in range(2))
    oa.quantize_qk(q, k, hadamard=True)
    precisions = (oa.Fp8(), oa.Fp8(hadamard=False, smooth_k=True))
    for precision in precisions[: 1 if few else 2]:
        for name in ("causal",) if few else ("full", "causal", "window", "sinks", "softcap", "mask"):
            options = options_for(CALLS[name], rng, seqlen_k)
            o, lse = oa.attention(q, k, v, out=poisoned(q.shape), return_lse=True, precision=precision, **options)
            check(o, lse)
            check(oa.attention(q, k, v, out=poisoned(q.shape), precision=precision, **options), lse)
    varlen(head_dim, rng, precisions[:1], seqlen_k)
    framework = CupyFramework()
    for case in layout_cases(by_name(f"layout_fp8_sm80_d{head_dim}"))[: 1 if few else 4]:
        _, wrong = case.check(framework, case.prepare())
        assert not wrong, wrong


def value_factors(head_dim: int, rng: np.random.Generator, few: bool) -> None:
    """e4m3 arrays with a factor for each 128 rows of v, as torch's tensors: CuPy has no such element type."""
    if runtime.device_info(0).cc < (8, 9):
        return
    import torch

    def tensor(x: Any) -> Any:  # in CuPy's memory
        if x.dtype != np.bool_:
            return torch.from_dlpack(x)
        return torch.from_dlpack(x.view(cupy.uint8)).view(torch.bool)

    def e4m3(*shape: int) -> Any:
        codes = encode_e4m3(rng.standard_normal(shape).astype(np.float32))
        return tensor(to_gpu(codes, np.uint8)).view(torch.float8_e4m3fn)

    def given(batch: int, heads: tuple[int, int], lengths: tuple[int, int]) -> dict[str, Any]:
        of = zip("qkv", (heads[0], heads[1], heads[1]), (lengths[0], lengths[1], lengths[1]), strict=True)
        made = {f"descale_{x}": rng.random((batch, h, -(-n // 128))) + 0.5 for x, h, n in of}
        made["descale_v"][..., ::2] *= -1.0
        return {name: tensor(to_gpu(x, np.float32)) for name, x in made.items()} | {"out_dtype": torch.float16}

    def call(function: Any, *arrays: Any, **options: Any) -> None:
        o, lse = function(*arrays, return_lse=True, **options)
        check(o.cpu().numpy(), lse.cpu().numpy())
        check(function(*arrays, **options).cpu().numpy())

    generic = not any(spec.arch_specific for spec in select.REGISTRY)
    seqlen_k = keys_of_all_stages(head_dim) if few else SEQLEN_K
    factors = given(1, (HEADS, HEADS_KV), (SEQLEN_Q, seqlen_k))
    for width in (head_dim,) if few else (head_dim - 16, head_dim):
        q, k, v = e4m3(1, SEQLEN_Q, HEADS, width), *(e4m3(1, seqlen_k, HEADS_KV, width) for _ in range(2))
        for name in ("causal", "sinks", "softcap", "mask", "keys", "aligned", "io"):
            options = options_for(CALLS[name], rng, seqlen_k)
            options |= {key: tensor(x) for key, x in options.items() if isinstance(x, cupy.ndarray)}
            assert oa.explain(q, k, v, **factors, **options).kernel.startswith(f"attn_fp8_sm{89 if generic else 90}")
            call(oa.attention, q, k, v, **factors, **options)
    lengths = (70, 0, 1, 129), tuple(min(n, seqlen_k) for n in (131, 5, 0, 66))
    q, k, v = (e4m3(sum(n) + 3, h, head_dim) for n, h in zip((lengths[0], *lengths[1:] * 2), (2, 1, 1), strict=True))
    factors = given(4, (HEADS, HEADS_KV), (129, max(lengths[1])))
    for x, n in zip("qk", lengths, strict=True):
        factors |= {f"cu_seqlens_{x}": tensor(to_gpu([0, *np.cumsum(n)], np.int32)), f"max_seqlen_{x}": max(n)}
    for options in ({"causal": True}, {"causal": True, "softcap": 5.0}):
        call(oa.attention_varlen, q, k, v, **factors, **options)
    if not generic:  # keys split over CTAs
        q, k, v = e4m3(1, 5, 8, head_dim), *(e4m3(1, seqlen_k, 2, head_dim) for _ in range(2))
        os.environ["OMNIATTN_FORCE_KERNEL"] = f"attn_fp8_sm90_fp16_d{head_dim}_m128n64_split_factors"
        call(oa.attention, q, k, v, **given(1, (8, 2), (5, seqlen_k)))
        del os.environ["OMNIATTN_FORCE_KERNEL"]


def caches(rng: np.random.Generator) -> None:
    """Append, copy of blocks and decode in every common format, in pages that are not all used."""
    lengths, block_size, heads_kv = (300, 0, 37), 16, 2
    starts = np.cumsum((0, *lengths))
    table = np.full((3, 19), 2**31 - 1)
    table[0, :], table[2, :3] = np.arange(19), (25, 22, 20)
    pages = {"block_table": to_gpu(table, np.int32), "seq_lens": to_gpu(np.array(lengths), np.int32)}
    q = to_gpu(rng.standard_normal((3, 2, 8, 64)))
    k, v = (to_gpu(rng.standard_normal((337, heads_kv, 64))) for _ in range(2))
    angle = rng.standard_normal((300, 32))
    turn = {"cos": to_gpu(np.cos(angle), np.float32), "sin": to_gpu(np.sin(angle), np.float32)}
    for dtype in ("fp16", "fp8", "int8", "int4"):
        cache = oa.PagedKVCache(28, block_size, heads_kv, 64, like=q, k_dtype=dtype)
        for plane in (cache.k, cache.v, cache.k_params, cache.v_params):
            if plane is not None:  # NaN; and copies of partly filled blocks may read all of them
                cupy.cuda.runtime.memset(plane.data.ptr, 0xFF, plane.nbytes)
        oa.append(cache, k, v, cu_seqlens=to_gpu(starts, np.int32), **turn, **pages)
        oa.copy_blocks(cache, [(18, 26), (0, 27)])
        for options in ({}, {"deterministic": True}, {"window": (40, 0), "softcap": 10.0}):
            check(*oa.decode(q, cache, out=poisoned(q.shape), return_lse=True, **pages, **options))
        if dtype == "fp16":  # warps that share keys: 64 rows, 72, 32
            for queries, heads in ((16, 8), (8, 18), (8, 8)):
                more = to_gpu(rng.standard_normal((3, queries, heads, 64)))
                check(*oa.decode(more, cache, out=poisoned(more.shape), return_lse=True, deterministic=True, **pages))
    pools(rng)
    indexer(rng)
    eight_bits(rng)
    latent(rng)


def faulty() -> None:
    """k says that it has twice the rows that its memory holds: proof that the tool sees what it has to."""
    q = to_gpu(np.zeros((1, 64, 1, 64)))
    v = to_gpu(np.zeros((1, 128, 1, 64)))
    out = poisoned(q.shape)
    half = to_gpu(np.zeros((1, 64, 1, 64)))
    k = cupy.ndarray((1, 128, 1, 64), np.float16, memptr=half.data)
    # The kernel that every GPU gets: a bulk copy of a Hopper kernel reads whole boxes unwatched.
    choose_from(tuple(spec for spec in select.REGISTRY if not spec.arch_specific))
    cupy.asnumpy(oa.attention(q, k, v, out=out))


def backward(width: int, rng: np.random.Generator) -> None:
    """Gradients: all and some of them, with what `CALLS` adds, of a batch and of packed sequences."""
    for head_dim, names in ((width - BELOW, tuple(CALLS)), (width, ("full", "causal"))):
        q, do = (to_gpu(rng.standard_normal((1, SEQLEN_Q, HEADS, head_dim))) for _ in range(2))
        k, v = (to_gpu(rng.standard_normal((1, SEQLEN_K, HEADS_KV, head_dim))) for _ in range(2))
        dlse = to_gpu(rng.standard_normal((1, HEADS, SEQLEN_Q)), np.float32)
        for name in names:
            options = options_for(CALLS[name], rng)
            o, lse = oa.attention(q, k, v, return_lse=True, **options)
            additive = "mask" in options and options["mask"].dtype != np.bool_
            sums = (*(("dsinks",) if "sinks" in options else ()), *(("dmask",) if additive else ()))
            call = (do, q, k, v, o, lse)
            check_all(oa.attention_backward(*call, dlse=dlse, wanted=("dq", "dk", "dv", *sums), **options))
            check_all(oa.attention_backward(*call, dq=poisoned(q.shape), deterministic=True, **options))
            for wanted in (("dq",), ("dk",), ("dv",)):
                check_all(oa.attention_backward(*call, wanted=wanted, **options))
    lengths_q, lengths_k = (70, 0, 1, 129), (131, 5, 0, 66)
    q, do = (to_gpu(rng.standard_normal((sum(lengths_q) + 3, HEADS, width))) for _ in range(2))
    k, v = (to_gpu(rng.standard_normal((sum(lengths_k) + 3, HEADS_KV, width))) for _ in range(2))
    for causal in (False, True):
        packed = {
            "cu_seqlens_q": to_gpu([0, *np.cumsum(lengths_q)], np.int32), "max_seqlen_q": max(lengths_q),
            "cu_seqlens_k": to_gpu([0, *np.cumsum(lengths_k)], np.int32), "max_seqlen_k": max(lengths_k),
            "causal": causal,
        }  # fmt: skip
        o, lse = oa.attention_varlen(q, k, v, return_lse=True, **packed)
        for deterministic in (False, True):
            check_all(oa.attention_varlen_backward(do, q, k, v, o, lse, deterministic=deterministic, **packed))


def check_all(gradients: tuple[Any, ...]) -> None:
    for gradient in gradients:
        check(gradient)


def choose_from(rows: tuple[KernelSpec, ...]) -> None:
    """Attention and its gradients have these rows only from here on."""
    select.REGISTRY = plan_attention.REGISTRY = rows
    for name in ("select.backward", "plan.backward"):
        module = sys.modules.get(f"omniattn.{name}")
        if hasattr(module, "REGISTRY"):
            module.REGISTRY = rows
    PLANS.clear()


if __name__ == "__main__":
    cupy.cuda.set_allocator(None)
    which = " ".join(sys.argv[1:])
    if which == "faulty":
        faulty()
    elif which == "caches":
        caches(np.random.default_rng(0))
    elif which in ("low_precision", "few_low_precision"):
        everything, few = select.REGISTRY, which.startswith("few")
        for width in (64, 128, 256):
            quantizers(width, np.random.default_rng(width), few)
        for rows in (everything, tuple(spec for spec in everything if not spec.arch_specific)):
            choose_from(rows)
            for width in (64, 128, 256):
                low_precision(width, np.random.default_rng(width), few)
                eight_bit_floats(width, np.random.default_rng(width), few)
        choose_from(everything)
    elif which in ("factors", "few_factors"):
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch's own: outputs and workspaces
        everything = select.REGISTRY
        for rows in (everything, tuple(spec for spec in everything if not spec.arch_specific)):
            choose_from(rows)
            for width in (64, 128, 256):
                value_factors(width, np.random.default_rng(width), which == "few_factors")
        choose_from(everything)
    elif which in ("backward", "few_backward", "cleared_backward"):
        everything, few = select.REGISTRY, which.startswith("few")
        if which == "cleared_backward":
            everything = tuple(spec for spec in everything if not spec.ordered_dq)
        # racecheck sees of what a warp has read or written only the lane that says so on an mbarrier.
        for rows in (generic(everything, few),) if few else (everything, generic(everything, few)):
            choose_from(rows)
            for width in (64, 128, 256, 512):
                backward(width, np.random.default_rng(width))
        choose_from(everything)
    elif which not in ("", "few_masks"):
        known = "few_masks, caches, [few_]low_precision, [few_]factors, [few_ | cleared_]backward, faulty"
        raise SystemExit(f"not one of {known}: {which}")
    else:
        if which == "few_masks":
            decode_by_rows_that_wait()
        caches(np.random.default_rng(0))
        everything = select.REGISTRY
        # What this GPU gets, then what every GPU gets.
        for rows in (everything, tuple(spec for spec in everything if not spec.arch_specific)):
            choose_from(rows)
            for width in HEAD_DIMS:
                generator = np.random.default_rng(width)
                dense(width, generator, which == "few_masks")
                varlen(width, generator)
                merge(width, generator)
            other_head_dim_v(np.random.default_rng(0))
            tokens(np.random.default_rng(0))
        choose_from(everything)
        few_queries(np.random.default_rng(0), which == "few_masks")
    print("all calls done")
