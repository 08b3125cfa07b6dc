"""Runs the problems of ``omniattn verify`` on torch tensors whose outputs are poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import omniattn as oa
from omniattn.cli.cases import Case, cases_for, problem
from omniattn.testing import assert_close

#: fp32 sums of a few hundred terms and a base-2 exponential, against fp64.
O_ATOL = 1e-5
LSE_ATOL = 1e-4


def cases(op: str, score_mods: bool = True) -> tuple[Case, ...]:
    """The problems of one operation; without ``score_mods`` those that need neither softcap nor mask."""
    found = cases_for(op)
    if score_mods:
        return found
    return tuple(c for c in found if not {"mask", "bias"} & set(c.arrays) and "softcap" not in c.options)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Every torch output that the library allocates begins as NaN, the LSE included, however it is allocated."""
    import torch

    before = torch.get_deterministic_debug_mode()
    # Torch fills what its `empty` functions give with NaN then. torch.use_deterministic_algorithms has that effect too,
    # but imports torch's compiler, and with it modules that a caller may have hidden.
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    try:
        assert torch.empty_strided((1,), (1,), device="cuda").isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def run_case(torch: Any, case: Case, op: str, dtype: str, head_dim: int) -> tuple[Any, Any]:
    """Run on the GPU and compare with the reference: max|o - ref| <= 2 max|same-dtype naive - ref| + rounding."""
    numbers = problem(case, op, dtype, head_dim)

    def to_gpu(values: Any, kind: str) -> Any:
        return torch.from_numpy(values).to("cuda", getattr(torch, kind))

    positional = [
        to_gpu(values, "float32" if index in numbers.float32_positions else dtype)
        for index, values in enumerate(numbers.positional)
    ]
    options = {**numbers.options, **{name: to_gpu(*value) for name, value in numbers.arrays.items()}}
    if case.function != "merge_states":
        options["return_lse"] = True
    with poisoned_outputs():
        o, lse = getattr(oa, case.function)(*positional, **options)
    label = f"{case.name}, {dtype}, head_dim up to {head_dim}"
    assert_close(
        o.float().cpu().numpy(), numbers.o, naive=numbers.naive_o, dtype=dtype, atol=O_ATOL, label=f"o, {label}"
    )
    assert_close(lse.cpu().numpy(), numbers.lse, naive=numbers.naive_lse, atol=LSE_ATOL, label=f"lse, {label}")
    return o, lse
