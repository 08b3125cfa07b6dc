"""A boolean attention mask that is kept as its parts, so that the kernels' own causal and window paths can run.

transformers makes one mask for all layers and hands it to the attention function through the model's own code. A mask
of (batch, 1, q_len, kv_len) elements says less than its parts do (which keys are padding, how far a query sees), and
costs memory and time. The parts alone are not enough either: a model may index, convert or combine its mask.
`StructuredMask` is both: a tensor for whoever uses it as one, its parts for whoever asks for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import DtypeError

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


class StructuredMask(torch.Tensor):
    """Mask of (batch, 1, q_len, kv_len), bool, True where a query sees a key.

    ::

        visible[b, 0, i, j] = padding[b, j]  and  i + shift - left <= j <= i + shift + right

    Any operation on it sees the full mask, which is made at the first one. From then on the full mask counts (it may
    have been written to, and views of it too), and `parts_hold` is False.

    Parameters
    ----------
    rows : tensor, (batch, kv_len), bool
        True where a key is not padding. Without elements if nothing is padding.
    batch, q_len, kv_len : int
    shift : int
        Key that lies at the position of the first query.
    left, right : int
        Keys before and after its own that a query sees; -1 is unlimited.
    """

    # Functions give plain tensors, not masks of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl

    rows: torch.Tensor
    full: torch.Tensor | None
    shift: int
    left: int
    right: int

    @staticmethod
    def __new__(
        cls, rows: torch.Tensor, batch: int, q_len: int, kv_len: int, shift: int, left: int, right: int
    ) -> StructuredMask:
        """The mask; nothing of its own size is allocated."""
        shape = (batch, 1, q_len, kv_len)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=rows.device)
        mask.rows, mask.full = rows, None
        mask.shift, mask.left, mask.right = shift, left, right
        return mask

    def materialize(self) -> torch.Tensor:
        """The full mask."""
        if self.full is None:
            batch, _, q_len, kv_len = self.shape
            visible = band(q_len, kv_len, self.shift, self.left, self.right, self.rows.device)
            of_batch = visible.expand(batch, 1, q_len, kv_len)
            self.full = of_batch & self.rows[:, None, None, :] if self.rows.dim() == 2 else of_batch.clone()
        return self.full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # as the base class declares it
        return (
            f"StructuredMask(shape={tuple(self.shape)}, shift={self.shift}, left={self.left}, right={self.right}, "
            f"padding={self.rows.dim() == 2}, device={self.device})"
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the full mask; copies of parts that still hold stay parts."""
        kwargs = kwargs or {}
        if func in _COPIES and isinstance(args[0], StructuredMask) and args[0].full is None:
            mask = args[0]
            if kwargs.get("dtype") in (None, torch.bool):
                # memory_format is of the full shape, and the parts have no memory of it.
                place = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                rows = mask.rows.to(**place) if place else mask.rows.clone()
                batch, _, q_len, kv_len = mask.shape
                return StructuredMask(rows, batch, q_len, kv_len, mask.shift, mask.left, mask.right)
        args, kwargs = tree_map_only(StructuredMask, StructuredMask.materialize, (args, kwargs))
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch.compile: a mask made outside of what is compiled goes in as its parts."""
        names = ["rows"] if self.full is None else ["rows", "full"]
        return names, (self.shift, self.left, self.right)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> StructuredMask:
        """The mask of the parts that torch.compile hands back."""
        batch, _, q_len, kv_len = size
        mask = StructuredMask(inner["rows"], batch, q_len, kv_len, *context)
        mask.full = inner.get("full")
        return mask


def band(q_len: int, kv_len: int, shift: int, left: int, right: int, device: Any) -> torch.Tensor:
    """(q_len, kv_len), bool: query i sees the keys i + shift - left <= j <= i + shift + right; -1 is unlimited."""
    visible = torch.ones((q_len, kv_len), dtype=torch.bool, device=device)
    if left >= 0:
        visible = visible.triu(shift - left)
    if right >= 0:
        visible = visible.tril(shift + right)
    return visible


def taken(mask: torch.Tensor | None, query: torch.Tensor, argument: str, function: str) -> torch.Tensor | None:
    """The mask in an element type that `attention` takes: of other floating-point types float32 is made.

    Raises
    ------
    DtypeError
        Integers, which the backends of these libraries refuse too, or add as 0 and 1: as masks of `attention`.
    """
    if mask is None or mask.dtype in (torch.bool, torch.float32, query.dtype):
        return mask
    if not mask.is_floating_point():
        expected = "bool (True: visible) or a floating-point type (added)"
        hint = "mask != 0 makes booleans of integers"
        raise DtypeError(argument, expected, mask.dtype, function=function, hint=hint)
    return mask.to(torch.float32)
