"""Operators of the library ``omniattn``: torch.compile, export, transforms, modes, autocast, opcheck."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from tests.unit.frameworks.torch_versions import needs_compiled_quantizers  # noqa: E402

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 5.0, "softmax_scale": 0.4},
    "lse": {"return_lse": True, "causal": True},
    "int8": {"precision": "int8"},
    "knobs": {"precision": oa.Int8(smooth_v=False, granularity="per_block")},
    "rotated": {"precision": oa.Int4(hadamard=True, seed=5)},
    "fp8": {"precision": oa.Fp8(seed=3, smooth_v=False)},
    "exact, below min_seqlen": {"precision": oa.Fp8(min_seqlen=100)},
    "HND": {"layout": "HND", "deterministic": True},
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.manual_seed(1)
    yield
    torch._dynamo.reset()


def _tensors(*shape: int, count: int = 3, gradient: bool = False) -> list[Any]:
    shape = shape or (2, 6, 4, 8)
    return [torch.randn(*shape, requires_grad=gradient) for _ in range(count)]


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def _first(x: Any) -> Any:
    return x[0] if isinstance(x, tuple) else x


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_gives_the_bits_of_eager_with_gradients(name: str) -> None:
    options = OPTIONS[name]
    q, k, v = _tensors(gradient=True)

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, **options)

    made, expected = _compiled(f)(q, k, v), f(q, k, v)
    for a, b in zip(_both(made), _both(expected), strict=True):
        assert torch.equal(a, b)
    weight = torch.randn_like(_first(expected))
    gradients = torch.autograd.grad((_first(made) * weight).sum(), (q, k, v))
    for a, b in zip(gradients, torch.autograd.grad((_first(expected) * weight).sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)
        assert a.abs().max() > 0


def _both(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def test_compiled_with_mask_sinks_and_their_gradients() -> None:
    q, k, v = _tensors(gradient=True)
    mask, sinks = torch.randn(1, 4, 6, 6, requires_grad=True), torch.randn(4, requires_grad=True)

    def f(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        return oa.attention(q, k, v, mask=mask, sinks=sinks)

    inputs = (q, k, v, mask, sinks)
    made, expected = _compiled(f)(*inputs), f(*inputs)
    assert torch.equal(made, expected)
    for a, b in zip(
        torch.autograd.grad(made.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)


def test_dynamic_shapes_compile_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda q, k, v: oa.attention(q, k, v, causal=True), fullgraph=True, backend=counter, dynamic=True)
    compiled = []
    for batch, length in ((2, 6), (3, 9), (4, 17)):
        q, k, v = _tensors(batch, length, 4, 8)
        assert torch.equal(f(q, k, v), oa.attention(q, k, v, causal=True))
        compiled.append(counter.frame_count)
    assert compiled == compiled[:1] * 3


def test_packed_sequences_compile() -> None:
    q, k, v = _tensors(11, 4, 8, gradient=True)
    starts = torch.tensor([0, 3, 3, 11], dtype=torch.int32)

    def f(q: Any, k: Any, v: Any, starts: Any, longest: int) -> Any:
        return oa.attention_varlen(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest,
            causal=True, return_lse=True,
        )  # fmt: skip

    made, expected = _compiled(f, dynamic=True)(q, k, v, starts, 8), f(q, k, v, starts, 8)
    assert torch.equal(made[0], expected[0])
    assert torch.equal(made[1], expected[1])
    assert made[1].shape == (4, 11)
    loss = [(o.sin().sum() + lse.sum()) for o, lse in (made, expected)]
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v)) for x in loss), strict=True):
        assert torch.equal(a, b)


def _alibi(slopes: Any) -> oa.ScoreMod:
    return oa.ScoreMod(
        "score + slopes[h] * (k - q)", slopes=slopes, grad="1.0f",
        reference=lambda score, b, h, q, k, slopes: score + slopes[h] * (k - q),
        reference_grad=lambda score, b, h, q, k, slopes: np.ones_like(score),
    )  # fmt: skip


def test_score_mod_compiles_with_gradients() -> None:
    q, k, v = _tensors(gradient=True)
    mod = _alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, score_mod=mod, causal=True)

    made, expected = _compiled(f)(q, k, v), f(q, k, v)
    assert torch.equal(made, expected)
    assert not torch.equal(expected, oa.attention(q, k, v, causal=True))
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (made, expected)), strict=True):
        assert torch.equal(a, b)


def test_block_mask_compiles() -> None:
    q, k, v = _tensors(1, 130, 2, 8)
    blocks = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, block_mask=blocks, block_size=64)

    assert torch.equal(_compiled(f)(q, k, v), f(q, k, v))


def test_merge_states_compiles() -> None:
    q, k, v = _tensors()
    parts = [oa.attention(q, x, y, return_lse=True) for x, y in ((k[:, :3], v[:, :3]), (k[:, 3:], v[:, 3:]))]
    flat = [x for part in parts for x in part]
    made = _compiled(lambda *x: oa.merge_states(*x))(*flat)
    for a, b in zip(made, oa.merge_states(*flat), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("k_dtype", ["bf16", "int4"])
def test_generation_compiles(paged: bool, k_dtype: str) -> None:
    """Appending and decoding in one graph: the cache's own memory is written."""
    like = torch.empty(0, dtype=torch.bfloat16)

    def cache() -> Any:
        return (
            oa.PagedKVCache(6, 4, 2, 16, like=like, k_dtype=k_dtype) if paged
            else oa.KVCache(2, 12, 2, 16, like=like, k_dtype=k_dtype)
        )  # fmt: skip

    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32) if paged else None
    tokens = [torch.randn(2, 5, heads, 16).bfloat16() for heads in (4, 2, 2)]
    first, second = cache(), cache()

    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        oa.append(first, k, v, seq_lens=lengths, block_table=table)
        return oa.decode(q, first, seq_lens=lengths, block_table=table, return_lse=True)

    compiled = _compiled(step)
    for i in range(4):
        q, k, v = (x[:, i : i + 2].contiguous() for x in tokens)
        lengths = torch.tensor([2 * i + 2, 2 * i + 2], dtype=torch.int32)
        o, lse = compiled(q, k, v, lengths)
        oa.append(second, k, v, seq_lens=lengths, block_table=table)
        expected = oa.decode(q, second, seq_lens=lengths, block_table=table, return_lse=True)
        assert torch.equal(o, expected[0])
        assert torch.equal(lse, expected[1])


