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

DOCS = Path(__file__).resolve().parents[3] / "docs"
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


def serving() -> dict[str, Any]:
    """The functions of that page."""
    names: dict[str, Any] = {"oa": omniattn}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "serving.md").read_text(), re.DOTALL):
        exec(code, names)
    return names


def test_a_step_of_an_engine() -> None:
    """Prompts in chunks, then single tokens, of requests that come and go: as attention over all of a request."""
    names = serving()
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


@pytest.mark.parametrize("room", [1, 8], ids=["most are computed again", "most are swapped"])
def test_prompts_are_shared_and_requests_leave_and_come_back(room: int) -> None:
    """More requests than the cache has blocks for: each token's result is that of its request alone."""
    names, heads, kv, dim, size = serving(), 4, 2, 16, 4
    generator = torch.Generator().manual_seed(3)
    q_of, k_of, v_of = (torch.randn(100, n, dim, generator=generator) for n in (heads, kv, kv))
    cache = omniattn.PagedKVCache(9, size, kv, dim, like=torch.empty(0), k_dtype="fp16")
    blocks = omniattn.BlockManager(9, size, swap_space=omniattn.SwapSpace(cache, room))
    system, count = [1, 2, 3, 4, 5, 6, 7, 8, 9], 9
    tokens = {name: [*system, *range(10 * i, 10 * i + 3)] for i, name in enumerate("abc", 1)}
    got: dict[str, dict[int, Any]] = {name: {} for name in tokens}
    waiting, running, swapped, matched, computed = list(tokens), [], 0, 0, 0

    def compute(growth: dict[str, int]) -> None:
        nonlocal computed
        first = {name: blocks.length(name) - n for name, n in growth.items()}
        new = torch.tensor([t for name, n in growth.items() for t in tokens[name][first[name] :][:n]])
        starts = torch.tensor([0, *torch.tensor(list(growth.values())).cumsum(0)], dtype=torch.int32)
        places = [torch.from_numpy(x) for x in (blocks.seq_lens(growth), blocks.block_table(growth))]
        o = names["step"](cache, q_of[new], k_of[new], v_of[new], starts, max(growth.values()), *places)
        for name, rows in zip(growth, o.split(list(growth.values())), strict=True):
            got[name] |= {first[name] + i: row for i, row in enumerate(rows)}
            blocks.commit(name, tokens[name][first[name] :][: growth[name]])
        computed += len(new)

    while waiting or running:
        if waiting:
            name = waiting[0]
            try:
                if name in blocks.swapped:
                    blocks.swap_in(name).wait()
                    swapped += 1
                else:
                    there = names["admit"](blocks, name, tokens[name])
                    matched += there
                    compute({name: len(tokens[name]) - there})
                running.append(waiting.pop(0))
            except omniattn.errors.OutOfBlocksError:
                assert running
        for name in running:
            if len(tokens[name]) == blocks.length(name):
                tokens[name].append(50 + len(tokens[name]))
        before = list(running)
        growth = dict.fromkeys(running, 1)
        omniattn.copy_blocks(cache, names["make_room"](blocks, growth, running))
        waiting = before[len(running) :] + waiting
        compute(growth)
        for name in [n for n in running if len(tokens[n]) == 12 + count]:
            running.remove(name)
            blocks.free(name)
    assert blocks.num_free == 9
    assert blocks.num_free_host == room
    assert matched >= 16
    assert swapped > 0 if room == 8 else computed > 3 * (12 + count) - 2 * 8
    for name, rows in got.items():
        assert len(rows) == 12 + count - (0 if name == "a" else 8)
        q, k, v = (x[torch.tensor(tokens[name])][None] for x in (q_of, k_of.half().float(), v_of.half().float()))
        expected = omniattn.attention(q, k, v, causal=True)[0]
        for i, row in rows.items():
            assert float((row - expected[i]).abs().max()) <= 1e-5
