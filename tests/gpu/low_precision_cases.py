"""What the tests of low-precision attention share: inputs, comparison, a softmax in fp64 on dequantized operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import omniattn as oa
from omniattn import testing
from omniattn.reference.quantize import KEY_ORDER

#: Steps of e4m3: half of one, relative to a normal number, and absolute below the least one.
_RELATIVE, _ABSOLUTE = 2.0**-4, 2.0**-10
#: What the kernels make of the largest probability at least when they round it.
_LEAST_TOP = 13.5


def inputs(dtype: str = "bfloat16", **shape: Any) -> list[torch.Tensor]:
    """Q, K and V of `testing.make_qkv` on the CPU."""
    return [
        torch.from_numpy(np.asarray(x, dtype=np.float32)).to(getattr(torch, dtype))
        for x in testing.make_qkv(dtype=dtype, **shape)
    ]


def to_numpy(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """In fp32, on the host."""
    return np.asarray(x.detach().float().cpu().numpy())


def check(got: Any, want: Any, *, lse_atol: float = 5e-3, cosine: float = 0.9985, relative_l1: float = 0.05) -> None:
    """O and LSE of the kernel against the emulation's, NumPy: they round P at different bases, and nothing else."""
    o, o_ref = to_numpy(got[0]), want[0]
    np.testing.assert_array_equal(np.isnan(o), np.isnan(o_ref))
    report = testing.compare(o, o_ref)
    assert report.cosine >= cosine, report
    assert report.rel_l1 <= relative_l1, report
    lse, lse_ref = to_numpy(got[1]), want[1]
    hidden = np.isneginf(lse_ref)
    np.testing.assert_array_equal(np.isneginf(lse), hidden)
    assert np.abs(lse[~hidden] - lse_ref[~hidden]).max(initial=0.0) <= lse_atol
    # A row that attends to nothing is 0, not almost.
    rows = o if hidden.ndim == 2 else o.reshape(-1, *o.shape[-2:])
    nothing = np.moveaxis(hidden, -2, -1).reshape(rows.shape[:-1])
    assert not rows[nothing].any()


def quantize(precision: oa.Int8 | oa.Int4, q: Any, k: Any, v: Any, **more: Any) -> tuple[oa.QuantizedQK, oa.QuantizedV]:
    """With the knobs of a precision; ``more``: layout, with_bias, and what packed sequences need."""
    of_k = {name: more[name] for name in ("layout", "cu_seqlens_k", "max_seqlen_k") if name in more}
    qk = oa.quantize_qk(
        q, k, dtype=precision.qk, granularity=precision.granularity, smooth_k=precision.smooth_k,
        smooth_q=precision.smooth_q, **more,
    )  # fmt: skip
    return qk, oa.quantize_v(v, smooth_v=precision.smooth_v, **of_k)


