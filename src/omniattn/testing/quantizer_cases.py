"""The quantizers that only attention starts: Q, K and V of a call together. Their bits must be the CPU's."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import fp8, quantize, quantize_kv
from omniattn.launch.attn_int8 import in_workspace
from omniattn.launch.host_struct import At
from omniattn.plan.tuning import target_of
from omniattn.problems import QuantizeCall, QuantizeProblem
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.problems.precision import value_levels
from omniattn.problems.quantize import BLOCK_ROWS, QuantizeGrid, Strides3
from omniattn.reference import quantize as reference
from omniattn.registry import KernelSpec
from omniattn.runtime.record import LaunchRecord, Program
from omniattn.select import select_delta, select_fp8_values, select_kv, select_quantizer
from omniattn.select.choice import VARIABLE
from omniattn.select.quantize_ways import usual_units
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.inputs import make_qkv

# (seqlen_q, seqlen_k, whether some values are NaN or infinite): full blocks; blocks that end early; with odd values.
_PROBLEMS = ((256, 1024, False), (300, 700, False), (384, 640, True))
_HEADS_Q, _HEADS_KV, _BATCH = 4, 2, 2

#: Q, K and V to e4m3 in two launches.
VALUES_OPS = ("quantize_fp8_sums", "quantize_values")
#: K and V in two launches, where attention quantizes Q.
KV_OPS = ("quantize_kv_sums", "quantize_kv")


class Fused:
    """Q, K and V of a call together, into one allocation: what attention on integers runs first.

    Parameters
    ----------
    call : QuantizeCall
    ordinal : int
        The GPU.
    units : int, optional
        Heads of K and V that are summed up before any of them is quantized; None: as a call has it.

    Attributes
    ----------
    specs : tuple of KernelSpec
        The quantizers.
    program : Program
    offsets : dict
        Byte of every output in the allocation.
    num_bytes : int
        Size of the allocation.
    """

    def __init__(self, call: QuantizeCall, ordinal: int, units: int | None = None) -> None:
        device, problem = runtime.device_info(ordinal), call.problem
        target = target_of(device)
        outputs, outputs_bytes = in_workspace(problem)
        self.offsets = {name: at.offset for name, at in outputs.items()}
        memory = At("workspace", outputs_bytes)
        is_of_values = problem.is_of_rows and problem.has_values
        force = os.environ.get(VARIABLE)
        both = select_fp8_values(problem, target, force) if is_of_values else None
        pair = select_kv(problem, target, force) if problem.is_of_keys else None
        records: tuple[LaunchRecord, ...]
        if both is not None:
            first, second = both[0].spec, both[1].spec
            self.specs: tuple[KernelSpec, ...] = (first, second)
            room = fp8.values_scratch(first, problem)
            records = fp8.build_with_values(first, second, problem, call.strides, outputs, memory)
        elif pair is not None:
            first, second = pair[0].spec, pair[1].spec
            self.specs = (first, second)
            room = quantize_kv.scratch_bytes(first, problem)
            records = quantize_kv.build(first, second, problem, call.strides[1:], outputs, memory)
        else:
            spec = select_quantizer(problem, target, force).spec
            self.specs = (spec,)
            delta = select_delta(problem, target).spec if problem.smooth_q else None
            room = quantize.scratch(spec, problem).size
            grid = QuantizeGrid(usual_units(problem) if units is None else units, spec.ctas_per_sm)
            records = quantize.build(spec, delta, call, target, outputs, memory, grid)
        self.num_bytes = max(outputs_bytes + room, 1)
        operands = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "workspace")
        self.program = Program(records, operands, lambda spec: runtime.load(spec, ordinal))

    def allocate(self, ref: arrays.Tensor) -> arrays.Tensor:
        """The allocation, by ``ref``'s framework."""
        buffer = arrays.empty_like_framework(ref, (self.num_bytes,), "uint8")
        assert buffer.ptr % WORKSPACE_ALIGNMENT == 0
        return buffer

    def launch(self, stream: int, inputs: list[int], base: int) -> None:
        """Queue everything: addresses of q, k, v and cu_seqlens, if any, and of the allocation."""
        self.program.launch(stream, [*inputs, *[0] * (5 - len(inputs)), base])


def _strides(tensors: list[arrays.Tensor]) -> tuple[Strides3, Strides3, Strides3]:
    """(Batch, row, head); packed arrays have no batch."""
    q, k, v = ((0, *t.strides[:2]) if len(t.strides) == 3 else tuple(t.strides[:3]) for t in tensors)
    return q, k, v  # type: ignore[return-value]


def _packed(problem: QuantizeProblem, q: Values, k: Values, v: Values) -> Prepared:
    """K and V of a batch of two as packed sequences, the second one shorter; q without rows."""
    k, v = (np.concatenate((x[0], x[1, :-77])) for x in (k, v))
    starts = 0, problem.rows_k, len(k)
    problem = replace(problem, varlen=True, rows_k=len(k), max_seqlen_k=problem.rows_k)
    of_q, of_k, of_v = (x.swapaxes(0, 1) for x in (q, k, v))
    wanted = reference.quantize(problem, of_q, of_k, of_v, np.zeros(3, np.int32), np.array(starts, np.int32))
    return Prepared((q, k, v), problem, {name: wanted[name] for name in problem.shapes()}, starts)


