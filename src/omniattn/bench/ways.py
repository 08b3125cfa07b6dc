"""Every way of running calls beside attention, checked and timed: ``omniattn bench candidates``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from omniattn.bench.attempt import ERROR_LIMITS
from omniattn.bench.backward import ERROR_LIMIT, ROWS_LIMIT
from omniattn.bench.backward_problem import BackwardProblem
from omniattn.bench.decode import ERROR_LIMITS as DECODE_LIMITS
from omniattn.bench.decode import FORMATS, CacheFormat, Tokens, make_cache
from omniattn.bench.option_problem import Result
from omniattn.bench.shape_contenders import own_call, tensors_of
from omniattn.bench.timing import Clock, Timing, measure
from omniattn.bench.way_cases import AppendCase, BackwardCase, DecodeCase, QuantizeCase, WayCase
from omniattn.errors import OmniattnError, UnsupportedError
from omniattn.plan.stages import quantizations
from omniattn.plan.ways import QuantizedCandidate, asked_of, describe_call
from omniattn.problems import Target
from omniattn.select import choices
from omniattn.select.quantize_ways import asked_of_quantizer
from omniattn.select.ways import Asked, chosen_ways

#: What runs a call, and gives its results.
Run = Callable[[], list[Any]]


class Ran(NamedTuple):
    """One way of running a call: the attributes of `candidates.WayResult`."""

    way: str
    timing: Timing | None
    error: float | None
    chosen: bool
    features: tuple[Any, ...] | None
    reason: str


@dataclass(frozen=True)
class WayCall:
    """A call whose ways can be run.

    Attributes
    ----------
    asked : Asked
        What there is to choose among.
    target : Target
    timed, checked : callable
        (way) -> what is timed, and what makes results to be checked.
    wrong : callable
        (results) -> (relative L1 error or None, why results are wrong or an empty string).
    apart : float
        Largest relative L1 difference of results from the first way's; 0: the same bits.
    """

    asked: Asked[Any]
    target: Target
    timed: Callable[[Any], Run]
    checked: Callable[[Any], Run]
    wrong: Callable[[list[Any]], tuple[float | None, str]]
    apart: float


def run_case(torch: Any, clock: Clock, case: WayCase, iters: int) -> tuple[list[Ran], str]:
    """Check and time the ways of a call, the one that is taken first; or why this GPU has no kernel for it."""
    try:
        call = _CALLS[case.op](torch, case)
    except UnsupportedError as refused:
        return [], str(refused).partition(":")[0]
    chosen = chosen_ways(call.asked, call.target)[0].way
    ways = tuple(dict.fromkeys((chosen, *call.asked.ways())))
    runs: dict[str, Run] = {}
    said: dict[str, tuple[float | None, str]] = {}
    first: list[Any] = []
    for way in ways:
        try:
            results = call.checked(way)()
            torch.cuda.synchronize()
        except OmniattnError as raised:
            said[way.text] = None, f"{type(raised).__name__}: {raised}".split("\n", 1)[0]
            continue
        error, reason = call.wrong(results)
        reason = reason or (_apart(torch, results, first, call.apart) if first else "")
        if not reason:
            first = first or [x.clone() for x in results]
            runs[way.text] = call.timed(way)
        said[way.text] = error, reason
    del first
    timings = measure({text: _called(run) for text, run in runs.items()}, clock, iters=iters, warmup=2)
    found = [(way, way.text, call.asked.count(way)) for way in ways]
    return [
        Ran(text, timings.get(text), said[text][0], way == chosen, work, said[text][1]) for way, text, work in found
    ], ""


def _called(run: Run) -> Callable[[int], Any]:
    return lambda _: run()


def _apart(torch: Any, results: list[Any], first: list[Any], limit: float) -> str:
    """Why results are not those of the first way; empty if they are. NaN is apart from everything else."""
    for number, (x, expected) in enumerate(zip(results, first, strict=True)):
        if not limit:
            same = torch.equal(x.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
            if not same:
                return f"wrong result: array {number} has other bits than the first way's"
            continue
        size = float(expected.float().abs().sum())
        difference = float((x.float() - expected.float()).abs().sum()) / size if size else float(x.abs().sum())
        if not difference <= limit:
            return f"wrong result: relative L1 {difference:.3g} from the first way's, limit {limit:.3g}"
    return ""


def _limited(error: float, limit: float) -> tuple[float, str]:
    return error, "" if error <= limit else f"wrong result: relative L1 {error:.3g} against fp64, limit {limit}"


def _decode(torch: Any, case: DecodeCase) -> WayCall:
    import omniattn

    fmt, tokens = FORMATS[case.format], Tokens(torch, case.shape)
    cache, arrays = _filled(torch, tokens, fmt)
    options = {"deterministic": fmt.deterministic, "shared_prefix": case.shape.prefix}
    described = describe_call(omniattn.decode, tokens.q, cache, **arrays, **options)
    limit = DECODE_LIMITS[fmt.dtype]

    def wrong(results: list[Any]) -> tuple[float, str]:
        return _limited(tokens.sampled_error(results[0]), limit)

    asked = asked_of(described.problem, described.target)
    return WayCall(asked, described.target, described.in_way, described.in_way, wrong, 0.02)


def _filled(torch: Any, tokens: Tokens, fmt: CacheFormat) -> tuple[Any, dict[str, Any]]:
    """A cache with all tokens, and the arrays that calls take with it."""
    import omniattn

    cache, arrays = make_cache(torch, tokens, fmt)
    ends = list(itertools.accumulate(tokens.lengths))
    # Shared tokens come with the first sequence.
    for b, (end, count) in enumerate(zip(ends, tokens.shape.new_tokens(), strict=True)):
        starts = torch.zeros(tokens.shape.batch + 1, dtype=torch.int32, device="cuda")
        starts[b + 1 :] = count
        own = slice(end - count, end)
        omniattn.append(cache, tokens.k[own], tokens.v[own], cu_seqlens=starts, **arrays)
    return cache, arrays


def _append(torch: Any, case: AppendCase) -> WayCall:
    import omniattn

    fmt, tokens = FORMATS[case.format], Tokens(torch, case.shape)
    cache, arrays = _filled(torch, tokens, fmt)
    ends = list(itertools.accumulate(tokens.lengths))
    k, v = (torch.stack([x[end - case.tokens : end] for end in ends]) for x in (tokens.k, tokens.v))
    # Other tokens first, so that what is checked was written by the way.
    omniattn.append(cache, -k, -v, **arrays)
    described = describe_call(omniattn.append, cache, k, v, **arrays)
    asked = asked_of(described.problem, described.target)

    def checked(way: Any) -> Run:
        run = described.in_way(way)

        def decoded() -> list[Any]:
            run()
            return [omniattn.decode(tokens.q, cache, **arrays)]

        return decoded

    def wrong(results: list[Any]) -> tuple[float, str]:
        return _limited(tokens.sampled_error(results[0]), DECODE_LIMITS[fmt.dtype])

    return WayCall(asked, described.target, described.in_way, checked, wrong, 0.02)


def _backward(torch: Any, case: BackwardCase) -> WayCall:
    import omniattn

    problem = BackwardProblem(torch, case.shape)
    forward: Callable[..., Any] = omniattn.attention
    backward: Callable[..., Any] = omniattn.attention_backward
    options = case.options
    if case.shape.packed:
        forward, backward = omniattn.attention_varlen, omniattn.attention_varlen_backward
        options |= {f"cu_seqlens_{name}": problem.starts for name in "qk"}
        options |= {f"max_seqlen_{name}": case.shape.seqlen for name in "qk"}
    x = problem.sets[0]
    del problem.sets[1:]
    o, lse = forward(x.q, x.k, x.v, return_lse=True, **options)
    described = describe_call(
        backward, x.do, x.q, x.k, x.v, o, lse, wanted=case.wanted, deterministic=case.deterministic, **options
    )
    expected = dict(zip(("dq", "dk", "dv"), problem.reference, strict=True))

    def wrong(results: list[Any]) -> tuple[float, str]:
        made = dict(zip(case.wanted, results, strict=True))
        # What is not wanted is right.
        gradients = tuple(made.get(name, value.reshape(like.shape)) for (name, value), like in zip(
            expected.items(), x[:3], strict=True
        ))  # fmt: skip
        whole, rows = problem.errors(gradients)
        if not whole <= ERROR_LIMIT:
            return whole, f"wrong result: relative L1 {whole:.3g} against fp32, limit {ERROR_LIMIT}"
        if not rows <= ROWS_LIMIT:
            return whole, f"wrong result: relative L1 of 64 rows {rows:.3g} against fp32, limit {ROWS_LIMIT}"
        return whole, ""

    asked = asked_of(described.problem, described.target)
    return WayCall(asked, described.target, described.in_way, described.in_way, wrong, 2 * ERROR_LIMIT)


def _quantize(torch: Any, case: QuantizeCase) -> WayCall:
    import omniattn

    tensors = tensors_of(torch, case.shape)
    q, k, v = tensors.check.nhd
    if case.what != "qkv":
        if case.what == "qk":
            described = describe_call(omniattn.quantize_qk, q, k, **case.options)
        else:
            described = describe_call(omniattn.quantize_v, v, **case.options)
        asked = asked_of(described.problem, described.target)
        # Bits are the reference's, as `omniattn verify` finds: each way has to have the same.
        return WayCall(asked, described.target, described.in_way, described.in_way, lambda _: (None, ""), 0.0)
    call = own_call(tensors, case.shape)
    described = describe_call(call.function, *call.arrays(tensors.check), **call.options)
    candidate = choices(described.problem, described.target)[0].candidate
    (whole,) = quantizations(candidate, described.problem)

    def in_way(way: Any, *, alone: bool) -> Run:
        return described.in_way(QuantizedCandidate(candidate, way, alone))

    def wrong(results: list[Any]) -> tuple[float, str]:
        return _limited(tensors.errors(Result(results[0]))[0], ERROR_LIMITS[case.shape.precision])

    return WayCall(
        asked_of_quantizer(whole, described.target), described.target, lambda way: in_way(way, alone=True),
        lambda way: in_way(way, alone=False), wrong, 1e-3,
    )  # fmt: skip


_CALLS: dict[str, Callable[[Any, Any], WayCall]] = {
    "decode": _decode, "append": _append, "backward": _backward, "quantize": _quantize,
}  # fmt: skip
