"""Arrays of every framework: facts in, the same framework's arrays out, and streams in the right order.

A call goes through here in this order::

    q = describe(q_object, "q")                 # and every other input
    launch on  stream = prepare(tensors, stream_argument)
    release(tensors, stream)                    # memory that the queued kernel still reads
    result = finish(out, stream)

Nothing here waits on the host. Importing this package imports no framework: their modules are loaded when the first
of their arrays is seen. On the common path (torch or CuPy, no ``stream=``) `prepare`, `release` and `finish` touch no
CUDA function but the query of the framework's current stream.

Streams
-------
==========  =======================================  ==========================================================
framework   kernel runs on (without ``stream=``)     result is safe to use
==========  =======================================  ==========================================================
torch       torch's current stream                   on that stream
CuPy        CuPy's current stream                    on that stream
JAX         legacy default stream, after the inputs  anywhere in JAX: it waits for the kernel
other       legacy default stream, after the inputs  in the library, if it has ``from_dlpack``; else on that stream.
                                                     An array of our own: in whatever imports it
==========  =======================================  ==========================================================

With ``stream=`` the kernel runs there, after what the framework has queued for the inputs; torch and CuPy results are
then safe on ``stream``: work on another stream has to be made to wait, as always with streams in these frameworks.

Arrays that outlive a call and are written by it, those of KV caches, are kept in order by `order.LaunchOrder`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import ArgumentError, DeviceError, telling
from .host import bfloat16_bits, e4m3_bytes, raw_view, store, to_numpy
from .streams import resolve_stream
from .strides import contiguous_strides
from .tensor import ITEMSIZE, CapsuleTensor, Tensor
from .written import first_shared, mark_written, require_writable, span

__all__ = [
    "CapsuleTensor",
    "ITEMSIZE",
    "Tensor",
    "allocator",
    "bfloat16_bits",
    "contiguous_strides",
    "current_stream",
    "describe",
    "describe_of",
    "empty_like_framework",
    "e4m3_bytes",
    "finish",
    "first_shared",
    "has_tracer",
    "is_autocast",
    "is_e4m3",
    "is_sharded",
    "needs_gradient",
    "needs_operator",
    "needs_torch_operator",
    "torch_facts",
    "traced_by_jax",
    "prepare",
    "mark_written",
    "raw_view",
    "require_same_device",
    "require_writable",
    "resolve_stream",
    "release",
    "span",
    "store",
    "stream_query",
    "to_numpy",
    "with_plain_rows",
    "without_gradients",
]

Describer = Callable[[Any, str, "int | None"], Tensor]

_describers: dict[type, Describer] = {}
_empties: dict[str, Callable[[Tensor, tuple[int, ...], str], Tensor]] = {}
_currents: dict[str, Callable[[Tensor], int]] = {}
_row_copiers: dict[type, Callable[[Any, int], Any]] = {}


def describe(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """Facts of a caller's array.

    Parameters
    ----------
    obj : array
        torch, CuPy, JAX or NumPy array, or any object with ``__dlpack__`` and ``__dlpack_device__``.
    argument : str
        Name of the argument, for errors.
    stream : int, optional
        Raw stream of the launch, if it is known already. Only JAX and DLPack exporters use it (default: the legacy
        default stream, 0), to save a second export when `prepare` arrives at another stream.

    Returns
    -------
    Tensor

    Raises
    ------
    ArgumentError
        Not an array, or one that its exporter will not give.
    DtypeError, DeviceError, StrideError
        An element type, a device or strides that cannot be expressed.
    UnsupportedError
        Tracers, subclasses with a meaning of their own, sparse and nested tensors, tensors that require a gradient.
    """
    try:
        describer = _describers[type(obj)]
    except KeyError:
        describer = _register(type(obj), argument)
    return describer(obj, argument, stream)


def describe_of(function: str, obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """The same for the public function ``function``, which errors name."""
    return telling(function, describe, obj, argument, stream)


def _know_none(objects: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]] | None:
    return None


#: ``torch_facts(objects)``: what a repeated call needs to know of its arrays, for a third of the cost of `describe`.
#: None stands for an argument that was not given. Returns
#:
#: - facts, hashable: equal ones mean that `describe` gives equal answers but for ``obj`` and ``ptr``, and no error;
#: - the addresses of the first elements, 0 for None;
#:
#: or None unless all arrays are torch tensors on CUDA that `describe` would not refuse. `_register` puts torch's in.
torch_facts: Callable[[Sequence[Any]], tuple[tuple[Any, ...], list[int]] | None] = _know_none


def _is_no_gradient_needed(objects: Sequence[Any]) -> bool:
    return False


#: Whether one of these torch tensors needs a gradient. `_register` puts torch's in.
_needs_gradient: Callable[[Sequence[Any]], bool] = _is_no_gradient_needed


def needs_gradient(objects: Sequence[Any]) -> bool:
    """Whether one of the arrays is a torch tensor that a gradient has to be computed for; None is no array."""
    for obj in objects:
        cls = type(obj)
        if cls not in _describers and hasattr(cls, "__dlpack__") and cls.__module__.partition(".")[0] == "torch":
            _register(cls, "")
    return _needs_gradient(objects)


#: Of a class: whether its objects are JAX's tracers; None where they are not JAX's at all.
_tracers: dict[type, bool | None] = {}


def _is_tracer(obj: Any) -> bool | None:
    cls = type(obj)
    if cls not in _tracers:
        names = {base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] in ("jax", "jaxlib")}
        _tracers[cls] = "Tracer" in names if names & {"ArrayImpl", "Array", "Tracer"} else None
    return _tracers[cls]


def has_tracer(objects: Sequence[Any]) -> bool:
    """Whether one of these is a JAX tracer."""
    return "jax" in sys.modules and any(map(_is_tracer, objects))


def traced_by_jax(objects: Sequence[Any]) -> bool:
    """Whether JAX has to see a call on these: one is a tracer, or an array of its own where it traces: a constant."""
    if "jax" not in sys.modules:
        return False
    kinds = {_is_tracer(obj) for obj in objects}
    if True in kinds:
        return True
    if False not in kinds:
        return False
    from . import from_dlpack

    return from_dlpack.jax_traces()


def needs_operator(objects: Sequence[Any]) -> bool:
    """Whether a trace, a transform or a dispatch mode has to see the call that these are of."""
    return traced_by_jax(objects) or needs_torch_operator(objects)


def is_sharded(objects: Sequence[Any]) -> bool:
    """Whether one of these is a DTensor, of which this process has a part."""
    module = sys.modules.get("torch.distributed.tensor")
    cls = () if module is None else getattr(module, "DTensor", ())
    return bool(cls) and any(isinstance(obj, cls) for obj in objects)


def needs_torch_operator(objects: Sequence[Any]) -> bool:
    """The same of torch alone."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from . import from_torch

    return from_torch.needs_operator(objects)


