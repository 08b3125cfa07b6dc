"""aten's flash-attention operators on this package's kernels: on CPU tensors, against attention written out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

import omniattn.torch as oat  # noqa: E402
from omniattn.torch import flash as registration  # noqa: E402
from omniattn.torch import operators  # noqa: E402
from tests.unit.frameworks.torch_versions import needs_flash_impls  # noqa: E402

aten = torch.ops.aten
LENGTHS = [(5, 5), (4, 9), (9, 4)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.fixture
def active() -> Iterator[Any]:
    """Our kernels in the dispatcher, for CPU tensors."""
    made = registration.Active("CPU")
    yield made
    made.remove()


def _visible(rows: int, columns: int, causal: str | None, window: tuple[int, int] = (-1, -1)) -> Any:
    """Which keys a query sees: ``"top"`` left or ``"bottom"`` right alignment; windows are of the bottom right."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    last = i + (columns - rows if causal != "top" else 0)
    seen = torch.ones(rows, columns).bool() if causal is None else j <= last
    left, right = window
    if left >= 0:
        seen &= j >= last - left
    return seen & (j <= last + right) if right >= 0 else seen


def _attend(q: Any, k: Any, v: Any, seen: Any, scale: float | None = None, bias: Any = None) -> tuple[Any, Any]:
    """o and LSE of (heads, rows, dim), in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = (s if bias is None else s + bias).masked_fill(~seen, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.where(seen, (s - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp(), 0.0)
    return p @ v, lse


def _leaves(q: tuple[int, ...], k: tuple[int, ...], **options: Any) -> list[Any]:
    return [torch.randn(*shape, **options).requires_grad_() for shape in (q, k, k)]


def _close(made: Any, expected: Any) -> None:
    torch.testing.assert_close(made.double(), expected.double(), rtol=1e-5, atol=1e-5)


def _same_gradients(made: Any, expected: Any, leaves: list[Any]) -> None:
    do = torch.randn(expected.shape)
    for a, b in zip(
        torch.autograd.grad(made, leaves, do), torch.autograd.grad(expected, leaves, do.double()), strict=True
    ):
        assert a.abs().max() > 0
        _close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), LENGTHS)
def test_flash_of_sdpa_is_aligned_at_the_bottom_right(active: Any, rows: int, columns: int, causal: bool) -> None:
    """Forward, and the backward by aten's own derivative; grouped heads."""
    leaves = _leaves((2, 4, rows, 8), (2, 2, columns, 8))
    out, lse, *others = aten._scaled_dot_product_flash_attention(*leaves, 0.0, causal, scale=0.4)
    seen = _visible(rows, columns, "bottom" if causal else None)
    expected, expected_lse = _attend(*leaves, seen, 0.4)
    _close(out, expected)
    _close(lse, expected_lse)
    assert others[:4] == [None, None, rows, columns]
    _same_gradients(out, expected, leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), LENGTHS)
def test_cudnn_is_aligned_at_the_top_left(active: Any, rows: int, columns: int, causal: bool) -> None:
    leaves = _leaves((2, 2, rows, 8), (2, 2, columns, 8))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*leaves, None, True, 0.0, causal)
    expected, expected_lse = _attend(*leaves, _visible(rows, columns, "top" if causal else None))
    assert lse.shape == (2, 2, rows, 1)
    _close(out, expected)
    _close(lse[..., 0], expected_lse)
    _same_gradients(out, expected, leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 4, 9), (4, 9), (1, 2, 1, 9)], ids=str)
def test_cudnn_takes_a_bias(active: Any, shape: tuple[int, ...], causal: bool) -> None:
    leaves = _leaves((2, 2, 4, 8), (2, 2, 9, 8))
    bias = torch.randn(shape)
    bias[..., 2] = -torch.inf
    out = aten._scaled_dot_product_cudnn_attention(*leaves, bias, True, 0.0, causal)[0]
    expected, _ = _attend(*leaves, _visible(4, 9, "top" if causal else None), bias=bias)
    _close(out, expected)
    _same_gradients(out, expected, leaves)


