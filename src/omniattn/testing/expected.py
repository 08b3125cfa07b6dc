"""What a kernel must give, and how far from it a result is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omniattn.problems import QuantizedQK, QuantizedV
from omniattn.problems.quantize import BLOCK_ROWS
from omniattn.reference.dequantize import contents, head_of, rows_of, values_of
from omniattn.reference.quantize import sequences
from omniattn.testing.compare import compare

Values = npt.NDArray[Any]

#: fp32 arithmetic against fp64: rounding of sums of a few hundred terms of order 1.
_O_ATOL = 1e-5

# A kernel rounds P to e4m3 against another base than the emulation does. Two emulations with different bases
# differ by 0.043 in relative L1 and 9e-4 in cosine where V has no mean; wrong scales or keys show as 0.1 and more.
_LOW_COSINE = 2e-3
_LOW_L1 = 0.06
_LOW_LSE_ATOL = 0.02

#: fp32 sums of up to 256 products in another order, relative to the largest value.
_BIAS_RTOL = 1e-4
#: Products of 16-bit halves of fp32 values, relative to the largest value.
_DELTA_RTOL = 1e-3


@dataclass(frozen=True)
class Grade:
    """One output.

    Attributes
    ----------
    name : str
    ratio : float
        Its error as a fraction of what is allowed; infinite if NaN or infinities are at other places.
    text : str
        Figures.
    """

    name: str
    ratio: float
    text: str

    @property
    def ok(self) -> bool:
        """Whether it is right."""
        return self.ratio <= 1.0

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Expected(Protocol):
    """What must come out of a call."""

    def grade(self, got: Mapping[str, Values], dtype: str, lse_atol: float) -> list[Grade]:
        """Compare outputs (names as `outputs_of` gives them) of a call in ``dtype``."""


def outputs_of(result: Any) -> dict[str, Any]:
    """The arrays that a public function returned, by name."""
    if isinstance(result, (QuantizedQK, QuantizedV)):
        found = {name: getattr(result, name, None) for name in result.problem.shapes()}
        return {name: array for name, array in found.items() if array is not None}
    if not isinstance(result, tuple):
        return {"o": result}
    o, lse = result
    return {"o": o, "lse": lse}


@dataclass(frozen=True)
class Exact:
    """Attention and merging: the fp64 reference, and what a plain framework computes in the kernel's dtype."""

    o: Values
    lse: Values
    naive_o: Values | None
    naive_lse: Values | None

    def grade(self, got: Mapping[str, Values], dtype: str, lse_atol: float) -> list[Grade]:
        """max|o - ref| <= 2 max|naive - ref| + rounding + a little for fp32."""
        reports = {
            "o": compare(got["o"], self.o, naive=self.naive_o, dtype=dtype, atol=_O_ATOL),
            "lse": compare(got["lse"], self.lse, naive=self.naive_lse, atol=lse_atol),
        }
        return [
            Grade(
                name,
                report.max_abs / report.tolerance if report.nan_equal and report.inf_equal else float("inf"),
                str(report),
            )
            for name, report in reports.items()
        ]


@dataclass(frozen=True)
class LowPrecision:
    """Attention on quantized operands: its emulation, which rounds P otherwise."""

    o: Values
    lse: Values

    def grade(self, got: Mapping[str, Values], dtype: str, lse_atol: float) -> list[Grade]:
        """Cosine, relative L1, and largest difference of the LSE, if any; ``lse_atol`` is that of exact kernels."""
        o = compare(got["o"], self.o)
        of_o = max((1.0 - o.cosine) / _LOW_COSINE, o.rel_l1 / _LOW_L1)
        without_keys = (self.o == 0).all(axis=-1)
        if not (o.nan_equal and o.inf_equal) or got["o"][without_keys].any():
            of_o = float("inf")
        grades = [Grade("o", of_o, str(o))]
        if "lse" in got:
            lse = compare(got["lse"], self.lse, atol=max(lse_atol, _LOW_LSE_ATOL))
            of_lse = lse.max_abs / lse.tolerance if lse.nan_equal and lse.inf_equal else float("inf")
            grades.append(Grade("lse", of_lse, str(lse)))
        return grades


