"""``attention_with_kvcache`` of torch tensors: under torch.compile, with gradients, tensors without memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

#: Queries of two sequences.
COUNTS = {"tokens": (1, 1), "batch": (20, 20), "packed": (13, 4), "packed tokens": (1, 1), "score_mod": (2, 2)}


def _compiled(function: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _mod() -> oa.ScoreMod:
    return oa.ScoreMod(
        "score + slopes[h] * (k - q)", slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        reference=lambda score, b, h, q, k, slopes: score + np.asarray(slopes)[h] * (k - q),
    )  # fmt: skip


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries", ["tokens", "batch", "packed", "packed tokens", "score_mod"])
def test_attention_with_kvcache_compiles(paged: bool, queries: str) -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    cache = (
        oa.PagedKVCache(10, 8, 2, 16, like=like, k_dtype="fp16") if paged
        else oa.KVCache(2, 32, 2, 16, like=like, k_dtype="fp16")
    )  # fmt: skip
    table = torch.randperm(10, dtype=torch.int32)[:8].view(2, 4) if paged else None
    k, v = (torch.randn(2, 30, 2, 16).bfloat16() for _ in "kv")
    oa.append(cache, k, v, seq_lens=torch.tensor([30, 30], dtype=torch.int32), block_table=table)
    counts = COUNTS[queries]
    options: dict[str, Any] = {"causal": queries != "packed", "softcap": 3.0}
    starts, q = None, torch.randn(2, counts[0], 4, 16)
    if queries.startswith("packed"):
        q = torch.randn(sum(counts), 4, 16)
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        options["max_seqlen_q"] = counts[0]
    elif queries == "score_mod":
        options["score_mod"] = _mod()
    index = None if paged else torch.tensor([1, 0], dtype=torch.int32)

    def f(q: Any, lengths: Any, starts: Any, table: Any, index: Any) -> Any:
        return oa.attention_with_kvcache(
            q, cache, seq_lens=lengths, cu_seqlens_q=starts, block_table=table, batch_index=index, return_lse=True,
            **options,
        )  # fmt: skip

    compiled = _compiled(f)
    for lengths in ([30, 9], [13, 30]):
        given = (q, torch.tensor(lengths, dtype=torch.int32), starts, table, index)
        for a, b in zip(compiled(*given), f(*given), strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match="'q' requires a gradient"):
        f(*given)
    with pytest.raises(Exception, match="'q' requires a gradient"):
        _compiled(f)(*given)


def test_what_has_no_gradient() -> None:
    cache = oa.KVCache(2, 32, 2, 16, like=torch.empty(0), k_dtype="fp16")
    cache.k.zero_()
    cache.v.zero_()
    q, lengths, slopes = torch.randn(2, 20, 4, 16), torch.tensor([30, 9], dtype=torch.int32), torch.ones(4)
    mod = oa.ScoreMod(
        "score + slopes[h]", slopes=slopes.requires_grad_(),
        reference=lambda score, b, h, q, k, slopes: score + np.asarray(slopes)[h],
    )  # fmt: skip

    def f(q: Any) -> Any:
        return oa.attention_with_kvcache(q, cache, seq_lens=lengths, score_mod=mod)

    for call in (f, _compiled(f)):
        with pytest.raises(Exception, match=r"slopes' requires a gradient"):
            call(q)
        with torch.no_grad():
            assert call(q).shape == q.shape


def test_what_an_operator_does_not_take() -> None:
    cache = oa.KVCache(2, 32, 2, 16, like=torch.empty(0), k_dtype="fp16")
    q, lengths = torch.randn(2, 20, 4, 16), torch.tensor([30, 9], dtype=torch.int32)
    out = torch.empty_like(q)
    for options, text in (
        ({"out": out}, "'out': expected None in a traced or compiled call"),
        ({"score_mod": "score"}, "'score_mod': expected an omniattn.ScoreMod, received str"),
        ({"stream": 0}, "'stream': expected None in a traced or compiled call"),
    ):
        with pytest.raises(Exception, match=text):
            _compiled(lambda q, of=options: oa.attention_with_kvcache(q, cache, seq_lens=lengths, **of))(q)


def test_tensors_without_memory() -> None:
    """What the operator says of its results is what it makes, strides included."""
    from torch._subclasses import FakeTensorMode

    cache = oa.KVCache(2, 32, 2, 16, like=torch.empty(0), k_dtype="fp16")
    cache.k.zero_()
    cache.v.zero_()
    places = {"seq_lens": torch.tensor([30, 9], dtype=torch.int32)}
    packed = {"cu_seqlens_q": torch.tensor([0, 13, 17], dtype=torch.int32), "max_seqlen_q": 13}
    one_each = {"cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32), "max_seqlen_q": 1}
    for shape, more in (((2, 20, 4, 16), {}), ((2, 1, 4, 16), {}), ((17, 4, 16), packed), ((2, 4, 16), one_each)):
        q = torch.randn(shape)
        made = oa.attention_with_kvcache(q, cache, **places, **more, return_lse=True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = oa.attention_with_kvcache(mode.from_tensor(q), cache, **places, **more, return_lse=True)
        for x, y in zip(made, fake, strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
