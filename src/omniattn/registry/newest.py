"""Which kernels a wheel carries for the GPUs newer than Hopper, whose own kernels are the generic ones.

Those of common calls, as selection chooses them there (a test asks it). The rest is compiled on the GPU at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .spec import KernelSpec

#: Targets, and the shared memory of a CTA there. sm_103 loads sm_100's cubins, sm_121 those of sm_120: same major,
#: lower minor.
NEWEST_ARCHS: dict[str, int] = {"100": 232448, "120": 101376}
#: Element type and sums of P V of int8 attention that these targets take first (`select.PV_CHOICES`).
_PV = {"100": ("fp16", "fp32"), "120": ("fp8", "fp16")}
#: Of the backward: gradients of other widths are compiled.
_WIDTHS = (64, 128)
#: Kernels beside the attention kernels, one for all widths.
_BESIDE = (
    "attention_backward_prepare", "attention_backward_finish", "copy_blocks", "mask_list", "mask_pack", "merge_states",
    "packed_parts", "tile_kinds",
)  # fmt: skip

#: Chosen on Hopper alone, as small tiles are.
_OF_HOPPER = ("quantize_fp8_sums", "quantize_values")


def _is_common(spec: KernelSpec, arch: str) -> bool:
    if spec.arch_specific or not spec.prebuild or spec.smem_bytes > NEWEST_ARCHS[arch]:
        return False
    if spec.op in _BESIDE:
        return "fragments" not in spec.features  # of Hopper's backward
    if spec.op.startswith("attention_backward") and spec.head_dim not in _WIDTHS:
        return False
    if spec.quantized:
        return spec.qk == "int8" and (spec.pv, spec.pv_accumulator) == _PV[arch] and spec.grouping == "sm80"
    if "hadamard" in spec.features:
        return False
    if spec.op == "attention_split" and ("score_mods" in spec.features or spec.head_dim > 128):
        return False  # spills there, which nobody has measured
    if "small" in spec.tuned_for or spec.op in _OF_HOPPER:
        return False
    if spec.op in ("decode", "decode_combine") and "80" not in spec.prebuild:
        return False  # shared keys, for Hopper alone
    if spec.op == "quantize" and spec.specialization is not None:
        return spec.specialization == ("sm80", "float16" if _PV[arch][0] == "fp16" else "float8_e4m3")
    return True


def _reach(spec: KernelSpec) -> tuple[object, ...]:
    """What rows have in common of which selection takes one."""
    kind = (spec.qk, spec.pv, spec.pv_accumulator, spec.grouping, spec.specialization, spec.cache)
    return spec.op, spec.dtype, spec.head_dim, spec.features, kind, spec.block_m if spec.op.startswith("decode") else 0


def _rank(spec: KernelSpec) -> tuple[object, ...]:
    """What selection prefers: the newest tuning; of the backward the largest tile that fits."""
    return (spec.smem_bytes if spec.op.startswith("attention_backward") else 0, spec.min_arch)


def with_newest(rows: Iterable[KernelSpec]) -> Iterator[KernelSpec]:
    """The rows, those of common calls with the newest targets among ``prebuild``."""
    rows = tuple(rows)
    chosen: dict[tuple[object, ...], KernelSpec] = {}
    for arch in NEWEST_ARCHS:
        for spec in rows:
            key = (arch, *_reach(spec))
            if _is_common(spec, arch) and (key not in chosen or _rank(spec) > _rank(chosen[key])):
                chosen[key] = spec
    targets: dict[str, tuple[str, ...]] = {}
    for (target, *_), spec in chosen.items():
        targets[spec.name] = (*targets.get(spec.name, ()), str(target))
    for spec in rows:
        yield replace(spec, prebuild=(*spec.prebuild, *targets[spec.name])) if spec.name in targets else spec
