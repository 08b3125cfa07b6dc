"""The rows of the registry that calls with a score modification can take, without a call.

What decides about rows of such calls besides dtype, head_dim and GPU is a handful of facts: packed sequences or a
batch, softcap, the mask and how it lies in memory, a block mask, whether tensor maps can describe the arrays. All
combinations are planned, each with few queries and with many, and each with every row that selection would compare:
lengths, numbers of heads and of SMs decide between these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..errors import UnsupportedError
from ..problems import UNLIMITED, AttentionProblem, AttentionStrides, BackwardProblem, BackwardStrides, Target
from ..problems.score_mod import BlockMaskProblem, ScoreModProblem
from ..registry import KernelSpec
from ..select import rows_of
from ..select.backward_ways import asked_of_backward
from ..select.ways import possible_ways
from .attention import plan_attention
from .backward import backward_launches, plan_backward
from .engine import Launches

#: Options of a call beside its score modification that decide about rows.
OPTIONS = ("softcap", "mask", "bias", "block_mask")

#: SMs. With few of them few queries would have one split, whose results need no merging.
_SMS = 132
#: (batch, queries, keys, query heads, kv heads) of calls with many and with few queries.
_MANY, _FEW = (2, 1000, 1000, 4, 4), (1, 16, 32768, 8, 2)


@dataclass(frozen=True)
class ModCalls:
    """Calls with a score modification.

    Attributes
    ----------
    mod : ScoreModProblem
    dtype : str
        Of q, k, v.
    head_dim : int
    own_head_dim_v : int
        head_dim of v where that is another one; else 0.
    varlen : bool
        Packed sequences.
    options : frozenset of str
        Of `OPTIONS`: those that a call may have. ``"mask"``: a boolean one; ``"bias"``: an additive one.
    """

    mod: ScoreModProblem
    dtype: str
    head_dim: int
    own_head_dim_v: int = 0
    varlen: bool = False
    options: frozenset[str] = frozenset(OPTIONS)


def _problems(calls: ModCalls) -> Iterator[AttentionProblem]:
    """Calls of every kind."""
    c = calls
    softcaps = (0.0, 30.0) if "softcap" in c.options else (0.0,)
    blocks = (None, BlockMaskProblem((2, 2), (0, 0, 1, 1))) if "block_mask" in c.options and not c.varlen else (None,)
    for lengths, softcap, block_mask, maps in product((_MANY, _FEW), softcaps, blocks, (True, False)):
        batch, rows, keys, heads, kv_heads = lengths
        batch = 1 if c.varlen else batch
        q, k, v, o = (_strides(n, h, d) for n, h, d in _arrays(c, rows, keys, heads, kv_heads))
        plain = AttentionProblem(
            c.dtype, batch, rows, keys, heads, kv_heads, c.head_dim, UNLIMITED, UNLIMITED, 1.0, softcap, "none",
            "none", c.varlen, tensor_maps=maps, max_seqlen_q=rows if c.varlen else 0,
            max_seqlen_k=keys if c.varlen else 0, own_head_dim_v=c.own_head_dim_v, score_mod=c.mod,
            block_mask=block_mask,
        )  # fmt: skip
        of_all = (heads * rows * keys, rows * keys, keys, 1)
        for mask, mask_strides, mask_map in _masks(c, of_all, with_bool=block_mask is None):
            strides = AttentionStrides(q, k, v, o, (heads * rows, rows), mask_strides)
            made = replace(plain, mask=mask, mask_map=mask_map and maps, strides=strides)
            yield made
            if c.varlen and mask == "none":  # the longest sequence may be unknown, with a mask it is not
                yield replace(made, max_seqlen_q=0, max_seqlen_k=0)


def _masks(
    calls: ModCalls, of_all: tuple[int, int, int, int], *, with_bool: bool
) -> Iterator[tuple[str, tuple[int, int, int, int], bool]]:
    """Kinds of masks: element type, strides, whether a tensor map can describe it."""
    for_keys, for_queries = (0, 0, 0, 1), (0, 0, 1, 0)
    yield "none", (0, 0, 0, 0), False
    if "mask" in calls.options and with_bool:
        yield from (("bool", strides, False) for strides in (of_all, for_keys, for_queries))
    if "bias" in calls.options:
        for dtype in ("io", "float32"):
            yield from ((dtype, of_all, mapped) for mapped in (True, False))
            yield dtype, for_keys, False


def _arrays(c: ModCalls, rows: int, keys: int, heads: int, kv_heads: int) -> tuple[tuple[int, int, int], ...]:
    """Rows, heads and head_dim of q, k, v and o."""
    of_v = c.own_head_dim_v or c.head_dim
    return (rows, heads, c.head_dim), (keys, kv_heads, c.head_dim), (keys, kv_heads, of_v), (rows, heads, of_v)


def _strides(rows: int, heads: int, head_dim: int) -> tuple[int, int, int]:
    return rows * heads * head_dim, heads * head_dim, head_dim


def _plans(problem: AttentionProblem, target: Target) -> Iterator[Launches]:
    """The plan that is chosen, which says why where there is none, and those of every row that others may take."""
    yield plan_attention(problem, target, None)
    for spec in rows_of(problem, target):
        yield plan_attention(problem, target, spec.name)


def _backward_plans(problem: AttentionProblem, target: Target) -> Iterator[Launches]:
    """Plans of gradients: all of them, the same with the same bits at every run, with that of the mask."""
    p, s = replace(problem, lse=True), problem.strides
    assert s is not None
    additive = p.mask in ("float32", "io")
    dmask = s.mask if additive else (0, 0, 0, 0)
    strides = BackwardStrides(s.o, s.q, s.k, s.v, (0, 0), dmask)
    wanted = [("dq", "dk", "dv")] + [("dq", "dk", "dv", "dmask")] * additive
    for names, deterministic in product(wanted, (False, True)):
        if "dmask" in names and deterministic and 0 in dmask:
            continue  # refused: sums of a broadcast mask come in no fixed order
        made = BackwardProblem(replace(p, deterministic=deterministic), names, deterministic=deterministic)
        made = replace(made, strides=strides)
        yield plan_backward(made, target, None)  # which says why where there is none
        for way in possible_ways(asked_of_backward(made, target), target):
            yield backward_launches(way, made, target, None)


def rows_of_calls(calls: ModCalls, target: Target, *, backward: bool = False) -> tuple[KernelSpec, ...]:
    """Every row that a call can take, those without the score modification that it launches too, in a fixed order.

    Parameters
    ----------
    calls : ModCalls
    target : Target
        The GPU; its number of SMs does not matter.
    backward : bool
        Gradients in place of the calls themselves.

    Raises
    ------
    UnsupportedError
        No call of these kinds has a kernel.
    ArgumentError
        Gradients of a score modification without ``grad``.
    """
    found: dict[str, KernelSpec] = {}
    refused: UnsupportedError | None = None
    target = replace(target, sm_count=_SMS)
    for problem in _problems(calls):
        try:
            for launches in (_backward_plans if backward else _plans)(problem, target):
                found.update((record.spec.name, record.spec) for record in launches.records)
        except UnsupportedError as error:
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return tuple(found[name] for name in sorted(found))
