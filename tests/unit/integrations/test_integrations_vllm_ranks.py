"""Context parallelism of decoding with vLLM's classes: two ranks in two threads, each with half of the tokens."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests import vllm_host as host  # noqa: E402

from vllm.distributed import parallel_state  # noqa: E402  isort: skip

from omniattn.errors import UnsupportedError  # noqa: E402
from omniattn.integrations import vllm as integration  # noqa: E402

pytestmark = pytest.mark.frameworks
RANKS = 2


class Group:
    """What vLLM's group of ranks does, between threads."""

    world_size = RANKS

    def __init__(self) -> None:
        self._here = threading.local()
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._given: list[Any] = [None] * RANKS

    @property
    def rank_in_group(self) -> int:
        return getattr(self._here, "rank", 0)

    def enter(self, rank: int) -> None:
        self._here.rank = rank

    def abort(self) -> None:
        self._barrier.abort()

    def exchange(self, x: Any) -> list[Any]:
        self._given[self.rank_in_group] = x
        self._barrier.wait()
        everything = list(self._given)
        self._barrier.wait()
        return everything

    def all_gather(self, x: Any, dim: int) -> Any:
        return torch.cat(self.exchange(x), dim)


def combine(o: Any, lse: Any, group: Group, return_lse: bool) -> Any:
    """`cp_lse_ag_out_rs` without Triton: of the heads of all ranks over parts of keys, this rank's over all keys."""
    assert return_lse
    assert lse.is_contiguous()
    parts, logs = zip(*group.exchange((o.double(), lse.double())), strict=True)
    total = torch.stack(logs).logsumexp(0)
    weights = [torch.exp(log - total).nan_to_num(0.0) for log in logs]
    merged = sum(part * weight[..., None] for part, weight in zip(parts, weights, strict=True))
    heads = o.shape[1] // RANKS
    mine = slice(group.rank_in_group * heads, (group.rank_in_group + 1) * heads)
    return merged[:, mine].to(o.dtype).contiguous(), total[:, mine].float().contiguous()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    integration.register()
    from omniattn.integrations.vllm import backend

    made = Group()
    monkeypatch.setattr(parallel_state, "_DCP", made)
    monkeypatch.setattr(backend, "cp_lse_ag_out_rs", combine)
    return made


class Rank:
    """One rank: heads of its own, one kv head as all ranks, every second token of each request."""

    def __init__(self, rank: int, group: Group, made: Any, sinks: Any) -> None:
        group.enter(rank)
        self.rank, self.group = rank, group
        self.layer = host.layer_of(made, f"model.layers.{rank}.attn", num_kv_heads=1, sinks=sinks)
        spec = dataclasses.replace(host.spec_of(self.layer, made), dcp_sharded=True)
        self.pool = host.pool_of(spec)
        kind = self.layer.get_attn_backend().get_builder_cls()
        self.builder = kind(spec, [self.layer.layer_name], made, torch.device("cpu"))

    def step(self, q: Any, k: Any, v: Any, common: Any, places: list[tuple[int, int]], captured: Any = None) -> Any:
        """o of this rank's heads; places: (block, position) of each token as if one rank had all of them.

        With metadata of a captured graph the step is built too, as vLLM does, and the graph's metadata is what runs.
        """
        slots = [
            block * host.BLOCK + at // RANKS % host.BLOCK if at % RANKS == self.rank else -1 for block, at in places
        ]
        mine = dataclasses.replace(common, slot_mapping=torch.tensor(slots))
        self.layer.impl.do_kv_cache_update(self.layer, k, v, self.pool, mine.slot_mapping)
        out = torch.full_like(q, float("nan"))
        built = self.builder.build(0, mine)
        return self.layer.impl.forward(self.layer, q, k, v, self.pool, captured or built, out)


def metadata(counts: list[int], lens: list[int], blocks: list[list[int]]) -> Any:
    """vLLM's metadata of new tokens (counts) of requests that are then lens long; slots are each rank's own."""
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(lens, dtype=torch.int32)
    return host.CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=len(counts),
        num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=max(lens),
        block_table_tensor=torch.tensor(blocks, dtype=torch.int32), slot_mapping=torch.zeros(0),
        seq_lens_cpu_upper_bound=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("with_sinks", [False, True])
