"""The quantizers that only attention starts: Q, K and V of a call together. Their bits must be the CPU's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omniattn import arrays
from omniattn.launch.quantize import COMMON, QuantizeProblem
from omniattn.precision import Int8
from omniattn.quantizer import FusedQuantizer, problem_for, strides_of
from omniattn.reference import quantize as reference
from omniattn.registry import KernelSpec
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

# (seqlen_q, seqlen_k, whether some values are NaN or infinite): full blocks; blocks that end early; with odd values.
_PROBLEMS = ((256, 1024, False), (300, 700, False), (384, 640, True))
_HEADS_Q, _HEADS_KV, _BATCH = 4, 2, 2


@dataclass(frozen=True)
class Prepared:
    """Q, K, V; the quantization; its outputs by name."""

    inputs: tuple[Values, Values, Values]
    problem: QuantizeProblem
    wanted: dict[str, Values]


@dataclass(frozen=True)
class FusedCase:
    """One quantization for one row of the registry: `RowCase`.

    Attributes
    ----------
    spec : KernelSpec
    index : int
        Of the problem.
    """

    spec: KernelSpec
    index: int

    @property
    def name(self) -> str:
        """What messages call it."""
        seqlen_q, seqlen_k, odd = _PROBLEMS[self.index]
        return f"seqlen_q {seqlen_q}, seqlen_k {seqlen_k}{', NaN and infinities' if odd else ''}"

    def prepare(self) -> Prepared:
        """Inputs, and what must come out."""
        formats = COMMON[int(dict(self.spec.defines)["COMMON"])]
        assert formats is not None
        pv = {"float16": "fp16", "float8_e4m3": "fp8"}[formats[1]]
        accumulator = "fp16" if formats == ("sm80", "float8_e4m3") else "fp32"  # smaller numbers, for fp16 sums
        seqlen_q, seqlen_k, odd = _PROBLEMS[self.index]
        q, k, v = make_qkv(
            "channel_bias", batch=_BATCH, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=_HEADS_Q, heads_kv=_HEADS_KV,
            head_dim=self.spec.head_dim, seed=self.index, dtype=self.spec.dtype,
        )  # fmt: skip
        if odd:
            q[0, 3, 1, 5], k[1, 130, 0, 7], v[0, 600, 1, 9] = np.nan, np.inf, -np.inf
        problem = problem_for(
            Int8(pv=pv, pv_accumulator=accumulator), dtype=self.spec.dtype, batch=_BATCH, rows_q=seqlen_q,
            rows_k=seqlen_k, heads_q=_HEADS_Q, heads_kv=_HEADS_KV, head_dim=self.spec.head_dim, varlen=False,
            grouping=formats[0], full_bias=False,
        )  # fmt: skip
        wanted = reference.quantize(problem, *(x.swapaxes(1, 2) for x in (q, k, v)))
        return Prepared((q, k, v), problem, {name: wanted[name] for name in problem.shapes()})

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Quantize, and compare all bytes."""
        on_gpu = [framework.array(x, self.spec.dtype) for x in prepared.inputs]
        tensors = [arrays.describe(x, name) for x, name in zip(on_gpu, "qkv", strict=True)]
        strides = [strides_of(t, "NHD", False) for t in tensors]
        fused = FusedQuantizer(prepared.problem, (strides[0], strides[1], strides[2]), 0)
        if fused.plan.spec != self.spec:
            return float("inf"), f"int8 attention chooses {fused.plan.spec.name} instead of this row"
        buffer = fused.allocate(tensors[0])
        framework.synchronize()
        fused.launch(0, (tensors[0].ptr, tensors[1].ptr, tensors[2].ptr, 0, 0), buffer.ptr)
        framework.synchronize()
        raw = framework.to_numpy(buffer.obj)
        notes: list[str] = []
        for name, (shape, dtype) in prepared.problem.shapes().items():
            wanted: Any = prepared.wanted[name]
            got = raw[fused.offsets[name] :][: wanted.nbytes].view(dtype).reshape(shape)
            if not np.array_equal(got, wanted, equal_nan=wanted.dtype.kind == "f"):
                notes.append(f"{name} differs in {int((got != wanted).sum())} of {got.size} elements")
        return (float("inf") if notes else 0.0), "; ".join(notes)


def fused_cases(spec: KernelSpec) -> tuple[FusedCase, ...]:
    """The cases of such a row."""
    return tuple(FusedCase(spec, index) for index in range(len(_PROBLEMS)))
