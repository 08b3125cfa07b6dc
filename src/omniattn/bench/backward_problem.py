"""Tensors of one shape of ``omniattn bench backward``, and the plain fp32 computation that checks gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from omniattn.bench.backward_cases import BackwardShape

#: Sets of inputs that timed calls rotate through.
INPUT_SETS = 2
#: Scores that the reference holds at a time.
_SCORES = 1 << 26
#: Rows of a gradient whose error is judged by themselves: what a lost tile spoils.
_ROWS = 64
#: A group of rows is judged relative to its own size, or to so much of the mean of all groups where that is more.
_FLOOR = 0.01
#: With softcap scores are larger, so that it changes them.
_SOFTCAP_GAIN = 3.0


class Inputs(NamedTuple):
    """q, k, v and the gradient of o: (tokens, heads, head_dim) if packed, else (batch, seqlen, heads, head_dim)."""

    q: Any
    k: Any
    v: Any
    do: Any


class Errors(NamedTuple):
    """Relative L1 errors, the largest of dq, dk and dv: of all elements, and of a group of rows of a head."""

    whole: float
    rows: float


class BackwardProblem:
    """One shape, on torch's current CUDA device.

    Attributes
    ----------
    shape : BackwardShape
    sets : list of Inputs
        What timed calls rotate through; results are checked on the first.
    starts : tensor or None
        ``cu_seqlens`` of packed sequences.
    """

    def __init__(self, torch: Any, shape: BackwardShape, dtype: Any = None) -> None:
        self.torch = torch
        self.shape = shape
        self.dtype = torch.bfloat16 if dtype is None else dtype
        generator = torch.Generator(device="cuda").manual_seed(1234)
        leading = (shape.tokens,) if shape.packed else (shape.batch, shape.seqlen)

        def random(heads: int, gain: float = 1.0) -> Any:
            size = (*leading, heads, shape.head_dim)
            return (torch.randn(size, dtype=torch.float32, device="cuda", generator=generator) * gain).to(self.dtype)

        gain = _SOFTCAP_GAIN if shape.softcap else 1.0
        self.sets = [
            Inputs(random(shape.heads, gain), random(shape.heads_kv), random(shape.heads_kv), random(shape.heads))
            for _ in range(INPUT_SETS)
        ]
        self.starts: Any = None
        if shape.packed:
            starts = [sum(shape.lengths[:i]) for i in range(shape.batch + 1)]
            self.starts = torch.tensor(starts, dtype=torch.int32, device="cuda")

    def hidden(self, query: Any, key: Any) -> Any:
        """Pairs that are not visible, of indices in one sequence that broadcast; None where there are none."""
        if not self.shape.causal:
            return None
        later = key > query
        return later | (key <= query - self.shape.window) if self.shape.window else later

    @functools.cached_property
    def reference(self) -> tuple[Any, Any, Any]:
        """dq, dk, dv of the first set, fp32, as (tokens, heads, head_dim)."""
        q, k, v, do = (x.reshape(-1, *x.shape[-2:]) for x in self.sets[0])
        found = tuple(self.torch.zeros(x.shape, dtype=self.torch.float32, device="cuda") for x in (q, k, v))
        first, step = 0, self.shape.group
        for n in self.shape.lengths:
            last = first + n
            heads = max(1, min(self.shape.heads_kv, _SCORES // (step * n * n)))
            for of in range(0, self.shape.heads_kv, heads):
                own, theirs = slice(of, of + heads), slice(of * step, (of + heads) * step)
                parts = (q[first:last, theirs], k[first:last, own], v[first:last, own], do[first:last, theirs])
                dq, dk, dv = self._gradients(*(x.transpose(0, 1).float() for x in parts))
                found[0][first:last, theirs], found[1][first:last, own], found[2][first:last, own] = dq, dk, dv
            first = last
        return found[0], found[1], found[2]

    def _gradients(self, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, Any, Any]:
        """Of some heads of one sequence, fp32 (heads, seqlen, head_dim); the result has the sequence first."""
        torch, cap, scale = self.torch, self.shape.softcap, self.shape.head_dim**-0.5
        n = q.shape[1]
        q, do = (x.unflatten(0, (len(k), self.shape.group)) for x in (q, do))
        k, v = k[:, None], v[:, None]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows = max(1, min(n, _SCORES // (len(k) * self.shape.group * n)))
        for begin in range(0, n, rows):
            part = slice(begin, min(n, begin + rows))
            scores = q[:, :, part] @ k.transpose(-1, -2) * scale
            slope = None
            if cap:
                soft = torch.tanh(scores / cap)
                scores, slope = cap * soft, 1 - soft * soft
            query = torch.arange(part.start, part.stop, device="cuda")[:, None]
            hidden = self.hidden(query, torch.arange(n, device="cuda"))
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            p = torch.softmax(scores, dim=-1)
            dv += (p.transpose(-1, -2) @ do[:, :, part]).sum(1, keepdim=True)
            dp = do[:, :, part] @ v.transpose(-1, -2)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            if slope is not None:
                ds = ds * slope
            dq[:, :, part] = ds @ k * scale
            dk += (ds.transpose(-1, -2) @ q[:, :, part]).sum(1, keepdim=True) * scale
        return tuple(x.flatten(0, 1).transpose(0, 1) for x in (dq, dk, dv))

    def errors(self, gradients: tuple[Any, ...]) -> Errors:
        """Errors of all elements of gradients of the first set; infinite where a shape is wrong."""
        wholes, groups = [], []
        for found, x, expected in zip(gradients, self.sets[0][:3], self.reference, strict=True):
            if tuple(found.shape) != tuple(x.shape):
                return Errors(float("inf"), float("inf"))
            apart = (found.reshape(expected.shape).float() - expected).abs().sum(-1)
            size = expected.abs().sum(-1)
            wholes.append(float(apart.sum() / size.sum()))
            rows = (_ROWS - len(apart) % _ROWS) % _ROWS
            apart, size = (
                self.torch.nn.functional.pad(t, (0, 0, 0, rows)).unflatten(0, (-1, _ROWS)).sum(1) for t in (apart, size)
            )
            groups.append(float((apart / size.clamp(min=_FLOOR * float(size.mean()))).max()))
        # max() of Python may pass NaN over.
        return Errors(*(sum(x) if any(e != e for e in x) else max(x) for x in (wholes, groups)))