@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_flash_of_dense_rows_with_windows(active: Any, causal: bool, window: tuple[int, int]) -> None:
    leaves = _leaves((2, 4, 3, 8), (2, 7, 3, 8))
    out, lse, *_ = aten._flash_attention_forward(
        *leaves, None, None, 4, 7, 0.0, causal, False, window_size_left=window[0], window_size_right=window[1]
    )
    seen = _visible(4, 7, "bottom" if causal else None, window)
    expected, expected_lse = _attend(*(x.transpose(1, 2) for x in leaves), seen)
    _close(out, expected.transpose(1, 2))
    _close(lse, expected_lse)
    _same_gradients(out, expected.transpose(1, 2), leaves)


@needs_flash_impls
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)], ids=str)
def test_varlen_attn(active: Any, window: tuple[int, int]) -> None:
    """torch's own function of packed sequences, with its own derivative."""
    from torch.nn.attention.varlen import varlen_attn

    leaves = _leaves((11, 2, 8), (13, 2, 8))
    starts_q, starts_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 11], [0, 6, 13]))
    out = varlen_attn(*leaves, starts_q, starts_k, 8, 7, window_size=window)
    parts = []
    for i in range(2):
        own = [
            x[a[i] : a[i + 1]].transpose(0, 1)
            for x, a in zip(leaves, (starts_q, starts_k, starts_k), strict=True)
        ]  # fmt: skip
        parts.append(_attend(*own, _visible(own[0].shape[1], own[1].shape[1], None, window))[0].transpose(0, 1))
    expected = torch.cat(parts)
    _close(out, expected)
    _same_gradients(out, expected, leaves)


@needs_flash_impls
def test_varlen_attn_as_torchtitan_calls_it(active: Any) -> None:
    """bfloat16, grouped heads, a causal window without is_causal, LSE of (heads, rows), documents of one token."""
    from torch.nn.attention import varlen

    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:  # older torch
        return
    leaves = _leaves((12, 4, 8), (12, 2, 8), dtype=torch.bfloat16)
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    out, lse = varlen.varlen_attn(
        *leaves, starts, starts, 6, 6, scale=None, window_size=(-1, 0), enable_gqa=True,
        return_aux=varlen.AuxRequest(lse=True),
    )  # fmt: skip
    parts, lses = [], []
    for a, b in ((0, 5), (5, 6), (6, 12)):
        part, of_part = _attend(*(x[a:b].transpose(0, 1) for x in leaves), _visible(b - a, b - a, "bottom"))
        parts.append(part.transpose(0, 1))
        lses.append(of_part)
    expected = torch.cat(parts)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), torch.cat(lses, -1), rtol=1e-5, atol=1e-5)
    do = torch.randn(expected.shape).bfloat16()
    for made, want in zip(
        torch.autograd.grad(out, leaves, do), torch.autograd.grad(expected, leaves, do.double()), strict=True
    ):
        assert (made.double() - want.double()).norm() <= 0.02 * want.double().norm()
    if "num_splits" in inspect.signature(varlen.varlen_attn).parameters:
        # What asks for results that do not depend on the batch is not answered with others.
        with pytest.raises(UnsupportedError, match="num_splits is given"):
            varlen.varlen_attn(*leaves, starts, starts, 6, 6, enable_gqa=True, num_splits=1)


@needs_flash_impls
def test_varlen_attn_into_memory(active: Any) -> None:
    from torch.nn.attention import varlen

    if not hasattr(varlen, "varlen_attn_out"):  # older torch
        assert "_flash_attention_forward_no_dropout_inplace" not in active.handlers.functions
        return
    AuxRequest, varlen_attn, varlen_attn_out = varlen.AuxRequest, varlen.varlen_attn, varlen.varlen_attn_out
    q = torch.randn(5, 2, 8)
    starts, given = torch.tensor([0, 2, 5], dtype=torch.int32), torch.full((5, 2, 8), torch.nan)
    out, lse = varlen_attn_out(given, q, q, q, starts, starts, 3, 3, return_aux=AuxRequest(lse=True))
    assert out is given
    expected = varlen_attn(q, q, q, starts, starts, 3, 3, return_aux=AuxRequest(lse=True))
    assert torch.equal(given, expected[0])
    assert torch.equal(lse, expected[1])


