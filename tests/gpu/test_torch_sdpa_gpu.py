"""``omniattn.torch`` on the GPU: SDPA's semantics, torch's flash-attention registry, varlen_attn, compiled graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn.torch as oat  # noqa: E402
from omniattn.errors import UnsupportedError  # noqa: E402
from omniattn.torch import functional, operators  # noqa: E402

pytestmark = pytest.mark.gpu

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention
FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION
EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = pytest.mark.parametrize("dtype", EPSILON, ids=str)

#: Shapes of query, of key and value, and the options.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 200, 64), (2, 3, 200, 64), {}),
    "causal": ((2, 3, 333, 128), (2, 3, 333, 128), {"is_causal": True}),
    "other length": ((2, 3, 100, 64), (2, 3, 257, 64), {"scale": 0.2}),
    "causal, more keys": ((2, 3, 100, 64), (2, 3, 257, 64), {"is_causal": True}),
    "causal, more queries": ((2, 3, 257, 64), (2, 3, 100, 64), {"is_causal": True}),
    "causal, one query": ((2, 3, 1, 64), (2, 3, 129, 64), {"is_causal": True}),
    "3 dimensions": ((3, 200, 64), (3, 200, 64), {"is_causal": True}),
    "5 dimensions": ((2, 2, 3, 130, 32), (2, 2, 3, 130, 32), {}),
    "head_dim 40": ((1, 2, 150, 40), (1, 2, 150, 40), {"is_causal": True}),
    "head_dim 53": ((1, 2, 150, 53), (1, 2, 150, 53), {}),
    "head_dim 256": ((1, 2, 150, 256), (1, 2, 150, 256), {"is_causal": True}),
    "one head of keys": ((2, 4, 150, 64), (2, 1, 150, 64), {}),
    "one sequence of keys": ((3, 2, 150, 64), (1, 2, 150, 64), {"is_causal": True}),
    "groups": ((2, 8, 150, 64), (2, 2, 150, 64), {"enable_gqa": True, "is_causal": True}),
}
MASKS: dict[str, tuple[int, ...]] = {
    "of rows and keys": (150, 150), "of keys": (2, 1, 1, 150), "of all": (2, 3, 150, 150), "odd": (2, 1, 150, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    torch.manual_seed(2)
    yield
    torch._dynamo.reset()
    if torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.fixture
def activated() -> None:
    """Our kernels in torch's registry."""
    torch.nn.attention.activate_flash_attention_impl("omniattn")


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls that reach this package's functions from aten's operators."""
    calls: list[str] = []

    def watch(name: str) -> None:
        function = getattr(operators, name)
        monkeypatch.setattr(operators, name, lambda *a, **o: (calls.append(name), function(*a, **o))[1])

    for name in ("attention", "attention_backward", "attention_varlen", "attention_varlen_backward"):
        watch(name)
    return calls


def _leaf(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def _written_out(
    q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool = False, scale: Any = None, **o: Any
) -> Any:
    """SDPA in torch operations, everything between them stored in the inputs' dtype."""
    if o.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(s.dtype)
    elif mask is not None:
        seen = mask.expand(s.shape)
        return (s.masked_fill(~seen, -1e4).softmax(-1) * seen) @ v
    return s.softmax(-1) @ v


def _check(call: Callable[..., Any], inputs: list[Any], expected: Callable[..., Any]) -> None:
    """Output and gradients no further from float64 than twice those of attention written out in 16 bits."""
    dtype = inputs[0].dtype
    high = [x.detach().double().requires_grad_() for x in inputs]
    made, naive, exact = call(*inputs), expected(*inputs), expected(*high)
    do = torch.randn_like(made)
    results = [
        (o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype)))
        for o, leaves in ((made, inputs), (naive, inputs), (exact, high))
    ]
    assert made.shape == exact.shape
    assert made.dtype == dtype
    for got, other, want in zip(*results, strict=True):
        # Gradients of a query that sees one key are 0, up to fp32 sums in another order.
        bound = 2 * (other.double() - want).abs().max() + EPSILON[dtype] * want.abs().max() + 1e-4
        assert (got.double() - want).abs().max() <= bound


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_semantics_of_shapes(name: str, dtype: Any) -> None:
    shape, shape_k, options = CASES[name]
    inputs = [_leaf(*shape, dtype=dtype), _leaf(*shape_k, dtype=dtype), _leaf(*shape_k, dtype=dtype)]
    assert oat.fallback_reason(*inputs) is None
    _check(lambda *x: oat.sdpa(*x, **options), inputs, lambda *x: _written_out(*x, **options))
    made = oat.sdpa(*inputs, **options)
    with torch.no_grad():
        assert torch.equal(oat.sdpa(*inputs, **options), made)


