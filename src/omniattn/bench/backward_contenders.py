"""Who computes the gradients of ``omniattn bench backward``.

This package, torch SDPA's backends, FlexAttention; FlashAttention-3 and 4 where they are installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from omniattn.bench.anchors import is_importable
from omniattn.bench.backward_cases import BackwardShape
from omniattn.bench.backward_problem import BackwardProblem
from omniattn.registry import REGISTRY, KernelSpec

OURS, DETERMINISTIC, DENSE = "omniattn", "deterministic", "dense"
CUDNN, FA2, FA3, FA4, FLEX = "cudnn", "fa2", "fa3", "fa4", "flex"
#: Memory that a library is handed: (batch, seqlen, heads, head_dim), or heads before the sequence. What a user has
#: depends on the model, so the faster of both is the library's time.
LAYOUTS = ("NHD", "HND")
_VARIABLE = "OMNIATTN_FORCE_KERNEL"

#: Computes gradients of one of the input sets, by its number; they are (dq, dk, dv).
Call = Callable[[int], "tuple[Any, ...]"]


class Calls(NamedTuple):
    """What is timed of a contender.

    Attributes
    ----------
    backward : callable
        The gradients alone, from a forward that has been run.
    both : callable or None
        Forward and backward together.
    heads_first : bool
        Gradients are (batch, heads, seqlen, head_dim).
    """

    backward: Call
    both: Call | None
    heads_first: bool = False

    def as_inputs(self, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gradients with the axes of the inputs."""
        return tuple(x.transpose(1, 2) for x in gradients) if self.heads_first else gradients


@dataclass(frozen=True)
class Library:
    """Another implementation.

    Attributes
    ----------
    key, label : str
    build : callable
        ``build(problem, layout) -> Calls``. The forward of each input set runs here.
    layouts : callable
        Of `LAYOUTS` those that it is timed in on a shape; none where it cannot express the shape.
    module, package : str
        What has to be importable; the distribution, where it is not torch.
    """

    key: str
    label: str
    build: Callable[[BackwardProblem, str], Calls]
    layouts: Callable[[BackwardShape], tuple[str, ...]]
    module: str = "torch"
    package: str = ""


def generic_kernels(shape: BackwardShape) -> str:
    """Rows of the exact forward and backward that every GPU runs, as OMNIATTN_FORCE_KERNEL names them."""
    found: list[str] = []
    for op in ("attention", "attention_backward"):
        rows = [spec for spec in _generic(op) if spec.head_dim >= shape.head_dim]
        smallest = min(spec.head_dim for spec in rows)
        # The first that fits is taken: those of newer GPUs first, which they prefer.
        rows.sort(key=lambda spec: spec.min_arch[0] < 9)
        found += (spec.name for spec in rows if spec.head_dim == smallest)
    return ",".join(found)


def _generic(op: str) -> Iterator[KernelSpec]:
    for spec in REGISTRY:
        exact = spec.op == op and not spec.quantized and not spec.arch_specific
        if exact and spec.dtype == "bfloat16" and not spec.score_mods:
            yield spec


@contextlib.contextmanager
def forced_kernels(names: str) -> Iterator[None]:
    """With these kernels forced; with those of the environment where ``names`` is empty."""
    if not names:
        yield
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = names
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def ours(problem: BackwardProblem, *, deterministic: bool = False) -> Calls:
    """This package: `attention_backward` into arrays that are there; the forward with it by torch's autograd."""
    import omniattn

    shape, torch = problem.shape, problem.torch
    options: dict[str, Any] = {"causal": shape.causal}
    if shape.window:
        options["window"] = (shape.window - 1, 0)
    if shape.softcap:
        options["softcap"] = shape.softcap
    forward: Callable[..., Any] = omniattn.attention
    backward: Callable[..., Any] = omniattn.attention_backward
    if shape.packed:
        forward, backward = omniattn.attention_varlen, omniattn.attention_varlen_backward
        options |= {f"cu_seqlens_{name}": problem.starts for name in "qk"}
        options |= {f"max_seqlen_{name}": shape.seqlen for name in "qk"}
    names = generic_kernels(shape) if shape.generic else ""
    with forced_kernels(names):
        results = [forward(x.q, x.k, x.v, return_lse=True, **options) for x in problem.sets]
    outputs = [torch.full_like(x, float("nan")) for x in problem.sets[0][:3]]
    leaves = [tuple(x.detach().requires_grad_() for x in inputs[:3]) for inputs in problem.sets]

    def gradients(number: int) -> tuple[Any, ...]:
        x = problem.sets[number]
        with forced_kernels(names):
            return backward(
                x.do, x.q, x.k, x.v, *results[number], dq=outputs[0], dk=outputs[1], dv=outputs[2],
                deterministic=deterministic, **options,
            )  # fmt: skip

    def both(number: int) -> tuple[Any, ...]:
        with forced_kernels(names):
            o = forward(*leaves[number], **options)
            return torch.autograd.grad(o, leaves[number], problem.sets[number].do)

    return Calls(gradients, None if deterministic else both)


