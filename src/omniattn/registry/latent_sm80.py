"""Rows of ``mla_decode_sm80`` and ``mla_decode_few_sm90``: decoding over latent caches. Standard library only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .decode import LATENT_DIMS
from .spec import IO_TYPES, KernelSpec

#: CTAs of a cluster, at most.
LATENT_CLUSTER = 8
#: Query rows of a CTA.
LATENT_TILES = (16, 32, 64)
_WIDTH, _WIDTH_V = LATENT_DIMS
#: Panels of 64 channels of a row; keys of a step; warps.
_PANELS, _KEYS, _WARPS = _WIDTH // 64, 32, 8
#: Bytes of a row by format: `registry.decode.LATENT_FORMATS`. One of 656 has e4m3 with a scale for each 128 channels of
#: V, and bf16 behind.
_ROW_BYTES = {
    "latent": 2 * _WIDTH, "latent_e4m3": _WIDTH, "latent_656": _WIDTH_V + 4 * _WIDTH_V // 128 + 2 * (_WIDTH - _WIDTH_V),
}  # fmt: skip


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _code_row(fmt: str) -> int:
    """Bytes of a row in shared memory, if that has it as it is: without conflicts of banks."""
    return _ROW_BYTES[fmt] + (16 if fmt == "latent_e4m3" else 0)


def has_latent_clusters(fmt: str) -> bool:
    """Whether rows of a format have a kernel of clusters: those that lists were measured over."""
    return fmt != "latent_e4m3"


def latent_few_row(dtype: str, fmt: str, *, clusters: bool = False) -> KernelSpec:
    """One ``mla_decode_few_sm90`` kernel: up to 16 query rows on Hopper.

    Parameters
    ----------
    dtype, fmt : str
        As of `latent_sm80_row`.
    clusters : bool
        The one whose CTAs have one split each, and merge theirs in clusters.
    """
    rows, parts, teams = LATENT_TILES[0], 4, 2
    keys, stages = (32, 5) if fmt == "latent" else (64, 4)
    warps = teams * _WARPS + 4
    # P; no panels of Q; scales; rescale factors, maxima, denominators.
    of_team = 128 * rows + 16 + teams * 4 * 2 * (keys if fmt == "latent_656" else 2) + 3 * 4 * rows
    exact = (
        _up(rows * 2 * _WIDTH + 2 * 8 * stages + 4 * 4, 128)  # Q, barriers, the producers' cursor
        + stages * keys * _code_row(fmt)
        + teams * (parts * rows * 4 * keys + _up(of_team, 128))  # scores
        + stages * keys  # listed keys
        + 4 * (warps + 2)  # scan
        + 6 * 4  # cursor, scale
        + 2 * 8 * 4  # splits
    )
    suffix, defines = "_clusters" if clusters else "", (("CLUSTERS", str(int(clusters))),)
    others = {"min_arch": (9, 0), "arch_specific": True, "cluster": LATENT_CLUSTER if clusters else 1}
    return _row("mla_decode_few_sm90", dtype, fmt, rows, keys, warps, exact, suffix, defines, **others)


def latent_sm80_row(dtype: str, fmt: str, rows: int) -> KernelSpec:
    """One ``mla_decode_sm80`` kernel.

    Parameters
    ----------
    dtype : str
        Of q and o.
    fmt : str
        A key of `registry.decode.LATENT_FORMATS`.
    rows : int
        One of `LATENT_TILES`.
    """
    row_bytes, in_16_bits = _ROW_BYTES[fmt], fmt == "latent"
    # Rows in 8 bits stay so in shared memory, or become 16 bits there.
    in_codes = rows == 16 and not in_16_bits
    converts = not in_codes and not in_16_bits
    keys, ctas, stages = 64 if in_codes else 32, 2 if rows == 16 else 1, 1 if converts else 2
    # Tiles of many rows leave no registers for all panels of Q.
    held = _PANELS if rows < 64 else 8 if in_16_bits else 7
    parts = 4 if rows == 16 else 2
    key_warps = _WARPS // (rows // 16 * parts)
    exact = (
        stages * keys * (2 * _WIDTH if converts else _code_row(fmt))
        + parts * rows * 4 * keys  # scores
        + (
            2 * 2048 if in_codes and fmt == "latent_e4m3" else max((_PANELS - held) * rows * key_warps * 128, 16)
        )  # of Q
        + 4 * 2 * (keys if in_codes and fmt == "latent_656" else 2)  # scales
        + 3 * 4 * rows  # rescale factors, maxima, denominators
        + (keys * row_bytes if converts else 16)  # rows in 8 bits that become 16
        + 2 * keys  # listed keys
        + 4 * (_WARPS + 2)  # scan
        + 6 * 4  # cursor, scale
        + 2 * 8 * 4  # splits
    )
    of_rows = (("ROWS", str(rows)), ("HELD_PANELS", str(held)), ("MIN_CTAS", str(ctas)))
    return _row("mla_decode_sm80", dtype, fmt, rows, keys, _WARPS, exact, f"_r{rows}", of_rows, ctas_per_sm=ctas)


def _row(
    family: str, dtype: str, fmt: str, rows: int, keys: int, warps: int, exact: int, suffix: str = "",
    defines: tuple[tuple[str, str], ...] = (), **others: Any,
) -> KernelSpec:  # fmt: skip
    """What both families have in common. exact: bytes of shared memory; defines: besides those of both."""
    short, tag = IO_TYPES[dtype]
    smem_bytes = _up(exact, 128)
    return KernelSpec(
        name=f"{family}_{short}_d{_WIDTH}v{_WIDTH_V}{fmt.removeprefix('latent')}{suffix}",
        family=family,
        op="latent_decode",
        source=f"entry/{family}.cu",
        symbol=family,
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(_WIDTH)),
            ("HEAD_DIM_V", str(_WIDTH_V)),
            ("CACHE_FORMAT", str(list(_ROW_BYTES).index(fmt))),
            *defines,
            ("SMEM_BYTES", str(smem_bytes)),
        ),
        dtype=dtype,
        head_dim=_WIDTH,
        own_head_dim_v=_WIDTH_V,
        block_m=rows,
        block_n=keys,
        num_warps=warps,
        smem_bytes=smem_bytes,
        cache=(fmt, fmt),
        **others,
    )


def latent_sm80_rows() -> Iterator[KernelSpec]:
    """Rows that the registry lists."""
    for dtype, fmt, rows in itertools.product(("float16", "bfloat16"), _ROW_BYTES, LATENT_TILES):
        yield latent_sm80_row(dtype, fmt, rows)
    for dtype, fmt in itertools.product(("float16", "bfloat16"), _ROW_BYTES):
        yield latent_few_row(dtype, fmt)
        if has_latent_clusters(fmt):
            yield latent_few_row(dtype, fmt, clusters=True)