@dataclass(frozen=True)
class Quantized:
    """Quantized operands: what the CPU gives, bit for bit but for sums of products."""

    result: QuantizedQK | QuantizedV

    def grade(self, got: Mapping[str, Values], dtype: str, lse_atol: float) -> list[Grade]:
        """Compare what belongs to a sequence; the rest of the arrays means nothing."""
        _, wanted = contents(self.result)
        if wanted.keys() != got.keys():
            return [Grade("outputs", float("inf"), f"got {sorted(got)}, expected {sorted(wanted)}")]
        for name, array in wanted.items():
            if np.shape(got[name]) != array.shape:
                return [Grade(name, float("inf"), f"shape {np.shape(got[name])}, expected {array.shape}")]
        ours: dict[str, list[Values]] = {}
        theirs: dict[str, list[Values]] = {}
        for out, found in ((dict(got), theirs), (wanted, ours)):
            for name, part in self._parts(out):
                found.setdefault(name, []).append(np.asarray(part, dtype=np.float32).ravel())
        return [self._grade(name, np.concatenate(theirs[name]), np.concatenate(ours[name])) for name in ours]

    def _parts(self, out: dict[str, Values]) -> Iterator[tuple[str, Values]]:
        """What each head of each sequence has, by the name of the output."""
        result, problem = self.result, self.result.problem
        all_k = sequences(problem, problem.rows_k, _host(result.cu_seqlens_k))
        if isinstance(result, QuantizedV):
            for s in all_k:
                for head in range(problem.heads_kv):
                    yield from zip(("v", "v_scale", "v_mean"), values_of(out, problem, s, head), strict=True)
            return
        all_q = sequences(problem, problem.rows_q, _host(result.cu_seqlens_q))
        for of_q, of_k in zip(all_q, all_k, strict=True):
            for head in range(problem.heads_kv):
                rows = rows_of(out, problem, of_k, head, is_q=False)
                yield "k_int", rows.integers
                yield "k_scale", rows.scale
                if "k_mean" in out:
                    yield "k_mean", out["k_mean"][of_k.batch, head, : problem.head_dim]
            for head in range(problem.heads_q):
                rows = rows_of(out, problem, of_q, head, is_q=True)
                yield "q_int", rows.integers
                yield "q_scale", rows.scale
                if "row_bias" not in out:
                    continue
                yield "row_bias", head_of(out["row_bias"], problem, of_q, head)[of_q.begin : of_q.begin + of_q.length]
                if problem.smooth_q:
                    first = of_q.slot(BLOCK_ROWS, problem.varlen)
                    blocks = slice(first, first + -(-of_q.length // BLOCK_ROWS))
                    yield "q_mean", head_of(out["q_mean"], problem, of_q, head)[blocks, : problem.head_dim]
                    yield "delta_s", head_of(out["delta_s"], problem, of_q, head)[blocks, : of_k.length]

    @staticmethod
    def _grade(name: str, got: Values, wanted: Values) -> Grade:
        if name in ("row_bias", "delta_s"):
            report = compare(got, wanted)
            allowed = (_BIAS_RTOL if name == "row_bias" else _DELTA_RTOL) * max(
                1.0, float(np.abs(wanted).max(initial=0))
            )
            ratio = report.max_abs / allowed if report.nan_equal and report.inf_equal else float("inf")
            return Grade(name, ratio, f"{report}; allowed {allowed:.3e}")
        different = int(np.count_nonzero((got != wanted) & ~(np.isnan(got) & np.isnan(wanted))))
        return Grade(name, float("inf") if different else 0.0, f"{different} of {wanted.size} values differ")


def _host(starts: Any) -> Values | None:
    return None if starts is None else np.asarray(starts)
