"""The kernels of the indexer of sparse attention, and how they divide their work."""

from __future__ import annotations

from ..problems import IndexLogitsProblem, Target, TopKProblem
from ..registry import REGISTRY, KernelSpec, by_name
from ..registry.indexer import (
    HELD_BY_FOUR,
    INDEX_HEADS,
    LEAST_PART,
    LEAST_STEPS,
    LONG_ROW,
    MAX_CLUSTER,
    ROUNDS,
    STEP,
    TOP_K_FEW,
    TOP_K_MANY,
    TOP_K_SHARED,
    TOP_K_SHORT,
)
from .choice import Selection, forced, only, the_one
from .fit import fit


def select_index_logits(problem: IndexLogitsProblem, target: Target, force: str | None = None) -> Selection:
    """The kernel of a call of ``index_logits``.

    Raises
    ------
    ArgumentError
        ``force`` names a kernel of the operation that cannot serve the call, or no kernel.
    UnsupportedError
        The GPU is too old.
    """
    aligned = problem.has_aligned_keys

    def unfit(spec: KernelSpec) -> str | None:
        if spec.arch_specific and not aligned:
            return "it takes rows of keys at multiples of 16 bytes"
        if problem.num_heads > spec.block_m * INDEX_HEADS:
            return f"it takes up to {spec.block_m * INDEX_HEADS} heads, the call has {problem.num_heads}"
        return fit(spec, None, target)

    if (chosen := forced(force, ("index_logits",), unfit)) is not None:
        return chosen
    products = problem.queries * -(-problem.num_heads // INDEX_HEADS)
    own = [spec for spec in REGISTRY if spec.op == "index_logits" and spec.arch_specific]
    best = [spec for spec in own if products <= spec.block_m] or own[-1:]
    for spec in (*best[:1], only("index_logits", lambda spec: not spec.arch_specific)):
        if unfit(spec) is None:
            keys = "keys at multiples of 16 bytes" if aligned else "keys of any block size"
            return Selection(spec, (f"{problem.queries} queries of {problem.num_heads} heads, {keys}",))
    generic = only("index_logits", lambda spec: not spec.arch_specific)
    return the_one(generic, "rows of keys of any block size", target, None)


def span_of(spec: KernelSpec, problem: IndexLogitsProblem, target: Target) -> int:
    """Keys of a CTA of ``index_logits``: all SMs have some, and few steps are the least a CTA has."""
    tiles = problem.sequences * -(-problem.queries // problem.query_tile(spec.block_m))
    steps = -(-problem.max_keys // STEP)

    def of_one_round(ctas: int) -> int:
        return -(-steps * tiles // (target.sm_count * ctas))

    own = of_one_round(spec.ctas_per_sm)
    # More than two CTAs an SM even out what there is much of; of little, each of them has too little.
    own = of_one_round(min(spec.ctas_per_sm, 2)) if own <= LEAST_STEPS else max(LEAST_STEPS, -(-own // ROUNDS))
    # Powers of two, so that spans begin where blocks do.
    return STEP * max(min(1 << (own - 1).bit_length() if own else 1, steps), 1)


def select_top_k(problem: TopKProblem, target: Target, force: str | None = None) -> tuple[Selection, int]:
    """The kernel of a call of ``top_k``, and how many CTAs have a row; raises as `select_index_logits`."""
    ctas = _ctas_of_row(problem, target)
    if (chosen := forced(force, ("top_k",), lambda spec: fit(spec, None, target))) is not None:
        # A row for clusters takes rows of one CTA too.
        return chosen, ctas if chosen.spec.min_arch >= (9, 0) else 1
    names: tuple[str, ...] = TOP_K_MANY
    if ctas > 1:
        names = TOP_K_SHARED
    elif problem.rows <= target.sm_count or problem.width >= LONG_ROW:
        names = (*TOP_K_FEW, *TOP_K_MANY)
    elif _has_more_ctas(target, problem.rows):
        names = (TOP_K_SHORT, *TOP_K_MANY)
    # Those that have room for a row take short ones, and more shared memory than some GPUs have.
    rows = map(by_name, names)
    fitting = [spec for spec in rows if fit(spec, None, target) is None and _has_room(spec, problem, ctas)]
    spec = fitting[0] if fitting else by_name(names[-1])
    why = f"{problem.rows} rows of {problem.width} elements on {target.sm_count} SMs, {ctas} CTAs a row"
    return the_one(spec, why, target, None), ctas


def _has_more_ctas(target: Target, rows: int) -> bool:
    """Whether smaller CTAs than those of other rows that hold rows pay: where these cannot run all at a time, and an SM
    has room for as many threads of the smaller ones. From compute capability 10 on they would spill registers."""
    small, large = by_name(TOP_K_SHORT), by_name(TOP_K_MANY[0])
    warps = [spec.num_warps * spec.at_a_time(target.max_smem) for spec in (small, large)]
    return rows > target.sm_count * large.ctas_per_sm and warps[0] >= warps[1] and target.cc < (10, 0)


def _has_room(spec: KernelSpec, problem: TopKProblem, ctas: int) -> bool:
    """Whether CTAs of a row have room for a row of the problem."""
    # Rows that do not begin at 16 bytes have up to three elements more in front.
    slack = 0 if problem.has_aligned_rows else 3
    return not spec.most_elems or problem.width + slack <= spec.most_elems * ctas


def _ctas_of_row(problem: TopKProblem, target: Target) -> int:
    """As many as SMs would idle otherwise, where there are clusters."""
    ctas = 1
    while target.cc >= (9, 0) and ctas < MAX_CLUSTER and problem.rows * 2 * ctas <= target.sm_count:
        if problem.width < (2 * ctas * LEAST_PART if ctas < 4 else HELD_BY_FOUR + 1):
            break
        if ctas >= 4 and problem.rows * 4 * ctas > target.sm_count:  # so many large clusters do not fit at once
            break
        ctas *= 2
    return ctas