def test_a_cache_that_is_gone_raises() -> None:
    import omniattn.frameworks.torch.tracing  # noqa: F401

    x, lengths = torch.randn(1, 1, 2, 8), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="compiled or exported with is gone"):
        torch.ops.omniattn.append([x], [], 2**40, x, x, lengths, None, None, None, None, None, "half")


def test_what_an_operator_cannot_have_raises_in_a_compiled_call() -> None:
    q, k, v = _tensors()
    out = torch.empty_like(q)
    with pytest.raises(ArgumentError, match="'out'"):
        torch.func.vmap(lambda q: oa.attention(q, k, v, out=out))(q[None])
    # torch.compile puts its own class of errors around one that it lets through.
    with pytest.raises(Exception, match="argument 'out': expected None in a traced or compiled call"):
        _compiled(lambda q: oa.attention(q, k, v, out=out))(q)
    with pytest.raises(Exception, match="argument 'layout': expected 'NHD' or 'HND'"):
        _compiled(lambda q: oa.attention(q, k, v, layout="BSHD"))(q)
    with pytest.raises(Exception, match="argument 'cu_seqlens_q': expected an int32 tensor"):
        _compiled(lambda q: oa.attention_varlen(q, q, q, max_seqlen_q=1, max_seqlen_k=1))(q[0])
    with pytest.raises(Exception, match="is a ndarray in a traced or compiled call"):
        torch.func.vmap(lambda q: oa.attention(q, k.numpy(), v))(q[None])


