"""Numerics of the backward's code for sm_80 and sm_89, on whatever GPU is here: PTX that the driver translates.

As test_architectures_gpu, of which these rows would make the longest file.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec, by_name  # noqa: E402
from omniattn.runtime import LoadedKernel  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.gradient_cases import BACKWARD_OPS  # noqa: E402
from omniattn.testing.rows import run_row  # noqa: E402

from .backward_cases import choose_from  # noqa: E402
from .ptx_rows import Key, compile_rows, is_for, load_rows  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_plans")]

TARGETS = ("compute_80", "compute_89")
#: Those that every GPU gets; the others follow Hopper's own kernels.
SPECS = [spec for spec in REGISTRY if spec.op in BACKWARD_OPS and not spec.arch_specific and not spec.fragments]
ROWS = [(spec.name, target) for target in TARGETS for spec in SPECS if spec.min_arch <= (8, 0)]
#: What a call with a block mask launches ahead of them.
LISTS = [(name, target) for target in TARGETS for name in ("tile_kinds_sm80", "mask_list_sm80")]


@pytest.fixture(scope="module")
def kernels() -> dict[Key, LoadedKernel]:
    """Every row loaded from PTX."""
    texts = compile_rows([*ROWS, *LISTS])
    assert all(is_for(text, target) for (_, target), text in texts.items())
    return load_rows(texts)


def test_every_kind_of_row_is_here() -> None:
    assert {spec.op for spec in SPECS} == set(BACKWARD_OPS)
    assert {spec.dtype for spec in SPECS} == {"float16", "bfloat16"}
    assert {64, 128, 256} <= {spec.head_dim for spec in SPECS if spec.op == "attention_backward"}


@pytest.mark.parametrize(("name", "target"), ROWS)
def test_row(name: str, target: str, kernels: dict[Key, LoadedKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of its cases, by the code for this target and no other."""
    asked: set[str] = set()

    def load(wanted: KernelSpec, ordinal: int) -> LoadedKernel:
        assert ordinal == 0
        asked.add(wanted.name)
        return kernels[wanted.name, target]

    choose_from(monkeypatch, "generic")
    PLANS.clear()
    monkeypatch.setattr(runtime, "load", load)
    outcome = run_row(TorchFramework(), by_name(name))
    assert not outcome.failures
    assert outcome.cases >= 1
    assert name in asked
