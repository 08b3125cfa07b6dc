"""The kernels of decode, append and copies, and of merging."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UnsupportedError
from ..kv.formats import IN_ORDER, LATENT_656, KVFormat
from ..problems import AppendProblem, DequantizeProblem, Target
from ..problems.decode import LATENT_KEYS
from ..registry import REGISTRY, KernelSpec, registered
from ..registry.decode import (
    BESIDE_TILES,
    KV_KINDS,
    LATENT_DIMS,
    LATENT_ROWS,
    append_row,
    combine_row,
    decode_row,
    has_latent_row,
    latent_656_row,
    latent_blocks_row,
    latent_combine_row,
    latent_row,
)
from ..registry.latent_append import latent_append_row
from ..registry.latent_sm80 import LATENT_TILES, has_latent_clusters, latent_few_row, latent_sm80_row
from .choice import Selection, names_in, only, the_one
from .fit import fit

#: Rows up to which the general kernel over latent caches is faster than Hopper's own
#: (docs/performance/mla_decode_sm80.md).
FEW_LATENT_ROWS = LATENT_TILES[0]


def row_kind(fmt: KVFormat) -> tuple[int, int]:
    """Kind and groups of a row, as the registry counts them."""
    name = {"fp8": "e4m3", "int8": "s8"}[fmt.dtype] if fmt.layout == IN_ORDER else fmt.dtype
    return KV_KINDS["fbgemm" if fmt.layout == "fbgemm" else name], max(fmt.groups, 1)


def decode_spec(
    dtype: str, k: KVFormat, v: KVFormat, query_tiles: int, row_warps: int = 1, *, beside: bool = False
) -> KernelSpec:
    """The kernel that decodes queries of ``dtype`` over a cache of these formats; rows as `registry.decode_row`'s."""
    kinds = row_kind(k), row_kind(v)
    return registered(decode_row(dtype, k.row_dim, *kinds, query_tiles, row_warps=row_warps, beside=beside))


def combine_spec(dtype: str, row_dim: int, query_tiles: int, row_warps: int = 1) -> KernelSpec:
    """The kernel that merges what `decode_spec`'s leaves."""
    return registered(combine_row(dtype, row_dim, query_tiles, row_warps=row_warps))


def append_spec(dtype: str, k: KVFormat, v: KVFormat) -> KernelSpec:
    """The kernel that appends tokens of ``dtype`` to a cache of these formats."""
    return registered(append_row(dtype, k.row_dim, row_kind(k), row_kind(v)))


def _formats(k: KVFormat, v: KVFormat) -> str:
    names = [f"{f.dtype}{'' if f.groups < 2 else f' in groups of {f.group_size}'}" for f in (k, v)]
    if "fbgemm" in (k.layout, v.layout):
        names = [f"{name} in FBGEMM's layout" for name in names]
    elif IN_ORDER in (k.layout, v.layout):
        names = [f"{name} in the caller's arrays" for name in names]
    return f"K and V in {names[0]}" if names[0] == names[1] else f"K in {names[0]}, V in {names[1]}"


def select_decode(
    dtype: str,
    k: KVFormat,
    v: KVFormat,
    tiles: Sequence[tuple[int, int]],
    *,
    target: Target,
    force: str | None = None,
    beside: bool = False,
) -> tuple[Selection, Selection]:
    """The kernels of one pass over keys: the main one, and the one that combines partial results.

    Parameters
    ----------
    dtype : str
        Of the queries.
    k, v : KVFormat
    tiles : sequence of (int, int)
        Tiles of 8 query rows of a warp, and warps that have rows of their own: what can serve, the best one first.
    target : Target
    force : str, optional
        `forced`.
    beside : bool
        `KernelSpec.beside`; such a row that ``force`` names serves any call.

    Raises
    ------
    ArgumentError
        ``force`` names another kernel of these operations, or no kernel.
    UnsupportedError
        The GPU is too old.
    """
    names = {part.strip() for part in (force or "").split(",")}
    kinds = {beside, any(name.endswith("_beside") for name in names)}
    able = [
        (decode_spec(dtype, k, v, *each, beside=kind), combine_spec(dtype, k.row_dim, *each))
        for kind in sorted(kinds, reverse=beside) for each in tiles
        if not kind or (k.bits == v.bits == 16 and each[0] in BESIDE_TILES[k.row_dim] and each[1] == 1)
    ]  # fmt: skip
    main, combine = next((pair for pair in able if names & {spec.name for spec in pair}), able[0])
    rows = f"tiles of {main.block_m} query rows"
    what = f"{dtype} queries, {_formats(k, v)}, rows of {k.row_dim} channels, {rows}"
    return the_one(main, what, target, force), the_one(combine, f"partial results of {rows}", target, force)


def no_latent_kernel(width: int, width_v: int) -> UnsupportedError:
    """The error of a latent cache with such rows on a GPU."""
    return UnsupportedError(
        f"no kernel serves a latent cache with rows of {width} channels, {width_v} of them V",
        instead="rows of {} channels, {} of them V, or arrays on the CPU".format(*LATENT_DIMS),
    )


def latent_kind(k: KVFormat) -> str:
    """A key of `LATENT_FORMATS`."""
    if not k.quantized:
        return "latent"
    return "latent_656" if k.layout == LATENT_656 else "latent_e4m3"


