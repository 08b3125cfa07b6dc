"""Rows of the quantizers before attention. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .spec import IO_TYPES, KernelSpec


@dataclass(frozen=True)
class _Quantizer:
    """A variant of ``quantize_sm80``.

    Attributes
    ----------
    suffix : str
        End of the kernel's name.
    specialization : (str, str), optional
        Grouping and dtype of V of the default it is made for; None: anything.
    min_arch : (int, int)
        As in `KernelSpec`.
    rotated : bool
        For what is rotated, or becomes e4m3.
    """

    suffix: str
    specialization: tuple[str, str] | None
    min_arch: tuple[int, int]
    rotated: bool = False


_QUANTIZERS: tuple[_Quantizer, ...] = (
    _Quantizer("", None, (8, 0)),
    _Quantizer("_common", ("sm90", "float8_e4m3"), (9, 0)),
    _Quantizer("_common_sm80_fp16", ("sm80", "float16"), (8, 0)),
    _Quantizer("_common_sm80_fp8", ("sm80", "float8_e4m3"), (8, 9)),
    _Quantizer("_rotated", None, (8, 0), rotated=True),
)


def _specialization_defines(
    specialization: tuple[str, str] | None, packed: bool = False
) -> tuple[tuple[str, str], ...]:
    grouping, v_dtype = specialization or ("", "float8_e4m3")
    return (
        ("COMMON", str(int(specialization is not None))),
        ("GROUPING", grouping.removeprefix("sm") or "0"),
        ("V_TYPE", {"float8_e4m3": "E4m3", "float16": "Half"}[v_dtype]),
        ("PACKED", str(int(packed))),
    )


def _quantize(head_dim: int, dtype: str, variant: _Quantizer) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    # Two threads a channel; 80 registers each, so that three CTAs of 256 threads share an SM.
    # With a rotation the rows are floats, in twice the registers.
    num_warps, ctas = head_dim // 16, {64: 6, 128: 3, 256: 1}[head_dim]
    if variant.rotated:
        ctas = max(2 * ctas // 3, 1)
    return KernelSpec(
        name=f"quantize_sm80_{short}_d{head_dim}{variant.suffix}",
        family="quantize_sm80",
        op="quantize",
        source="entry/quantize_sm80.cu",
        symbol="quantize_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("CTAS", str(ctas)),
            ("ROTATED", str(int(variant.rotated))),
            *_specialization_defines(variant.specialization),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=num_warps,
        smem_bytes=0,
        ctas_per_sm=ctas,
        min_arch=variant.min_arch,
        rotated=variant.rotated,
        specialization=variant.specialization,
    )


def _quantize_delta(head_dim: int, dtype: str) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    smem_bytes = 2 * 64 * (2 * head_dim + 16)
    return KernelSpec(
        name=f"quantize_delta_sm80_{short}_d{head_dim}",
        family="quantize_delta_sm80",
        op="quantize_delta",
        source="entry/quantize_delta_sm80.cu",
        symbol="quantize_delta_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("SMEM_BYTES", str(smem_bytes)),
            *_specialization_defines(None),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=16,
        block_n=64,
        num_warps=4,
        smem_bytes=smem_bytes,
    )


def _quantize_fp8(head_dim: int, dtype: str, sums: bool = False) -> KernelSpec:
    """sums: with sums and ranges of V, for the kernel behind it that quantizes V."""
    short, tag = IO_TYPES[dtype]
    ctas = {64: 4, 128: 2, 256: 1}[head_dim]
    defines = (("IO_TYPE", tag), ("HEAD_DIM", str(head_dim)), ("CTAS", str(ctas)), ("SUMS", str(int(sums))))
    return KernelSpec(
        name=f"quantize_fp8_sm80_{short}_d{head_dim}{'_sums' if sums else ''}",
        family="quantize_fp8_sm80",
        op="quantize_fp8_sums" if sums else "quantize_fp8",
        source="entry/quantize_fp8_sm80.cu",
        symbol="quantize_fp8_sm80",
        defines=(*defines, *_specialization_defines(("sm90", "float8_e4m3"))) if sums else defines,
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=head_dim // 8,
        smem_bytes=0,
        ctas_per_sm=ctas,
        min_arch=(9, 0) if sums else (8, 0),
    )


def _quantize_values(head_dim: int, dtype: str) -> KernelSpec:
    short, tag = IO_TYPES[dtype]
    ctas = {64: 6, 128: 3, 256: 2}[head_dim]
    return KernelSpec(
        name=f"quantize_values_sm80_{short}_d{head_dim}",
        family="quantize_values_sm80",
        op="quantize_values",
        source="entry/quantize_values_sm80.cu",
        symbol="quantize_values_sm80",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("CTAS", str(ctas)),
            *_specialization_defines(("sm90", "float8_e4m3")),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=head_dim // 16,
        smem_bytes=0,
        ctas_per_sm=ctas,
        min_arch=(9, 0),
    )


def _quantize_kv(head_dim: int, dtype: str, sums: bool, packed: bool) -> KernelSpec:
    """sums: the launch ahead, which sums up samples of K and V."""
    short, tag = IO_TYPES[dtype]
    ctas = {64: 4, 128: 2, 256: 1}[head_dim] if sums else {64: 6, 128: 3, 256: 2}[head_dim]
    return KernelSpec(
        name=f"quantize_kv{'_sums' if sums else ''}_sm90_{short}_d{head_dim}{'_varlen' if packed else ''}",
        family="quantize_kv_sm90",
        op="quantize_kv_sums" if sums else "quantize_kv",
        source="entry/quantize_kv_sm90.cu",
        symbol="quantize_kv_sm90",
        defines=(
            ("IO_TYPE", tag),
            ("HEAD_DIM", str(head_dim)),
            ("CTAS", str(ctas)),
            ("SUMS", str(int(sums))),
            *_specialization_defines(("sm90", "float8_e4m3"), packed),
        ),
        dtype=dtype,
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=head_dim // (8 if sums else 16),
        smem_bytes=0,
        ctas_per_sm=ctas,
        min_arch=(9, 0),
        sequences="packed" if packed else "dense",
        specialization=("sm90", "float8_e4m3"),
    )


def _layout_fp8(head_dim: int) -> KernelSpec:
    return KernelSpec(
        name=f"layout_fp8_sm80_d{head_dim}",
        family="layout_fp8_sm80",
        op="layout_fp8",
        source="entry/layout_fp8_sm80.cu",
        symbol="layout_fp8_sm80",
        defines=(("HEAD_DIM", str(head_dim)),),
        dtype="uint8",
        head_dim=head_dim,
        block_m=128,
        block_n=128,
        num_warps=head_dim // 16,
        smem_bytes=0,
    )


def quantizer_rows() -> Iterator[KernelSpec]:
    """Rows of the quantizers."""
    sizes = [(head_dim, dtype) for head_dim in (64, 128, 256) for dtype in ("float16", "bfloat16")]
    for variant in _QUANTIZERS:
        yield from (_quantize(head_dim, dtype, variant) for head_dim, dtype in sizes)
    yield from (_quantize_delta(head_dim, dtype) for head_dim, dtype in sizes)
    yield from (_quantize_fp8(head_dim, dtype) for head_dim, dtype in sizes)
    yield from (_quantize_fp8(head_dim, dtype, sums=True) for head_dim, dtype in sizes)
    yield from (_quantize_values(head_dim, dtype) for head_dim, dtype in sizes)
    yield from (
        _quantize_kv(head_dim, dtype, sums, packed)
        for packed in (False, True)
        for sums in (True, False)
        for head_dim, dtype in sizes
    )
    yield from (_layout_fp8(head_dim) for head_dim in (64, 128, 256))
