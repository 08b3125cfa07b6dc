"""The only place where a kernel is made known.

A row describes one cubin: which source, which compile-time constants, which GPUs, and what it can do. The ahead-of-time
build, the run-time compiler, selection, the support tables, the parametrized tests and the benchmarks all read these
rows. This module imports nothing but the standard library, so that build tools can load it before the package is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .registry_decode import KV_KINDS, append_row, combine_row, decode_row, decode_rows

if TYPE_CHECKING:
    from .kv_format import KVFormat

#: Targets that a wheel carries. sm_86 and sm_87 load the sm_80 cubin (same major, lower minor).
PREBUILT_ARCHS: tuple[str, ...] = ("80", "89", "90a")

#: Targets that every generic kernel source must compile for (checked by the tests; JIT builds them on the GPU itself).
PORTABLE_ARCHS: tuple[str, ...] = ("80", "86", "89", "90a", "100a", "120a")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel binary.

    Attributes
    ----------
    name : str
        Unique; the cubin's file stem and its key in the manifest.
    family : str
        Kernel family, ``<op>_<variant>_<arch>``.
    op : str
        The operation it serves: ``"attention"``, ``"attention_int8"``, ``"merge_states"``, ``"quantize"`` or
        ``"quantize_delta"``.
    source : str
        Path of the ``.cu`` file below the kernels root.
    symbol : str
        Name of its one ``extern "C"`` kernel.
    defines : tuple of (name, value)
        Compile-time constants.
    min_arch : (major, minor)
        Lowest compute capability it runs on.
    arch_specific : bool
        True if it uses instructions of one ``sm_XYa`` target only.
    prebuild : tuple of str
        Targets the wheel carries it for; elsewhere it is compiled at run time.
    dtype : str
        Element type of q, k, v.
    head_dim : int
        Largest head_dim it takes (the padded tile width).
    block_m, block_n, num_warps : int
        Tile of query rows and keys, and warps per CTA.
    smem_bytes : int
        Dynamic shared memory per CTA.
    features : frozenset of str
        Options beyond the common set that it was compiled with. ``"score_mods"``: softcap, mask, softmax_scale <= 0.
    lacks : frozenset of str
        What kernels of its op take in general and this one does not. ``"varlen"``: packed sequences;
        ``"dense"``: batches; ``"any_strides"``: arrays that no tensor map describes (zero, negative or huge strides).
    bits, pv, pv_accumulator : int, str, str
        Of low-precision attention: bits of an element in Q K^T, element type (``"fp8"``, ``"fp16"``) and accumulator
        (``"fp32"``, ``"fp16"``) of P V.
    grouping : str
        Of low-precision attention: grouping of the operands that it reads (`omniattn.quantize_qk`).
    tuned_for : frozenset of str
        Workloads (`Problem.workload`) for which this row comes before others of the same reach; empty: all.
    allowed_spill_bytes : int
        Register spills that are known and measured to be harmless; the build fails above it.
    """

    name: str
    family: str
    op: str
    source: str
    symbol: str
    defines: tuple[tuple[str, str], ...]
    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    smem_bytes: int
    min_arch: tuple[int, int] = (8, 0)
    arch_specific: bool = False
    prebuild: tuple[str, ...] = PREBUILT_ARCHS
    features: frozenset[str] = field(default_factory=frozenset)
    lacks: frozenset[str] = field(default_factory=frozenset)
    tuned_for: frozenset[str] = field(default_factory=frozenset)
    allowed_spill_bytes: int = 0
    bits: int = 0
    pv: str = ""
    pv_accumulator: str = ""
    grouping: str = ""


#: Short names of the element types in kernel names, and the tags of ``kernels_cu/ptx/types.cuh``.
_IO_TYPES: dict[str, tuple[str, str]] = {
    "float16": ("fp16", "Half"),
    "bfloat16": ("bf16", "BFloat16"),
    "float32": ("fp32", "Float"),
}


@dataclass(frozen=True)
class _FwdTile:
    """Tile shape of ``attn_fwd_sm80`` for one padded head_dim (tuning record: docs/performance/attn_fwd_sm80.md)."""

    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    q_in_registers: bool
    min_ctas: int
    suffix: str = ""
    min_arch: tuple[int, int] = (8, 0)
    prebuild: tuple[str, ...] = PREBUILT_ARCHS


