"""What users do to arrays, streams and threads that has always been right here, and was not everywhere else.

Beside these: replays with other values and lengths in `test_arrays_gpu`, `test_runtime_gpu`, `test_backward_calls_gpu`
and `test_decode_gpu`; empty sequences in `test_attention_gpu` and `test_varlen_merge_gpu`; a second process and cold
caches in `test_runtime_gpu`; NaN behind the last sequence in gradients in `test_backward_gpu`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .kernel_cases import poisoned_outputs  # noqa: E402

pytestmark = pytest.mark.gpu


def _random(*shape: int, dtype: Any = torch.bfloat16, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def _close(got: Any, want: Any, tolerance: float) -> None:
    """Relative to the largest number wanted; NaN fails."""
    assert got.shape == want.shape
    error = (got.double() - want.double()).abs().max().item()
    assert error <= tolerance * want.double().abs().max().item(), error


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_nan_behind_the_last_sequence(precision: str) -> None:
    used, rows = 230, 288
    q, k, v = (_random(rows, heads, 64, seed=heads) for heads in (4, 2, 2))
    starts = torch.tensor([0, 100, 100, used], dtype=torch.int32, device="cuda")
    options = {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 130, "max_seqlen_k": 130, "causal": True,
        "precision": precision, "return_lse": True,
    }  # fmt: skip
    clean, clean_lse = oa.attention_varlen(q, k, v, **options)
    for x, value in ((q, torch.nan), (k, torch.inf), (v, torch.nan)):
        x[used:] = value
    with poisoned_outputs():
        o, lse = oa.attention_varlen(q, k, v, **options)
    assert torch.equal(o[:used], clean[:used])
    assert torch.equal(lse[:, :used], clean_lse[:, :used])
    assert (o[used:] == 0).all()
    assert torch.isneginf(lse[:, used:]).all()


FLIPS: dict[str, tuple[Any, ...]] = {
    "queries": ((slice(None), slice(None, None, -1)), (), ()),
    "keys and values": ((), (slice(None), slice(None, None, -1)), (slice(None), slice(None, None, -1))),
    "batch and heads": (
        (slice(None, None, -1), slice(None), slice(None, None, -1)), (slice(None, None, -1),), (slice(None, None, -1),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FLIPS)
def test_flipped_views(form: str) -> None:
    """Negative strides, which torch does not have, of arrays that are expanded over heads at the same time."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)

    def array(heads: int, rows: int) -> Any:
        return cupy.asarray(rng.standard_normal((2, rows, heads, 64)).astype(np.float16))

    q, do = array(4, 130), array(4, 130)
    k, v = (cupy.broadcast_to(array(1, 200), (2, 200, 2, 64)) for _ in range(2))
    views = [x[index] for x, index in zip((q, k, v), FLIPS[form], strict=True)]
    do = do[FLIPS[form][0]]
    assert any(step < 0 for x in views for step in x.strides)
    assert 0 in views[1].strides
    copies = [cupy.ascontiguousarray(x) for x in views]
    o, lse = oa.attention(*views, causal=True, return_lse=True)
    want, want_lse = oa.attention(*copies, causal=True, return_lse=True)
    _close(*map(torch.from_dlpack, (o, want)), 4e-3)
    _close(*map(torch.from_dlpack, (lse, want_lse)), 1e-4)
    gradients = oa.attention_backward(do, *views, want, want_lse, causal=True)
    wanted = oa.attention_backward(cupy.ascontiguousarray(do), *copies, want, want_lse, causal=True)
    for a, b in zip(gradients, wanted, strict=True):
        _close(*map(torch.from_dlpack, (a, b)), 1e-2)


