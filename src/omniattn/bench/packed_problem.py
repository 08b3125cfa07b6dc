"""Tensors of packed sequences of unequal lengths, and the plain fp64 computation that results are checked with."""

from __future__ import annotations

import itertools
from typing import Any

from omniattn.bench.anchors import InputSet
from omniattn.bench.option_problem import INPUT_SETS, Result
from omniattn.bench.shape_cases import ShapeCase

#: Rows of a sequence that are computed in fp64, at most, and the last one.
_ROWS = 16


class PackedProblem:
    """One case of packed sequences, on torch's current CUDA device.

    Attributes
    ----------
    case : ShapeCase
    scale : float
        What the scores are multiplied by.
    starts_q, starts_k : tensor
        ``cu_seqlens``, int32.
    sets : list of InputSet
        What timed calls rotate through: (tokens, heads, head_dim), in both layouts.
    check : InputSet
        What results are checked on.
    """

    def __init__(self, torch: Any, case: ShapeCase, dtype: Any = None) -> None:
        self.torch = torch
        self.case = case
        self.scale = case.head_dim**-0.5
        self.dtype = torch.bfloat16 if dtype is None else dtype
        self._starts = [[0, *itertools.accumulate(of)] for of in (case.lengths_q, case.lengths_k)]
        self.starts_q, self.starts_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in self._starts)
        self._generator = torch.Generator(device="cuda").manual_seed(1234)
        self.sets = [self._inputs() for _ in range(INPUT_SETS)]
        self.check = self.sets[0]

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest sequences."""
        return max(self.case.lengths_q), max(self.case.lengths_k)

    def _inputs(self) -> InputSet:
        case = self.case
        sizes = (
            (sum(case.lengths_q), case.heads, case.head_dim),
            (sum(case.lengths_k), case.heads // case.group, case.head_dim),
            (sum(case.lengths_k), case.heads // case.group, case.head_dim_v),
        )
        q, k, v = (
            self.torch.randn(size, dtype=self.torch.float32, device="cuda", generator=self._generator).to(self.dtype)
            for size in sizes
        )
        # Packed sequences have one layout.
        return InputSet(nhd=(q, k, v), hnd=(q, k, v))

    def within(self, query: Any, key: Any, queries: Any, keys: Any) -> Any:
        """Whether a query of a sequence of these lengths sees a key; for tensors that broadcast."""
        left, right = self.case.bounds
        own = query + keys - queries
        sees = (key >= 0) & (query >= 0)
        if left >= 0:
            sees = sees & (key >= own - left)
        return sees & (key <= own + right) if right >= 0 else sees

    def errors(self, result: Result) -> tuple[float, float | None]:
        """Errors of sampled rows on `check`, against fp64: of the first, the last, the longest, the shortest sequence.

        Returns
        -------
        relative_l1 : float
            Of o; infinite if its shape is wrong.
        lse : None
        """
        case, torch = self.case, self.torch
        if tuple(result.o.shape) != (sum(case.lengths_q), case.heads, case.head_dim_v):
            return float("inf"), None
        by_length = sorted(range(len(case.lengths_q)), key=lambda b: case.lengths_k[b])
        difference = total = 0.0
        for b in dict.fromkeys((0, len(case.lengths_q) - 1, by_length[0], by_length[-1])):
            n, begin = case.lengths_q[b], self._starts[0][b]
            rows = torch.arange(0, n, max(1, n // _ROWS), device="cuda")
            rows = torch.cat([rows, rows.new_tensor([n - 1])])
            for head in (0, case.heads - 1):
                expected = self._rows(b, head, rows)
                difference += float((result.o[begin + rows, head].double() - expected).abs().sum())
                total += float(expected.abs().sum())
        return difference / total, None

    def _rows(self, b: int, head: int, rows: Any) -> Any:
        """o of some rows of a head of sequence b, fp64; rows that see nothing are 0."""
        case, torch = self.case, self.torch
        q, k, v = self.check.nhd
        begin, n = self._starts[1][b], case.lengths_k[b]
        of = head // case.group
        keys = torch.arange(n, device="cuda")
        scores = q[self._starts[0][b] + rows, head].double() @ k[begin : begin + n, of].double().T * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~self.within(rows[:, None], keys, case.lengths_q[b], n), float("-inf"))
        # A row that sees nothing has 0 / 0.
        return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v[begin : begin + n, of].double()
