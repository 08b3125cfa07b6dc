"""``omniattn verify`` on a real GPU: each row of low precision by itself, which selection alone would not reach."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.cli.verify import NOT_HERE, PASSED, verify_kernel  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402
from omniattn.runtime.loader import unsupported_reason  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402

from .installations import compile_missing  # noqa: E402

pytestmark = pytest.mark.gpu

# Exact attention and merging have test_architectures_gpu and the numerics tests.
ROWS = [spec for spec in REGISTRY if spec.quantized or spec.op in ("quantize", "quantize_delta")]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_missing(ROWS)


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_row(spec: KernelSpec) -> None:
    info = runtime.device_info(0)
    never = unsupported_reason(spec, info.cc, info.max_smem_optin)
    outcome = verify_kernel(TorchFramework(), spec)
    assert outcome.status == (NOT_HERE if never else PASSED), "\n".join(outcome.notes)
    if not never:
        assert outcome.cases >= 1
        assert outcome.worst <= 1.0
