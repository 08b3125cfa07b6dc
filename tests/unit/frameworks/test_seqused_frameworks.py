"""``seqused_q`` and ``seqused_k`` through torch, JAX and FlashAttention's signatures, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, ShapeError

torch = pytest.importorskip("torch")
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402

pytestmark = pytest.mark.frameworks

#: Rows of each sequence, and how many count.
LENGTHS_Q, LENGTHS_K = [5, 0, 7, 3], [9, 4, 0, 3]
USED_Q, USED_K = [3, 0, 7, 2], [6, 4, 0, 1]
HEADS, HEADS_KV, DIM = 4, 2, 8


def ints(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths: list[int]) -> Any:
    return ints([sum(lengths[:i]) for i in range(len(lengths) + 1)])


STARTS = {"cu_seqlens_q": cumulative(LENGTHS_Q), "cu_seqlens_k": cumulative(LENGTHS_K)}
LONGEST = {"max_seqlen_q": 7, "max_seqlen_k": 9}
USED = {"seqused_q": ints(USED_Q), "seqused_k": ints(USED_K)}
PACKED = {**STARTS, **LONGEST, **USED}


def tensors(gradient: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS_Q), HEADS, DIM), (sum(LENGTHS_K), HEADS_KV, DIM), (sum(LENGTHS_K), HEADS_KV, DIM))
    return [torch.randn(*shape, generator=generator).requires_grad_(gradient) for shape in shapes]


def one_by_one(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> tuple[Any, Any]:
    """o and LSE of the rows that count, by dense calls; bias: (heads, rows, keys) from the number of a sequence."""
    o, lse = torch.zeros_like(q), torch.full((HEADS, len(q)), -torch.inf)
    pieces = []
    for b, (n, m) in enumerate(zip(USED_Q, USED_K, strict=True)):
        i, j = int(STARTS["cu_seqlens_q"][b]), int(STARTS["cu_seqlens_k"][b])
        more = options if bias is None else {**options, "mask": bias(b, n, m)}
        pieces.append((i, n, oa.attention(
            q[None, i : i + n], k[None, j : j + m], v[None, j : j + m], return_lse=True, **more
        )))  # fmt: skip
    o = torch.cat([torch.cat((made[0], q.new_zeros(LENGTHS_Q[b] - n, HEADS, DIM)))
                   for b, (_, n, (made, _)) in enumerate(pieces)])  # fmt: skip
    for i, n, (_, own) in pieces:
        lse[:, i : i + n] = own[0].detach()
    return o, lse


def gradients(o: Any, leaves: list[Any]) -> Any:
    weights = torch.linspace(-1, 2, o.numel()).reshape(o.shape)
    return torch.autograd.grad((o * weights).sum(), leaves)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"precision": "int8"}], ids=str)
def test_torch_with_gradients(options: dict[str, Any]) -> None:
    leaves = tensors(gradient=True)
    o, lse = oa.attention_varlen(*leaves, **PACKED, return_lse=True, **options)
    expected, expected_lse = one_by_one(*leaves, **options)
    same(o, expected)
    same(lse, expected_lse)
    for a, b in zip(gradients(o, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_torch_compile() -> None:
    leaves = tensors(gradient=True)

    def f(q: Any, k: Any, v: Any, used_q: Any, used_k: Any) -> Any:
        return oa.attention_varlen(
            q * 1.0, k, v, **STARTS, **LONGEST, seqused_q=used_q, seqused_k=used_k, causal=True
        )  # fmt: skip

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    try:
        for used in (USED, {"seqused_q": ints([5, 0, 1, 3]), "seqused_k": ints([1, 2, 0, 3])}):
            made, expected = compiled(*leaves, *used.values()), f(*leaves, *used.values())
            assert torch.equal(made, expected)
            for a, b in zip(gradients(made, leaves), gradients(expected, leaves), strict=True):
                assert torch.equal(a, b)
        mod = oa.ScoreMod("score * b", reference=lambda score, b, h, q, k: score * b)

        def with_mod(*qkv: Any) -> Any:
            return oa.attention_varlen(*qkv, **PACKED, score_mod=mod)

        assert torch.equal(
            torch.compile(with_mod, fullgraph=True, backend="aot_eager")(*tensors()), with_mod(*tensors())
        )
    finally:
        torch._dynamo.reset()


def test_tensors_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in tensors()]
        packed = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in PACKED.items()}
        o, lse = oa.attention_varlen(*given, **packed, return_lse=True)
    assert o.shape == (15, HEADS, DIM)
    assert lse.shape == (HEADS, 15)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_3(causal: bool) -> None:
    leaves = tensors(gradient=True)
    cu = (STARTS["cu_seqlens_q"], STARTS["cu_seqlens_k"], 7, 9)
    o, lse = fa3.flash_attn_varlen_func(*leaves, *cu, *USED.values(), causal=causal, return_attn_probs=True)
    expected, expected_lse = one_by_one(*leaves, causal=causal)
    same(o, expected)
    same(lse, expected_lse)
    for a, b in zip(gradients(o, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_flash_attention_2_with_slopes() -> None:
    given = tensors()
    slopes = torch.linspace(0.1, 0.9, 4 * HEADS).reshape(4, HEADS)
    cu = (STARTS["cu_seqlens_q"], STARTS["cu_seqlens_k"], 7, 9)
    o, lse, *_ = fa2._flash_attn_varlen_forward(
        *given, *cu, 0.0, DIM**-0.5, False, alibi_slopes=slopes, seqused_k=USED["seqused_k"]
    )
    for b, (n, m) in enumerate(zip(LENGTHS_Q, USED_K, strict=True)):
        i, j = int(cu[0][b]), int(cu[1][b])
        distance = (torch.arange(n)[:, None] + m - n - torch.arange(m)).abs()
        bias = -slopes[b][:, None, None] * distance
        own, own_lse = oa.attention(
            given[0][None, i : i + n], given[1][None, j : j + m], given[2][None, j : j + m], mask=bias[None].float(),
            return_lse=True,
        )  # fmt: skip
        same(o[i : i + n], own[0])
        same(lse[:, i : i + n], fa2_lse(own_lse[0]))
    with pytest.raises(ShapeError, match="seqused_k"):
        fa2._flash_attn_varlen_forward(
            *given, *cu, 0.0, DIM**-0.5, False, alibi_slopes=slopes, seqused_k=USED["seqused_k"][:2]
        )


def fa2_lse(lse: Any) -> Any:
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="from 0 to 9, the rows of sequence 0, received 10"):
        oa.attention_varlen(*tensors(), **STARTS, **LONGEST, seqused_k=ints([10, 0, 0, 0]))


def test_e4m3_under_torch_compile() -> None:
    given = [x.to(torch.float8_e4m3fn) for x in tensors()]

    def f(*qkv: Any) -> Any:
        return oa.attention_varlen(*qkv, **PACKED, causal=True)

    try:
        assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(*given), f(*given))
    finally:
        torch._dynamo.reset()


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    with jax.default_device(jax.devices("cpu")[0]):
        leaves = [jnp.asarray(x.numpy()) for x in tensors()]
        packed = {name: jnp.asarray(x.numpy()) for name, x in (STARTS | USED).items()}

        def f(q: Any, k: Any, v: Any, packed: Any) -> Any:
            return oa.attention_varlen(q, k, v, **packed, **LONGEST, causal=True, return_lse=True)

        expected, expected_lse = one_by_one(*tensors(), causal=True)
        for function in (f, jax.jit(f)):
            o, lse = function(*leaves, packed)
            np.testing.assert_allclose(o, expected, atol=1e-6)
            np.testing.assert_allclose(lse, expected_lse, atol=1e-6)
        weights = np.linspace(-1, 2, expected.numel(), dtype=np.float32).reshape(expected.shape)
        made = jax.jit(jax.grad(lambda *x: (f(*x, packed)[0] * weights).sum(), (0, 1, 2)))(*leaves)
        torch_leaves = tensors(gradient=True)
        for a, b in zip(made, gradients(one_by_one(*torch_leaves, causal=True)[0], torch_leaves), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
