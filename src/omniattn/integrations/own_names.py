"""Errors of omniattn's functions, told of what another library calls and by its names of the arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError, told_of

__all__ = ["by_own_names"]


def by_own_names(function: str, names: Mapping[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: errors name ``function``, and arguments by ``names`` where omniattn calls them otherwise.

    While a graph is traced errors are as they come.
    """

    def decorate(do: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(do)
        def told(*arguments: Any, **keywords: Any) -> Any:
            if torch.compiler.is_compiling():
                return do(*arguments, **keywords)
            try:
                return do(*arguments, **keywords)
            except (ArgumentError, UnsupportedError) as error:
                raise told_of(error, function, names) from error.__cause__

        return told

    return decorate