def _values(v: oa.QuantizedV, of_batch: tuple[int, ...], batch: int, begin: int, keys: int, d: int) -> torch.Tensor:
    """(kv heads, keys, d), dequantized."""
    first = (-(-begin // 128) + batch) * 128 if not of_batch else 0
    codes = v.v[of_batch][:, :d, first : first + -(-keys // 128) * 128]
    codes = codes.reshape(*codes.shape[:2], -1, 16)
    ordered = torch.empty_like(codes)
    ordered[..., torch.as_tensor(KEY_ORDER, device=codes.device)] = codes
    values = ordered.flatten(2)[..., :keys].contiguous().view(torch.float8_e4m3fn).double().transpose(1, 2)
    return values * v.v_scale[batch, :, None, :d].double() + v.v_mean[batch, :, None, :d].double()


def softmax_on_integers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, grouping: str, bits: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of causal attention with per-thread scales, double precision: Q and K quantized, V as it is.

    q, k, v: dense, heads third, as many heads of K as of Q. o: as q; lse: heads first.
    """
    slice_rows, tile = (32, 64) if grouping == "sm80" else (16, 128)
    batch, n, heads, d = q.shape
    m = k.shape[1]
    qk = oa.quantize_qk(q, k, with_bias=True, grouping=grouping, dtype=f"int{bits}")
    of_q, of_k = (qk.q_int, qk.k_int) if bits == 8 or grouping == "sm90" else (nibbles(qk.q_int), nibbles(qk.k_int))
    rows, keys = torch.arange(n, device=q.device), torch.arange(m, device=q.device)
    q_scale = qk.q_scale.view(batch, heads, -1, 8)[:, :, rows // slice_rows, rows % 8]
    k_scale = qk.k_scale.view(batch, heads, -1, 4)[:, :, keys // tile, keys % 8 // 2]
    scores = (of_q[..., :d].double() * q_scale[..., None]) @ (of_k[..., :d].double() * k_scale[..., None]).mT
    scores = (scores + qk.row_bias[..., None]) * d**-0.5
    scores = scores.masked_fill(keys[None] > rows[:, None] + m - n, float("-inf"))
    o = torch.softmax(scores, -1) @ v.double().transpose(1, 2)
    return o.transpose(1, 2), torch.logsumexp(scores, -1)


def check_against_integers(o: Any, lse: Any, want: tuple[torch.Tensor, torch.Tensor], cosine: float) -> None:
    """O and LSE of a kernel against those of `softmax_on_integers`."""
    error = ((lse - want[1]).abs() / (1 + want[1].abs())).max().item()
    assert error <= 2e-4
    report = testing.compare(to_numpy(o), to_numpy(want[0]))
    assert report.cosine >= cosine, report


def nibbles(x: torch.Tensor) -> torch.Tensor:
    """4-bit integers, the low one of a byte first, as int8."""
    both = torch.stack([x & 15, x >> 4], -1).flatten(-2).to(torch.int8)
    return torch.where(both > 7, both - 16, both)


def growing_scores(seed: int, head_dim: int, spread: float) -> list[torch.Tensor]:
    """Q, K and V on the GPU whose scores grow along the keys, beyond what P has room for."""
    torch.manual_seed(seed)
    q = (torch.randn(1, 611, 2, head_dim, device="cuda") * (1 + spread * seed)).to(torch.bfloat16)
    growth = torch.linspace(4, 0.1, 900, device="cuda")[None, :, None, None]
    k = (torch.randn(1, 900, 2, head_dim, device="cuda") * growth).to(torch.bfloat16)
    return [q, k, torch.randn(1, 900, 2, head_dim, device="cuda", dtype=torch.bfloat16)]


def expected(
    qk: oa.QuantizedQK,
    v: oa.QuantizedV,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, lse, bound of o's error by the rounding of P), double precision, heads first; for the sm90 grouping.

    mask: of dense batches, broadcastable to (batch, heads, queries, keys).
    """
    p = qk.problem
    d, group = p.head_dim, p.heads_q // max(p.heads_kv, 1)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    device = qk.q_int.device
    lead = (p.heads_q,) if p.varlen else (p.batch, p.heads_q)
    o, bound = (torch.zeros(*lead, p.rows_q, d, dtype=torch.float64, device=device) for _ in range(2))
    lse = torch.full((*lead, p.rows_q), -torch.inf, dtype=torch.float64, device=device)
    starts = [[0, p.rows_q]] * p.batch, [[0, p.rows_k]] * p.batch
    if p.varlen:
        starts = tuple(list(zip(x.tolist(), x.tolist()[1:], strict=False)) for x in (qk.cu_seqlens_q, qk.cu_seqlens_k))  # type: ignore[assignment]
    for b in range(p.batch):
        (q0, q1), (k0, k1) = starts[0][b], starts[1][b]
        n, m = q1 - q0, k1 - k0
        if n == 0:
            continue
        at: tuple[int, ...] = () if p.varlen else (b,)
        slot_q, slot_k = ((-(-x // 128) + b) if p.varlen else 0 for x in (q0, k0))
        rows, keys = torch.arange(n, device=device), torch.arange(m, device=device)
        q_scale = qk.q_scale[at][:, slot_q * 64 + rows // 16 * 8 + rows % 8].double()
        k_scale = qk.k_scale[at][:, slot_k * 4 + keys // 128 * 4 + keys % 8 // 2].double()
        of_q = qk.q_int[at][:, q0:q1, :d].double() * q_scale[..., None]
        of_k = (qk.k_int[at][:, k0:k1, :d].double() * k_scale[..., None]).repeat_interleave(group, 0)
        scores = of_q @ of_k.transpose(1, 2)
        if qk.delta_s is not None:
            scores = scores + qk.delta_s[at][:, slot_q + rows // 128, :m].double()
        scores = (scores + qk.row_bias[at][:, q0:q1, None].double()) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        place = keys[None] - rows[:, None] - (m - n)
        left, right = (-1, -1) if window is None else window
        right = 0 if causal else right
        hidden = (place < -left if left >= 0 else place != place) | (place > right if right >= 0 else place != place)
        if mask is not None:
            own_mask = mask.expand(p.batch, p.heads_q, n, m)[b]
            hidden = hidden | (~own_mask if mask.dtype == torch.bool else own_mask == -torch.inf)
            if mask.dtype != torch.bool:
                scores = scores + own_mask.double()
        scores = scores.masked_fill(hidden, -torch.inf)
        logits = [scores] if sinks is None else [scores, sinks.double().view(-1, 1, 1).expand(-1, n, 1)]
        own = torch.logsumexp(torch.cat(logits, 2), 2)
        weights = torch.exp(scores - torch.where(own == -torch.inf, 0.0, own)[..., None])
        values = _values(v, at, b, k0, m, d).repeat_interleave(group, 0)
        o[at][:, q0:q1] = weights @ values
        bare = (values - v.v_mean[b, :, None, :d].double().repeat_interleave(group, 0)).abs()
        top = weights.amax(2, keepdim=True) if m else torch.zeros(p.heads_q, n, 1, dtype=weights.dtype, device=device)
        # Each P is off by half a step: relative, or absolute where it is small against the largest one.
        error = torch.maximum(weights * _RELATIVE, (top * (_ABSOLUTE / _LEAST_TOP)).expand_as(weights))
        bound[at][:, q0:q1] = error.masked_fill(hidden, 0.0) @ bare
        lse[at][:, q0:q1] = own
    return o, lse, bound


def check_expected(
    o: torch.Tensor,
    lse: torch.Tensor,
    want: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    largest_v: float,
    nothing_is_zero: bool = True,
    lse_atol: float = 2e-3,
) -> None:
    """O and LSE of a kernel, heads first, against those of `expected`."""
    want_o, want_lse, bound = want
    assert torch.equal(torch.isnan(lse), torch.isnan(want_lse))
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    seen = torch.isfinite(want_lse)
    error = (lse.double() - want_lse)[seen].abs()
    assert bool((error <= lse_atol * (1 + want_lse[seen].abs())).all()), error.max()
    if nothing_is_zero:
        assert not o[torch.isneginf(want_lse)].any()
    # Scores and the sums of 13 bits are off by less than a 256th; o is rounded to its own type.
    error = (o.double() - want_o)[seen].abs()
    allowed = 1.1 * bound[seen] + (2.0**-8 + 2.0**-8) * want_o[seen].abs() + 2e-3 * largest_v
    assert bool((error <= allowed).all()), (error - allowed).max()
    if error.numel() >= 4096 and want_o[seen].abs().sum() > 0:
        assert float(error.sum() / want_o[seen].abs().sum()) <= 0.05
