"""Who computes the cases of ``omniattn bench options``: this package, torch SDPA's backends, FlexAttention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omniattn.bench.anchors import InputSet
from omniattn.bench.option_cases import DROPOUT_RNG
from omniattn.bench.option_problem import Forward, Problem, Result

#: Key of this package's call; of the plain call of the same shape, which runs in the same rounds.
OURS, PLAIN_CALL = "omniattn", "plain"
#: Runs only where no other contender does: it writes all scores to memory.
MATH = "math"
FLEX = "flex"


class UnfitError(Exception):
    """The contender has no way to express the case; the text says what it lacks."""


@dataclass(frozen=True)
class Other:
    """Another implementation.

    Attributes
    ----------
    key, label : str
        Name in JSON, name in tables.
    build : callable
        ``build(problem) -> Forward``. Everything that a user would do once (masks, block masks) happens here.
    """

    key: str
    label: str
    build: Callable[[Problem], Forward]


def ours(problem: Problem, precision: str) -> Forward:
    """This package's call."""
    import omniattn

    case = problem.case
    options: dict[str, Any] = {**case.options, "precision": precision}
    for name, array in (("mask", problem.mask), ("sinks", problem.sinks)):
        if array is not None:
            options[name] = array
    if case.scale != 1.0:
        options["softmax_scale"] = problem.scale
    if case.expression:
        options["score_mod"] = omniattn.ScoreMod(
            case.expression, case.mask_expression or None, problem.reference, **problem.arrays
        )
    if problem.blocks is not None:
        options |= {"block_mask": problem.blocks, "block_size": problem.block_size}
    if case.dropout:
        options |= {"dropout_p": case.dropout, "dropout_rng": DROPOUT_RNG}
    if case.packed:
        return _packed(problem, options)

    def forward(inputs: InputSet) -> Result:
        found = omniattn.attention(*inputs.nhd, **options)
        return Result(*found) if isinstance(found, tuple) else Result(found)

    return forward


def _packed(problem: Problem, options: dict[str, Any]) -> Forward:
    import omniattn

    e = problem.extents
    for name, seqlen in (("q", e.seqlen_q), ("k", e.seqlen_k)):
        starts = [b * seqlen for b in range(e.batch + 1)]
        options[f"cu_seqlens_{name}"] = problem.torch.tensor(starts, dtype=problem.torch.int32, device="cuda")
        options[f"max_seqlen_{name}"] = seqlen

    def forward(inputs: InputSet) -> Result:
        found = omniattn.attention_varlen(*(x.flatten(0, 1) for x in inputs.nhd), **options)
        o, lse = found if isinstance(found, tuple) else (found, None)
        if lse is not None:
            lse = lse.unflatten(1, (e.batch, e.seqlen_q)).transpose(0, 1)
        return Result(o.view(inputs.nhd[0].shape), lse)

    return forward


def sdpa(backend_name: str) -> Callable[[Problem], Forward]:
    """One backend of torch SDPA. It returns no LSE: where that is asked for, it does a little less."""

    def build(problem: Problem) -> Forward:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, backend_name)
        options = _sdpa_options(problem)
        attention = problem.torch.nn.functional.scaled_dot_product_attention

        def forward(inputs: InputSet) -> Result:
            with sdpa_kernel(backend):
                return Result(attention(*inputs.hnd, **options).transpose(1, 2))

        return forward

    return build


def _sdpa_options(problem: Problem) -> dict[str, Any]:
    case, e = problem.case, problem.extents
    if case.score is not None:
        raise UnfitError("torch SDPA cannot change scores by a function of them")
    if case.sinks:
        raise UnfitError("torch SDPA has no sinks")
    if case.dropout:
        raise UnfitError("torch SDPA drops other probabilities, which cannot be checked")
    options: dict[str, Any] = {"scale": problem.scale}
    if case.group > 1:
        options["enable_gqa"] = True
    mask = problem.mask
    query, key = (problem.torch.arange(n, device="cuda") for n in (e.seqlen_q, e.seqlen_k))
    sees = problem.sees(0, 0, query[:, None], key)
    if case.bounds == (-1, 0) and mask is None and sees is None and e.seqlen_q == e.seqlen_k:
        return {**options, "is_causal": True}
    mask = mask if sees is None else sees[None, None]  # no case has both
    band = problem.band()
    if mask is None:
        mask = band
    elif band is not None:
        mask = mask & band if mask.dtype == problem.torch.bool else mask.masked_fill(~band, float("-inf"))
    if mask is None:
        return options
    # Its backends want masks that are added in q's type; the conversion is not timed.
    return {**options, "attn_mask": mask if mask.dtype == problem.torch.bool else mask.to(problem.dtype)}


