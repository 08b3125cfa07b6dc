"""The merge of context_parallel's partial results by `merge_states`, while the implementation "omniattn" is active.

torch (2.11 to 2.13) merges after each step of its ring by a dozen elementwise operations in float32. `merge_states` is
one kernel, which reads two partial results and writes one.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from ..ops import merge_states
from .operators import lacks

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_CLASS = "_SDPAMerger"
#: What torch's ring calls of the class, with the names of arguments.
_INTERFACE = {
    "__init__": ("self", "convert_to_f32", "seq_dim"),
    "step": ("self", "out", "lse", "partial"),
    "results": ("self",),
}
_SEQ = 2  # dimension of (batch, heads, seq, head_dim)


class MergePatch:
    """A class in place of torch's merger, until `remove`. Nothing, where torch has no ring, or one of another kind."""

    def __init__(self) -> None:
        self.module = _ring_module()
        if self.module is not None:
            self.before = getattr(self.module, _CLASS)
            self.made = merger_class(self.before)
            setattr(self.module, _CLASS, self.made)

    def remove(self) -> None:
        """Put torch's class back."""
        if self.module is not None and getattr(self.module, _CLASS) is self.made:
            setattr(self.module, _CLASS, self.before)


def _ring_module() -> Any:
    """torch's module of the ring if its merger has the interface that is known here; else None."""
    if not torch.distributed.is_available():
        return None
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        return None
    found = getattr(module, _CLASS, None)
    for name, arguments in _INTERFACE.items():
        function = getattr(found, name, None)
        if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters) != arguments:
            return None
    return module


def merger_class(base: Any) -> Any:
    """A class for torch's ring: `merge_states` for what our kernels give, ``base`` for all else."""

    class Merger(base):
        """Partial results of one device's queries; ``partial``: of the second half of them."""

        def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
            super().__init__(convert_to_f32, seq_dim)
            self._dim = seq_dim
            self._is_torchs = False
            self._merged: tuple[Tensor, Tensor] | None = None
            self._next: tuple[Tensor, Tensor, bool] | None = None
            self._first: Tensor | None = None

        def step(self, out: Tensor, lse: Tensor, partial: bool) -> None:
            """Take the result of one step."""
            if self._merged is None and (self._is_torchs or not _is_ours(out, lse, self._dim)):
                self._is_torchs = True
                super().step(out, lse, partial)
                return
            heads_rows = lse.squeeze(-1) if lse.dim() == out.dim() else lse
            if self._merged is None:
                self._merged, self._first = (out, heads_rows), lse
                self._out_dtype = out.dtype
                return
            if self._next is not None:
                # A third result: sums of so many are kept in float32.
                before, before_lse = self._merged
                self._merged = before.to(torch.promote_types(before.dtype, torch.float32)), before_lse
                self._merge()
            self._next = out, heads_rows, partial

        def _merge(self) -> None:
            """Merge what came last into what came before it."""
            if self._merged is None or self._next is None:
                return
            out, lse = self._merged
            new_out, new_lse, partial = self._next
            half = out.shape[_SEQ] // 2 if partial else 0
            out_here, lse_here = out[:, :, half:].transpose(1, 2), lse[:, :, half:]
            with torch.no_grad():
                _, merged = merge_states(
                    out_here, lse_here, new_out.to(out.dtype).transpose(1, 2), new_lse, out=out_here
                )
                if partial:
                    lse_here.copy_(merged)
                else:
                    lse = merged
            self._merged, self._next = (out, lse), None

        def results(self) -> tuple[Tensor, Tensor]:
            """Output in the dtype of the steps', and LSE in the rank of theirs."""
            if self._merged is None or self._first is None:
                return super().results()
            self._merge()
            out, lse = self._merged
            return out.to(self._out_dtype), lse.unsqueeze(-1) if self._first.dim() == out.dim() else lse

    return Merger


def _is_ours(out: Tensor, lse: Tensor, seq_dim: int) -> bool:
    """Whether `merge_states` takes a step's result: plain tensors, of kernels with LSEs in float32."""
    # Graphs are traced with subclasses of tensors, and cannot write to memory of their own choosing.
    if type(out) is not Tensor or torch.compiler.is_compiling() or seq_dim != _SEQ:
        return False
    return lacks((out, out, out), 4, 0.0) is None and lse.dtype == torch.float32
