"""Who computes the cases of ``omniattn bench few`` and its kin: this package, torch's attention, FlashAttention-4."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omniattn.bench import option_contenders
from omniattn.bench.anchors import InputSet
from omniattn.bench.backward_contenders import forced_kernels
from omniattn.bench.option_contenders import FLEX, UnfitError
from omniattn.bench.option_problem import Forward, Problem, Result
from omniattn.bench.packed_problem import PackedProblem
from omniattn.bench.shape_cases import ShapeCase
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.registry import REGISTRY, KernelSpec

CUDNN, FA2, FA4 = "cudnn", "fa2", "fa4"
_CUDNN, _FA2 = "CUDNN_ATTENTION", "FLASH_ATTENTION"
#: This package's kernels that the case would not take by itself, by key: whether they are made for one architecture.
WAYS = {"wgmma": True, "mma.sync": False}

#: What tensors a case has.
Tensors = Problem | PackedProblem


@dataclass(frozen=True)
class Other:
    """Another implementation.

    Attributes
    ----------
    key, label : str
        Name in JSON, name in tables.
    build : callable
        ``build(problem, case) -> Forward``. Everything that a user would do once (masks, block masks) happens here.
    """

    key: str
    label: str
    build: Callable[[Tensors, ShapeCase], Forward]


def tensors_of(torch: Any, case: ShapeCase) -> Tensors:
    """Tensors of a case on torch's current CUDA device."""
    return PackedProblem(torch, case) if case.packed else Problem(torch, *case.dense())


def _as_they_are(inputs: InputSet) -> tuple[Any, Any, Any]:
    return inputs.nhd


@dataclass(frozen=True)
class OwnCall:
    """This package's call for a case: the function, its arguments but for q, k and v, and what these are."""

    function: Callable[..., Any]
    options: dict[str, Any]
    arrays: Callable[[InputSet], tuple[Any, Any, Any]] = _as_they_are

    def explain(self, inputs: InputSet) -> Any:
        """What the call would do."""
        import omniattn

        return omniattn.explain(self.function, *self.arrays(inputs), **self.options)

    def run(self, inputs: InputSet) -> Result:
        """The call."""
        return Result(self.function(*self.arrays(inputs), **self.options))


def _quantized() -> Callable[[InputSet], tuple[Any, Any, Any]]:
    """q, k and v of an input set, quantized when it is seen first."""
    import omniattn

    made: dict[int, tuple[Any, Any, Any]] = {}

    def arrays(inputs: InputSet) -> tuple[Any, Any, Any]:
        if id(inputs) not in made:
            q, k, v = inputs.nhd
            qk = omniattn.quantize_qk(q, k)
            made[id(inputs)] = qk.q, qk.k, omniattn.quantize_v(v)
        return made[id(inputs)]

    return arrays


def own_call(problem: Tensors, case: ShapeCase) -> OwnCall:
    """How this package is called."""
    import omniattn

    options: dict[str, Any] = {**case.options, "precision": case.precision}
    if isinstance(problem, PackedProblem):
        longest_q, longest_k = problem.longest
        options |= {"cu_seqlens_q": problem.starts_q, "cu_seqlens_k": problem.starts_k}
        return OwnCall(omniattn.attention_varlen, {**options, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k})
    if problem.mask is not None:
        options["mask"] = problem.mask
    return OwnCall(omniattn.attention, options, _quantized() if case.operands else _as_they_are)


def ours(problem: Tensors, case: ShapeCase, row: str = "") -> Forward:
    """This package; with the kernel ``row`` where one is named."""
    call = own_call(problem, case)

    def forced(inputs: InputSet) -> Result:
        with forced_kernels(row):
            return call.run(inputs)

    return forced if row else call.run


def forced_way(problem: Tensors, case: ShapeCase, way: str) -> Forward:
    """This package with kernels on wgmma, or with those on mma.sync: split keys first, as far as they take the case."""
    call = own_call(problem, case)
    for spec in _rows(case, WAYS[way]):
        try:
            with forced_kernels(spec.name):
                call.explain(problem.check)
        except (ArgumentError, UnsupportedError):
            continue
        return ours(problem, case, spec.name)
    raise UnfitError(f"no kernel on {way} takes it")


def _rows(case: ShapeCase, arch_specific: bool) -> Iterator[KernelSpec]:
    """Rows that may take a case, the best first."""
    rows = [
        spec
        for spec in REGISTRY
        if spec.op in ("attention_split", "attention")
        and (spec.dtype, spec.quantized, spec.arch_specific) == ("bfloat16", case.precision != "exact", arch_specific)
        and min(spec.head_dim, spec.head_dim_v) >= max(case.head_dim, case.head_dim_v)
    ]
    yield from sorted(rows, key=lambda s: (s.op != "attention_split", s.head_dim, s.score_mods, s.options))