@pytest.mark.parametrize("options", [{}, {"smooth_q": True, "with_bias": True}, {"dtype": "int4"}], ids=str)
@pytest.mark.parametrize("where", [pytest.param("inside", marks=needs_compiled_quantizers), "outside"])
def test_quantized_operands_compile(options: dict[str, Any], where: str) -> None:
    q, k, v = _tensors(1, 70, 2, 16)

    def f(q: Any, k: Any, v: Any) -> Any:
        pair, values = oa.quantize_qk(q, k, **options), oa.quantize_v(v)
        return oa.attention(pair.q, pair.k, values, causal=True)

    expected = f(q, k, v)
    if where == "inside":
        assert torch.equal(_compiled(f)(q, k, v), expected)
        return
    pair, values = oa.quantize_qk(q, k, **options), oa.quantize_v(v)
    assert torch.equal(_compiled(lambda: oa.attention(pair.q, pair.k, values, causal=True))(), expected)


@needs_compiled_quantizers
def test_packed_quantized_operands_compile() -> None:
    q, k, v = _tensors(30, 2, 16)
    starts = torch.tensor([0, 10, 30], dtype=torch.int32)

    def f(q: Any, k: Any, v: Any) -> Any:
        starts_of = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 20, "max_seqlen_k": 20}
        pair = oa.quantize_qk(q, k, with_bias=True, **starts_of)
        values = oa.quantize_v(v, cu_seqlens_k=starts, max_seqlen_k=20)
        return oa.attention_varlen(pair.q, pair.k, values, max_seqlen_q=20, max_seqlen_k=20, return_lse=True)

    for a, b in zip(_compiled(f)(q, k, v), f(q, k, v), strict=True):
        assert torch.equal(a, b)


def test_quantizers_of_fake_tensors_look_as_real_ones() -> None:
    from torch._subclasses import FakeTensorMode

    q, k, v = _tensors(1, 70, 2, 16)
    pair, values = oa.quantize_qk(q, k, smooth_q=True), oa.quantize_v(v)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake_pair, fake_values = oa.quantize_qk(*fakes[:2], smooth_q=True), oa.quantize_v(fakes[2])
        o, lse = oa.attention(fake_pair.q, fake_pair.k, fake_values, return_lse=True)
    assert (o.shape, o.dtype, lse.shape) == (q.shape, q.dtype, (1, 2, 70))
    for fake, real in ((fake_pair, pair), (fake_values, values)):
        assert fake.problem == real.problem
        for name, x in vars(real).items():
            if isinstance(x, torch.Tensor):
                y = getattr(fake, name)
                assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, x.stride()), name


def test_export_runs_again() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return oa.attention(q, k, v, causal=True, precision=oa.Int8(smooth_k=False))

    q, k, v = _tensors()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Layer(), (q, k, v), dynamic_shapes=({1: length}, {1: length}, {1: length}))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any("omniattn.attention" in name for name in names)
    longer = _tensors(2, 13, 4, 8)
    assert torch.equal(program.module()(*longer), Layer()(*longer))


def test_an_exported_program_runs_in_another_process(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return oa.attention(q, k, v, causal=True)

    inputs = tuple(_tensors())
    torch.export.save(torch.export.export(Layer(), inputs), tmp_path / "program.pt2")
    torch.save((inputs, Layer()(*inputs)), tmp_path / "tensors.pt")
    program = (
        "import sys, torch, omniattn.torch\n"
        "inputs, expected = torch.load(sys.argv[2])\n"
        "assert torch.equal(torch.export.load(sys.argv[1]).module()(*inputs), expected)\n"
    )
    files = [str(tmp_path / name) for name in ("program.pt2", "tensors.pt")]
    made = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]


