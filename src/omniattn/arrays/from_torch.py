"""PyTorch tensors. Imported only when one has been seen, because it imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError, DeviceError, DtypeError, UnsupportedError
from .strides import contiguous_strides, has_plain_rows
from .tensor import Tensor

NAME = "torch"

_DTYPES: dict[Any, str] = {
    getattr(torch, name): name
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
# Not in every torch that this package works with.
_DTYPES.update(
    {
        getattr(torch, name): name
        for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
        if hasattr(torch, name)
    }
)
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_NAMES = ", ".join(sorted(_BY_NAME))

_new = Tensor.__new__
_is_grad_enabled = torch.is_grad_enabled


def _forward_level() -> int:
    """Nested `forward_ad.dual_level` blocks that are entered, minus 1."""
    return getattr(forward_ad, "_current_level", -1)


_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_jit_trace: Callable[[], Any] = torch._C._get_tracing_state


def _modes() -> bool:
    """Whether something watches operations: a dispatch mode (traces, counters), or `torch.jit.trace`."""
    return _dispatch_modes() > 0 or _jit_trace() is not None


#: The innermost functional transform (`torch.func`); None outside of all.
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

#: What the C module asks before every call: modes, the transform, and the module that counts the levels.
WATCHERS = (_modes, _transform, forward_ad)


def _increment_of(increment: Callable[[Any], None]) -> Callable[[Sequence[Any]], None]:
    """torch's own function, which takes tensors and passes over inference tensors; older ones took one tensor."""
    try:
        increment(())
    except (RuntimeError, TypeError):

        def increment_all(tensors: Sequence[Any]) -> None:
            for x in tensors:
                if not x.is_inference():
                    increment(x)

        return increment_all
    return increment


#: Counts a change in place of each of these tensors; inference tensors have no counter.
increment_version: Callable[[Sequence[Any]], None] = _increment_of(torch._C._increment_version)
is_inference_mode: Callable[[], bool] = torch.is_inference_mode_enabled

#: What the C module asks of tensors that are written, and calls.
WRITERS = (torch.Tensor.is_inference, is_inference_mode, increment_version)

#: Subclasses that are plain memory, like their base.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def describer(cls: type) -> Callable[[Any, str, int | None], Tensor]:
    """The `describe` for one class of tensors."""
    return describe if cls in PLAIN else _refuse_subclass