# Every tile fits into the 99 KB of sm_86, sm_89 and sm_120, so that one row serves all GPUs.
_FWD_SM80_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(32, 128, 64, 4, 2, True, 2),
    _FwdTile(64, 128, 64, 4, 2, True, 2),
    _FwdTile(96, 128, 48, 4, 2, False, 2),
    # 48 keys spill registers on sm_80 and sm_89, and are 4 % faster than 32 on sm_90.
    _FwdTile(128, 128, 32, 4, 2, False, 2, prebuild=("80", "89")),
    _FwdTile(128, 128, 48, 4, 2, False, 2, suffix="_n48", min_arch=(9, 0), prebuild=("90a",)),
    _FwdTile(192, 64, 64, 4, 1, False, 2),
    _FwdTile(256, 64, 64, 4, 1, False, 2),
)

# Score modifiers take registers for mask addresses: half the rows a warp.
_FWD_SM80_MODS_TILES: tuple[_FwdTile, ...] = (
    _FwdTile(32, 128, 32, 4, 2, True, 2),
    _FwdTile(64, 128, 32, 4, 2, False, 2),
    _FwdTile(96, 64, 64, 4, 2, False, 2),
    _FwdTile(128, 64, 64, 4, 2, False, 2),
    _FwdTile(192, 64, 64, 4, 1, False, 2),
    _FwdTile(256, 64, 64, 4, 1, False, 2),
)


