"""Latent attention in float64 as its equations say, and the bytes of its caches: what tests of engines compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

RANK, ROPE, NOPE, V = 512, 64, 128, 128


class Weights:
    """The up-projections of a layer, (heads, RANK, NOPE) and (heads, RANK, V)."""

    def __init__(self, heads: int, rng: torch.Generator, dtype: Any) -> None:
        def random(width: int) -> torch.Tensor:
            return (torch.randn(heads, RANK, width, generator=rng) * RANK**-0.5).to(dtype)

        self.heads, self.of_k, self.of_v = heads, random(NOPE), random(V)

    def of_linear(self) -> torch.Tensor:
        """As a linear layer has them, (heads * (NOPE + V), RANK)."""
        both = torch.cat([self.of_k, self.of_v], -1)
        return both.transpose(1, 2).reshape(-1, RANK)

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """q (tokens, heads, NOPE + ROPE) against latent rows, (tokens, heads, RANK + ROPE)."""
        nope = torch.einsum("thd,hrd->thr", q[..., :NOPE].float(), self.of_k.to(q.device).float())
        return torch.cat([nope.to(q.dtype), q[..., NOPE:]], -1)

    def heads_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of latent rows, fp64."""
        latent, rope = rows.double().split([RANK, ROPE], -1)
        k = torch.einsum("nr,hrd->nhd", latent, self.of_k.double())
        k = torch.cat([k, rope[:, None].expand(-1, self.heads, -1)], -1)
        return k, torch.einsum("nr,hrd->nhd", latent, self.of_v.double())

    def attention(
        self, q: torch.Tensor, rows: torch.Tensor, scale: float, lists: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """o (tokens, heads, V) in fp64: q are the last tokens, or each sees the tokens of its list."""
        k, v = self.heads_of(rows)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        if lists is None:
            behind = torch.arange(len(rows))[None] - (torch.arange(len(q))[:, None] + len(rows) - len(q))
            seen = behind <= 0
        else:
            seen = torch.zeros(len(q), len(rows), dtype=torch.bool)
            for row, tokens in zip(seen, lists, strict=True):
                row[tokens] = True
        p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", p, v)


def encoded(rows: torch.Tensor, name: str, scale: Any = None) -> torch.Tensor:
    """Latent rows (tokens, 576) as a cache of format ``name`` keeps them; scale: one fp32 element."""
    if name in ("fp8", "fp8_e4m3"):
        return (rows.float() / float(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    if name != "fp8_ds_mla":
        return rows
    tiles = rows[:, :RANK].float().unflatten(-1, (4, 128))
    scales = tiles.abs().amax(-1).clamp_min(1e-12) / 448
    codes = (tiles / scales[..., None]).to(torch.float8_e4m3fn).flatten(1)
    parts = (codes, scales.contiguous(), rows[:, RANK:].to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def decoded(kept: torch.Tensor, name: str, scale: Any = None) -> torch.Tensor:
    """What a cache's rows stand for, fp32."""
    if name in ("fp8", "fp8_e4m3"):
        return kept.view(torch.float8_e4m3fn).float() * float(scale)
    if name != "fp8_ds_mla":
        return kept.float()
    kept = kept.contiguous()
    codes = kept[:, :RANK].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    scales = kept[:, RANK : RANK + 16].contiguous().view(torch.float32)
    rope = kept[:, RANK + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat([(codes * scales[..., None]).flatten(1), rope], -1)