@pytest.mark.parametrize("kind", ["bool", "16 bits", "float32"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, kind: str) -> None:
    inputs = [_leaf(2, 3, 150, 64) for _ in range(3)]
    if kind == "bool":
        mask = torch.rand(MASKS[name], device="cuda") < 0.6
        if mask.shape[-2] > 1:
            mask[..., 3, :] = False  # a query that sees nothing gives 0
    else:
        mask = torch.randn(MASKS[name], device="cuda", dtype=torch.float32 if kind == "float32" else torch.bfloat16)
    _check(lambda *x: oat.sdpa(*x, mask), inputs, lambda *x: _written_out(*x, mask))


@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize(("rows", "columns"), [(144, 144), (100, 257), (257, 100)])
def test_causal_with_a_mask(rows: int, columns: int, kind: str) -> None:
    """Both hold; torch's memory-efficient kernel says the same."""
    inputs = [_leaf(2, 3, n, 64) for n in (rows, columns, columns)]
    causal = torch.ones(rows, columns, dtype=torch.bool, device="cuda").tril()
    mask = torch.randn(2, 1, rows, columns, device="cuda")
    if kind == "bool":
        mask = mask < 0.5
        mask[..., 0] = True
    both = mask & causal if kind == "bool" else mask.masked_fill(~causal, -torch.inf)
    _check(lambda *x: oat.sdpa(*x, mask, is_causal=True), inputs, lambda *x: _written_out(*x, both))
    if rows == columns:
        given = mask if kind == "bool" else mask.bfloat16()
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            want = ORIGINAL(*inputs, given, is_causal=True)
            torch.testing.assert_close(oat.sdpa(*inputs, given, is_causal=True), want, rtol=0, atol=3e-2)


def test_smaller_values_and_other_memory() -> None:
    """Ev != E; rows that kernels cannot read; the result in the memory layout of the query."""
    inputs = [_leaf(2, 3, 100, 96), _leaf(2, 3, 100, 96), _leaf(2, 3, 100, 40)]
    _check(oat.sdpa, inputs, _written_out)
    strided = [_leaf(2, 3, 100, 129) for _ in range(3)]
    _check(
        lambda *x: oat.sdpa(*(y[..., 1:65] for y in x)), strided, lambda *x: _written_out(*(y[..., 1:65] for y in x))
    )
    rows = [_leaf(2, 100, 3, 64) for _ in range(3)]
    _check(
        lambda *x: oat.sdpa(*(y.transpose(1, 2) for y in x), is_causal=True), rows,
        lambda *x: _written_out(*(y.transpose(1, 2) for y in x), is_causal=True),
    )  # fmt: skip
    assert oat.sdpa(*(x.transpose(1, 2) for x in rows)).transpose(1, 2).is_contiguous()


def test_plain_calls_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (_leaf(2, 4, 100, 64) for _ in range(3))
    expected = oat.sdpa(q, k, v, is_causal=True)

    def refuse(*arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(functional, "_general", refuse)
    assert torch.equal(oat.sdpa(q, k, v, is_causal=True), expected)
    with pytest.raises(AssertionError):
        oat.sdpa(q, k[..., :50, :], v[..., :50, :], is_causal=True)


def test_what_goes_to_torch() -> None:
    for q in (torch.randn(1, 2, 50, 64, device="cuda"), torch.randn(1, 2, 50, 520, device="cuda").bfloat16()):
        assert oat.fallback_reason(q, q, q) is not None
        with oat.use_sdpa("int8"):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), ORIGINAL(q, q, q))
    q = torch.randn(1, 2, 50, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert oat.fallback_reason(q, q, q) is None
        assert torch.equal(oat.sdpa(q, q, q), oat.sdpa(*[q.bfloat16()] * 3))
    with pytest.raises(UnsupportedError, match="dropout"):
        oat.sdpa(*[q.bfloat16()] * 3, dropout_p=0.1, precision="int8")


def test_dropout_draws_from_torch_s_generator() -> None:
    q = torch.randn(1, 2, 50, 64, device="cuda")
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(oat.sdpa(q, q, q, dropout_p=0.1))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], oat.sdpa(q, q, q))


