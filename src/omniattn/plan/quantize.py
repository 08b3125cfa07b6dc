"""The quantizers of one GPU: selection, plans, and Q, K and V of an attention call together."""

from __future__ import annotations

from . import arrays
from .arrays import Tensor
from .errors import UnsupportedError
from .launch.quantize import GROUP_BYTES, QuantizePlan, QuantizeProblem, Strides3, carve
from .precision import Int8, value_levels
from .registry import REGISTRY, KernelSpec


class FusedQuantizer:
    """Q, K and V of one attention call together, into one allocation: what ``attention(precision="int8")`` runs first.

    Parameters
    ----------
    problem : QuantizeProblem
    strides : (Strides3, Strides3, Strides3)
        Element strides (batch, seq, head) of q, k, v; 0 for an extent of 1 and for the batch of packed sequences.
    ordinal : int
        The GPU.
    run : bool
        Load the kernels; without, the object only describes.

    Attributes
    ----------
    offsets : dict
        Byte of every output (names of `QuantizeProblem.shapes`) in the allocation.
    num_bytes : int
        Size of the allocation: outputs, partial sums and counters.
    num_launches : int
        Kernels that `launch` queues: 2, with ``delta_s`` 3.
    """

    __slots__ = ("_outputs_bytes", "num_bytes", "num_launches", "offsets", "plan", "problem")

    def __init__(
        self, problem: QuantizeProblem, strides: tuple[Strides3, Strides3, Strides3], ordinal: int, *, run: bool = True
    ) -> None:
        self.problem = problem
        self.plan = device_plan(problem, strides, ordinal, run=run)
        self.offsets, self._outputs_bytes = carve(problem.shapes())
        self.num_bytes = max(self._outputs_bytes + self.plan.workspace_bytes, 1)
        self.num_launches = self.plan.num_launches

    def allocate(self, ref: Tensor) -> Tensor:
        """The allocation, by ``ref``'s framework."""
        return arrays.empty_like_framework(ref, (self.num_bytes,), "uint8")

    def launch(self, stream: int, inputs: tuple[int, int, int, int, int], base: int) -> None:
        """Queue everything on ``stream``.

        Parameters
        ----------
        inputs : tuple of int
            Addresses of q, k, v, cu_seqlens_q, cu_seqlens_k; 0 for what is absent.
        base : int
            Address of the allocation.
        """
        outputs = {name: base + offset for name, offset in self.offsets.items()}
        self.plan.launch(stream, inputs, outputs, base + self._outputs_bytes)


def problem_for(
    precision: Int8,
    *,
    dtype: str,
    batch: int,
    rows_q: int,
    rows_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    varlen: bool,
    grouping: str,
    full_bias: bool,
    max_seqlen_k: int = 0,
    wide: bool = False,
) -> QuantizeProblem:
    """The quantization that an attention call of this precision needs; ``precision`` without "auto"."""
    return QuantizeProblem(
        dtype, batch, rows_q, rows_k, heads_q, heads_kv, head_dim, varlen, precision.bits, precision.granularity,
        grouping, precision.smooth_q, precision.smooth_k, precision.smooth_v, "full" if full_bias else "marks",
        v_dtype="float16" if precision.pv == "fp16" else "float8_e4m3", max_seqlen_k=max_seqlen_k, wide=wide,
        v_levels=value_levels(precision.pv, precision.pv_accumulator),
    )  # fmt: skip


def strides_of(t: Tensor | None, layout: str, varlen: bool) -> Strides3:
    """(batch, seq, head) element strides; 0 where the extent is 1, and for what is absent."""
    if t is None:
        return (0, 0, 0)
    own = [0 if n == 1 else s for n, s in zip(t.shape, t.strides, strict=True)]
    seq, head = (-3, -2) if layout == "NHD" else (-2, -3)
    return (0 if varlen else own[0], own[seq], own[head])


def select_quantizer(op: str, dtype: str, head_dim: int, cc: tuple[int, int], common: int = 0) -> KernelSpec:
    """The row of ``op`` ("quantize" or "quantize_delta") with the narrowest tile that holds ``head_dim``.

    ``common``: `QuantizeProblem.common`; where the GPU has no row for it, that for anything.

    Raises
    ------
    UnsupportedError
        There is none for this element type, or for the GPU.
    """
    rows = [s for s in REGISTRY if s.op == op and s.dtype == dtype and s.head_dim >= head_dim and s.min_arch <= cc]
    wanted = [s for s in rows if dict(s.defines)["COMMON"] == str(common)]
    rows = wanted or [s for s in rows if dict(s.defines)["COMMON"] == "0"]
    if not rows:
        raise UnsupportedError(
            f"no quantizer serves {dtype}, head_dim {head_dim} on compute capability {cc[0]}.{cc[1]}",
            instead="float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer",
        )
    return min(rows, key=lambda s: s.head_dim)


def device_plan(
    problem: QuantizeProblem,
    strides: tuple[Strides3, Strides3, Strides3],
    ordinal: int,
    *,
    run: bool,
    group_bytes: int = GROUP_BYTES,
) -> QuantizePlan:
    """The plan for GPU ``ordinal``, with its kernels loaded if ``run``."""
    from . import runtime

    device = runtime.device_info(ordinal)
    spec = select_quantizer("quantize", problem.dtype, problem.head_dim, device.cc, problem.common)
    delta = select_quantizer("quantize_delta", problem.dtype, problem.head_dim, device.cc)
    return QuantizePlan(
        spec,
        runtime.load(spec, ordinal) if run else None,
        runtime.load(delta, ordinal) if run and problem.smooth_q else None,
        problem,
        strides,
        device.sm_count,
        group_bytes,
    )
