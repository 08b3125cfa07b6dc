"""Rows of the decode, append and block-copy kernels.

K and V have formats of their own, so there are more combinations than a wheel should hold: the registry lists equal
formats, which are prebuilt. Rows of K and V in different ones are made by the same functions and compiled where they
are used. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from .spec import IO_TYPES, KernelSpec

#: `KvKind` of device code by cache dtype; "fbgemm" is int4 in that layout, "e4m3" and "s8" are the caller's arrays in
#: 8 bits, whose channels are in their order.
KV_KINDS = {"bf16": 0, "fp16": 0, "fp8": 1, "int8": 2, "int4": 3, "fbgemm": 4, "e4m3": 5, "s8": 6}
_BITS = (16, 8, 8, 4, 4, 8, 8)
#: Widths of a cache's rows, and channels of a parameter group at least (`kv.formats` has the same, a test compares).
ROW_DIMS, MIN_GROUP = (64, 128, 256, 512), 32
#: Widest rows in 8 and 4 bits (`kv.formats` has the same, too).
MAX_QUANTIZED_DIM = 256
#: Shared memory of a CTA that every GPU gives, less what stands behind the tiles; that of an SM of the GPUs that the
#: tiles are tuned for; bytes.
_MOST_CTA, _MOST_SM = (99 << 10) - 128, 220 << 10
#: Shared memory of CTAs that have an SM each: more of it takes memory and L2 from the other kernel.
_MOST_BESIDE = 136 << 10
#: Query rows of the smallest tile.
TILE_ROWS = 8
#: Tiles of 8 query rows of a warp, by width of a cache's rows: of two with 512 channels O alone takes 256 registers.
QUERY_TILES: dict[int, tuple[int, ...]] = {64: (1, 2), 128: (1, 2), 256: (1, 2), 512: (1,)}
#: Tiles of 8 query rows of a warp, and warps of a CTA that share keys, of kernels for 16-bit caches with more than 16
#: rows a kv head: from few rows to many, by width of a cache's rows.
SHARED_TILES: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((2, 2), (2, 4), (3, 3)),
    128: ((2, 2), (2, 4), (3, 3)),
    512: ((1, 2),),
}
#: Warps of a row of the second kernel, and partial results that one of them asks for at once.
COMBINE_WARPS, RESULTS_OF_WARP = (1, 2, 4, 8), 8
#: Partial results of a row over a latent cache up to which one warp merges it; with more, warps that have a quarter of
#: it each are faster (docs/performance/mla_decode_sm80.md).
LATENT_RESULTS = 4
#: Words of the arguments behind the plan's scan: one sum a warp, and what was found.
_SCAN_WORDS = 2
#: Tiles of 8 query rows of kernels beside another one, by width of a cache's rows (256: two of them spill 452 bytes).
BESIDE_TILES: dict[int, tuple[int, ...]] = {64: (1, 2), 128: (1, 2), 256: (1,), 512: (1,)}


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_format(kind: int, groups: int, head_dim: int) -> str:
    """Name of a row's format: element type, and channels of a group where a row has several (``"int4g32"``)."""
    name = ("16", "fp8", "int8", "int4", "fbgemm", "e4m3", "s8")[kind]
    return name if groups == 1 else f"{name}g{head_dim // groups}"