def test_ranks_agree_with_one(group: Group, with_sinks: bool) -> None:
    rng = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng).to(torch.float16)

    sinks = [random(host.HEADS) if with_sinks else None for _ in range(RANKS)]
    blocks = {"a": [5, 2, 7], "b": [1, 9, 3]}
    lengths = {"a": 0, "b": 0}
    history: dict[str, list[Any]] = {"a": [], "b": []}
    with host.config() as made:
        made.parallel_config.decode_context_parallel_size = RANKS
        ranks = [Rank(rank, group, made, sinks[rank]) for rank in range(RANKS)]
        assert all(rank.layer.impl.need_to_return_lse_for_decode for rank in ranks)
        for news in ({"a": 20, "b": 1}, {"a": 1, "b": 12}, {"a": 1, "b": 1}, {"a": 1, "b": 1}):
            counts = list(news.values())
            lens = [lengths[name] + news[name] for name in news]
            common = metadata([*counts, 0], [*lens, 0], [*blocks.values(), [0, 0, 0]])
            places = [
                (blocks[name][at // RANKS // host.BLOCK], at)
                for name in news for at in range(lengths[name], lengths[name] + news[name])
            ]  # fmt: skip
            k, v = random(sum(counts), 1, host.DIM), random(sum(counts), 1, host.DIM)
            qs = [random(sum(counts), host.HEADS, host.DIM) for _ in range(RANKS)]
            outs = _together(group, [
                lambda rank=rank, q=q, step=(k, v, common, places): rank.step(q, *step)
                for rank, q in zip(ranks, qs, strict=True)
            ])  # fmt: skip
            at = 0
            for name, count in news.items():
                history[name].append((k[at : at + count], v[at : at + count]))
                lengths[name] += count
                keys, values = (torch.cat(x) for x in zip(*history[name], strict=True))
                for rank in range(RANKS):
                    part = slice(at, at + count)
                    host.check([(outs[rank][part], qs[rank][part], keys, values)], sinks=sinks[rank])
                at += count


def test_a_graph_is_captured_with_older_tokens_where_vllms_dummies_have_none(group: Group) -> None:
    with host.config() as made:
        made.parallel_config.decode_context_parallel_size = RANKS
        builder = Rank(1, group, made, None).builder
        dummy = metadata([1, 1, 1], [1, 1, 1], [[5], [1], [7]])
        assert not builder.build(0, dummy).has_context  # a step that is not captured leaves them out
        captured = builder.build_for_cudagraph_capture(dummy)
        assert captured.has_context
        assert captured.context_lens.tolist() == [0, 0, 0]
        for lens, has_context, older in (([8, 1, 3], True, [3, 0, 1]), ([1, 1, 1], False, [0, 0, 0])):
            built = builder.build(0, metadata([1, 1, 1], lens, [[5], [1], [7]]))
            assert built.has_context is has_context
            assert captured.context_lens.tolist() == older  # what the graph reads, whether the step asks for it or not


@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_captured_graph_serves_steps_with_older_tokens_and_without(group: Group, with_sinks: bool) -> None:
    rng = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=rng).to(torch.float16)

    sinks = [random(host.HEADS) if with_sinks else None for _ in range(RANKS)]
    blocks = [5, 1]
    keys, values = random(2, 4, 1, host.DIM), random(2, 4, 1, host.DIM)
    with host.config() as made:
        made.parallel_config.decode_context_parallel_size = RANKS
        ranks = [Rank(rank, group, made, sinks[rank]) for rank in range(RANKS)]
        dummy = metadata([1, 1], [1, 1], [[block] for block in blocks])
        graphs = [rank.builder.build_for_cudagraph_capture(dummy) for rank in ranks]
        for at in range(4):
            common = metadata([1, 1], [at + 1, at + 1], [[block] for block in blocks])
            step = (keys[:, at], values[:, at], common, [(block, at) for block in blocks])
            qs = [random(2, host.HEADS, host.DIM) for _ in range(RANKS)]
            replayed, eager = (
                _together(group, [
                    lambda rank=rank, q=q, step=step, graph=graph: rank.step(q, *step, graph)
                    for rank, q, graph in zip(ranks, qs, captured, strict=True)
                ])
                for captured in (graphs, [None] * RANKS)
            )  # fmt: skip
            for rank in range(RANKS):
                assert torch.equal(replayed[rank], eager[rank])  # with no older tokens too, which only eager leaves out
                host.check([
                    (replayed[rank][i : i + 1], qs[rank][i : i + 1], keys[i, : at + 1], values[i, : at + 1])
                    for i in range(2)
                ], sinks=sinks[rank])  # fmt: skip


def _together(group: Group, works: list[Any]) -> list[Any]:
    """Results of all ranks; the first error of one ends the others."""
    results: list[Any] = [None] * RANKS
    errors: list[Exception] = []

    def run(rank: int) -> None:
        group.enter(rank)
        try:
            results[rank] = works[rank]()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_what_ranks_do_not_serve(group: Group) -> None:
    with host.config() as made:
        made.parallel_config.decode_context_parallel_size = RANKS
        with pytest.raises(UnsupportedError, match="a sliding window with decode context parallelism"):
            host.layer_of(made, num_kv_heads=1, per_layer_sliding_window=8)
        with pytest.raises(UnsupportedError, match="another layer's KV cache with decode context parallelism"):
            host.layer_of(made, num_kv_heads=1, kv_sharing_target_layer_name="model.layers.0.attn")
        with pytest.raises(UnsupportedError, match="cross attention with decode context parallelism"):
            host.layer_of(made, num_kv_heads=1, attn_type="encoder_decoder")
        rank = Rank(0, group, made, None)
        assert not rank.builder.supports_draft_decode_metadata_update
