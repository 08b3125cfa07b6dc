"""Caches on torch's tensors: compiled, functionalized, in inference mode; on JAX's arrays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError
from tests.foreign_pools import ORDERS, memory_shape, planes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

SIZES = (5, 3, 2, 16)
TABLE, LENGTHS, SLOTS = [[4, 1]], [5], [12, 13, 14, 3, 4]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(1)
    yield
    torch._dynamo.reset()


def pool(order: str) -> tuple[Any, Any, Any]:
    memory = torch.full(memory_shape(order, *SIZES), torch.nan, dtype=torch.bfloat16)
    return *planes(order, memory, *SIZES), memory


def inputs() -> tuple[Any, ...]:
    q = torch.randn(1, 1, 4, 16).bfloat16()
    k, v = (torch.randn(5, 2, 16).bfloat16() for _ in "kv")
    numbers = [torch.tensor(x, dtype=torch.int32) for x in (LENGTHS, TABLE)]
    return q, k, v, *numbers, torch.tensor(SLOTS)


def steps(cache: Any, q: Any, k: Any, v: Any, lengths: Any, table: Any, slots: Any) -> Any:
    oa.append(cache, k, v, slot_mapping=slots)
    return oa.decode(q, cache, seq_lens=lengths, block_table=table, return_lse=True)


@pytest.mark.parametrize("order", ORDERS)
def test_compiled_steps_write_the_pool(order: str) -> None:
    given = inputs()
    results, memories = [], []
    for compiled in (False, True):
        k, v, memory = pool(order)
        cache = oa.PagedKVCache.from_arrays(k, v)
        assert cache.k is k
        versions = memory._version
        run = torch.compile(steps, fullgraph=True, backend="aot_eager") if compiled else steps
        results.append(run(cache, *given))
        memories.append(memory)
        assert memory._version > versions
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert torch.isfinite(a).all()
    assert torch.equal(*(torch.nan_to_num(x.float(), nan=-1.0) for x in memories))
    assert int(torch.isfinite(memories[0]).sum()) == 2 * 5 * 2 * 16


@pytest.mark.parametrize("rope", ["half", "interleaved"])
def test_a_compiled_append_by_slots_rotates(rope: str) -> None:
    _, k, v, *_, slots = inputs()
    angle = torch.randn(9, 4)
    positions = torch.arange(5, dtype=torch.int32)
    own = [oa.PagedKVCache(5, 3, 2, 16, like=k) for _ in range(2)]
    for cache in own:
        cache.k.zero_()
        cache.v.zero_()

    def run(cache: Any, slots: Any, positions: Any) -> None:
        oa.append(
            cache, k, v, slot_mapping=slots, positions=positions, cos=angle.cos(), sin=angle.sin(), rope=rope
        )  # fmt: skip

    run(own[0], slots, positions)
    torch.compile(run, fullgraph=True, backend="aot_eager")(own[1], slots, positions)
    assert torch.equal(own[0].k, own[1].k)
    assert torch.equal(own[0].v, own[1].v)


def test_planes_that_a_trace_copied() -> None:
    """Operators get the planes, which need not be the cache's own memory nor have its strides."""
    import omniattn.frameworks.torch.tracing  # noqa: F401

    q, k, v, lengths, table, slots = inputs()
    k_plane, v_plane, _ = pool("BNHC")
    cache = oa.PagedKVCache.from_arrays(k_plane, v_plane)
    expected = steps(cache, q, k, v, lengths, table, slots)[0]
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (k_plane, v_plane)]
    k_plane.zero_()
    found, _ = torch.ops.omniattn.decode(
        copies, [], cache.key, q, lengths, table, None, None, None, None, 0.0, False, False, 0
    )
    assert torch.equal(found, expected)


def test_parameters_and_gradients() -> None:
    k = torch.zeros(SIZES, dtype=torch.float16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        oa.PagedKVCache.from_arrays(k, k)
    oa.PagedKVCache.from_arrays(k.detach(), k.detach())


def test_inference_mode() -> None:
    q, k, v, lengths, table, slots = inputs()
    with torch.inference_mode():
        memory = torch.zeros(5, 3, 2, 32, dtype=torch.bfloat16)
        cache = oa.PagedKVCache.from_arrays(memory)
        steps(cache, q, k, v, lengths, table, slots)
    usual = oa.PagedKVCache.from_arrays(torch.zeros(5, 3, 2, 32, dtype=torch.bfloat16))
    with pytest.raises(ArgumentError, match="inference"):
        oa.append(cache, k, v, slot_mapping=slots)
    oa.append(usual, k, v, slot_mapping=slots)
    assert torch.equal(usual.k, memory[..., :16].clone())


def test_a_cache_holds_its_arrays_and_nothing_else_does() -> None:
    memory = torch.zeros(5, 3, 2, 32, dtype=torch.bfloat16)
    cache = oa.PagedKVCache.from_arrays(memory)
    again = oa.PagedKVCache.from_arrays(memory)
    assert again.facts is cache.facts
    storage = torch.multiprocessing.reductions.StorageWeakRef(memory.untyped_storage())
    gone = weakref.ref(cache)
    del memory, cache, again
    gc.collect()
    assert gone() is None
    assert storage.expired()


def test_arrays_of_jax() -> None:
    jax = pytest.importorskip("jax")
    import omniattn.jax  # noqa: F401 - caches as pytrees

    q, k, v, lengths, table, slots = (jax.numpy.asarray(x.float().numpy()) for x in inputs())
    lengths, table, slots = (x.astype("int32") for x in (lengths, table, slots))
    k, v, q = (x.astype("bfloat16") for x in (k, v, q))
    results = []
    for layout in ("NHD", "HND", None):
        if layout is None:
            cache = oa.PagedKVCache(5, 3, 2, 16, like=k)
        else:
            shape = (5, 3, 2, 16) if layout == "NHD" else (5, 2, 3, 16)
            arrays = [jax.numpy.zeros(shape, "bfloat16") for _ in "kv"]
            cache = oa.PagedKVCache.from_arrays(*arrays, layout=layout)

        def step(cache: Any, slots: Any) -> Any:
            oa.append(cache, k, v, slot_mapping=slots)
            return oa.decode(q, cache, seq_lens=lengths, block_table=table), cache

        o, cache = jax.jit(step, donate_argnums=0)(cache, slots)
        results.append((np.asarray(o.astype("float32")), cache))
        again = oa.decode(q, cache, seq_lens=lengths, block_table=table)
        np.testing.assert_array_equal(np.asarray(again.astype("float32")), results[-1][0])
    for o, _ in results[:2]:
        np.testing.assert_array_equal(o, results[2][0])
    assert results[0][1].k.shape == (5, 3, 2, 16)
    with pytest.raises(UnsupportedError, match="two arrays"):
        oa.PagedKVCache.from_arrays(jax.numpy.zeros((5, 3, 2, 32), "bfloat16"))
