"""Every function of the drop-in modules under ``torch.compile(dynamic=True, fullgraph=True)``, and what graphs lack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from omniattn.compat import bert_padding, sageattention  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from tests.unit.compat.compat_cases import starts  # noqa: E402

#: Runs on the host before a step.
NOT_COMPILED = {"get_scheduler_metadata"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _batch(rows: int, dim: int = 8) -> list[Any]:
    return [torch.randn(2, rows, 4, dim) for _ in range(3)]


def _packed(rows: int) -> tuple[Any, Any, int]:
    return torch.randn(2 * rows + 1, 4, 8), starts([rows, rows + 1]), rows + 1


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that writes gradients into tensors, as one that returns them."""

    def run(do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> tuple[Any, ...]:
        into = [torch.empty_like(x) for x in (q, k, v)]
        function(do, q, k, v, out, lse, *into, *more, 0.0, q.shape[-1] ** -0.5, False, -1, -1, 0.0, None, False)
        return tuple(into)

    return run


def _backward_inputs(rows: int) -> tuple[Any, ...]:
    q, k, v = _batch(rows)
    out, lse, _ = fa2.flash_attn_func(q, k, v, return_attn_probs=True)
    return torch.randn_like(out), q, k, v, out, lse


def _packed_backward_inputs(rows: int) -> tuple[Any, ...]:
    x, cu, longest = _packed(rows)
    out, lse, _ = fa2.flash_attn_varlen_func(x, x, x, cu, cu, longest, longest, return_attn_probs=True)
    return torch.randn_like(out), x, x, x, out, lse, cu, cu, longest, longest


def _used(rows: int) -> Any:
    return torch.tensor([rows - 1, rows], dtype=torch.int32)


def _heads_first(rows: int) -> Any:
    return torch.randn(2, 4, rows, 8)


def _padded(rows: int) -> tuple[Any, Any]:
    return torch.randn(2, rows, 8), torch.arange(rows) < torch.tensor([[rows], [rows - 2]])


#: Module, function, call, and its inputs by a number of rows.
Case = tuple[Any, str, Callable[..., Any], Callable[[int], Any]]
CASES: dict[str, Case] = {}


def _case(module: Any, name: str, call: Callable[..., Any], inputs: Callable[[int], Any], what: str = "") -> None:
    CASES[f"{module.__name__.rpartition('.')[2]}.{name}{' ' * bool(what)}{what}"] = module, name, call, inputs


for _m in (fa2, fa3):
    _case(_m, "flash_attn_func", lambda f, *x: f(*x, softmax_scale=x[0].shape[-1] ** -0.5, causal=True), _batch)
    _case(_m, "flash_attn_func", lambda f, *x: f(*x, return_attn_probs=True), _batch, "LSE")
    _case(_m, "flash_attn_func", lambda f, *x: f(*x), lambda n: _batch(n, 6), "head_dim 6")
    _case(
        _m, "flash_attn_func", lambda f, q, k, v, scale, cap, left: f(
            q, k, v, softmax_scale=scale, softcap=cap, window_size=(left, 1)
        ), lambda n: (*_batch(n), 1 / n, n + 0.5, n - 2), "numbers",
    )  # fmt: skip
    _case(_m, "flash_attn_qkvpacked_func", lambda f, x: f(x), lambda n: (torch.stack(_batch(n), 2),))
    _case(_m, "flash_attn_varlen_func", lambda f, x, cu, n: f(x, x, x, cu, cu, n, n, causal=True), _packed)
    _case(
        _m, "flash_attn_varlen_func", lambda f, x, cu: f(x, x, x, cu, cu, cu.diff().max(), cu.diff().max()),
        lambda n: _packed(n)[:2], "lengths in tensors",
    )  # fmt: skip
    _case(
        _m, "flash_attn_with_kvcache", lambda f, q, k, v, used: f(q[:, -1:], k, v, cache_seqlens=used),
        lambda n: (*_batch(n), _used(n)),
    )  # fmt: skip
_case(
    fa2, "flash_attn_func", lambda f, q, k, v, slopes: f(q, k, v, alibi_slopes=slopes),
    lambda n: (*_batch(n), torch.rand(4)), "ALiBi",
)  # fmt: skip
_case(fa2, "flash_attn_kvpacked_func", lambda f, q, x: f(q, x), lambda n: (_batch(n)[0], torch.stack(_batch(n)[1:], 2)))
_case(
    fa2, "flash_attn_varlen_func", lambda f, x, cu, n: f(x, x, x, cu, cu, n, n, return_attn_probs=True), _packed, "LSE"
)
_case(
    fa2, "flash_attn_varlen_func", lambda f, x, cu, n, slopes: f(x, x, x, cu, cu, n, n, alibi_slopes=slopes),
    lambda n: (*_packed(n), torch.rand(4)), "ALiBi",
)  # fmt: skip
_case(fa2, "flash_attn_varlen_qkvpacked_func", lambda f, x, cu, n: f(torch.stack([x, x, x], 1), cu, n), _packed)
_case(fa2, "flash_attn_varlen_kvpacked_func", lambda f, x, cu, n: f(x, torch.stack([x, x], 1), cu, cu, n, n), _packed)
_case(
    fa2, "_flash_attn_forward",
    lambda f, q, k, v: f(q, k, v, 0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, None, False), _batch,
)  # fmt: skip
_case(
    fa2, "_flash_attn_varlen_forward",
    lambda f, x, cu, n: f(x, x, x, cu, cu, n, n, 0.0, x.shape[-1] ** -0.5, True), _packed,
)  # fmt: skip
_case(fa2, "_flash_attn_backward", lambda f, *x: _written(f)(*x), _backward_inputs)
_case(fa2, "_flash_attn_varlen_backward", lambda f, *x: _written(f)(*x), _packed_backward_inputs)
_case(
    fa3, "flash_attn_qkvpacked_func", lambda f, x, n: f(x, num_heads_q=n), lambda n: (torch.cat(_batch(n), 2), 4),
    "heads in one dimension",
)  # fmt: skip
_case(
    fa3, "flash_attn_varlen_func", lambda f, x, cu, n, used: f(x, x, x, cu, cu, n, n, used, used, causal=True),
    lambda n: (*_packed(n), _used(n)), "used rows",
)  # fmt: skip
for _splits in (1, 3):
    _case(
        fa3, "flash_attn_combine", lambda f, o, lse: f(o, lse),
        lambda n, s=_splits: (torch.randn(s, 2, n, 4, 8), torch.randn(s, 2, n, 4)), f"{_splits} splits",
    )  # fmt: skip
for _name in sageattention.__all__:
    if _name != "sageattn_varlen":
        _case(
            sageattention, _name, lambda f, x, y: f(x, y, y, is_causal=True, return_lse=True),
            lambda n: (_heads_first(n), _heads_first(n + 1)),
        )  # fmt: skip
_case(
    sageattention, "sageattn", lambda f, x, scale, mask: f(x, x, x, sm_scale=scale, attn_mask=mask),
    lambda n: (_heads_first(n), 1 / n, torch.ones(n, n, dtype=torch.bool).tril()), "scale and mask",
)  # fmt: skip
_case(sageattention, "sageattn_varlen", lambda f, x, cu, n: f(x, x, x, cu, cu, n, n), _packed)
_case(sageattention, "sageattn_varlen", lambda f, x, cu, n: f(x, x, x, cu, cu, n, n, is_causal=True), _packed, "causal")
_case(bert_padding, "unpad_input", lambda f, x, mask: f(x, mask), _padded)
_case(
    bert_padding, "unpad_input_for_concatenated_sequences", lambda f, x, mask: f(x, mask),
    lambda n: (torch.randn(2, n, 8), torch.tensor([[2, 1, *[0] * (n - 2)], [n, *[0] * (n - 1)]])),
)  # fmt: skip
for _name in ("index_first_axis", "index_first_axis_residual"):
    _case(bert_padding, _name, lambda f, x, at: f(x, at), lambda n: (torch.randn(n, 8), torch.tensor([0, n - 1])))
_case(
    bert_padding, "index_put_first_axis", lambda f, x, at, rows: f(x, at, rows),
    lambda n: (torch.randn(2, 8), torch.tensor([0, n - 1]), n),
)  # fmt: skip
_case(
    bert_padding, "pad_input", lambda f, x, at, n: f(x, at, 2, n),
    lambda n: (torch.randn(2, 8), torch.tensor([0, n]), n),
)  # fmt: skip


def test_no_function_is_left_out() -> None:
    for module in (fa2, fa3, sageattention, bert_padding):
        there = {name for name in module.__all__ if not isinstance(getattr(module, name), type)} - NOT_COMPILED
        assert there <= {name for m, name, *_ in CASES.values() if m is module}


def _parts(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


@pytest.mark.parametrize("case", CASES)
def test_compiled_gives_what_eager_gives(case: str) -> None:
    module, name, call, inputs = CASES[case]
    function = getattr(module, name)
    compiled = torch.compile(lambda *x: call(function, *x), dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (6, 7):
        given = inputs(rows)
        for got, want in zip(_parts(compiled(*given)), _parts(call(function, *given)), strict=True):
            if not isinstance(want, torch.Tensor):
                assert got == want
            elif want.dtype != torch.int64 or module is bert_padding:  # else the state of random numbers, never used
                torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("function", [fa2.flash_attn_func, fa3.flash_attn_func, sageattention.sageattn])
def test_shapes_that_change_compile_once(function: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(function, dynamic=True, fullgraph=True, backend=counter)
    twin = oa.attention if function is not sageattention.sageattn else function
    counts = []
    for rows in (6, 7, 9):
        leaves, others = ([x.clone().requires_grad_() for x in given] for given in [_batch(rows)] * 2)
        run(*leaves).sin().sum().backward()
        twin(*others).sin().sum().backward()
        for x, y in zip(leaves, others, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-6)
        counts.append(counter.frame_count)
    assert counts == [counts[0]] * 3


def _varlen(x: Any, cu: Any, **options: Any) -> Any:
    return oa.attention_varlen(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lengths_in_tensors(backend: str, fullgraph: bool) -> None:
    """Inputs of a graph, and made in it: their value is read."""
    x, cu, longest = _packed(5)
    given, want = torch.tensor(longest), _varlen(x, cu, max_seqlen_q=longest, max_seqlen_k=longest)
    options = {"backend": backend, "fullgraph": fullgraph}
    with torch._dynamo.config.patch(capture_scalar_outputs=fullgraph):
        run = torch.compile(lambda x, cu, n: _varlen(x, cu, max_seqlen_q=n, max_seqlen_k=n), **options)
        assert torch.equal(run(x, cu, given), want)
        run = torch.compile(
            lambda x, cu: _varlen(x, cu, max_seqlen_q=cu.diff().max(), max_seqlen_k=cu.diff().max()), **options
        )
        assert torch.equal(run(x, cu), want)
    leaf = x.clone().requires_grad_()
    run = torch.compile(lambda x, n: _varlen(x, cu, max_seqlen_q=n, max_seqlen_k=n), backend=backend)
    run(leaf, given).sin().sum().backward()
    twin = x.clone().requires_grad_()
    _varlen(twin, cu, max_seqlen_q=longest, max_seqlen_k=longest).sin().sum().backward()
    assert torch.equal(leaf.grad, twin.grad)


#: Numbers as torch and NumPy have them, and as Python has them.
NUMBERS: dict[str, tuple[str, Any, Any]] = {
    "softmax_scale, NumPy": ("softmax_scale", np.float32(0.5), 0.5),
    "softmax_scale, torch": ("softmax_scale", torch.tensor(0.5), 0.5),
    "softcap, NumPy": ("softcap", np.float64(2.5), 2.5),
    "softcap, torch": ("softcap", torch.tensor(2.5), 2.5),
    "causal, NumPy": ("causal", np.bool_(True), True),
    "causal, torch": ("causal", torch.tensor(True), True),
    "return_lse, torch": ("return_lse", torch.tensor(True), True),
    "deterministic, NumPy": ("deterministic", np.bool_(True), True),
    "window, NumPy": ("window", (np.int64(2), np.int32(1)), (2, 1)),
    "window, torch": ("window", (torch.tensor(2), torch.tensor(1)), (2, 1)),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_of_other_libraries(case: str, backend: str) -> None:
    name, given, same = NUMBERS[case]
    q, k, v = _batch(6)
    run = torch.compile(lambda q, k, v, x: oa.attention(q, k, v, **{name: x}), backend=backend)
    want = oa.attention(q, k, v, **{name: same})
    for a, b in zip(_parts(run(q, k, v, given)), _parts(want), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lengths_in_tensors_of_other_functions(backend: str) -> None:
    x, cu, n = _packed(5)
    o, lse = _varlen(x, cu, max_seqlen_q=n, max_seqlen_k=n, return_lse=True)

    def gradients(n: Any) -> Any:
        return oa.attention_varlen_backward(
            o, x, x, x, o, lse, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n
        )

    def quantized(n: Any) -> Any:
        return oa.quantize_v(x, cu_seqlens_k=cu, max_seqlen_k=n).v

    cache = oa.KVCache(2, 8, 4, 64, like=torch.zeros(0), k_dtype="bf16")
    query, used = torch.randn(2, 1, 4, 64, dtype=torch.bfloat16), torch.tensor([5, 6], dtype=torch.int32)

    new = torch.randn(2, 8, 4, 64, dtype=torch.bfloat16)
    oa.append(cache, new, new, seq_lens=torch.full((2,), 8, dtype=torch.int32))

    def decoded(n: Any) -> Any:
        return oa.decode(query, cache, seq_lens=used, window=(n - 3, 0))

    for run in (gradients, quantized, decoded):
        compiled = torch.compile(run, backend=backend)
        for got, want in zip(_parts(compiled(torch.tensor(n))), _parts(run(n)), strict=True):
            assert torch.equal(got, want)


def test_the_size_of_blocks_in_a_tensor() -> None:
    q, k, v = (torch.randn(1, 256, 2, 8) for _ in range(3))
    blocks = torch.tensor([[True, False], [True, True]])
    run = torch.compile(lambda q, n: oa.attention(q, k, v, block_mask=blocks, block_size=n), backend="eager")
    assert torch.equal(run(q, torch.tensor(128)), oa.attention(q, k, v, block_mask=blocks, block_size=128))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39, -1.0])
def test_numbers_that_are_none_raise(value: float) -> None:
    q, k, v = _batch(6)
    compiled = torch.compile(fa2.flash_attn_func, dynamic=True, backend="eager")
    # torch compares no symbol that is NaN, and raises an error of its own.
    for run in (fa2.flash_attn_func,) if value != value else (fa2.flash_attn_func, compiled):
        with pytest.raises(ArgumentError, match="'dropout_p': expected a finite number >= 0"):
            run(q, k, v, dropout_p=value)