def cudnn(problem: Tensors, case: ShapeCase) -> Forward:
    """cuDNN through torch SDPA; packed sequences as nested tensors, which are made once."""
    if isinstance(problem, Problem):
        return option_contenders.sdpa(_CUDNN)(problem)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.window is not None or case.softcap:
        raise UnfitError("torch SDPA has no windows and no softcap for packed sequences")
    if case.causal and case.lengths_q != case.lengths_k:
        raise UnfitError("torch SDPA aligns causal masks at the first query")
    nested = {id(inputs): _nested(problem, inputs) for inputs in problem.sets}
    attention, backend = problem.torch.nn.functional.scaled_dot_product_attention, getattr(SDPBackend, _CUDNN)
    options: dict[str, Any] = {"is_causal": case.causal, **({"enable_gqa": True} if case.group > 1 else {})}

    def forward(inputs: InputSet) -> Result:
        with sdpa_kernel(backend):
            return Result(attention(*nested[id(inputs)], **options).transpose(1, 2).values())

    return forward


def _nested(problem: PackedProblem, inputs: InputSet) -> tuple[Any, ...]:
    case, made = problem.case, problem.torch.nested.nested_tensor_from_jagged
    sizes = [(problem.starts_q.long(), case.lengths_q), *[(problem.starts_k.long(), case.lengths_k)] * 2]
    return tuple(
        made(x, starts, min_seqlen=min(lengths), max_seqlen=max(lengths)).transpose(1, 2)
        for x, (starts, lengths) in zip(inputs.nhd, sizes, strict=True)
    )


def fa2(problem: Tensors, case: ShapeCase) -> Forward:
    """FlashAttention-2 as torch has it; what SDPA has no words for by the operator below it."""
    if case.mask or case.softcap:
        raise UnfitError("torch's FlashAttention-2 has no masks and no softcap")
    if case.own_head_dim_v:
        raise UnfitError("torch's FlashAttention-2 takes one head_dim")
    left, right = case.bounds
    aligned = case.lengths_q == case.lengths_k or not case.causal
    if isinstance(problem, Problem) and case.window is None and aligned:
        return option_contenders.sdpa(_FA2)(problem)
    operator = problem.torch.ops.aten._flash_attention_forward
    starts: tuple[Any, Any] = (None, None)
    if isinstance(problem, PackedProblem):
        starts = problem.starts_q, problem.starts_k
    longest = max(case.lengths_q), max(case.lengths_k)
    options: dict[str, Any] = {"scale": problem.scale}
    if case.window is not None:
        options |= {"window_size_left": left, "window_size_right": right}

    def forward(inputs: InputSet) -> Result:
        return Result(operator(*inputs.nhd, *starts, *longest, 0.0, case.causal, False, **options)[0])

    return forward


def flex(problem: Tensors, case: ShapeCase) -> Forward:
    """FlexAttention, compiled for the case; packed sequences as one in which each sees itself only."""
    if isinstance(problem, Problem):
        return option_contenders.flex(problem)
    if case.lengths_q != case.lengths_k:
        raise UnfitError("as one sequence it takes as many keys as queries")
    torch = problem.torch
    module = importlib.import_module("torch.nn.attention.flex_attention")
    torch.compiler.reset()
    tokens, starts = sum(case.lengths_q), problem.starts_q.long()
    lengths = starts.diff()
    of = torch.repeat_interleave(torch.arange(len(lengths), device="cuda"), lengths)
    place = torch.arange(tokens, device="cuda") - starts[of]

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (of[i] == of[j]) & problem.within(place[i], place[j], 0, 0)

    cap = case.softcap
    mask = module.create_block_mask(sees, None, None, tokens, tokens, device=problem.check.nhd[0].device)
    score = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    compiled = torch.compile(
        functools.partial(module.flex_attention, score_mod=score, block_mask=mask, enable_gqa=case.group > 1),
        dynamic=False,
    )

    def forward(inputs: InputSet) -> Result:
        return Result(compiled(*(x[None].transpose(1, 2) for x in inputs.nhd)).transpose(1, 2)[0])

    return forward


def fa4(problem: Tensors, case: ShapeCase) -> Forward:
    """FlashAttention-4, where it is installed."""
    try:
        module = importlib.import_module("flash_attn.cute")
    except ImportError as error:
        raise UnfitError("flash_attn.cute cannot be imported") from error
    if case.mask:
        raise UnfitError("FlashAttention-4 takes masks as functions only")
    left, right = (None if n < 0 else n for n in case.window or (-1, -1))
    options: dict[str, Any] = {"causal": case.causal, "window_size": (left, right)}
    if case.softcap:
        options["softcap"] = case.softcap
    function = module.flash_attn_func
    if isinstance(problem, PackedProblem):
        function, (longest_q, longest_k) = module.flash_attn_varlen_func, problem.longest
        options |= {"cu_seqlens_q": problem.starts_q, "cu_seqlens_k": problem.starts_k}
        options |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}

    def forward(inputs: InputSet) -> Result:
        found = function(*inputs.nhd, **options)
        return Result(found[0] if isinstance(found, tuple) else found)

    return forward


#: In the order of reports.
SHAPE_OTHERS: tuple[Other, ...] = (
    Other(CUDNN, "torch cuDNN", cudnn),
    Other(FA2, "torch FA2", fa2),
    Other(FLEX, "FlexAttention", flex),
    Other(FA4, "FlashAttention-4", fa4),
)
