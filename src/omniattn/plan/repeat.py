"""The short way of a warm call: arrays that `arrays.look` knows, in a call that has been validated before.

What depends on shapes, strides, dtypes, devices and options was settled by the first such call, so that only addresses,
the stream and the writability of ``out`` are left to look at. Where one of these is not the usual, the short way does
nothing and returns None: the long way then waits, or raises, or copes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import arrays
from .arrays import Tensor
from .launch.attn_fwd import ForwardPlan
from .launch.attn_fwd_sm90 import ForwardSm90Plan
from .launch.merge_states import MergePlan
from .launch.quantized_attention import QuantizedAttentionPlan
from .problem import Problem

New = Callable[[Any], Any]


class RepeatedForward:
    """Repeats ``attention`` and ``attention_varlen``.

    Parameters
    ----------
    forward : ForwardPlan, ForwardSm90Plan or QuantizedAttentionPlan
    problem : Problem
    new_o, new_lse, new_workspace : callable
        From `arrays.allocator`; None for an LSE that nobody wants, and for a workspace that is not needed.
    current_stream : callable
        From `arrays.stream_query`.
    """

    __slots__ = ("_current_stream", "_launch", "_mask_bits", "_new_lse", "_new_o", "_new_workspace", "_sinks_bits")

    def __init__(
        self,
        forward: ForwardPlan | ForwardSm90Plan | QuantizedAttentionPlan,
        problem: Problem,
        new_o: New,
        new_lse: New | None,
        new_workspace: New | None,
        current_stream: Callable[[], int],
    ) -> None:
        self._launch = forward.launch
        self._new_o = new_o
        self._new_lse = new_lse
        self._new_workspace = new_workspace
        self._current_stream = current_stream
        # Set in a misaligned address; the kernels' own types have 2 bytes.
        self._mask_bits = {"none": 0, "bool": 0, "float32": 3, "io": 1}[problem.mask]
        self._sinks_bits = {"none": 0, "float32": 3, "io": 1}[problem.sinks]

    def __call__(self, q: Any, out: Any, addresses: list[int], stream: int | None) -> Any:
        """Run.

        Parameters
        ----------
        q, out : array
            ``out`` may be None.
        addresses : list of int
            Of q k v, or of q k v out cu_seqlens_q cu_seqlens_k mask sinks.
        stream : int, optional
            The user's.

        Returns
        -------
        array, or tuple of array, or None
        """
        current = self._current_stream()
        if stream is not None and stream != current:
            return None
        if len(addresses) == 3:
            at_q, at_k, at_v = addresses
            at_out = starts_q = starts_k = at_mask = at_sinks = 0
        else:
            at_q, at_k, at_v, at_out, starts_q, starts_k, at_mask, at_sinks = addresses
            if (starts_q | starts_k) & 3 or at_mask & self._mask_bits or at_sinks & self._sinks_bits:
                return None
            if out is not None and (at_out in (at_q, at_k, at_v) or out.is_inference()):
                return None
        if (at_q | at_k | at_v | at_out) & 15:
            return None
        if out is None:
            out = self._new_o(q)
            at_out = out.data_ptr()
        if self._new_workspace is not None:
            lse = None if self._new_lse is None else self._new_lse(q)
            at_lse = 0 if lse is None else lse.data_ptr()
            # Held until the kernels are queued: another thread on this stream could be given its memory before that.
            workspace = self._new_workspace(q)
            pointers = (at_q, at_k, at_v, at_out, at_lse, starts_q, starts_k, at_mask, at_sinks, workspace.data_ptr())
            self._launch(current, pointers)
            del workspace
            return out if lse is None else (out, lse)
        if self._new_lse is None:
            self._launch(current, (at_q, at_k, at_v, at_out, 0, starts_q, starts_k, at_mask, at_sinks))
            return out
        lse = self._new_lse(q)
        at_lse = lse.data_ptr()
        self._launch(current, (at_q, at_k, at_v, at_out, at_lse, starts_q, starts_k, at_mask, at_sinks))
        return out, lse


def repeated_forward(
    forward: ForwardPlan | ForwardSm90Plan | QuantizedAttentionPlan | None,
    problem: Problem,
    q: Tensor,
    q_shape: tuple[int, ...],
    lse_shape: tuple[int, ...] | None,
) -> RepeatedForward | None:
    """The short way for calls with the facts of this one, if there is any; ``lse_shape`` None where nobody wants it."""
    new_o, current_stream = arrays.allocator(q, q_shape, q.dtype), arrays.stream_query(q)
    if forward is None or new_o is None or current_stream is None:
        return None
    new_lse = None if lse_shape is None else arrays.allocator(q, lse_shape, "float32")
    size = forward.workspace_bytes
    new_workspace = arrays.allocator(q, (size,), "uint8") if size else None
    return RepeatedForward(forward, problem, new_o, new_lse, new_workspace, current_stream)


class RepeatedMerge:
    """Repeats ``merge_states``; parameters as in `RepeatedForward`, allocators of o_a's and lse_a's kind."""

    __slots__ = ("_current_stream", "_launch", "_new_lse", "_new_o")

    def __init__(self, plan: MergePlan, new_o: New, new_lse: New, current_stream: Callable[[], int]) -> None:
        self._launch = plan.launch
        self._new_o = new_o
        self._new_lse = new_lse
        self._current_stream = current_stream

    def __call__(self, o_a: Any, lse_a: Any, out: Any, addresses: list[int], stream: int | None) -> Any:
        """Run; ``addresses`` of o_a o_b lse_a lse_b out, ``stream`` and result as in `RepeatedForward`."""
        current = self._current_stream()
        if stream is not None and stream != current:
            return None
        at_a, at_b, log_a, log_b, at_out = addresses
        if (at_a | at_b | at_out) & 15 or (log_a | log_b) & 3:
            return None
        if out is None:
            out = self._new_o(o_a)
            at_out = out.data_ptr()
        elif at_out in (at_a, at_b) or out.is_inference():
            return None
        lse = self._new_lse(lse_a)
        self._launch(current, (at_a, at_b, at_out, log_a, log_b, lse.data_ptr()))
        return out, lse


def repeated_merge(plan: MergePlan, o_a: Tensor, lse_a: Tensor) -> RepeatedMerge | None:
    """The short way for merges with the facts of this one, if there is any."""
    new_o = arrays.allocator(o_a, tuple(o_a.shape), o_a.dtype)
    new_lse = arrays.allocator(lse_a, tuple(lse_a.shape), "float32")
    current_stream = arrays.stream_query(o_a)
    if new_o is None or new_lse is None or current_stream is None:
        return None
    return RepeatedMerge(plan, new_o, new_lse, current_stream)
