"""Launch of ``attn_int8_sm80``: quantization first, unless that has been done; then attention on mma.sync."""

from __future__ import annotations

import struct
from dataclasses import replace

from ..problem import Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .attn_fwd import REST_BYTES, ForwardStrides, Strides3, num_m_blocks, pack_rest
from .params import MAX_GRID_X, PARAMS
from .quantize import QuantizePlan, QuantizeProblem, carve

# QuantizedOperands behind AttnFwdParams: addresses of scales, bias, mean and delta_s; strides between heads of q_scale,
# k_scale, delta_s; delta_columns, head_dim_pad.
_OPERANDS = struct.Struct("<6Q3q2i")
_ARGUMENTS = struct.Struct(f"<9Q{REST_BYTES}s{_OPERANDS.size}s")
_ALIGNMENT = 256


def operand_strides(quantized: QuantizeProblem) -> tuple[Strides3, Strides3, Strides3]:
    """Strides (batch, row, head) of q_int, k_int and v in units of 16 bits; of e4m3 v a row is a channel."""
    shapes = quantized.shapes()
    sizes = {"int8": 1, "uint8": 1, "float16": 2}
    found: list[Strides3] = []
    for name in ("q_int", "k_int", "v"):
        shape, dtype = shapes[name]
        row = shape[-1] * sizes[dtype] // 2
        head = shape[-2] * row
        found.append((0 if quantized.varlen else shape[-3] * head, row, head))
    return found[0], found[1], found[2]


class Int8Sm80Plan:
    """Everything about a call but its pointers; the same interface as `ForwardPlan`, and a workspace.

    Parameters
    ----------
    spec : KernelSpec
    kernel : LoadedKernel or None
        None for a plan that only describes.
    quantizer : QuantizePlan or QuantizeProblem
        Of q, k and v together, in the sm80 grouping. A problem where they come quantized: then `attend` runs the plan.
    problem : Problem
    strides : ForwardStrides
        Those of o, LSE and mask are used.
    mask_extent : (int, int)

    Attributes
    ----------
    workspace_bytes : int
        What a launch needs for the quantized operands.
    """

    __slots__ = (
        "_facts", "_launches", "_offsets", "_outputs_bytes", "_quantizer", "_smooth_v", "kernel", "num_tiles",
        "threads", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        quantizer: QuantizePlan | QuantizeProblem,
        problem: Problem,
        strides: ForwardStrides,
        mask_extent: tuple[int, int],
    ) -> None:
        self.kernel = kernel
        self.threads = spec.num_warps * 32
        self._quantizer = None if isinstance(quantizer, QuantizeProblem) else quantizer
        operands = quantizer if isinstance(quantizer, QuantizeProblem) else quantizer.problem
        self._smooth_v = operands.smooth_v
        shapes = operands.shapes()
        self._offsets, self._outputs_bytes = carve(shapes)
        self.workspace_bytes = 0
        if self._quantizer is not None:
            self.workspace_bytes = self._outputs_bytes + self._quantizer.workspace_bytes + _ALIGNMENT
        blocks = num_m_blocks(problem, spec.block_m)
        self.num_tiles = blocks * problem.num_q_heads * (1 if problem.varlen else problem.batch)
        of_q, of_k, of_v = operand_strides(operands)
        own = replace(strides, q=of_q, k=of_k, v=of_v)
        self._launches: list[tuple[tuple[int, int, int], bytes]] = []
        for offset in range(0, self.num_tiles, MAX_GRID_X):
            rest = pack_rest(problem, own, mask_extent, blocks, tile_offset=offset)
            self._launches.append(((min(MAX_GRID_X, self.num_tiles - offset), 1, 1), rest))
        delta = shapes["delta_s"][0] if "delta_s" in shapes else (0, 0)
        self._facts = (
            shapes["q_scale"][0][-1], shapes["k_scale"][0][-1], delta[-2] * delta[-1], delta[-1],
            operands.head_dim_pad,
        )  # fmt: skip

    @property
    def num_ctas(self) -> int:
        """CTAs of the attention kernel."""
        return self.num_tiles

    @property
    def num_launches(self) -> int:
        """Kernels of a call: those of the quantization, and attention."""
        return (0 if self._quantizer is None else self._quantizer.num_launches) + len(self._launches)

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue everything on ``stream``; ``pointers`` as `ForwardPlan.launch` takes them, then the workspace's."""
        if self.num_tiles == 0:
            return
        quantizer = self._quantizer
        if self.kernel is None or quantizer is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        q, k, v, o, lse, starts_q, starts_k, mask, sinks, workspace = pointers
        base = -(-workspace // _ALIGNMENT) * _ALIGNMENT
        at = {name: base + offset for name, offset in self._offsets.items()}
        behind = base + self._outputs_bytes
        quantizer.launch(stream, (q, k, v, starts_q, starts_k), at, behind)
        self.attend(stream, at, (q, k, v, o, lse, *quantizer.starts(behind), mask, sinks))

    def attend(self, stream: int, at: dict[str, int], pointers: tuple[int, ...]) -> None:
        """Queue attention alone on ``stream``.

        Parameters
        ----------
        at : dict
            Addresses of the operands by the names of `QuantizeProblem.shapes`.
        pointers : tuple of int
            As `ForwardPlan.launch` takes them; the first three are not looked at, and cu_seqlens never decrease.
        """
        if self.num_tiles == 0:
            return
        kernel = self.kernel
        if kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        operands = _OPERANDS.pack(
            at["q_scale"], at["k_scale"], at["row_bias"], at["v_scale"], at["v_mean"] if self._smooth_v else 0,
            at.get("delta_s", 0), *self._facts,
        )  # fmt: skip
        given = (at["q_int"], at["k_int"], at["v"], *pointers[3:])
        for grid, rest in self._launches:
            _ARGUMENTS.pack_into(PARAMS.buffer, 0, *given, rest, operands)
            kernel.launch(grid, self.threads, stream, PARAMS.address)