def flex(problem: Problem) -> Forward:
    """FlexAttention, compiled for the case: block mask and compilation are not timed."""
    torch, case, e = problem.torch, problem.case, problem.extents
    if case.dropout:
        raise UnfitError("FlexAttention has no dropout")
    try:
        module = importlib.import_module("torch.nn.attention.flex_attention")
    except ImportError as error:
        raise UnfitError("this torch has no FlexAttention") from error
    # Each case is compiled anew, and past a limit the compiler would run the slow path without a word.
    torch.compiler.reset()
    hides = _flex_mask(problem)
    block_mask = None
    if hides is not None:
        batch, heads = (n if problem.mask is not None and problem.mask.shape[axis] > 1 else None
                        for axis, n in enumerate((e.batch, e.heads)))  # fmt: skip
        block_mask = module.create_block_mask(
            hides, batch, heads, e.seqlen_q, e.seqlen_k, device=problem.check.hnd[0].device
        )
    with_lse = case.sinks or bool(case.options.get("return_lse"))
    options: dict[str, Any] = {
        "score_mod": _flex_score(problem), "block_mask": block_mask, "scale": problem.scale,
        "enable_gqa": case.group > 1,
    }  # fmt: skip
    if with_lse:
        # Newer releases warn of the older name.
        new = hasattr(module, "AuxRequest")
        options |= {"return_aux": module.AuxRequest(lse=True)} if new else {"return_lse": True}
    attend = module.flex_attention

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        if not with_lse:
            return attend(q, k, v, **options), None
        o, lse = attend(q, k, v, **options)
        lse = getattr(lse, "lse", lse)
        if sinks is None:
            return o, lse
        # A sink is one more term of the sum, as models do it that have sinks.
        share = torch.sigmoid(lse - sinks[:, None])
        return (o * share[..., None]).to(o.dtype), lse - share.log()

    compiled = torch.compile(call, dynamic=False)

    def forward(inputs: InputSet) -> Result:
        o, lse = compiled(*inputs.hnd, problem.sinks)
        return Result(o.transpose(1, 2), lse)

    return forward


def _flex_mask(problem: Problem) -> Callable[..., Any] | None:
    """What hides pairs, in FlexAttention's form: a boolean mask, causal, a window; None where nothing does."""
    mask = problem.mask
    at: Callable[..., Any] | None = None if mask is None or mask.dtype != problem.torch.bool else _lookup(mask)
    if problem.blocks is not None or problem.case.documents:
        at = lambda b, h, i, j: problem.sees(b, h, i, j)  # noqa: E731 - FlexAttention wants a function
    if problem.case.bounds == (-1, -1):
        return at
    if at is None:
        return lambda b, h, i, j: problem.within(i, j)
    return lambda b, h, i, j: at(b, h, i, j) & problem.within(i, j)


def _flex_score(problem: Problem) -> Callable[..., Any] | None:
    """What changes scores: first the option's own function, then a mask that is added."""
    score, mask = problem.case.score, problem.mask
    if mask is None or mask.dtype == problem.torch.bool:
        return score
    at = _lookup(mask)
    if score is None:
        return lambda s, b, h, i, j: s + at(b, h, i, j)
    return lambda s, b, h, i, j: score(s, b, h, i, j) + at(b, h, i, j)


def _lookup(mask: Any) -> Callable[..., Any]:
    """The mask at (batch, head, query, key): extents of 1 are the same for all."""
    wide = [n > 1 for n in mask.shape]

    def at(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask[b if wide[0] else 0, h if wide[1] else 0, i if wide[2] else 0, j if wide[3] else 0]

    return at


#: In the order of reports. The last one is a fallback.
OTHERS: tuple[Other, ...] = (
    Other("cudnn", "torch cuDNN", sdpa("CUDNN_ATTENTION")),
    Other("fa2", "torch FA2", sdpa("FLASH_ATTENTION")),
    Other("efficient", "torch efficient", sdpa("EFFICIENT_ATTENTION")),
    Other(FLEX, "FlexAttention", flex),
    Other(MATH, "torch math", sdpa("MATH")),
)
