"""JAX arrays and every other exporter of DLPack: both come in a capsule, and go back through one."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, DeviceError, UnsupportedError
from . import capsule as dlpack
from .events import Event
from .exporter import Exporter, OwnArray
from .from_numpy import NOT_EXPORTED, empty_numpy
from .tensor import CapsuleTensor, Tensor, fill


def stream_for_exporter(stream: int) -> int:
    """DLPack's name of a raw stream: the legacy default stream, 0 to CUDA, is 1 there."""
    return 1 if stream == 0 else stream


def request(obj: Any, argument: str, stream: int | None) -> dlpack.Capsule:
    """Ask an exporter for its capsule, made safe to use on ``stream`` (None on the CPU).

    Raises
    ------
    ArgumentError
        The exporter refused; its own error is the cause.
    """
    options: dict[str, Any] = {} if stream is None else {"stream": stream_for_exporter(stream)}
    # Of an array of our own without its note of who reads it: `arrays.release` keeps what our kernels read.
    export = functools.partial(Exporter.__dlpack__, obj) if isinstance(obj, OwnArray) else obj.__dlpack__
    try:
        try:
            made = export(**options, max_version=dlpack.MAX_VERSION)
        except (TypeError, NotImplementedError):
            # An exporter from before DLPack 1.0 does not know max_version, or refuses it. If the error came from
            # elsewhere it comes again.
            made = export(**options)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            argument,
            "an array that can be exported by __dlpack__",
            f"{type(error).__name__} from its exporter: {error}",
        ) from error
    return dlpack.Capsule(made, argument)


def _device(obj: Any, argument: str) -> str:
    try:
        kind = int(obj.__dlpack_device__()[0])
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"argument {argument!r} cannot be exported by DLPack ({error})", instead="an array that lives on one device"
        ) from error
    if kind not in dlpack.DEVICES:
        raise dlpack.unusable_device(argument, kind)
    return dlpack.DEVICES[kind]


def _describe(obj: Any, argument: str, stream: int | None, framework: str) -> CapsuleTensor:
    device = _device(obj, argument)
    if device == "cpu":
        synced = None
    else:
        # Neither has a current stream that one could ask for: the legacy default stream it is.
        synced = 0 if stream is None else stream
    taken = request(obj, argument, synced)
    t = CapsuleTensor()
    t.capsule = taken
    t.synced = synced
    t.owned = False
    readonly = taken.readonly or framework == "jax"
    ptr, shape, strides = taken.ptr, taken.shape, taken.strides
    fill(t, obj, framework, ptr, shape, strides, taken.dtype, taken.device, taken.ordinal, readonly, argument)
    return t


