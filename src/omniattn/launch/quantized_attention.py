"""What the launches of low-precision attention share: quantization first, into a workspace, unless it has been done."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod

from ..registry import KernelSpec
from ..runtime import LoadedKernel
from .params import WORKSPACE_ALIGNMENT
from .quantize import QuantizePlan, QuantizeProblem, carve

#: QuantizedOperands (``kernels_cu/attention/quantized_operands.cuh``): addresses of scales, bias, mean and delta_s;
#: strides between heads of q_scale, k_scale, delta_s; delta_columns, head_dim_pad.
OPERANDS = struct.Struct("<6Q3q2i")


class QuantizedAttentionPlan(ABC):
    """Everything about a call but its pointers; the same interface as `ForwardPlan`, and a workspace.

    Parameters
    ----------
    spec : KernelSpec
    kernel : LoadedKernel or None
        None for a plan that only describes.
    quantizer : QuantizePlan or QuantizeProblem
        Of q, k and v together, in the grouping that the kernel reads. A problem where they come quantized: then
        `attend` runs the plan.
    num_tiles : int
        Blocks of query rows of all heads; 0: there is nothing to do.

    Attributes
    ----------
    operands : QuantizeProblem
        What describes the quantized operands.
    workspace_bytes : int
        What a launch needs for them.
    """

    __slots__ = (
        "_facts", "_offsets", "_outputs_bytes", "_quantizer", "kernel", "num_tiles", "operands", "threads",
        "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self,
        spec: KernelSpec,
        kernel: LoadedKernel | None,
        quantizer: QuantizePlan | QuantizeProblem,
        num_tiles: int,
    ) -> None:
        self.kernel = kernel
        self.threads = spec.num_warps * 32
        self.num_tiles = num_tiles
        self._quantizer = None if isinstance(quantizer, QuantizeProblem) else quantizer
        self.operands = quantizer if isinstance(quantizer, QuantizeProblem) else quantizer.problem
        shapes = self.operands.shapes()
        self._offsets, self._outputs_bytes = carve(shapes)
        delta = shapes["delta_s"][0] if "delta_s" in shapes else (0, 0)
        self._facts = (
            shapes["q_scale"][0][-1], shapes["k_scale"][0][-1], delta[-2] * delta[-1], delta[-1],
            self.operands.head_dim_pad,
        )  # fmt: skip
        self.workspace_bytes = 0
        if self._quantizer is not None:
            self.workspace_bytes = self._outputs_bytes + self._quantizer.workspace_bytes + WORKSPACE_ALIGNMENT

    @property
    @abstractmethod
    def num_ctas(self) -> int:
        """CTAs of the attention kernel."""

    @property
    def num_launches(self) -> int:
        """Kernels of a call: those of the quantization, and attention."""
        return (0 if self._quantizer is None else self._quantizer.num_launches) + self._attention_launches

    @property
    @abstractmethod
    def _attention_launches(self) -> int:
        """Launches of the attention kernel."""

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        """Queue everything on ``stream``; ``pointers`` as `ForwardPlan.launch` takes them, then the workspace's."""
        if self.num_tiles == 0:
            return
        quantizer = self._quantizer
        if self.kernel is None or quantizer is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        q, k, v, o, lse, starts_q, starts_k, mask, sinks, workspace = pointers
        base = -(-workspace // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
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
        if self.kernel is None:
            raise RuntimeError("a plan without a loaded kernel describes a call, it cannot run one")
        rest = OPERANDS.pack(
            at["q_scale"], at["k_scale"], at["row_bias"], at["v_scale"],
            at["v_mean"] if self.operands.smooth_v else 0, at.get("delta_s", 0), *self._facts,
        )  # fmt: skip
        self._queue(self.kernel, stream, (at["q_int"], at["k_int"], at["v"]), rest, pointers)

    @abstractmethod
    def _queue(
        self,
        kernel: LoadedKernel,
        stream: int,
        operands: tuple[int, int, int],
        rest: bytes,
        pointers: tuple[int, ...],
    ) -> None:
        """Launch attention. Addresses of quantized q, k, v; the packed `OPERANDS`; what `attend` was given."""
