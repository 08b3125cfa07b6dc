"""Ways into and out of frameworks that trace, compile and differentiate. Below `ops`: it gets their functions by name.

Importing this package imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: Public functions, and what else the kernels of operators need of the rooms above; `ops` puts them in.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


_torch: Any = sys.modules.get("torch")


def compiling() -> bool:
    """Whether torch.compile's front end is reading the caller; 0.2 µs where it is not.

    The front end reads what this does, and a dictionary whole: not that of all modules, which may grow meanwhile.
    """
    torch = _torch if _torch is not None else _find_torch()
    return torch is not None and torch.compiler.is_dynamo_compiling()


def _find_torch() -> Any:
    global _torch
    _torch = sys.modules.get("torch")
    return _torch