def _by_autograd(problem: BackwardProblem, layout: str, forward: Callable[..., Any], *, heads_first: bool) -> Calls:
    """A differentiable forward of q, k and v; ``heads_first``: it takes (batch, heads, seqlen, head_dim)."""
    torch = problem.torch
    sets = []
    for inputs in problem.sets:
        arrays = inputs if layout == "NHD" else tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs)
        q, k, v, do = (x.transpose(1, 2) if heads_first else x for x in arrays)
        sets.append((tuple(x.detach().requires_grad_() for x in (q, k, v)), do))
    graphs = [forward(*leaves) for leaves, _ in sets]

    def gradients(number: int) -> tuple[Any, ...]:
        leaves, do = sets[number]
        return tuple(torch.autograd.grad(graphs[number], leaves, do, retain_graph=True))

    def both(number: int) -> tuple[Any, ...]:
        leaves, do = sets[number]
        return tuple(torch.autograd.grad(forward(*leaves), leaves, do))

    return Calls(gradients, both, heads_first)


def sdpa(backend_name: str) -> Callable[[BackwardProblem, str], Calls]:
    """One backend of torch SDPA; packed sequences as nested tensors."""

    def build(problem: BackwardProblem, layout: str) -> Calls:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        shape, torch = problem.shape, problem.torch
        backend = getattr(SDPBackend, backend_name)
        options: dict[str, Any] = {"is_causal": shape.causal}
        if shape.group > 1:
            options["enable_gqa"] = True
        attention = torch.nn.functional.scaled_dot_product_attention

        def dense(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return attention(q, k, v, **options)

        if not shape.packed:
            return _by_autograd(problem, layout, dense, heads_first=True)
        starts = problem.starts.long()
        sizes = {"min_seqlen": min(shape.lengths), "max_seqlen": shape.seqlen}

        def packed(q: Any, k: Any, v: Any) -> Any:
            nested = (torch.nested.nested_tensor_from_jagged(x, starts, **sizes).transpose(1, 2) for x in (q, k, v))
            return dense(*nested).transpose(1, 2).values()

        return _by_autograd(problem, layout, packed, heads_first=False)

    return build


def fa2(problem: BackwardProblem, layout: str) -> Calls:
    """FlashAttention-2 as torch has it; windows and packed sequences by the operator below SDPA, which takes them."""
    shape, torch = problem.shape, problem.torch
    if not (shape.window or shape.packed):
        return sdpa("FLASH_ATTENTION")(problem, layout)
    operator = torch.ops.aten._flash_attention_forward
    window = {"window_size_left": shape.window - 1, "window_size_right": 0} if shape.window else {}

    def forward(q: Any, k: Any, v: Any) -> Any:
        starts, n = problem.starts, shape.seqlen
        return operator(q, k, v, starts, starts, n, n, 0.0, shape.causal, False, **window)[0]

    return _by_autograd(problem, layout, forward, heads_first=False)


def flash_attn(module: str) -> Callable[[BackwardProblem, str], Calls]:
    """FlashAttention-3 or 4 by the functions that both have."""

    def build(problem: BackwardProblem, layout: str) -> Calls:
        functions, shape = importlib.import_module(module), problem.shape
        options: dict[str, Any] = {"causal": shape.causal}
        if shape.window:
            options["window_size"] = (shape.window - 1, 0)
        if shape.softcap:
            options["softcap"] = shape.softcap
        if shape.packed:
            options |= {f"cu_seqlens_{name}": problem.starts for name in "qk"}
            options |= {f"max_seqlen_{name}": shape.seqlen for name in "qk"}
        function = functions.flash_attn_varlen_func if shape.packed else functions.flash_attn_func

        def forward(q: Any, k: Any, v: Any) -> Any:
            found = function(q, k, v, **options)
            return found[0] if isinstance(found, tuple) else found  # some releases return the LSE too

        return _by_autograd(problem, layout, forward, heads_first=False)

    return build


def flex(problem: BackwardProblem, layout: str) -> Calls:
    """FlexAttention, compiled for the shape: block mask and compilation are not timed."""
    torch, shape = problem.torch, problem.shape
    module = importlib.import_module("torch.nn.attention.flex_attention")
    # Each shape is compiled anew, and past a limit the compiler would run the slow path without a word.
    torch.compiler.reset()
    mask = None
    if shape.causal:
        n = shape.seqlen
        mask = module.create_block_mask(
            lambda b, h, i, j: ~problem.hidden(i, j), None, None, n, n, device=problem.sets[0].q.device
        )
    cap = shape.softcap
    score = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    attend = module.flex_attention

    def call(q: Any, k: Any, v: Any) -> Any:
        return attend(q, k, v, score_mod=score, block_mask=mask, enable_gqa=shape.group > 1)

    # A backward that may run again must not give the forward's memory away.
    with _kept_buffers():
        compiled = torch.compile(call, dynamic=False)
        calls = _by_autograd(problem, layout, compiled, heads_first=True)
        # The backward is compiled by its first call; both forms of it are.
        calls.backward(0)
        if calls.both is not None:
            calls.both(0)
    return calls


@contextlib.contextmanager
def _kept_buffers() -> Iterator[None]:
    """Compiled graphs that can be gone through several times, where this torch has a choice."""
    try:
        config = importlib.import_module("torch._functorch.config")
    except ImportError:
        yield
        return
    before = getattr(config, "donated_buffer", None)
    if before is None:
        yield
        return
    config.donated_buffer = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        config.donated_buffer = before  # type: ignore[attr-defined]


def _cudnn_layouts(shape: BackwardShape) -> tuple[str, ...]:
    # The kernels for every GPU are compared with those that are for every GPU.
    return () if shape.softcap or shape.window or shape.generic else LAYOUTS[:1] if shape.packed else LAYOUTS


def _fa2_layouts(shape: BackwardShape) -> tuple[str, ...]:
    return () if shape.softcap else LAYOUTS[:1] if shape.packed or shape.window else LAYOUTS


def _hopper_layouts(shape: BackwardShape) -> tuple[str, ...]:
    # Rows of tokens, for which they were written.
    return () if shape.generic else LAYOUTS[:1]


def _flex_layouts(shape: BackwardShape) -> tuple[str, ...]:
    # Compiling takes seconds, and SDPA serves the other shapes.
    return LAYOUTS[1:] if shape.softcap or shape.window else ()


#: In the order of reports.
LIBRARIES: tuple[Library, ...] = (
    Library(CUDNN, "torch cuDNN", sdpa("CUDNN_ATTENTION"), _cudnn_layouts),
    Library(FA2, "torch FA2", fa2, _fa2_layouts),
    Library(
        FA3,
        "FlashAttention-3",
        flash_attn("flash_attn_interface"),
        _hopper_layouts,
        "flash_attn_interface",
        "flash-attn-3",
    ),
    Library(FA4, "FlashAttention-4", flash_attn("flash_attn.cute"), _hopper_layouts, "flash_attn.cute", "flash-attn-4"),
    Library(FLEX, "FlexAttention", flex, _flex_layouts),
)
#: Keys, in the order of tables.
OTHERS: tuple[str, ...] = (CUDNN, FA2, FA3, FA4, FLEX)


def asked(only: Sequence[str], use_flex: bool) -> tuple[tuple[Library, ...], dict[str, str]]:
    """Libraries to run, and for the others why not: the option that leaves them out, or nothing to import."""
    missing = {x.key: f"{x.module} cannot be imported" for x in LIBRARIES if not is_importable(x.module)}
    missing |= {x.key: "left out by --only" for x in LIBRARIES if only and x.key not in only}
    if not use_flex:
        missing[FLEX] = "left out by --no-flex"
    return tuple(x for x in LIBRARIES if x.key not in missing), missing
