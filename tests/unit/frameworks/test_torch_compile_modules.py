"""torch.compile's front end never reads the dictionary of all modules: it would read it whole, while it may grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import omniattn as oa
from omniattn import arrays

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from tests.unit.frameworks.torch_versions import needs_compiled_quantizers  # noqa: E402


class _System:
    @property
    def modules(self) -> Any:
        raise AssertionError("read while the front end reads the caller")


def _calls() -> dict[str, Callable[[], Any]]:
    q, k, v = (torch.randn(1, 16, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    lse, starts = torch.zeros(1, 2, 16), torch.tensor([0, 16], dtype=torch.int32)
    one, lengths = torch.randn(1, 1, 2, 64, dtype=torch.bfloat16), torch.tensor([1], dtype=torch.int32)
    cache = oa.KVCache(1, 64, 2, 64, like=one)
    oa.append(cache, one, one, seq_lens=lengths)
    rows, latent = torch.randn(3, 2, 24).bfloat16(), torch.randn(2, 8, 1, 24).bfloat16()
    latent_cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=16)
    indices = torch.zeros(3, 4, dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 16, "max_seqlen_k": 16}
    return {
        "attention": lambda: oa.attention(q, k, v),
        "attention_varlen": lambda: oa.attention_varlen(q[0], k[0], v[0], **packed),
        "attention_backward": lambda: oa.attention_backward(q, q, k, v, q, lse),
        "append": lambda: oa.append(cache, one, one, seq_lens=lengths),
        "decode": lambda: oa.decode(one, cache, seq_lens=lengths),
        "attention_sparse": lambda: oa.attention_sparse(rows, latent_cache, indices=indices),
        "decode, lists": lambda: oa.decode(rows[:, None], latent_cache, indices=indices[:, None]),
        "attention_with_kvcache": lambda: oa.attention_with_kvcache(
            one[0], cache, seq_lens=lengths, cu_seqlens_q=starts[:2] // 16, max_seqlen_q=2, return_lse=True
        ),
        "merge_states": lambda: oa.merge_states(q, lse, q, lse),
        "quantize_qk": lambda: oa.quantize_qk(q, k),
        "quantize_v": lambda: oa.quantize_v(v),
        "top_k": lambda: oa.top_k(lse[0], 3),
    }


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=needs_compiled_quantizers) if "quantize" in x else x for x in _calls()]
)
def test_modules_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, was_traced = _calls()[name], []

    def backend(graph: Any, inputs: Any) -> Any:
        was_traced.append(name)
        monkeypatch.undo()
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    monkeypatch.setattr(arrays, "sys", _System())
    compiled()
    assert was_traced == [name]
