"""Repeatable calls of every operation on torch tensors: for a GPU, and for a process without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import omniattn as oa

_LENGTH, _HEADS, _DIM = 70, 4, 64


def plain_calls(device: str, stream: Any = None) -> dict[str, Callable[[], Any]]:
    """Forward calls without gradients; ``stream``: torch's current one, as the caller names it."""
    of = _Arrays(device)
    return {**_exact(of, stream), **_low_precision(of), **_packed(of), **_caches(of, stream), **_others(of, stream)}


def gradient_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Calls forward and backward; the results are gradients."""
    of = _Arrays(device)
    leaves = [of.random(2, _LENGTH, heads, _DIM).requires_grad_() for heads in (_HEADS, 2, 2)]
    rows = [of.random(_LENGTH, heads, _DIM).requires_grad_() for heads in (_HEADS, 2, 2)]
    do, rows_do = torch.ones_like(leaves[0]), torch.ones_like(rows[0])
    sinks, lens = of.random(_HEADS).float(), of.lengths()

    def made(function: Any, inputs: list[Any], do: Any, *more: Any, **options: Any) -> Callable[[], Any]:
        wanted = [x for x in inputs if x.requires_grad]
        return lambda: torch.autograd.grad(function(*inputs, **options), wanted, do, *more)

    def sums() -> Any:
        o, lse = oa.attention(*leaves, causal=True, return_lse=True)
        return torch.autograd.grad(o, leaves, do), lse

    return {
        "gradients": made(oa.attention, leaves, do),
        "gradients, deterministic": made(oa.attention, leaves, do, deterministic=True),
        "gradients, causal": made(oa.attention, leaves, do, causal=True),
        "gradients, sinks": made(oa.attention, leaves, do, sinks=sinks, softcap=5.0, window=(20, 0)),
        "gradients of q and v": made(oa.attention, [leaves[0], leaves[1].detach(), leaves[2]], do),
        "gradients beside the lse": sums,
        "gradients, packed": made(oa.attention_varlen, rows, rows_do, **lens, causal=True),
        "gradients, packed, deterministic": made(oa.attention_varlen, rows, rows_do, **lens, deterministic=True),
        "gradients, int8": made(oa.attention, leaves, do, precision="int8"),
    }


class _Arrays:
    """Makes inputs."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(7)

    def random(self, *shape: int) -> Any:
        """Normal bfloat16 numbers."""
        return torch.randn(shape, device=self.device, generator=self._generator).bfloat16()

    def int32(self, *values: int) -> Any:
        """Whole numbers."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def qkv(self, batch: int | None = 2) -> list[Any]:
        """Query heads in groups of two."""
        lead = () if batch is None else (batch,)
        return [self.random(*lead, _LENGTH, heads, _DIM) for heads in (_HEADS, 2, 2)]

    def lengths(self) -> dict[str, Any]:
        """Two packed sequences."""
        starts = self.int32(0, 30, _LENGTH)
        return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 40, "max_seqlen_k": 40}


def _exact(of: _Arrays, stream: Any) -> dict[str, Callable[[], Any]]:
    q, k, v = of.qkv()
    hnd = [x.transpose(1, 2) for x in (q, k, v)]
    sinks = torch.nn.Parameter(of.random(_HEADS), requires_grad=False)
    out, wide_v = torch.empty_like(q), of.random(2, _LENGTH, 2, 128)
    seen = torch.ones(2, _HEADS, _LENGTH, _LENGTH, dtype=torch.bool, device=of.device).tril()
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=of.device)
    mod = oa.ScoreMod("score + slopes[h] * (k - q)", slopes=of.random(_HEADS).float())
    masks = {
        "bool": seen, "bool, broadcast": seen[:1, :1], "bool, rows": seen[:, :1, -1:],
        "bfloat16": of.random(2, 1, _LENGTH, _LENGTH), "float32": of.random(1, 1, _LENGTH, _LENGTH).float(),
        "float32, rows": of.random(2, 1, 1, _LENGTH).float(), "odd rows": of.random(1, 1, _LENGTH, 77)[..., :_LENGTH],
    }  # fmt: skip
    return {
        "plain": lambda: oa.attention(q, k, v),
        "lse": lambda: oa.attention(q, k, v, causal=True, return_lse=True),
        "HND": lambda: oa.attention(*hnd, layout="HND", return_lse=True),
        "window": lambda: oa.attention(q, k, v, window=(20, 0), softmax_scale=0.1),
        "wide values": lambda: oa.attention(q, k, wide_v),
        "few queries": lambda: oa.attention(q[:, :3], k, v, return_lse=True),
        "mask and sinks": lambda: oa.attention(
            q, k, v, mask=masks["float32"], sinks=sinks, softcap=20.0, return_lse=True
        ),
        **{f"mask, {name}": lambda mask=mask: oa.attention(q, k, v, mask=mask) for name, mask in masks.items()},
        "block mask": lambda: oa.attention(q, k, v, block_mask=blocks, block_size=64),
        "score_mod": lambda: oa.attention(q, k, v, score_mod=mod),
        "out": lambda: oa.attention(q, k, v, out=out.fill_(float("nan"))),
        "out is q": lambda: oa.attention(out.copy_(q), k, v, out=out),
        "out and stream": lambda: oa.attention(q, k, v, out=out.fill_(float("nan")), stream=stream),
    }


def _low_precision(of: _Arrays) -> dict[str, Callable[[], Any]]:
    q, k, v = of.qkv()
    out, mask = torch.empty_like(q), of.random(1, 1, _LENGTH, _LENGTH)
    qk, values = oa.quantize_qk(q, k, with_bias=True), oa.quantize_v(v)
    e4m3 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    factor, knobs = torch.full((2, 2), 0.5, device=of.device), oa.Int8(smooth_k=False)
    return {
        "int8": lambda: oa.attention(q, k, v, precision="int8", causal=True, return_lse=True),
        "int8, knobs": lambda: oa.attention(q, k, v, precision=knobs),
        "int8, mask": lambda: oa.attention(q, k, v, precision="int8", mask=mask),
        "int4 into out": lambda: oa.attention(q, k, v, precision="int4", out=out.fill_(float("nan"))),
        "fp8": lambda: oa.attention(q, k, v, precision="fp8"),
        "e4m3": lambda: oa.attention(*e4m3, descale_q=factor, descale_v=factor, return_lse=True),
        "operands": lambda: oa.attention(qk.q, qk.k, values, causal=True, return_lse=True),
    }


def _packed(of: _Arrays) -> dict[str, Callable[[], Any]]:
    q, k, v = of.qkv(None)
    lens = of.lengths()
    pools = [of.random(8, 16, 2, _DIM) for _ in "kv"]
    table = torch.arange(8, dtype=torch.int32, device=of.device).view(2, 4)
    pages = {name: x for name, x in lens.items() if name != "cu_seqlens_k"}
    pages |= {"seqused_k": of.int32(64, 20), "block_table": table}
    return {
        "varlen": lambda: oa.attention_varlen(q, k, v, **lens, causal=True, return_lse=True),
        "varlen, pages": lambda: oa.attention_varlen(q, *pools, **pages, causal=True),
        "int8 varlen": lambda: oa.attention_varlen(q, k, v, **lens, precision="int8", return_lse=True),
        "fp8 varlen": lambda: oa.attention_varlen(q, k, v, **lens, precision="fp8"),
    }


def _caches(of: _Arrays, stream: Any) -> dict[str, Callable[[], Any]]:
    k, v = of.random(2, _LENGTH, 2, _DIM), of.random(2, _LENGTH, 2, _DIM)
    one = of.random(2, 1, _HEADS, _DIM)
    one_out = torch.empty_like(one)
    lens = of.int32(_LENGTH, _LENGTH)
    table = torch.arange(16, dtype=torch.int32, device=of.device).view(2, 8)
    shared, index = table.clone(), of.int32(1, 1)
    shared[:, :2] = table[:1, :2]
    cos, sin = (of.random(128, _DIM // 2).float() for _ in range(2))
    cache = oa.KVCache(2, _LENGTH, 2, _DIM, like=k, k_dtype="int8", k_mean=of.random(2, _DIM).float())
    plain = oa.KVCache(2, _LENGTH, 2, _DIM, like=k)
    recent = oa.KVCache(2, _LENGTH, 2, _DIM, like=k, k_dtype="int4", recent_window=16)
    paged = oa.PagedKVCache(32, 16, 2, _DIM, like=k, k_dtype="int4")
    exact = oa.PagedKVCache(32, 16, 2, _DIM, like=k)
    prompts, prompts_out = of.random(2, _LENGTH, _HEADS, _DIM), of.random(2, _LENGTH, _HEADS, _DIM)
    rows = {"cu_seqlens_q": of.int32(0, 40, 90), "max_seqlen_q": 50, "seq_lens": lens, "block_table": table}
    for x, places in ((cache, {}), (plain, {}), (recent, {}), *((x, {"block_table": table}) for x in (paged, exact))):
        oa.append(x, k, v, seq_lens=lens, **places)

    latent, rows_q = of.random(4, 16, 1, 576), of.random(3, 8, 576)
    latent_cache = oa.PagedKVCache.from_arrays(latent, head_dim_v=512)
    indices = of.int32(*range(63, -1, -1), *[-1, 5] * 32, *[70, 3] * 32).view(3, 64)
    of_lists = of.int32(64, 0, 33)
    sparse_out = torch.empty_like(rows_q[..., :512])

    def appended(x: Any, **more: Any) -> tuple[Any, ...]:
        for plane in (x.k, x.v, x.k_params, x.v_params):
            if plane is not None:
                plane.zero_()
        oa.append(x, k, v, seq_lens=lens, **more)
        places = {name: value for name, value in more.items() if name == "block_table"}
        o, lse = oa.decode(one, x, seq_lens=lens, return_lse=True, **places)
        return tuple(y for y in (o, lse, x.k, x.v, x.k_params, x.v_params) if y is not None)

    return {
        "append and decode": lambda: appended(cache),
        "append and decode, bf16": lambda: appended(plain, cos=cos, sin=sin),
        "append and decode, recent": lambda: appended(recent),
        "append and decode, paged": lambda: appended(paged, block_table=table),
        "decode into out": lambda: oa.decode(
            one, cache, seq_lens=lens, out=one_out.fill_(float("nan")), deterministic=True, stream=stream
        ),
        "decode, prefix": lambda: oa.decode(
            one, paged, seq_lens=lens, block_table=shared, shared_prefix=32, return_lse=True
        ),
        "attention_sparse": lambda: oa.attention_sparse(
            rows_q, latent.view(64, 1, 576), indices=indices, topk_length=of_lists, return_lse=True, return_max=True
        ),
        "attention_sparse into out": lambda: oa.attention_sparse(
            rows_q, latent_cache, indices=indices, out=sparse_out.fill_(float("nan")), stream=stream
        ),
        "decode, lists": lambda: oa.decode(rows_q[:, None], latent_cache, indices=indices[:, None], return_lse=True),
        "with cache, tokens": lambda: oa.attention_with_kvcache(
            one, cache, seq_lens=lens, out=one_out.fill_(float("nan")), stream=stream
        ),
        "with cache, packed": lambda: oa.attention_with_kvcache(prompts.view(-1, _HEADS, _DIM)[:90], exact, **rows),
        "with cache, batch": lambda: oa.attention_with_kvcache(
            prompts, plain, seq_lens=lens, out=prompts_out.fill_(float("nan")), return_lse=True, batch_index=index
        ),
    }


def _others(of: _Arrays, stream: Any) -> dict[str, Callable[[], Any]]:
    q, k, v = of.qkv()
    a, b = of.random(2, _LENGTH, _HEADS, _DIM), of.random(2, _LENGTH, _HEADS, _DIM)
    lse = [of.random(2, _HEADS, _LENGTH).float() for _ in range(2)]
    out, lens, (rows_q, rows_k, rows_v) = torch.empty_like(a), of.lengths(), of.qkv(None)
    do, o, lse_o = of.random(*q.shape), of.random(*q.shape), of.random(2, _HEADS, _LENGTH).float()
    mask = of.random(2, 1, _LENGTH, _LENGTH).float()
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    scores = of.random(6, 300).float()
    queries, keys = of.random(6, 8, 128).to(torch.float8_e4m3fn), of.random(300, 128).to(torch.float8_e4m3fn)
    weights, scale = of.random(6, 8).float(), of.random(300).float()

    def contents(made: Any) -> tuple[Any, ...]:
        if hasattr(made, "v"):
            return made.v_scale, made.v_mean
        if made.delta_s is None:
            return (made.k_mean,)
        return made.q_int, made.k_int, made.k_mean, made.delta_s[..., :_LENGTH]  # what lies behind is padding

    packed_v = {name: lens[name] for name in ("cu_seqlens_k", "max_seqlen_k")}
    top_lengths = of.int32(300, 0, 7, 64, 100, 299)
    return {
        "quantize_qk": lambda: contents(oa.quantize_qk(q, k, smooth_q=True)),
        "quantize_qk, packed": lambda: contents(oa.quantize_qk(rows_q, rows_k, **lens)),
        "quantize_v": lambda: contents(oa.quantize_v(v)),
        "quantize_v, packed": lambda: contents(oa.quantize_v(rows_v, **packed_v)),
        "merge": lambda: oa.merge_states(a, lse[0], b, lse[1]),
        "merge into out": lambda: oa.merge_states(a, lse[0], b, lse[1], out=out.fill_(float("nan")), stream=stream),
        "index_logits": lambda: oa.index_logits(queries, keys, weights, k_scale=scale),
        "top_k": lambda: oa.top_k(scores, 64, lengths=top_lengths),
        "backward": lambda: oa.attention_backward(do, q, k, v, o, lse_o, deterministic=True),
        "backward into arrays": lambda: oa.attention_backward(
            do, q, k, v, o, lse_o, dq=gradients[0], dk=gradients[1], dv=gradients[2], deterministic=True
        ),
        "backward, mask": lambda: oa.attention_backward(
            do, q, k, v, o, lse_o, mask=mask, wanted=("dv",), deterministic=True
        ),
    }