def test_int8() -> None:
    q, k, v = (_leaf(1, 4, 300, 128).detach() for _ in range(3))
    exact, low = oat.sdpa(q, k, v), oat.sdpa(q, k, v, precision="int8")
    assert not torch.equal(exact, low)
    cosine = torch.cosine_similarity(exact.double().flatten(), low.double().flatten(), 0)
    assert cosine >= 0.998


def test_graph_capture() -> None:
    q, k, v = (_leaf(2, 4, 100, 64).detach() for _ in range(3))
    oat.sdpa(q, k[:, :, :80], v[:, :, :80], is_causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = oat.sdpa(q, k[:, :, :80], v[:, :, :80], is_causal=True)
    q.normal_()
    graph.replay()
    assert torch.equal(made, oat.sdpa(q, k[:, :, :80], v[:, :, :80], is_causal=True))


# --- The registry of flash-attention implementations ------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("form", ["plain", "causal", "groups", "rows first"])
@pytest.mark.usefixtures("activated")
def test_flash_attention_of_sdpa(form: str, dtype: Any, ours: list[str]) -> None:
    heads = 2 if form == "groups" else 4
    options = {"is_causal": form != "plain", **({"enable_gqa": True} if form == "groups" else {})}
    inputs = [_leaf(2, 4, 200, 64, dtype=dtype), *(_leaf(2, heads, 200, 64, dtype=dtype) for _ in range(2))]
    if form == "rows first":
        inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]

    def call(*x: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(FLASH):
            return F.scaled_dot_product_attention(*x, **options)

    _check(call, inputs, lambda *x: _written_out(*x, **options))
    assert ours == ["attention", "attention_backward"]
    assert call(*inputs).stride() == inputs[0].stride()


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_s_own_choice(masked: bool, ours: list[str]) -> None:
    """cuDNN's operator, or flash attention's: whichever it is, the results are right; without a mask they are ours."""
    inputs = [_leaf(2, 4, 200, 64) for _ in range(3)]
    mask = torch.randn(2, 1, 200, 200, device="cuda", dtype=torch.bfloat16) if masked else None
    _check(lambda *x: F.scaled_dot_product_attention(*x, mask), inputs, lambda *x: _written_out(*x, mask))
    q = inputs[0]
    if not masked or torch._fused_sdp_choice(q, q, q, mask) == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value:
        assert ours == ["attention", "attention_backward"]


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize(("rows", "columns"), [(100, 257), (257, 100)])
def test_cudnn_s_operator_is_aligned_at_the_top_left(rows: int, columns: int, ours: list[str]) -> None:
    inputs = [_leaf(2, 4, n, 64) for n in (rows, columns, columns)]
    _check(
        lambda *x: torch.ops.aten._scaled_dot_product_cudnn_attention(*x, None, True, 0.0, True)[0], inputs,
        lambda *x: _written_out(*x, is_causal=True),
    )  # fmt: skip
    assert ours == ["attention", "attention_backward"]


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0)], ids=str)
def test_varlen_attn(window: tuple[int, int], ours: list[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    starts = [0, 100, 101, 300]
    inputs = [_leaf(300, 4, 64) for _ in range(3)]
    cu = torch.tensor(starts, dtype=torch.int32, device="cuda")

    def expected(*x: Any) -> Any:
        parts = []
        for a, b in itertools.pairwise(starts):
            i, j = torch.arange(b - a, device="cuda")[:, None], torch.arange(b - a, device="cuda")[None]
            seen = (j <= i if window[1] == 0 else j >= 0) & (j >= i - window[0] if window[0] >= 0 else j >= 0)
            parts.append(_written_out(*(y[a:b].transpose(0, 1) for y in x), seen).transpose(0, 1))
        return torch.cat(parts)

    _check(lambda *x: varlen_attn(*x, cu, cu, 199, 199, window_size=window), inputs, expected)
    assert ours == ["attention_varlen", "attention_varlen_backward"]


@pytest.mark.usefixtures("activated")
def test_jagged_tensors_run_on_packed_sequences(ours: list[str]) -> None:
    parts = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (70, 130)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(FLASH):
        made = F.scaled_dot_product_attention(jagged, jagged, jagged, is_causal=True)
    for x, y in zip(made.transpose(1, 2).unbind(), parts, strict=True):
        expected = _written_out(*[y.transpose(0, 1).float()] * 3, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(x.float(), expected, rtol=2e-2, atol=2e-2)
    assert ours == ["attention_varlen"]


@pytest.mark.usefixtures("activated")
def test_dropout_goes_to_the_kernel_of_before(ours: list[str]) -> None:
    inputs = [_leaf(2, 4, 128, 64) for _ in range(3)]
    made = []
    for active in (True, False):
        if not active:
            torch.nn.attention.restore_flash_attention_impl()
        torch.manual_seed(9)
        with torch.nn.attention.sdpa_kernel(FLASH):
            out = F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
        made.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    assert torch.equal(made[0][0], made[1][0])
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert ours == []


@pytest.mark.usefixtures("activated")
def test_restoring_puts_torch_s_kernels_back(ours: list[str]) -> None:
    q = _leaf(2, 4, 128, 64).detach()
    assert torch.nn.attention.current_flash_attention_impl() == "omniattn"
    with torch.nn.attention.sdpa_kernel(FLASH):
        F.scaled_dot_product_attention(q, q, q)
        assert ours == ["attention"]
        torch.nn.attention.restore_flash_attention_impl()
        F.scaled_dot_product_attention(q, q, q)
    assert ours == ["attention"]
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("memory", ["heads first", "rows first"])
def test_compiled_graphs(memory: str, ours: list[str]) -> None:
    """Inductor indexes results by the strides of torch's fake kernels."""
    shape = (2, 4, 200, 64) if memory == "heads first" else (2, 200, 4, 64)
    inputs = [_leaf(*shape) for _ in range(3)]

    def f(*x: Any) -> Any:
        q, k, v = (y if memory == "heads first" else y.transpose(1, 2) for y in x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 200, 256)

    with torch.nn.attention.sdpa_kernel(FLASH):
        made, expected = torch.compile(f, fullgraph=True)(*inputs), f(*inputs)
    assert torch.equal(made, expected)
    do = torch.randn_like(made)
    for a, b in zip(*(torch.autograd.grad(x, inputs, do) for x in (made, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert ours == ["attention", "attention", "attention_backward", "attention_backward"]


@pytest.mark.usefixtures("activated")
def test_backward_with_the_out_and_lse_of_more_keys() -> None:
    """A ring of two blocks of keys: each block's backward gets the merged results."""
    q, k, v = inputs = [_leaf(2, 4, 200, 64) for _ in range(3)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

    with torch.no_grad():
        whole = flash(q, k, v)
        parts = [flash(q, k[:, :, i : i + 100], v[:, :, i : i + 100]) for i in (0, 100)]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum((p[0].float() * (p[1] - lse).exp()[..., None] for p in parts), torch.zeros_like(q).float()).bfloat16()
    torch.testing.assert_close(lse, whole[1])
    do = torch.randn_like(out)
    made = [
        backward(
            do, q.detach(), k.detach()[:, :, i : i + 100], v.detach()[:, :, i : i + 100], out, lse, None, None, 200,
            100, 0.0, False, *whole[6:8],
        )
        for i in (0, 100)
    ]  # fmt: skip
    results = (
        made[0][0].float() + made[1][0].float(), torch.cat((made[0][1], made[1][1]), 2),
        torch.cat((made[0][2], made[1][2]), 2),
    )  # fmt: skip
    high = [x.detach().double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(_written_out(*high), high, do.double())
    for a, b in zip(results, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-2)
