"""Numerics of the backward's code for sm_80 and sm_89, on whatever GPU is here: PTX that the driver translates.

As test_architectures_gpu, of which these rows would make the longest file.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from omniattn import runtime  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, KernelSpec, by_name  # noqa: E402
from omniattn.runtime import LoadedKernel  # noqa: E402
from omniattn.runtime.compile import compile_spec  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.gradient_cases import BACKWARD_OPS  # noqa: E402
from omniattn.testing.rows import run_row  # noqa: E402

from .backward_cases import choose_from  # noqa: E402
from .test_architectures_gpu import _without_target  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_plans")]

TARGETS = ("compute_80", "compute_89")
#: Those that every GPU gets; the others follow Hopper's own kernels.
SPECS = [
    spec for spec in REGISTRY if spec.op in BACKWARD_OPS and not spec.arch_specific and "fragments" not in spec.features
]
ROWS = [(spec.name, target) for target in TARGETS for spec in SPECS if spec.min_arch <= (8, 0)]

Key = tuple[str, str]


@pytest.fixture(scope="module")
def kernels() -> dict[Key, LoadedKernel]:
    """Every row loaded from PTX; a text that comes for both targets is loaded once."""
    context = multiprocessing.get_context("spawn")  # this process has used CUDA
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        jobs = {key: pool.submit(compile_spec, by_name(key[0]), key[1]) for key in ROWS}
        results = {key: job.result() for key, job in jobs.items()}
    assert all(result.ptx for result in results.values())
    texts = {key: result.cubin.decode().rstrip("\0") for key, result in results.items()}
    first_with: dict[tuple[str, str], Key] = {}
    same_as = {key: first_with.setdefault((key[0], _without_target(text)), key) for key, text in texts.items()}

    def load(key: Key) -> LoadedKernel:
        assert f".target {key[1].replace('compute', 'sm')}" in texts[key]
        return runtime.load_image(by_name(key[0]), 0, texts[key].encode(), origin=f"{key[1]} PTX")

    unique = sorted(set(same_as.values()))
    with ThreadPoolExecutor(8) as pool:
        loaded = dict(zip(unique, pool.map(load, unique), strict=True))
    return {key: loaded[same] for key, same in same_as.items()}


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
