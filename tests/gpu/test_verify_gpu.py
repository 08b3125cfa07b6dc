"""``omniattn verify`` on a real GPU: rows of low precision, caches, masks, the backward; selection may miss some."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.cli.verify import NOT_HERE, PASSED, verify_kernels, verify_row  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402
from omniattn.testing.ahead import Ahead, default_jobs, in_order  # noqa: E402
from omniattn.testing.cache_cases import CACHE_OPS, cache_cases  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.gradient_cases import BACKWARD_OPS  # noqa: E402
from omniattn.testing.mask_cases import MASK_OPS  # noqa: E402
from omniattn.testing.quantizer_cases import KV_OPS, VALUES_OPS  # noqa: E402

pytestmark = pytest.mark.gpu

# Exact attention and merging have test_architectures_gpu and the numerics tests.
OPS = ("quantize", "quantize_delta", *VALUES_OPS, *KV_OPS, *CACHE_OPS, *MASK_OPS, *BACKWARD_OPS)
ROWS = in_order(spec for spec in REGISTRY if spec.quantized or spec.op in OPS)
#: Other processes of the suite want cores too; this one would end last, as it has most rows to compile.
MOST_JOBS = max(4, (os.cpu_count() or 1) // 4)


def _never(spec: KernelSpec) -> str:
    info = runtime.device_info(0)
    return spec.unfit(info.cc, info.max_smem_optin)


@pytest.fixture(scope="module")
def ahead() -> Iterator[Ahead]:
    able = [spec for spec in ROWS if not _never(spec)]
    with Ahead(able, min(MOST_JOBS, default_jobs())) as made:
        made.compile(able, runtime.device_info(0).cc)
        yield made


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_row(spec: KernelSpec, ahead: Ahead) -> None:
    framework = TorchFramework()
    if _never(spec):
        assert verify_kernels(framework, [spec], 1)[0].status == NOT_HERE
        return
    outcome = verify_row(framework, spec, ahead)
    assert outcome.status == PASSED, "\n".join(outcome.notes)
    assert outcome.cases >= 1
    assert spec.op not in CACHE_OPS or outcome.cases == len(cache_cases(spec))
    assert outcome.worst <= 1.0