def test_backward_with_the_out_and_lse_of_more_keys() -> None:
    """As rings call it: each block of keys with the merged results."""
    q, k, v = _leaves((1, 2, 5, 8), (1, 2, 8, 8))
    expected, lse = _attend(q, k, v, _visible(5, 8, None))
    do = torch.randn(1, 2, 5, 8)
    wanted = torch.autograd.grad(expected, (q, k, v), do.double())
    dq = torch.zeros_like(q)
    for i, half in enumerate((slice(0, 3), slice(3, 8))):
        part = operators.sdpa_flash_backward(
            do, q, k[:, :, half], v[:, :, half], expected.detach().float(), lse.detach().float(), False, None
        )
        dq = dq + part[0]
        for a, b in zip(part[1:], wanted[1:], strict=True):
            _close(a, b[:, :, half])
        assert i == 1 or not torch.allclose(dq.double(), wanted[0].double(), atol=1e-3)
    _close(dq, wanted[0])


def _fake(x: Any) -> Any:
    return None if not isinstance(x, torch.Tensor) else (tuple(x.shape), x.stride(), x.dtype)


@needs_flash_impls
@pytest.mark.parametrize("memory", ["heads first", "rows first", "sliced"])
def test_results_are_what_torch_s_shapes_say(active: Any, memory: str) -> None:
    """Compiled graphs allocate and index by torch's fake kernels: shapes, strides and dtypes have to be theirs."""
    shape = {"heads first": (2, 3, 5, 8), "rows first": (2, 5, 3, 8), "sliced": (2, 3, 5, 3, 8)}[memory]

    def make(device: str) -> list[Any]:
        made = [torch.empty(shape, device=device).fill_(0.5) for _ in range(3)]
        if memory == "sliced":
            return [x[:, :, :, 1] for x in made]
        return [x.transpose(1, 2) if memory == "rows first" else x for x in made]

    def results(device: str) -> list[Any]:
        q, k, v = make(device)
        forward = aten._scaled_dot_product_flash_attention(q, k, v)
        cudnn = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        packed = aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, 5, 5, 0.0, True, False
        )
        backward = aten._scaled_dot_product_flash_attention_backward(
            forward[0], q, k, v, *forward[:2], None, None, 5, 5, 0.0, False, *forward[6:8]
        )
        return [_fake(x) for x in (*forward, *cudnn, *packed, *backward)]

    made = results("cpu")
    assert made == results("meta")
    assert sum(x is not None for x in made) > 12