def test_green_contexts() -> None:
    """A stream that has some of the SMs: fewer than the persistent kernels are planned for."""
    cu = pytest.importorskip("cuda.bindings.driver")

    def checked(result: tuple[Any, ...]) -> Any:
        assert not result[0], result[0]
        return result[1] if len(result) == 2 else result[1:]

    device = checked(cu.cuDeviceGet(0))
    every = checked(cu.cuDeviceGetDevResource(device, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, _ = checked(cu.cuDevSmResourceSplitByCount(1, every, 0, 16))
    described = checked(cu.cuDevResourceGenerateDesc(groups[:1], 1))
    green = checked(cu.cuGreenCtxCreate(described, device, cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    # Both stay: torch's allocator may come back to the stream.
    stream = int(checked(cu.cuGreenCtxStreamCreate(green, cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)))
    q, k, v, do = (_random(2, 1000, heads, 128, seed=i) for i, heads in enumerate((8, 2, 2, 8)))
    calls = {
        "exact": lambda **on: oa.attention(q, k, v, causal=True, return_lse=True, **on),
        "int8": lambda **on: (oa.attention(q, k, v, causal=True, precision="int8", **on),),
        "split": lambda **on: (oa.attention(q[:1, :1], k[:1], v[:1], **on),),
    }
    wanted = {name: call() for name, call in calls.items()}
    o, lse = wanted["exact"]

    def backward(**on: Any) -> Any:
        return oa.attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True, **on)

    calls["backward"], wanted["backward"] = backward, backward()
    torch.cuda.synchronize()
    for name, call in calls.items():
        made = call(stream=stream)
        assert not cu.cuStreamSynchronize(stream)[0], name
        for a, b in zip(made, wanted[name], strict=True):
            assert torch.equal(a, b), name


def test_six_threads_on_one_stream() -> None:
    """Each with shapes of its own, forward and backward, none of them planned before."""
    count = 6
    side, barrier = torch.cuda.Stream(), threading.Barrier(count)
    inputs = [
        [_random(2, 60 + 41 * i, heads, (64, 128)[i % 2], seed=4 * i + j) for j, heads in enumerate((4, 2, 2, 4))]
        for i in range(count)
    ]

    def both(i: int) -> tuple[Any, ...]:
        *arrays, do = inputs[i]
        leaves = [x.detach().requires_grad_() for x in arrays]
        o = oa.attention(*leaves, causal=True, deterministic=True)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    wanted = [both(i) for i in range(count)]
    torch.cuda.synchronize()
    PLANS.clear()

    def work(i: int) -> list[tuple[Any, ...]]:
        barrier.wait(timeout=60)
        with torch.cuda.stream(side):
            return [both(i) for _ in range(10)]

    with ThreadPoolExecutor(count) as pool:
        found = [future.result() for future in [pool.submit(work, i) for i in range(count)]]
    torch.cuda.synchronize()
    for made, want in zip(found, wanted, strict=True):
        for one in made:
            assert all(torch.equal(a, b) for a, b in zip(one, want, strict=True))


@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_mask_of_one_column_with_gradients(rows: int, dtype: Any) -> None:
    """It moves all scores of a row alike: o stays, the LSE moves by it, and its own gradient is that of the LSE."""
    q, k, v, do = (_random(2, rows, 4, 64, dtype=torch.float16, seed=i) for i in range(4))
    mask, dlse = _random(rows, 1, dtype=dtype, seed=5), _random(2, 4, rows, dtype=torch.float32, seed=6)
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    o, lse = oa.attention(q, k, v, mask=mask, return_lse=True)
    made = torch.autograd.grad([o, lse], leaves, [do, dlse])
    plain, plain_lse = oa.attention(q, k, v, return_lse=True)
    wanted = torch.autograd.grad([plain, plain_lse], leaves[:3], [do, dlse])
    _close(o, plain, 4e-3)
    _close(lse, plain_lse + mask[:, 0].float(), 1e-3)
    for a, b in zip(made, wanted, strict=False):
        _close(a, b, 1e-2)
    assert (made[3].shape, made[3].dtype) == ((rows, 1), dtype)
    _close(made[3][:, 0], dlse.sum((0, 1)), 2e-2)
    if dtype == torch.float16:  # torch's own function takes masks of the queries' type
        import omniattn.torch

        with omniattn.torch.use_sdpa():
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            by_sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)
            moved = torch.autograd.grad(by_sdpa, leaves, do.transpose(1, 2))
        _close(by_sdpa.transpose(1, 2), plain, 4e-3)
        for a, b in zip(moved, torch.autograd.grad(oa.attention(q, k, v), leaves[:3], do), strict=False):
            _close(a, b, 1e-2)
        assert moved[3].abs().max().item() <= 5e-2
