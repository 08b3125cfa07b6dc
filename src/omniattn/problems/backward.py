"""One call of the backward: all that selection and builders may look at."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionProblem
from .memory import ITEMSIZE
from .outputs import Output
from .quantize import Strides3

#: What can be asked for, in the order of `BackwardProblem.wanted`.
GRADIENTS = ("dq", "dk", "dv", "dsinks", "dmask")

#: Rows to which the workspaces' rows of a sequence are padded (``kernels_cu/params/attn_bwd.cuh``).
ROW_PADDING = 128


@dataclass(frozen=True)
class BackwardStrides:
    """Element strides of the arrays that the forward does not have; those of q, k, v, o, lse, mask are its own."""

    d_o: Strides3
    dq: Strides3
    dk: Strides3
    dv: Strides3
    dlse: tuple[int, int]
    dmask: tuple[int, int, int, int]


@dataclass(frozen=True)
class BackwardProblem:
    """One call of ``attention_backward`` or ``attention_varlen_backward``, after validation.

    Attributes
    ----------
    forward : AttentionProblem
        The forward that o and lse are of, with ``lse=True`` and the strides of q, k, v, o, lse and mask.
    wanted : tuple of str
        Gradients to compute, of ``"dq"``, ``"dk"``, ``"dv"``, ``"dsinks"``, ``"dmask"``, in this order.
    dlse : bool
        The LSE has a gradient.
    dmask_shape : tuple of int
        Of the mask as the caller gave it; empty where its gradient is not wanted.
    deterministic : bool
        The same bits at every run.
    strides : BackwardStrides, optional
        None where nobody launches.
    """

    forward: AttentionProblem
    wanted: tuple[str, ...] = ("dq", "dk", "dv")
    dlse: bool = False
    dmask_shape: tuple[int, ...] = ()
    deterministic: bool = False
    strides: BackwardStrides | None = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""
        f = self.forward
        kv_rows = (f.seqlen_k, f.num_kv_heads) if f.layout == "NHD" else (f.num_kv_heads, f.seqlen_k)
        of_kv = (*(() if f.varlen else (f.batch,)), *kv_rows)
        sums = "float64" if f.dtype == "float64" else "float32"
        shapes = {
            "dq": (f.q_shape, f.dtype),
            "dk": ((*of_kv, f.head_dim), f.dtype),
            "dv": ((*of_kv, f.head_dim_v), f.dtype),
            "dsinks": ((f.num_q_heads,), sums),
            "dmask": (self.dmask_shape, sums),
        }
        return tuple(Output(name, *shapes[name]) for name in self.wanted)

    @property
    def padded_rows(self) -> int:
        """Rows of a head in the workspaces."""
        f = self.forward
        if f.varlen:
            return -(-f.seqlen_q // ROW_PADDING) * ROW_PADDING + f.batch * ROW_PADDING
        return f.batch * -(-f.seqlen_q // ROW_PADDING) * ROW_PADDING

    @property
    def min_bytes(self) -> int:
        """Bytes that have to move: q, k, v, o, do and the LSE read once, dq, dk and dv written once."""
        f = self.forward
        batch = 1 if f.varlen else f.batch
        rows_q, rows_kv = f.seqlen_q * f.num_q_heads, f.seqlen_k * f.num_kv_heads
        of_q, of_kv = 3 + ("dq" in self.wanted), 2 + len({"dk", "dv"} & set(self.wanted))
        return batch * (ITEMSIZE[f.dtype] * f.head_dim * (of_q * rows_q + of_kv * rows_kv) + 4 * rows_q)

    @property
    def flops(self) -> int | None:
        """Multiply-adds of the five products, two operations each."""
        forward = self.forward.flops
        return None if forward is None else 5 * forward // 2
