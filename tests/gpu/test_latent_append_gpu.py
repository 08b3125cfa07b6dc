"""`append` to latent caches: the bytes of the reference, in every format and by every way to say where tokens go."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DIM, DIM_V = 576, 512
SCALE = 0.0057
#: Formats of rows, and element types of tokens.
KINDS = [
    ("bf16", "bfloat16"), ("fp16", "float16"), ("fp8", "bfloat16"), ("fp8", "float16"), ("fp8_ds_mla", "bfloat16"),
    ("fp8_ds_mla", "float16"),
]  # fmt: skip


def tokens(count: int, dtype: str, seed: int = 0, width: int = DIM) -> Any:
    """On the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return (x * (0.5 + 3 * torch.rand(count, 1, generator=generator))).to(getattr(torch, dtype))


def caches(k_dtype: str, dtype: str, blocks: int, size: int) -> list[Any]:
    """One on the CPU and one on the GPU, all bits of which are set."""
    made = []
    for device in ("cpu", "cuda"):
        like = torch.zeros(1, dtype=getattr(torch, dtype), device=device)
        scale = torch.tensor([SCALE], dtype=torch.float32, device=device) if k_dtype == "fp8" else None
        cache = oa.PagedKVCache(blocks, size, 1, DIM, like=like, k_dtype=k_dtype, head_dim_v=DIM_V, k_scale=scale)
        cache.k.view(torch.uint8).fill_(255)
        made.append(cache)
    return made


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def different(first: Any, second: Any, k_dtype: str) -> int:
    """Bytes that differ; NaN of 16 bits is NaN."""
    a, b = (x.k.cpu().view(torch.uint8).flatten(0, 2) for x in (first, second))
    behind = {"fp8": DIM, "fp8_ds_mla": 528}.get(k_dtype, 0)
    found = int((a[:, :behind] != b[:, :behind]).sum())
    if behind < DIM:
        kind = torch.float16 if k_dtype == "fp16" else torch.bfloat16
        x, y = (z[:, behind:].contiguous().view(kind) for z in (a, b))
        unlike = x.view(torch.int16) != y.view(torch.int16)
        found += int((unlike & ~(x.isnan() & y.isnan())).sum())
    return found


def angles(count: int, pairs: int = 32) -> dict[str, Any]:
    x = 6 * torch.rand(count, pairs, generator=torch.Generator().manual_seed(5))
    return {"cos": x.cos(), "sin": x.sin()}