def test_make_fx_and_fake_tensors() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = _tensors()
    graph = make_fx(lambda q, k, v: oa.attention(q, k, v, causal=True))(q, k, v)
    assert "omniattn.attention" in graph.code
    assert torch.equal(graph(q, k, v), oa.attention(q, k, v, causal=True))
    with FakeTensorMode():
        x = torch.empty(2, 5, 4, 8, device="cuda", dtype=torch.bfloat16)
        o, lse = oa.attention(x, x, x, return_lse=True)
    assert (o.shape, o.dtype, o.device.type, lse.shape, lse.dtype) == (
        x.shape, x.dtype, "cuda", (2, 4, 5), torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fake_results_look_as_real_ones(dtype: str, layout: str) -> None:
    from torch._subclasses import FakeTensorMode

    q, k, v = (x.to(getattr(torch, dtype)).transpose(1, 2) for x in _tensors(2, 6, 3, 8))
    heads, keys = (6, 3) if layout == "NHD" else (3, 6)  # q, k and v are transposed
    sinks, mask = torch.randn(heads), torch.randn(1, 1, 1, keys)

    def f(q: Any, k: Any, v: Any, sinks: Any, mask: Any) -> tuple[Any, ...]:
        o, lse = oa.attention(q, k, v, layout=layout, sinks=sinks, mask=mask, return_lse=True)
        wanted = ("dq", "dk", "dv", "dsinks", "dmask")
        options: dict[str, Any] = {"layout": layout, "sinks": sinks, "mask": mask, "wanted": wanted}
        return (o, lse, *oa.attention_backward(o, q, k, v, o, lse, **options))

    real = f(q, k, v, sinks, mask)
    with FakeTensorMode() as mode:
        fake = f(*(mode.from_tensor(x) for x in (q, k, v, sinks, mask)))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_a_dispatch_mode_sees_one_operator() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = _tensors()
    with Watch():
        made = oa.attention(q, k, v)
    assert [name for name in seen if "omniattn" in name] == ["omniattn.attention.default"]
    assert torch.equal(made, oa.attention(q, k, v))


def test_vmap_over_any_dimension() -> None:
    q, k, v = torch.randn(2, 6, 3, 4, 8), torch.randn(3, 2, 6, 4, 8), torch.randn(2, 6, 4, 8)
    mask = torch.randn(3, 6, 6)
    made = torch.func.vmap(lambda q, k, m: oa.attention(q, k, v, mask=m, return_lse=True), in_dims=(2, 0, 0))(
        q, k, mask
    )
    for i in range(3):
        o, lse = oa.attention(q[:, :, i].contiguous(), k[i], v, mask=mask[i], return_lse=True)
        assert torch.equal(made[0][i], o)
        assert torch.equal(made[1][i], lse)


def test_vmap_over_sinks_runs_item_by_item() -> None:
    (q, k, v), sinks = _tensors(), torch.randn(3, 4)
    made = torch.func.vmap(lambda s: oa.attention(q, k, v, sinks=s))(sinks)
    for i in range(3):
        assert torch.equal(made[i], oa.attention(q, k, v, sinks=sinks[i]))


def test_vmap_of_packed_sequences_and_score_mods() -> None:
    starts, mod = torch.tensor([0, 5, 11], dtype=torch.int32), _alibi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    packed, dense = torch.randn(3, 11, 4, 8), torch.randn(3, 2, 6, 4, 8)
    options: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
    options.update(max_seqlen_q=6, max_seqlen_k=6)
    made = torch.func.vmap(lambda x: oa.attention_varlen(x, x, x, **options))(packed)
    assert torch.equal(made, torch.stack([oa.attention_varlen(x, x, x, **options) for x in packed]))
    made = torch.func.vmap(lambda x: oa.attention(x, x, x, score_mod=mod))(dense)
    assert torch.equal(made, torch.stack([oa.attention(x, x, x, score_mod=mod) for x in dense]))


def test_functional_gradients_and_gradients_of_each_sample() -> None:
    q, k, v = _tensors()
    sinks = torch.randn(4)

    def loss(q: Any, k: Any, sinks: Any) -> Any:
        return oa.attention(q, k, v, sinks=sinks, causal=True).sin().sum()

    def by_autograd(q: Any) -> tuple[Any, ...]:
        inputs = [x.clone().requires_grad_() for x in (q, k, sinks)]
        return torch.autograd.grad(loss(*inputs), inputs)

    for a, b in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, sinks), by_autograd(q), strict=True):
        assert torch.equal(a, b)
    many = torch.randn(3, 2, 6, 4, 8)
    made = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))(many, k, sinks)
    for i in range(3):
        for a, b in zip(made, by_autograd(many[i]), strict=True):
            assert torch.allclose(a[i], b, atol=1e-6)


