"""Latent caches of torch and JAX: versions, compiled and exported calls, pickles, pytrees; on the CPU."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import omniattn as oa

pytestmark = pytest.mark.frameworks

FORMATS = ["bf16", "fp8", "fp8_ds_mla"]


def torch_cache(k_dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    scale = {"k_scale": torch.tensor([0.03])} if k_dtype == "fp8" else {}
    like = torch.zeros(1, dtype=torch.bfloat16)
    cache = oa.PagedKVCache(8, 16, 1, 576, like=like, k_dtype=k_dtype, head_dim_v=512, **scale)
    cache.k.view(torch.uint8).fill_(255)
    return cache


@pytest.mark.frameworks
@pytest.mark.parametrize("k_dtype", FORMATS)
def test_torch(k_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    plain, compiled = torch_cache(k_dtype), torch_cache(k_dtype)
    x = torch.randn(20, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:20]

    def step(cache: Any, x: Any, slots: Any) -> Any:
        oa.append(cache, x, slot_mapping=slots)
        oa.append(cache, x[:, :512], k_pe=x[:, None, 512:], slot_mapping=slots + 64)
        return x + 1

    before = plain.k._version
    step(plain, x, slots)
    assert plain.k._version > before
    torch.compile(lambda x, slots: step(compiled, x, slots), fullgraph=True, backend="aot_eager")(x, slots)
    rows = plain.k.view(torch.uint8)
    assert torch.equal(rows, compiled.k.view(torch.uint8))
    assert torch.equal(rows[:4], rows[4:])
    assert int(rows.ne(255).any(-1).sum()) == 40
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert torch.equal(rows, other.k.view(torch.uint8))
        assert other.facts == plain.facts
    torch.library.opcheck(
        torch.ops.omniattn.append.default,
        (
            list(plain.operands[0]), list(plain.operands[1]), plain.key, x[:, :512], None, None, None, None, None, None,
            None, "half", slots, None, x[:, 512:],
        ),
    )  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize("k_dtype", FORMATS)
def test_jax(k_dtype: str) -> None:
    jax = pytest.importorskip("jax")
    jnp = pytest.importorskip("jax.numpy")
    import omniattn.jax  # noqa: F401 - makes pytrees of caches

    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 576)), jnp.bfloat16)
        q, lens = jnp.ones((2, 1, 3, 576), jnp.bfloat16), jnp.asarray([5, 5], jnp.int32)

        def step(cache: Any, x: Any) -> Any:
            oa.append(cache, x[..., :512], k_pe=x[..., 512:], seq_lens=lens)
            return oa.decode(q, cache, seq_lens=lens), cache

        plain, traced = (
            oa.KVCache(2, 32, 1, 576, like=jnp.zeros(1), k_dtype=k_dtype, head_dim_v=512) for _ in range(2)
        )
        o, _ = step(plain, x)
        o_traced, traced = jax.jit(step)(traced, x)
        np.testing.assert_array_equal(np.asarray(o, np.float32), np.asarray(o_traced, np.float32))
        a, b = (np.asarray(cache.k).view(np.uint8)[:, :5] for cache in (plain, traced))
        np.testing.assert_array_equal(a, b)


#: Functions over a cache, with what they are given besides.
OVER_CACHES = {"attention_with_kvcache": {"causal": True}, "decode": {}}


@pytest.mark.frameworks
@pytest.mark.parametrize("function", OVER_CACHES)
def test_traced_results_have_the_channels_of_v(function: str) -> None:
    torch = pytest.importorskip("torch")
    cache = torch_cache("bf16")
    oa.append(cache, torch.randn(64, 576).bfloat16(), slot_mapping=torch.arange(64))
    q, lens = torch.randn(2, 1, 16, 576).bfloat16(), torch.tensor([20, 30], dtype=torch.int32)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def call(q: Any) -> Any:
        o = getattr(oa, function)(q, cache, seq_lens=lens, block_table=table, **OVER_CACHES[function])
        return o.reshape(2, 16 * o.shape[-1])

    want = call(q)
    assert want.shape == (2, 16 * 512)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(q), want)


@pytest.mark.frameworks
@pytest.mark.parametrize("function", OVER_CACHES)
def test_traced_results_of_jax_have_the_channels_of_v(function: str) -> None:
    jax = pytest.importorskip("jax")
    import omniattn.jax  # noqa: F401

    rows = jax.numpy.asarray(np.random.default_rng(0).standard_normal((4, 16, 1, 576)), jax.numpy.bfloat16)
    cache = oa.PagedKVCache.from_arrays(rows, head_dim_v=512)
    q = jax.numpy.ones((2, 1, 16, 576), jax.numpy.bfloat16)
    lens, table = jax.numpy.asarray([20, 30]), jax.numpy.asarray([[0, 1], [2, 3]])

    def call(q: Any, cache: Any) -> Any:
        return getattr(oa, function)(
            q, cache, seq_lens=lens.astype("int32"), block_table=table.astype("int32"), **OVER_CACHES[function]
        )

    assert jax.eval_shape(call, q, cache).shape == jax.jit(call)(q, cache).shape == (2, 1, 16, 512)
