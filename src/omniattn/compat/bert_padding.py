"""``flash_attn.bert_padding``: batches without their padding, and back. Plain torch, differentiable, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from .. import arguments
from ..errors import ShapeError
from . import common

__all__ = [
    "IndexFirstAxis",
    "IndexFirstAxisResidual",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]

#: What the original imports from einops, and others from it.
_OF_EINOPS = ("rearrange", "repeat")


def __getattr__(name: str) -> Any:
    if name in _OF_EINOPS:
        import einops

        return getattr(einops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class IndexFirstAxis(torch.autograd.Function):
    """``apply(input, indices)``: rows of the first dimension, each at most once."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """(rows, ...) and (n,) -> (n, ...)."""
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]
        return input.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gradients go back to the rows that were taken; others have 0."""
        (gradient,), (indices,) = gradients, ctx.saved_tensors
        made = gradient.new_zeros((ctx.rows, *gradient.shape[1:]))
        return made.index_copy_(0, indices, gradient), None


class IndexPutFirstAxis(torch.autograd.Function):
    """``apply(values, indices, first_axis_dim)``: rows into zeros, the inverse of `IndexFirstAxis`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
        """(n, ...) and (n,) -> (first_axis_dim, ...)."""
        ctx.save_for_backward(indices)
        return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy_(0, indices, values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The rows that values went to."""
        (gradient,), (indices,) = gradients, ctx.saved_tensors
        return gradient.index_select(0, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """``apply(input, indices)``: rows, and the input itself for a residual connection; one gradient for both."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, ...) and (n,) -> (n, ...), and the input."""
        ctx.save_for_backward(indices)
        return input.index_select(0, indices), input.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The sum of both; written into a copy of the second, which is the caller's."""
        (gradient, residual), (indices,) = gradients, ctx.saved_tensors
        return residual.index_add(0, indices, gradient), None


index_first_axis = IndexFirstAxis.apply
index_put_first_axis = IndexPutFirstAxis.apply
index_first_axis_residual = IndexFirstAxisResidual.apply


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens of a padded batch, one sequence behind the other.

    Parameters
    ----------
    hidden_states : tensor, (batch, seqlen, ...)
    attention_mask : tensor, (batch, seqlen), bool or integers
        1 for a token, 0 for padding.
    unused_mask : tensor, (batch, seqlen), optional
        1 for places that are kept although they hold no token.

    Returns
    -------
    hidden_states : tensor, (total, ...)
        Where either mask is 1.
    indices : tensor, (total,), int64
        Their places in the flattened batch.
    cu_seqlens : tensor, (batch + 1,), int32
    max_seqlen_in_batch : int
    seqused : tensor, (batch,), int32
        Tokens of each sequence, without unused places.

    Notes
    -----
    Waits for the GPU, since the shape of the result depends on the mask.
    """
    masks = {"attention_mask": attention_mask} | ({} if unused_mask is None else {"unused_mask": unused_mask})
    _check_masks("unpad_input", hidden_states, **masks)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    hidden, indices, starts, longest = _take(hidden_states, kept.flatten().nonzero().flatten(), lengths)
    return hidden, indices, starts, longest, attention_mask.sum(dim=-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """The tokens of a padded batch whose rows hold several sequences each.

    Parameters
    ----------
    hidden_states : tensor, (batch, seqlen, ...)
    attention_mask_in_length : tensor, (batch, seqlen), integers
        Lengths of the sequences of a row, in their order, zeros anywhere between them: [2, 3, 0, 0, 0, 0] is a sequence
        of 2 tokens, one of 3, and one place of padding.

    Returns
    -------
    hidden_states, indices, cu_seqlens, max_seqlen_in_batch
        As `unpad_input`, of the sequences.
    """
    function = "unpad_input_for_concatenated_sequences"
    _check_masks(function, hidden_states, attention_mask_in_length=attention_mask_in_length)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    places = torch.arange(attention_mask_in_length.shape[-1], device=lengths.device)
    filled = places < attention_mask_in_length.sum(dim=-1, keepdim=True)
    return _take(hidden_states, filled.flatten().nonzero().flatten(), lengths)


def _check_masks(function: str, hidden_states: Any, **masks: Any) -> None:
    """Masks of another batch would take other tokens."""
    common.check_tensors(function, hidden_states=hidden_states, **masks)
    for name, x in masks.items():
        if x.ndim != 2 or hidden_states.shape[:2] != x.shape:
            expected = f"(batch, seqlen) = {tuple(hidden_states.shape[:2])}, like hidden_states"
            raise ShapeError(name, expected, f"{tuple(x.shape)}", function=function)
    common.check_one_device(function, hidden_states=hidden_states, **masks)


def _take(
    hidden_states: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    # There may be no sequence, and torch.compile does not know whether there is one.
    longest = int(functional.pad(lengths, (0, 1)).max())
    starts = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """(total, ...) back to (batch, seqlen, ...), zeros in the padding: the inverse of `unpad_input`."""
    common.check_tensors("pad_input", hidden_states=hidden_states, indices=indices)
    batch, seqlen = (
        arguments.check_int(x, n, "pad_input", most=arguments.MAX_ROWS)
        for x, n in ((batch, "batch"), (seqlen, "seqlen"))
    )
    if indices.ndim != 1 or hidden_states.shape[:1] != indices.shape:
        expected = f"shape {tuple(hidden_states.shape[:1])}, one for each row of hidden_states"
        raise ShapeError("indices", expected, f"{tuple(indices.shape)}", function="pad_input")
    common.check_one_device("pad_input", hidden_states=hidden_states, indices=indices)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
