"""Steps of latent attention as vLLM's classes make them, without vLLM: its cache and arrays, and `latent_calls`.

The arrays of single tokens are made once, and each step writes into them, as vLLM's runner does for its CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import omniattn
from omniattn.integrations.vllm import latent_calls
from tests.latent_steps import NOPE, RANK, ROPE, Weights, decoded, encoded

_LAYERS = 3  # of a pool, one after the other in each block
SCALE = (NOPE + ROPE) ** -0.5 * 1.3


class Steps:
    """Requests of one layer.

    Parameters
    ----------
    name : str
        vLLM's name of the cache's format.
    heads : int
    device, dtype
    block, blocks, most : int
        Tokens of a block, blocks, and requests of a step at most.
    rows : int
        Of single tokens and drafts at most.
    """

    def __init__(
        self, name: str = "auto", *, heads: int = 16, device: Any = "cuda", dtype: Any = torch.bfloat16,
        block: int = 64, blocks: int = 40, most: int = 6, rows: int = 16, deterministic: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.heads, self.device, self.dtype, self.block = name, heads, torch.device(device), dtype, block
        self.rng = torch.Generator().manual_seed(seed)
        self.weights = Weights(heads, self.rng, dtype)
        self.latent = latent_calls.Latent(SCALE, name, deterministic)
        self.scale = torch.tensor(0.03125, device=device)
        width, element = (656, torch.uint8) if name == "fp8_ds_mla" else (576, torch.uint8 if name != "auto" else dtype)
        raw = torch.full((blocks, _LAYERS, block, width * element.itemsize), -1, dtype=torch.int8, device=device)
        self.cache = raw.view(element)[:, 1]  # NaN where nobody has written
        self.free = (torch.randperm(blocks - 1, generator=self.rng) + 1).tolist()  # block 0 is nobody's
        self.blocks: dict[str, list[int]] = {}
        self.rows: dict[str, torch.Tensor] = {}

        def zeros(*shape: int, dtype: Any = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.starts, self.lens, self.table = zeros(most + 1), zeros(most), zeros(most, blocks)
        self.q = zeros(rows, heads, RANK + ROPE, dtype=dtype)
        self.news: list[tuple[str, int]] = []
        self.q_heads = torch.empty(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def length(self, name: str) -> int:
        return len(self.rows[name]) if name in self.rows else 0

    def prepare(self, *news: tuple[str, int]) -> None:
        """New tokens: rows into the cache, and lengths, tables and queries where a graph reads them."""
        total, most = sum(count for _, count in news), self.lens.shape[0]
        rows, q, at = self.random(total, RANK + ROPE), self.random(total, self.heads, NOPE + ROPE), 0
        kept = encoded(rows, self.name, self.scale.cpu())
        table = torch.zeros(self.table.shape, dtype=torch.int32)
        lens = []
        for i, (name, count) in enumerate(news):
            blocks, before = self.blocks.setdefault(name, []), self.length(name)
            while len(blocks) * self.block < before + count:
                blocks.append(self.free.pop())
            where = torch.arange(before, before + count)
            table[i, : len(blocks)] = of_request = torch.tensor(blocks, dtype=torch.int32)
            slots = (of_request[where // self.block].long().to(self.device), (where % self.block).to(self.device))
            self.cache[slots] = kept[at : at + count].view(self.cache.dtype).to(self.device)
            new = rows[at : at + count]
            self.rows[name] = torch.cat([self.rows[name], new]) if name in self.rows else new
            lens.append(before + count)
            at += count
        starts = torch.tensor([0] + [count for _, count in news]).cumsum(0)
        self.starts.copy_(torch.cat([starts, starts[-1:].expand(most - len(news))]))
        self.lens.copy_(torch.tensor(lens + [0] * (most - len(news))))
        self.table.copy_(table)
        self.news, self.q_heads = list(news), q
        if total <= self.q.shape[0]:
            self.q.zero_()[:total] = self.weights.absorbed(q)

    def exact(self, name: str) -> torch.Tensor:
        """A request's rows as the cache gives them back, fp32, on the host."""
        return decoded(encoded(self.rows[name], self.name, self.scale.cpu()), self.name, self.scale.cpu())

    def decode(self, longest: int, *, return_lse: bool = False, rows: int | None = None) -> Any:
        """What the backend calls of single tokens and drafts, on all rows that a graph has."""
        return latent_calls.attend_latent(
            self.q[:rows], self.cache, self.latent, seq_lens=self.lens, block_table=self.table,
            query_start_loc=self.starts, max_query_len=longest, k_scale=self.scale, return_lse=return_lse,
        )  # fmt: skip

    def up(self, o: torch.Tensor) -> torch.Tensor:
        """o of latent channels in those of heads, fp64, on the host."""
        return torch.einsum("thr,hrd->thd", o.cpu().double(), self.weights.of_v.double())

    def check(self, o: torch.Tensor, *, prompts: bool = False, lists: Any = None, bound: float = 1.2e-2) -> None:
        """Each request's o (tokens, heads, V) against the model's equations; new tokens of prompts are as they came."""
        at = 0
        for name, count in self.news:
            rows = self.exact(name).clone()
            if prompts:
                rows[-count:] = self.rows[name][-count:].float()
            part = slice(at, at + count)
            of_list = None if lists is None else lists[part]
            want = self.weights.attention(self.q_heads[part], rows, SCALE, of_list)
            got = o[part].cpu().double()
            assert not got.isnan().any(), name
            assert (got - want).norm() < bound * want.norm(), (name, float((got - want).norm() / want.norm()))
            at += count

    def prompts(self, parts: int = 2) -> torch.Tensor:
        """What the backend calls of prompts: new tokens, then older ones in parts, merged."""
        counts = [count for _, count in self.news]
        starts = self.starts[: len(counts) + 1]
        q = self.q_heads.to(self.device)
        options: dict[str, Any] = {
            "cu_seqlens_q": starts, "max_seqlen_q": max(counts), "scale": SCALE, "return_lse": True,
            "deterministic": self.latent.deterministic,
        }  # fmt: skip
        new = torch.cat([self.rows[name][-count:].float() for name, count in self.news])
        o, lse = latent_calls.attend_prompt(
            q, *self._own(new), cu_seqlens_k=starts, max_seqlen_k=max(counts), causal=True, **options
        )
        older = [self.length(name) - count for name, count in self.news]
        for part in range(parts if any(older) else 0):
            bounds = [(n * part // parts, n * (part + 1) // parts) for n in older]
            lengths = torch.tensor([0] + [end - begin for begin, end in bounds])
            rows = [self.exact(name)[begin:end] for (name, _), (begin, end) in zip(self.news, bounds, strict=True)]
            of_part, lse_part = latent_calls.attend_prompt(
                q, *self._own(torch.cat(rows)), cu_seqlens_k=lengths.cumsum(0).int().to(self.device),
                max_seqlen_k=int(lengths.max()), causal=False, **options,
            )  # fmt: skip
            o, lse = omniattn.merge_states(o, lse, of_part, lse_part)
        return o

    def _own(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, and values as a part of wider rows, as vLLM's up-projection gives them."""
        k, v = self.weights.heads_of(rows)
        both = torch.cat([k[..., :NOPE], v], -1).to(self.dtype).to(self.device)
        return k.to(self.dtype).to(self.device), both[..., NOPE:]

    def choose(self, topk: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Lists of tokens of each row, their places in the cache (rows, topk), and how many they are."""
        lists: list[torch.Tensor] = []
        places = torch.full((sum(count for _, count in self.news), topk), -1, dtype=torch.int32)
        for name, count in self.news:
            blocks = torch.tensor(self.blocks[name])
            for seen in range(self.length(name) - count + 1, self.length(name) + 1):
                some = torch.randperm(seen, generator=self.rng)[:topk]
                places[len(lists), : len(some)] = (blocks[some // self.block] * self.block + some % self.block).int()
                lists.append(some)
        counts = (places >= 0).sum(1).int()
        return lists, places.to(self.device), counts.to(self.device)

    def sparse(self, places: torch.Tensor, counts: torch.Tensor, *, return_lse: bool = False) -> Any:
        """What the backend calls of tokens with lists."""
        q = self.weights.absorbed(self.q_heads).to(self.device)
        return latent_calls.attend_rows(
            q, self.cache, self.latent, indices=places, lengths=counts, k_scale=self.scale, return_lse=return_lse
        )


def captured(call: Any) -> tuple[Any, Any]:
    """A CUDA graph of a call, and what it gives."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = call()
    return graph, found


#: Prompts; single tokens beside them come in steps of their own, as vLLM divides a step.
PROMPTS: Sequence[tuple[tuple[str, int], ...]] = (
    (("a", 300), ("b", 5), ("c", 65)),
    (("b", 129), ("d", 70), ("a", 3)),
)
