"""JAX on the CPU: the same capsules and the same way back as on a GPU, without the events."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays
from omniattn.arrays.exporter import Exporter
from omniattn.errors import ArgumentError, UnsupportedError
from tests.unit.arrays.arrays_fakes import exports

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "bool"])
def test_facts(dtype: str) -> None:
    x = jnp.ones((2, 3, 8), dtype=dtype)
    t = arrays.describe(x, "q")
    assert (t.framework, t.device, t.dtype, t.shape, t.strides) == ("jax", "cpu", dtype, (2, 3, 8), (24, 8, 1))
    assert t.readonly is True
    np.testing.assert_array_equal(arrays.to_numpy(t), np.asarray(x).astype(arrays.to_numpy(t).dtype))


def test_out_is_refused() -> None:
    with pytest.raises(ArgumentError) as caught:
        arrays.require_writable(arrays.describe(jnp.zeros(2), "out"))
    assert "argument 'out': expected a writable array, received a jax.Array, which never changes" in str(caught.value)
    with pytest.raises(ArgumentError):
        arrays.store(arrays.describe(jnp.zeros(2), "out"), np.zeros(2))


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_tracers(transform: str) -> None:
    def f(x):
        arrays.describe(x, "k")
        return x.sum()

    with pytest.raises(UnsupportedError) as caught:
        getattr(jax, transform)(f)(jnp.zeros((2, 2)))
    assert "argument 'k' is a JAX tracer" in str(caught.value)
    assert "outside the transform" in str(caught.value)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_result_goes_back_without_a_copy_and_is_let_go(dtype: str, as_on_a_gpu: bool) -> None:
    """By JAX's own capsule, and by one of this package, as where JAX has to wait for a kernel."""
    gc.collect()
    before = exports()
    ref = arrays.describe(jnp.zeros((2, 8), dtype=dtype), "q")
    out = arrays.empty_like_framework(ref, (64, 8), dtype)
    assert out.readonly is False
    values = np.arange(512, dtype=np.float32).reshape(64, 8) / 8
    arrays.store(out, values)
    address = out.ptr
    handle = arrays.prepare([ref, out])
    result = jax.dlpack.from_dlpack(Exporter(out, None)) if as_on_a_gpu else arrays.finish(out, handle)
    assert isinstance(result, jax.Array)
    assert result.unsafe_buffer_pointer() == address
    assert exports() == before + as_on_a_gpu
    del ref, out
    gc.collect()
    expected = jnp.asarray(values).astype(dtype)
    np.testing.assert_array_equal(np.asarray(result).astype(np.float32), np.asarray(expected).astype(np.float32))
    np.testing.assert_array_equal(
        np.asarray(result * 2).astype(np.float32), np.asarray(expected * 2).astype(np.float32)
    )
    del result
    gc.collect()
    assert exports() == before


def test_empty_result() -> None:
    out = arrays.empty_like_framework(arrays.describe(jnp.zeros((2, 8)), "q"), (0, 8), "float32")
    assert arrays.finish(out, 0).shape == (0, 8)


def test_double_precision_that_jax_does_not_have_switched_on() -> None:
    ref = arrays.describe(jnp.zeros(2), "q")
    with pytest.raises(UnsupportedError, match="jax_enable_x64"), pytest.warns(UserWarning, match="float64"):
        arrays.empty_like_framework(ref, (2,), "float64")


def test_deleted_array() -> None:
    x = jnp.zeros(4)
    x.delete()
    with pytest.raises(ArgumentError) as caught:
        arrays.describe(x, "v")
    assert "argument 'v': expected a live jax.Array, received one whose memory was deleted or donated" in str(
        caught.value
    )


@pytest.mark.parametrize("where", ["globals()", "__import__('builtins').__dict__", "__import__('sys').__dict__"])
def test_result_that_outlives_the_interpreter(where: str) -> None:
    code = f"""
import jax, jax.numpy as jnp, numpy as np
from omniattn import arrays
from omniattn.arrays.exporter import Exporter
ref = arrays.describe(jnp.zeros((2, 8)), "q")
out = arrays.empty_like_framework(ref, (4, 8), "float32")
arrays.store(out, np.ones((4, 8)))
{where}["result"] = jax.dlpack.from_dlpack(Exporter(out, None))
{where}["described"] = ref
del ref, out
print("end")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_result_that_an_exception_drops_leaves_it_alone() -> None:
    """An expression that fails drops what it had; the caller gets its exception, and nothing that hides it."""
    q = jnp.ones((1, 4, 2, 8))

    def fails() -> Any:
        raise KeyError("the caller's")

    for expression in (
        lambda: oa.attention(q, q, q) + fails(),
        lambda: (oa.attention(q, q, q, return_lse=True), fails()),
        lambda: [oa.attention(q, q, q) if i == 0 else fails() for i in range(2)],
    ):
        with pytest.raises(KeyError, match="the caller's"):
            expression()
