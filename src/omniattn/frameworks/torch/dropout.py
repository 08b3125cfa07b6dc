"""Seed and offset of dropout as a tensor: drawn from torch's generator, or the caller's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .library import fail

_INTEGERS = (torch.int64, torch.uint64, torch.int32, torch.uint32, torch.int16, torch.uint16, torch.int8, torch.uint8)
_EXPECTED = "(seed, offset), integers from 0 to 2**64 - 1 or tensors, or a tensor of both: (2,) of int64 or uint64"


def undo_of_draw(q: Any) -> Callable[[], object]:
    """Before a draw for q: what puts the default generator of q's device back to where it is now."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return lambda: None  # the state is the graph's
    generator = torch.cuda.default_generators[q.get_device()] if q.is_cuda else torch.default_generator
    state = generator.get_state()
    return functools.partial(generator.set_state, state)


def rng_of(q: Any, rng: Any, function: str) -> Any:
    """A tensor of seed and offset where q lies.

    Drawn, it is two random numbers of 64 bits from the default generator of q's device, by an operation of torch:
    ``torch.manual_seed`` repeats them, checkpoints restore them, a graph that was captured draws new ones at every
    replay, torch.compile replaces them as it replaces other random numbers. Nothing waits for the GPU.
    """
    if rng is None:
        return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if not isinstance(rng, (tuple, list)):
        return rng
    if len(rng) != 2:
        fail("argument", "dropout_rng", _EXPECTED, f"{len(rng)} elements", function=function)
    if all(isinstance(x, torch.Tensor) for x in rng):
        for x in rng:
            if x.numel() != 1 or x.dtype not in _INTEGERS:
                fail("argument", "dropout_rng", _EXPECTED, f"a tensor {x.dtype} {tuple(x.shape)}", function=function)
        return torch.stack([x.reshape(()).to(torch.int64) for x in rng]).to(q.device)
    made = []
    for x in rng:
        if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**64:
            fail("argument", "dropout_rng", _EXPECTED, repr(x), function=function)
        # Filled on the device: a copy from the host would wait, and cannot be captured.
        made.append(torch.full((1,), x - 2**64 if x >= 2**63 else x, dtype=torch.int64, device=q.device))
    return torch.cat(made)
