"""``merge_states``: attention over two disjoint sets of keys from the results over each."""

from __future__ import annotations

from typing import Any

from ..checks import merge as checks
from ..checks.memory import check_memory
from ..checks.merge import MergeOptions
from ..frameworks import FUNCTIONS, compiling
from ..plan.engine import Call, Operation, repeated, run
from ..plan.others import plan_merge
from . import on_cpu
from .traced import run_traced

_MERGE = Operation(
    "merge_states", checks.ARRAYS, checks.check_merge, check_memory, plan_merge, on_cpu.merge,
    ("o_a", "o_b", "lse_a", "lse_b"), checks.ALIGNED, same=("o_a", "o_b"), traced=run_traced,
)  # fmt: skip
_NO_OPTIONS = MergeOptions()


def merge_states(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any, *, out: Any = None, stream: Any = None) -> tuple[Any, Any]:
    """Merge two partial attention results over disjoint keys (cascade and ring attention).

    ::

        lse = log(exp(lse_a) + exp(lse_b));   o = o_a * exp(lse_a - lse) + o_b * exp(lse_b - lse)

    Parameters
    ----------
    o_a, o_b : array, (batch, seqlen, heads, head_dim) or packed (rows, heads, head_dim)
        Partial outputs: float16, bfloat16 or float32 (on the CPU float64 too), head_dim a multiple of 8 up to 512, last
        dimension contiguous.
    lse_a, lse_b : array, (batch, heads, seqlen) or packed (heads, rows), float32
        Natural logarithm, as `attention` returns it. A side with -inf has seen no key and is not looked at.
    out : array, optional
        Where o goes; shape and dtype of o_a. It may be o_a or o_b itself, and shares no other element with the inputs
        on a GPU. A torch tensor counts as changed in place.
    stream : optional
        As in `attention`.

    Returns
    -------
    o : array
        Of o_a's framework, shape and dtype; 0 where both sides are empty.
    lse : array
        float32, shape of lse_a; -inf where both sides are empty.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    GPUs: compute capability 8.0 and newer. Sinks count as a key: let only one side have them.
    """
    objects = (o_a, o_b, lse_a, lse_b, out)
    if compiling():
        o, lse = run_traced(Call(_MERGE, objects, _NO_OPTIONS, stream))
        return o, lse
    known = repeated(_MERGE, objects, _NO_OPTIONS, stream)
    o, lse = run(Call(_MERGE, objects, _NO_OPTIONS, stream), is_asked=True) if known is None else known
    return o, lse


FUNCTIONS["merge_states"] = merge_states
