"""Rows as racecheck can follow them."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from omniattn.registry import KernelSpec

#: Of a source what its kernel is compiled with: pairs of warps wait for each other, as racecheck does not follow
#: bar.arrive; every lane arrives at an mbarrier, where one does for its warp.
FOLLOWED = {
    "entry/attn_bwd_sm80.cu": "PAIRS_WAIT",
    "entry/attn_bwd_wide_sm80.cu": "PAIRS_WAIT",
    "entry/mla_decode_sm90.cu": "EVERY_LANE_ARRIVES",
    "entry/mla_decode_few_sm90.cu": "EVERY_LANE_ARRIVES",
    "entry/mla_decode_rows16_sm90.cu": "EVERY_LANE_ARRIVES",
    "entry/mla_decode_rows8_sm90.cu": "EVERY_LANE_ARRIVES",
}


def waits(spec: KernelSpec) -> KernelSpec:
    """The row with what racecheck needs."""
    if spec.source not in FOLLOWED:
        return spec
    return dataclasses.replace(spec, defines=(*spec.defines, (FOLLOWED[spec.source], "1")))


def decode_by_rows_that_wait() -> None:
    """Decoding has rows that racecheck can follow from here on."""
    module: Any = importlib.import_module("omniattn.select.cache")
    registered = module.registered
    module.registered = lambda row: waits(registered(row))


def generic(rows: tuple[KernelSpec, ...], waiting: bool) -> tuple[KernelSpec, ...]:
    """What every GPU gets; waiting: with pairs of warps that wait for each other, which racecheck can follow."""
    return tuple(waits(spec) if waiting else spec for spec in rows if not spec.arch_specific)
