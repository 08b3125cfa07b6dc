"""What the backend of vLLM calls, on a GPU, with vLLM's layouts, padding and graphs; vLLM itself is not needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.integrations.vllm import calls  # noqa: E402
from tests.vllm_steps import LAYOUTS, Steps, layer_of, reference  # noqa: E402

pytestmark = pytest.mark.gpu

ATOL = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
#: A prompt and single tokens; chunks beside them; single tokens alone.
STORY: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 130), ("b", 5), ("c", 1)),
    (("a", 1), ("b", 1), ("c", 70), ("d", 33)),
    (("a", 1), ("b", 1), ("c", 1), ("d", 4)),
    (("d", 1), ("a", 1), ("b", 1), ("c", 1)),
)


def steps(layer: Any, dtype: Any = torch.bfloat16, **options: Any) -> Steps:
    return Steps(layer, torch.device("cuda"), dtype, **{"rows": 160, **options})


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("block", [16, 64])
def test_layouts(order: str, block: int) -> None:
    dtype = torch.bfloat16 if block == 16 else torch.float16
    run = steps(layer_of(), dtype, order=order, block=block)
    for news in STORY:
        run.prepare(*news)
        run.run(run.exact())
        run.check(ATOL[dtype])


@pytest.mark.parametrize("dim", [64, 72, 256])
def test_head_sizes(dim: int) -> None:
    run = steps(layer_of(dim=dim, heads=4))
    for news in STORY:
        run.prepare(*news)
        run.run(run.exact())
        run.check(ATOL[torch.bfloat16])


def test_one_kv_head_whose_stride_is_any() -> None:
    """Tensor parallelism leaves one head, and torch any stride of a dimension of extent 1."""
    run = steps(layer_of(kv_heads=1))
    blocks, _, block, row = run.pool.shape
    run.pool = run.pool.as_strided(run.pool.shape, (block * row, 7, row, 1), run.pool.storage_offset())
    assert blocks > 1
    for news in STORY:
        run.prepare(*news)
        run.run(run.exact())
        run.check(ATOL[torch.bfloat16])


@pytest.mark.parametrize("name", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
@pytest.mark.parametrize("order", ["LBNHC", "BHLNC"])
def test_formats(name: str, order: str) -> None:
    scales = tuple(torch.tensor(x, device="cuda") for x in ([0.5, 0.25], [2.0, 1.0]))
    if order == "BHLNC":
        scales = tuple(x[0] for x in scales)  # one for all heads, of no dimensions
    run = steps(layer_of(name), order=order, scales=scales)
    for news in STORY:
        run.prepare(*news)
        run.run(run.exact())
        run.check(5e-2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 50])
def test_options_and_padding(causal: bool, window: int | None) -> None:
    sinks = torch.arange(8, device="cuda").sub(4).to(torch.bfloat16)
    run = steps(layer_of(window=window, softcap=15.0), sinks=sinks, order="BLNHC")
    for news in STORY:
        run.prepare(*news)
        run.run(run.whole(causal=causal))
        run.check(ATOL[torch.bfloat16], causal=causal)
        run.check_padding()


@pytest.mark.parametrize("window", [None, 20])
def test_encoders(window: int | None) -> None:
    run = steps(layer_of(window=window))
    run.prepare(("a", 130), ("b", 5), ("c", 1))
    step = run.exact()
    rows = step.num_actual_tokens
    calls.attend_encoder(run.q[:rows], run.k[:rows], run.v[:rows], run.layer, step, False, None, run.out[:rows])
    run.check(ATOL[torch.bfloat16], causal=False)


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_batch_invariance(name: str) -> None:
    """Bits of a request do not depend on the others of its step, nor on what a graph pads."""
    alone, among = (steps(layer_of(name, deterministic=True), seed=3) for _ in range(2))
    for tokens in (100, 1, 17, 1):
        alone.prepare(("a", tokens))
        alone.run(alone.exact())
        among.prepare(("a", tokens), ("b", 20), ("c", 1))
        # The same values: a's rows are the first ones.
        among.fused[:tokens].copy_(alone.fused[:tokens])
        among.run(among.whole())
        assert torch.equal(alone.out[:tokens], among.out[:tokens])


def captured(run: Steps, step: calls.Step) -> Any:
    """A CUDA graph of a step; what the warm-up writes are the same tokens."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run.run(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run.run(step)
    return graph


@pytest.mark.parametrize("name", ["auto", "fp8", "int8_per_token_head"])
@pytest.mark.parametrize("window", [None, 40])
def test_one_graph_for_any_mixture(name: str, window: int | None) -> None:
    """Captured as vLLM captures graphs for mixed batches: max_query_len is all rows. Replayed with other requests."""
    run = steps(layer_of(name, window=window), order="LBHNC")
    run.prepare(("a", 27), ("b", 27), ("c", 27), ("d", 27))
    graph = captured(run, run.whole())
    graph.replay()
    run.check(5e-2)
    for news in (
        (("a", 1), ("b", 1), ("c", 1), ("d", 1)),
        (("e", 150), ("a", 1)),
        (("a", 1), ("f", 64), ("b", 8), ("e", 1), ("c", 1)),
        (("e", 1),),
        (("a", 1), ("b", 3), ("c", 1), ("d", 1), ("e", 100), ("f", 2)),
    ):
        run.prepare(*news)
        graph.replay()
        run.check(5e-2)
        run.check_padding()


