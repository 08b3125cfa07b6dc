"""Rows of attention on quantized operands. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .spec import IO_TYPES, KernelSpec


@dataclass(frozen=True)
class _Int8Sm90Tile:
    """Tile shape of ``attn_int8_sm90`` for one padded head_dim (tuning record: docs/performance/attn_int8_sm90.md).

    Attributes
    ----------
    head_dim, num_consumers, num_stages, num_q_stages : int
    bias_bytes : int
        Of an element of the tiles of an additive mask; 0: none.
    """

    head_dim: int
    num_consumers: int
    num_stages: int
    num_q_stages: int = 1
    bias_bytes: int = 0


_INT8_SM90_BLOCK_N = 64
#: Element types of Q and K by the names of precisions.
_QK_TYPES = {"int8": "Int8", "fp8": "E4m3"}
_INT8_SM90_TILES: tuple[_Int8Sm90Tile, ...] = (
    _Int8Sm90Tile(64, 4, 4, num_q_stages=2),
    _Int8Sm90Tile(128, 3, 4),
    _Int8Sm90Tile(256, 2, 2),
)
#: With the keys split over CTAs. Two warpgroups have registers for Q, and room for more stages: few rows are bound by
#: bytes.
_INT8_SPLIT_TILES = (
    _Int8Sm90Tile(64, 2, 8),
    _Int8Sm90Tile(64, 4, 4),
    _Int8Sm90Tile(128, 2, 8),
    _Int8Sm90Tile(128, 3, 4),
    _Int8Sm90Tile(256, 2, 2),
)
#: The same of packed sequences, each CTA with an even share of all keys.
_INT8_PACKED_SPLIT_TILES = (_Int8Sm90Tile(64, 2, 8), _Int8Sm90Tile(128, 2, 8), _Int8Sm90Tile(256, 2, 2))
_INT8_MASKS_TILES = (_Int8Sm90Tile(64, 4, 4), _Int8Sm90Tile(128, 3, 4), _Int8Sm90Tile(256, 2, 2))
_INT8_SOFTCAP_TILES = (
    _Int8Sm90Tile(64, 3, 4),
    _Int8Sm90Tile(128, 3, 4),
    _Int8Sm90Tile(256, 2, 2),
)
_INT8_BIAS_TILES = (
    _Int8Sm90Tile(64, 4, 3, bias_bytes=2),
    _Int8Sm90Tile(128, 3, 2, bias_bytes=2),
    _Int8Sm90Tile(256, 2, 1, bias_bytes=2),
    _Int8Sm90Tile(64, 3, 2, bias_bytes=4),
    _Int8Sm90Tile(128, 2, 2, bias_bytes=4),
    _Int8Sm90Tile(256, 2, 1, bias_bytes=4),
)
#: Of block masks: blocks of 128 queries are tiles. Of 64 channels exponentials want a third warpgroup; each passes over
#: what is not its own.
_INT8_BLOCKS_TILES = (
    _Int8Sm90Tile(64, 3, 6),
    _Int8Sm90Tile(128, 2, 6),
    _Int8Sm90Tile(256, 2, 2),
)

#: With the keys split over CTAs, and as many stages as fit.
_INT8_SPLIT_MASKS_TILES = (_Int8Sm90Tile(64, 2, 8), _Int8Sm90Tile(128, 2, 8), _Int8Sm90Tile(256, 2, 2))
_INT8_SPLIT_BIAS_TILES = (
    _Int8Sm90Tile(64, 2, 7, bias_bytes=2),
    _Int8Sm90Tile(128, 2, 4, bias_bytes=2),
    _Int8Sm90Tile(256, 2, 1, bias_bytes=2),
    _Int8Sm90Tile(64, 2, 4, bias_bytes=4),
    _Int8Sm90Tile(128, 2, 2, bias_bytes=4),
    _Int8Sm90Tile(256, 2, 1, bias_bytes=4),
)


#: In the order of the kernel's constants (kernels_cu/attention/integer_powers.cuh).
_INTEGER_POWERS = ("none", "corrected", "half linear", "linear")


def _int8_sm90_row(
    tile: _Int8Sm90Tile,
    dtype: str,
    suffix: str,
    *,
    qk: str = "int8",
    varlen: bool,
    smooth_q: bool,
    lse: bool,
    score_mods: bool = False,
    softcap: bool = False,
    blocks: bool = False,
    register_q: bool = False,
    split: bool = False,
    smem_bytes: int,
    factors: bool,
    raw_q: bool = False,
    powers: str = "none",
) -> KernelSpec:
    """A row of ``attn_int8_sm90``; ``tile`` as the kernel is compiled, ``smem_bytes`` before it is rounded up."""
    short, tag = IO_TYPES[dtype]
    smem_bytes = -(-smem_bytes // 1024) * 1024
    with_masks = score_mods and not varlen
    return KernelSpec(
        name=f"attn_{qk}_sm90_{short}_d{tile.head_dim}{suffix}",
        family=f"attn_{qk}_sm90",
        op="attention_split" if split else "attention",
        source="entry/attn_int8_sm90.cu",
        symbol="attn_int8_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("QK_TYPE", _QK_TYPES[qk]),
            ("HEAD_DIM", str(tile.head_dim)),
            ("NUM_CONSUMERS", str(tile.num_consumers)),
            ("BLOCK_N", str(_INT8_SM90_BLOCK_N)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("NUM_Q_STAGES", str(tile.num_q_stages)),
            ("VARLEN", str(int(varlen))),
            ("SMOOTH_Q", str(int(smooth_q))),
            ("WITH_LSE", str(int(lse))),
            ("REGISTER_Q", str(int(register_q))),
            ("QUANTIZE_Q", str(int(raw_q))),
            ("INTEGER_POWERS", str(_INTEGER_POWERS.index(powers))),
            ("VALUE_FACTORS", str(int(factors))),
            ("SCORE_MODS", str(int(score_mods or blocks))),
            ("BLOCK_MASK", str(int(blocks))),
            ("SOFTCAP", str(int(softcap))),
            ("BIAS_BYTES", str(tile.bias_bytes)),
            ("SPLIT_KEYS", str(int(split))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=64 * tile.num_consumers,
        block_n=_INT8_SM90_BLOCK_N,
        num_warps=4 * (1 + tile.num_consumers),
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        sequences="packed" if varlen else "dense",
        tensor_maps=True,
        softcap="any" if softcap else "never",
        masks="tiles" if tile.bias_bytes else "packed" if with_masks else "none",
        lists=with_masks or blocks,
        block_masks=blocks,
        lse=lse,
        smooth_q="never" if not smooth_q else "any" if score_mods else "always",
        value_factors=factors,
        quantizes_q=raw_q,
        integer_powers=powers,
        qk=qk,
        pv="fp8",
        pv_accumulator="fp32",
        grouping="sm90",
        bias_bytes=tile.bias_bytes,
    )


def _attn_int8_sm90(tile: _Int8Sm90Tile, dtype: str, varlen: bool, kind: str, qk: str = "int8") -> KernelSpec:
    """kind: ``""``, ``"lse"`` (makes the LSE too), ``"q16"`` and ``"q16_lse"`` (quantize Q themselves), ``"q16_fast"``
    (and makes all P of integers, linear), ``"smoothq"`` (with the LSE and delta_s), ``"factors"`` (with the LSE),
    ``"split"`` (the keys are split over CTAs; of packed sequences with the LSE), ``"split_lse"`` or
    ``"split_factors"``.
    """
    smooth_q, split, raw_q = kind == "smoothq", kind.startswith("split"), kind.startswith("q16")
    packed_split = split and varlen
    if smooth_q:  # delta_s takes registers that a fourth warpgroup would need
        tile = replace(tile, num_consumers=min(tile.num_consumers, 3))
    if varlen or smooth_q:
        tile = replace(tile, num_q_stages=1)
    block_m, block_n = 64 * tile.num_consumers, _INT8_SM90_BLOCK_N
    # Of 256 channels half of Q in 16 bits passes through a stage of K and V.
    q_bytes = 2 if raw_q and tile.head_dim < 256 else 1
    tiles_bytes = tile.head_dim * (tile.num_q_stages * block_m * q_bytes + 2 * tile.num_stages * block_n)
    delta_bytes = (tile.num_stages if smooth_q else 1) * -(-block_m // 128) * block_n * 4
    sums_bytes = block_m * tile.head_dim * 4 + 16 * tile.num_stages  # O, and the scales of K
    channels_bytes = 8 * tile.num_consumers * (tile.head_dim if tile.head_dim <= 128 else 1)  # scales and means of V
    barriers_bytes = 16 * (tile.num_q_stages + tile.num_stages)
    tiles_bytes += 512  # ones, which P is multiplied by for its sums
    smem_bytes = tiles_bytes + delta_bytes + sums_bytes + channels_bytes + barriers_bytes
    smem_bytes += 4 * block_m * (kind == "q16_lse" and qk == "int8")  # products of Q and K's mean
    smem_bytes += (80 if packed_split else 36) * tile.num_q_stages + 640
    return _int8_sm90_row(
        tile,
        dtype,
        f"_m{block_m}n{block_n}" * split
        + ("_varlen_split" if packed_split else f"_{kind}" * bool(kind) + "_varlen" * varlen),
        qk=qk,
        varlen=varlen,
        smooth_q=smooth_q,
        lse=packed_split or kind not in ("", "q16", "q16_fast", "split"),
        # The others have no registers to spare.
        register_q=tile.head_dim < 256
        if packed_split
        else (not varlen or raw_q) and (raw_q or kind in ("", "split") or (split and tile.num_consumers == 2)),
        split=split,
        smem_bytes=smem_bytes,
        factors=kind.endswith("factors"),
        raw_q=raw_q,
        powers=_powers(tile, kind) if qk == "int8" and not varlen else "none",
    )


def _powers(tile: _Int8Sm90Tile, kind: str) -> str:
    """By what a row of dense batches makes P of integers (docs/performance/attn_int8_sm90.md)."""
    if kind == "q16_fast":
        return "linear"
    # Half of them: all, corrected, take as long as special functions. Of 64 channels all corrected are faster, but of
    # inputs with outliers they lose too much of small P.
    return "half linear" if kind in ("", "q16") and tile.head_dim == 128 else "none"


def _attn_int8_mods_sm90(
    tile: _Int8Sm90Tile, dtype: str, kind: str, varlen: bool = False, qk: str = "int8"
) -> KernelSpec:
    """kind: ``"masks"`` or ``"softcap"``, with ``"_lse"`` if they make the LSE too, or ``"bias"``.

    Biases, and packed sequences, make it always. All add delta_s where there is some. With ``"_factors"`` behind it:
    factors of V, always the LSE, and no delta_s. With ``"split_"`` before it: keys split over CTAs, always the LSE.
    """
    factors, split = kind.endswith("_factors"), kind.startswith("split_")
    head_dim, block_n, block_m = tile.head_dim, _INT8_SM90_BLOCK_N, 64 * tile.num_consumers
    # Of each stage: the tile of an additive mask, or 512 bytes of bits a warpgroup; packed sequences have no masks.
    mask_bytes = block_m * block_n * tile.bias_bytes if tile.bias_bytes else 512 * tile.num_consumers
    delta_bytes = 4 * block_n * -(-block_m // 128)
    stage_bytes = 2 * head_dim * block_n + delta_bytes * (not factors) + 16 + mask_bytes * (not varlen)
    sums_bytes = block_m * head_dim * 4 + 256 + 8 * tile.num_consumers * (head_dim if head_dim <= 128 else 1)
    sums_bytes += delta_bytes * factors  # not used
    barriers_bytes = 16 * (1 + tile.num_stages) + (36 + 640) * varlen
    return _int8_sm90_row(
        tile,
        dtype,
        f"_m{block_m}n{block_n}" * split
        + "_varlen" * varlen
        + (f"_{kind}".replace("bias", f"bias{8 * tile.bias_bytes}")),
        qk=qk,
        varlen=varlen,
        smooth_q=not factors,
        lse=varlen or kind not in ("masks", "softcap"),
        score_mods=True,
        softcap="masks" not in kind,
        split=split,
        smem_bytes=head_dim * block_m + tile.num_stages * stage_bytes + sums_bytes + barriers_bytes,
        factors=factors,
    )


def _attn_int8_blocks_sm90(tile: _Int8Sm90Tile, dtype: str, lse: bool, qk: str) -> KernelSpec:
    """A row for block masks, and nothing else that is done to scores but their scale."""
    head_dim, block_n, block_m = tile.head_dim, _INT8_SM90_BLOCK_N, 64 * tile.num_consumers
    stage_bytes = 2 * head_dim * block_n + 16
    delta_bytes = 4 * block_n * -(-block_m // 128)  # not used
    sums_bytes = block_m * head_dim * 4 + 256 + 8 * tile.num_consumers * (head_dim if head_dim <= 128 else 1)
    barriers_bytes = 16 * (1 + tile.num_stages)
    return _int8_sm90_row(
        tile,
        dtype,
        f"_m{block_m}n{block_n}_blocks" + "_lse" * lse,
        qk=qk,
        varlen=False,
        smooth_q=False,
        lse=lse,
        blocks=True,
        # The others have no registers to spare.
        register_q=head_dim < 256 and tile.num_consumers == 2,
        smem_bytes=head_dim * block_m + tile.num_stages * stage_bytes + delta_bytes + sums_bytes + barriers_bytes,
        factors=False,
    )


@dataclass(frozen=True)
class _Int8Sm80Tile:
    """Tile shape of ``attn_int8_sm80`` for one padded head_dim (docs/performance/sage_sm80_sm89.md)."""

    head_dim: int
    num_warps: int
    min_ctas: int
    part_keys: int


_INT8_SM80_TILES = (_Int8Sm80Tile(64, 4, 3, 32), _Int8Sm80Tile(128, 4, 2, 64), _Int8Sm80Tile(256, 8, 1, 64))
# Score modifiers take registers for mask addresses: at head_dim 128 half the rows a warp.
_INT8_SM80_MODS_TILES = (_Int8Sm80Tile(64, 4, 2, 32), _Int8Sm80Tile(128, 8, 1, 64), _Int8Sm80Tile(256, 8, 1, 64))


def _attn_int8_sm80(tile: _Int8Sm80Tile, dtype: str, qk: str, pv: str, acc: str, kind: str) -> KernelSpec:
    """kind: ``""``, ``"smoothq"`` (with delta_s), ``"mods"`` (softcap, masks; delta_s too), ``"factors"``, or both."""
    short, tag = IO_TYPES[dtype]
    fp8, mods, block_m, keys = pv == "fp8", kind.endswith("mods"), 128, 64
    factors = "factors" in kind
    bits = {"int8": 8, "int4": 4, "fp8": 8}[qk]
    row_bytes = tile.head_dim * bits // 8
    stage_bytes = keys * (row_bytes + tile.head_dim * (2 - fp8))
    # One stage where two do not fit, or would leave sm_86, which takes fp16 sums of fp16 products, a CTA less.
    sm_bytes = (101 << 10) if tile.min_ctas == 1 or (pv, acc) == ("fp16", "fp16") else (164 << 10)
    num_stages = 2 if tile.min_ctas * (block_m * row_bytes + 2 * stage_bytes + 2048) <= sm_bytes else 1
    # And scales, delta_s, and what each warp knows of its tile.
    smem_bytes = block_m * row_bytes + num_stages * stage_bytes + 1024
    family = f"attn_{qk}_sm{89 if fp8 else 80}"
    return KernelSpec(
        name=f"{family}_{short}_d{tile.head_dim}" + "_acc16" * (acc == "fp16") + (f"_{kind}" if kind else ""),
        family=family,
        op="attention",
        source="entry/attn_int8_sm80.cu",
        symbol="attn_int8_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BITS", str(bits)),
            ("QK_E4M3", str(int(qk == "fp8"))),
            ("PV_TYPE", "E4m3" if fp8 else "Half"),
            ("PV_ACC16", str(int(acc == "fp16"))),
            ("SMOOTH_Q", str(int(kind == "smoothq"))),
            ("SCORE_MODS", str(int(mods))),
            ("VALUE_FACTORS", str(int(factors))),
            ("BLOCK_M", str(block_m)),
            ("PART_KEYS", str(tile.part_keys)),
            ("ONE_VOTE", str(int(fp8 or tile.head_dim != 128))),
            ("NUM_WARPS", str(tile.num_warps)),
            ("NUM_STAGES", str(num_stages)),
            ("MIN_CTAS", str(tile.min_ctas)),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=block_m,
        block_n=keys,
        num_warps=tile.num_warps,
        smem_bytes=smem_bytes,
        ctas_per_sm=tile.min_ctas,
        min_arch=(8, 9) if fp8 else (8, 0),
        softcap="any" if mods else "never",
        masks="any" if mods else "none",
        smooth_q="always" if kind == "smoothq" else "any" if mods and not factors else "never",
        value_factors=factors,
        qk=qk,
        pv=pv,
        pv_accumulator=acc,
        grouping="sm80",
    )


def _attn_int8_mbarrier_sm90(dtype: str) -> KernelSpec:
    """The common case at head_dim 128 on GPUs that have mbarrier.try_wait."""
    short, tag = IO_TYPES[dtype]
    head_dim, block_m, keys, num_stages = 128, 128, 64, 3
    # And scales, barriers, what each warp knows of its tile; V's scales and means, and the rows' biases.
    smem_bytes = block_m * head_dim + num_stages * keys * head_dim * 3 + 2048
    return KernelSpec(
        name=f"attn_int8_mbarrier_sm90_{short}_d{head_dim}",
        family="attn_int8_mbarrier_sm90",
        op="attention",
        source="entry/attn_int8_mbarrier_sm90.cu",
        symbol="attn_int8_mbarrier_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("BLOCK_M", str(block_m)),
            ("NUM_WARPS", "4"),
            ("NUM_STAGES", str(num_stages)),
            ("QK_AHEAD", "2"),
            ("V_EARLY", "4"),
            ("MIN_CTAS", "2"),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=block_m,
        block_n=keys,
        num_warps=4,
        smem_bytes=smem_bytes,
        ctas_per_sm=2,
        min_arch=(9, 0),
        qk="int8",
        pv="fp16",
        pv_accumulator="fp32",
        grouping="sm80",
    )


def quantized_attention_rows() -> Iterator[KernelSpec]:
    """Rows of attention, Hopper's own first."""
    yield from (
        _attn_int8_sm90(tile, dtype, varlen, kind, qk)
        for qk in ("int8", "fp8")
        for kind in ("", "lse", "smoothq" if qk == "int8" else "factors")
        for varlen in (False, True)
        for tile in _INT8_SM90_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_sm90(tile, dtype, False, kind, "fp8")
        for kind in ("q16", "q16_lse")
        for tile in _INT8_SM90_TILES
        if tile.head_dim < 256  # half of Q in 16 bits would come by a stage of K and V
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_sm90(tile, dtype, varlen, kind)
        for kind in ("q16", "q16_lse", "q16_fast")
        for varlen in (False, True)
        for tile in _INT8_SM90_TILES
        # Of 128 channels all P linear take as long as half of them.
        if kind != "q16_fast" or (tile.head_dim == 64 and not varlen)
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_mods_sm90(tile, dtype, kind, varlen, qk)
        for qk in ("int8", "fp8")
        for kind, varlen, tiles in (
            ("masks", False, _INT8_MASKS_TILES),
            ("masks_lse", False, _INT8_MASKS_TILES),
            ("softcap", False, _INT8_SOFTCAP_TILES),
            ("softcap_lse", False, _INT8_SOFTCAP_TILES),
            ("softcap", True, _INT8_SOFTCAP_TILES),
            ("bias", False, _INT8_BIAS_TILES),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_mods_sm90(tile, dtype, kind, varlen, "fp8")
        for kind, varlen, tiles in (
            ("masks_factors", False, _INT8_MASKS_TILES),
            ("softcap_factors", False, _INT8_SOFTCAP_TILES),
            ("softcap_factors", True, _INT8_SOFTCAP_TILES),
            ("bias_factors", False, _INT8_BIAS_TILES),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_blocks_sm90(tile, dtype, lse, qk)
        for qk in ("int8", "fp8")
        for lse in (False, True)
        for tile in _INT8_BLOCKS_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_sm80(tile, dtype, qk, pv, acc, kind)
        for kind in ("", "smoothq", "mods", "factors", "factors_mods")
        for qk in ("int8", "int4", "fp8")
        for pv in ("fp16", "fp8")
        if qk != "fp8" or (pv == "fp8" and kind != "smoothq")
        for acc in ("fp32", "fp16")
        if "factors" not in kind or (qk, acc) == ("fp8", "fp32")
        for tile in (_INT8_SM80_MODS_TILES if kind.endswith("mods") else _INT8_SM80_TILES)
        for dtype in ("float16", "bfloat16")
    )
    yield from (_attn_int8_mbarrier_sm90(dtype) for dtype in ("float16", "bfloat16"))


def quantized_split_rows() -> Iterator[KernelSpec]:
    """Rows of attention with the keys split over CTAs."""
    yield from (
        _attn_int8_sm90(tile, dtype, varlen=False, kind=kind, qk=qk)
        for qk in ("int8", "fp8")
        for kind in ("split", "split_lse", *(("split_factors",) if qk == "fp8" else ()))
        for tile in _INT8_SPLIT_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_sm90(tile, dtype, varlen=True, kind="split", qk=qk)
        for qk in ("int8", "fp8")
        for tile in _INT8_PACKED_SPLIT_TILES
        for dtype in ("float16", "bfloat16")
    )
    yield from (
        _attn_int8_mods_sm90(tile, dtype, kind + "_factors" * factors, qk=qk)
        for qk, factors in (("int8", False), ("fp8", False), ("fp8", True))
        for kind, tiles in (
            ("split_masks", _INT8_SPLIT_MASKS_TILES),
            ("split_softcap", _INT8_SPLIT_MASKS_TILES),
            ("split_bias", _INT8_SPLIT_BIAS_TILES),
        )
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    )