def _attn_fwd_sm80(tile: _FwdTile, dtype: str, score_mods: bool) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    smem_bytes = 2 * tile.head_dim * (tile.block_m + 2 * tile.num_stages * tile.block_n)
    return KernelSpec(
        name=f"attn_fwd_sm80_{short}_d{tile.head_dim}{tile.suffix}" + ("_mods" if score_mods else ""),
        family="attn_fwd_sm80",
        op="attention",
        source="entry/attn_fwd_sm80.cu",
        symbol="attn_fwd_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BLOCK_M", str(tile.block_m)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_WARPS", str(tile.num_warps)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("Q_IN_REGISTERS", str(int(tile.q_in_registers))),
            ("MIN_CTAS", str(tile.min_ctas)),
            ("SCORE_MODS", str(int(score_mods))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=tile.block_m,
        block_n=tile.block_n,
        num_warps=tile.num_warps,
        smem_bytes=smem_bytes,
        min_arch=tile.min_arch,
        prebuild=tile.prebuild,
        features=frozenset({"score_mods"}) if score_mods else frozenset(),
    )


@dataclass(frozen=True)
class _FwdSm90Tile:
    """Tile shape of ``attn_fwd_sm90`` for one padded head_dim (tuning record: docs/performance/attn_fwd_sm90.md)."""

    head_dim: int
    num_consumers: int
    block_n: int
    num_stages: int = 2
    num_q_stages: int = 1
    tuned_for: tuple[str, ...] = ()


_FWD_SM90_TILES: tuple[_FwdSm90Tile, ...] = (
    _FwdSm90Tile(64, 4, 64, 4, 2),
    _FwdSm90Tile(96, 3, 96),
    _FwdSm90Tile(128, 2, 128, 2, 2, ("short causal",)),
    _FwdSm90Tile(128, 3, 64, 3, 1, ("causal", "short", "long")),
    _FwdSm90Tile(192, 2, 64, 3),
    _FwdSm90Tile(256, 2, 64),
)


def _attn_fwd_sm90(tile: _FwdSm90Tile, dtype: str, varlen: bool) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    block_m = 64 * tile.num_consumers
    num_q_stages = 1 if varlen else tile.num_q_stages  # a second one costs packed sequences registers
    row_bytes = -(-tile.head_dim // 64) * 128
    tiles_bytes = row_bytes * (num_q_stages * block_m + 2 * tile.num_stages * tile.block_n)
    barriers_bytes = 16 * (num_q_stages + tile.num_stages)
    # And for packed sequences a tile of 36 bytes with each Q, and 32 sequences of 20 bytes.
    smem_bytes = -(-(tiles_bytes + barriers_bytes + 36 * num_q_stages + 640) // 1024) * 1024
    return KernelSpec(
        name=f"attn_fwd_sm90_{short}_d{tile.head_dim}_m{block_m}n{tile.block_n}" + ("_varlen" if varlen else ""),
        family="attn_fwd_sm90",
        op="attention",
        source="entry/attn_fwd_sm90.cu",
        symbol="attn_fwd_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("NUM_CONSUMERS", str(tile.num_consumers)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("NUM_Q_STAGES", str(num_q_stages)),
            ("VARLEN", str(int(varlen))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=block_m,
        block_n=tile.block_n,
        num_warps=4 * (1 + tile.num_consumers),
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        prebuild=("90a",),
        lacks=frozenset({"dense" if varlen else "varlen", "any_strides"}),
        tuned_for=frozenset(tile.tuned_for),
    )


@dataclass(frozen=True)
class _Int8Sm90Tile:
    """Tile shape of ``attn_int8_sm90`` for one padded head_dim (tuning record: docs/performance/attn_int8_sm90.md)."""

    head_dim: int
    num_consumers: int
    block_n: int
    num_stages: int
    num_q_stages: int
    long: bool = False  # a further tile, for long problems that need nothing special


_INT8_SM90_TILES: tuple[_Int8Sm90Tile, ...] = (
    _Int8Sm90Tile(64, 4, 64, 4, 2),
    _Int8Sm90Tile(64, 3, 128, 4, 1, long=True),
    _Int8Sm90Tile(128, 3, 64, 4, 1),
    _Int8Sm90Tile(256, 2, 64, 2, 1),
)


def _attn_int8_sm90(tile: _Int8Sm90Tile, dtype: str, varlen: bool, smooth_q: bool) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    # delta_s takes registers that a fourth warpgroup would need.
    num_consumers = min(tile.num_consumers, 3) if smooth_q else tile.num_consumers
    block_m = 64 * num_consumers
    num_q_stages = 1 if varlen or smooth_q else tile.num_q_stages
    tiles_bytes = tile.head_dim * (num_q_stages * block_m + 2 * tile.num_stages * tile.block_n)
    delta_bytes = (tile.num_stages if smooth_q else 1) * -(-block_m // 128) * tile.block_n * 4
    sums_bytes = block_m * tile.head_dim * 4 + 16 * tile.num_stages  # O, and the scales of K
    barriers_bytes = 16 * (num_q_stages + tile.num_stages)
    smem_bytes = tiles_bytes + delta_bytes + sums_bytes + barriers_bytes + 36 * num_q_stages + 640
    smem_bytes = -(-smem_bytes // 1024) * 1024
    return KernelSpec(
        name=f"attn_int8_sm90_{short}_d{tile.head_dim}"
        + "_long" * tile.long
        + "_smoothq" * smooth_q
        + "_varlen" * varlen,
        family="attn_int8_sm90",
        op="attention_int8",
        source="entry/attn_int8_sm90.cu",
        symbol="attn_int8_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("NUM_CONSUMERS", str(num_consumers)),
            ("BLOCK_N", str(tile.block_n)),
            ("NUM_STAGES", str(tile.num_stages)),
            ("NUM_Q_STAGES", str(num_q_stages)),
            ("VARLEN", str(int(varlen))),
            ("SMOOTH_Q", str(int(smooth_q))),
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=tile.head_dim,
        block_m=block_m,
        block_n=tile.block_n,
        num_warps=4 * (1 + num_consumers),
        smem_bytes=smem_bytes,
        min_arch=(9, 0),
        arch_specific=True,
        prebuild=("90a",),
        features=frozenset({"smooth_q"}) if smooth_q else frozenset(),
        lacks=frozenset({"dense" if varlen else "varlen", "any_strides"}),
        tuned_for=frozenset({"long"} if tile.long else ()),
        bits=8,
        pv="fp8",
        pv_accumulator="fp32",
        grouping="sm90",
        # What is known of a tile; none of it in the loop of the common step.
        allowed_spill_bytes=(192 if smooth_q else 96) if varlen else 64,
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


def _attn_int8_sm80(
    tile: _Int8Sm80Tile, dtype: str, bits: int, pv: str, acc: str, kind: str, hopper: bool = False
) -> KernelSpec:
    """kind: ``""``, ``"smoothq"`` (delta_s is added) or ``"mods"`` (softcap, masks; delta_s too)."""
    short, tag = _IO_TYPES[dtype]
    fp8, mods, block_m, keys = pv == "fp8", kind == "mods", 128, 64
    row_bytes = tile.head_dim * bits // 8
    stage_bytes = keys * (row_bytes + tile.head_dim * (2 - fp8))
    # One stage where two do not fit, or would leave sm_86, which takes fp16 sums of fp16 products, a CTA less.
    sm_bytes = (101 << 10) if tile.min_ctas == 1 or (pv, acc) == ("fp16", "fp16") else (164 << 10)
    num_stages = 2 if tile.min_ctas * (block_m * row_bytes + 2 * stage_bytes + 2048) <= sm_bytes else 1
    # And scales, delta_s, and what each warp knows of its tile.
    smem_bytes = block_m * row_bytes + num_stages * stage_bytes + 1024
    family = f"attn_int{bits}_sm{89 if fp8 else 80}"
    # The common widths, as the GPUs of an architecture choose them (select.PV_CHOICES), and what Hopper falls back to.
    prebuild: tuple[str, ...] = ()
    if tile.head_dim <= 128 and not hopper and kind == ("smoothq" if bits == 4 else ""):
        prebuild = ("80",) if not fp8 else ("89",) if acc == "fp16" else ()
    if hopper or ((bits, pv, acc) == (8, "fp16", "fp32") and tile.head_dim <= 128 and kind == "mods"):
        prebuild = (*prebuild, "90a")
    return KernelSpec(
        name=f"{family}_{short}_d{tile.head_dim}"
        + "_acc16" * (acc == "fp16")
        + (f"_{kind}" if kind else "")
        + "_vote" * hopper,
        family=family,
        op="attention_int8",
        source="entry/attn_int8_sm80.cu",
        symbol="attn_int8_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(tile.head_dim)),
            ("BITS", str(bits)),
            ("PV_TYPE", "E4m3" if fp8 else "Half"),
            ("PV_ACC16", str(int(acc == "fp16"))),
            ("SMOOTH_Q", str(int(kind == "smoothq"))),
            ("SCORE_MODS", str(int(mods))),
            ("BLOCK_M", str(block_m)),
            ("PART_KEYS", str(tile.part_keys)),
            ("ONE_VOTE", str(int(hopper or fp8 or tile.head_dim != 128))),
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
        min_arch=(9, 0) if hopper else (8, 9) if fp8 else (8, 0),
        prebuild=prebuild,
        # Mostly what only masked tiles need. hopper: one vote was 5 % faster than one for every 16 rows all the same.
        allowed_spill_bytes=216 if hopper else {64: 32, 128: 100, 256: 192}[tile.head_dim],
        features=frozenset({"": (), "smoothq": ("smooth_q",), "mods": ("score_mods", "smooth_q")}[kind]),
        bits=bits,
        pv=pv,
        pv_accumulator=acc,
        grouping="sm80",
    )


def _merge_states(dtype: str) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    return KernelSpec(
        name=f"merge_states_sm80_{short}",
        family="merge_states_sm80",
        op="merge_states",
        source="entry/merge_states_sm80.cu",
        symbol="merge_states_sm80",
        defines=(("IO_TYPE", tag),),
        dtype=dtype,
        head_dim=256,
        block_m=1,
        block_n=1,
        num_warps=8,
        smem_bytes=0,
    )


def _quantize(head_dim: int, dtype: str) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    # Two threads a channel; 80 registers each, so that three CTAs of 256 threads share an SM.
    num_warps, ctas = head_dim // 16, {64: 6, 128: 3, 256: 1}[head_dim]
    return KernelSpec(
        name=f"quantize_sm80_{short}_d{head_dim}",
        family="quantize_sm80",
        op="quantize",
        source="entry/quantize_sm80.cu",
        symbol="quantize_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(head_dim)), ("CTAS", str(ctas))),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=num_warps,
        smem_bytes=0,
        # Two CTAs an SM would need no spills: measured 5 to 10 % slower.
        allowed_spill_bytes=320,
    )


def _quantize_delta(head_dim: int, dtype: str) -> KernelSpec:
    short, tag = _IO_TYPES[dtype]
    smem_bytes = 2 * 64 * (2 * head_dim + 16)
    return KernelSpec(
        name=f"quantize_delta_sm80_{short}_d{head_dim}",
        family="quantize_delta_sm80",
        op="quantize_delta",
        source="entry/quantize_delta_sm80.cu",
        symbol="quantize_delta_sm80",
        defines=(("IO_TYPE", tag), ("HEAD_DIM", str(head_dim)), ("SMEM_BYTES", str(smem_bytes))),
        dtype=dtype,
        head_dim=head_dim,
        block_m=16,
        block_n=64,
        num_warps=4,
        smem_bytes=smem_bytes,
    )


REGISTRY: tuple[KernelSpec, ...] = (
    *(
        _attn_fwd_sm80(tile, dtype, score_mods)
        for score_mods, tiles in ((False, _FWD_SM80_TILES), (True, _FWD_SM80_MODS_TILES))
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    ),
    *(
        _attn_fwd_sm90(tile, dtype, varlen)
        for varlen in (False, True)
        for tile in _FWD_SM90_TILES
        for dtype in ("float16", "bfloat16")
    ),
    *(
        _attn_int8_sm90(tile, dtype, varlen, smooth_q)
        for smooth_q in (False, True)
        for varlen in (False, True)
        for tile in _INT8_SM90_TILES
        for dtype in ("float16", "bfloat16")
        if not tile.long or not (smooth_q or varlen)
    ),
    *(
        _attn_int8_sm80(tile, dtype, bits, pv, acc, kind)
        for kind, tiles in (("", _INT8_SM80_TILES), ("smoothq", _INT8_SM80_TILES), ("mods", _INT8_SM80_MODS_TILES))
        for bits in (8, 4)
        for pv in ("fp16", "fp8")
        for acc in ("fp32", "fp16")
        for tile in tiles
        for dtype in ("float16", "bfloat16")
    ),
    *(
        _attn_int8_sm80(_INT8_SM80_TILES[1], dtype, 8, "fp16", "fp32", "", hopper=True)
        for dtype in ("float16", "bfloat16")
    ),
    *(_merge_states(dtype) for dtype in ("float16", "bfloat16", "float32")),
    *(
        make(head_dim, dtype)
        for make in (_quantize, _quantize_delta)
        for head_dim in (64, 128, 256)
        for dtype in ("float16", "bfloat16")
    ),
    *(KernelSpec(**row) for row in decode_rows()),
)


def _kv(fmt: KVFormat) -> tuple[int, int]:
    return KV_KINDS[fmt.dtype], max(fmt.groups, 1)


def _registered(row: dict[str, Any]) -> KernelSpec:
    """The registry's row of this name, or one that is compiled where it is used."""
    return next((spec for spec in REGISTRY if spec.name == row["name"]), None) or KernelSpec(**row)


def decode_spec(dtype: str, k: KVFormat, v: KVFormat, n_tiles: int) -> KernelSpec:
    """The kernel that decodes queries of ``dtype`` over a cache of these formats."""
    return _registered(decode_row(dtype, k.row_dim, _kv(k), _kv(v), n_tiles))


def decode_combine_spec(dtype: str, row_dim: int, n_tiles: int) -> KernelSpec:
    """The kernel that merges what `decode_spec`'s leaves."""
    return _registered(combine_row(dtype, row_dim, n_tiles))


def append_spec(dtype: str, k: KVFormat, v: KVFormat) -> KernelSpec:
    """The kernel that appends tokens of ``dtype`` to a cache of these formats."""
    return _registered(append_row(dtype, k.row_dim, _kv(k), _kv(v)))


def by_name(name: str) -> KernelSpec:
    """Return the row called ``name``; KeyError lists near misses."""
    for spec in REGISTRY:
        if spec.name == name:
            return spec
    import difflib

    close = difflib.get_close_matches(name, [s.name for s in REGISTRY], n=3)
    raise KeyError(f"no kernel named {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
