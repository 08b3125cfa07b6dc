"""Boolean attention masks that are kept as their parts, so that the kernels' own causal and window paths can run.

transformers makes one mask for all layers and hands it to the attention function through the model's own code. A mask
of (batch, 1, q_len, kv_len) elements says less than its parts do (which keys are padding, how far a query sees), and
costs memory and time. The parts alone are not enough either: a model may index, convert or combine its mask.
A `PartedMask` is both: a tensor for whoever uses it as one, its parts for whoever asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import DtypeError

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


class PartedMask(torch.Tensor):
    """Mask of (batch, 1, q_len, kv_len), bool, True where a query sees a key, kept as what says so.

    Any operation on it sees the full mask, which is made at the first one. From then on the full mask counts: it may
    have been written to, and views of it too.

    Attributes
    ----------
    full : tensor or None
        The full mask, once it was made.
    left, right : int
        Keys before and after its own that a query sees; -1 is unlimited.
    """

    # Functions give plain tensors, not masks of this class.
    __torch_function__ = torch._C._disabled_torch_function_impl

    full: torch.Tensor | None
    left: int
    right: int

    def visible(self) -> torch.Tensor:
        """The full mask, made of the parts."""
        raise NotImplementedError

    def with_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartedMask:
        """A mask of the same kind, of tensors that ``change`` makes of this one's."""
        raise NotImplementedError

    def materialize(self) -> torch.Tensor:
        """The full mask."""
        if self.full is None:
            self.full = self.visible()
        return self.full

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the full mask; copies of parts that still hold stay parts."""
        kwargs = kwargs or {}
        copied = args[0] if func in _COPIES and kwargs.get("dtype") in (None, torch.bool) else None
        if isinstance(copied, PartedMask) and copied.full is None:
            # memory_format is of the full shape, and the parts have no memory of it.
            place = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
            return copied.with_parts(lambda part: part.to(**place) if place else part.clone())
        args, kwargs = tree_map_only(PartedMask, PartedMask.materialize, (args, kwargs))
        return func(*args, **kwargs)


class StructuredMask(PartedMask):
    """Padding and a window.

    ::

        visible[b, 0, i, j] = padding[b, j]  and  i + shift - left <= j <= i + shift + right

    Parameters
    ----------
    rows : tensor, (batch, kv_len), bool
        True where a key is not padding. Without elements if nothing is padding.
    batch, q_len, kv_len : int
    shift : int
        Key that lies at the position of the first query.
    left, right : int
    """

    rows: torch.Tensor
    shift: int

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

    def visible(self) -> torch.Tensor:
        """The full mask, made of the parts."""
        _, _, q_len, kv_len = self.shape
        of_batch = band(q_len, kv_len, self.shift, self.left, self.right, self.rows.device).expand(self.shape)
        return of_batch & self.rows[:, None, None, :] if self.rows.dim() == 2 else of_batch.clone()

    def with_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> StructuredMask:
        """The mask with other padding."""
        batch, _, q_len, kv_len = self.shape
        return StructuredMask(change(self.rows), batch, q_len, kv_len, self.shift, self.left, self.right)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # as the base class declares it
        return (
            f"StructuredMask(shape={tuple(self.shape)}, shift={self.shift}, left={self.left}, right={self.right}, "
            f"padding={self.rows.dim() == 2}, device={self.device})"
        )

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


class PackedMask(PartedMask):
    """Sequences one behind the other in the rows of a batch, and a window of each.

    ::

        visible[b, 0, i, j] = i and j are of one sequence  and  i - left <= j <= i + right

    Parameters
    ----------
    starts : tensor, (sequences + 1,), int32
        Where each begins in the batch's rows, counted through, and the end. Each row of the batch begins with one.
    batch, length : int
    longest : int
        Tokens of the longest one.
    left, right : int
    """

    starts: torch.Tensor
    longest: int

    @staticmethod
    def __new__(cls, starts: torch.Tensor, batch: int, length: int, longest: int, left: int, right: int) -> PackedMask:
        """The mask; nothing of its own size is allocated."""
        shape = (batch, 1, length, length)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=starts.device)
        mask.starts, mask.full = starts, None
        mask.longest, mask.left, mask.right = longest, left, right
        return mask

    def visible(self) -> torch.Tensor:
        """The full mask, made of the parts."""
        batch, _, length, _ = self.shape
        tokens = torch.arange(batch * length, dtype=torch.int32, device=self.starts.device)
        sequence = torch.searchsorted(self.starts, tokens, right=True).view(batch, 1, length)
        same = sequence[..., :, None] == sequence[..., None, :]
        return same & band(length, length, 0, self.left, self.right, self.starts.device)

    def with_parts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedMask:
        """The mask with other memory."""
        batch, _, length, _ = self.shape
        return PackedMask(change(self.starts), batch, length, self.longest, self.left, self.right)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # as the base class declares it
        return (
            f"PackedMask(shape={tuple(self.shape)}, sequences={self.starts.shape[0] - 1}, longest={self.longest}, "
            f"left={self.left}, right={self.right}, device={self.device})"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For torch.compile: a mask made outside of what is compiled goes in as its parts."""
        names = ["starts"] if self.full is None else ["starts", "full"]
        return names, (self.longest, self.left, self.right)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> PackedMask:
        """The mask of the parts that torch.compile hands back."""
        batch, _, length, _ = size
        mask = PackedMask(inner["starts"], batch, length, *context)
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
