"""The attentions that bench.py runs the same loop with: omniattn's, torch's SDPA and FlashAttention-3.

All of them write keys and values by `omniattn.append`; SDPA and FlashAttention-3 read 16-bit pages of torch's arrays.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from network import Config, PagedAttention, Step
from torch import Tensor
from torch.nn import functional

import omniattn as oa

try:
    from flash_attn_interface import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PagesOfTorch(PagedAttention):
    """Pages (num_blocks, block_size, num_kv_heads, head_dim), as other libraries read them."""

    def __init__(
        self, config: Config, num_blocks: int, block_size: int, max_tokens: int, like: Tensor, kv: str, **options: Any
    ) -> None:
        super().__init__(config, 1, block_size, max_tokens, like, kv, **options)
        if kv not in DTYPES:
            raise ValueError(f"kv: expected one of {', '.join(DTYPES)} for {type(self).__name__}, received {kv!r}")
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.pages = {}
        for i in range(config.num_layers):
            # Zeros: SDPA multiplies what it masks.
            k, v = (torch.zeros(shape, dtype=DTYPES[kv], device=like.device) for _ in "kv")
            self.caches[i] = oa.PagedKVCache.from_arrays(k, v)
            self.pages[self.caches[i]] = k, v


class Fa3(PagesOfTorch):
    """FlashAttention-3: one call, as omniattn's."""

    def attend(self, cache: oa.PagedKVCache, q: Tensor, step: Step, **places: Tensor) -> Tensor:
        """Attention over the pages."""
        k, v = self.pages[cache]
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=step.seq_lens, page_table=step.table, cu_seqlens_q=step.starts,
            max_seqlen_q=step.longest, causal=True,
        )  # fmt: skip


class Sdpa(PagesOfTorch):
    """torch's SDPA: keys are gathered. Requests with few rows are one padded call, a prompt is a call of its own.

    Lengths are read on the host, once a step: it cannot be captured.
    """

    def __init__(self, config: Config, *sizes: Any, **options: Any) -> None:
        super().__init__(config, *sizes, **options)
        self.group = config.num_q_heads // config.num_kv_heads
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(self, cache: oa.PagedKVCache, q: Tensor, step: Step, **places: Tensor) -> Tensor:
        """Attention over gathered keys."""
        if cache is self.caches[0]:
            self.calls = calls_of(step, cache.block_size)
        out = torch.zeros_like(q)
        for rows, blocks, mask in self.calls:
            k, v = (
                page[blocks].to(q.dtype).flatten(1, 2).transpose(1, 2).repeat_interleave(self.group, 1)
                for page in self.pages[cache]
            )
            o = functional.scaled_dot_product_attention(q[rows].transpose(1, 2), k, v, mask)
            # A request with fewer rows than others repeats its first one, which has the same result each time.
            out[rows] = o.transpose(1, 2)
        return out


def calls_of(step: Step, block_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows (requests, rows), blocks (requests, columns) and mask of each call of SDPA."""
    bounds, lens = step.starts.tolist(), step.seq_lens.tolist()
    counts = [end - begin for begin, end in itertools.pairwise(bounds)]
    few = [i for i, count in enumerate(counts) if 1 <= count <= 4]
    device = step.table.device
    found = []
    for group in ([few] if few else []) + [[i] for i, count in enumerate(counts) if count > 4]:
        longest = max(counts[i] for i in group)
        # Rows at the end of a request are its last ones; the first is repeated where there are fewer.
        rows = [[max(bounds[i + 1] - longest + j, bounds[i]) for j in range(longest)] for i in group]
        seen = [[lens[i] - bounds[i + 1] + row + 1 for row in own] for i, own in zip(group, rows)]
        columns = -(-max(lens[i] for i in group) // block_size)
        keys = torch.arange(columns * block_size, device=device)
        mask = keys < torch.tensor(seen, device=device)[:, None, :, None]
        found.append((torch.tensor(rows, device=device), step.table[group, :columns], mask))
    return found


ATTENTIONS = {"omniattn": PagedAttention, "sdpa": Sdpa, "fa3": Fa3}
