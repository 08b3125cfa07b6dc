"""Calls of our functions by those of other names, whose errors tell of the outer one and of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError, told_of

_NO_NAMES: dict[str, str] = {}


def call(
    function: str, do: Callable[..., Any], *args: Any, names: Mapping[str, str] = _NO_NAMES, **options: Any
) -> Any:
    """``do(*args, **options)``, whose errors are told of ``function``: ``names`` has what it calls our arguments.

    torch.compile, which does not read such a block, shows them with the line of the caller.
    """
    if torch.compiler.is_compiling():
        return do(*args, **options)
    try:
        return do(*args, **options)
    except (ArgumentError, UnsupportedError) as error:
        raise told_of(error, function, names) from None
