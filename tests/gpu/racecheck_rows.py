"""Rows as racecheck can follow them."""

from __future__ import annotations

import dataclasses

from omniattn.registry import KernelSpec


def waits(spec: KernelSpec) -> KernelSpec:
    """The row with pairs of warps that wait for each other: racecheck does not follow bar.arrive."""
    if spec.source not in ("entry/attn_bwd_sm80.cu", "entry/attn_bwd_wide_sm80.cu"):
        return spec
    return dataclasses.replace(spec, defines=(*spec.defines, ("PAIRS_WAIT", "1")))
