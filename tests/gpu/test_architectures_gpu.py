"""Numerics of the code for sm_80 and sm_89, on whatever GPU is here: the same sources as PTX, translated by the driver.

What ptxas makes of them for those GPUs themselves (registers, spills) is checked by the ahead-of-time build.
"""

from __future__ import annotations

import importlib
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.errors import ArgumentError  # noqa: E402
from omniattn.quantizer import select_quantizer  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec, by_name  # noqa: E402
from omniattn.runtime import LoadedKernel  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.runtime.compile import compile_spec  # noqa: E402
from omniattn.testing.cache_cases import CACHE_OPS  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.rows import run_row  # noqa: E402

from .kernel_cases import cases, run_case  # noqa: E402

pytestmark = pytest.mark.gpu

TARGETS = ("compute_80", "compute_89")
# The kernels of caches have test_decode_architectures_gpu.py. Of low precision, whose inputs only the quantizers read,
# one width speaks for float16: the kernels differ from those of bfloat16 in how they store the output.
SPECS = [
    spec
    for spec in REGISTRY
    if spec.op not in CACHE_OPS and not (spec.op == "attention_int8" and spec.dtype == "float16" and spec.head_dim > 64)
]
ROWS = [
    (spec.name, target)
    for target in TARGETS
    for spec in SPECS
    if Arch.parse(target).cc >= spec.min_arch
    # Where sm_89 adds nothing, low precision is the same code for both: once is enough for as many rows.
    and not (spec.op == "attention_int8" and target == "compute_89" and spec.min_arch < (8, 9))
]

Key = tuple[str, str]


@pytest.fixture(scope="module")
def ptx() -> dict[Key, str]:
    """PTX of every (row, target)."""
    context = multiprocessing.get_context("spawn")  # this process has used CUDA
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        jobs = {key: pool.submit(compile_spec, by_name(key[0]), key[1]) for key in ROWS}
        results = {key: job.result() for key, job in jobs.items()}
    assert all(result.ptx for result in results.values())
    return {key: result.cubin.decode().rstrip("\0") for key, result in results.items()}


def _without_target(text: str) -> str:
    """PTX without the line that names its target; equal texts are the same code."""
    body, count = re.subn(r"^\.target .*$", "", text, flags=re.MULTILINE)
    assert count == 1
    return body


@pytest.fixture(scope="module")
def kernels(ptx: dict[Key, str]) -> dict[Key, LoadedKernel]:
    """Every row loaded from PTX; translation takes about a second each, so a text that comes twice is loaded once."""
    first_with: dict[tuple[str, str], Key] = {}
    same_as = {key: first_with.setdefault((key[0], _without_target(text)), key) for key, text in ptx.items()}

    def load(key: Key) -> LoadedKernel:
        return runtime.load_image(by_name(key[0]), 0, ptx[key].encode(), origin=f"{key[1]} PTX")

    unique = sorted(set(same_as.values()))
    with ThreadPoolExecutor(8) as pool:
        loaded = dict(zip(unique, pool.map(load, unique), strict=True))
    return {key: loaded[same] for key, same in same_as.items()}


def test_every_row_is_covered() -> None:
    """Rows that need a newer GPU than sm_89 have no such code; all others are here, for every operation they serve."""
    covered = {name for name, _ in ROWS}
    assert {spec.name for spec in SPECS if spec.min_arch <= (8, 9)} == covered
    assert {spec.op for spec in SPECS if spec.name in covered} == {spec.op for spec in SPECS}


@pytest.mark.parametrize(("name", "target"), ROWS)
def test_row(
    name: str,
    target: str,
    ptx: dict[Key, str],
    kernels: dict[Key, LoadedKernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = by_name(name)
    assert f".target {target.replace('compute', 'sm')}" in ptx[name, target]
    asked: set[str] = set()
    # delta_s is computed from what the quantizer of this dtype and head_dim has made, and attention from both.
    wants, may_want = {name}, set()
    if spec.op in ("quantize_delta", "attention_int8"):
        wants.add(select_quantizer("quantize", spec.dtype, spec.head_dim, (8, 0)).name)
    if spec.op == "attention_int8":
        may_want.add(select_quantizer("quantize_delta", spec.dtype, spec.head_dim, (8, 0)).name)

    def load(wanted: KernelSpec, ordinal: int) -> LoadedKernel:
        asked.add(wanted.name)
        assert wanted.name in wants | may_want
        assert ordinal == 0
        return kernels[wanted.name, target]

    # Plans keep the kernel that they were made with: none may come from, or remain for, other tests.
    for module in ("attention", "merge", "quantize"):
        monkeypatch.setattr(importlib.import_module(f"omniattn.{module}"), "_plans", {})
    monkeypatch.setattr(runtime, "load", load)
    if spec.op in ("attention", "attention_int8"):
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", name)
    if "common" in spec.features:  # only attention starts these
        assert not run_row(TorchFramework(), spec).failures
        assert asked == {name}
        return
    ran = 0
    for case in cases(spec.op, "score_mods" in spec.features or spec.op != "attention"):
        try:
            run_case(torch, case, spec.op, spec.dtype, spec.head_dim, spec)
            ran += 1
        except ArgumentError as error:
            # Of low precision a row takes what it was compiled for.
            if (spec.op, error.argument) != ("attention_int8", "OMNIATTN_FORCE_KERNEL"):
                raise
    assert ran >= 1
    assert asked - may_want == wants
