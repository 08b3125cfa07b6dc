"""The kernels of the backward of attention."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..problems import AttentionProblem, Target
from ..problems.attention import is_plain_scale
from ..problems.backward import BackwardProblem
from ..registry import REGISTRY, KernelSpec
from .choice import Selection, dotted, forced, only, the_one, unfit_target

BACKWARD, DQ = "attention_backward", "attention_backward_dq"


def needs_mods(problem: BackwardProblem) -> bool:
    """Whether scores have to be formed one by one; a scale of any sign and size needs nothing."""
    f = problem.forward
    return f.softcap > 0.0 or f.mask != "none" or f.score_mod is not None


def _hides_keys_alike(f: AttentionProblem) -> bool:
    """Whether there is a mask, and it is the same for all queries."""
    return f.mask != "none" and f.strides is not None and f.strides.mask[2] == 0


def _unfit(spec: KernelSpec, problem: BackwardProblem, target: Target) -> str | None:
    """Why ``spec`` cannot serve ``problem``; None if it can."""
    f = problem.forward
    if spec.dtype != f.dtype:
        return f"it is compiled for {spec.dtype}, the arrays are {f.dtype}"
    if spec.head_dim < f.head_dim:
        return f"it takes head_dim up to {spec.head_dim}, not {f.head_dim}"
    if f.own_head_dim_v:
        return "it takes v of q's head_dim only"
    if needs_mods(problem) and "score_mods" not in spec.features:
        return "it has no softcap, mask or score_mod"
    if (f.mask != "none" or f.score_mod is not None) and "mask" in spec.lacks:
        return "it takes no mask and no score_mod"
    if f.softcap == 0.0 and "no_softcap" in spec.lacks:
        return "it is for softcap"
    if f.softcap > 0.0 and "softcap" in spec.lacks:
        return "it has no softcap"
    if "other_masks" in spec.lacks and (f.score_mod is not None or not _hides_keys_alike(f)):
        return "it takes masks that are the same for all queries, and no score_mod"
    if "dmask" in problem.wanted and spec.op == BACKWARD and "dmask" not in spec.features:
        return "it makes no gradient of a mask"
    if "dmask" not in problem.wanted and "dmask" in spec.features:
        return "it adds to the gradient of a mask, which is not wanted"
    if "ordered" in spec.features and not (problem.deterministic and "dq" in problem.wanted):
        return "it adds to dq in a fixed order, which deterministic=True asks for"
    if f.varlen and "varlen" in spec.lacks:
        return "it takes no packed sequences"
    if not f.varlen and "dense" in spec.lacks:
        return "it takes packed sequences only"
    if not f.tensor_maps and "any_strides" in spec.lacks:
        return "no tensor map describes q, k, v or do (negative or huge strides)"
    if "any_scale" in spec.lacks and not is_plain_scale(abs(f.softmax_scale)):
        return f"it takes no softmax_scale of {f.softmax_scale:g}"
    if spec.arch_specific:
        # A bound: 64 rows are the smallest tile, and packed sequences add one each.
        blocks = max(f.seqlen_q, f.seqlen_k) // 64 + (f.batch + 3 if f.varlen else 1)
        if blocks * f.num_q_heads * (1 if f.varlen else f.batch) >= 2**31 - 2**16:
            return "it counts tiles in 31 bits"
    return unfit_target(spec, target)


def _select(op: str, problem: BackwardProblem, target: Target, force: str | None) -> Selection:
    f = problem.forward
    if (chosen := forced(force, (op,), lambda spec: _unfit(spec, problem, target))) is not None:
        return chosen
    rows = [spec for spec in REGISTRY if spec.op == op]
    fitting = [spec for spec in rows if _unfit(spec, problem, target) is None]
    if not fitting:
        near = [s for s in rows if s.dtype == f.dtype and s.head_dim >= f.head_dim] or rows
        reasons = sorted({reason for spec in near if (reason := _unfit(spec, problem, target))})
        raise UnsupportedError(
            f"no backward kernel serves {f.dtype}, {f.head_dims} on compute capability "
            f"{dotted(target.cc)}: " + "; ".join(reasons),
            instead="q, k and v of one head_dim, filled up with zeros"
            if f.own_head_dim_v
            else "float16 or bfloat16, head_dim up to 256, compute capability 8.0 or newer",
        )
    # The narrowest tile that holds head_dim, one kernel rather than two, nothing that is not needed, and the largest
    # tile that fits.
    best = min(
        fitting,
        key=lambda s: (not s.arch_specific, s.head_dim, "ordered" not in s.features, len(s.features), -s.smem_bytes),
    )
    why = [
        f"{f.dtype}, head_dim {f.head_dim} in a tile of {best.head_dim}",
        "score modifiers (softcap, mask or score_mod)" if needs_mods(problem) else "no score modifiers",
        f"tile of {best.block_m} query rows and {best.block_n} keys in {best.smem_bytes} bytes of shared memory",
    ]
    if "ordered" in best.features:
        why.append("deterministic=True: tiles of keys add to dq in a fixed order")
    return Selection(best, tuple(why))


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
    behind = only(
        f"{BACKWARD}_finish", lambda spec: spec.dtype == dtype and ("fragments" in spec.features) == fragments
    )
    return (
        the_one(before, "lse and delta of each row", target, force),
        the_one(behind, "sums to gradients", target, force),
    )
