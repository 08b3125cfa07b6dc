"""Latent rows in 8 bits, made and read by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

#: Formats of rows in 8 bits: e4m3 with one scale, and 656 bytes.
FORMATS = ("e4m3", "656")
#: The one scale of e4m3.
SCALE = 0.37


@dataclass(frozen=True)
class Meaning:
    """What rows stand for in float64, (rows, 576).

    Attributes
    ----------
    exact : tensor
        Products of codes and scales, as they are.
    rounded : tensor
        Those of rows of 656 bytes in q's type.
    """

    exact: Any
    rounded: Any

    def __len__(self) -> int:
        return len(self.exact)

    def of(self, kernel: str) -> Any:
        """To a kernel: those of up to 16 query rows multiply codes, and scales come in behind the products."""
        is_rounding = kernel.startswith("mla_decode_rows8_sm90") or (
            kernel.startswith("mla_decode_sm80") and not kernel.endswith("_r16")
        )
        return self.rounded if is_rounding else self.exact


def stored(rows: Any, fmt: str, dtype: str = "bfloat16") -> tuple[Any, Meaning]:
    """Rows (n, 576) as bytes (n, 576 or 656), uint8, and what these mean to queries of a type."""
    x = rows.float()
    if fmt == "e4m3":
        scale = torch.tensor(SCALE, dtype=torch.float32, device=x.device).double()
        codes = (x / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        exact = codes.double() * scale
        return codes.view(torch.uint8), Meaning(exact, exact)
    groups = x[:, :512].reshape(-1, 4, 128)
    scales = groups.abs().amax(-1).clamp_min(1e-12) / 448
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    rest = x[:, 512:].bfloat16()
    parts = (codes.reshape(-1, 512), scales.contiguous(), rest.contiguous())
    products = codes.double() * scales.double()[..., None]
    rounded = (codes.float() * scales[..., None]).to(getattr(torch, dtype))
    meant = (torch.cat([y.reshape(-1, 512).double(), rest.double()], 1) for y in (products, rounded))
    return torch.cat([part.view(torch.uint8) for part in parts], 1), Meaning(*meant)


def nan_rows(count: int, fmt: str) -> Any:
    """Rows of which every channel is NaN, and every scale."""
    byte = torch.full((count, 576 if fmt == "e4m3" else 656), 0x7F, dtype=torch.uint8, device="cuda")
    if fmt == "656":
        byte[:, 512:528] = 0xFF
        byte[:, 528:] = 0xFF
    return byte


def dressed(pool: Any, fmt: str) -> tuple[Any, dict[str, Any]]:
    """A pool of bytes as `from_arrays` takes it, and its further arguments."""
    if fmt == "656":
        return pool, {"head_dim_v": 512}
    scale = torch.tensor([SCALE], dtype=torch.float32, device=pool.device)
    return pool.view(torch.float8_e4m3fn), {"head_dim_v": 512, "k_scale": scale}