def select_latent(
    dtype: str,
    k: KVFormat,
    rows: int,
    target: Target,
    force: str | None = None,
    *,
    box: int = 0,
    queries: bool = True,
    few: bool = False,
    clusters: bool = False,
) -> tuple[Selection, Selection]:
    """The kernels of one pass over a latent cache for so many query rows of a sequence, as `select_decode`'s.

    Hopper has kernels of its own, for 64 rows at a time; see `FEW_LATENT_ROWS`. box: rows of the cache that one copy by
    TMA can bring, 0 if none can. Where those are a block of keys, 64 query rows and more have a kernel that computes
    more at a time. queries: whether one copy by TMA brings 64 query rows, which that kernel has to have. Rows of 656
    bytes have a kernel that dequantizes beside the products. few, clusters: whether CTAs of few rows, and clusters of
    them, are the fastest, as what there is to do is little.
    """
    fmt = latent_kind(k)
    best = next((tile for tile in LATENT_TILES if tile >= rows), LATENT_TILES[-1])
    general = latent_sm80_row(dtype, fmt, best)
    able = [general, *(latent_sm80_row(dtype, fmt, tile) for tile in LATENT_TILES if tile != best)]
    able.insert(0 if rows <= FEW_LATENT_ROWS else len(able), latent_few_row(dtype, fmt))
    if has_latent_row(dtype, fmt):
        at = 1 if rows <= FEW_LATENT_ROWS else 0
        own = [latent_row(dtype, fmt, by_maps=maps) for maps in ((True, False) if box else (False,))]
        if box == LATENT_KEYS and queries:
            own.insert(0 if rows >= LATENT_ROWS else len(own), latent_blocks_row(dtype))
        if fmt == "latent_656":
            own = [latent_656_row()]
        able[at:at] = own
    if few and has_latent_row(dtype, fmt) and fmt != "latent_e4m3":  # which was not measured
        able.insert(0, latent_few_row(dtype, fmt))
    if clusters and has_latent_clusters(fmt):
        able.insert(0, latent_few_row(dtype, fmt, clusters=True))
    names = names_in(force)
    named = [row for row in able if row.name in names]
    main = next((row for row in named or able if fit(row, None, target) is None), general)
    width, width_v = LATENT_DIMS
    what = f"{dtype} queries, a latent cache with rows of {width} channels, the first {width_v} of them V"
    if box == LATENT_KEYS and not queries and rows >= LATENT_ROWS:
        what += f"; no copy brings {LATENT_ROWS} of its {rows} query rows"
    merged = f"partial results of {width_v} channels"
    combine = registered(latent_combine_row(dtype))
    return the_one(registered(main), what, target, force), the_one(combine, merged, target, force)


def select_append(problem: AppendProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel of an append; raises as `select_decode`."""
    k, v = problem.cache.k_format, problem.cache.v_format
    if problem.cache.is_latent:
        if (k.head_dim, v.head_dim) != LATENT_DIMS:
            raise no_latent_kernel(k.head_dim, v.head_dim)
        kind = latent_kind(k)
        what = f"{problem.dtype} tokens, rows of {k.head_dim} channels, {kind}"
        return the_one(registered(latent_append_row(problem.dtype, kind)), what, target, force)
    what = f"{problem.dtype} tokens, {_formats(k, v)}, rows of {k.row_dim} channels"
    return the_one(append_spec(problem.dtype, k, v), what, target, force)


def select_dequantize(problem: DequantizeProblem, target: Target, force: str | None = None) -> tuple[Selection, ...]:
    """The kernels that make keys and values of any format 16 bits wide: which, and in which places; their elements."""
    width = problem.cache.k_format.row_dim
    rounds = the_one(only("dequantize_rounds"), "places of keys in 16 bits", target, force)
    spec = only("dequantize", lambda spec: (spec.dtype, spec.head_dim) == (problem.dtype, width))
    what = f"{problem.dtype} of {_formats(problem.cache.k_format, problem.cache.v_format)}, rows of {width} channels"
    return rounds, the_one(spec, what, target, force)


def select_copy(target: Target, force: str | None = None) -> Selection:
    """The kernel that copies blocks and slots; raises as `select_decode`."""
    return the_one(only("copy_blocks"), "copies bytes of every format", target, force)


def select_merge(dtype: str, target: Target, force: str | None = None) -> Selection:
    """The kernel that merges partial results of element type ``dtype``.

    Raises
    ------
    UnsupportedError
        There is none for that element type, or for the GPU.
    """
    if not any(spec.op == "merge_states" and spec.dtype == dtype for spec in REGISTRY):
        raise UnsupportedError(
            f"merge_states has no kernel for {dtype}",
            instead=", ".join(s.dtype for s in REGISTRY if s.op == "merge_states"),
        )
    spec = only("merge_states", lambda spec: spec.dtype == dtype)
    return the_one(spec, f"merges {dtype} outputs", target, force)


def select_clear(target: Target, force: str | None = None) -> Selection:
    """The kernel that clears what packed sequences do not use of their rows; raises as `select_decode`."""
    return the_one(only("clear_unused"), "clears the rows of packed sequences that are not used", target, force)
