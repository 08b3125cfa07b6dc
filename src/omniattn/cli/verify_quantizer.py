"""``omniattn verify`` of the quantizers that only attention starts: Q, K and V of a call together."""

from __future__ import annotations

import numpy as np

from omniattn import arrays, testing
from omniattn.cli.frameworks import Framework
from omniattn.problems.precision import Int8
from omniattn.problems.quantize import COMMON
from omniattn.quantizer import FusedQuantizer, problem_for, strides_of
from omniattn.reference import quantize as reference
from omniattn.registry import KernelSpec

# (seqlen_q, seqlen_k, whether some values are NaN or infinite): full blocks; blocks that end early; with odd values.
_PROBLEMS = ((256, 1024, False), (300, 700, False), (384, 640, True))
_HEADS_Q, _HEADS_KV, _BATCH = 4, 2, 2


def verify_common(framework: Framework, spec: KernelSpec) -> tuple[int, float, list[str]]:
    """Run a row's problems; returns their number, an error of 0 or inf, what was wrong. Bits must be the CPU's."""
    notes: list[str] = []
    formats = COMMON[int(dict(spec.defines)["COMMON"])]
    assert formats is not None
    grouping, pv = formats[0], {"float16": "fp16", "float8_e4m3": "fp8"}[formats[1]]
    accumulator = "fp16" if formats == ("sm80", "float8_e4m3") else "fp32"  # the smaller numbers that fp16 sums need
    for seed, (seqlen_q, seqlen_k, odd) in enumerate(_PROBLEMS):
        q, k, v = testing.make_qkv(
            "channel_bias", batch=_BATCH, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=_HEADS_Q, heads_kv=_HEADS_KV,
            head_dim=spec.head_dim, seed=seed, dtype=spec.dtype,
        )  # fmt: skip
        if odd:
            q[0, 3, 1, 5], k[1, 130, 0, 7], v[0, 600, 1, 9] = np.nan, np.inf, -np.inf
        problem = problem_for(
            Int8(pv=pv, pv_accumulator=accumulator), dtype=spec.dtype, batch=_BATCH, rows_q=seqlen_q, rows_k=seqlen_k,
            heads_q=_HEADS_Q, heads_kv=_HEADS_KV, head_dim=spec.head_dim, varlen=False, grouping=grouping,
            full_bias=False,
        )  # fmt: skip
        on_gpu = [framework.array(x, spec.dtype) for x in (q, k, v)]
        tensors = [arrays.describe(x, name) for x, name in zip(on_gpu, "qkv", strict=True)]
        strides = [strides_of(t, "NHD", False) for t in tensors]
        fused = FusedQuantizer(problem, (strides[0], strides[1], strides[2]), 0)
        if fused.plan.spec != spec:
            return 1, float("inf"), [f"int8 attention chooses {fused.plan.spec.name} instead of this row"]
        buffer = fused.allocate(tensors[0])
        framework.synchronize()
        fused.launch(0, (tensors[0].ptr, tensors[1].ptr, tensors[2].ptr, 0, 0), buffer.ptr)
        framework.synchronize()
        raw = framework.to_numpy(buffer.obj)
        wanted = reference.quantize(problem, *(x.swapaxes(1, 2) for x in (q, k, v)))
        for name, (shape, dtype) in problem.shapes().items():
            size = wanted[name].nbytes
            got = raw[fused.offsets[name] :][:size].view(dtype).reshape(shape)
            if not np.array_equal(got, wanted[name], equal_nan=wanted[name].dtype.kind == "f"):
                wrong = int((got != wanted[name]).sum())
                notes.append(
                    f"seqlen_q {seqlen_q}, seqlen_k {seqlen_k}: {name} differs in {wrong} of {got.size} elements"
                )
    return len(_PROBLEMS), float("inf") if notes else 0.0, notes
