"""The library ``omniattn`` of torch operators, and what their definitions share."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import ArgumentError, UnsupportedError
from ...problems import Auto, Fp8, Int4, Int8, Sparse

LIBRARY = torch.library.Library("omniattn", "DEF")

#: Inductor must not choose other strides than the caller's: kernels take what has contiguous channels.
TAGS = tuple(
    tag for tag in (getattr(torch.Tag, "needs_exact_strides", None), torch.Tag.pt2_compliant_tag) if tag is not None
)


class Score(NamedTuple):
    """What operators get of the options, in the order of their schemas."""

    layout: Any
    causal: Any
    window: Any
    softmax_scale: Any
    softcap: Any
    score_mod: Any
    deterministic: Any


@torch.compiler.assume_constant_result
def fail(error: str, *texts: str, **named: str) -> None:
    """Raise one of the package's errors. torch.compile runs this while it reads the caller, and shows the error."""
    raise {"argument": ArgumentError, "unsupported": UnsupportedError}[error](*texts, **named)


def plain(x: Any) -> Any:
    """Options of a call with Python's numbers in place of 0-d tensors and NumPy's, which no operator takes.

    Their values are read, which torch.compile does by its own rules: a break of the graph, or a symbol of it.
    """
    if isinstance(x, tuple):
        made = [plain(y) for y in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if isinstance(x, (torch.Tensor, np.ndarray, np.generic)):
        return bool(x) if "bool" in str(x.dtype) else x.item()
    return x


def precision_text(precision: Any, function: str) -> str:
    """``precision`` as text; `precision_of` reads it."""
    if isinstance(precision, str):
        return precision
    if isinstance(precision, Fp8):
        return (
            f"Fp8(granularity={precision.granularity!r}, hadamard={precision.hadamard}, smooth_k={precision.smooth_k}, "
            f"smooth_v={precision.smooth_v}, seed={precision.seed}, min_seqlen={precision.min_seqlen}"
            f"{_sparse_text(precision)})"
        )
    if isinstance(precision, (Int8, Int4)):
        return (
            f"{'Int8' if isinstance(precision, Int8) else 'Int4'}("
            f"granularity={precision.granularity!r}, smooth_k={precision.smooth_k}, smooth_q={precision.smooth_q}, "
            f"smooth_v={precision.smooth_v}, pv={precision.pv!r}, pv_accumulator={precision.pv_accumulator!r}, "
            f"hadamard={precision.hadamard}, seed={precision.seed}, min_seqlen={precision.min_seqlen}"
            f"{_sparse_text(precision)}{', fast_exp=True' * getattr(precision, 'fast_exp', False)})"
        )
    if isinstance(precision, Auto):
        return f"Auto(max_error={precision.max_error!r})"
    expected = "a string, an Int8, an Int4, an Fp8 or an Auto"
    fail("argument", "precision", expected, type(precision).__name__, function=function)
    return ""


def _sparse_text(precision: Any) -> str:
    """The knob ``sparse``, as a tuple of its values."""
    x = precision.sparse
    if x is None:
        return ""
    return f", sparse=({x.topk}, {x.cdf}, {x.similarity}, {x.block_size}, {x.keep_first})"


@functools.lru_cache(maxsize=256)
def precision_of(text: str) -> Any:
    """What `precision_text` made a text of."""
    kind, _, rest = text.partition("(")
    if not rest:
        return text
    knobs = ast.parse(f"f({rest}", mode="eval").body
    assert isinstance(knobs, ast.Call)
    found = {x.arg: ast.literal_eval(x.value) for x in knobs.keywords if x.arg}
    if "sparse" in found:
        found["sparse"] = Sparse(*found["sparse"])
    return {"Int8": Int8, "Int4": Int4, "Fp8": Fp8, "Auto": Auto}[kind](**found)
