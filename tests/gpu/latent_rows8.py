"""Latent rows in 8 bits, made and read by torch."""

from __future__ import annotations

from typing import Any

import torch

#: Formats of rows in 8 bits: e4m3 with one scale, and 656 bytes.
FORMATS = ("e4m3", "656")
#: The one scale: its products with e4m3 numbers are exact in 16 bits, as kernels may round them.
SCALE = 0.375


def stored(rows: Any, fmt: str, dtype: str = "bfloat16", *, any_scales: bool = False) -> tuple[Any, Any]:
    """Rows (n, 576) as bytes (n, 576 or 656), uint8, and what these mean to queries of a type, in float64.

    Some kernels round products of codes and scales to the type of q, others do not: they are exact in 16 bits, but with
    `any_scales`, whose meaning is not rounded.
    """
    io = getattr(torch, dtype)
    x = rows.float()
    if fmt == "e4m3":
        codes = (x / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), (codes.float() * SCALE).to(io).double()
    groups = x[:, :512].reshape(-1, 4, 128)
    scales = groups.abs().amax(-1).clamp_min(1e-12) / 448
    if not any_scales:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp((fraction * 16).ceil() / 16, exponent)  # 4 bits, as codes have
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    rest = x[:, 512:].bfloat16()
    parts = (codes.reshape(-1, 512), scales.contiguous(), rest.contiguous())
    products = (codes.double() if any_scales else codes.float()) * scales[..., None]
    meant = torch.cat([(products if any_scales else products.to(io)).reshape(-1, 512).double(), rest.double()], 1)
    return torch.cat([part.view(torch.uint8) for part in parts], 1), meant


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
