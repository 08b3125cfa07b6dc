"""Arguments of the kernels over latent caches: those of ``decode``, tensor maps of cache and q, lists of rows."""

from __future__ import annotations

from typing import Any

from ..kv.places import places_of
from ..problems import DecodeProblem
from ..problems.decode import box_rows, query_box
from ..registry import KernelSpec
from ..runtime.record import TensorMap
from .attn_fwd_sm90 import PANEL, mapped
from .host_struct import Arguments, At
from .structs import MLA_DECODE


def arguments(
    values: dict[str, object], problem: DecodeProblem, slot_rows: int, spec: KernelSpec, cluster: int = 1
) -> Arguments:
    """The struct of a call.

    Parameters
    ----------
    values : dict
        The members of `launch.structs.DECODE`.
    problem : DecodeProblem
    slot_rows : int
        Query rows of all blocks.
    spec : KernelSpec
        The row, which says whether TMA copies keys.
    """
    rows = box_rows(problem) if spec.tensor_maps else 0
    packed: dict[str, Any] = {f"decode.{name}": x for name, x in values.items()}
    packed |= {
        "map": _map(problem, rows, spec) if rows else None,
        "map_q": _query_map(values, problem) if spec.query_map else None,
        "row_max": At("row_max") if problem.maximum else None,
        "box_rows_log2": max(rows.bit_length() - 1, 0),
        "slot_rows": slot_rows,
        "lists_rows": int(problem.topk > 0),
        "listed_tokens": max(problem.tokens, 1),
        "cluster": cluster,
    }
    return MLA_DECODE.pack(packed)


def _map(problem: DecodeProblem, rows: int, spec: KernelSpec) -> TensorMap:
    """Of the cache: copies of a panel of 64 columns, or of all panels of a block of keys."""
    cache = problem.cache
    places = places_of(cache, "decode")
    assert places is not None
    token, head, block = (n * places.unit_bytes for n in (places.token, places.head, places.block))
    if spec.map_blocks:
        panels = problem.head_dim // PANEL
        extents = (PANEL, problem.block_size, panels, problem.num_blocks)
        return mapped("cache.k", 0, problem.dtype, extents, (token, 2 * PANEL, block), (PANEL, rows, panels, 1))
    extents = (problem.head_dim, problem.block_size, 1, problem.num_blocks)
    return mapped("cache.k", 0, problem.dtype, extents, (token, head, block), (PANEL, rows, 1, 1))


def _query_map(values: dict[str, object], problem: DecodeProblem) -> TensorMap:
    """Of q: copies of all panels of a block of rows."""
    panels, (batch, tokens) = problem.head_dim // PANEL, problem.rows
    extents = (PANEL, problem.num_q_heads, tokens, panels, batch)
    of_batch, of_token, of_head = (2 * int(str(values[f"q_stride_{x}"])) for x in "bsh")
    box = (PANEL, *query_box(problem), panels, 1)
    return mapped("q", 0, problem.dtype, extents, (of_head, of_token, 2 * PANEL, of_batch), box)
