"""Numerics of the code for sm_80 and sm_89, on whatever GPU is here: the same sources as PTX, translated by the driver.

What ptxas makes of them for those GPUs themselves (registers, spills) is checked by the ahead-of-time build.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.errors import ArgumentError  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec, by_name  # noqa: E402
from omniattn.registry.spec import IO_TYPES  # noqa: E402
from omniattn.runtime import LoadedKernel  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.testing.block_cases import BLOCK_OPS  # noqa: E402
from omniattn.testing.cache_cases import CACHE_OPS  # noqa: E402
from omniattn.testing.cases import operation_of  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.gradient_cases import BACKWARD_OPS  # noqa: E402
from omniattn.testing.indexer_cases import INDEXER_OPS  # noqa: E402
from omniattn.testing.latent_cases import LATENT_OPS  # noqa: E402
from omniattn.testing.mask_cases import MASK_OPS  # noqa: E402
from omniattn.testing.quantizer_cases import KV_OPS, VALUES_OPS  # noqa: E402
from omniattn.testing.rows import run_row  # noqa: E402

from .kernel_cases import cases, run_case  # noqa: E402
from .ptx_rows import Key, compile_rows, is_for, load_rows  # noqa: E402

pytestmark = pytest.mark.gpu

TARGETS = ("compute_80", "compute_89")
# The kernels of caches, latent ones too, have test_decode_architectures_gpu.py. Of low precision, whose inputs only the
# quantizers read, one width speaks for float16: the kernels differ from those of bfloat16 in how they store the output.
SPECS = [
    spec
    for spec in REGISTRY
    if spec.op not in (*CACHE_OPS, *LATENT_OPS, *BACKWARD_OPS)
    and not (spec.quantized and spec.dtype == "float16" and spec.head_dim > 64)
]
ROWS = [
    (spec.name, target)
    for target in TARGETS
    for spec in SPECS
    if Arch.parse(target).cc >= spec.min_arch
    # Where sm_89 adds nothing, low precision is the same code for both: once is enough for as many rows.
    and not (spec.quantized and target == "compute_89" and spec.min_arch < (8, 9))
]


@pytest.fixture(scope="module")
def ptx() -> dict[Key, str]:
    """PTX of every (row, target)."""
    return compile_rows(ROWS)


@pytest.fixture(scope="module")
def kernels(ptx: dict[Key, str]) -> dict[Key, LoadedKernel]:
    """Every row loaded from PTX."""
    return load_rows(ptx)


def test_every_row_is_covered() -> None:
    """Rows that need a newer GPU than sm_89 have no such code; all others are here, for every operation they serve."""
    covered = {name for name, _ in ROWS}
    assert {spec.name for spec in SPECS if spec.min_arch <= (8, 9)} == covered
    # The LSE of quantized splits and packed sequences are merged, and V, or K and V, quantized by kernels of their own,
    # on Hopper alone.
    assert {spec.op for spec in SPECS if spec.name in covered} == {spec.op for spec in SPECS} - {
        "attention_combine_lse",
        "attention_combine_packed",
        *VALUES_OPS,
        *KV_OPS,
    }


def _for_anything(op: str, spec: KernelSpec) -> KernelSpec:
    """The row of a quantizer for this dtype and head_dim that is no specialization."""
    rows = [s for s in REGISTRY if s.op == op and s.dtype == spec.dtype and s.specialization is None]
    return min((s for s in rows if s.head_dim >= spec.head_dim), key=lambda s: s.head_dim)


@pytest.fixture(autouse=True)
def no_plans_remain() -> Iterator[None]:
    """Plans keep the kernels that they were made with: none may remain for other tests."""
    yield
    PLANS.clear()


@pytest.mark.parametrize(("name", "target"), ROWS)
def test_row(
    name: str,
    target: str,
    ptx: dict[Key, str],
    kernels: dict[Key, LoadedKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = by_name(name)
    assert is_for(ptx[name, target], target)
    asked: set[str] = set()
    # delta_s is computed from what the quantizer of this dtype and head_dim has made, and attention from both.
    wants, may_want = {name}, set()
    if spec.qk == "fp8":  # V by the general quantizer, Q and K by one of two, or all by the caller
        may_want |= {_for_anything("quantize", spec).name, _for_anything("quantize_fp8", spec).name}
        may_want |= {s.name for s in REGISTRY if s.op == "layout_fp8"}
        may_want |= {s.name for s in REGISTRY if s.name.endswith("_rotated") and s.dtype == spec.dtype}
    elif spec.op == "quantize_delta" or spec.quantized:
        wants.add(_for_anything("quantize", spec).name)
    if spec.quantized:
        may_want.add(_for_anything("quantize_delta", spec).name)
    elif spec.op in ("attention_split", "attention_combine"):
        of_split = (f"attn_fwd_sm80_{IO_TYPES[spec.dtype][0]}_d256_split{mods}" for mods in ("", "_mods"))
        wants.add(next(s.name for s in REGISTRY if s.op == "attention_combine" and s.dtype == spec.dtype))
        may_want |= set(of_split) - wants if spec.op == "attention_combine" else set()
    elif spec.op in BLOCK_OPS:
        may_want |= {s.name for s in REGISTRY if s.op in BLOCK_OPS} - wants
    if not spec.quantized and (spec.score_mods or spec.op == "attention_combine"):
        may_want |= {s.name for s in REGISTRY if s.op in MASK_OPS and s.dtype in (spec.dtype, "uint8")}

    def load(wanted: KernelSpec, ordinal: int) -> LoadedKernel:
        asked.add(wanted.name)
        assert wanted.name in wants | may_want
        assert ordinal == 0
        return kernels[wanted.name, target]

    PLANS.clear()
    monkeypatch.setattr(runtime, "load", load)
    own_cases = spec.op in (*MASK_OPS, *INDEXER_OPS, *BLOCK_OPS, "layout_fp8", "clear_unused") or spec.value_factors
    if spec.specialization is None and not own_cases:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", ",".join(sorted(wants | may_want)))
    else:  # only attention starts these, or some of its calls
        result = run_row(TorchFramework(), spec)
        assert result.cases >= 1
        assert not result.failures
        assert asked - may_want == {name}
        return
    ran = 0
    plain = spec.op in ("attention", "attention_split") and not spec.quantized and not spec.score_mods
    for case in cases(operation_of(spec), not plain):
        if spec.sequences == "packed" and not case.packed:
            continue
        try:
            run_case(torch, case, operation_of(spec), spec.dtype, spec.head_dim, spec)
            ran += 1
        except ArgumentError as error:
            # Of low precision a row takes what it was compiled for, and so do quantizers.
            of_its_own = spec.quantized or spec.op == "quantize"
            if (of_its_own, error.argument) != (True, "OMNIATTN_FORCE_KERNEL"):
                raise
    assert ran >= 1
    assert asked - may_want == wants