def places(lengths: list[int], size: int, seed: int = 0) -> tuple[Any, int, Any]:
    """Block table, blocks in all, and the slot of each token."""
    counts = [-(-n // size) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots = []
    for b, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots += [int(table[b, i // size]) * size + i % size for i in range(n)]
    return table, sum(counts) + 2, torch.tensor(slots)


@pytest.mark.parametrize(("k_dtype", "dtype"), KINDS)
@pytest.mark.parametrize("size", [64, 16, 1, 7])
def test_bytes_are_those_of_the_reference(k_dtype: str, dtype: str, size: int) -> None:
    lengths = [130, 0, 1, 77, 300]
    table, blocks, slots = places(lengths, size)
    x = tokens(sum(lengths), dtype)
    x[3, :200] = -0.0
    x[5, 7], x[6, 300], x[7, 575], x[8, 130:140], x[9] = float("inf"), float("nan"), -float("inf"), float("nan"), 0
    if dtype == "bfloat16":
        x[20:90] *= torch.exp2(torch.randint(-130, 120, (70, 1)).float()).to(x.dtype)
    k, k_pe = x[:, :DIM_V], x[:, None, DIM_V:]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])
    some = slots.clone()
    some[::7] = -1
    by_position = {"seq_lens": torch.tensor(lengths, dtype=torch.int32), "cu_seqlens": starts, "block_table": table}
    by_slot = {"slot_mapping": some, "positions": positions}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (x, by_position),
        (k, {"k_pe": k_pe, **by_position, **angles(300)}),
        (k, {"k_pe": k_pe, **by_slot, **angles(300, 11), "rope": "interleaved"}),
        (k, {"k_pe": k_pe, **by_slot, **angles(300, 12)}),
        (x, {"slot_mapping": some[:200].int()}),
    ]
    columns = -(-130 // size)
    of_batch = torch.arange(5 * columns, dtype=torch.int32).view(5, -1)
    lens = torch.tensor([130, 12, 13, 77, 20], dtype=torch.int32)
    calls.append((x[:60].view(5, 12, DIM), {"seq_lens": lens, "block_table": of_batch}))
    for i, (given, options) in enumerate(calls):
        blocks = max(blocks, 5 * columns)
        host, device = caches(k_dtype, dtype, blocks, size)
        oa.append(host, given, **options)
        oa.append(device, given.cuda(), **on_gpu(options))
        assert different(host, device, k_dtype) == 0, i


@pytest.mark.parametrize(("k_dtype", "dtype"), KINDS)
def test_pools_of_an_engine(k_dtype: str, dtype: str) -> None:
    """Layers in one memory, gaps between rows; k and k_pe in one wide row. What is not a token's stays as it is."""
    kind = {"fp8": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}.get(k_dtype, getattr(torch, dtype))
    width = 656 if k_dtype == "fp8_ds_mla" else DIM
    wide = torch.zeros(50, 2112, dtype=getattr(torch, dtype))
    wide[:, 1536:] = tokens(50, dtype, seed=3)
    slots = torch.randperm(9 * 48, generator=torch.Generator().manual_seed(1))[:50]
    slots[4] = -1
    memories = []
    for device in ("cpu", "cuda"):
        memory = torch.zeros(9, 3, 48, 1, width + 16, dtype=kind, device=device)
        memory.view(torch.uint8).fill_(255)
        scale = {"k_scale": torch.tensor([SCALE], device=device)} if k_dtype == "fp8" else {}
        cache = oa.PagedKVCache.from_arrays(memory[:, 1, ..., :width], head_dim_v=DIM_V, **scale)
        k = wide.to(device)
        oa.append(cache, k[:, 1536:2048], k_pe=k[:, 2048:], slot_mapping=slots.to(device))
        memories.append(memory.view(torch.uint8).cpu())
    assert torch.equal(*memories)
    assert int((memories[0] != 255).any(-1).sum()) == 49


def meant(cache: Any, k_dtype: str, dtype: Any) -> Any:
    """Rows (blocks, tokens, channels) of a cache as kernels read them, rounded to the type of q."""
    data = cache.k[:, :, 0]
    if k_dtype == "fp8":
        return (data.view(torch.float8_e4m3fn).float() * cache.k_scale).to(dtype)
    if k_dtype != "fp8_ds_mla":
        return data
    codes = data[..., :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = data[..., 512:528].contiguous().view(torch.float32)
    rest = data[..., 528:].contiguous().view(torch.bfloat16)
    return torch.cat([(codes * scales[..., None]).flatten(-2).to(dtype), rest.to(dtype)], -1)


@pytest.mark.parametrize(("k_dtype", "dtype"), KINDS)
def test_what_was_appended_is_decoded(k_dtype: str, dtype: str) -> None:
    """Against float64, after blocks were copied."""
    lengths = [300, 65, 1]
    table, blocks, _ = places(lengths, 64)
    x, q = tokens(sum(lengths), dtype).cuda(), tokens(3 * 16, dtype, seed=9).view(3, 1, 16, DIM).cuda()
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    lens, table = torch.tensor(lengths, dtype=torch.int32, device="cuda"), table.cuda()
    # Products with it are exact, whether a kernel scales rows or scores.
    scale = torch.tensor([2**-5], device="cuda") if k_dtype == "fp8" else None
    cache = oa.PagedKVCache(2 * blocks, 64, 1, DIM, like=x, k_dtype=k_dtype, head_dim_v=DIM_V, k_scale=scale)
    oa.append(cache, x, seq_lens=lens, cu_seqlens=starts, block_table=table)
    oa.copy_blocks(cache, [(i, blocks + i) for i in range(blocks)])
    o = oa.decode(q, cache, seq_lens=lens, block_table=table + blocks, softmax_scale=0.02)
    rows = meant(cache, k_dtype, x.dtype)
    for b, n in enumerate(lengths):
        keys = rows[table[b].long() + blocks].flatten(0, 1)[:n].double()
        near = (keys - x[starts[b] : starts[b + 1]].double()).norm() / keys.norm()
        assert near < 0.04, float(near)
        want = torch.softmax(0.02 * q[b, 0].double() @ keys.T, -1) @ keys[:, :DIM_V]
        error = (o[b, 0].double() - want).norm() / want.norm()
        assert error < (6e-3 if dtype == "bfloat16" else 1e-3), float(error)


def test_a_captured_graph_follows_the_numbers() -> None:
    host, device = caches("fp8_ds_mla", "bfloat16", 10, 16)
    x, slots = tokens(8, "bfloat16").cuda(), torch.arange(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    oa.append(device, x, slot_mapping=slots)
    with torch.cuda.graph(graph):
        oa.append(device, x, slot_mapping=slots)
    for seed in (1, 2):
        x.copy_(tokens(8, "bfloat16", seed=seed))
        slots.copy_(torch.randperm(160, generator=torch.Generator().manual_seed(seed))[:8])
        device.k.fill_(255)
        host.k.fill_(255)
        graph.replay()
        oa.append(host, x.cpu(), slot_mapping=slots.cpu())
        assert different(host, device, "fp8_ds_mla") == 0


@pytest.mark.parametrize("k_dtype", ["bf16", "fp8", "fp8_ds_mla"])
def test_compiled(k_dtype: str) -> None:
    plain, compiled = caches(k_dtype, "bfloat16", 10, 16)[1], caches(k_dtype, "bfloat16", 10, 16)[1]
    x, slots = tokens(8, "bfloat16").cuda(), torch.arange(8, device="cuda") * 3

    def step(cache: Any, x: Any, slots: Any) -> Any:
        oa.append(cache, x[:, :DIM_V], k_pe=x[:, DIM_V:], slot_mapping=slots)
        return x + 1

    step(plain, x, slots)
    run = torch.compile(lambda x, slots: step(compiled, x, slots), fullgraph=True, backend="aot_eager")
    run(x, slots)
    assert different(plain, compiled, k_dtype) == 0
    assert compiled.k.view(torch.uint8)[0, 3].ne(255).any()


def test_places_outside_of_the_cache_are_not_written() -> None:
    cache = caches("fp16", "float16", 4, 5)[1]
    x = tokens(6, "float16").cuda()
    oa.append(cache, x, slot_mapping=torch.tensor([-1, 20, 3, 1 << 40, -(1 << 40), 4], device="cuda"))
    written = cache.k.view(torch.uint8).ne(255).any(-1)[..., 0].nonzero().tolist()
    assert written == [[0, 3], [0, 4]]
    lens, table = torch.tensor([3, 9, 1], dtype=torch.int32), torch.tensor([[9], [0], [-1]], dtype=torch.int32)
    before = cache.k.view(torch.uint8).clone()
    oa.append(cache, x.view(3, 2, DIM), seq_lens=lens.cuda(), block_table=table.cuda())
    assert torch.equal(before, cache.k.view(torch.uint8))


def test_more_than_2_31_bytes_away() -> None:
    pool = torch.empty(70000, 64, 1, 656, dtype=torch.uint8, device="cuda")
    cache = oa.PagedKVCache.from_arrays(pool, head_dim_v=DIM_V)
    host = caches("fp8_ds_mla", "bfloat16", 1, 64)[0]
    x = tokens(64, "bfloat16")
    oa.append(cache, x.cuda(), slot_mapping=torch.arange(64, device="cuda") + 69999 * 64)
    oa.append(host, x, slot_mapping=torch.arange(64))
    assert torch.equal(pool[69999].cpu(), host.k[0])


def test_repeated_calls_take_the_fast_path() -> None:
    """The same calls with other arrays, of which one is not aligned: it raises as the first one would."""
    cache = caches("bf16", "bfloat16", 10, 16)[1]
    wide = torch.zeros(8, 640, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(8, device="cuda")
    for i in range(4):
        wide.copy_(tokens(8, "bfloat16", seed=i, width=640))
        oa.append(cache, wide[:, :512], k_pe=wide[:, 512:576], slot_mapping=slots)
        assert torch.equal(cache.k.view(-1, DIM)[:8], wide[:, :DIM])
    with pytest.raises(oa.errors.ArgumentError, match="'k_pe'"):
        oa.append(cache, wide[:, :512], k_pe=wide[:, 513:577], slot_mapping=slots)
    rows = cache.k.view(-1, DIM)[:8]
    with pytest.raises(oa.errors.ArgumentError, match="shares memory"):
        oa.append(cache, rows[:, :512], k_pe=wide[:, 512:576], slot_mapping=slots)
