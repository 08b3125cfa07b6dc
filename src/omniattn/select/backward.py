"""The kernels of the backward of attention."""

from __future__ import annotations

from ..arguments import MAX_HEAD_DIM
from ..errors import UnsupportedError
from ..problems import BackwardProblem, Target
from ..registry import REGISTRY, KernelSpec
from .choice import Selection, dotted, forced, only, the_one
from .fit import fit, needs_mods

BACKWARD, DQ = "attention_backward", "attention_backward_dq"


def _select(op: str, problem: BackwardProblem, target: Target, force: str | None) -> Selection:
    f = problem.forward
    if (chosen := forced(force, (op,), lambda spec: fit(spec, problem, target))) is not None:
        return chosen
    rows = [spec for spec in REGISTRY if spec.op == op]
    fitting = [spec for spec in rows if fit(spec, problem, target) is None]
    if not fitting:
        near = [s for s in rows if s.dtype == f.dtype and s.head_dim >= f.head_dim] or rows
        reasons = sorted({reason for spec in near if (reason := fit(spec, problem, target))})
        raise UnsupportedError(
            f"no backward kernel serves {f.dtype}, {f.head_dims} on compute capability "
            f"{dotted(target.cc)}: " + "; ".join(reasons),
            instead="q, k and v of one head_dim, filled up with zeros"
            if f.own_head_dim_v
            else f"float16 or bfloat16, head_dim up to {MAX_HEAD_DIM}, compute capability 8.0 or newer",
        )
    # The narrowest tile that holds head_dim, one kernel rather than two, nothing that is not needed, and the largest
    # tile that fits.
    best = min(
        fitting,
        key=lambda s: (not s.arch_specific, s.head_dim, not s.ordered_dq, s.score_mods, -s.smem_bytes),
    )
    return selected(best, problem)


def selected(row: KernelSpec, problem: BackwardProblem) -> Selection:
    """A row, and what it is for."""
    f = problem.forward
    why = [
        f"{f.dtype}, head_dim {f.head_dim} in a tile of {row.head_dim}",
        "score modifiers (softcap, mask or score_mod)" if needs_mods(problem) else "no score modifiers",
        f"tile of {row.block_m} query rows and {row.block_n} keys in {row.smem_bytes} bytes of shared memory",
    ]
    if row.ordered_dq and problem.deterministic:
        why.append("deterministic=True: tiles of keys add to dq in a fixed order")
    elif row.ordered_dq:
        why.append("tiles of keys add to dq in a fixed order: of calls of such a length that is faster")
    return Selection(row, tuple(why))


def select_backward(problem: BackwardProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel of dk and dv, and of dq too unless `select_dq` has to be asked for one of its own.

    Raises
    ------
    ArgumentError
        ``force`` names a kernel of this kind that cannot serve the problem.
    UnsupportedError
        No kernel serves the problem on this GPU.
    """
    return _select(BACKWARD, problem, target, force)


def select_dq(problem: BackwardProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel that makes dq alone, the same at every run. Raises as `select_backward`."""
    return _select(DQ, problem, target, force)


def select_backward_rows(
    problem: BackwardProblem, target: Target, force: str | None = None, *, fragments: bool = False
) -> tuple[Selection, Selection]:
    """The kernels before and behind the backward. fragments: dq is summed up as accumulators of wgmma lie."""
    dtype = problem.forward.dtype
    before = only(f"{BACKWARD}_prepare", lambda spec: spec.dtype == dtype)
    behind = only(f"{BACKWARD}_finish", lambda spec: spec.dtype == dtype and spec.fragments == fragments)
    return (
        the_one(before, "lse and delta of each row", target, force),
        the_one(behind, "sums to gradients", target, force),
    )
