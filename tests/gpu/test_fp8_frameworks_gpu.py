"""e4m3 arrays of torch, JAX and ml_dtypes on a GPU: compiled, captured, repeated, under jit; drop-in functions."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import UnsupportedError  # noqa: E402

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="e4m3 products need compute capability 8.9"),
]


def wide(seed: int = 0, head_dim: int = 64) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, 200, 8, head_dim), (2, 333, 2, head_dim), (2, 333, 2, head_dim))
    return [torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes]


def low(seed: int = 0) -> list[Any]:
    return [x.to(torch.float8_e4m3fn) for x in wide(seed)]


def test_compiled_and_captured_calls_have_the_bits_of_eager_ones() -> None:
    q, k, v = low()
    factor = torch.rand(2, 2, device="cuda") + 0.5

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, descale_k=factor, descale_v=factor, causal=True, return_lse=True)

    want, want_lse = f(q, k, v)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    o, lse = compiled(q, k, v)
    assert torch.equal(o, want)
    assert torch.equal(lse, want_lse)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = f(q, k, v)
    # Factors are read when the graph runs, never on the host.
    factor.mul_(2)
    for x, y in zip((q, k, v), low(1), strict=True):
        x.copy_(y)
    graph.replay()
    again, again_lse = f(q, k, v)
    assert torch.equal(o, again)
    assert torch.equal(lse, again_lse)
    assert not torch.equal(o, want)


def test_repeated_calls_follow_their_arrays() -> None:
    first, second = low(0), low(1)
    factors = [torch.full((), x, device="cuda") for x in (0.5, 2.0)]
    want = [
        oa.attention(*x, descale_q=d.reshape(1), out_dtype=torch.float16)
        for x in (first, second) for d in factors
    ]  # fmt: skip
    got = [oa.attention(*x, descale_q=d, out_dtype=torch.float16) for x in (first, second) for d in factors]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float16
        assert torch.equal(a, b)
    assert len({x.sum().item() for x in got}) == 4


def test_gradients_of_fp8_are_straight_through() -> None:
    q, k, v = (x.requires_grad_() for x in wide())
    o, lse = oa.attention(q, k, v, precision="fp8", causal=True, return_lse=True)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), do)
    plain = [x.detach() for x in (q, k, v)]
    want = oa.attention_backward(do, *plain, o.detach(), lse.detach(), causal=True)
    for a, b in zip(got, want, strict=True):
        # Sums of atomics have no order.
        assert (a - b).float().norm() <= 1e-2 * b.float().norm()
    with pytest.raises(UnsupportedError, match=r"e4m3 .*have none"):
        oa.attention(*(x.to(torch.float8_e4m3fn).requires_grad_() for x in plain))


def test_functions_of_flash_attention_3() -> None:
    from omniattn.compat import flash_attn_interface as fa3

    q, k, v = low()
    given = {name: torch.rand(2, 2, device="cuda") + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    named = {f"descale_{name[0]}": x for name, x in given.items()}
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    want, want_lse = oa.attention(q, k, v, causal=True, return_lse=True, **named)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_exact_below_min_seqlen() -> None:
    q, k, v = wide()
    for knobs in (oa.Fp8, oa.Int8):
        assert torch.equal(oa.attention(q, k, v, precision=knobs(min_seqlen=334)), oa.attention(q, k, v))
        assert not torch.equal(oa.attention(q, k, v, precision=knobs(min_seqlen=333)), oa.attention(q, k, v))


@pytest.mark.parametrize("jitted", [False, True])
def test_jax(jitted: bool) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    gpu = jax.devices("gpu")[0]
    torch.cuda.set_device(0)  # of several GPUs JAX's first use leaves the last one current
    tensors = low()
    arrays = [
        jax.lax.bitcast_convert_type(jax.device_put(x.view(torch.uint8).cpu().numpy(), gpu), jnp.float8_e4m3fn)
        for x in tensors
    ]
    factor = np.array([[0.5, 1.0], [2.0, 1.5]], np.float32)
    on_gpu = jax.device_put(factor, gpu)

    def f(q: Any, k: Any, v: Any, descale: Any) -> Any:
        return oa.attention(q, k, v, descale_v=descale, causal=True, return_lse=True)

    o, lse = (jax.jit(f) if jitted else f)(*arrays, on_gpu)
    want, want_lse = f(*tensors, torch.from_numpy(factor).cuda())
    assert o.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(o.astype(jnp.float32)), want.float().cpu().numpy())
    assert np.array_equal(np.asarray(lse), want_lse.cpu().numpy())
