"""Caches whose tokens are divided among processes: ``python sharded_cache_child.py STORE SIZE SUITES``.

Every process has the whole tensors, from one seed, and compares its results with those of one cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniattn as oa
from omniattn.distributed import append_sharded, decode_sharded, local_seqlen, local_tokens
from omniattn.distributed.sharded_cache import merged
from omniattn.errors import ArgumentError, CommunicationError, DtypeError, ShapeError, UnsupportedError

sys.path.insert(0, str(Path(__file__).resolve().parent))

import distributed_child as common
from distributed_child import near, say

#: Sequences with fewer tokens than ranks, none, and more than a block on each.
LENGTHS = (1, 0, 37, 90, 5)
BLOCK = 8


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    """The same on all ranks; another seed for each shape."""
    made = torch.Generator().manual_seed(sum(n * 31**i for i, n in enumerate(shape)))
    return torch.randn(*shape, generator=made).to(dtype)


def blocks(lengths: list[int], seed: int) -> tuple[Any, int]:
    """A block table of so many tokens each, in any order, and how many blocks there are."""
    need = [max(-(-n // BLOCK), 1) for n in lengths]
    order = torch.randperm(sum(need), generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(need), max(need)), -1, dtype=torch.int32)
    for row, count in enumerate(need):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return table, sum(need)


def new_cache(paged: bool, lengths: list[int], like: Any, seed: int, **how: Any) -> tuple[Any, dict[str, Any]]:
    """A cache with room for these tokens, and its block table as an argument."""
    heads, head_dim = how.pop("heads", 2), how.pop("head_dim", 16)
    if not paged:
        return oa.KVCache(len(lengths), max(*lengths, 1), heads, head_dim, like=like, **how), {}
    table, count = blocks(lengths, seed)
    return oa.PagedKVCache(count, BLOCK, heads, head_dim, like=like, **how), {"block_table": table}


def rotation() -> dict[str, Any]:
    """Angles of every position."""
    angle = torch.arange(100.0)[:, None] * torch.tensor([1.0, 0.3, 0.1])
    return {"cos": angle.cos(), "sin": angle.sin()}


def case(
    name: str, *, paged: bool = True, q_len: int = 1, interleave: int = 1, heads_of: str = "all", sinks: bool = False,
    rotated: bool = False, latent: bool = False, bound: float = 2e-5, dtype: Any = torch.float32,
    lengths: tuple[int, ...] = LENGTHS, options: dict[str, Any] | None = None, **how: Any,
) -> None:  # fmt: skip
    """A prompt, packed, then two steps of new tokens; beside one cache of everything."""
    options = options or {}
    kv_heads, head_dim, group = (1, 32, 4) if latent else (2, 16, 2)
    how |= {"heads": kv_heads, "head_dim": head_dim, **({"head_dim_v": 24} if latent else {})}
    size, rank = dist.get_world_size(), dist.get_rank()
    ends = [n + 2 * q_len if n else 0 for n in lengths]
    here = [local_seqlen(n, interleave=interleave) for n in ends]
    like = torch.empty(0)
    whole, table = new_cache(paged, ends, like, 1, **dict(how))
    part, part_table = new_cache(paged, here, like, 2 + rank, **dict(how))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    rows = int(starts[-1])
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    turn = rotation() if rotated else {}
    extra = 3  # rows behind the last sequence, which nobody writes
    values = () if latent else (numbers(rows + extra, kv_heads, head_dim, dtype=dtype),)
    keys = numbers(rows + extra, kv_heads, head_dim, dtype=dtype) * 0.5
    common_said = {"seq_lens": seq_lens, "cu_seqlens": starts, **turn}
    oa.append(whole, keys[:rows], *(x[:rows] for x in values), **common_said, **table)
    append_sharded(part, keys, *values, interleave=interleave, **common_said, **part_table)
    sink = torch.linspace(-1.0, 2.0, kv_heads * group) if sinks else None
    for step in (1, 2):
        seq_lens = torch.tensor([n + step * q_len if n else 0 for n in lengths], dtype=torch.int32)
        fresh = numbers(len(lengths), q_len, kv_heads, head_dim + step, dtype=dtype)[..., :head_dim]
        newest = () if latent else (fresh.flip(0).contiguous(),)
        oa.append(whole, fresh, *newest, seq_lens=seq_lens, **turn, **table)
        q = numbers(len(lengths), q_len, kv_heads * group, head_dim, dtype=dtype)
        tokens = local_tokens(seq_lens, q_len=q_len, interleave=interleave) if step == 2 else seq_lens
        said = {"interleave": interleave} if step == 1 else {}
        append_sharded(part, fresh, *newest, seq_lens=tokens, **said, **turn, **part_table)
        expected = oa.decode(q, whole, seq_lens=seq_lens, sinks=sink, return_lse=True, **options, **table)
        found = decode_sharded(
            q, part, seq_lens=tokens, sinks=sink, return_lse=True, heads=heads_of, **said, **options, **part_table
        )
        own = slice(None)
        if heads_of == "own":
            each = kv_heads * group // size
            own = slice(rank * each, (rank + 1) * each)
        near(f"{name} o", found[0], expected[0][:, :, own], bound)
        near(f"{name} lse", found[1], expected[1][:, own], max(bound / 8, 2e-5))
        again = decode_sharded(q, part, seq_lens=tokens, sinks=sink, heads=heads_of, **said, **options, **part_table)
        assert torch.equal(again, found[0]), name
    say(name)


def caches() -> None:
    """Formats, pages, several queries, neighbouring tokens, sinks, rotary embedding, latent rows."""
    case("pages")
    case("contiguous", paged=False, lengths=(3, 37, 90, 5))
    case("bf16", dtype=torch.bfloat16, bound=0.03)
    case("float64", dtype=torch.float64)
    case("int8", k_dtype="int8", options={"softcap": 3.0, "softmax_scale": 0.4})
    case("int4, own heads", k_dtype="int4", heads_of="own", interleave=4)
    case("fp8, sinks", k_dtype="fp8", sinks=True)
    case("several queries", q_len=3, interleave=2, sinks=True, lengths=(3, 37, 90, 5))
    case("several queries, contiguous", paged=False, q_len=4, heads_of="own", lengths=(3, 37, 90, 5))
    case("rotary embedding", rotated=True, interleave=8)
    case("latent", latent=True, rotated=True, q_len=2, lengths=(3, 37, 90, 5))
    case("latent, own heads", latent=True, heads_of="own", options={"deterministic": True})
    q = numbers(0, 1, 4, 16)
    none, table = new_cache(True, [1], q, 1)
    del table
    found = decode_sharded(
        q, none, seq_lens=torch.empty(0, dtype=torch.int32), block_table=torch.empty(0, 1, dtype=torch.int32)
    )
    assert found.shape == (0, 1, 4, 16)
    several = decode_sharded(
        numbers(0, 2, 4, 16), none, seq_lens=torch.empty(0, dtype=torch.int32),
        block_table=torch.empty(0, 1, dtype=torch.int32), return_lse=True,
    )  # fmt: skip
    assert [tuple(x.shape) for x in several] == [(0, 2, 4, 16), (0, 4, 2)]
    say("no sequences")


def no_tokens() -> None:
    cache, table = new_cache(True, [9, 9], torch.empty(0), 1)
    k = numbers(2, 0, 2, 16)
    cache.k.zero_()
    append_sharded(cache, k, k, seq_lens=torch.tensor([3, 4], dtype=torch.int32), **table)
    assert not cache.k.any()
    say("no tokens")


def counts() -> None:
    """`local_seqlen` and `local_tokens` agree; together the ranks have all tokens, each once."""
    size = dist.get_world_size()
    for interleave in (1, 3, 8):
        lengths = list(range(60))
        mine = [local_seqlen(n, interleave=interleave) for n in lengths]
        tokens = local_tokens(torch.tensor(lengths, dtype=torch.int32), q_len=2, interleave=interleave)
        assert tokens.last.tolist() == mine
        assert tokens.local[:, 0].tolist() == [0, *mine[:-1]]
        total = torch.tensor(mine)
        dist.all_reduce(total)
        assert total.tolist() == lengths
        place = tokens.places[:, 1]
        owners = (place >= 0).to(torch.int64)
        dist.all_reduce(owners)
        assert owners.tolist() == [0, *([1] * 59)]
        assert all(p in (-1, n - 1) for p, n in zip(place.tolist(), mine, strict=True)), size
    say("counts")


def heads_over_ranks() -> None:
    """Tensor parallelism: each rank decodes its kv heads, with nothing to say to the others."""
    size, rank = dist.get_world_size(), dist.get_rank()
    like = torch.empty(0)
    lengths = torch.tensor([9, 30], dtype=torch.int32)
    k, v, q = (numbers(2, 30, size, 16), numbers(2, 30, size, 16) * 0.5, numbers(2, 1, size * 3, 16))
    whole, own = (oa.KVCache(2, 30, n, 16, like=like) for n in (size, 1))
    packed = torch.tensor([0, 9, 39], dtype=torch.int32)
    rows = [torch.cat([x[0, :9], x[1]]) for x in (k, v)]
    oa.append(whole, *rows, seq_lens=lengths, cu_seqlens=packed)
    oa.append(own, *(x[:, rank : rank + 1] for x in rows), seq_lens=lengths, cu_seqlens=packed)
    mine = slice(3 * rank, 3 * rank + 3)
    near(
        "heads",
        oa.decode(q[:, :, mine], own, seq_lens=lengths),
        oa.decode(q, whole, seq_lens=lengths)[:, :, mine],
        1e-6,
    )
    say("heads over ranks")


def mesh() -> None:
    """Tokens over one dimension of a mesh, kv heads over the other."""
    size = dist.get_world_size()
    there = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("heads", "tokens"))
    head, heads = there["heads"].get_local_rank(), size // 2
    like = torch.empty(0)
    lengths = torch.tensor([20], dtype=torch.int32)
    k, v, q = (numbers(1, 20, heads, 16), numbers(1, 20, heads, 16) * 0.5, numbers(1, 1, heads * 2, 16))
    whole, own = oa.KVCache(1, 20, heads, 16, like=like), oa.KVCache(1, 10, 1, 16, like=like)
    oa.append(whole, k, v, seq_lens=lengths)
    one = torch.tensor([0, 20], dtype=torch.int32)
    append_sharded(
        own, *(x[0, :, head : head + 1] for x in (k, v)), seq_lens=lengths, cu_seqlens=one, group=there["tokens"]
    )
    mine = slice(2 * head, 2 * head + 2)
    found = decode_sharded(q[:, :, mine], own, seq_lens=lengths, group=there["tokens"])
    near("mesh", found, oa.decode(q, whole, seq_lens=lengths)[:, :, mine], 1e-5)
    say("mesh")


def merging() -> None:
    """Any number of partial results, some of them empty."""
    for ranks in (1, 2, 3, 5, 8):
        o, lse = numbers(ranks, 2, 3, 4, 8), numbers(ranks, 2, 4, 3)
        lse[0] = -torch.inf
        lse[:, 1, 2, 1] = -torch.inf
        total = torch.logsumexp(lse.double(), 0)
        weight = torch.where(torch.isinf(lse), 0.0, torch.exp(lse.double() - total)).transpose(2, 3)[..., None]
        found = merged(o, lse)
        if ranks > 1:
            near("merged o", found[0], (o * weight).sum(0).float(), 2e-6)
        near("merged lse", found[1], total.float(), 2e-6)
    say("merging")


def told_by_their_own_function() -> None:
    """Errors of what leaves checks to `append` and `decode`; and v, of as many rows in another order."""
    # Four new tokens behind the first: one of each sequence is on every rank.
    cache, lengths = oa.KVCache(2, 64, 2, 16, like=torch.empty(0)), torch.tensor([9, 9], dtype=torch.int32)
    q, k, angles = numbers(2, 1, 4, 16), numbers(2, 4, 2, 16), torch.zeros(1, 4)

    def append(v: Any = k, **options: Any) -> None:
        append_sharded(cache, k, v, seq_lens=lengths, **options)

    for call, function, argument in (
        (lambda: append(numbers(4, 2, 2, 16)), "append_sharded", "v"),
        (lambda: append(k.numpy()), "append_sharded", "v"),
        (lambda: append(k[0, 0, 0]), "append_sharded", "v"),
        (lambda: append(None), "append_sharded", "v"),
        (lambda: append(k_pe=3), "append_sharded", "k_pe"),
        (lambda: append(sin=angles), "append_sharded", "cos"),
        (lambda: append(cos=angles, sin=angles), "append_sharded", "cos"),
        (lambda: append(rope="whole"), "append_sharded", "rope"),
        (lambda: append(interleave=2**70), "append_sharded", "interleave"),
        (lambda: local_tokens(lengths, interleave=2**70), "local_tokens", "interleave"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, softmax_scale="1"), "decode_sharded", "softmax_scale"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, softcap=-1.0), "decode_sharded", "softcap"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, deterministic=1), "decode_sharded", "deterministic"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, block_table=3), "decode_sharded", "block_table"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert (caught.value.function, caught.value.argument) == (function, argument), str(caught.value)


def contents_are_checked() -> None:
    """On the CPU, as those of `append` and `decode`; nothing is written then."""
    size = dist.get_world_size()
    cache, table = new_cache(True, [9, 9], torch.empty(0), 1)
    cache.k.zero_()
    k, packed, q = numbers(2, 2 * size, 2, 16), numbers(4, 2, 16), numbers(2, 2, 4, 16)
    nowhere, beyond = (torch.full_like(table["block_table"], block) for block in (-1, cache.num_blocks))

    def lengths(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32)

    def append(*lens: int, starts: tuple[int, ...] | None = None, **options: Any) -> None:
        rows, how = (k, {}) if starts is None else (packed, {"cu_seqlens": lengths(*starts)})
        append_sharded(cache, rows, rows, seq_lens=lengths(*lens), **how, **(table | options))

    for call, argument in (
        (lambda: append(2 * size, 1), "seq_lens"),
        (lambda: append(-1, 2 * size), "seq_lens"),
        (lambda: append(4, 2, starts=(0, 1, 4)), "seq_lens"),
        (lambda: append(4, 4, starts=(1, 2, 4)), "cu_seqlens"),
        (lambda: append(4, 4, starts=(0, 3, 2)), "cu_seqlens"),
        (lambda: append(9, 9, starts=(0, 2, 9)), "cu_seqlens"),
        (lambda: append(2 * size, 2 * size, block_table=nowhere), "block_table"),
        (lambda: append(2 * size, 2 * size, block_table=beyond), "block_table"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths(3, -4), **table), "seq_lens"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument, str(caught.value)
        assert not cache.k.any()
    append(0, 2 * size)  # padding
    assert cache.k.any()


def tables_and_tensors_that_are_none() -> None:
    """Of several queries, whose table is repeated for each; sparse and nested tensors have no rows."""
    cache, table = new_cache(True, [9, 9], torch.empty(0), 1)
    there, lengths = table["block_table"], torch.tensor([4, 4], dtype=torch.int32)
    q, k = numbers(2, 2, 4, 16), numbers(2, 2, 2, 16)
    for wrong in (None, True, 3, [[0]], there[0], there[None], there[:0], there.long(), there.to_sparse()):
        with pytest.raises(ArgumentError) as caught:
            decode_sharded(q, cache, seq_lens=lengths, block_table=wrong)
        assert (caught.value.function, caught.value.argument) == ("decode_sharded", "block_table")
    for kind in (torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor(list(x))):
        for call, argument in (
            (lambda kind: decode_sharded(kind(q), cache, seq_lens=lengths, **table), "q"),
            (lambda kind: decode_sharded(q, cache, seq_lens=kind(lengths), **table), "seq_lens"),
            (lambda kind: append_sharded(cache, kind(k), k, seq_lens=lengths, **table), "k"),
            (lambda kind: append_sharded(cache, k, kind(k), seq_lens=lengths, **table), "v"),
            (lambda kind: append_sharded(cache, k, k, seq_lens=lengths, block_table=kind(there)), "block_table"),
        ):
            with pytest.raises(ArgumentError) as caught:
                call(kind)
            assert caught.value.argument == argument, str(caught.value)


def errors() -> None:
    """What cannot be is refused on all ranks, with the argument's name."""
    like = torch.empty(0)
    cache = oa.KVCache(2, 8, 2, 16, like=like)
    paged, table = new_cache(True, [9, 9], like, 1)
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    q, k = numbers(2, 1, 4, 16), numbers(2, 1, 2, 16)
    tokens = local_tokens(lengths)
    far = lengths * 0 + 100 * dist.get_world_size() + dist.get_rank() + 1  # of a token that is here
    recent = oa.KVCache(2, 8, 2, 16, like=like, k_dtype="int8", recent_window=16)
    for call, error, text in (
        (lambda: decode_sharded(q, recent, seq_lens=lengths), UnsupportedError, "recent_window"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, heads="mine"), ArgumentError, "argument 'heads'"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, heads=lengths), ArgumentError, "argument 'heads'"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths, interleave=0), ArgumentError, "argument 'interleave'"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths.long()), DtypeError, "argument 'seq_lens'"),
        (lambda: decode_sharded(q, cache, seq_lens=[3, 4]), ArgumentError, "argument 'seq_lens'"),
        (lambda: decode_sharded(q[0], cache, seq_lens=lengths), ShapeError, "argument 'q'"),
        (lambda: decode_sharded(q, cache, seq_lens=lengths[:1]), ShapeError, "argument 'q'"),
        (lambda: decode_sharded(q, paged, seq_lens=lengths), ArgumentError, "argument 'block_table'"),
        (lambda: decode_sharded(q[:, :, :2][:, :, [0] * 2 + [1]], cache, seq_lens=lengths), ShapeError, "argument 'q'"),
        (lambda: append_sharded(cache, k, k, seq_lens=far), ArgumentError, "argument 'seq_lens'"),
        (lambda: append_sharded(cache, k, k, seq_lens=lengths, **table), ArgumentError, "argument 'block_table'"),
        (lambda: append_sharded(cache, k, k, seq_lens=lengths, block_table=3), ArgumentError, "received the int 3"),
        (lambda: append_sharded(paged, k, k, seq_lens=lengths), ArgumentError, "argument 'block_table'"),
        (lambda: append_sharded(recent, k, k, seq_lens=lengths), UnsupportedError, "recent_window"),
        (lambda: append_sharded(cache, k[0], k[0], seq_lens=lengths), ShapeError, "argument 'k'"),
        (lambda: append_sharded(cache, k, k, seq_lens=local_tokens(lengths, q_len=2)), ShapeError, "argument 'k'"),
        (lambda: decode_sharded(q, cache, seq_lens=tokens, interleave=2), ArgumentError, "argument 'interleave'"),
        (lambda: local_tokens(lengths, q_len=17), ArgumentError, "argument 'q_len'"),
        (lambda: local_seqlen(-1), ArgumentError, "argument 'seqlen'"),
    ):
        with pytest.raises(error, match=text):
            call()
    told_by_their_own_function()
    contents_are_checked()
    tables_and_tensors_that_are_none()
    scale = 0.1 * (1 + dist.get_rank())
    with pytest.raises(ArgumentError, match="argument 'softmax_scale': expected the same on all ranks"):
        decode_sharded(q, cache, seq_lens=lengths, softmax_scale=scale)
    one = lengths + int(dist.get_rank() == 1)
    with pytest.raises(ArgumentError, match="argument 'seq_lens': expected the same on all ranks"):
        decode_sharded(q, cache, seq_lens=one)
    odd = dist.get_rank() == 1
    with pytest.raises(ArgumentError if odd else CommunicationError, match="argument 'sinks'" if odd else "rank 1 ref"):
        decode_sharded(q, cache, seq_lens=lengths, sinks="none" if odd else torch.zeros(4))
    decode_sharded(q, cache, seq_lens=lengths, softcap=0 if odd else 0.0)
    refuse = dist.get_rank() == 0
    with pytest.raises(ArgumentError if refuse else CommunicationError, match="argument 'q'" if refuse else "rank 0"):
        decode_sharded(None if refuse else q, cache, seq_lens=lengths)
    with pytest.raises(ShapeError if refuse else CommunicationError, match="argument 'q'" if refuse else "rank 0"):
        decode_sharded(q[0] if refuse else q, cache, seq_lens=lengths)
    say("errors")


SUITES: dict[str, tuple[Callable[[], None], ...]] = {
    "caches": (caches, no_tokens, counts, heads_over_ranks, mesh, merging, errors)
}

if __name__ == "__main__":
    common.SUITES.update(SUITES)
    raise SystemExit(common.main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