def test_second_derivatives_and_tangents_raise() -> None:
    q, k, v = _tensors()

    def loss(q: Any) -> Any:
        return oa.attention(q, k, v).sin().sum()

    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sin().sum())(q)
    with pytest.raises(Exception, match=r"jvp|forward|tangent"):
        torch.func.jvp(loss, (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_activation_checkpointing(compile_it: bool) -> None:
    q, k, v = _tensors(gradient=True)

    def block(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q.sin(), k, v, causal=True)

    def f(q: Any, k: Any, v: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(block, q, k, v, use_reentrant=False)

    made = (_compiled(f) if compile_it else f)(q, k, v)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (made, block(q, k, v))), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_inference_compiles(mode: str) -> None:
    q, k, v = _tensors(gradient=True)
    with getattr(torch, mode)():
        assert torch.equal(_compiled(lambda q, k, v: oa.attention(q, k, v))(q, k, v), oa.attention(q, k, v))


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
def test_autocast_changes_float32(compile_it: bool) -> None:
    q, k, v = _tensors(gradient=True)

    def f(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v)

    with torch.autocast("cpu", torch.bfloat16):
        made = (_compiled(f) if compile_it else f)(q, k, v)
    low = [x.detach().bfloat16() for x in (q, k, v)]
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, oa.attention(*low))
    gradients = torch.autograd.grad(made.float().sum(), (q, k, v))
    assert all(g.dtype == torch.float32 and g.abs().max() > 0 for g in gradients)


def test_what_has_no_gradient_raises_when_compiled() -> None:
    q, k, v = _tensors(gradient=True)
    mod = oa.ScoreMod("score + 1.0f", reference=lambda score, b, h, q, k: score + 1)
    with pytest.raises(Exception, match="and the score_mod comes without its derivative"):
        _compiled(lambda q, k, v: oa.attention(q, k, v, score_mod=mod))(q, k, v)


def _operators() -> dict[str, tuple[Any, ...]]:
    score = ("NHD", True, None, None, 0.0, None, False)
    q, k, v = _tensors(gradient=True)
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    o, lse, do = o.detach(), lse.detach(), torch.randn_like(o)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = [x.detach().reshape(12, 4, 8).clone().requires_grad_() for x in (q, k, v)]
    po, plse = oa.attention_varlen(
        *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=7, max_seqlen_k=7, causal=True, return_lse=True
    )
    po, plse = po.detach(), plse.detach()
    plain, wanted = [x.detach() for x in (q, k, v)], ["dq", "dk", "dv"]
    sinks, mask = torch.randn(4, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    return {
        "attention": (q, k, v, None, mask, sinks, [], *score, "exact", True, None),
        "attention_varlen": (*packed, starts, starts, None, None, None, 7, 7, None, None, [], *score, "exact", True),
        "attention_backward": (do, *plain, o, lse, None, None, None, None, [], *score, wanted, None),
        "attention_varlen_backward": (
            torch.randn_like(po), *(x.detach() for x in packed), po, plse, None, starts, starts, None,
            None, 7, 7, None, None, [], *score, wanted,
        ),
        "merge_states": (o, lse, do, lse + 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["attention", "attention_varlen", "attention_backward", "attention_varlen_backward", "merge_states"]
)
def test_opcheck(name: str) -> None:
    import omniattn.frameworks.torch.tracing  # noqa: F401

    torch.library.opcheck(getattr(torch.ops.omniattn, name).default, _operators()[name])
