"""What ``omniattn bench`` times of low precision: end to end, the attention kernel alone, the quantization alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from omniattn.bench.anchors import CONTENDERS, INT4_ERROR, QUANTIZED_ERROR, Contender, Forward
from omniattn.bench.shapes import ForwardShape
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.problems.memory import WORKSPACE_ALIGNMENT

#: What can be timed, beside what: ``"exact"`` has only itself.
PRECISIONS: tuple[str, ...] = ("exact", "int8", "int4", "fp8")

#: Of kernels that attend, or merge what others of them leave.
_ATTENTION = ("attention", "attention_split", "attention_combine", "attention_combine_lse")
_ERROR_LIMITS = {"int8": QUANTIZED_ERROR, "int4": INT4_ERROR, "fp8": QUANTIZED_ERROR}
#: Of V where a contender has one, in standard deviations. Bf16 keeps the results, a hundredth of it, to a tenth.
MEAN = 0.5


def contenders(precision: str) -> tuple[Contender, ...]:
    """All contenders of a benchmark of ``precision`` in the order of tables; this package's come first.

    Parameters
    ----------
    precision : {"exact", "int8", "int4", "fp8"}
        For the low ones there are three of this package: ``"omniattn"`` (16 bits, the kernel that the package chooses),
        ``"omniattn_int8"`` (end to end: bf16 in, quantization paid for) and ``"omniattn_int8_kernel"`` (`PartAlone`).
        For fp8 the kernel alone is that of e4m3 arrays, once with V around 0 and once with a mean in it
        (``"omniattn_fp8_kernel_mean"``); besides ``"omniattn_fp8_arrays"``, whole calls on such arrays with the
        transposition of V, and int8 end to end.

    Raises
    ------
    ArgumentError
        Another precision.
    """
    if precision not in PRECISIONS:
        raise ArgumentError("precision", " or ".join(map(repr, PRECISIONS)), repr(precision))
    if precision == "exact":
        return CONTENDERS
    exact, *others = CONTENDERS
    end_to_end = _whole(exact, precision)
    first = dataclasses.replace(exact, label="omniattn exact")
    if precision == "fp8":
        return (first, end_to_end, *_on_arrays(end_to_end), _whole(exact, "int8"), *others)
    alone = dataclasses.replace(
        end_to_end, key=f"{end_to_end.key}_kernel", label=f"{end_to_end.label} kernel",
        build=lambda torch, shape: PartAlone(torch, shape, precision),
    )  # fmt: skip
    return (first, end_to_end, alone, *others)


def _whole(exact: Contender, precision: str) -> Contender:
    return Contender(
        f"omniattn_{precision}", f"omniattn {precision}", exact.package, exact.module, exact.layout,
        _ERROR_LIMITS[precision], lambda _, shape: _end_to_end(shape, precision),
    )  # fmt: skip


def _on_arrays(whole: Contender) -> tuple[Contender, ...]:
    """Contenders that get e4m3 arrays."""
    return (
        dataclasses.replace(
            whole, key=f"{whole.key}_arrays", label=f"{whole.label} arrays", build=lambda _, shape: OnArrays(shape)
        ),
        dataclasses.replace(
            whole, key=f"{whole.key}_kernel", label=f"{whole.label} kernel",
            build=lambda torch, shape: ArraysAlone(torch, shape),
        ),
        dataclasses.replace(
            whole, key=f"{whole.key}_kernel_mean", label=f"{whole.label} kernel, mean in V", error_limit=INT4_ERROR,
            build=lambda torch, shape: ArraysAlone(torch, shape, MEAN),
        ),
    )  # fmt: skip


def _end_to_end(shape: ForwardShape, precision: str) -> Forward:
    import omniattn

    return lambda q, k, v: omniattn.attention(q, k, v, causal=shape.causal, precision=precision)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """One input set with its quantized operands.

    Attributes
    ----------
    o : tensor
    addresses : list of int
        What the launches take.
    tensors : tuple of tensor
        Inputs and workspace: kept, so that their addresses are nobody else's.
    """

    o: Any
    addresses: list[int]
    tensors: tuple[Any, ...]


class PartAlone:
    """The attention kernel of a low-precision call without the quantization before it, or the quantization alone.

    A measuring device, not a way to use the package: of the launches of a call it repeats those of the attention
    kernel, or the others, on a workspace that the whole call has filled. The first call with an input set runs the
    whole call; calls from then on launch the part, with the very arguments that it has in ``attention(precision=...)``.
    The kernel's first output comes from the kernel alone too, so a check of it checks what is timed.

    Parameters
    ----------
    torch : module
    shape : ForwardShape
    precision : {"int8", "int4"} or Int8 or Int4
    part : {"kernel", "quantization"}

    Raises
    ------
    UnsupportedError
        On the first call: the arrays are on the CPU, or on a GPU without such a kernel.
    """

    def __init__(self, torch: Any, shape: ForwardShape, precision: Any, part: str = "kernel") -> None:
        self._torch = torch
        self._causal = shape.causal
        self._precision = precision
        self._part = part
        self._alone: Any = None
        self._prepared: dict[tuple[int, ...], _Prepared] = {}

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Enqueue; returns o, the same tensor every time for the same input set (NaN where nothing computes it)."""
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(q, k, v)
        stream = self._stream()
        for launch in self._alone:
            launch(stream, prepared.addresses)
        return prepared.o

    def _stream(self) -> int:
        return self._torch.cuda.current_stream().cuda_stream

    def _inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """What the call gets of an input set."""
        return q, k, v

    def _prepare(self, *given: Any) -> _Prepared:
        q, k, v = self._inputs(*given)
        plan = self._plan(q, k, v)
        program, launches = plan.program, plan.launches
        self._alone = [
            launch
            for launch, record in zip(program.launches, launches.records, strict=True)
            if (record.spec.op in _ATTENTION) == (self._part == "kernel")
        ]
        num_bytes = launches.workspace_bytes + WORKSPACE_ALIGNMENT
        workspace = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=q.device)
        o = self._torch.empty_like(given[0])
        own = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr(), "o": o.data_ptr()}
        own["workspace"] = -(-workspace.data_ptr() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        addresses = [own.get(name, 0) for name in program.operands]
        program.launch(self._stream(), addresses)
        # The output that gets checked must not be the one of the whole call.
        o.fill_(float("nan"))
        return _Prepared(o, addresses, (*given, q, k, v, workspace))

    def _plan(self, q: Any, k: Any, v: Any) -> Any:
        from omniattn.ops.attention import call_of
        from omniattn.plan.engine import describe, make_plan

        call = call_of(q, k, v, causal=self._causal, precision=self._precision)
        plan = make_plan(call, describe(call, None), load=True)
        if plan.launches is None:
            raise UnsupportedError(
                f"the {self._precision} kernel alone can be timed on a GPU only",
                instead=f"attention(precision={self._precision!r}) as a whole, on the CPU too",
            )
        return plan


def e4m3_of(q: Any, k: Any, v: Any, mean: float = 0.0) -> tuple[Any, Any, Any]:
    """An input set in e4m3, with factors of 1, and a mean in V."""
    import torch

    return (*(x.to(torch.float8_e4m3fn) for x in (q, k)), (v + mean).to(torch.float8_e4m3fn))


class OnArrays:
    """Whole calls on e4m3 arrays, which are made of an input set once.

    Parameters
    ----------
    shape : ForwardShape
    """

    def __init__(self, shape: ForwardShape) -> None:
        self._causal = shape.causal
        self._prepared: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Enqueue; returns o, bf16."""
        import omniattn

        key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if key not in self._prepared:
            # With what they were made of: its addresses are nobody else's then.
            self._prepared[key] = (*e4m3_of(q, k, v), q, k, v)
        return omniattn.attention(*self._prepared[key][:3], causal=self._causal)


class ArraysAlone(PartAlone):
    """The attention kernel of a call on e4m3 arrays, without the transposition of V before it.

    Parameters
    ----------
    torch : module
    shape : ForwardShape
    mean : float
        Of V. The first call with an input set returns o without it, as a new tensor, for a check.
    """

    def __init__(self, torch: Any, shape: ForwardShape, mean: float = 0.0) -> None:
        super().__init__(torch, shape, "fp8")
        self._mean = mean

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """Enqueue; returns o."""
        is_first = (q.data_ptr(), k.data_ptr(), v.data_ptr()) not in self._prepared
        o = super().__call__(q, k, v)
        return o - self._mean if self._mean and is_first else o

    def _inputs(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        return e4m3_of(q, k, v, self._mean)
