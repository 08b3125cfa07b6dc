"""Tensors that a call writes count as changed in place, and torch's rules of ``out=`` hold for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.arrays import from_torch  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402

pytestmark = pytest.mark.frameworks

SHAPE = (1, 6, 2, 64)


def randoms(count: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(shape or SHAPE, generator=generator) for _ in range(count)]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_what_autograd_keeps_is_not_changed_unseen() -> None:
    q, k, v = randoms(3)
    x = q.clone().requires_grad_()
    y = x.exp()  # keeps y
    oa.attention(q, k, v, out=y.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    leaf = q.clone().requires_grad_()
    o = oa.attention(leaf, k, v)
    oa.attention(q, k, v, out=o.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    # A cache's memory, too.
    cache = oa.KVCache(1, 8, 2, 64, like=q.bfloat16(), k_dtype="bf16")
    oa.append(cache, k.bfloat16(), v.bfloat16(), seq_lens=int32(6))
    w = torch.ones_like(cache.k).requires_grad_()
    kept = w * cache.k
    oa.append(cache, k[:, :1].bfloat16(), v[:, :1].bfloat16(), seq_lens=int32(7))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_gradients_are_right_where_nothing_was_changed() -> None:
    q, k, v = randoms(3)
    leaf, out = q.clone().requires_grad_(), torch.empty(SHAPE)
    o = oa.attention(leaf, k, v)
    oa.attention(k, k, v, out=out)
    o.sum().backward()
    again = q.clone().requires_grad_()
    oa.attention(again, k, v).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)


def _writers() -> dict[str, tuple[Callable[[], Any], Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
    """Every way to write: the call, what it writes, what it only reads."""
    q, k, v, do, out, dq, dk, dv = randoms(8)
    rows = [x[0].clone() for x in (q, k, v, do, out)]
    starts, lens = int32(0, 2, 6), int32(6)
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    o, lse = oa.attention(q, k, v, return_lse=True)
    rows_o, rows_lse = oa.attention_varlen(*rows[:3], return_lse=True, **packed)
    qk, values = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v)
    half = [x.half() for x in (q, k, v)]
    cache = oa.KVCache(1, 8, 2, 64, like=q, k_dtype="int8", recent_window=2, recent_dtype="fp16")
    paged = oa.PagedKVCache(
        4, 4, 2, 64, like=q, k_dtype="int4", recent_window=2, recent_dtype="fp16", recent_slots=2
    )  # fmt: skip
    plain = oa.KVCache(1, 8, 2, 64, like=half[0], k_dtype="fp16")
    others = [torch.zeros_like(plain.k), torch.zeros_like(plain.v)]
    of_cache, of_paged = ([t.obj for t in x.planes.values()] for x in (cache, paged))
    oa.append(cache, k, v, seq_lens=lens)
    oa.append(plain, half[1], half[2], seq_lens=lens)
    table = int32(0, 1).view(1, 2)
    queries, keys = (torch.zeros(n, 128).to(torch.float8_e4m3fn) for n in (6, 9))
    queries, weights, scale = queries.view(3, 2, 128), torch.ones(3, 2), torch.ones(9)
    scores, chosen = torch.ones(3, 9), torch.zeros(3, 3, dtype=torch.int32)
    latent, tokens = torch.zeros(9, 24, dtype=torch.float16), torch.zeros(3, 2, 24)
    indices, sparse_out = torch.zeros(3, 4, dtype=torch.int32), torch.ones(3, 2, 16)
    theirs = [torch.zeros(1, 8, 2, 64) for _ in range(2)]
    states = torch.stack([o, o]), torch.stack([lse, lse]).transpose(-1, -2)
    return {
        "attention": (lambda: oa.attention(q, k, v, out=out), [out], [q, k, v]),
        "out is q": (lambda: oa.attention(out, k, v, out=out), [out], [k, v]),
        "int8": (lambda: oa.attention(q, k, v, out=out, precision="int8", return_lse=True), [out], [q]),
        "operands": (lambda: oa.attention(qk.q, qk.k, values, out=out), [out], [qk.q_int, values.v]),
        "attention_varlen": (lambda: oa.attention_varlen(*rows[:3], out=rows[4], **packed), [rows[4]], rows[:3]),
        "backward": (lambda: oa.attention_backward(do, q, k, v, o, lse, dq=dq, dv=dv), [dq, dv], [dk, q, o, lse, do]),
        "varlen backward": (
            lambda: oa.attention_varlen_backward(
                rows[3], *rows[:3], rows_o, rows_lse, dk=rows[4], wanted=("dk",), **packed
            ),
            [rows[4]], [rows[3], rows_o, rows_lse],
        ),
        "decode": (lambda: oa.decode(q[:, :1], cache, seq_lens=lens, out=out[:, :1]), [out], [q, *of_cache, lens]),
        "attention_sparse": (
            lambda: oa.attention_sparse(tokens, latent, indices=indices, head_dim_v=16, out=sparse_out),
            [sparse_out], [tokens, latent, indices],
        ),
        "merge_states": (lambda: oa.merge_states(q, lse, k, lse, out=out), [out], [q, k, lse]),
        "index_logits": (
            lambda: oa.index_logits(queries, keys, weights, k_scale=scale, out=scores), [scores], [weights, scale],
        ),
        "top_k": (lambda: oa.top_k(scores, 3, out=chosen), [chosen], [scores]),
        "append": (lambda: oa.append(cache, k, v, seq_lens=lens), of_cache, [k, v, lens]),
        "copy_blocks": (lambda: oa.copy_blocks(paged, [(0, 2)]), of_paged[:4], []),
        "copy_recent": (lambda: oa.copy_recent(paged, [(0, 1)]), of_paged[4:], []),
        "a cache on other memory": (
            lambda: oa.append(plain.on(others, []), half[1], half[2], seq_lens=lens), others, [plain.k, plain.v],
        ),
        "_flash_attn_backward": (
            lambda: fa2._flash_attn_backward(
                do, q, k, v, o, lse, dq, dk, dv, 0.0, 0.125, False, -1, -1, 0.0, None, False
            ),
            [dq, dk, dv], [do, q, k, v, o],
        ),
        "flash_attn_combine": (lambda: fa3.flash_attn_combine(*states, out=out), [out], [states[0]]),
        "flash_attn_with_kvcache": (
            lambda: fa2.flash_attn_with_kvcache(
                q[:, :1], *theirs, k[:, :1], v[:, :1], cache_seqlens=int32(3)
            ),
            theirs, [q, k, v],
        ),
        "in blocks": (
            lambda: fa2.flash_attn_with_kvcache(
                q[:, :1], *(x.view(2, 4, 2, 64) for x in theirs), k[:, :1], v[:, :1], cache_seqlens=int32(3),
                block_table=table,
            ),
            theirs, [q, k, v, table],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(_writers()))
def test_every_written_tensor_counts(name: str) -> None:
    call, written, read = _writers()[name]
    for _ in range(2):
        before, others = [x._version for x in written], [x._version for x in read]
        call()
        assert all(x._version > n for x, n in zip(written, before, strict=True)), name
        assert [x._version for x in read] == others, name
    with torch.inference_mode():  # where normal tensors are as elsewhere
        before = [x._version for x in written]
        call()
        assert all(x._version > n for x, n in zip(written, before, strict=True)), name


def test_results_of_their_own_are_new() -> None:
    q, k, v = randoms(3)
    o, lse = oa.attention(q, k, v, return_lse=True, out=torch.empty(SHAPE))
    assert (o._version, lse._version) == (1, 0)
    assert oa.attention(q, k, v)._version == 0


def _outs() -> dict[str, torch.Tensor]:
    """What can be given for a result."""
    with torch.inference_mode():
        frozen = torch.full(SHAPE, 7.0)
        normal = torch.full((1,), 7.0)
    leaf = torch.full(SHAPE, 7.0).requires_grad_()
    base = torch.full((1, 12, 2, 64), 7.0)
    of_normal = torch.full(SHAPE, 7.0)
    with torch.inference_mode():
        view = of_normal[:]
    assert normal.is_inference()
    assert not view.is_inference()
    with torch.no_grad():
        hidden = leaf[:]
    return {
        "normal": torch.full(SHAPE, 7.0), "a view": base[:, ::2], "inference": frozen,
        "a view of inference": frozen[:], "a view made in inference mode": view,
        "a leaf": leaf, "a view of a leaf": leaf[:], "a view of a leaf, no_grad": hidden, "a result": leaf * 1.0,
        "a detached leaf": leaf.detach(), "a parameter": torch.nn.Parameter(torch.full(SHAPE, 7.0)),
        "a frozen parameter": torch.nn.Parameter(torch.full(SHAPE, 7.0), requires_grad=False),
        "unbound": torch.full((2, *SHAPE), 7.0).unbind(0)[1],
    }  # fmt: skip


MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "attention": lambda q, k, v, out: oa.attention(q, k, v, out=out),
    "merge_states": lambda q, k, v, out: oa.merge_states(q, torch.zeros(1, 2, 6), k, torch.zeros(1, 2, 6), out=out),
    "backward": lambda q, k, v, out: oa.attention_backward(q, q, k, v, v, torch.zeros(1, 2, 6), dk=out),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(_outs()))
@pytest.mark.parametrize("needs", [False, True], ids=["", "an input needs a gradient"])
def test_the_rules_of_torch(function: str, mode: str, kind: str, needs: bool) -> None:
    def attempt(call: Callable[[Any, Any, Any, Any], Any]) -> tuple[Any, ...]:
        """Whether it raises, whether it has written, and by how much the version went up."""
        out, (q, k, v) = _outs()[kind], randoms(3)
        if needs:
            k.requires_grad_()
        version = None if out.is_inference() else out._version
        raised = False
        with MODES[mode]():
            try:
                call(q, k, v, out)
            except (RuntimeError, ArgumentError, UnsupportedError):
                raised = True
        count = None if version is None else out._version - version
        return raised, bool((out.detach() == 7).all()), count

    expected, _, times = attempt(lambda q, k, v, out: torch.add(q, k, out=out))
    raised, untouched, count = attempt(CALLS[function])
    assert (raised, count) == (expected, times)
    assert raised is untouched, "nothing is written before an error"


def test_caches_of_inference_mode_are_written_there() -> None:
    q, k, v = randoms(3)
    with torch.inference_mode():
        cache = oa.PagedKVCache(2, 4, 2, 64, like=q, k_dtype="int8")
        oa.append(cache, k, v, seq_lens=int32(6), block_table=int32(0, 1).view(1, 2))
        before = cache.k.clone()
    for call in (
        lambda: oa.append(cache, v, k, seq_lens=int32(6), block_table=int32(0, 1).view(1, 2)),
        lambda: oa.copy_blocks(cache, [(0, 1)]),
    ):
        with pytest.raises(ArgumentError, match=r"'cache\.k'.*an inference tensor outside inference mode"):
            call()
    assert torch.equal(cache.k, before)
    assert oa.decode(q[:, :1], cache, seq_lens=int32(6), block_table=int32(0, 1).view(1, 2)).isfinite().all()


def test_new_keys_over_their_cache() -> None:
    """Before anything is written: torch itself says so of the second of two caches, when the first has changed."""
    q, *_ = randoms(1, 2, 2, 2, 64)
    cache = torch.full((2, 2, 8, 2, 64), 7.0)
    k_cache, v_cache = cache.unbind(0)
    new = torch.ones(2, 1, 2, 64)
    options: dict[str, Any] = {"cache_seqlens": int32(3, 3)}
    packed = torch.full((2, 8, 2, 2, 64), 7.0).unbind(2)
    cases: list[tuple[str, Any, Any, Any, Any, Any]] = [
        ("k_cache", q, k_cache, v_cache, k_cache[:, 2:3], new), ("v_cache", q, k_cache, v_cache, new, v_cache[:, 2:3]),
        ("k_cache", q, k_cache, k_cache, new, new), ("k_cache", k_cache[:, :2], k_cache, v_cache, new, new),
        ("k_cache", q, cache.view(4, 8, 2, 64)[:3], cache.view(4, 8, 2, 64)[1:], new, new),
        ("v_cache", q, k_cache, torch.full((1, 8, 2, 64), 7.0).expand(2, 8, 2, 64), new, new),
    ]  # fmt: skip
    for name, *given in cases:
        for function in (fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache):
            with pytest.raises(ArgumentError, match="memory") as caught:
                function(*given, **options)
            assert caught.value.argument == name
            assert (cache == 7).all()
    out = fa2.flash_attn_with_kvcache(q, *packed, new, new, **options)
    torch.testing.assert_close(
        out, fa2.flash_attn_with_kvcache(q, *(x.contiguous() for x in packed), new, new, **options)
    )
    # Reading alone may be from one memory.
    fa2.flash_attn_with_kvcache(q, k_cache, k_cache, **options)


def test_compiled_and_watched_appends_count() -> None:
    _, k, v = randoms(3)
    cache = oa.KVCache(1, 8, 2, 64, like=k, k_dtype="int8")
    planes = [t.obj for t in cache.planes.values()]

    def step(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        oa.append(cache, k, v, seq_lens=int32(6))
        return k + 1

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(step, backend="aot_eager")
    with torch.no_grad():
        compiled(k, v)
        before = [x._version for x in planes]
        compiled(k, v)
        assert all(x._version > n for x, n in zip(planes, before, strict=True))
        before = [x._version for x in planes]
        with Watch():
            step(k, v)
        assert all(x._version > n for x, n in zip(planes, before, strict=True))


def test_a_counter_for_one_tensor_at_a_time() -> None:
    """As torch before 2.6 has it: for no sequence, and for no inference tensor."""

    def one(x: Any) -> None:
        if not isinstance(x, torch.Tensor) or x.is_inference():
            raise RuntimeError("increment_version expect a Tensor as input")
        torch._C._increment_version([x])

    a, b = torch.zeros(2), torch.zeros(3)
    with torch.inference_mode():
        frozen = torch.zeros(2)
    increment = from_torch._increment_of(one)
    increment([a, frozen, b])
    increment((a,))
    assert (a._version, b._version) == (2, 1)
    assert from_torch.increment_version is torch._C._increment_version
