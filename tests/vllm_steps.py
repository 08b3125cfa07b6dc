"""Steps of an engine as vLLM makes them, without vLLM: its pools, its arrays, and the calls of its backend.

The arrays are made once, and each step writes into them, as vLLM's runner does for its CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omniattn.integrations.vllm import calls

#: vLLM's orders of a pool: L layers, B blocks, H kv heads, N tokens, C a row of K and V.
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
_LAYERS, _LAYER = 3, 1
#: Bytes of an element.
_BYTES = {"auto": 2, "fp8": 1, "fp8_per_token_head": 1, "int8_per_token_head": 1}


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention in fp64, (rows, heads, dim): the queries are the last tokens."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(keys)[None, :] - (torch.arange(rows)[:, None] + keys - rows)
    seen = behind <= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        seen &= (behind >= -window[0]) & (behind <= window[1])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :keys], v)


def rounded(x: torch.Tensor, kv_cache_dtype: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Keys or values as a cache gives them back, fp32; scale: () or (heads,)."""
    x = x.float()
    if kv_cache_dtype == "auto":
        return x
    code = torch.int8 if kv_cache_dtype.startswith("int8") else torch.float8_e4m3fn
    if kv_cache_dtype == "fp8":
        assert scale is not None
        of = scale.float().reshape(-1, 1)
    else:
        of = (x.abs().amax(-1, keepdim=True) / (127 if code == torch.int8 else 448)).clamp_min(2.0**-60)
    scaled = x / of
    return (scaled.round() if code == torch.int8 else scaled).to(code).float() * of


def memory_of(order: str, blocks: int, heads: int, block: int, row: int, element: torch.dtype, device: Any) -> Any:
    """One layer's view (blocks, heads, block, row) of a pool of several in the physical ``order``, full of NaN."""
    extents = {"L": _LAYERS, "B": blocks, "H": heads, "N": block, "C": row}
    size = element.itemsize
    shape = [extents[name] * (size if name == "C" else 1) for name in order]
    raw = torch.full(shape, -1, dtype=torch.int8, device=device)
    whole = raw if element == torch.int8 else raw.view(torch.uint8 if size == 1 else element)
    return whole.permute([order.index(name) for name in "LBHNC"])[_LAYER]


