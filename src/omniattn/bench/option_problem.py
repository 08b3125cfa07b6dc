"""Tensors of one case of ``omniattn bench options``, and the plain fp64 computation that results are checked with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from omniattn.bench.anchors import InputSet
from omniattn.bench.option_cases import DROPOUT_RNG, MASKS, Case, Extents, OptionShape, document_tokens, lengths, slope
from omniattn.problems.dropout import dropout_of
from omniattn.reference.dropout import Dropout

#: Sets of q, k and v that timed calls rotate through.
INPUT_SETS = 2
#: Blocks of a mask along each axis: 256 x 256 pairs of 4096 x 4096.
_BLOCKS = 16


class Result(NamedTuple):
    """What a call gives: o as (batch, seqlen, heads, head_dim), and the LSE if it gives one."""

    o: Any
    lse: Any = None


#: Enqueues one call on an input set.
Forward = Callable[[InputSet], Result]


class Problem:
    """One case on one shape, on torch's current CUDA device.

    Attributes
    ----------
    case : Case
    extents : Extents
    scale : float
        What the scores are multiplied by.
    mask, sinks, blocks : tensor or None
        blocks: the map of visible blocks, bool (blocks of queries, blocks of keys).
    sets : list of InputSet
        What timed calls rotate through.
    check : InputSet
        What results are checked on.
    """

    def __init__(self, torch: Any, case: Case, shape: OptionShape, dtype: Any = None) -> None:
        self.torch = torch
        self.case = case
        self.extents = Extents.of(case, shape)
        self.scale = case.scale * shape.head_dim**-0.5
        self.dtype = torch.bfloat16 if dtype is None else dtype
        self._generator = torch.Generator(device="cuda").manual_seed(1234)
        self.mask = self._make_mask()
        self.sinks = self._make_sinks()
        self.blocks = self._kept_blocks() if case.blocks else None
        self.sets = [self._inputs(1.0) for _ in range(INPUT_SETS)]
        self.check = self._inputs(case.gain)

    @property
    def arrays(self) -> dict[str, Any]:
        """What a `ScoreMod` reads, by name."""
        heads = self.torch.arange(self.extents.heads, device="cuda")
        keys = self.torch.arange(self.extents.seqlen_k, device="cuda", dtype=self.torch.int32)
        found = {"slopes": slope(heads).float()}
        if self.case.documents:
            found["doc"] = keys // document_tokens(self.case, self.extents.seqlen_k)
        text = self.case.expression + self.case.mask_expression
        return {name: x for name, x in found.items() if name in text}

    def reference(self, score: Any, b: Any, h: Any, q: Any, k: Any, **arrays: Any) -> Any:
        """What a `ScoreMod` computes, for arrays on the CPU."""
        import numpy as np

        made = score if self.case.score is None else self.case.score(score, b, h, q, k)
        sees = self.sees(b, h, q, k)
        return made if sees is None else np.where(sees, made, -np.inf)

    def sees(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        """Whether a mask expression and a block mask leave pairs; for tensors that broadcast. None without either."""
        if self.blocks is not None:
            rows, keys = self.block_size
            return self.blocks[query // rows, key // keys]
        if not self.case.documents:
            return None
        tokens = document_tokens(self.case, self.extents.seqlen_k)
        return query // tokens == key // tokens

    @property
    def block_size(self) -> tuple[int, int]:
        """Queries and keys of a block of `blocks`."""
        return max(64, self.extents.seqlen_q // _BLOCKS), max(64, self.extents.seqlen_k // _BLOCKS)

    def band(self) -> Any:
        """Pairs within `Case.bounds`, bool (1, 1, seqlen_q, seqlen_k); None where they hide nothing."""
        if self.case.bounds == (-1, -1):
            return None
        e, arange = self.extents, self.torch.arange
        query, key = arange(e.seqlen_q, device="cuda")[:, None], arange(e.seqlen_k, device="cuda")
        return self.within(query, key)[None, None]

    def within(self, query: Any, key: Any) -> Any:
        """Whether queries see keys, but for the mask; for tensors that broadcast. Bounds must not hide nothing."""
        left, right = self.case.bounds
        own = query + (self.extents.seqlen_k - self.extents.seqlen_q)
        if left < 0:
            return key <= own + right
        return key >= own - left if right < 0 else (key <= own + right) & (key >= own - left)

    def errors(self, result: Result) -> tuple[float, float | None]:
        """Errors of sampled rows of the first and the last head on `check`, against fp64.

        Returns
        -------
        relative_l1 : float
            Of o; infinite if its shape is wrong.
        lse : float or None
            Largest difference of the LSE.
        """
        e, torch = self.extents, self.torch
        if tuple(result.o.shape) != (e.batch, e.seqlen_q, e.heads, e.head_dim_v):
            return float("inf"), None
        rows = torch.arange(0, e.seqlen_q, max(1, e.seqlen_q // 16), device="cuda")
        rows = torch.cat([rows, rows.new_tensor([e.seqlen_q - 1])])
        difference = total = 0.0
        worst: float | None = None
        for batch, head in ((0, 0), (e.batch - 1, e.heads - 1)):
            expected, lse = self._rows(batch, head, rows)
            difference += float((result.o[batch, rows, head].double() - expected).abs().sum())
            total += float(expected.abs().sum())
            if result.lse is not None:
                # NaN is the larger one.
                found = float((result.lse[batch, head, rows].double() - lse).abs().max())
                worst = found if worst is None or not found <= worst else worst
        return difference / total, worst

    def _rows(self, batch: int, head: int, rows: Any) -> tuple[Any, Any]:
        """o and LSE of some rows of a head, fp64."""
        e, torch = self.extents, self.torch
        q, k, v = self.check.nhd
        of = head // (e.heads // e.heads_kv)
        keys = torch.arange(e.seqlen_k, device="cuda")
        scores = q[batch, rows, head].double() @ k[batch, :, of].double().T * self.scale
        if self.case.score is not None:
            scores = self.case.score(scores, batch, head, rows[:, None], keys)
        if self.mask is not None:
            mask = self.mask.expand(e.batch, e.heads, e.seqlen_q, e.seqlen_k)[batch, head, rows]
            hides = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if hides else scores + mask.double()
        if (sees := self.sees(batch, head, rows[:, None], keys)) is not None:
            scores = scores.masked_fill(~sees, float("-inf"))
        if self.case.bounds != (-1, -1):
            scores = scores.masked_fill(~self.within(rows[:, None], keys), float("-inf"))
        if self.sinks is not None:
            sink = self.sinks[head].double().expand(len(rows), 1)
            lse = torch.logsumexp(torch.cat([scores, sink], dim=-1), dim=-1)
        else:
            lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse[:, None])
        if self.case.dropout:
            weights = weights * self._kept(batch, head, rows, keys)
        return weights @ v[batch, :, of].double(), lse

    def _kept(self, batch: int, head: int, rows: Any, keys: Any) -> Any:
        """What dropout multiplies probabilities by."""
        dropout = dropout_of(self.case.dropout)
        assert dropout is not None
        of_call = Dropout(dropout.threshold, *DROPOUT_RNG)
        kept = of_call.kept(batch, head, rows.cpu().numpy(), keys.cpu().numpy())
        return self.torch.from_numpy(kept).to(rows.device).double() * dropout.scale

    def _random(self, *size: int) -> Any:
        return self.torch.randn(size, dtype=self.torch.float32, device="cuda", generator=self._generator)

    def _inputs(self, gain: float) -> InputSet:
        e, expanded = self.extents, self.case.expanded
        of_kv = (1 if expanded == "batch" else e.batch, e.seqlen_k, 1 if expanded == "heads" else e.heads_kv)
        q = (self._random(e.batch, e.seqlen_q, e.heads, e.head_dim) * gain).to(self.dtype)
        k, v = (self._random(*of_kv, width).to(self.dtype) for width in (e.head_dim, e.head_dim_v))
        # Expanding follows the copy into the other layout, which would write the heads out.
        hnd = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        if expanded:
            k, v = (x.expand(e.batch, -1, e.heads_kv, -1) for x in (k, v))
            hnd[1:] = (x.expand(e.batch, e.heads_kv, -1, -1) for x in hnd[1:])
        return InputSet(nhd=(q, k, v), hnd=(hnd[0], hnd[1], hnd[2]))

    def _make_sinks(self) -> Any:
        """About as large as the LSE, so that they show."""
        if not self.case.sinks:
            return None
        return self._random(self.extents.heads) + math.log(self.extents.seqlen_k)

    def _make_mask(self) -> Any:
        if not self.case.mask:
            return None
        kind, e, torch = MASKS[self.case.mask], self.extents, self.torch
        extents = dict(zip("bhqk", (e.batch, e.heads, e.seqlen_q, e.seqlen_k), strict=True))
        size = tuple(n if letter in kind.extents else 1 for letter, n in extents.items())
        if kind.contents == "padding":
            keys = torch.arange(e.seqlen_k, device="cuda")
            visible = keys < torch.tensor(lengths(e.batch, e.seqlen_k), device="cuda")[:, None, None, None]
            if kind.values == "bool":
                return visible
            return torch.zeros(size, dtype=torch.float32, device="cuda").masked_fill(~visible, float("-inf"))
        numbers = self._random(*size)
        if kind.values == "fp32":
            return numbers
        if kind.values == "q":
            return numbers.to(self.dtype)
        visible = numbers > 0
        if kind.contents == "half":
            query, key = (torch.arange(n, device="cuda") // max(1, n // _BLOCKS) for n in (e.seqlen_q, e.seqlen_k))
            kept = self._half(int(query[-1]) + 1, int(key[-1]) + 1)
            visible &= kept[query[:, None], key]
        return visible

    def _half(self, rows: int, columns: int) -> Any:
        """A map that keeps exactly half of every row, by ranks of random numbers."""
        return self._random(rows, columns).argsort(dim=-1) % 2 == 0

    def _kept_blocks(self) -> Any:
        sizes = zip((self.extents.seqlen_q, self.extents.seqlen_k), self.block_size, strict=True)
        rows, columns = (-(-n // size) for n, size in sizes)
        return self._half(rows, columns)
