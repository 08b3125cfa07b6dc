"""What the backend of vLLM calls for latent attention, on a GPU, with its layouts, padding and graphs; without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.vllm_mla_steps import PROMPTS, Steps, captured  # noqa: E402

pytestmark = pytest.mark.gpu

FORMATS = ["auto", "fp8", "fp8_ds_mla"]


def after_prompts(*arguments: Any, **options: Any) -> Steps:
    run = Steps(*arguments, **options)
    for news in PROMPTS:
        run.prepare(*news)
    return run


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [4, 16, 128])
def test_prompts(name: str, heads: int) -> None:
    run = Steps(name, heads=heads)
    for news in PROMPTS:
        run.prepare(*news)
        run.check(run.prompts(), prompts=True)


def test_prompts_in_float16() -> None:
    run = Steps(dtype=torch.float16)
    for news in PROMPTS:
        run.prepare(*news)
        run.check(run.prompts(parts=3), prompts=True, bound=3e-3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_single_tokens_and_drafts(name: str, block: int, heads: int) -> None:
    run = after_prompts(name, heads=heads, block=block, blocks=40 * 64 // block)
    for news in ((("a", 1), ("b", 1), ("c", 1), ("d", 1)), (("c", 4), ("a", 1), ("b", 3)), (("d", 8),)):
        run.prepare(*news)
        o = run.decode(max(count for _, count in news))
        run.check(run.up(o))
        assert not o[sum(count for _, count in news) :].any()  # rows of nobody


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_one_graph_for_decodes(name: str, drafts: int) -> None:
    run = after_prompts(name, rows=4 * (1 + drafts), most=4)
    run.prepare(*((x, 1 + drafts) for x in "abcd"))
    graph, o = captured(lambda: run.decode(1 + drafts))
    graph.replay()
    run.check(run.up(o))
    for news in ((("d", 1), ("a", 1 + drafts)), (("c", 1),), tuple((x, 1) for x in "dcba")):
        run.prepare(*news)
        graph.replay()
        run.check(run.up(o))
        assert not o[sum(count for _, count in news) :].any()


def test_results_of_parts_of_the_tokens() -> None:
    """Decode context parallelism: LSE merges what ranks have; a rank without tokens of a request has -inf."""
    run = after_prompts(heads=32)
    run.prepare(("a", 1), ("b", 1))
    whole, lse = run.decode(1, return_lse=True)
    assert lse.shape == (run.q.shape[0], 32)
    assert lse.dtype == torch.float32
    rows = run.exact("a").double()
    scores = torch.einsum("hd,kd->hk", run.q[0].cpu().double(), rows) * run.latent.scale
    assert (lse[0].cpu().double() - scores.logsumexp(-1)).abs().max() < 2e-3
    run.lens[0] = 0
    o, lse = run.decode(1, return_lse=True)
    assert lse[0].isneginf().all()
    assert not o[0].any()
    assert torch.equal(o[1], whole[1])


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_batch_invariance(name: str) -> None:
    """Bits of a request do not depend on the others of its step."""
    alone, among = (after_prompts(name, heads=16, deterministic=True, seed=3) for _ in range(2))
    for _ in range(2):
        alone.prepare(("a", 1))
        among.prepare(("a", 1), ("b", 1), ("d", 1))
        blocks = among.blocks["a"]
        at = among.length("a") - 1
        place = (blocks[at // 64], at % 64)
        own = alone.cache[alone.blocks["a"][at // 64], at % 64]
        among.cache[place] = own
        among.q[0] = alone.q[0]
        assert torch.equal(alone.decode(1)[0], among.decode(1)[0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("heads", "topk"), [(16, 128), (128, 256), (64, 2048)])
def test_lists_of_rows(name: str, heads: int, topk: int) -> None:
    run = after_prompts(name, heads=heads)
    for news in ((("a", 1), ("b", 1), ("c", 1)), (("d", 40), ("a", 2))):
        run.prepare(*news)
        lists, places, counts = run.choose(topk)
        o, lse = run.sparse(places, counts, return_lse=True)
        run.check(run.up(o), lists=lists)
        assert lse.shape == (len(lists), heads)
        assert lse.isfinite().all()


def test_one_graph_for_lists_of_rows() -> None:
    run = after_prompts(heads=64)
    run.prepare(("a", 1), ("b", 1), ("c", 1))
    lists, places, counts = run.choose(256)
    q = run.weights.absorbed(run.q_heads).cuda()
    from omniattn.integrations.vllm import latent_calls

    graph, o = captured(
        lambda: latent_calls.attend_rows(
            q, run.cache, run.latent, indices=places, lengths=counts, k_scale=run.scale
        )
    )  # fmt: skip
    for _ in range(2):
        graph.replay()
        run.check(run.up(o), lists=lists)
        run.prepare(("c", 1), ("d", 1), ("a", 1))
        lists, others, of_others = run.choose(256)
        places.copy_(others)
        counts.copy_(of_others)
        q.copy_(run.weights.absorbed(run.q_heads))


def test_a_step_waits_for_nothing() -> None:
    run = after_prompts("fp8")
    run.prepare(("a", 1), ("b", 2))
    _, places, counts = run.choose(128)
    q = run.weights.absorbed(run.q_heads).cuda()
    from omniattn.integrations.vllm import latent_calls

    def step() -> None:
        run.decode(2, return_lse=True)
        latent_calls.attend_rows(q, run.cache, run.latent, indices=places, lengths=counts, k_scale=run.scale)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