class Steps:
    """Requests of one layer.

    Parameters
    ----------
    layer : calls.Layer
    device, dtype
        Of all tensors, and of q, k and v.
    order : str
        One of `LAYOUTS`.
    block, blocks, most, rows : int
        Tokens of a block, blocks, and the most requests and rows of a step.
    scales : two tensors, optional
        Of K and of V, fp32, () or (num_kv_heads,).
    """

    def __init__(
        self, layer: calls.Layer, device: Any, dtype: torch.dtype, *, order: str = "LBNHC", block: int = 16,
        blocks: int = 48, most: int = 6, rows: int = 96, scales: Any = None, sinks: Any = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.layer, self.device, self.dtype, self.block, self.sinks = layer, device, dtype, block, sinks
        self.scales = tuple(torch.tensor(1.0, device=device) for _ in "kv") if scales is None else scales
        row = calls.row_bytes(layer.head_size, layer.kv_cache_dtype) or 2 * layer.head_size
        element = {"auto": dtype, "int8_per_token_head": torch.int8}.get(layer.kv_cache_dtype, torch.uint8)
        self.pool = memory_of(order, blocks, layer.num_kv_heads, block, row, element, device)
        self.rng = torch.Generator().manual_seed(seed)
        self.free = (torch.randperm(blocks - 1, generator=self.rng) + 1).tolist()  # block 0 is nobody's
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.starts = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.table = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
        width = layer.num_heads + 2 * layer.num_kv_heads
        self.fused = torch.zeros(rows, width, layer.head_size, dtype=dtype, device=device)
        self.q, self.k, self.v = self.fused.split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
        self.out = torch.empty(rows, layer.num_heads, layer.head_size, dtype=dtype, device=device)
        self.news: list[tuple[str, int]] = []

    def length(self, name: str) -> int:
        return sum(k.shape[0] for k, _ in self.tokens.get(name, []))

    def prepare(self, *news: tuple[str, int]) -> None:
        """New tokens of requests: random ones, written where a graph reads them; what is behind them is padding."""
        slots: list[int] = []
        starts, lens, table = [0], [], torch.zeros(self.table.shape, dtype=torch.int32)
        fused = torch.randn(*self.fused.shape, generator=self.rng).to(self.dtype)
        for i, (name, count) in enumerate(news):
            blocks, before = self.blocks.setdefault(name, []), self.length(name)
            while len(blocks) * self.block < before + count:
                blocks.append(self.free.pop())
            slots += [blocks[t // self.block] * self.block + t % self.block for t in range(before, before + count)]
            table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            new = fused[starts[-1] : starts[-1] + count, self.layer.num_heads :]
            self.tokens.setdefault(name, []).append(new.split(self.layer.num_kv_heads, dim=1))
            starts.append(starts[-1] + count)
            lens.append(before + count)
        most, rows = self.lens.shape[0], self.slots.shape[0]
        self.starts.copy_(torch.tensor(starts + [starts[-1]] * (most - len(news)), dtype=torch.int32))
        self.lens.copy_(torch.tensor(lens + [0] * (most - len(news)), dtype=torch.int32))
        self.table.copy_(table)
        self.slots.copy_(torch.tensor(slots + [-1] * (rows - len(slots))))
        self.fused.copy_(fused)
        self.out.fill_(float("nan"))
        self.news = list(news)

    def whole(self, longest: int | None = None, *, causal: bool = True) -> calls.Step:
        """All rows and requests that there is room for, as a CUDA graph has them."""
        rows = self.slots.shape[0]
        most = self.table.shape[1] * self.block
        return calls.Step(
            rows, rows if longest is None else longest, most, self.starts, self.lens, self.table, self.slots, causal
        )

    def exact(self, *, causal: bool = True) -> calls.Step:
        """The rows and requests of this step alone, as without a graph."""
        rows, many = sum(count for _, count in self.news), len(self.news)
        longest = max(count for _, count in self.news)
        return calls.Step(
            rows, longest, int(self.lens.max()), self.starts[: many + 1], self.lens[:many], self.table[:many],
            self.slots[:rows], causal,
        )  # fmt: skip

    def run(self, step: calls.Step) -> None:
        """What the backend calls in a layer."""
        rows = step.num_actual_tokens
        calls.write(self.pool, self.layer, self.k, self.v, step.slot_mapping, self.scales)
        calls.attend(self.q[:rows], self.pool, self.layer, step, self.out[:rows], self.sinks, self.scales)

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(o, q, k, v) of each request on the host, k and v as the cache rounds them."""
        found, at = [], 0
        for name, count in self.news:
            part = slice(at, at + count)
            k, v = (
                rounded(torch.cat(parts), self.layer.kv_cache_dtype, scale.cpu())
                for parts, scale in zip(zip(*self.tokens[name], strict=True), self.scales, strict=True)
            )
            found.append((self.out[part].cpu(), self.q[part].cpu(), k, v))
            at += count
        return found

    def check(self, atol: float, *, causal: bool = True) -> None:
        """Each request's o against `reference`; rows of nobody, if a graph had them, are 0."""
        self.compare(self.results(), atol, causal=causal)

    def compare(self, results: Sequence[Any], atol: float, *, causal: bool = True) -> None:
        sinks = None if self.sinks is None else self.sinks.cpu()
        for o, q, k, v in results:
            want = reference(
                q, k, v, scale=self.layer.scale, causal=causal, window=self.layer.window(causal),
                softcap=self.layer.softcap, sinks=sinks,
            )  # fmt: skip
            torch.testing.assert_close(o.double(), want, rtol=atol, atol=atol)

    def check_padding(self) -> None:
        """Rows that belong to nobody are 0."""
        assert not self.out[sum(count for _, count in self.news) :].any()


def layer_of(
    kv_cache_dtype: str = "auto", *, heads: int = 8, kv_heads: int = 2, dim: int = 128, window: int | None = None,
    softcap: float = 0.0, deterministic: bool = False,
) -> calls.Layer:  # fmt: skip
    """A layer of attention."""
    return calls.Layer(heads, kv_heads, dim, dim**-0.5, softcap, window, kv_cache_dtype, deterministic)
