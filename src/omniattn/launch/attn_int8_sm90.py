"""Launch of ``attn_int8_sm90``: quantization first, unless that has been done; then attention on the integers."""

from __future__ import annotations

import struct

from ..problem import Problem
from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .attn_fwd import REST_BYTES, ForwardStrides, num_m_blocks, pack_rest
from .attn_fwd_sm90 import tiles_of
from .params import PARAMS
from .quantize import QuantizePlan, QuantizeProblem, carve
from .tensor_maps import MappedOperand

# Behind AttnFwdParams: addresses of scales, bias, mean and delta_s; strides between heads of q_scale, k_scale, delta_s;
# delta_columns, head_dim_pad; TileList; flush_keys.
_OPERANDS = struct.Struct("<6Q3q2i4Ii")
_ARGUMENTS = struct.Struct(f"<128s128s128s9Q{REST_BYTES}s{_OPERANDS.size}s60x")  # a multiple of 64, as the struct is
_ALIGNMENT = 256
#: Keys whose products with V the tensor cores sum by themselves, with 13 bits and by truncation. If V has one sign,
#: outputs shrink by 0.4 % over 256 keys, by 4 % over 2048. V without its mean has no such loss
#: (docs/performance/attn_int8_sm90.md).
FLUSH_KEYS = 256
FLUSH_KEYS_SMOOTH_V = 2048


class Int8Sm90Plan:
    """Everything about a call but its pointers; the same interface as `ForwardPlan`, and a workspace.

    Parameters
    ----------
    spec : KernelSpec
    kernel : LoadedKernel or None
        None for a plan that only describes.
    quantizer : QuantizePlan or QuantizeProblem
        Of q, k and v together, in the sm90 grouping. A problem where they come quantized: then `attend` runs the plan.
    problem : Problem
    strides : ForwardStrides
    sm_count : int

    Attributes
    ----------
    workspace_bytes : int
        What a launch needs for the quantized operands.
    """

    __slots__ = (
        "_grid", "_head_strides", "_k", "_offsets", "_outputs_bytes", "_q", "_quantizer", "_rest", "_smooth_v",
        "_tail", "_v", "kernel", "num_tiles", "threads", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        quantizer: QuantizePlan | QuantizeProblem,
        problem: Problem,
        strides: ForwardStrides,
        sm_count: int,
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
        blocks, batch = num_m_blocks(problem, spec.block_m), 1 if problem.varlen else problem.batch
        self.num_tiles = blocks * batch * problem.num_q_heads
        tiles = tiles_of(problem, spec, blocks, sm_count)
        self._grid = (min(tiles.num_items, sm_count), 1, 1)
        self._rest = pack_rest(problem, strides, (0, 0), blocks)
        delta = shapes["delta_s"][0] if "delta_s" in shapes else (0, 0)
        pad = operands.head_dim_pad
        self._head_strides = (shapes["q_scale"][0][-1], shapes["k_scale"][0][-1], delta[-2] * delta[-1])
        flush_keys = FLUSH_KEYS_SMOOTH_V if operands.smooth_v else FLUSH_KEYS
        self._tail = (
            delta[-1], pad, tiles.num_items, tiles.num_pairs, tiles.num_tail_heads, tiles.lead_rows, flush_keys
        )  # fmt: skip
        row = min(spec.head_dim, 128)
        rows_q, rows_k = problem.seqlen_q, problem.seqlen_k
        self._q = MappedOperand(
            "uint8",
            (pad, rows_q, problem.num_q_heads, batch),
            (pad, pad * rows_q, pad * rows_q * problem.num_q_heads),
            (row, spec.block_m, 1, 1),
        )
        self._k = self._v = self._q  # without keys nothing is copied, but a map of zero rows cannot be made
        if rows_k:
            heads, keys = problem.num_kv_heads, shapes["v"][0][-1]
            self._k = MappedOperand(
                "uint8",
                (pad, rows_k, heads, batch),
                (pad, pad * rows_k, pad * rows_k * heads),
                (row, spec.block_n, 1, 1),
            )
            self._v = MappedOperand(
                "uint8",
                (keys, pad, heads, batch),
                (keys, keys * pad, keys * pad * heads),
                (spec.block_n, spec.head_dim, 1, 1),
            )

    @property
    def num_ctas(self) -> int:
        """CTAs of the attention kernel."""
        return self._grid[0]

    @property
    def num_launches(self) -> int:
        """Kernels of a call: those of the quantization, and attention."""
        return (0 if self._quantizer is None else self._quantizer.num_launches) + 1

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
            at.get("delta_s", 0), *self._head_strides, *self._tail,
        )  # fmt: skip
        at_q, at_k, at_v = at["q_int"], at["k_int"], at["v"]
        if self._k is self._q:
            at_k = at_v = at_q
        _ARGUMENTS.pack_into(
            PARAMS.buffer, 0, self._q.at(at_q, kernel), self._k.at(at_k, kernel), self._v.at(at_v, kernel),
            *pointers, self._rest, operands,
        )  # fmt: skip
        kernel.launch(self._grid, self.threads, stream, PARAMS.address)
