"""Packed sequences in transformers: what its mask functions say about them, as a `PackedMask`.

A model that gets ``position_ids`` which begin anew within a row makes a function of them that tells for a query and a
key whether one sees the other. Functions say nothing else, but those of transformers are closures over what they were
made of: which sequence a token belongs to, how long a window is. A function that is not known here gives no
`PackedMask`, and so a full mask.

Some models do not pass ``position_ids`` to the mask, and none does that has a cache (``use_cache`` is on unless it is
switched off). Attention gets them nevertheless, and there `packed_positions` looks at them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils import import_utils

from ..errors import ArgumentError
from .masks import PackedMask

_FUNCTION = "omniattn.integrations.transformers"


class _UnknownError(Exception):
    """A function that says something else."""


def packed_mask(options: dict[str, Any]) -> PackedMask | None:
    """The mask of packed sequences with a causal or bidirectional window each; None if it is another one.

    Parameters
    ----------
    options : dict
        What transformers passes to a mask function: ``mask_function``, lengths and offsets.

    Notes
    -----
    Waits for the GPU once for each mask: attention has to be told the length of the longest sequence.
    """
    batch, length = options["batch_size"], options["q_length"]
    if options["attention_mask"] is not None or options["kv_length"] != length or options["kv_offset"] != 0:
        return None
    if isinstance(options["q_offset"], torch.Tensor) or options["q_offset"] != 0:
        return None
    try:
        said = list(_said(options["mask_function"]))
    except _UnknownError:
        return None
    of_tokens = [what for kind, what in said if kind == "sequence"]
    if len(of_tokens) != 1 or tuple(of_tokens[0].shape) != (batch, length) or import_utils.is_tracing(of_tokens[0]):
        return None
    windows = {kind: min(what for name, what in said if name == kind) for kind, _ in said if kind != "sequence"}
    differ = of_tokens[0][:, 1:] != of_tokens[0][:, :-1]
    return _of_starts(differ, windows.get("left", -1), windows.get("right", -1))


def _of_starts(begins: torch.Tensor, left: int, right: int) -> PackedMask:
    """A mask of sequences. begins: (batch, length - 1), bool, whether one begins at a token, from the second one on."""
    batch, length = begins.shape[0], begins.shape[1] + 1
    starts = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(starts, (0, 1), value=batch * length).to(torch.int32)
    return PackedMask(starts, batch, length, int(starts.diff().max()), left, right)


#: By the identity of position_ids, which all layers of a model get: what they were when, and what they say.
_seen: dict[int, tuple[weakref.ref[torch.Tensor], int, PackedMask | None]] = {}


def packed_positions(position_ids: Any, length: int, left: int) -> PackedMask | None:
    """A causal mask of sequences that position_ids pack into one row; None if they are those of one sequence.

    Parameters
    ----------
    position_ids : tensor or None
        As a model hands them on. Where they do not increase, a sequence begins.
    length, left : int
        Tokens of the row; keys before its own that a query sees, -1 for all.

    Notes
    -----
    Waits for the GPU, at the first layer only. While a graph is traced or captured it is None.
    """
    if not isinstance(position_ids, torch.Tensor) or tuple(position_ids.shape) != (1, length):
        return None
    if import_utils.is_tracing(position_ids):
        return None
    if position_ids.dtype.is_complex or position_ids.device.type == "meta":
        received = f"{position_ids.dtype} on {position_ids.device}"
        raise ArgumentError("position_ids", "real numbers that can be read", received, function=_FUNCTION)
    # Tensors of inference mode have no version: whether they were written to cannot be known.
    version = -1 if position_ids.is_inference() else position_ids._version
    key = id(position_ids)
    found = _seen.get(key)
    if found is None or found[0]() is not position_ids or version < 0 or found[1] != version:
        begins = position_ids[:, 1:] <= position_ids[:, :-1]
        made = _of_starts(begins, -1, 0) if bool(begins.any()) else None

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            if key in _seen and _seen[key][0] is reference:
                del _seen[key]

        found = _seen[key] = weakref.ref(position_ids, forget), version, made
    mask = found[2]
    return mask if mask is None or left < 0 else PackedMask(mask.starts, 1, length, mask.longest, left, 0)


def _said(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a mask function says: "sequence" of each token, (batch, length); "left" and "right", keys of a window."""
    if function is masking_utils.causal_mask_function:
        yield "right", 0
        return
    if function is masking_utils.bidirectional_mask_function:
        return
    code = getattr(function, "__code__", None)
    if code is None or function.__module__ != masking_utils.__name__:
        raise _UnknownError
    inside = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    maker = function.__qualname__.partition(".")[0]
    try:
        if maker == "and_masks":
            for part in inside["mask_functions"]:
                yield from _said(part)
        elif maker == "remap_positions_for_packed_sequence":
            # Positions of a sequence's tokens are consecutive, and causality and windows are of their differences.
            yield from _said(inside["mask_function"])
        elif maker == "packed_sequence_mask_function":
            yield "sequence", inside["packed_sequence_mask"]
        elif maker == "sliding_window_overlay":
            yield "left", inside["sliding_window"] - 1
        elif maker == "sliding_window_bidirectional_overlay":
            yield "left", inside["sliding_window"]
            yield "right", inside["sliding_window"]
        else:
            raise _UnknownError
    except KeyError:
        raise _UnknownError from None
