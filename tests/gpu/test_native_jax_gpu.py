"""Compiled JAX programs whose launches the C module's handler queues: the bits of those that a callback queues."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import omniattn as oa

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def jax() -> Any:
    module = pytest.importorskip("jax")
    pytest.importorskip("omniattn.jax")
    return module


@pytest.fixture
def handler(jax: Any) -> Any:
    from omniattn.frameworks.jax import handler

    if handler.module() is None:
        pytest.skip("omniattn._native is not built")
    return handler


def _arrays(jax: Any, *shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    rng, gpu = np.random.default_rng(seed), jax.devices("gpu")[0]
    return [jax.device_put(rng.standard_normal(s).astype(np.float32), gpu).astype("bfloat16") for s in shapes]


def _calls(jax: Any) -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    jnp = jax.numpy
    dense = _arrays(jax, (2, 200, 8, 64), (2, 333, 2, 64), (2, 333, 2, 64))
    few = _arrays(jax, (1, 1, 8, 128), (1, 8192, 2, 128), (1, 8192, 2, 128))
    packed = _arrays(jax, (333, 8, 64), (333, 2, 64), (333, 2, 64))
    starts = jnp.asarray([0, 100, 100, 333], "int32")

    def loss(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return (oa.attention(q, k, v, **options).astype("float32") ** 2).sum()

    return {
        "plain": (lambda q, k, v: oa.attention(q, k, v, return_lse=True), dense),
        "causal, softcap": (lambda q, k, v: oa.attention(q, k, v, causal=True, softcap=20.0), dense),
        "int8": (lambda q, k, v: oa.attention(q, k, v, precision="int8"), dense),
        "fp8": (lambda q, k, v: oa.attention(q, k, v, precision="fp8"), dense),
        "split keys": (oa.attention, few),
        "packed": (
            lambda q, k, v: oa.attention_varlen(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=233, max_seqlen_k=233
            ),
            packed,
        ),
        "gradients": (jax.grad(functools.partial(loss, causal=True, deterministic=True), (0, 1, 2)), dense),
        "loop": (
            lambda q, k, v: jax.lax.scan(lambda x, _: (oa.attention(x, k, v), None), q, None, length=6)[0], dense,
        ),
        "mapped": (jax.vmap(oa.attention, in_axes=(0, None, None)), [jnp.stack([dense[0]] * 3), *dense[1:]]),
    }  # fmt: skip


def test_the_bits_of_callbacks(jax: Any, handler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (call, arrays) in _calls(jax).items():
        before = handler.module().jax_runs()
        by_handler = jax.block_until_ready(jax.jit(call)(*arrays))
        assert handler.module().jax_runs() > before, name
        again = jax.block_until_ready(jax.jit(call)(*arrays))
        with monkeypatch.context() as patch:
            patch.setattr(handler, "number_of", lambda *_: None)
            jax.clear_caches()
            before = handler.module().jax_runs()
            by_callback = jax.block_until_ready(jax.jit(lambda *xs, call=call: call(*xs))(*arrays))
            assert handler.module().jax_runs() == before
        jax.clear_caches()
        for x, y, z in zip(*map(jax.tree.leaves, (by_handler, again, by_callback)), strict=True):
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(z).view(np.uint8), err_msg=name)
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8), err_msg=name)


def test_a_cache_is_written_in_place(jax: Any, handler: Any) -> None:
    jnp = jax.numpy

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: Any, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        oa.append(cache, k, v, seq_lens=lengths)
        return oa.decode(q, cache, seq_lens=lengths), cache

    q, k, v = _arrays(jax, (2, 1, 8, 64), (2, 1, 2, 64), (2, 1, 2, 64))
    cache = oa.KVCache(2, 128, 2, 64, like=q, k_dtype="int8")
    other = oa.KVCache(2, 128, 2, 64, like=q, k_dtype="int8")
    before = handler.module().jax_runs()
    for length in (1, 2, 3):
        lengths = jnp.asarray([length, length], "int32")
        o, cache = step(cache, q, k * length, v, lengths)
        oa.append(other, k * length, v, seq_lens=lengths)
        np.testing.assert_array_equal(
            np.asarray(o).view(np.uint8), np.asarray(oa.decode(q, other, seq_lens=lengths)).view(np.uint8)
        )
    assert handler.module().jax_runs() == before + 6


_GRAPHS = """
import jax, numpy as np, omniattn as oa
from omniattn.frameworks.jax import handler
q, k, v = (jax.device_put(np.random.default_rng(i).standard_normal((1, 128, 4, 64)), jax.devices("gpu")[0])
           .astype("bfloat16") for i in range(3))
want = np.asarray(oa.attention(oa.attention(q, k, v), k, v).astype("float32"))
call = jax.jit(lambda q, k, v: oa.attention(oa.attention(q, k, v), k, v))
for _ in range(50):
    got = np.asarray(call(q, k, v).astype("float32"))
    assert np.array_equal(got, want)
print("runs", handler.module().jax_runs())
"""


def test_recorded_into_cuda_graphs(handler: Any) -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", _GRAPHS], env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # 50 runs of two calls: a graph that is replayed does not ask the handler.
    assert 2 <= int(done.stdout.split()[1]) < 100
