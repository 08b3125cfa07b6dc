"""run() of FlashInfer's wrappers, and its functions, in one graph of torch.compile; plan() is called before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from omniattn.compat import flashinfer as fi  # noqa: E402
from tests.unit.compat.compat_cases import randoms, starts  # noqa: E402
from tests.unit.compat.flashinfer_cases import DIM, HEADS, KV, WORKSPACE, Requests, buffers, plan_of  # noqa: E402

pytestmark = pytest.mark.frameworks

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@BACKENDS
@pytest.mark.parametrize("together", [False, True])
def test_pages(backend: str, together: bool) -> None:
    x = Requests([7, 33], 5, together=together)
    shape, options = plan_of(x)
    decode = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers(2, 40))
    decode.plan(*x.tables, *shape, **options)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    prefill.plan(starts([3, 5]), *x.tables, *shape, causal=True, window_left=4, **options)
    for wrapper, rows in ((decode, 2), (prefill, 8)):
        (q,) = randoms((rows, HEADS, DIM), seed=3, dtype=x.dtype)

        def step(q: Any, pool: Any, wrapper: Any = wrapper) -> Any:
            out, lse = wrapper.run(q * 2, pool, return_lse=True, v_scale=2.0)
            into = torch.empty_like(q)
            return out + 1, lse, wrapper.run(q, pool, out=into), into

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for got, want in zip(compiled(q, x.pool), step(q, x.pool), strict=True):
            assert torch.equal(got, want)
    # Another plan, in the same tensors: the graph reads them.
    y = Requests([40, 2], 5, seed=1, together=together)
    decode.plan(*y.tables, *shape, **options)
    (q,) = randoms((2, HEADS, DIM), seed=3, dtype=x.dtype)
    run = torch.compile(lambda q, pool: decode.run(q, pool, return_lse=True), fullgraph=True, backend=backend)
    for got, want in zip(run(q, y.pool), decode.run(q, y.pool, return_lse=True), strict=True):
        assert torch.equal(got, want)


@BACKENDS
def test_packed_keys_and_states(backend: str) -> None:
    q, k, v = randoms((8, HEADS, DIM), (40, KV, DIM), (40, KV, DIM), seed=3, dtype=torch.float16)
    ragged = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(starts([3, 5]), starts([7, 33]), HEADS, KV, DIM, causal=True)

    def step(q: Any, k: Any, v: Any) -> Any:
        packed = ragged.run_return_lse(q, k, v)
        one = fi.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
        return *packed, *one, *fi.merge_state(*packed, *one), fi.single_decode_with_kv_cache(q[0], k, v)

    for got, want in zip(torch.compile(step, fullgraph=True, backend=backend)(q, k, v), step(q, k, v), strict=True):
        assert torch.equal(got, want)