def _shared_shape(head_dim: int, n_tiles: int, row_warps: int) -> dict[str, int]:
    """`_decode_shape` of CTAs whose warps share keys: registers leave room for 8 warps an SM at d128, for 12 at d64."""
    if head_dim > 256:  # two stages are 128 KB
        return {"tile": 16, "m_tiles": 1, "ctas": 1, "stages": 2}
    if n_tiles == 2:
        warps = 8 if head_dim > 64 else 12
        stages = 2 if (head_dim, row_warps) == (128, 2) else 3
        return {"tile": 16, "m_tiles": 2, "ctas": max(1, warps // row_warps), "stages": stages}
    warps = 6 if head_dim > 64 else 12
    return {"tile": 16, "m_tiles": 1, "ctas": max(1, warps // row_warps), "stages": 3}


def _decode_shape(head_dim: int, token_bytes: int, groups: int, n_tiles: int) -> dict[str, int]:
    """Keys of a warp's tile, sixteens of them that are computed together, CTAs that share an SM, and stages at most.

    Tuning record: docs/performance/decode.md. Registers decide on the CTAs: tiles of 8 query rows take more of them.
    More copies in flight than memory has use for only wait in its queues, and take L2 from others.
    """
    if head_dim == 128 and n_tiles == 1:
        if token_bytes <= 160 or (token_bytes <= 288 and groups == 1):
            return {"tile": 32, "m_tiles": 2, "ctas": 3 if token_bytes < 160 else 2, "stages": 2}
        if groups == 1:
            return {"tile": 16, "m_tiles": 1, "ctas": 2, "stages": 2}
    if head_dim > 256:
        return {"tile": 16, "m_tiles": 1, "ctas": 3, "stages": 2}
    tile = 32 if token_bytes <= 160 and n_tiles == 1 else 16
    ctas = 2 if n_tiles > 1 or token_bytes > 288 or head_dim == 256 else 3 if groups > 2 else 4
    return {"tile": tile, "m_tiles": 1, "ctas": ctas, "stages": 4}


def decode_row(
    dtype: str,
    head_dim: int,
    k: tuple[int, int],
    v: tuple[int, int],
    n_tiles: int,
    row_warps: int = 1,
    *,
    beside: bool = False,
) -> KernelSpec:
    """One ``decode_sm80`` kernel.

    Parameters
    ----------
    dtype : str
        Element type of q.
    head_dim : int
        One of `ROW_DIMS`.
    k, v : (kind, groups)
        `KV_KINDS`, and words of a row's parameters, 1 for 16 bits.
    n_tiles : int
        Tiles of 8 query rows that a warp has.
    row_warps : int
        1: the warps of a CTA have the same rows and keys of their own. More: so many warps with rows of their own, for
        each of which the CTA's keys are in shared memory once.
    beside : bool
        `KernelSpec.beside`: twice the warps, and as much on its way from memory as two CTAs have.
    """
    short, tag = IO_TYPES[dtype]
    sizes = [head_dim * _BITS[kind] // 8 for kind, _ in (k, v)]
    groups = max(k[1], v[1])
    token_bytes = sum(sizes) + sum(4 * count for kind, count in (k, v) if kind)
    if row_warps > 1:
        shape = _shared_shape(head_dim, n_tiles, row_warps)
    else:
        shape = _decode_shape(head_dim, token_bytes, groups, n_tiles)
    if KV_KINDS["fbgemm"] in (k[0], v[0]) and head_dim > 64:
        shape["ctas"] = 2  # copies word by word take registers too
    tile, ctas = shape["tile"], shape["ctas"]
    keys = tile * row_warps
    params = [4 * keys * count if kind else 16 for kind, count in (k, v)]
    stage = _up(_up(keys * sizes[0], 128) + keys * sizes[1] + sum(params), 128)
    # Two stages of each warp have to fit.
    warps = row_warps if row_warps > 1 else next(n for n in (4, 2, 1) if 2 * n * stage <= _MOST_CTA)
    if beside:
        warps, ctas = 2 * warps, 1
    rings = warps // row_warps
    # Of wide heads queries lie there too.
    queries = 16 * n_tiles * head_dim * warps if head_dim > 256 else 0
    most = (_MOST_BESIDE if beside else min(_MOST_CTA, _MOST_SM // ctas)) - queries
    stages = max(2, min(shape["stages"], most // (rings * stage)))
    # Every warp's part of the result: of other keys, or of other rows.
    merge = 4 * warps * 8 * n_tiles * (head_dim + 4) + 8 * warps * 8 * n_tiles
    smem_bytes = queries + _up(_up(max(stage * rings * stages, merge), 128) + 4 * (warps + _SCAN_WORDS), 128)
    names = [row_format(*x, head_dim) for x in (k, v)]
    formats = f"kv{names[0]}" if k == v else f"k{names[0]}_v{names[1]}"
    return KernelSpec(
        name=f"decode_sm80_{short}_d{head_dim}_{formats}" + _rows_suffix(n_tiles, row_warps) + "_beside" * beside,
        family="decode_sm80",
        op="decode",
        source="entry/decode_sm80.cu",
        symbol="decode_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("K_KIND", str(k[0])),
            ("V_KIND", str(v[0])),
            ("K_GROUPS", str(k[1])),
            ("V_GROUPS", str(v[1])),
            ("NUM_WARPS", str(warps)),
            ("NUM_STAGES", str(stages)),
            ("TILE_TOKENS", str(tile)),
            ("M_TILES", str(shape["m_tiles"])),
            ("N_TILES", str(n_tiles)),
            ("ROW_WARPS", str(row_warps)),
            ("MIN_CTAS", str(ctas)),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=8 * n_tiles * row_warps,
        block_n=warps * tile,
        num_warps=warps,
        smem_bytes=smem_bytes,
        ctas_per_sm=ctas,
        cache=(names[0], names[1]),
        beside=beside,
    )


def _rows_suffix(n_tiles: int, row_warps: int) -> str:
    """What a row's name says of its query rows; nothing of eight."""
    return (f"_n{n_tiles}" if n_tiles * row_warps > 1 else "") + (f"w{row_warps}" if row_warps > 1 else "")


def combine_row(dtype: str, head_dim: int, n_tiles: int, row_warps: int = 1) -> KernelSpec:
    """One ``decode_combine_sm80`` kernel; rows as in `decode_row`."""
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"decode_combine_sm80_{short}_d{head_dim}" + _rows_suffix(n_tiles, row_warps),
        family="decode_combine_sm80",
        op="decode_combine",
        source="entry/decode_combine_sm80.cu",
        symbol="decode_combine_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(head_dim)), ("ROWS", str(8 * n_tiles * row_warps))),
        dtype=dtype,
        head_dim=head_dim,
        block_m=8 * n_tiles * row_warps,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
        ctas_per_sm=8,
    )


#: Channels of a latent cache's rows, and how many of them, from the first on, are the value too.
LATENT_DIMS = (576, 512)
#: Query rows of a CTA over a latent cache.
LATENT_ROWS = 64


#: Formats of a latent cache's rows, and `LatentFormat` of device code: 16-bit channels; e4m3 with one scale for all
#: rows; e4m3 with four scales a row, and 64 channels in bf16.
LATENT_FORMATS: dict[str, int] = {"latent": 0, "latent_e4m3": 1, "latent_656": 2}


def has_latent_row(dtype: str, fmt: str) -> bool:
    """Whether Hopper's own kernels take queries of type ``dtype`` over rows of a format; the general ones take all."""
    return fmt != "latent_656" or dtype == "bfloat16"


def latent_row(dtype: str, fmt: str, *, by_maps: bool = False) -> KernelSpec:
    """One ``mla_decode_sm90`` kernel: over a latent cache, which all query heads share.

    Parameters
    ----------
    dtype : str
    fmt : str
        A key of `LATENT_FORMATS`.
    by_maps : bool
        TMA copies rows, in 16 bits and of pages with several in a row; else threads copy each row.
    """
    # Rows in 8 bits have a warpgroup more, for their conversion.
    threads, panels = 384 if fmt == "latent" else 512, LATENT_DIMS[0] // 64
    # Q and two blocks of 64 keys; maxima, denominators, listed keys; barriers; splits and the cursor; scan.
    words = 4 * 8 + 5 + threads // 32 + _SCAN_WORDS
    exact = 3 * panels * 64 * 128 + (4 * 10 + 2) * LATENT_ROWS + 8 * (2 * panels + 6) + 4 * words
    ending = f"{fmt.removeprefix('latent')}{'_tma' if by_maps else ''}"
    defines = (("CACHE_FORMAT", str(LATENT_FORMATS[fmt])), ("BY_MAPS", str(int(by_maps))))
    return _latent_sm90(
        "mla_decode_sm90", dtype, fmt, ending, defines, by_maps=by_maps, threads=threads, smem_bytes=_up(exact, 1024)
    )


def _latent_sm90(
    family: str,
    dtype: str,
    fmt: str,
    ending: str,
    defines: tuple[tuple[str, str], ...],
    *,
    by_maps: bool,
    threads: int,
    smem_bytes: int,
    map_blocks: bool = False,
    query_map: bool = False,
) -> KernelSpec:
    """What the families of Hopper over latent caches have in common. ending: of the name; defines: beside dims."""
    short, tag = IO_TYPES[dtype]
    width, width_v = LATENT_DIMS
    return KernelSpec(
        name=f"{family}_{short}_d{width}v{width_v}{ending}",
        family=family,
        op="latent_decode",
        source=f"entry/{family}.cu",
        symbol=family,
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(width)),
            ("HEAD_DIM_V", str(width_v)),
            *defines,
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=width,
        own_head_dim_v=width_v,
        tensor_maps=by_maps,
        map_blocks=map_blocks,
        query_map=query_map,
        block_m=LATENT_ROWS,
        block_n=64,
        num_warps=threads // 32,
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        cache=(fmt, fmt),
    )


def latent_blocks_row(dtype: str) -> KernelSpec:
    """One ``mla_decode_rows16_sm90`` kernel: over a latent cache in 16 bits whose pages have whole blocks of 64 keys.

    Parameters
    ----------
    dtype : str
    """
    threads, panels = 384, LATENT_DIMS[0] // 64
    # Three blocks of 64 keys, a panel and 16 channels of Q; factors of two kinds; barriers; splits, the cursor, blocks
    # of warps; scan.
    words = 4 * 8 + 5 + 4 + threads // 32 + _SCAN_WORDS
    exact = (3 * panels + 1) * 64 * 128 + (32 + 2 * 4) * LATENT_ROWS + 8 * 20 + 4 * words
    return _latent_sm90(
        "mla_decode_rows16_sm90", dtype, "latent", "", (), by_maps=True, threads=threads, smem_bytes=_up(exact, 1024),
        map_blocks=True, query_map=True,
    )  # fmt: skip


def latent_656_row() -> KernelSpec:
    """The ``mla_decode_rows8_sm90`` kernel: over a latent cache with rows of 656 bytes, for queries in bfloat16."""
    threads, panels = 512, LATENT_DIMS[0] // 64
    # Two blocks of 64 keys, two panels and 16 channels of Q, codes of three halves of blocks; factors of two kinds,
    # listed keys of stages and of buffers; barriers; splits, the cursor, blocks of stages and of warps; scan.
    words = 8 * 8 + 5 + 3 + 2 * 4 + threads // 32 + _SCAN_WORDS
    exact = (2 * panels + 2) * 64 * 128 + 3 * 32 * 657 + (32 + 2 * 4 + 2) * LATENT_ROWS + 8 * 23 + 4 * words
    return _latent_sm90(
        "mla_decode_rows8_sm90", "bfloat16", "latent_656", "_656", (), by_maps=False, threads=threads,
        smem_bytes=_up(exact, 1024),
    )  # fmt: skip


def latent_combine_row(dtype: str) -> KernelSpec:
    """The ``mla_combine_sm80`` kernel behind `latent_row`'s; its slots have the rows of all blocks."""
    short, tag = IO_TYPES[dtype]
    width = LATENT_DIMS[1]
    return KernelSpec(
        name=f"mla_combine_sm80_{short}_d{width}",
        family="mla_combine_sm80",
        op="latent_combine",
        source="entry/mla_combine_sm80.cu",
        symbol="mla_combine_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(width))),
        dtype=dtype,
        head_dim=width,
        block_m=LATENT_ROWS,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
        ctas_per_sm=4,
    )


def append_row(dtype: str, head_dim: int, k: tuple[int, int], v: tuple[int, int]) -> KernelSpec:
    """One ``kv_append_sm80`` kernel; parameters as in `decode_row`."""
    short, tag = IO_TYPES[dtype]
    names = [row_format(*x, head_dim) for x in (k, v)]
    formats = f"kv{names[0]}" if k == v else f"k{names[0]}_v{names[1]}"
    return KernelSpec(
        name=f"kv_append_sm80_{short}_d{head_dim}_{formats}",
        family="kv_append_sm80",
        op="append",
        source="entry/kv_append_sm80.cu",
        symbol="kv_append_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("K_KIND", str(k[0])),
            ("V_KIND", str(v[0])),
            ("K_GROUPS", str(k[1])),
            ("V_GROUPS", str(v[1])),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=1,
        block_n=1,
        num_warps=4,
        smem_bytes=0,
        cache=(names[0], names[1]),
    )


def dequantize_row(dtype: str, head_dim: int) -> KernelSpec:
    """One ``kv_dequantize_sm80`` kernel, for every format."""
    short, tag = IO_TYPES[dtype]
    return KernelSpec(
        name=f"kv_dequantize_sm80_{short}_d{head_dim}",
        family="kv_dequantize_sm80",
        op="dequantize",
        source="entry/kv_dequantize_sm80.cu",
        symbol="kv_dequantize_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(head_dim))),
        dtype=dtype,
        head_dim=head_dim,
        block_m=1,
        block_n=1,
        num_warps=4,
        smem_bytes=0,
        ctas_per_sm=8,
    )


def rounds_row() -> KernelSpec:
    """``kv_rounds_sm80``."""
    return KernelSpec(
        name="kv_rounds_sm80",
        family="kv_rounds_sm80",
        op="dequantize_rounds",
        source="entry/kv_rounds_sm80.cu",
        symbol="kv_rounds_sm80",
        defines=(),
        dtype="int32",
        head_dim=256,
        block_m=1,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
    )


def copy_row() -> KernelSpec:
    """``kv_copy_sm80``, for every format."""
    return KernelSpec(
        name="kv_copy_sm80",
        family="kv_copy_sm80",
        op="copy_blocks",
        source="entry/kv_copy_sm80.cu",
        symbol="kv_copy_sm80",
        defines=(),
        dtype="uint8",
        head_dim=256,
        block_m=1,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
    )


#: Pairs of kind and groups: a format of K or V.
_Format = tuple[int, int]


def _group_counts(head_dim: int) -> tuple[int, ...]:
    """Words of parameters that a row of so many channels can have."""
    return tuple(groups for groups in (1, 2, 4, 8) if head_dim >= groups * MIN_GROUP)


def _formats(head_dim: int) -> Iterator[_Format]:
    """Every format of a row; FBGEMM's has one group, or four."""
    if head_dim > MAX_QUANTIZED_DIM:
        yield KV_KINDS["bf16"], 1
        return
    yield from ((KV_KINDS[name], 1) for name in ("bf16", "e4m3", "s8"))
    for groups in _group_counts(head_dim):
        yield from ((KV_KINDS[name], groups) for name in ("fp8", "int8", "int4"))
    yield from ((KV_KINDS["fbgemm"], groups) for groups in (1, 4) if groups in _group_counts(head_dim))


def _rows_of_formats(dtype: str, head_dim: int, k: _Format, v: _Format) -> Iterator[KernelSpec]:
    for n_tiles in QUERY_TILES[head_dim]:
        yield decode_row(dtype, head_dim, k, v, n_tiles)
    yield append_row(dtype, head_dim, k, v)


def decode_rows() -> Iterator[KernelSpec]:
    """Rows that the registry lists: K and V in the same format, and what all formats share."""
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), ROW_DIMS):
        for x in _formats(head_dim):
            yield from _rows_of_formats(dtype, head_dim, x, x)
        yield from (combine_row(dtype, head_dim, n_tiles) for n_tiles in QUERY_TILES[head_dim])
        for n_tiles in BESIDE_TILES[head_dim]:
            yield decode_row(dtype, head_dim, (0, 1), (0, 1), n_tiles, beside=True)
        for n_tiles, row_warps in SHARED_TILES.get(head_dim, ()):
            yield decode_row(dtype, head_dim, (0, 1), (0, 1), n_tiles, row_warps)
            yield combine_row(dtype, head_dim, n_tiles, row_warps)
        yield dequantize_row(dtype, head_dim)
    for dtype in ("float16", "bfloat16"):
        yield latent_row(dtype, "latent", by_maps=True)
        yield latent_blocks_row(dtype)
        if has_latent_row(dtype, "latent_656"):
            yield latent_656_row()
        yield from (latent_row(dtype, fmt) for fmt in LATENT_FORMATS if fmt != "latent_656")
        yield latent_combine_row(dtype)
    yield rounds_row()
    yield copy_row()


def unlisted_rows() -> Iterator[KernelSpec]:
    """Rows of K and V in different formats; `registry.by_name` finds them.

    They may differ in their types, not in the number of groups that a row's parameters have, and not in FBGEMM's
    layout.
    """
    widths = [head_dim for head_dim in ROW_DIMS if head_dim <= MAX_QUANTIZED_DIM]
    for dtype, head_dim in itertools.product(("float16", "bfloat16"), widths):
        for groups in _group_counts(head_dim):
            kinds = [(KV_KINDS["bf16"], 1), *((KV_KINDS[name], groups) for name in ("fp8", "int8", "int4"))]
            for k, v in itertools.permutations(kinds, 2):
                yield from _rows_of_formats(dtype, head_dim, k, v)
