"""GPUs newer than Hopper: what a common call takes there is in the wheel."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from omniattn.problems import AttentionProblem, Int8, Target
from omniattn.problems.backward import BackwardProblem
from omniattn.registry import NEWEST_ARCHS, REGISTRY
from omniattn.runtime.arch import Arch
from omniattn.select import select_attention, select_backward, select_dq

TARGETS = {"100": ((10, 0), (10, 3)), "120": ((12, 0), (12, 1))}


def problem(dtype: str, head_dim: int) -> AttentionProblem:
    return AttentionProblem(dtype, 2, 333, 444, 8, 2, head_dim, -1, 0, 0.1, 0.0, "none", "none", False, lse=True)


@pytest.mark.parametrize("arch", NEWEST_ARCHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_common_calls_take_prebuilt_kernels(arch: str, dtype: str, head_dim: int) -> None:
    plain = problem(dtype, head_dim)
    calls = [plain, replace(plain, softcap=30.0), replace(plain, mask="bool")]
    # The others' products of P and V may be faster in another type: select.PV_CHOICES.
    int8 = (TARGETS[arch][0], replace(plain, precision=Int8().precision))
    for cc, call in (*itertools.product(TARGETS[arch], calls), int8):
        target = Target(cc, NEWEST_ARCHS[arch], 100)
        spec = select_attention(call, target).spec
        # head_dim 80 has a tile of 96 on mma.sync, which is compiled at first use.
        assert arch in spec.prebuild or spec.head_dim == 96, (spec.name, cc)
        assert Arch.parse(arch).runs_on(cc)
    for cc, select in itertools.product(TARGETS[arch], (select_backward, select_dq)):
        spec = select(BackwardProblem(plain), Target(cc, NEWEST_ARCHS[arch], 100)).spec
        assert arch in spec.prebuild or spec.head_dim == 96, (spec.name, cc)


def test_rows_of_other_gpus_are_left_out() -> None:
    for spec in REGISTRY:
        newest = set(spec.prebuild) & set(NEWEST_ARCHS)
        assert not (newest and spec.arch_specific), spec.name
        assert all(spec.smem_bytes <= NEWEST_ARCHS[arch] for arch in newest), spec.name
    assert {arch for spec in REGISTRY for arch in spec.prebuild} >= set(NEWEST_ARCHS)
