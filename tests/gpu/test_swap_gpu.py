"""Sequences that leave a cache on the GPU and come back, beside the steps; windows whose old blocks have gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.arrays import events  # noqa: E402
from omniattn.errors import UnsupportedError  # noqa: E402
from tests.foreign_pools import ORDERS, memory_shape, planes  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCKS, SIZE, HEADS, DIM = 24, 16, 2, 64
#: Cycles that a stream is kept busy: some 200 ms.
SLOW = 400_000_000


def int32(x: Any) -> torch.Tensor:
    """On the GPU, without waiting for it."""
    return torch.from_numpy(np.asarray(x, dtype=np.int32)).pin_memory().to("cuda", non_blocking=True)


class Served:
    """Layers of caches of torch, and their manager."""

    def __init__(self, k_dtype: str = "bf16", layers: int = 3) -> None:
        like = torch.empty(0, device="cuda")
        self.caches = [oa.PagedKVCache(BLOCKS, SIZE, HEADS, DIM, like=like, k_dtype=k_dtype) for _ in range(layers)]
        self.manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(self.caches, 20))
        self.generator = torch.Generator("cuda").manual_seed(1)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=self.generator).bfloat16()

    def places(self, name: str) -> dict[str, torch.Tensor]:
        manager = self.manager
        return {"seq_lens": int32(manager.seq_lens([name])), "block_table": int32(manager.block_table([name]))}

    def add(self, name: str, count: int) -> None:
        self.manager.add(name)
        self.manager.extend({name: count})
        places = self.places(name)
        for cache in self.caches:
            oa.append(cache, self.random(1, count, HEADS, DIM), self.random(1, count, HEADS, DIM), **places)

    def decode(self, name: str, q: torch.Tensor, **options: Any) -> list[torch.Tensor]:
        places = self.places(name)
        return [oa.decode(q, cache, **places, **options) for cache in self.caches]


@pytest.fixture(params=["cuda-bindings", "CuPy"])
def _binding(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "CuPy":
        pytest.importorskip("cupy")
        events.set_backend(events._Cupy())
    yield
    events.set_backend(None)


@pytest.mark.usefixtures("_binding")
@pytest.mark.parametrize("k_dtype", ["bf16", "int4"])
def test_copies_beside_the_steps(k_dtype: str) -> None:
    """Behind a slow step, on another stream than its; what follows waits for them, and the host for nothing."""
    served = Served(k_dtype)
    manager = served.manager
    q = served.random(1, 1, 4 * HEADS, DIM)
    served.add("a", 150)
    before = served.decode("a", q)
    steps = torch.cuda.Stream()
    steps.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(steps):
        served.add("b", 60)
        o_b = served.decode("b", q)
        torch.cuda._sleep(SLOW)
        out = [manager.swap_out("b"), manager.swap_out("a", stream=steps)]
        assert not out[0].done(), "the step is ahead of the copies"
        out[0].wait()
        out[1].wait(steps)
        served.add("c", 350)  # takes the blocks of both
        o_c = served.decode("c", q)
        manager.free("c")
        torch.cuda._sleep(SLOW)
        back = [manager.swap_in(name) for name in "ab"]
        assert not back[0].done()
        for event in back:
            event.wait()
        after = {name: served.decode(name, q) for name in "ab"}
    back[1].synchronize()
    assert back[0].done()
    torch.cuda.synchronize()
    for x, y in zip([*before, *o_b], [*after["a"], *after["b"]], strict=True):
        assert torch.equal(x, y)
    assert all(x.isfinite().all() for x in o_c)


def test_a_copy_does_not_wait_for_steps_behind_it() -> None:
    served = Served()
    served.add("a", 150)
    torch.cuda.synchronize()
    event = served.manager.swap_out("a")
    torch.cuda._sleep(5 * SLOW)
    event.synchronize()
    assert not torch.cuda.current_stream().query(), "it has run beside the sleep"
    torch.cuda.synchronize()


@pytest.mark.parametrize("order", ORDERS)
def test_pools_of_any_strides(order: str) -> None:
    """The bytes of a sequence come back, and nothing beside its blocks is written."""
    memory = torch.randint(-30000, 30000, memory_shape(order, BLOCKS, SIZE, HEADS, DIM), device="cuda")
    memory = memory.to(torch.int16).view(torch.bfloat16)
    pools = planes(order, memory, BLOCKS, SIZE, HEADS, DIM)
    cache = oa.PagedKVCache.from_arrays(*pools)
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))
    for name in "ab":
        manager.add(name)
        manager.extend({name: 5 * SIZE})
    before = [x[list(manager.blocks("a"))].view(torch.int16).clone() for x in pools]
    manager.swap_out("a").wait()
    for x in pools:
        x[:5] = 0
    manager.add("c")
    manager.extend({"c": 1})
    whole = memory.view(torch.int16).clone()
    manager.swap_in("a").wait()
    blocks = list(manager.blocks("a"))
    assert blocks != [0, 1, 2, 3, 4]
    for x, y in zip(pools, before, strict=True):
        assert torch.equal(x[blocks].view(torch.int16), y)
    views = planes(order, whole.view(torch.bfloat16), BLOCKS, SIZE, HEADS, DIM)
    for x, y in zip(pools, views, strict=True):
        x[blocks] = 0
        y[blocks] = 0
    assert torch.equal(memory.view(torch.int16), whole)


@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_caches_of_other_libraries(framework: str) -> None:
    module = pytest.importorskip(framework)
    xp = module.numpy if framework == "jax" else module
    rng = np.random.default_rng(0)
    k, v, q = (xp.asarray(rng.standard_normal((1, n, HEADS, DIM)).astype(np.float16)) for n in (70, 70, 1))
    cache = oa.PagedKVCache(BLOCKS, SIZE, HEADS, DIM, like=k, k_dtype="fp16")
    manager = oa.BlockManager(BLOCKS, SIZE, swap_space=oa.SwapSpace(cache, 8))

    def places(name: str) -> dict[str, Any]:
        return {
            "seq_lens": xp.asarray(manager.seq_lens([name])),
            "block_table": xp.asarray(manager.block_table([name])),
        }

    def host(x: Any) -> Any:
        return module.asnumpy(x) if framework == "cupy" else np.asarray(x)

    manager.add("a")
    manager.extend({"a": 70})
    oa.append(cache, k, v, **places("a"))
    before = host(oa.decode(q, cache, **places("a")))
    manager.swap_out("a").wait()
    manager.add("b")
    manager.extend({"b": 70})
    oa.append(cache, -k, -v, **places("b"))
    manager.swap_in("a").wait()
    np.testing.assert_array_equal(host(oa.decode(q, cache, **places("a"))), before)
    assert not np.array_equal(host(oa.decode(q, cache, **places("b"))), before)


def test_a_capture_refuses_swaps() -> None:
    served = Served(layers=1)
    served.add("a", 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UnsupportedError, match="captured"):
        served.manager.swap_out("a")
    assert served.manager.swapped == ()
    served.manager.swap_out("a").synchronize()


@pytest.mark.parametrize(("k_dtype", "q_len"), [("bf16", 1), ("bf16", 5), ("bf16", 40), ("int4", 1), ("int4", 5)])
def test_a_window_does_not_see_who_has_its_old_blocks(k_dtype: str, q_len: int) -> None:
    """Blocks that it has given back hold NaN; tiles of keys that begin left of it read its own block instead."""
    served = Served(k_dtype, layers=1)
    manager, (cache,) = served.manager, served.caches
    for length, left in ((300, 20), (263, 70), (330, 0)):
        served.add("a", length)
        q = served.random(1, q_len, 4 * HEADS, DIM)
        before = oa.attention_with_kvcache(q, cache, **served.places("a"), window=(left, 0))
        whole = manager.blocks("a")
        manager.free_before("a", length - q_len - left)
        gone = sorted(set(whole) - set(manager.blocks("a")))
        assert gone
        for plane in (cache.k, cache.v, cache.k_params, cache.v_params):
            if plane is not None:
                plane.view(torch.uint8)[gone] = 0xFF
        after = oa.attention_with_kvcache(q, cache, **served.places("a"), window=(left, 0))
        assert torch.equal(before, after)
        manager.free("a")
