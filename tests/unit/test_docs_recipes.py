"""Code in docs/api.md and docs/serving.md that is more than a call: it runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import omniattn

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

DOCS = Path(__file__).resolve().parents[2] / "docs"
API = DOCS / "api.md"


def decode_with_prefix() -> Callable[..., Any]:
    """The function of that name in docs/api.md."""
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", API.read_text(), re.DOTALL) if "decode_with_prefix" in c)
    names: dict[str, Any] = {"omniattn": omniattn}
    exec(code, names)
    return names["decode_with_prefix"]


def check_prefix(device: str, dtype: Any, cache_dtype: str, q_len: int, tolerance: float) -> None:
    """A shared prefix, read once, against sequences that hold it each for themselves."""
    generator = torch.Generator().manual_seed(2)
    batch, heads, kv, dim, prefix_len, lengths = 5, 6, 2, 64, 150, (3, 40, 16, 9, 120)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def int32(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q = random(batch, q_len, heads, dim)
    head_k, head_v = random(1, prefix_len, kv, dim), random(1, prefix_len, kv, dim)
    prefix = omniattn.KVCache(1, prefix_len, kv, dim, like=q, k_dtype=cache_dtype)
    omniattn.append(prefix, head_k, head_v, seq_lens=int32(prefix_len))
    tails = omniattn.KVCache(batch, max(lengths), kv, dim, like=q, k_dtype=cache_dtype)
    whole = omniattn.KVCache(batch, prefix_len + max(lengths), kv, dim, like=q, k_dtype=cache_dtype)
    starts, rows, all_k, all_v, tail_k, tail_v = [0], [0], [], [], [], []
    for n in lengths:
        k, v = random(n, kv, dim), random(n, kv, dim)
        tail_k.append(k), tail_v.append(v)
        all_k += [head_k[0], k]
        all_v += [head_v[0], v]
        starts.append(starts[-1] + n), rows.append(rows[-1] + prefix_len + n)
    omniattn.append(tails, torch.cat(tail_k), torch.cat(tail_v), seq_lens=int32(*lengths), cu_seqlens=int32(*starts))
    totals = int32(*(prefix_len + n for n in lengths))
    omniattn.append(whole, torch.cat(all_k), torch.cat(all_v), seq_lens=totals, cu_seqlens=int32(*rows))
    expected, expected_lse = omniattn.decode(q, whole, seq_lens=totals, return_lse=True)
    o, lse = decode_with_prefix()(q, prefix, int32(prefix_len), tails, int32(*lengths))
    assert o.shape == expected.shape
    assert float((o.float() - expected.float()).abs().max()) <= tolerance * float(expected.float().abs().max())
    assert float((lse - expected_lse).abs().max()) <= tolerance


@pytest.mark.parametrize("cache_dtype", ["fp16", "int4"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_shared_prefix_is_read_once(cache_dtype: str, q_len: int) -> None:
    check_prefix("cpu", torch.float32, cache_dtype, q_len, 1e-5)


def test_a_step_of_an_engine() -> None:
    """Prompts in chunks, then single tokens, of requests that come and go: as attention over all of a request."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "serving.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"oa": omniattn}
    exec(code, names)
    generator = torch.Generator().manual_seed(3)
    lengths, heads, kv, dim = {"a": 30, "b": 9, "c": 17}, 4, 2, 16
    whole = {n: [torch.randn(t, h, dim, generator=generator) for h in (heads, kv, kv)] for n, t in lengths.items()}
    cache = omniattn.PagedKVCache(20, 4, kv, dim, like=torch.empty(0), k_dtype="fp16")
    blocks, done = omniattn.BlockManager(20, 4), dict.fromkeys(lengths, 0)
    got: dict[str, list[Any]] = {n: [] for n in lengths}
    for new in ({"a": 20}, {"a": 10, "b": 8}, {"b": 1, "c": 15}, {"c": 1}, {"c": 1}):
        for n in new.keys() - set(blocks.sequences):
            blocks.add(n)
        assert not blocks.extend(new)
        parts = {n: [x[done[n] : done[n] + count] for x in whole[n]] for n, count in new.items()}
        q, k, v = (torch.cat([parts[n][i] for n in new]) for i in range(3))
        starts = torch.tensor([0, *torch.tensor(list(new.values())).cumsum(0)], dtype=torch.int32)
        places = [torch.from_numpy(x) for x in (blocks.seq_lens(list(new)), blocks.block_table(list(new)))]
        o = names["step"](cache, q, k, v, starts, max(new.values()), *places)
        for n, rows in zip(new, o.split(list(new.values())), strict=True):
            got[n].append(rows)
            done[n] += new[n]
            if done[n] == lengths[n]:
                blocks.free(n)
    for n, (q, k, v) in whole.items():
        k, v = (x.half().float() for x in (k, v))
        expected = omniattn.attention(q[None], k[None], v[None], causal=True)[0]
        assert float((torch.cat(got[n]) - expected).abs().max()) <= 1e-5
