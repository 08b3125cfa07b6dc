"""`slot_requests` for latent attention: the rows that a pool ought to hold, and o by the model's equations."""

from __future__ import annotations

from typing import Any

import torch

from tests.latent_steps import NOPE, RANK, ROPE, Weights, decoded, encoded
from tests.slot_requests import Batch, Requests


class LatentRequests(Requests):
    """Requests whose tokens are latent rows; a step's q are those of heads (tokens, heads, NOPE + ROPE).

    Parameters
    ----------
    req_to_token, pages, page_size, heads, dtype, cache_dtype, seed
        As `Requests`'.
    """

    def __init__(
        self, req_to_token: torch.Tensor, pages: int, page_size: int, *, heads: int, dtype: Any, cache_dtype: Any,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            req_to_token, pages, page_size, heads=heads, kv_heads=1, dim=RANK + ROPE, dtype=dtype,
            cache_dtype=cache_dtype, seed=seed,
        )  # fmt: skip
        self.weights = Weights(heads, self._values, dtype)
        self._format = "fp8" if cache_dtype == torch.float8_e4m3fn else "auto"

    def step(self, new: dict[int, int]) -> Any:
        """New tokens of some requests; ``rows_new`` (tokens, 1, 576) are their latent rows."""
        made: Any = super().step(new)
        made.rows_new = made.k
        made.q = made.q[..., : NOPE + ROPE].contiguous()
        return made

    def _stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.cpu()[:, 0]

    def kept(self, row: int) -> torch.Tensor:
        """A request's rows as the pool gives them back, fp32, on the CPU."""
        return decoded(encoded(self._kept[row][0], self._format, 1.0), self._format, 1.0)

    def expected(self, batch: Batch, **options: Any) -> Any:
        """o (tokens, heads, V) in fp64; new_are_exact: new tokens see each other as they came, not as the pool is."""
        parts, start = [], 0
        for row, begin, n in zip(batch.rows, batch.before, batch.new, strict=True):
            rows = self.kept(row)[: begin + n].clone()
            if options.get("new_are_exact"):
                rows[begin:] = self._kept[row][0][begin : begin + n].float()
            parts.append(self.weights.attention(batch.q[start : start + n].cpu(), rows, options["scale"]))
            start += n
        return torch.cat(parts)
