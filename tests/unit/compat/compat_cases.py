"""What the tests of the drop-in modules share: attention written out in torch, and inputs."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    wide: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and LSE of (batch, seqlen, heads, dim) by autograd's own operations; -inf and 0 where a row is empty.

    wide: the type of scores and sums, that of q unless given.
    """
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    wide = wide or dtype
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at_q = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    at_k = torch.arange(k.shape[1], device=q.device)
    if slopes is not None:
        slopes = slopes.to(wide).expand(q.shape[0], q.shape[2])
        scores = scores - slopes[..., None, None] * (at_q - at_k).abs()
    left, right = window
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden = hidden | (at_k < at_q - left)
    if causal or right >= 0:
        hidden = hidden | (at_k > at_q + (0 if causal else right))
    if mask is not None:
        if mask.dtype == torch.bool:
            hidden = hidden | ~mask
        else:
            scores = scores + mask.to(wide)
    scores = scores.masked_fill(hidden, -torch.inf)
    empty = hidden.all(-1, keepdim=True) if k.shape[1] else torch.ones(q.shape[1], 1, dtype=torch.bool, device=q.device)
    lse = scores.masked_fill(empty, 0).logsumexp(-1) if k.shape[1] else scores.sum(-1)
    p = torch.where(empty, 0, scores.masked_fill(empty, 0).softmax(-1)).to(dtype)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse.masked_fill(empty[..., 0], -torch.inf)


def packed_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths_q: list[int], lengths_k: list[int], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for packed sequences: (total, heads, dim) and (heads, total). slopes: (batch, heads)."""
    slopes = options.pop("slopes", None)
    made = []
    for b, (rows, keys) in enumerate(zip(slices(lengths_q), slices(lengths_k), strict=True)):
        own = None if slopes is None else slopes.expand(len(lengths_q), q.shape[1])[b]
        o, lse = naive(q[None, rows], k[None, keys], v[None, keys], slopes=own, **options)
        made.append((o[0], lse[0]))
    return torch.cat([o for o, _ in made]), torch.cat([lse for _, lse in made], dim=-1)


def slices(lengths: list[int]) -> list[slice]:
    """Rows of packed sequences."""
    return [slice(*pair) for pair in itertools.pairwise([0, *itertools.accumulate(lengths)])]


def starts(lengths: list[int], device: str = "cpu") -> torch.Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def randoms(*shapes: tuple[int, ...], seed: int = 0, dtype: Any = torch.float64, grad: bool = False) -> list[Any]:
    """Tensors of N(0, 1) on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(grad) for x in made]


def close(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    """Same shape, same infinities, and finite numbers no more than ``bound`` apart; NaN is close to nothing."""
    if a.shape != b.shape:
        return False
    same = (a == b) | ((a - b).abs() <= bound)
    return bool(same.all())