def is_autocast(objects: Sequence[Any]) -> bool:
    """Whether torch's autocast is to change the dtype of one of these."""
    if "torch" not in sys.modules:
        return False
    from . import from_torch

    return from_torch.is_autocast(objects)


def is_e4m3(obj: Any) -> bool:
    """Whether an array of torch, NumPy, CuPy or JAX is of the 8-bit float e4m3."""
    return str(getattr(obj, "dtype", "")).removeprefix("torch.") == "float8_e4m3fn"


def without_gradients(objects: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays, with tensors in place of those that need a gradient: of the same memory, and known to no graph."""
    return tuple(x.detach() if x is not None and _needs_gradient((x,)) else x for x in objects)


def with_plain_rows(obj: Any, multiple: int = 16) -> Any:
    """The array itself if its rows are contiguous and begin at multiples of so many bytes; else a copy by its library.

    Rows that share memory, or lie in reverse, are copied too. Of arrays on a GPU, which torch and CuPy can copy. Other
    arrays come back as they are: the caller checks strides.
    """
    cls = type(obj)
    if cls not in _describers and hasattr(cls, "__dlpack__") and cls.__module__.partition(".")[0] in ("torch", "cupy"):
        _register(cls, "")
    copier = _row_copiers.get(cls)
    return obj if copier is None else copier(obj, multiple)


def allocator(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any] | None:
    """`empty_like_framework` for repeated calls: gives the bare array, and takes one with the facts of ``ref``.

    None for the frameworks whose arrays `torch_facts` does not know.
    """
    if ref.framework != "torch":
        return None
    from . import from_torch

    return from_torch.allocator(ref, shape, dtype)


def stream_query(ref: Tensor) -> Callable[[], int] | None:
    """`current_stream` for repeated calls. None for the frameworks whose arrays `torch_facts` does not know."""
    if ref.framework != "torch":
        return None
    from . import from_torch

    return from_torch.stream_query(ref)


def _register(cls: type, argument: str) -> Describer:
    """Find out, once for each class, whose arrays these are."""
    global torch_facts, _needs_gradient
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch" and base.__name__ == "Tensor":
            from . import from_torch

            torch_facts = from_torch.torch_facts
            _needs_gradient = from_torch.needs_gradient
            _row_copiers[cls] = from_torch.with_plain_rows
            _empties["torch"] = from_torch.empty
            _currents["torch"] = from_torch.current_stream
            _describers[cls] = from_torch.describer(cls)
            return _describers[cls]
        if root == "numpy" and base.__name__ == "ndarray":
            from . import from_numpy

            _empties["numpy"] = from_numpy.empty_numpy
            _describers[cls] = from_numpy.numpy_describer(cls)
            return _describers[cls]
        if root == "cupy" and base.__name__ == "ndarray":
            from . import from_numpy

            _row_copiers[cls] = from_numpy.with_plain_rows_cupy
            _empties["cupy"] = from_numpy.empty_cupy
            _currents["cupy"] = from_numpy.current_stream_cupy
            _describers[cls] = from_numpy.cupy_describer(cls)
            return _describers[cls]
        if root in ("jax", "jaxlib") and base.__name__ in ("ArrayImpl", "Array", "Tracer"):
            from . import from_dlpack

            _empties["jax"] = from_dlpack.empty_jax
            _describers[cls] = from_dlpack.jax_describer(cls)
            return _describers[cls]
    if not (hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__")):
        raise ArgumentError(
            argument,
            "an array: torch, CuPy, JAX, NumPy, or any object with __dlpack__ and __dlpack_device__",
            f"{cls.__module__}.{cls.__qualname__}",
        )
    from . import from_dlpack

    _empties["dlpack"] = from_dlpack.empty_dlpack
    _describers[cls] = from_dlpack.describe_dlpack
    return _describers[cls]


def empty_like_framework(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new row-major array of ``ref``'s framework on ``ref``'s device, uninitialized.

    Parameters
    ----------
    ref : Tensor
        An input.
    shape : tuple of int
        Extents.
    dtype : str
        Element type.

    Returns
    -------
    Tensor
        Its array is given to the user by `finish`.

    Raises
    ------
    UnsupportedError
        A library that gives no memory, while a CUDA graph is captured.
    """
    return _empties[ref.framework](ref, shape, dtype)


def zeros_like_framework(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """`empty_like_framework`, all zeros (on a GPU: queued where the framework queues its work)."""
    if ref.framework == "jax":
        from . import from_dlpack

        return from_dlpack.empty_jax(ref, shape, dtype, zeros=True)
    t = empty_like_framework(ref, shape, dtype)
    if t.device == "cpu":
        raw_view(t)[...] = 0
    elif t.framework == "torch":
        t.obj.zero_()
    elif t.framework == "cupy":
        from . import from_numpy

        from_numpy.clear_cupy(t)
    else:
        from . import from_dlpack

        from_dlpack.clear(t)
    return t


def current_stream(ref: Tensor) -> int:
    """Raw stream on which ``ref``'s framework queues its work; 0 for JAX and plain DLPack, and on the CPU."""
    if ref.device == "cpu":
        return 0
    query = _currents.get(ref.framework)
    return 0 if query is None else query(ref)


def require_same_device(tensors: Iterable[Tensor]) -> None:
    """Check that all tensors are where the first one is.

    Raises
    ------
    DeviceError
        Names the argument that is elsewhere.
    """
    iterator = iter(tensors)
    first = next(iterator)
    device, ordinal = first.device, first.ordinal
    for t in iterator:
        if t.device != device or t.ordinal != ordinal:
            raise DeviceError(
                t.argument, f"an array on {first.device_name}, like {first.argument!r}", f"one on {t.device_name}"
            )


def prepare(tensors: Sequence[Tensor], stream: Any = None) -> int:
    """Choose the launch stream, and make it wait for everything that the kernel will touch.

    Parameters
    ----------
    tensors : sequence of Tensor
        All arrays of the call, results included, all on one device; the first one's framework decides.
    stream : optional
        The user's ``stream`` argument, see `resolve_stream`.

    Returns
    -------
    int
        Raw stream to launch on; 0 on the CPU.

    Raises
    ------
    ArgumentError
        A bad ``stream``, or one given with arrays on the CPU.
    """
    first = tensors[0]
    if first.device == "cpu":
        if stream is not None:
            raise ArgumentError("stream", "None, because the arrays are on the CPU", repr(stream))
        return 0
    framework = first.framework
    chosen = None if stream is None else resolve_stream(stream)
    raw = current_stream(first)
    # Torch and CuPy queue on the stream that we launch on: nothing to wait for. The others need their capsules looked
    # at.
    if framework in _currents and (chosen is None or chosen == raw):
        for t in tensors:
            if t.framework is not framework:
                break
        else:
            return raw
    if chosen is None:
        chosen = raw
    _synchronize(tensors, chosen)
    return chosen


def _synchronize(tensors: Sequence[Tensor], stream: int) -> None:
    groups: dict[str, list[Tensor]] = {}
    for t in tensors:
        if isinstance(t, CapsuleTensor):
            if t.synced != stream:
                from . import from_dlpack

                from_dlpack.resync(t, stream)
        else:
            groups.setdefault(t.framework, []).append(t)
    for framework, group in groups.items():
        if current_stream(group[0]) == stream:
            continue
        if framework == "torch":
            from . import from_torch

            from_torch.enter(group, stream)
        else:
            from . import from_numpy

            from_numpy.enter_cupy(group, stream)


def release(tensors: Sequence[Tensor], stream: int) -> None:
    """After the launch: keep memory alive that its owner would otherwise reuse while the kernel still works on it.

    Torch needs nothing here (its allocator was told in `prepare`), nor does CuPy on its own stream. Capsules of JAX
    and other exporters, and CuPy arrays used on a foreign stream, are held until the kernel is through. Not during
    graph capture: a graph's arrays are the caller's to keep.

    Parameters
    ----------
    tensors : sequence of Tensor
        All arrays of the call.
    stream : int
        What `prepare` returned.
    """
    held: list[Any] = []
    for t in tensors:
        if t.framework == "torch" or t.device == "cpu":
            continue
        if isinstance(t, CapsuleTensor):
            held.append((t.capsule, t.obj))
        elif current_stream(t) != stream:
            held.append(t.obj)
    if held:
        from . import events

        events.keep_until_done(stream, tensors[0].ordinal, held)


def finish(out: Tensor, stream: int) -> Any:
    """A result's array, for the user.

    Parameters
    ----------
    out : Tensor
        From `empty_like_framework`, or the user's ``out``.
    stream : int
        What `prepare` returned; the kernel must have been queued there.

    Returns
    -------
    array
        Of ``out``'s framework. For JAX and other DLPack libraries, one whose next use waits for the kernel.
    """
    if isinstance(out, CapsuleTensor):
        from . import from_dlpack

        return from_dlpack.finish(out, stream)
    return out.obj
