"""The ``stream`` argument, in all its forms."""

from __future__ import annotations

from typing import Any

from ..errors import ArgumentError

_EXPECTED = "None, an integer handle, a torch or CuPy stream, or an object with __cuda_stream__"


def resolve_stream(stream: Any) -> int | None:
    """Raw handle of a stream.

    Parameters
    ----------
    stream : None, int, or a stream object
        An integer is the value of a ``cudaStream_t``: 0 and 1 are the legacy default stream, 2 the default stream of
        the calling thread. Objects: ``torch.cuda.Stream`` (``cuda_stream``), CuPy's streams (``ptr``), anything with
        the ``__cuda_stream__`` protocol (method or attribute, giving ``(0, handle)``).

    Returns
    -------
    int or None
        The handle, 1 given as 0; None for None.

    Raises
    ------
    ArgumentError
        Anything else, a negative handle, or another version of the protocol.
    """
    if stream is None:
        return None
    if type(stream) is int:
        return _checked(stream, stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ArgumentError("stream", "__cuda_stream__ to give (0, handle)", repr(pair))
        version, handle = pair
        if version != 0:
            raise ArgumentError("stream", "version 0 of the __cuda_stream__ protocol", f"version {version!r}")
        return _checked(handle, stream)
    # torch's streams lack the protocol before 2.10, CuPy's before 14.
    root = type(stream).__module__.partition(".")[0]
    if root == "torch" and hasattr(stream, "cuda_stream"):
        return _checked(stream.cuda_stream, stream)
    if root == "cupy" and hasattr(stream, "ptr"):
        return _checked(stream.ptr, stream)
    raise ArgumentError("stream", _EXPECTED, f"{type(stream).__name__}: {stream!r}")


def _checked(handle: Any, given: Any) -> int:
    if isinstance(handle, bool) or not hasattr(handle, "__index__"):
        raise ArgumentError("stream", "an integer handle", f"{type(handle).__name__}: {handle!r} (from {given!r})")
    value = handle.__index__()
    if not 0 <= value < 1 << 64:
        raise ArgumentError("stream", "a handle from 0 to 2**64 - 1", repr(value))
    # Two names of one stream; the rest of the package compares handles.
    return 0 if value == 1 else int(value)