@dataclass(frozen=True)
class Prepared:
    """Q, K, V; the quantization; its outputs by name; where packed sequences begin."""

    inputs: tuple[Values, Values, Values]
    problem: QuantizeProblem
    wanted: dict[str, Values]
    starts: tuple[int, ...] = ()

    def of_sequences(self, name: str, array: Values) -> Values:
        """An output without the slots that no packed sequence fills, which nobody writes."""
        if self.starts and name == "q_scale":
            return array[..., :0]
        if not self.starts or name not in ("k_scale", "v"):
            return array
        begins = zip(range(len(self.starts) - 1), self.starts[:-1], self.starts[1:], strict=True)
        slots = [
            -(-begin // BLOCK_ROWS) + b + i for b, begin, end in begins for i in range(-(-(end - begin) // BLOCK_ROWS))
        ]
        of_slot = BLOCK_ROWS if name == "v" else self.problem.scales_per_tile[1]
        return array.reshape(*array.shape[:-1], -1, of_slot)[..., slots, :]


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
        formats = self.spec.specialization or ("sm90", "float8_e4m3")
        grouping, v_dtype = formats
        # Values for sums in fp16, where the kernel that reads this grouping has them, are smaller.
        levels = value_levels("fp8", "fp16") if formats == ("sm80", "float8_e4m3") else value_levels("fp8", "fp32")
        seqlen_q, seqlen_k, odd = _PROBLEMS[self.index]
        q, k, v = make_qkv(
            "channel_bias", batch=_BATCH, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=_HEADS_Q, heads_kv=_HEADS_KV,
            head_dim=self.spec.head_dim, seed=self.index, dtype=self.spec.dtype,
        )  # fmt: skip
        if odd:
            q[0, 3, 1, 5], k[1, 130, 0, 7], v[0, 600, 1, 9] = np.nan, np.inf, -np.inf
        problem = QuantizeProblem(
            self.spec.dtype, _BATCH, seqlen_q, seqlen_k, _HEADS_Q, _HEADS_KV, self.spec.head_dim, False,
            grouping=grouping, smooth_v=True, v_dtype=v_dtype, unpacked=True, v_levels=levels,
        )  # fmt: skip
        if self.spec.op in KV_OPS:
            q, problem = q[:, :0], replace(problem, rows_q=0)
            if self.spec.sequences == "packed":
                return _packed(problem, q[0], k, v)
        elif self.spec.op != "quantize":
            problem = replace(
                problem, qk_dtype="float8_e4m3", granularity="per_block", smooth_k=False, row_bias="none",
                hadamard=True, seed=3,
            )  # fmt: skip
        wanted = reference.quantize(problem, *(x.swapaxes(1, 2) for x in (q, k, v)))
        return Prepared((q, k, v), problem, {name: wanted[name] for name in problem.shapes()})

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Quantize, and compare all bytes."""
        on_gpu = [framework.array(x, self.spec.dtype) for x in prepared.inputs]
        tensors = [arrays.describe(x, name) for x, name in zip(on_gpu, "qkv", strict=True)]
        fused = Fused(QuantizeCall(prepared.problem, _strides(tensors), "NHD", 0), tensors[0].ordinal)
        starts = [np.zeros(len(prepared.starts), np.int32), np.array(prepared.starts, np.int32)][
            : 2 * bool(prepared.starts)
        ]
        cu_seqlens = [framework.array(x, "int32") for x in starts]
        addresses = [t.ptr for t in tensors] + [arrays.describe(x, "cu_seqlens").ptr for x in cu_seqlens]
        if self.spec not in fused.specs:
            names = " and ".join(spec.name for spec in fused.specs)
            return float("inf"), f"attention chooses {names} instead of this row"
        buffer = fused.allocate(tensors[0])
        framework.synchronize()
        fused.launch(0, addresses, buffer.ptr)
        framework.synchronize()
        raw = framework.to_numpy(buffer.obj)
        notes: list[str] = []
        for name, (shape, dtype) in prepared.problem.shapes().items():
            wanted: Any = prepared.wanted[name]
            got = raw[fused.offsets[name] :][: wanted.nbytes].view(dtype).reshape(shape)
            got, wanted = prepared.of_sequences(name, got), prepared.of_sequences(name, wanted)
            if not np.array_equal(got, wanted, equal_nan=wanted.dtype.kind == "f"):
                notes.append(f"{name} differs in {int((got != wanted).sum())} of {got.size} elements")
        return (float("inf") if notes else 0.0), "; ".join(notes)


def fused_cases(spec: KernelSpec) -> tuple[FusedCase, ...]:
    """The cases of such a row."""
    return tuple(FusedCase(spec, index) for index in range(len(_PROBLEMS)))
