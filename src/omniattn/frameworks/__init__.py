"""Ways into and out of frameworks that trace, compile and differentiate. Below `ops`: it gets their functions by name.

Importing this package imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

#: Public functions, and what else the kernels of operators need of the rooms above; `ops` puts them in.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


def compiling() -> bool:
    """Whether torch.compile's front end is reading the caller; 0.2 µs where it is not."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()
