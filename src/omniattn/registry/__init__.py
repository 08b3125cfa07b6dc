"""The only place where a kernel is made known.

A row describes one cubin: which source, which compile-time constants, which GPUs, and what it can do. The ahead-of-time
build, the run-time compiler, selection, the support tables, the parametrized tests and the benchmarks all read these
rows. Nothing but the standard library is imported here, so that build tools can load the rows before the package is
built.
"""

from __future__ import annotations

import difflib

from .attention import attention_rows, paged_rows, split_rows
from .backward import backward_rows
from .decode import decode_rows, unlisted_rows
from .indexer import indexer_rows
from .latent_append import latent_append_rows
from .latent_sm80 import latent_sm80_rows
from .masks import mask_rows
from .merging import combine_rows, merge_rows, packed_rows
from .quantized import quantized_attention_rows, quantized_split_rows
from .quantizers import quantizer_rows
from .sparse_blocks import sparse_blocks_rows
from .spec import PREBUILT_ARCHS, KernelSpec
from .targets import GPUS, with_targets

__all__ = ["GPUS", "PORTABLE_ARCHS", "PREBUILT_ARCHS", "REGISTRY", "KernelSpec", "by_name", "registered"]

#: Targets that every generic kernel source must compile for (checked by the tests; JIT builds them on the GPU itself).
PORTABLE_ARCHS: tuple[str, ...] = ("80", "86", "89", "90a", "100a", "120a")

REGISTRY: tuple[KernelSpec, ...] = tuple(
    with_targets((
        *attention_rows(),
        *quantized_attention_rows(),
        *mask_rows(),
        *merge_rows(),
        *packed_rows(),
        *paged_rows(),
        *split_rows(),
        *combine_rows(),
        *quantized_split_rows(),
        *backward_rows(),
        *quantizer_rows(),
        *decode_rows(),
        *latent_sm80_rows(),
        *indexer_rows(),
        *latent_append_rows(),
        *sparse_blocks_rows(),
    ))
)  # fmt: skip

_BY_NAME = {spec.name: spec for spec in REGISTRY}


def by_name(name: str) -> KernelSpec:
    """Return the row called ``name``, listed or not (`registered`); KeyError lists near misses."""
    if name not in _BY_NAME:
        for row in unlisted_rows():
            registered(row)
    spec = _BY_NAME.get(name)
    if spec is not None:
        return spec
    close = difflib.get_close_matches(name, list(_BY_NAME), n=3)
    raise KeyError(f"no kernel named {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))


def registered(row: KernelSpec) -> KernelSpec:
    """The registry's row of this name; else ``row``, kept under its name from now on.

    The registry lists caches whose K and V have the same format. Rows of the others are made by the same functions when
    a call or a name asks for them.
    """
    return _BY_NAME.setdefault(row.name, row)
