"""What calls of attention with a score modification, a block mask or dropout may be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .. import arguments
from ..arrays import Tensor
from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from ..launch.score_mod import DTYPES, PREFIX
from ..plan.engine import Call
from ..problems import AttentionProblem
from ..problems.score_mod import MAX_DIMS, MAX_POSITIONS, BlockMaskProblem, ModArray, ScoreModProblem
from ..registry.masks import MASK_TILE
from . import attention as checks
from . import dropout, values

#: Expression, mask, whether indices are checked, whether the CPU's function is missing; more of a backward.
ScoreModFacts = tuple[Any, ...]
#: (problem, call, tensors, facts) -> the score modification.
CheckScoreMod = Callable[[AttentionProblem, Call, dict[str, Tensor], ScoreModFacts], ScoreModProblem]


def check_block_size(value: Any, function: str) -> tuple[int, int]:
    """Queries and keys of a block."""
    two = value if isinstance(value, tuple) else (value, value)
    expected = f"a multiple of {MASK_TILE}, or two of them (queries, keys)"
    try:
        rows, keys = (arguments.check_int(x, "block_size", function, least=1, most=arguments.MAX_ROWS) for x in two)
    except ValueError:  # of check_int too, or of a tuple of other than two
        rows = keys = 1
    if rows % MASK_TILE or keys % MASK_TILE:
        raise ArgumentError("block_size", expected, repr(value), function=function)
    return rows, keys


def check_call(call: Call, tensors: dict[str, Tensor]) -> AttentionProblem:
    """The problem of a call."""
    function = call.operation.name
    problem = checks.check_attention(call, tensors)
    texts, size, _ = call.facts
    # Of what is quantized in the call a block mask leaves whole tiles, whose scores are formed as without one.
    e4m3 = problem.descales is not None
    given = ["score_mod"] * (texts is not None) + ["block_mask"] * (size is not None and (texts is not None or e4m3))
    if problem.sparse is not None and size is not None:
        expected = "None, because the precision's sparse= predicts one"
        raise ArgumentError("block_mask", expected, "an array", function=function)
    if problem.precision.quantized and given:
        raise UnsupportedError(
            f"{function}(): {' and '.join(given)} with precision={problem.precision.name!r}",
            instead="precision='exact'",
        )
    if problem.alternatives is not None:
        problem = checks.exact_for(problem, "it is not weighed with score_mod, block_mask and dropout")
    return with_extras(problem, call, tensors, check_score_mod)


def with_extras(
    problem: AttentionProblem, call: Call, tensors: dict[str, Tensor], check_mod: CheckScoreMod
) -> AttentionProblem:
    """The problem with what `Call.facts` tell of, of a forward or a backward."""
    function = call.operation.name
    texts, size, p = call.facts
    if size is not None:
        problem = replace(problem, block_mask=check_block_mask(problem, tensors["block_mask"], size, function))
    if texts is not None:
        problem = replace(problem, score_mod=check_mod(problem, call, tensors, texts))
    if p:
        made = dropout.check_dropout(problem, tensors, p, texts is not None, function)
        problem = replace(problem, dropout=made)
    return problem


def check_block_mask(problem: AttentionProblem, t: Tensor, size: tuple[int, int], function: str) -> BlockMaskProblem:
    """The block mask of a call."""
    blocks = (-(-problem.seqlen_q // size[0]), -(-problem.seqlen_k // size[1]))
    shape = (problem.batch, problem.num_q_heads, *blocks)
    if t.dtype != "bool":
        raise DtypeError("block_mask", "bool (True: visible)", t.dtype, function=function)
    if len(t.shape) > 4 or any(m not in (1, n) for m, n in zip(reversed(t.shape), reversed(shape), strict=False)):
        expected = (
            f"a shape that broadcasts to (batch, heads, blocks of queries, blocks of keys) = {shape}, with a "
            f"block_size of {size}; an element for each query and key goes into mask="
        )
        raise ShapeError("block_mask", expected, f"{tuple(t.shape)}", function=function)
    if problem.mask == "bool":
        raise UnsupportedError(
            f"{function}(): block_mask with a boolean mask",
            instead="the blocks in the mask, whose hidden tiles are never loaded either; or a ScoreMod with mask=",
        )
    return BlockMaskProblem((size[0] // MASK_TILE, size[1] // MASK_TILE), values.broadcast_strides(t, shape))


def check_score_mod(
    problem: AttentionProblem, call: Call, tensors: dict[str, Tensor], texts: ScoreModFacts
) -> ScoreModProblem:
    """The score modification of a call."""
    function = call.operation.name
    expression, mask, checked, no_reference = texts[:4]
    # Of keys in pages a sequence has so many at most; others may all be one sequence's.
    most = max(problem.seqlen_q, problem.seqlen_k if problem.pages is None else problem.pages.capacity)
    if most > MAX_POSITIONS:
        raise UnsupportedError(f"{function}(): score_mod with {most} queries or keys", instead=f"up to {MAX_POSITIONS}")
    found = mod_arrays(tensors, function)
    if tensors["q"].device == "cpu" and no_reference:
        raise UnsupportedError(
            f"{function}(): arrays on the CPU, and a score_mod whose expression only a GPU can run",
            instead="ScoreMod(..., reference=a NumPy function of the same), or arrays on a GPU",
        )
    return ScoreModProblem(expression, mask, found, checked)


def mod_arrays(tensors: Mapping[str, Tensor], function: str) -> tuple[ModArray, ...]:
    """The arrays of a score modification among those of a call."""
    found = []
    for name, t in tensors.items():
        if not name.startswith(PREFIX):
            continue
        if t.dtype not in DTYPES:
            raise DtypeError(name, " or ".join(DTYPES), t.dtype, function=function)
        if len(t.shape) > MAX_DIMS or 0 in t.shape:
            expected = f"at most {MAX_DIMS} dimensions, none of them empty"
            raise ShapeError(name, expected, f"{tuple(t.shape)}", function=function)
        found.append(ModArray(name.removeprefix(PREFIX), t.dtype, tuple(t.shape), tuple(t.strides)))
    return tuple(found)