@pytest.mark.parametrize("drafts", [0, 3])
def test_one_graph_for_decodes(drafts: int) -> None:
    """Captured as graphs of uniform batches: max_query_len is 1 and the drafts. Fewer of both replay."""
    many = 6
    run = steps(layer_of(), rows=160, most=many)
    for news in STORY[:2]:
        run.prepare(*news)
        run.run(run.exact())
    run.prepare(("e", 90), ("f", 2))
    run.run(run.exact())
    rows = many * (1 + drafts)
    run.prepare(*((name, 1 + drafts) for name in "abcdef"))
    step = dataclasses.replace(run.whole(1 + drafts), num_actual_tokens=rows, slot_mapping=run.slots[:rows])
    graph = captured(run, step)
    graph.replay()
    run.check(ATOL[torch.bfloat16])
    for news in ((("f", 1 + drafts), ("a", 1)), (("c", 1),), tuple((name, 1) for name in "fedcba")):
        run.prepare(*news)
        graph.replay()
        run.check(ATOL[torch.bfloat16])


def test_a_step_waits_for_nothing() -> None:
    run = steps(layer_of())
    run.prepare(*STORY[0])
    step = run.exact()
    run.run(step)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.run(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_ranks_of_context_parallelism() -> None:
    """Two ranks, one after the other: each has every second token of each request, and heads of its own."""
    ranks, heads, dim = 2, 4, 128
    layer = layer_of(heads=heads, kv_heads=1)
    runs = [steps(layer, seed=5) for _ in range(ranks)]
    history: dict[str, list[Any]] = {}
    for news in STORY:
        for rank, run in enumerate(runs):
            run.prepare(*news)
            if rank:
                run.fused[:, heads:].copy_(runs[0].fused[:, heads:])  # ranks have the same keys and values
                run.fused[:, :heads].neg_()  # and other queries
        step = runs[0].exact()
        rows = step.num_actual_tokens
        everybody = torch.cat([run.q[:rows] for run in runs], 1)
        older = step.seq_lens - step.query_start_loc.diff()
        parts: list[Any] = [None] * ranks

        for how in (_keep, _combine):
            for rank, run in enumerate(runs):
                local = (older - rank + ranks - 1).div(ranks, rounding_mode="floor").int()
                slots = _local_slots(run, news, rank, ranks)
                calls.write(run.pool, layer, run.k, run.v, slots, run.scales)
                divided = dataclasses.replace(step, block_table=run.table[: len(news)], context_lens=local)
                calls.attend_divided(
                    run.q[:rows], run.k[:rows], run.v[:rows], run.pool, layer, divided, run.out[:rows], None,
                    lambda q, whole=everybody: whole, functools.partial(how, parts, rank), run.scales,
                )  # fmt: skip
        at = 0
        for name, count in news:
            part = slice(at, at + count)
            history.setdefault(name, []).append((runs[0].k[part].cpu().clone(), runs[0].v[part].cpu().clone()))
            k, v = (torch.cat(x) for x in zip(*history[name], strict=True))
            for run in runs:
                want = reference(run.q[part].cpu(), k, v, scale=dim**-0.5)
                torch.testing.assert_close(run.out[part].cpu().double(), want, rtol=3e-2, atol=3e-2)
            at += count


def _keep(parts: list[Any], rank: int, o: Any, lse: Any) -> Any:
    """What a rank gives to the others; of the result nothing is used."""
    parts[rank] = (o.double(), lse.double())
    return _of_rank(rank, o, lse)


def _combine(parts: list[Any], rank: int, o: Any, lse: Any) -> Any:
    """Of all ranks' parts, the results of a rank's heads."""
    total = torch.stack([log for _, log in parts]).logsumexp(0)
    merged = sum(o * (log - total).exp().nan_to_num(0.0)[..., None] for o, log in parts)
    return _of_rank(rank, merged.to(o.dtype), total.float())


def _of_rank(rank: int, o: Any, lse: Any) -> Any:
    heads = o.shape[1] // 2
    mine = slice(rank * heads, (rank + 1) * heads)
    return o[:, mine].contiguous(), lse[:, mine].contiguous()


def _local_slots(run: Steps, news: Any, rank: int, ranks: int) -> Any:
    """Slots of the tokens that a rank keeps: token t is number t // ranks of rank t % ranks; -1 of the others."""
    slots = []
    for name, count in news:
        first = run.length(name) - count
        for t in range(first, first + count):
            at = t // ranks
            slots.append(run.blocks[name][at // run.block] * run.block + at % run.block if t % ranks == rank else -1)
    return torch.tensor(slots, device="cuda")
