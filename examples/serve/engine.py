"""The loop: plan a step, bring its numbers to the GPU in one copy, run its CUDA graph, hand out what was chosen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from network import Network, PagedAttention, Step
from scheduler import Part, Request, Scheduler
from torch import Tensor

import omniattn as oa


@dataclass(frozen=True)
class Options:
    """Sizes of an engine."""

    num_blocks: int = 4096  # of each layer's cache
    block_size: int = 16
    swap_blocks: int = 0  # of the host's memory, for requests that have to leave the cache
    max_tokens: int = 2048  # of a request
    max_requests: int = 256  # of a step
    max_rows: int = 1024
    drafts: int = 3  # guessed tokens of a request and step
    kv: str = "bf16"  # what keys and values are kept in; also "fp16", "fp8", "int8", "int4"
    graphs: bool = True  # one for each bucket and for steps with and without prompts
    buckets: Sequence[int] = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # rows that a step is padded to
    attention: dict[str, Any] = field(default_factory=dict)  # e.g. {"deterministic": True}


class Bucket:
    """Steps of up to ``rows`` rows: their numbers side by side in one array of the host and one of the GPU."""

    def __init__(self, rows: int, requests: int, wanted: int, columns: int, longest: int, device: torch.device) -> None:
        sizes = [requests * columns, rows, rows, wanted, requests, requests + 1]
        self.host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.there = self.host.to(device)
        self.arrays = [x.numpy() for x in self.host.split(sizes)]
        table, *others = self.there.split(sizes)
        self.step = Step(table.view(requests, columns), *others, longest)
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, parts: Sequence[Part], table: np.ndarray) -> None:
        """Write a step's numbers, and begin to copy them."""
        ends = list(itertools.accumulate(len(part.tokens) for part in parts))
        values = (
            table.ravel(), [token for p in parts for token in p.tokens],
            [position for p in parts for position in range(p.begin, p.begin + len(p.tokens))],
            [row for p, end in zip(parts, ends, strict=True) for row in range(end - p.wanted, end)],
            [p.begin + len(p.tokens) for p in parts], [0, *ends],
        )  # fmt: skip
        for array, value, padding in zip(self.arrays, values, (0, 0, 0, 0, 0, ends[-1]), strict=True):
            array[: len(value)], array[len(value) :] = value, padding
        self.there.copy_(self.host, non_blocking=True)  # on the CPU they are one


class Engine:
    """A network, its caches and a scheduler. ``attention`` makes what `PagedAttention` is, of the same arguments."""

    def __init__(self, network: Network, options: Options, attention: Callable[..., Any] = PagedAttention) -> None:
        o, like, self.options, self.network, self.device = options, network.like, options, network, network.like.device
        if (o.graphs or o.buckets) and max(o.buckets, default=0) < o.max_rows:
            raise ValueError(f"buckets: expected one of max_rows = {o.max_rows}, received {o.buckets}")
        self.attention = attention(network.config, o.num_blocks, o.block_size, o.max_tokens, like, o.kv, **o.attention)
        space = oa.SwapSpace(self.attention.caches, o.swap_blocks) if o.swap_blocks else None
        self.blocks = oa.BlockManager(o.num_blocks, o.block_size, swap_space=space)
        self.scheduler = Scheduler(self.blocks, o.max_requests, o.max_rows, o.max_tokens, o.drafts)
        self.columns, self.graphs = -(-o.max_tokens // o.block_size), o.graphs and self.device.type == "cuda"
        self.buckets: dict[tuple[int, bool], Bucket] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.graphs else None

    @torch.no_grad()
    def step(self) -> list[tuple[Request, list[int]]]:
        """Run one step; the requests that got tokens, with these. A request that has ended has a ``reason``."""
        parts, copies, events = self.scheduler.plan()
        if not parts:
            return []
        for event in events:
            event.wait()
        for cache in self.attention.caches if copies else ():
            oa.copy_blocks(cache, copies)
        counts = [len(part.tokens) for part in parts]
        bucket = self._bucket(sum(counts), max(counts))
        bucket.fill(parts, self.blocks.block_table([part.request for part in parts], self.columns))
        if self.graphs and bucket.graph is None:
            self._capture(bucket)
        self._compute(bucket) if bucket.graph is None else bucket.graph.replay()
        return self.scheduler.finish(parts, self._choose(parts, bucket))

    @torch.no_grad()
    def warm_up(self) -> None:
        """Capture the graphs of all steps that there can be and have not been."""
        for rows, longest in [(n, longest) for n in self.options.buckets for longest in (1, n) if self.graphs]:
            if (bucket := self._bucket(rows, longest)).graph is None:
                self._capture(bucket)

    def _bucket(self, rows: int, longest: int) -> Bucket:
        o, few = self.options, longest <= 1 + self.options.drafts
        rows = min((size for size in o.buckets if size >= rows), default=rows)
        if (rows, few) in self.buckets:
            return self.buckets[rows, few]
        requests, wanted = min(rows, o.max_requests), min(rows, o.max_requests * (1 + o.drafts))
        bucket = Bucket(rows, requests, wanted, self.columns, 1 + o.drafts if few else rows, self.device)
        return self.buckets.setdefault((rows, few), bucket) if o.buckets else bucket

    def _compute(self, bucket: Bucket) -> None:
        bucket.logits = self.network(bucket.step, self.attention)
        bucket.best = bucket.logits.argmax(-1)

    def _capture(self, bucket: Bucket) -> None:
        self._compute(bucket)  # loads kernels, which a capture may not
        bucket.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bucket.graph, pool=self.pool, capture_error_mode="thread_local"):
            self._compute(bucket)

    def _choose(self, parts: Sequence[Part], bucket: Bucket) -> list[int]:
        count, drawn = 0, []
        for r, tokens, begin, wanted in parts:
            if r.temperature > 0:
                end = begin + len(tokens) + 1
                chances = [random.Random(f"{r.seed}/{position}").random() for position in range(end - wanted, end)]
                drawn += [(count + i, (r.temperature, r.top_p, chance)) for i, chance in enumerate(chances)]
            count += wanted
        if drawn:
            rows = torch.tensor([row for row, _ in drawn], device=self.device)
            numbers = torch.tensor([x for _, x in drawn], dtype=torch.float32, device=self.device)
            bucket.best[rows] = draw(bucket.logits[rows].float(), *numbers.unbind(1))
        return bucket.best[: max(count, 1)].tolist()[:count]  # waits, always: the next step writes into these arrays


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Tokens (n,) of the likeliest that make up ``top_p``: those at which the running sum reaches ``uniform``."""
    odds, order = torch.softmax(logits / temperature.clamp(min=1e-3)[:, None], -1).sort(descending=True, stable=True)
    odds = odds * (odds.cumsum(-1) - odds < top_p.clamp(min=1e-9)[:, None])  # one stays, also if top_p rounds to 0
    sums = odds.cumsum(-1)
    at = torch.minimum((sums <= uniform[:, None] * sums[:, -1:]).sum(-1), (odds > 0).sum(-1) - 1)
    return order.gather(-1, at.clamp(min=0)[:, None])[:, 0]  # none of odds that are NaN is above 0
