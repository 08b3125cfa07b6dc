"""Caches, oracles and bounds that the GPU tests of append and decode share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from omniattn import append, decode
from omniattn.kv.cache import KVCache, PagedKVCache
from omniattn.reference.decode import CacheArrays, RecentArrays
from omniattn.reference.decode import decode as reference_decode
from omniattn.testing.cache_cases import decode_errors
from tests.gpu.attention_cases import TORCH_DTYPES

#: Memory of a cache that appending writes.
PLANES = ("k", "v", "k_params", "v_params", "recent_k", "recent_v")
#: (k_dtype, v_dtype, group_size) that the wheel has kernels for; "io" stands for q's own type.
COMMON = (("io", "io", None), ("fp8", "fp8", None), ("int8", "int8", None), ("int4", "int4", None))


@dataclass
class Case:
    """A cache with a prompt in it, and queries."""

    dtype: str = "bfloat16"
    k_dtype: str = "io"
    v_dtype: str = "io"
    group_size: int | None = None
    lengths: tuple[int, ...] = (300, 17, 1000)
    heads_q: int = 8
    heads_kv: int = 1
    head_dim: int = 128
    q_len: int = 1
    block_size: int = 0  # 0: contiguous
    cache_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    kind: str = "normal"

    def name(self, dtype: str) -> str:
        return {"bfloat16": "bf16", "float16": "fp16"}[self.dtype] if dtype == "io" else dtype

    @property
    def quantized(self) -> bool:
        return self.k_dtype != "io" or self.v_dtype != "io"


class Filled:
    """A case's arrays on the GPU; ``table`` is None for a contiguous cache."""

    def __init__(self, case: Case, *, device: str = "cuda") -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        batch, longest = len(case.lengths), max(max(case.lengths), 1)
        self.io = TORCH_DTYPES[case.dtype]
        like = torch.zeros(1, device=device)
        options: dict[str, Any] = {
            "like": like, "k_dtype": case.name(case.k_dtype), "v_dtype": case.name(case.v_dtype),
            "group_size": case.group_size, **case.cache_options,
        }  # fmt: skip
        for name in ("k_mean", "k_channel_scale"):
            if name in options:
                options[name] = torch.from_numpy(options[name]).to(device)
        self.table: torch.Tensor | None = None
        if case.block_size:
            columns = -(-longest // case.block_size)
            blocks = sum(-(-n // case.block_size) for n in case.lengths) + 3
            order = rng.permutation(blocks)
            table = np.full((batch, columns), 2**31 - 1, dtype=np.int32)  # what is not needed is not looked at
            at = 0
            for b, n in enumerate(case.lengths):
                count = -(-n // case.block_size)
                table[b, :count] = order[at : at + count]
                at += count
            self.table = torch.from_numpy(table).to(device)
            self.cache: KVCache = PagedKVCache(blocks, case.block_size, case.heads_kv, case.head_dim, **options)
        else:
            self.cache = KVCache(batch, longest, case.heads_kv, case.head_dim, **options)
        for name in PLANES:
            plane = getattr(self.cache, name)
            if plane is not None:  # NaN in 16 bits, in scales and in zeros
                plane.view(torch.uint8).fill_(0xFF)
        self.slots: torch.Tensor | None = None
        if self.cache.recent_window and case.block_size:
            order = rng.permutation(self.cache.recent_slots)[:batch].astype(np.int32)
            self.slots = torch.from_numpy(order).to(device)
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.starts = torch.tensor(np.cumsum([0, *case.lengths]), dtype=torch.int32, device=device)
        rows = sum(case.lengths)
        shape = (rows, case.heads_kv, case.head_dim)
        k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        if case.kind == "biased":
            k += 3.0 * rng.standard_normal((1, case.heads_kv, case.head_dim)).astype(np.float32)
            v += 3.0 * rng.standard_normal((1, case.heads_kv, case.head_dim)).astype(np.float32)
        elif case.kind == "wild":  # scales of V that differ by orders of magnitude
            v *= np.exp((6.0 if case.dtype == "bfloat16" else 1.5) * rng.standard_normal((rows, 1, 1))).astype(
                np.float32
            )
        q = rng.standard_normal((batch, case.q_len, case.heads_q, case.head_dim)).astype(np.float32)
        self.k, self.v, self.q = (torch.from_numpy(x).to(device, self.io) for x in (k, v, q))

    def append(self, **more: Any) -> None:
        append(
            self.cache, self.k, self.v, seq_lens=self.lens, cu_seqlens=self.starts, block_table=self.table,
            recent_slots=self.slots, **more,
        )  # fmt: skip

    def decode(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(self.q, float("nan"))
        places = {"block_table": self.table, "recent_slots": self.slots}
        options = {"seq_lens": self.lens, "out": out} | places | options
        return decode(self.q, self.cache, return_lse=True, **options)

    def planes(self) -> dict[str, np.ndarray[Any, Any]]:
        found = {}
        for name in (*PLANES, "recent_state"):
            plane = getattr(self.cache, name)
            if plane is not None:
                found[name] = plane.contiguous().view(torch.uint8).cpu().numpy()
        return found

    def on_host(self) -> CacheArrays:
        """The GPU's bytes for the reference."""
        planes = self.planes()
        cache = self.cache
        lead = (cache.num_blocks, cache.num_kv_heads, cache.block_size)
        empty = np.empty((*lead, 0), dtype=np.uint32)
        changes = {
            name: None if name not in cache._key_arrays else cache._key_arrays[name].obj.cpu().numpy()
            for name in ("k_mean", "k_channel_scale")
        }
        recent = None
        if cache.recent_format is not None:
            ring = (cache.recent_slots, cache.num_kv_heads, cache.recent_ring)
            k, v = (planes[name].reshape(*ring, -1) for name in ("recent_k", "recent_v"))
            state = planes["recent_state"].view(np.int32).reshape(-1, 2)
            recent = RecentArrays(cache.recent_window, cache.recent_format, k, v, state)
        if cache.k_format.layout == "fbgemm":
            lead = (cache.num_blocks, cache.block_size, cache.num_kv_heads)
            rows = [planes[name].reshape(*lead, -1).swapaxes(1, 2) for name in ("k", "v")]
        else:
            rows = [planes[name].reshape(*lead, -1) for name in ("k", "v")]
        return CacheArrays(
            cache.k_format, cache.v_format, rows[0], rows[1],
            planes["k_params"].view(np.uint32).reshape(*lead, -1) if "k_params" in planes else empty,
            planes["v_params"].view(np.uint32).reshape(*lead, -1) if "v_params" in planes else empty,
            changes["k_mean"], changes["k_channel_scale"], cache.hadamard, recent,
        )  # fmt: skip

    def reference(self, **options: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        lens = options.pop("seq_lens", self.lens).cpu().numpy()
        batch = len(self.case.lengths)
        table = np.arange(batch)[:, None] if self.table is None else self.table.cpu().numpy()
        window = options.pop("window", None)
        if self.slots is not None:
            options["recent_slots"] = self.slots.cpu().numpy()
        return reference_decode(
            self.q.float().cpu().numpy(), self.on_host(), seq_lens=lens, block_table=table,
            window_left=-1 if window is None else window[0], **options,
        )  # fmt: skip


def compare(
    got: tuple[torch.Tensor, torch.Tensor],
    expected: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    case: Case,
    label: str = "",
    *,
    rounded: bool = False,
) -> tuple[float, float]:
    """Check O and LSE; return their errors as parts of the tolerance.

    ``rounded``: the elements of a quantized cache are multiplied in 16 bits, of which the reference knows nothing.
    """
    o, lse = got[0].float().cpu().numpy(), got[1].cpu().numpy()
    shares = decode_errors(o, lse, *expected, case.dtype, "io" if case.k_dtype == "io" else "codes")
    assert max(shares) <= (2.5 if rounded else 1.0), (
        f"{label}: O is off by {shares[0]:.2f} tolerances, LSE by {shares[1]:.2f}"
    )
    return shares
