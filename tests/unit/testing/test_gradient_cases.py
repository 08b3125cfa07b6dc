"""The cases of the backward's kernels: the CPU passes them, a wrong gradient does not."""

from __future__ import annotations

import numpy as np
import pytest

from omniattn.registry import by_name
from omniattn.testing.frameworks import NumpyFramework
from omniattn.testing.gradient_cases import BACKWARD_OPS, GradientCase, gradient_cases
from omniattn.testing.rows import cases_of

CASES = gradient_cases(by_name("attn_bwd_sm80_fp16_d128_m32"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_passes(case: GradientCase) -> None:
    numbers = case.prepare()
    ratio, note = case.check(NumpyFramework(), numbers)
    assert ratio <= 1.0
    assert note == ""
    alone = GradientCase(case.name, case.dtype, case.head_dim, dq=True)
    assert alone == case
    assert alone.check(NumpyFramework(), numbers) == (pytest.approx(ratio, abs=1.0), "")


@pytest.mark.parametrize("wrong", ["nan", "tile", "scale"])
def test_a_wrong_gradient_is_found(wrong: str) -> None:
    numbers, options, expected = CASES[1].prepare()
    dk = expected["dk"].copy()
    if wrong == "nan":
        dk[0, 0, 0, 0] = np.nan
    elif wrong == "tile":
        dk[:, -3:] = 0
    else:
        dk *= 1.01
    ratio, note = CASES[1].check(NumpyFramework(), (numbers, options, {**expected, "dk": dk}))
    assert not ratio <= 1.0
    assert note.startswith("dk")


def test_every_operation_of_the_backward_has_cases() -> None:
    names = ("attn_bwd_sm90_bf16_d64", "attn_bwd_dq_sm80_bf16_d64", "attn_bwd_prepare_sm80_bf16",
             "attn_bwd_finish_sm80_bf16")  # fmt: skip
    assert tuple(by_name(name).op for name in names) == BACKWARD_OPS
    assert all(len(cases_of(by_name(name))) == len(CASES) for name in names)
