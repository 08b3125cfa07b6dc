"""e4m3 tensors of torch and arrays of JAX: eager, traced, compiled, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from tests.unit.frameworks.torch_versions import needs_compiled_quantizers  # noqa: E402

_NO_GRADIENT = "e4m3 .*have none.*precision='fp8'"


def tensors(head_dim: int = 64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 100, heads, head_dim, generator=generator) for heads in (4, 2, 2)]


def low(head_dim: int = 64) -> list[Any]:
    return [x.to(torch.float8_e4m3fn) for x in tensors(head_dim)]


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_torch_gives_the_bits_of_numpy() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = low()
    o, lse = oa.attention(q, k, v, descale_q=torch.tensor(0.5), causal=True, return_lse=True)
    assert (o.dtype, o.shape) == (torch.bfloat16, q.shape)
    arrays = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    want, want_lse = oa.attention(*arrays, descale_q=np.full((), 0.5, np.float32), causal=True, return_lse=True)
    assert np.array_equal(o.float().numpy(), want.astype(np.float32))
    assert np.array_equal(lse.numpy(), want_lse)
    with pytest.raises(DtypeError, match=r"q.*float8_e5m2.*mantissa"):
        oa.attention(q.to(torch.float8_e5m2), k, v)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled(packed: bool) -> None:
    q, k, v = low()
    factor = torch.rand(2, 2) + 0.5

    def dense(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, descale_k=factor, window=(20, 0), return_lse=True, out_dtype=torch.float16)

    starts = torch.tensor([0, 100, 200], dtype=torch.int32)

    def varlen(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=100, max_seqlen_k=100, descale_v=factor
        )

    function = varlen if packed else dense
    got, want = compiled(function)(q, k, v), function(q, k, v)
    for a, b in zip(got, want, strict=True) if isinstance(want, tuple) else ((got, want),):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_operator_passes_opcheck() -> None:
    q, k, v = low(32)
    torch.library.opcheck(
        torch.ops.omniattn.attention_e4m3.default,
        (q, k, v, *(None,) * 8, torch.ones(()), None, torch.ones(2, 2), "NHD", True, None, None, 0.0, False,
         "bfloat16", True),
        test_utils="test_faketensor",
    )  # fmt: skip


@needs_compiled_quantizers
def test_quantizers_in_a_graph() -> None:
    q, k, v = tensors()

    def f(q: Any, k: Any, v: Any) -> Any:
        qk = oa.quantize_qk(q, k, dtype="float8_e4m3", seed=4)
        return oa.attention(qk.q, qk.k, oa.quantize_v(v))

    assert torch.equal(compiled(f)(q, k, v), oa.attention(q, k, v, precision=oa.Fp8(seed=4)))


def test_quantizers_of_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.frameworks.torch import quantizers

    monkeypatch.setattr(quantizers, "_KEEPS_OBJECTS", False)
    with pytest.raises(Exception, match=r"quantize_v inside torch\.compile of torch.*torch 2\.8 or newer"):
        compiled(lambda v: oa.quantize_v(v).values)(tensors()[0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"precision": "int8"}, ArgumentError, "precision.*'fp8' or nothing"),
        ({"out_dtype": torch.float32}, ArgumentError, "out_dtype.*'bfloat16' or 'float16'"),
        ({"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}, ArgumentError, "q.*16-bit array"),
    ],
)
def test_faults_in_a_graph(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        compiled(lambda *x: oa.attention(*x, **options))(*low())
    causes = [caught.value, caught.value.__cause__]
    assert any(isinstance(x, error) or error.__name__ in type(x).__name__ + str(x) for x in causes)
    with pytest.raises(Exception, match=r"out_dtype.*'float32', like q"):
        compiled(lambda *x: oa.attention(*x, out_dtype="bfloat16"))(*tensors())


def test_gradients_of_fp8_are_straight_through() -> None:
    """Of exact attention at the inputs, from the o and lse of fp8."""
    q, k, v = (x.double().requires_grad_() for x in tensors())
    o, lse = oa.attention(q, k, v, precision="fp8", causal=True, return_lse=True)
    do = torch.randn_like(o)
    got = torch.autograd.grad(o, (q, k, v), do)
    want = oa.attention_backward(
        do, *(x.detach() for x in (q, k, v)), o.detach(), lse.detach(), causal=True
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    exact = torch.autograd.grad(oa.attention(q, k, v, causal=True), (q, k, v), do)
    for a, b in zip(got, exact, strict=True):
        assert 0 < (a - b).norm() <= 0.1 * b.norm()


def test_no_gradients_of_e4m3() -> None:
    q, k, v = low()
    with pytest.raises(UnsupportedError, match=_NO_GRADIENT):
        oa.attention(q.clone().requires_grad_(), k, v)
    with pytest.raises(UnsupportedError, match=_NO_GRADIENT):
        oa.attention(q, k, v, descale_q=torch.ones((), requires_grad=True))
    with pytest.raises(Exception, match=_NO_GRADIENT):
        compiled(lambda *x: oa.attention(*x))(q.clone().requires_grad_(), k, v)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    arrays = [jnp.asarray(x.numpy()).astype(jnp.float8_e4m3fn) for x in tensors()]
    factor = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (2, 2)), dtype=jnp.float32)

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, descale_v=factor, out_dtype=jnp.float16, causal=True)

    want = f(*arrays)
    assert want.dtype == jnp.float16
    assert (jax.jit(f)(*arrays) == want).all()
    values = [torch.from_numpy(np.array(x.view(jnp.uint8))).view(torch.float8_e4m3fn) for x in arrays]
    of_torch = oa.attention(*values, descale_v=torch.from_numpy(np.array(factor)), out_dtype="float16", causal=True)
    assert np.array_equal(of_torch.numpy(), np.asarray(want))
    with pytest.raises(UnsupportedError, match=_NO_GRADIENT):
        jax.grad(lambda *x: f(*x).astype(jnp.float32).sum())(*arrays)
    wide = [jnp.asarray(x.numpy()) for x in tensors()]
    low_precision = jax.grad(lambda *x: oa.attention(*x, precision=oa.Fp8()).sum())(*wide)
    exact = jax.grad(lambda *x: oa.attention(*x).sum())(*wide)
    assert 0 < jnp.linalg.norm(low_precision - exact) <= 0.1 * jnp.linalg.norm(exact)
