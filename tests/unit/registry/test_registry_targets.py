"""What calls take is prebuilt, and nothing else is: every kind of call on every kind of GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import omniattn.plan.attention as plan_of_attention
from omniattn.errors import UnsupportedError
from omniattn.plan.attention import plan_attention
from omniattn.plan.backward import plan_backward
from omniattn.plan.others import (
    plan_append,
    plan_copy,
    plan_decode,
    plan_index_logits,
    plan_merge,
    plan_quantize,
    plan_sparse_blocks,
    plan_top_k,
)
from omniattn.plan.with_cache import plan_with_cache
from omniattn.problems import (
    AppendProblem,
    CopyProblem,
    DecodeProblem,
    IndexLogitsProblem,
    MergeProblem,
    Target,
    TopKProblem,
    WithCacheProblem,
)
from omniattn.problems.decode import passes
from omniattn.problems.sparse_blocks import SparseBlocksProblem
from omniattn.registry import GPUS, REGISTRY, KernelSpec
from omniattn.runtime.arch import Arch
from omniattn.runtime.sources import Sources
from omniattn.select import rows_of
from omniattn.select.decode_ways import way_in_company
from tests.unit.select import every_call

#: SMs of a GPU of each compute capability.
SMS = {
    (8, 0): 108, (8, 6): 84, (8, 7): 16, (8, 9): 142, (9, 0): 132, (10, 0): 148, (10, 3): 160, (12, 0): 170,
    (12, 1): 48,
}  # fmt: skip
_PLANS = {
    DecodeProblem: plan_decode, AppendProblem: plan_append, CopyProblem: plan_copy, MergeProblem: plan_merge,
    WithCacheProblem: plan_with_cache, IndexLogitsProblem: plan_index_logits, TopKProblem: plan_top_k,
    SparseBlocksProblem: plan_sparse_blocks,
}  # fmt: skip
ROWS = {spec.name: spec for spec in REGISTRY}
KERNELS = Path(__file__).parents[3] / "kernels_cu"


@pytest.fixture(autouse=True)
def _every_binary_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_of_attention, "without_binary", lambda *_: None)


def _plans(target: Target) -> Iterator[Any]:
    for plan, calls in (
        (plan_attention, every_call.exact_calls(target.cc == (9, 0))),
        (plan_attention, every_call.low_precision_calls(target.cc == (9, 0))),
        (plan_backward, every_call.backward_calls()),
        (plan_quantize, every_call.quantizer_calls()),
        (None, every_call.cache_calls()),
        (None, every_call.latent_calls()),
        (None, every_call.prompt_calls()),
        (None, every_call.other_calls()),
    ):
        for call in calls:
            try:
                yield (plan or _PLANS[type(call)])(call, target, None)
            except UnsupportedError:
                # The one thing that older GPUs have no tensor cores for.
                assert plan is plan_attention
                assert call.precision.qk == "fp8" or call.precision.pv == "fp8"
                assert target.cc < (8, 9)


@functools.cache
def taken(cc: tuple[int, int]) -> frozenset[str]:
    """Names of the rows that some call takes on a GPU, or would take if it were longer or shorter."""
    max_smem = next(gpus[cc] for gpus in GPUS.values() if cc in gpus)
    target = Target(cc, max_smem, SMS[cc])
    found = {record.spec.name for plan in _plans(target) for record in plan.records}
    for calls in (every_call.exact_calls, every_call.low_precision_calls):
        found |= {row.name for call in calls(cc == (9, 0)) for row in rows_of(call, target)}
    found |= {
        record.spec.name for call in every_call.latent_appends() for record in plan_append(call, target, None).records
    }
    if cc == (9, 0):
        # Where attention and decode run at the same time.
        of_decode = (call for call in every_call.cache_calls() if isinstance(call, DecodeProblem))
        ways = (way_in_company(call, target, at_once=True) for call in of_decode if _may_have_company(call))
        found |= {one.main.spec.name for way in ways for one in way.passes}
    return frozenset(found)


def _may_have_company(call: DecodeProblem) -> bool:
    cache = call.cache
    return cache.k_format.bits == cache.v_format.bits == 16 and len(passes(call)) == 1


def held(cc: tuple[int, int], spec: KernelSpec) -> bool:
    """Whether the wheel has a cubin that the GPU loads."""
    return any(Arch.parse(arch).runs_on(cc) for arch in spec.prebuild)


@pytest.mark.parametrize("cc", SMS)
def test_what_calls_take_is_prebuilt(cc: tuple[int, int]) -> None:
    assert not [name for name in taken(cc) if not held(cc, ROWS[name])]


@pytest.mark.parametrize("arch", GPUS)
def test_what_is_prebuilt_some_call_takes(arch: str) -> None:
    names = frozenset[str]().union(*map(taken, GPUS[arch]))
    prebuilt = {spec.name for spec in REGISTRY if arch in spec.prebuild and spec.dtype != "float16"}
    assert sorted(prebuilt - names) == []


def test_both_16_bit_types_have_the_same_rows() -> None:
    """What was asked of one holds for the other."""

    def targets(dtype: str, short: str) -> dict[str, tuple[str, ...]]:
        return {
            re.sub(f"_{short}(?=_|$)", "", spec.name, count=1): spec.prebuild
            for spec in REGISTRY
            # Over rows with channels in bf16 Hopper's kernel takes q in bf16 alone, and the general ones the rest.
            if spec.dtype == dtype and "latent_656" not in spec.cache
        }

    assert targets("float16", "fp16") == targets("bfloat16", "bf16")


def test_every_row_is_for_some_target() -> None:
    assert not [spec.name for spec in REGISTRY if not spec.prebuild]


def test_what_sm_89_loads_of_sm_80_has_the_same_code_there() -> None:
    """Device code asks for sm_89 in the conversions of e4m3 alone, which the rows with a cubin of their own have."""
    asking = {path for path in KERNELS.rglob("*.cu*") if "__CUDA_ARCH__ >= 890" in path.read_text(encoding="utf-8")}
    assert asking == {KERNELS / "ptx/cvt_quant.cuh"}
    conversions = ("pack_e4m3x2(", "half2_of_e4m3x2")
    sources = Sources(KERNELS)
    for spec in (spec for spec in REGISTRY if "80" in spec.prebuild):
        texts = [text for name, text in sources.closure(spec.source).items() if name != "ptx/cvt_quant.cuh"]
        if not any(word in text for word in conversions for text in texts):
            assert "89" not in spec.prebuild, spec.name
        # These have constants that leave them out.
        elif spec.op not in ("quantize", "decode", "append", "latent_append", "latent_decode"):
            assert "89" in spec.prebuild, spec.name
