"""Requests as rows of token slots, as SGLang has them, with the keys and values that their caches ought to hold.

Needs torch and no SGLang: tests on the CPU make SGLang's own batches of the steps, tests on a GPU stand-ins of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class Batch:
    """One step: for each request how many tokens it had and gets, and the rows of all, packed."""

    rows: list[int]
    before: list[int]
    new: list[int]
    slots: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    device: Any

    def beside(self, other: Batch) -> Batch:
        """A step with another one's requests behind these."""
        tensors = (torch.cat((getattr(self, x), getattr(other, x))) for x in ("slots", "q", "k", "v"))
        lists = (self.rows + other.rows, self.before + other.before, self.new + other.new)
        return Batch(*lists, *tensors, self.device)

    def fields(self, mode: Any, *, counts_new: bool = True) -> dict[str, Any]:
        """Those of a ForwardBatch. counts_new: seq_lens has the new tokens, as in every mode but verification."""
        more = self.new if counts_new else [0] * len(self.new)
        lengths = [before + n for before, n in zip(self.before, more, strict=True)]

        def numbers(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        packed = mode.is_extend() and counts_new
        return {
            "forward_mode": mode,
            "batch_size": len(self.rows),
            "input_ids": torch.zeros(sum(self.new), dtype=torch.int64, device=self.device),
            "req_pool_indices": numbers(self.rows),
            "seq_lens": numbers(lengths),
            "out_cache_loc": self.slots,
            "seq_lens_sum": sum(lengths),
            "extend_seq_lens": numbers(self.new, torch.int32) if packed else None,
            "extend_seq_lens_cpu": list(self.new) if packed else None,
            "extend_prefix_lens": numbers(self.before, torch.int32) if packed else None,
            "extend_prefix_lens_cpu": list(self.before) if packed else None,
        }


class Requests:
    """Gives slots to tokens, pages in no order, and keeps what the cache of one layer ought to hold.

    Parameters
    ----------
    req_to_token : tensor, (rows, tokens), int32
        Row 0 is that of padding.
    pages : int
        Of the pool; page 0 is that of padding.
    dtype : torch.dtype
        Of queries, and of keys and values before they are written.
    cache_dtype : torch.dtype
    scales : (float, float)
        Of keys and values in e4m3.
    """

    def __init__(
        self,
        req_to_token: torch.Tensor,
        pages: int,
        page_size: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype = torch.float16,
        scales: tuple[float, float] = (1.0, 1.0),
        seed: int = 0,
    ) -> None:
        self.req_to_token, self.page_size = req_to_token, page_size
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.dtype, self.cache_dtype, self.scales = dtype, cache_dtype, scales
        self._random = random.Random(seed)
        self._values = torch.Generator().manual_seed(seed)
        self._free = list(range(1, pages))
        self._random.shuffle(self._free)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tokens(self, row: int) -> int:
        """Of a request so far."""
        return self._kept[row][0].shape[0] if row in self._kept else 0

    def drop(self, row: int, tokens: int) -> None:
        """Take back a request's newest tokens: guesses that were wrong. Their slots are given to the next ones."""
        self._kept[row] = tuple(x[: self.tokens(row) - tokens] for x in self._kept[row])  # type: ignore[assignment]

    def step(self, new: dict[int, int]) -> Batch:
        """New tokens of some requests: their slots, and random queries, keys and values."""
        device = self.req_to_token.device
        slots, before = [], []
        for row, n in new.items():
            begin = self.tokens(row)
            before.append(begin)
            for t in range(begin, begin + n):
                slots.append(self._slot(row, t))
        rows = sum(new.values())
        q = self._normal(rows, self.heads)
        k, v = self._normal(rows, self.kv_heads), self._normal(rows, self.kv_heads)
        start = 0
        for row, n in new.items():
            added = [self._stored(x[start : start + n], s) for x, s in zip((k, v), self.scales, strict=True)]
            old = self._kept.get(row)
            self._kept[row] = tuple(  # type: ignore[assignment]
                x if old is None else torch.cat((kept, x)) for kept, x in zip(old or (None, None), added, strict=True)
            )
            start += n
        found = torch.tensor(slots, dtype=torch.int64, device=device)
        return Batch(list(new), before, list(new.values()), found, q, k, v, device)

    def _slot(self, row: int, token: int) -> int:
        page, place = divmod(token, self.page_size)
        taken = int(self.req_to_token[row, page * self.page_size])
        if place == 0 and taken == 0:
            taken = self._free.pop() * self.page_size
        self.req_to_token[row, token] = taken + place
        return taken + place

    def _normal(self, rows: int, heads: int) -> torch.Tensor:
        x = torch.randn((rows, heads, self.dim), generator=self._values, dtype=torch.float32)
        return x.to(self.req_to_token.device, self.dtype)

    def _stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """What a cache gives back, on the CPU."""
        if self.cache_dtype != x.dtype and self.cache_dtype.itemsize == 1:
            return ((x / scale).to(self.cache_dtype).to(torch.float64) * scale).cpu()
        return x.to(self.cache_dtype).to(torch.float64).cpu()

    def expected(self, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """o (rows, heads, dim) and lse (rows, heads) of a step in float64, on the CPU."""
        parts, start = [], 0
        for row, begin, n in zip(batch.rows, batch.before, batch.new, strict=True):
            k, v = (x[: begin + n] for x in self._kept[row])
            parts.append(reference(batch.q[start : start + n].cpu().double(), k, v, begin, **options))
            start += n
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    begin: int,
    *,
    scale: float,
    left: int = -1,
    right: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries at ``begin`` and on over all keys, one head after the other; -1 is unlimited."""
    group = q.shape[1] // k.shape[1]
    i = torch.arange(begin, begin + q.shape[0])[:, None]
    j = torch.arange(k.shape[0])[None]
    hidden = torch.zeros(i.shape[0], j.shape[1], dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=q.dtype)
    for head in range(q.shape[1]):
        scores = scale * q[:, head] @ k[:, head // group].T
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].double().cpu().expand(scores.shape[0], 1)), 1)
        lse[:, head] = torch.logsumexp(scores, 1)
        o[:, head] = torch.softmax(scores, 1)[:, : k.shape[0]] @ v[:, head // group]
    return o, lse


def layer_of(requests: Requests, **more: Any) -> SimpleNamespace:
    """What a backend reads of a layer of SGLang."""
    return SimpleNamespace(
        **{
            "layer_id": 0, "tp_q_head_num": requests.heads, "tp_k_head_num": requests.kv_heads,
            "head_dim": requests.dim, "v_head_dim": requests.dim, "scaling": 0.3, "logit_cap": 0.0,
            "sliding_window_size": -1, "is_cross_attention": False, "attn_type": "decoder", "k_scale": None,
            "v_scale": None,
            **more,
        }
    )  # fmt: skip