def describe_dlpack(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """Facts of any exporter's array."""
    return _describe(obj, argument, stream, "dlpack")


def describe_jax(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    """Facts of a concrete JAX array. Always read-only: JAX's arrays do not change."""
    if obj.is_deleted():
        raise ArgumentError(argument, "a live jax.Array", "one whose memory was deleted or donated")
    return _describe(obj, argument, stream, "jax")


def jax_describer(cls: type) -> Callable[[Any, str, int | None], Tensor]:
    """The `describe` for one class of JAX values."""
    tracer = any(base.__name__ == "Tracer" for base in cls.__mro__)
    return _refuse_tracer if tracer else describe_jax


@functools.cache
def _trace_query() -> tuple[Callable[[], Any], Any]:
    """JAX's function that tells one trace from another, and what it says where there is none."""
    import jax
    from jax.extend import core

    # JAX 0.10 has it in another place than those before it.
    query = getattr(core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
    query = functools.partial(query, convention="flax")
    nowhere: list[Any] = []
    # Traces are a thread's own, and a new one has none.
    thread = threading.Thread(target=lambda: nowhere.append(query()))
    thread.start()
    thread.join()
    return query, nowhere[0]


def jax_traces() -> bool:
    """Whether JAX puts what is done with its arrays into a program here, instead of doing it.

    Not every transformation does: outside of jit, vmap and grad compute at once what does not depend on their argument.
    Only an operation shows that; where nothing is transformed there is a faster question.
    """
    query, nowhere = _trace_query()
    if query() == nowhere:
        return False
    import jax
    from jax import numpy as jnp

    return isinstance(jnp.empty(()), jax.core.Tracer)


def _refuse_tracer(obj: Any, argument: str, stream: int | None = None) -> Tensor:
    raise UnsupportedError(
        f"argument {argument!r} is a JAX tracer ({type(obj).__name__}), which has no memory yet",
        instead="this call outside the transform, with concrete jax.Array values; attention, attention_varlen, their "
        "backwards, decode, append, merge_states and the quantizers inside of it",
    )


def resync(t: CapsuleTensor, stream: int) -> None:
    """Have the exporter make ``stream`` wait as well. The second capsule replaces the first."""
    again = request(t.obj, t.argument, stream)
    if again.ptr != t.ptr:
        again.release()
        raise ArgumentError(
            t.argument, "an exporter that gives the same memory every time", "another address at the second export"
        )
    t.capsule.release()
    t.capsule = again
    t.synced = stream


def empty_jax(ref: Tensor, shape: tuple[int, ...], dtype: str, *, zeros: bool = False) -> Tensor:
    """A new JAX array on ``ref``'s device, from JAX's allocator; uninitialized (JAX 0.11) unless ``zeros``."""
    import jax
    from jax import numpy as jnp

    (device,) = ref.obj.devices()
    obj = (jnp.zeros if zeros else jnp.empty)(shape, dtype=dtype, device=device)
    if isinstance(obj, jax.core.Tracer):
        raise UnsupportedError(
            "a new JAX array with memory, in a function that JAX traces",
            instead="making it (a KV cache, say) outside of the function, as one of its arguments",
        )
    if str(obj.dtype) != dtype:
        raise UnsupportedError(
            f"JAX made {obj.dtype} instead of {dtype}", instead='jax.config.update("jax_enable_x64", True)'
        )
    return _own(describe_jax(obj, "out", _synced(ref)))


def empty_dlpack(ref: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A new array of ``ref``'s library, by the ``empty`` of its array API namespace.

    Of a library that has none, or not this element type: on the CPU NumPy's, where NumPy can export it again; else one
    of our own.
    """
    obj, namespace = ref.obj, _namespace(ref.obj)
    make = getattr(namespace, "empty", None)
    element = obj.dtype if dtype == ref.dtype and hasattr(obj, "dtype") else getattr(namespace, dtype, None)
    if make is not None and element is not None:
        options = {"device": obj.device} if hasattr(obj, "device") else {}
        t = _own(describe_dlpack(make(shape, dtype=element, **options), "out", _synced(ref)))
        if t.device_name != ref.device_name:
            raise DeviceError(
                "out", f"{ref.device_name}, as the inputs", f"{t.device_name} from {namespace.__name__}.empty"
            )
        return t
    if ref.device == "cpu" and dtype not in NOT_EXPORTED:
        return empty_numpy(ref, shape, dtype)
    synced = _synced(ref)
    return _own(describe_dlpack(OwnArray(shape, dtype, ref.device, synced or 0, ref.ordinal), "out", synced))


def clear(t: Tensor) -> None:
    """Fill an array of `empty_dlpack` on a GPU with zeros."""
    if isinstance(t.obj, OwnArray):
        t.obj.clear(_synced(t) or 0)
    else:
        t.obj[...] = 0


def _namespace(obj: Any) -> Any:
    method = getattr(obj, "__array_namespace__", None)
    return None if method is None else method()


def _synced(ref: Tensor) -> int | None:
    return ref.synced if isinstance(ref, CapsuleTensor) else None


def _own(t: Tensor) -> CapsuleTensor:
    assert isinstance(t, CapsuleTensor)
    t.owned = True
    t.readonly = False
    return t


def finish(t: CapsuleTensor, stream: int) -> Any:
    """Hand a result to its library, whose next use of it then waits for the kernel."""
    if 0 in t.shape:
        return t.obj
    return hand_over(t, None if t.device == "cpu" else Event(stream, t.ordinal))


def hand_over(t: CapsuleTensor, event: Event | None) -> Any:
    """Hand an array that a kernel writes to its library, whose next use of it then waits for ``event``.

    JAX: the array of `empty_jax` is never shown to the user; the imported one has the same memory and keeps it alive.
    On the CPU, where nothing waits, by JAX's own capsule.
    Other libraries: the import is made for its wait, and because a library may track readiness by array. Arrays of our
    own have whoever imports them wait.
    """
    exporter = Exporter(t, event)
    if t.framework == "jax":
        from jax import dlpack as jax_dlpack

        return jax_dlpack.from_dlpack(t.obj if event is None else exporter)
    if event is None:
        return t.obj
    if isinstance(t.obj, OwnArray):
        t.obj.written_before(event)
        return t.obj
    take = _importer(t.obj)
    if take is None:
        # No way to reach the library's stream. The result is ordered on `stream`, which is what the documentation says.
        return t.obj
    imported = take(exporter)
    return imported if t.owned else t.obj


def _importer(obj: Any) -> Callable[[Any], Any] | None:
    """``from_dlpack`` of an array's library: its array API namespace, else its top module."""
    namespace = _namespace(obj)
    if namespace is None:
        namespace = sys.modules.get(type(obj).__module__.partition(".")[0])
    take = getattr(namespace, "from_dlpack", None)
    return take if callable(take) else None
