"""Which targets the wheel carries a row for: those whose GPUs take it in some call. Standard library only.

Attention is chosen among these rows (`select.candidates`). What else is carried, selection is asked for by a test, over
calls of every kind (``tests/unit/registry/test_registry_targets.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .indexer import TOP_K_SHORT
from .latent_sm80 import LATENT_TILES
from .spec import PREBUILT_ARCHS, KernelSpec

#: GPUs that load a target's cubins (the same major version, the same minor one or a later one), and the shared memory
#: of a CTA there: CUDA programming guide, "Technical Specifications per Compute Capability".
GPUS: dict[str, dict[tuple[int, int], int]] = {
    "80": {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10},
    "89": {(8, 9): 99 << 10},
    "90a": {(9, 0): 227 << 10},
    "100": {(10, 0): 227 << 10, (10, 3): 227 << 10},
    "120": {(12, 0): 99 << 10, (12, 1): 99 << 10},
}
assert tuple(GPUS) == PREBUILT_ARCHS
_HOPPER = ((9, 0),)


def _only_on(spec: KernelSpec) -> tuple[tuple[int, int], ...]:
    """The GPUs on which alone selection takes the row, though others could run it; empty: all.

    Tiles of short sequences and decode's warps that share keys were tuned on Hopper and nowhere else. Others belong to
    Hopper's own kernels: they write what those read, read what those write, or run beside them. And nobody can ask for
    fp16 sums of e4m3 with scores of e4m3: they are where they come first (`problems.products`). Over latent caches
    Hopper has kernels of its own. Small CTAs of top_k pay where an SM has several of them, and spill from compute
    capability 10 on.
    """
    if spec.name == TOP_K_SHORT:
        return tuple(
            cc for gpus in GPUS.values() for cc, smem in gpus.items() if spec.at_a_time(smem) > 1 and cc[0] < 10
        )
    shares_keys = spec.op in ("decode", "decode_combine") and spec.block_m > (16 if spec.head_dim <= 256 else 8)
    helps = spec.op in ("mask_align", "quantize_fp8_sums", "quantize_values") or spec.fragments or spec.beside
    of_grouping = spec.specialization is not None and spec.specialization[0] == "sm90"
    # Tiles up to head_dim 128 have 128 rows otherwise.
    short = spec.family == "attn_fwd_sm80" and spec.op == "attention" and spec.head_dim <= 128 and spec.block_m < 128
    if short or shares_keys or helps or of_grouping:
        return _HOPPER
    of_hopper = spec.dtype == "bfloat16" or "latent_656" not in spec.cache  # what its own kernel takes
    if spec.family == "mla_decode_sm80" and (spec.block_m == LATENT_TILES[0] or of_hopper):
        return tuple(cc for gpus in GPUS.values() for cc in gpus if cc not in _HOPPER)
    return ((8, 9), (12, 0)) if (spec.qk, spec.pv_accumulator) == ("fp8", "fp16") else ()


def _has_code_of_ada(spec: KernelSpec) -> bool:
    """Whether sm_89 has instructions for what the row does on sm_80 in others: conversions of e4m3."""
    if spec.op == "quantize":
        return spec.specialization is None or spec.specialization[1] == "float8_e4m3"
    of_caches = any(name.startswith(("fp8", "latent_")) for name in spec.cache)
    return of_caches or spec.op in ("quantize_fp8", "layout_fp8", "dequantize", "index_logits")


def _reach(spec: KernelSpec) -> tuple[object, ...]:
    """What rows have in common of which the wheel carries the one of the highest `_rank` that fits a GPU.

    Kernels of one architecture, and tiles of other rows, are for different lengths: each is alone. So are those that
    quantize K and V, of batches or of packed sequences.
    """
    kind = (spec.qk, spec.pv, spec.pv_accumulator, spec.specialization, spec.cache)
    backward = spec.op.startswith("attention_backward")
    alone = spec.arch_specific or spec.op in ("top_k", "quantize_kv_sums", "quantize_kv")
    tile = spec.name if alone else None if backward else spec.block_m
    scores = (spec.softcap, spec.masks, spec.dmask, spec.paged, backward and spec.lists)
    values = (spec.other_head_dim_v, spec.value_factors, spec.smooth_q, spec.rotated, spec.fragments, spec.beside)
    return spec.op, spec.dtype, spec.head_dim, spec.head_dim_v, scores, values, kind, tile


def _rank(spec: KernelSpec) -> tuple[object, ...]:
    """What comes first: the newest tuning; of the backward the largest tile."""
    return spec.min_arch, spec.smem_bytes if spec.op.startswith("attention_backward") else 0


def is_carried(spec: KernelSpec, cc: tuple[int, int]) -> bool:
    """Whether the wheel has a cubin of the row for a GPU."""
    return any(cc in GPUS[arch] for arch in spec.prebuild)


def with_targets(rows: Iterable[KernelSpec]) -> Iterator[KernelSpec]:
    """The rows with their targets (`KernelSpec.prebuild`)."""
    rows = tuple(rows)
    alike: dict[tuple[object, ...], list[KernelSpec]] = {}
    for spec in rows:
        alike.setdefault(_reach(spec), []).append(spec)

    def is_taken(spec: KernelSpec, cc: tuple[int, int], max_smem: int) -> bool:
        only = _only_on(spec)
        if spec.unfit(cc, max_smem) or (only and cc not in only):
            return False
        return max((x for x in alike[_reach(spec)] if not x.unfit(cc, max_smem)), key=_rank) is spec

    def needs(spec: KernelSpec, arch: str) -> bool:
        oldest = next(iter(GPUS[arch]))  # of the target's own capability
        if oldest < spec.min_arch or (arch == "89" and spec.min_arch < oldest and not _has_code_of_ada(spec)):
            return False
        return any(is_taken(spec, cc, max_smem) for cc, max_smem in GPUS[arch].items())

    for spec in rows:
        yield replace(spec, prebuild=tuple(arch for arch in GPUS if needs(spec, arch)))
