"""NumPy and CuPy arrays: the same attributes, except for where the address is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import DtypeError, StrideError, UnsupportedError
from .strides import has_plain_rows
from .tensor import ITEMSIZE, Tensor, fill

#: Element types that NumPy has from ml_dtypes, and does not export by DLPack.
NOT_EXPORTED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

#: numpy.dtype -> our name; None where it has none. Hashing a dtype is cheap, asking for its name is not.
_names: dict[Any, str | None] = {}


def dtype_name(dtype: Any, argument: str) -> str:
    """Our name of a ``numpy.dtype``, ml_dtypes' bfloat16 and float8 included."""
    try:
        name = _names[dtype]
    except KeyError:
        known = dtype.isnative and dtype.name in ITEMSIZE and dtype.itemsize == ITEMSIZE[dtype.name]
        name = _names[dtype] = dtype.name if known else None
    if name is None:
        received = str(dtype) if dtype.isnative else f"{dtype.name} in foreign byte order"
        raise DtypeError(argument, "one of " + ", ".join(sorted(ITEMSIZE)), received)
    return name


def numpy_dtype(name: str) -> Any:
    """The ``numpy.dtype`` for one of our names."""
    import numpy as np

    if name in NOT_EXPORTED:
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise UnsupportedError(
                f"NumPy has no {name} of its own, and the package that adds it is not installed",
                instead="pip install ml_dtypes, or another dtype (of a cache: k_dtype='fp16')",
            ) from None

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def element_strides(strides: tuple[int, ...], shape: tuple[int, ...], itemsize: int, argument: str) -> tuple[int, ...]:
    """Byte strides in elements."""
    if itemsize == 1:
        return tuple(strides)
    result = []
    for dim, step in enumerate(strides):
        count, rest = divmod(step, itemsize)
        if rest and shape[dim] > 1:
            raise StrideError(
                argument,
                f"strides that are multiples of the element size ({itemsize} bytes)",
                f"{step} bytes in dimension {dim}",
            )
        result.append(count)
    return tuple(result)


def numpy_describer(cls: type) -> Callable[[Any, str, int | None], Tensor]:
    """The `describe` for one class of NumPy arrays."""
    import numpy as np

    return describe_numpy if cls in (np.ndarray, np.memmap) else _refuse_subclass


def describe_numpy(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """A NumPy array's facts."""
    dtype = dtype_name(obj.dtype, argument)
    strides = element_strides(obj.strides, obj.shape, obj.itemsize, argument)
    t = Tensor()
    fill(t, obj, "numpy", obj.ctypes.data, obj.shape, strides, dtype, "cpu", 0, not obj.flags.writeable, argument)
    return t


def _refuse_subclass(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    raise UnsupportedError(
        f"argument {argument!r} is a {type(obj).__module__}.{type(obj).__qualname__}, an ndarray subclass whose "
        "extra meaning (a mask, units, matrix products) would be lost",
        instead="a plain array: numpy.asarray(array) or cupy.asarray(array), or array.filled(...) and mask= for masked "
        "arrays",
    )


def empty_numpy(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new NumPy array."""
    import numpy as np

    return describe_numpy(np.empty(shape, dtype=numpy_dtype(dtype)), "out")


def cupy_describer(cls: type) -> Callable[[Any, str, int | None], Tensor]:
    """The `describe` for one class of CuPy arrays."""
    plain = cls.__module__.partition(".")[0] == "cupy" and cls.__name__ == "ndarray"
    return describe_cupy if plain else _refuse_subclass


def describe_cupy(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """A CuPy array's facts. CuPy has no read-only arrays."""
    dtype = dtype_name(obj.dtype, argument)
    strides = element_strides(obj.strides, obj.shape, obj.dtype.itemsize, argument)
    data = obj.data
    t = Tensor()
    fill(t, obj, "cupy", data.ptr, obj.shape, strides, dtype, "cuda", data.device_id, False, argument)
    return t


def empty_cupy(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new CuPy array on ``ref``'s GPU, from CuPy's pool and for CuPy's current stream."""
    import cupy

    with cupy.cuda.Device(ref.ordinal):
        obj = cupy.empty(shape, dtype=numpy_dtype(dtype))
    return describe_cupy(obj, "out")


def _current_cupy(ordinal: int) -> Any:
    import cupy

    # The argument is the GPU; without it the answer is for whichever GPU is current.
    return cupy.cuda.get_current_stream(ordinal)


def current_stream_cupy(ref: Tensor) -> int:
    """Raw handle of CuPy's current stream on ``ref``'s GPU; 1 (legacy default) given as 0, as everywhere here."""
    handle = int(_current_cupy(ref.ordinal).ptr)
    return 0 if handle == 1 else handle


def enter_cupy(tensors: list[Tensor], stream: int) -> None:
    """Make ``stream`` wait for what CuPy has queued on its current stream.

    CuPy's own events: under graph capture they make the other stream part of the graph.
    """
    import cupy

    ordinal = tensors[0].ordinal
    with cupy.cuda.Device(ordinal):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(_current_cupy(ordinal))
        # Not through a stream object: ExternalStream is deprecated, and one of Stream.from_external destroys the
        # caller's stream when it dies.
        cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


def with_plain_rows_cupy(obj: Any, multiple: int) -> Any:
    """See `omniattn.arrays.with_plain_rows`; the copy is made on CuPy's current stream."""
    itemsize = obj.dtype.itemsize
    if not obj.shape or any(step % itemsize for step in obj.strides):
        return obj  # `describe` says what is wrong with it
    strides = tuple(step // itemsize for step in obj.strides)
    if has_plain_rows(obj.shape, strides, itemsize, multiple) and obj.data.ptr % multiple == 0:
        return obj
    with obj.device:
        return obj.copy(order="C")


def clear_cupy(t: Tensor) -> None:
    """Fill an array with zeros, on CuPy's current stream of its GPU."""
    import cupy

    with cupy.cuda.Device(t.ordinal):
        t.obj.fill(0)
