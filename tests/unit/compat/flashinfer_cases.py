"""What the tests of `compat.flashinfer` share: requests on pages, and what attention over them gives."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.unit.compat.compat_cases import close, naive, randoms, starts

HEADS, KV, DIM = 4, 2, 64
BOUND = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
WORKSPACE = torch.empty(0, dtype=torch.uint8)


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


class Requests:
    """Requests of some lengths on shuffled pages, whose tails hold NaN."""

    def __init__(
        self, lengths: list[int], page: int, layout: str = "NHD", dtype: Any = torch.float16, seed: int = 0,
        together: bool = True, spare: int = 5, dim: int = DIM,
    ) -> None:  # fmt: skip
        self.lengths, self.page, self.layout, self.dtype, self.dim = lengths, page, layout, dtype, dim
        counts = [-(-n // page) for n in lengths]
        total = sum(counts) + spare
        pool = torch.full((total, 2, page, KV, dim), math.nan, dtype=dtype)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: sum(counts)]
        self.indices, self.indptr = order.int(), starts(counts)
        self.last = int32(*((n - 1) % page + 1 if n else 0 for n in lengths))
        self.keys = []
        for b, n in enumerate(lengths):
            k, v = randoms((n, KV, dim), (n, KV, dim), seed=seed + 7 * b + 1, dtype=dtype)
            self.keys.append((k, v))
            for t in range(n):
                at = int(self.indices[int(self.indptr[b]) + t // page])
                pool[at, 0, t % page], pool[at, 1, t % page] = k[t], v[t]
        if layout == "HND":
            pool = pool.transpose(2, 3).contiguous()
        self.pool = pool if together else tuple(x.contiguous() for x in pool.unbind(1))

    @property
    def tables(self) -> tuple[Any, Any, Any]:
        return self.indptr, self.indices, self.last

    def expected(self, q: Any, rows: list[int], k_scale: float = 1.0, v_scale: float = 1.0, **score: Any) -> Any:
        """(rows, heads, dim) and LSE (rows, heads) in base 2, in float64."""
        made = []
        at = 0
        for n, (k, v) in zip(rows, self.keys, strict=True):
            o, lse = naive(q[None, at : at + n].double(), k[None].double(), v[None].double(), **score)
            made.append((o[0] * v_scale, lse[0].T / math.log(2)))
            at += n
        return tuple(torch.cat(x) for x in zip(*made, strict=True))

    def check(self, got: Any, q: Any, rows: list[int], **options: Any) -> None:
        out, lse = self.expected(q, rows, **options)
        assert close(got[0].double(), out, BOUND[self.dtype])
        assert got[0].dtype == self.dtype
        assert close(got[1].double(), lse, 5e-5)
        assert got[1].is_contiguous()


def plan_of(x: Requests, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (HEADS, KV, x.dim, x.page), {"q_data_type": x.dtype, **options}


def buffers(batch: int, pages: int) -> list[Any]:
    return [torch.zeros(n, dtype=torch.int32) for n in (batch + 1, pages, batch)]
