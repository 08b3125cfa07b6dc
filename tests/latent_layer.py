"""Attention of DeepSeek V3's sizes, on torch: a layer of random weights, and a small model of transformers.

Heads are those of the model (128 + 64 channels of q and k, 128 of v, 512 of the latent vector), few of them, and the
hidden state is narrow. Used on the CPU and on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import omniattn as oa

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
#: 192^-0.5 times the square of YaRN's factor, as the model has it.
SCALE = (NOPE + ROPE) ** -0.5 * (0.1 * math.log(40) + 1) ** 2
#: Largest relative error (Frobenius) of o of a query token: roundings of the absorbed q, of P and of the latent o.
BOUND = {"float16": 1e-3, "bfloat16": 8e-3}
#: Formats of rows.
FORMATS = ("16", "e4m3", "656")


@dataclass(frozen=True)
class Projected:
    """What a layer makes of hidden states (tokens, hidden), in float64 but rounded to the model's type.

    q (tokens, heads, 192); c (tokens, 512), r (tokens, 64): what is stored of each token.
    """

    q: Any
    c: Any
    r: Any


class Layer:
    """Projections of one layer in the model's type."""

    def __init__(self, heads: int, dtype: str, device: str, hidden: int = 192) -> None:
        generator = torch.Generator().manual_seed(heads)
        self.heads, self.device, self.io = heads, device, getattr(torch, dtype)

        def weights(*shape: int) -> Any:
            made = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return self.rounded(made.to(device))

        self.w_q, self.w_kv = weights(heads * (NOPE + ROPE), hidden), weights(LATENT + ROPE, hidden)
        self.w_uk = weights(heads, NOPE, LATENT)
        self.w_uv = weights(heads, VALUE, LATENT)

    def rounded(self, x: Any) -> Any:
        """As the model's type has it, in float64."""
        return x.to(self.io).double()

    def project(self, x: Any, positions: Any) -> Projected:
        q = self.rounded(x @ self.w_q.T).view(len(x), self.heads, NOPE + ROPE)
        kv = x @ self.w_kv.T
        c, r = kv[:, :LATENT], kv[:, LATENT:]
        c = self.rounded(c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
        q_rope = self.rounded(rotated(q[..., NOPE:], positions[:, None]))
        return Projected(torch.cat([q[..., :NOPE], q_rope], -1), c, self.rounded(rotated(r, positions)))

    def keys_and_values(self, c: Any, r: Any) -> tuple[Any, Any]:
        """Those of all heads, not rounded: (tokens, heads, 192) and (tokens, heads, 128)."""
        k = torch.einsum("tc,hdc->thd", c, self.w_uk)
        return torch.cat([k, r[:, None].expand(-1, self.heads, -1)], -1), torch.einsum("tc,hvc->thv", c, self.w_uv)

    def absorbed(self, q: Any) -> Any:
        """q (tokens, heads, 192) as (tokens, heads, 576) in the model's type."""
        latent = torch.einsum("thd,hdc->thc", q[..., :NOPE], self.w_uk)
        return torch.cat([latent, q[..., NOPE:]], -1).to(self.io)

    def values(self, o: Any) -> Any:
        """The latent o (tokens, heads, 512) as (tokens, heads, 128) in float64."""
        return torch.einsum("thc,hvc->thv", o.double(), self.w_uv)


def rotated(x: Any, positions: Any) -> Any:
    """Rotary embedding of interleaved pairs; positions broadcast against x without its last dimension."""
    rates = 10000.0 ** -(torch.arange(0, ROPE, 2, device=x.device).double() / ROPE)
    angles = positions[..., None].double() * rates
    even, odd = x[..., 0::2], x[..., 1::2]
    pair = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
    return torch.stack(pair, -1).flatten(-2)


def attended(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Unabsorbed attention in float64; seen (queries, keys) bool."""
    s = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    s = s.masked_fill(~seen, -math.inf)
    return torch.einsum("hqk,khv->qhv", s.softmax(-1), v)


def stored(c: Any, r: Any, fmt: str, io: Any) -> tuple[Any, dict[str, Any], Any, Any]:
    """Rows of a format, further arguments of `from_arrays`, and the c and r that these rows stand for."""
    rows = torch.cat([c, r], -1)
    if fmt == "16":
        return rows.to(io), {}, c, r
    if fmt == "e4m3":
        scale = torch.full((1,), 0.02, device=c.device)
        codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        meant = (codes.float() * scale).double()
        return codes, {"k_scale": scale}, meant[:, :LATENT], meant[:, LATENT:]
    groups = c.float().unflatten(-1, (4, 128))
    scales = groups.abs().amax(-1).clamp_min(1e-4) / 448
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    rest = r.bfloat16()
    parts = codes.flatten(-2), scales, rest.contiguous()
    made = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return made, {}, (codes.float() * scales[..., None]).flatten(-2).double(), rest.double()


def error_of(got: Any, want: Any) -> float:
    """The largest relative error of a query token; NaN is infinite."""
    error = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    return float(error.nan_to_num(math.inf).max())


class Sequences:
    """Tokens of several sequences, projected, and their rows in pages that lie in any order; unused rows are NaN."""

    def __init__(self, layer: Layer, lengths: tuple[int, ...], fmt: str, size: int = 16) -> None:
        self.layer, self.lengths = layer, lengths
        generator = torch.Generator().manual_seed(1)
        counts = [-(-n // size) for n in lengths]
        order = torch.randperm(sum(counts) + 1, generator=generator)
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.parts, self.seen = [], []
        pool, at, self.options = None, 0, {}
        for b, n in enumerate(lengths):
            x = layer.rounded(torch.randn(n, layer.w_q.shape[-1], generator=generator).to(layer.device))
            part = layer.project(x, torch.arange(n, device=layer.device))
            rows, self.options, c, r = stored(part.c, part.r, fmt, layer.io)
            self.table[b, : counts[b]] = order[at : at + counts[b]]
            at += counts[b]
            if pool is None:
                byte = torch.full((len(order) * size, rows.shape[-1] * rows.element_size()), 255, dtype=torch.uint8)
                pool = byte.to(layer.device)
            pool[self.slots(b, n, size).to(layer.device)] = rows.view(torch.uint8)
            self.parts.append(part)
            self.seen.append(layer.keys_and_values(c, r))
        assert pool is not None
        self.size, self.table_ = size, self.table.to(layer.device)
        self.pool = pool.view(rows.dtype).view(-1, size, 1, rows.shape[-1])
        self.cache = oa.PagedKVCache.from_arrays(self.pool, head_dim_v=LATENT, **self.options)

    def slots(self, b: int, n: int, size: int) -> Any:
        """Numbers of the first n rows of a sequence."""
        t = torch.arange(n)
        return (self.table[b, t // size] * size + t % size).long()

    def expected(self, b: int, t: int, listed: Any = None) -> Any:
        """o of token t, (heads, 128), over all tokens up to it or those of a list."""
        k, v = self.seen[b]
        seen = torch.zeros(1, len(k), dtype=torch.bool, device=self.layer.device)
        seen[0, : t + 1 if listed is None else 0] = True
        if listed is not None:
            seen[0, listed] = True
        return attended(self.parts[b].q[t : t + 1], k, v, seen)[0]


def decode_steps(sequences: Sequences, steps: int) -> float:
    """Absorbed decoding of the last tokens, one a step, beside the unabsorbed attention: the largest error."""
    layer, worst = sequences.layer, 0.0
    for step in range(steps):
        at = [n - steps + step for n in sequences.lengths]
        q = torch.stack([layer.absorbed(part.q[t : t + 1])[0] for part, t in zip(sequences.parts, at, strict=True)])
        lens = torch.tensor([t + 1 for t in at], dtype=torch.int32, device=layer.device)
        o = oa.decode(
            q[:, None], sequences.cache, seq_lens=lens, block_table=sequences.table_, softmax_scale=SCALE
        )  # fmt: skip
        want = torch.stack([sequences.expected(b, t) for b, t in enumerate(at)])
        worst = max(worst, error_of(layer.values(o[:, 0]), want))
    return worst


def sparse_prompt(sequences: Sequences, topk: int) -> float:
    """``attention_sparse`` of a prompt, each token over up to topk tokens before it: the largest error."""
    layer, n = sequences.layer, sequences.lengths[0]
    generator = torch.Generator().manual_seed(2)
    slots = sequences.slots(0, n, sequences.size)
    indices, lists = torch.full((n, topk), -1, dtype=torch.int32), []
    for t in range(n):
        listed = torch.randperm(t + 1, generator=generator)[:topk]
        lists.append(listed)
        indices[t, topk - len(listed) :] = slots[listed].int()
    q = layer.absorbed(sequences.parts[0].q)
    o = oa.attention_sparse(q, sequences.cache, indices=indices.to(layer.device), softmax_scale=SCALE)
    want = torch.stack([sequences.expected(0, t, listed.to(layer.device)) for t, listed in enumerate(lists)])
    return error_of(layer.values(o), want)


def whole_prompt(sequences: Sequences) -> float:
    """``attention`` with heads of 192 and 128 channels, unabsorbed: the largest error."""
    layer, part = sequences.layer, sequences.parts[0]
    k, v = (x.to(layer.io) for x in sequences.seen[0])
    o = oa.attention(part.q.to(layer.io)[None], k[None], v[None], causal=True, softmax_scale=SCALE)
    want = torch.stack([sequences.expected(0, t) for t in range(sequences.lengths[0])])
    return error_of(o[0].double(), want)


# A model of transformers


def small_model() -> Any:
    """DeepSeek V3 with two layers, four heads of the model's sizes, and its YaRN."""
    import transformers

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
        v_head_dim=VALUE, first_k_dense_replace=2, n_routed_experts=2, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
            "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        },
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)  # attention far from uniform
    return model


def use_latent_caches(model: Any) -> list[str]:
    """Let every layer attend by latent rows: single tokens by `decode`, prompts by `attention_sparse`.

    Returns the list of functions that have been called, which grows.
    """
    import transformers

    calls: list[str] = []
    for layer in model.model.layers:
        attention, right = layer.self_attn, layer.self_attn.expand_kv

        def kept(kv_nope: Any, k_rot: Any, attention: Any = attention, right: Any = right) -> Any:
            # The whole cache: rows of all tokens, the new ones included.
            attention.latent_rows = torch.cat([kv_nope, k_rot], -1)[:, 0]
            return right(kv_nope, k_rot)

        attention.expand_kv = kept

    def latent(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **more: Any
    ) -> tuple[Any, None]:
        rows = module.latent_rows
        weights = module.kv_b_proj.weight.view(module.num_heads, NOPE + VALUE, LATENT)
        q = query.transpose(1, 2)
        q = torch.cat([torch.einsum("bthd,hdc->bthc", q[..., :NOPE], weights[:, :NOPE]), q[..., NOPE:]], -1)
        batch, tokens, keys = q.shape[0], q.shape[1], rows.shape[1]
        cache = oa.KVCache.from_arrays(rows[:, :, None], head_dim_v=LATENT)
        if tokens == 1:
            calls.append("decode")
            lens = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
            o = oa.decode(q, cache, seq_lens=lens, softmax_scale=scaling)
        else:
            calls.append("attention_sparse")
            t = torch.arange(keys, device=q.device)
            lists = torch.where(t <= t[-tokens:, None], t, -1)
            indices = torch.where(lists >= 0, lists + keys * torch.arange(batch, device=q.device)[:, None, None], -1)
            o = oa.attention_sparse(q.flatten(0, 1), cache, indices=indices.flatten(0, 1).int(), softmax_scale=scaling)
            o = o.view(batch, tokens, *o.shape[1:])
        return torch.einsum("bthc,hvc->bthv", o, weights[:, NOPE:]), None

    transformers.AttentionInterface.register("latent_rows", latent)
    transformers.AttentionMaskInterface.register("latent_rows", lambda *a, **more: None)
    model.set_attn_implementation("latent_rows")
    return calls


@torch.no_grad()
def logits_of(model: Any, tokens: Any, prompt: int) -> Any:
    """Logits of all positions in float64: a prompt, then single tokens over the model's cache."""
    made = model(tokens[:, :prompt], use_cache=True)
    found, past = [made.logits], made.past_key_values
    for i in range(prompt, tokens.shape[1]):
        made = model(tokens[:, i : i + 1], past_key_values=past, use_cache=True)
        found.append(made.logits)
    return torch.cat(found, 1).double()
