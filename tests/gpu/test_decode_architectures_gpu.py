"""Caches by the code for sm_80 and sm_89, on whatever GPU is here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec  # noqa: E402
from omniattn.runtime import LoadedKernel  # noqa: E402
from omniattn.runtime.compile import compile_spec  # noqa: E402
from omniattn.testing.cache_cases import CACHE_OPS  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.latent_cases import LATENT_OPS  # noqa: E402
from omniattn.testing.rows import run_row  # noqa: E402

pytestmark = pytest.mark.gpu

ROWS = [spec for spec in REGISTRY if spec.op in (*CACHE_OPS, *LATENT_OPS) and not spec.arch_specific]
#: Everything prebuilt for bfloat16: the element types, widths and numbers of rows that the sources know.
TRANSLATED = [spec for spec in ROWS if spec.prebuild and spec.dtype != "float16"]
#: Formats of rows in e4m3.
E4M3 = {"fp8", "latent_e4m3", "latent_656"}


@pytest.fixture(autouse=True)
def no_plans_remain() -> Iterator[None]:
    """Plans keep the kernels that they were made with: none may remain for other tests."""
    yield
    PLANS.clear()


@pytest.mark.parametrize("target", ["compute_80", "compute_89"])
def test_code_of_other_gpus(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sources as PTX, translated by the driver; fp8 has other instructions before sm_89."""

    def load(spec: KernelSpec) -> LoadedKernel:
        made = compile_spec(spec, target)
        assert made.ptx
        return runtime.load_image(spec, 0, made.cubin, origin=f"{target} PTX")

    chosen = (
        TRANSLATED if target == "compute_80" else [s for s in TRANSLATED if s.op == "dequantize" or E4M3 & {*s.cache}]
    )
    helpers = [s for s in TRANSLATED if s.op in ("decode_combine", "latent_combine", "copy_blocks", "append")]
    wanted = list({spec.name: spec for spec in (*chosen, *helpers)}.values())
    with ThreadPoolExecutor(8) as pool:
        loaded = dict(zip((spec.name for spec in wanted), pool.map(load, wanted), strict=True))
    PLANS.clear()
    prebuilt = runtime.load
    asked: set[str] = set()

    def from_ptx(spec: KernelSpec, ordinal: int) -> LoadedKernel:
        asked.add(spec.name)
        if spec.arch_specific:  # attention over what was made of a cache
            return prebuilt(spec, ordinal)
        if spec.name not in loaded:  # what a row needs beside it and the wheel does not carry
            loaded[spec.name] = load(spec)
        return loaded[spec.name]

    monkeypatch.setattr(runtime, "load", from_ptx)
    for spec in chosen:
        result = run_row(TorchFramework(), spec)
        assert not result.failures
        assert result.worst <= 1.0
    assert {spec.name for spec in chosen} <= asked
