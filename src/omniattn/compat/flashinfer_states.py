"""FlashInfer's functions of attention over disjoint sets of keys; `compat.flashinfer` has them."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DtypeError, ShapeError
from ..ops import merge_states as _merged
from . import common
from . import flashinfer_plans as plans

#: What functions of states call arguments of `omniattn.merge_states`, and of `merge_state`.
_STATES = {"o_a": "v_a", "lse_a": "s_a", "o_b": "v_b", "lse_b": "s_b"}
_IN_PLACE = {"v_a": "v", "s_a": "s", "v_b": "v_other", "s_b": "s_other"}


@torch.no_grad()
def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from that over each (`omniattn.merge_states`).

    Parameters
    ----------
    v_a, v_b : tensor, (rows, heads, head_dim)
        Outputs; head_dim is a multiple of 8 up to 512.
    s_a, s_b : tensor, (rows, heads)
        LSE in base 2.

    Returns
    -------
    v : tensor, (rows, heads, head_dim)
        Of v_a's dtype.
    s : tensor, (rows, heads), float32

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.merge_states`.
    """
    function = "merge_state"
    common.check_tensors(function, v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    common.check_rank(v_a, "v_a", "(rows, heads, head_dim)", function)
    for name, x in (("s_a", s_a), ("s_b", s_b)):
        if x.shape != v_a.shape[:2]:
            raise ShapeError(name, f"shape {tuple(v_a.shape[:2])}, like v_a", f"{tuple(x.shape)}", function=function)
    v, s = common.call(function, _merged, v_a, _natural(s_a), v_b, _natural(s_b), names=_STATES)
    return v, plans.lse_as_asked(s, v_a.shape[0], v_a.shape[1], None)


def _natural(s: torch.Tensor) -> torch.Tensor:
    """LSE of (rows, heads) in base 2 as ours, (heads, rows)."""
    return (s.float() * plans.LN2).transpose(0, 1)


@torch.no_grad()
def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """`merge_state` of (v, s) and (v_other, s_other) into v and s.

    Parameters
    ----------
    v, v_other : tensor, (rows, heads, head_dim)
    s, s_other : tensor, (rows, heads), float32
        LSE in base 2.
    mask : tensor, (rows,), optional
        Rows that are merged: those that are not 0. All of them unless given.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.merge_states`; nothing is written then.
    """
    function = "merge_state_in_place"
    common.check_tensors(function, v=v, s=s)
    if s.dtype != torch.float32:
        raise DtypeError("s", "torch.float32", s.dtype, function=function)
    if mask is not None:
        common.check_tensors(function, mask=mask)
        if mask.shape != v.shape[:1]:
            raise ShapeError("mask", f"shape ({v.shape[0]},)", f"{tuple(mask.shape)}", function=function)
        common.check_one_device(function, v=v, mask=mask)
    made, lse = common.call(function, merge_state, v, s, v_other, s_other, names=_IN_PLACE)
    if mask is not None:
        rows = mask != 0
        made, lse = torch.where(rows[:, None, None], made, v), torch.where(rows[:, None], lse, s)
    v.copy_(made)
    s.copy_(lse)


@torch.no_grad()
def merge_states(v: Any, s: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_state` of any number of states; the output is rounded once.

    Parameters
    ----------
    v : tensor, (rows, states, heads, head_dim)
        At least one state.
    s : tensor, (rows, states, heads)
        LSE in base 2.

    Returns
    -------
    v : tensor, (rows, heads, head_dim)
    s : tensor, (rows, heads), float32

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `omniattn.merge_states`.
    """
    function = "merge_states"
    common.check_tensors(function, v=v, s=s)
    common.check_rank(v, "v", "(rows, states, heads, head_dim)", function)
    if s.shape != v.shape[:3] or not v.shape[1]:
        expected = f"shape {tuple(v.shape[:3])} of at least one state, like v"
        raise ShapeError("s", expected, f"{tuple(s.shape)}", function=function)
    common.check_one_device(function, v=v, s=s)
    wide = v if v.dtype == torch.float64 else v.float()
    outs, sums = wide.unbind(1), s.float().unbind(1)
    if len(outs) == 1:  # the output of a state that has seen no key may be anything
        return outs[0].masked_fill((sums[0] == -torch.inf)[..., None], 0).to(v.dtype), sums[0].clone()
    made, lse = outs[0], sums[0]
    for other, other_lse in zip(outs[1:], sums[1:], strict=True):
        made, lse = common.call(function, merge_state, made, lse, other, other_lse, names=plans.OF_STATES)
    return made.to(v.dtype), lse
