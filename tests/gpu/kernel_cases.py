"""Runs the problems of ``omniattn verify`` on torch tensors whose outputs are poisoned first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import omniattn as oa
from omniattn.registry import KernelSpec
from omniattn.testing.cases import CallCase, Case, call, cases_for, flavour_of, own_head_dim_v, problem
from omniattn.testing.expected import outputs_of

#: fp32 sums of a few hundred terms and a base-2 exponential, against fp64.
LSE_ATOL = 1e-4


def cases(op: str, score_mods: bool = True) -> tuple[Case, ...]:
    """The problems of one operation; without ``score_mods`` those that need neither softcap nor mask."""
    found = cases_for(op)
    if score_mods:
        return found
    return tuple(c for c in found if set(c.arrays) <= {"sinks"} and "softcap" not in c.options)


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


def run_case(
    torch: Any, case: Case, op: str, dtype: str, head_dim: int, spec: KernelSpec | None = None
) -> dict[str, Any]:
    """Run on the GPU and compare with what the problem expects; returns the outputs by name.

    ``spec``: the kernel that the call will choose; low precision is emulated as that kernel computes it.
    """
    flavour, head_dim_v = (None, 0) if spec is None else (flavour_of(spec), own_head_dim_v(spec))
    if spec is not None and spec.paged:
        place = cases_for(op).index(case)
        numbers = CallCase(op, place, dtype, head_dim, flavour, head_dim_v=head_dim_v, paged=True).prepare()
    else:
        numbers = problem(case, op, dtype, head_dim, flavour, head_dim_v)

    def to_gpu(values: Any, kind: str) -> Any:
        return torch.from_numpy(values).to("cuda", getattr(torch, kind))

    with poisoned_outputs():
        outputs = outputs_of(call(getattr(oa, case.function), numbers, to_gpu, dtype))
    got = {name: (x.float() if x.is_floating_point() else x).cpu().numpy() for name, x in outputs.items()}
    wrong = [str(grade) for grade in numbers.expected.grade(got, dtype, LSE_ATOL) if not grade.ok]
    assert not wrong, f"{case.name}, {dtype}, head_dim up to {head_dim}: " + "; ".join(wrong)
    return outputs