def describe(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """A tensor's facts; the hot path, about ten attribute reads."""
    t = _new(Tensor)
    try:
        t.ptr = obj.data_ptr()
        t.shape = obj.shape
        t.strides = obj.stride()
        t.dtype = _DTYPES[obj.dtype]
    except KeyError:
        raise DtypeError(argument, f"one of {_NAMES}", str(obj.dtype).removeprefix("torch.")) from None
    except RuntimeError as error:
        raise _no_memory(obj, argument) from error
    if obj.is_cuda:
        t.device = "cuda"
        t.ordinal = obj.get_device()
    elif obj.is_cpu:
        t.device = "cpu"
        t.ordinal = 0
    else:
        raise _no_memory(obj, argument)
    if obj.is_neg():
        raise UnsupportedError(
            f"argument {argument!r} is a lazily negated view, whose memory holds the opposite sign",
            instead="tensor.resolve_neg()",
        )
    if obj.requires_grad and _is_grad_enabled():
        raise UnsupportedError(
            f"argument {argument!r} requires a gradient, which this call does not compute",
            instead="calling under torch.no_grad() or torch.inference_mode(), or passing tensor.detach()",
        )
    if _forward_level() >= 0 and forward_ad.unpack_dual(obj).tangent is not None:
        raise UnsupportedError(
            f"argument {argument!r} has a tangent (forward-mode differentiation), and this version has no derivatives",
            instead="torch.autograd.forward_ad.unpack_dual(tensor).primal",
        )
    t.obj = obj
    t.framework = NAME
    t.readonly = False
    t.argument = argument
    return t


def torch_facts(objects: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    """See `omniattn.arrays.torch_facts`; the first step of the fast path, eight attribute reads a tensor."""
    facts: list[Any] = []
    addresses: list[int] = []
    # `describe` looks for tangents; what watches or transforms tensors gets operators.
    if _forward_level() >= 0 or _modes() or _transform() is not None:
        return None
    try:
        for obj in objects:
            if obj is None:
                facts.append(None)
                addresses.append(0)
            elif (
                obj.__class__ in PLAIN
                and obj.is_cuda
                and not obj.is_neg()
                and not (obj.requires_grad and _is_grad_enabled())
            ):
                facts.append((obj.dtype, obj.get_device(), obj.shape, obj.stride()))
                addresses.append(obj.data_ptr())
            else:
                return None
    except RuntimeError:  # no strides, or no memory
        return None
    return tuple(facts), addresses


def gradient_facts(objects: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    """`torch_facts` of a call that gradients are wanted of: which arrays need one is part of the facts."""
    facts: list[Any] = []
    addresses: list[int] = []
    if _forward_level() >= 0 or _modes() or _transform() is not None:
        return None
    try:
        for obj in objects:
            if obj is None:
                facts.append(None)
                addresses.append(0)
            elif obj.__class__ in PLAIN and obj.is_cuda and not obj.is_neg():
                facts.append((obj.dtype, obj.get_device(), obj.shape, obj.stride(), obj.requires_grad))
                addresses.append(obj.data_ptr())
            else:
                return None
    except RuntimeError:  # no strides, or no memory
        return None
    return tuple(facts), addresses


def needs_operator(objects: Sequence[Any]) -> bool:
    """See `omniattn.arrays.needs_operator`."""
    tensors = [x for x in objects if isinstance(x, torch.Tensor)]
    if tensors and (_modes() or _transform() is not None):
        return True
    return any(_has_own_dispatch(x.__class__) for x in tensors)


def is_autocast(objects: Sequence[Any]) -> bool:
    """See `omniattn.arrays.is_autocast`: float32, on a device where autocast is enabled."""
    # Of another device, "meta" say, torch raises where it is asked about autocast.
    return any(
        isinstance(x, torch.Tensor) and x.dtype is torch.float32 and (x.is_cpu or x.is_cuda)
        and torch.is_autocast_enabled(x.device.type)
        for x in objects
    )  # fmt: skip


@functools.cache
def _has_own_dispatch(cls: type) -> bool:
    """Whether a class of tensors wants to see operators; nested tensors would need rules of their own: refused."""
    if cls in PLAIN or any(base.__name__ == "NestedTensor" for base in cls.__mro__):
        return False
    return getattr(cls, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def needs_gradient(objects: Sequence[Any]) -> bool:
    """See `omniattn.arrays.needs_gradient`."""
    if not _is_grad_enabled():
        return False
    return any(obj.__class__ in PLAIN and obj.requires_grad for obj in objects)


def with_plain_rows(obj: Any, multiple: int) -> Any:
    """See `omniattn.arrays.with_plain_rows`. Under another current stream than the launch's, `enter` orders both."""
    if not obj.is_cuda or obj.ndim == 0 or obj.layout is not torch.strided:
        return obj
    if has_plain_rows(obj.shape, obj.stride(), obj.element_size(), multiple) and obj.data_ptr() % multiple == 0:
        return obj
    return obj.clone(memory_format=torch.contiguous_format)


def _no_memory(obj: Any, argument: str) -> Exception:
    """The error for a tensor that is not plain strided memory on the CPU or on CUDA."""
    if getattr(obj, "is_nested", False):
        return UnsupportedError(
            f"argument {argument!r} is a nested tensor",
            instead="attention_varlen on the packed values() with cu_seqlens, or a padded tensor with mask=",
        )
    if obj.layout is not torch.strided:
        layout = str(obj.layout).removeprefix("torch.")
        return UnsupportedError(
            f"argument {argument!r} has layout {layout}", instead="strided tensors: tensor.to_dense()"
        )
    if obj.device.type not in ("cpu", "cuda"):
        return DeviceError(argument, "a tensor on the CPU or on CUDA", f"device {obj.device}")
    return UnsupportedError(
        f"argument {argument!r} is a tensor without memory of its own (inside vmap, a functional transform or a trace)",
        instead="calling outside the transform",
    )


def _refuse_subclass(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    raise UnsupportedError(
        f"argument {argument!r} is a {type(obj).__module__}.{type(obj).__qualname__}, a subclass of torch.Tensor "
        "that may not be plain memory",
        instead="the plain tensor: tensor.as_subclass(torch.Tensor) where the class only adds attributes, "
        "to_local() for DTensor, nested tensors by values() with attention_varlen",
    )


@functools.cache
def _device(kind: str, ordinal: int) -> Any:
    return torch.device(kind, ordinal) if kind == "cuda" else torch.device("cpu")


# Strides given, because torch.empty tries a form with dimension names first: 2.5 µs against 1.6 µs.
_empty = torch.empty_strided


def empty(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new tensor on ``ref``'s device, from torch's allocator and for torch's current stream."""
    obj = _empty(shape, contiguous_strides(shape), dtype=_BY_NAME[dtype], device=_device(ref.device, ref.ordinal))
    t = _new(Tensor)
    t.obj = obj
    t.framework = NAME
    t.ptr = obj.data_ptr()
    if t.ptr == 0 and 0 not in shape:
        raise UnsupportedError(
            "torch gave an output that has no memory (FakeTensorMode, or another trace of shapes, is active)",
            instead="calling outside that mode",
        )
    t.shape = obj.shape
    t.strides = obj.stride()
    t.dtype = dtype
    t.device = ref.device
    t.ordinal = ref.ordinal
    t.readonly = False
    t.argument = "out"
    return t


def allocator(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any]:
    """What gives the tensor of `empty` call after call, from ``ref``'s tensor or any with the same facts."""
    strides = contiguous_strides(shape)
    if dtype == ref.dtype and shape == tuple(ref.shape) and strides == tuple(ref.strides):
        return torch.empty_like  # the cheapest of torch's calls: 1.3 µs
    # `empty_like` of a tensor kept for it would be 0.3 µs cheaper, but its memory may come from a pool of
    # torch.compile's CUDA graphs, which takes what is kept there for a fault.
    place = {"dtype": _BY_NAME[dtype], "device": _device(ref.device, ref.ordinal)}
    make = functools.partial(_empty, shape, strides, **place)
    return lambda like: make()


# Two attribute reads and a Stream object cheaper than the public call; absent in builds without CUDA.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current_stream_public(ref: Tensor) -> int:
    return int(torch.cuda.current_stream(ref.ordinal).cuda_stream)


def _current_stream_raw(ref: Tensor) -> int:
    return _raw_stream(ref.ordinal)


def stream_query(ref: Tensor) -> Callable[[], int]:
    """`current_stream` of ``ref``'s GPU for later calls, without ``ref``."""
    if _raw_stream is not None:
        return functools.partial(_raw_stream, ref.ordinal)
    ordinal = ref.ordinal
    return lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)


#: Raw handle of torch's current stream on a tensor's GPU.
current_stream = _current_stream_public if _raw_stream is None else _current_stream_raw


def _stream_object(stream: int, ordinal: int) -> Any:
    if stream == 0:
        return torch.cuda.default_stream(ordinal)
    return torch.cuda.ExternalStream(stream, device=ordinal)


def enter(tensors: list[Tensor], stream: int) -> None:
    """Make ``stream`` wait for what torch has queued on its current stream, and tell the allocator who uses these.

    Torch's own events: under graph capture they make the other stream part of the graph.
    """
    ordinal = tensors[0].ordinal
    other = _stream_object(stream, ordinal)
    other.wait_stream(torch.cuda.current_stream(ordinal))
    for t in tensors:
        t.obj.record_stream(other)


def is_frozen(x: Any) -> bool:
    """Whether torch forbids to write to a tensor: one of inference mode, outside of it."""
    return x.is_inference() and not is_inference_mode()


def check_out(t: Tensor) -> None:
    """Refuse what torch forbids to write to."""
    if is_frozen(t.obj):
        raise ArgumentError(
            t.argument,
            "a tensor that may be written here",
            "an inference tensor outside inference mode",
            hint="Allocate it outside torch.inference_mode()",
        )
