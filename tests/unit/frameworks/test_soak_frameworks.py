"""``omniattn verify --soak`` on the arrays of torch and JAX, on the CPU."""

from __future__ import annotations

import itertools

import pytest

from omniattn.testing.soak import outcome, pools
from omniattn.testing.soak.chosen import machine
from omniattn.testing.soak.operations import OPERATIONS, problem

pytest.importorskip("ml_dtypes")

#: Problems of each operation.
_COUNT = 2


@pytest.mark.frameworks
@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_problems_pass(library: str, operation: str) -> None:
    pytest.importorskip(library)
    m = machine(library, cpu=True)
    assert (m.library, m.on_cpu) == (library, True)
    drawn = (p for n in range(999) if (p := problem(4, n, cpu=True)).operation == operation and p.dtype != "float64")
    for one in itertools.islice((p for p in drawn if library != "jax" or "pool" not in p.facts), _COUNT):
        found = outcome.run(m, one)
        assert (found.status, found.text) == (outcome.PASSED, "")


@pytest.mark.frameworks
@pytest.mark.parametrize("operation", ["caches", "attention_with_kvcache"])
def test_caches_on_arrays_of_the_caller(operation: str) -> None:
    """Of torch, which has e4m3 of its own, with all scales."""
    pytest.importorskip("torch")
    m, left = machine("torch", cpu=True), {(d, s) for d in ("fp8", "int8") for s in pools.SCALES} | {("bf16", None)}
    for one in (p for n in range(9999) if "pool" in (p := problem(4, n, cpu=True)).facts and p.operation == operation):
        kind = one.facts["cache"]["k_dtype"], one.facts["pool"].get("scales")
        if kind in left:
            found = outcome.run(m, one)
            assert (found.status, found.text) == (outcome.PASSED, ""), one
            left.remove(kind)
        if not left:
            return
    raise AssertionError(f"not drawn: {left}")


@pytest.mark.frameworks
def test_gradients_of_autograd_are_compared() -> None:
    pytest.importorskip("torch")
    m = machine("torch", cpu=True)
    drawn = (problem(4, n, cpu=True) for n in range(999))
    one = next(p for p in drawn if p.operation == "attention_backward" and p.facts["autograd"])
    names = {grade.name for grade in OPERATIONS[one.operation].check(m, one)}
    assert any(name.endswith("by autograd") for name in names)


@pytest.mark.frameworks
def test_what_a_framework_lacks_is_refused() -> None:
    pytest.importorskip("jax")
    wide = next(p for n in range(999) if (p := problem(4, n, cpu=True)).dtype == "float64")
    found = outcome.run(machine("jax", cpu=True), wide)
    assert (found.status, found.text) == (outcome.REFUSED, "JAX has no float64 unless it is told so")
    pool = next(p for n in range(999) if "pool" in (p := problem(4, n, cpu=True)).facts and p.dtype == "float16")
    found = outcome.run(machine("jax", cpu=True), pool)
    assert (found.status, found.text) == (
        outcome.REFUSED, "arrays of jax have no strides, and nobody writes into them"
    )  # fmt: skip