@needs_flash_impls
def test_calls_of_others_go_to_the_kernels_of_before() -> None:
    """With the arguments that came, and back out of the dispatcher when it is restored."""
    calls: list[Any] = []
    q = torch.randn(1, 2, 3, 8)

    def before(query: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((arguments[2:], options))
        return (query.clone(), query.new_zeros(1, 2, 3), None, None, 3, 3, *operators._random_state(query), query)

    def before_packed(query: Any, *arguments: Any, **options: Any) -> Any:
        calls.append((arguments[2:], sorted(options)))
        return (query.clone(), query.new_zeros(1), *operators._random_state(query), query.clone())

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_flash_attention", before, "CPU")
        library.impl("_flash_attention_forward", before_packed, "CPU")
        active = registration.Active("CPU")
        try:
            assert aten._scaled_dot_product_flash_attention(q, q, q)[0] is not q
            assert calls == []
            assert torch.equal(aten._scaled_dot_product_flash_attention(q, q, q, 0.5, True, scale=2.0)[0], q)
            assert torch.equal(aten._flash_attention_forward(
                q, q, q, None, None, 2, 2, 0.0, False, False, alibi_slopes=torch.ones(2), window_size_left=3
            )[0], q)  # fmt: skip
            assert calls == [
                ((0.5, True), {"scale": 2.0}),
                ((None, None, 2, 2, 0.0, False, False), ["alibi_slopes", "window_size_left"]),
            ]
        finally:
            active.remove()
        calls.clear()
        assert torch.equal(aten._scaled_dot_product_flash_attention(q, q, q)[0], q)
        assert len(calls) == 1


def test_calls_that_nobody_takes_raise(active: Any) -> None:
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match="dropout_p is not 0"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    with pytest.raises(UnsupportedError, match="seqused_k is given"):
        aten._flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False, seqused_k=torch.ones(1).int())
    active.remove()
    with pytest.raises(NotImplementedError):
        aten._scaled_dot_product_flash_attention(q, q, q)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"dtype": torch.int32}, "dtypes"),
        ({"shape": (2, 3, 4)}, "3 dimensions"),
        ({"shape": (1, 2, 3, 12)}, "head_dim 12"),
        ({"shape": (1, 2, 3, 520)}, "head_dim 520"),
        ({"value": torch.zeros(1, 2, 3, 16)}, "shape"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is given"),
        ({"return_debug_mask": True}, "return_debug_mask is given"),
    ],
    ids=str,
)
def test_what_the_kernels_lack(changes: dict[str, Any], text: str | None) -> None:
    q = torch.zeros(changes.pop("shape", (1, 2, 3, 8)), dtype=changes.pop("dtype", torch.float32))
    why = operators.lacks((q, q, changes.pop("value", q)), 4, **{"dropout_p": 0.0, **changes})
    assert why is None if text is None else text in str(why)


@needs_flash_impls
def test_varlen_attn_with_used_keys(active: Any) -> None:
    from torch.nn.attention.varlen import varlen_attn

    if "seqused_k" not in inspect.signature(varlen_attn).parameters:  # older torch
        return
    q = torch.randn(9, 2, 8)
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 9], [0, 2, 5], [2, 3])]
    out = varlen_attn(q, q, q, ints[0], ints[0], 5, 5, seqused_k=ints[2])
    keys = torch.tensor([0, 1, 5, 6, 7])
    assert torch.equal(out, varlen_attn(q, q[keys], q[keys], ints[0], ints[1], 5, 3))


@needs_flash_impls
def test_handlers_have_the_arguments_of_the_schemas() -> None:
    for name, function in operators.Handlers("CPU").functions.items():
        schema = getattr(aten, name).default._schema
        parameters = list(inspect.signature(function).parameters.values())[1:]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == [x.name for x in schema.arguments if not x.kwarg_only], name
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            assert named == {x.name for x in schema.arguments if x.kwarg_only}, name
        defaults = {x.name: x.default_value for x in schema.arguments if x.has_default_value() and not x.kwarg_only}
        assert {p.name: p.default for p in parameters if p.name in defaults} == defaults, name


def test_torch_activates_and_restores_it() -> None:
    if not operators.HAS_IMPLEMENTATIONS:  # older torch
        with pytest.raises(UnsupportedError):
            oat.register_flash_impl()
        return
    names = [f"aten::{name}" for name in operators.Handlers("CUDA").functions]

    def there() -> list[bool]:
        return [torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA") for name in names]

    assert "omniattn" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None
    before = there()
    for _ in range(2):  # activated twice, it is put there once
        torch.nn.attention.activate_flash_attention_impl("omniattn")
        assert torch.nn.attention.current_flash_attention_impl() == "omniattn"
        assert all(there())
    torch.nn.attention.restore_flash_attention_impl()
    assert there() == before
    assert len(names) >= 6


def test_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "HAS_IMPLEMENTATIONS", False)
    with pytest.raises(UnsupportedError, match=r"came with 2\.11"):
        oat.register_flash_impl()


@pytest.mark.parametrize("name", [None, 3, b"omniattn", ["omniattn"], "", torch.zeros(1)], ids=repr)
def test_names_that_are_none(name: Any) -> None:
    listed = getattr(torch.nn.attention, "list_flash_attention_impls", list)
    before = list(listed())
    with pytest.raises(ArgumentError, match=r"register_flash_impl\(\): argument 'name': expected a str .*received"):
        oat.register_flash_impl(name)
    assert list(listed()) == before
