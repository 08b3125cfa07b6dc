"""Which stream waits for which, with fakes in the place of CuPy, of torch's CUDA calls, and of the GPU.

These tests show that the calls are made; that they have the wished effect on a GPU is for tests/gpu/test_arrays_gpu.py.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from omniattn import arrays
from omniattn.arrays import Tensor, events
from omniattn.arrays.tensor import fill
from omniattn.errors import DtypeError, StrideError, UnsupportedError


class FakeCupy(types.ModuleType):
    """The few names of CuPy that are used, with a log of stream operations."""

    def __init__(self) -> None:
        super().__init__("cupy")
        log: list[tuple[Any, ...]] = []
        current = {0: 0x100, 1: 0x101}
        self.log, self.current, self.device = log, current, [0]
        outer = self

        class Device:
            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            def __enter__(self) -> None:
                self.before = outer.device[0]
                outer.device[0] = self.ordinal

            def __exit__(self, *exc: object) -> None:
                outer.device[0] = self.before

        class Stream:
            def __init__(self, ptr: int) -> None:
                self.ptr = ptr

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                assert disable_timing
                self.device = outer.device[0]
                self.ptr = id(self)

            def record(self, stream: Any) -> None:
                log.append(("record", stream.ptr, self))

        self.cuda = types.SimpleNamespace(
            Device=Device,
            Event=Event,
            get_current_stream=lambda device: Stream(current[device]),
            runtime=types.SimpleNamespace(streamWaitEvent=lambda stream, event: log.append(("wait", stream, event))),
        )

        class ndarray:
            __module__ = "cupy"

            def __init__(self, array: np.ndarray[Any, Any], device_id: int) -> None:
                self.array, self.dtype, self.shape, self.strides = array, array.dtype, array.shape, array.strides
                self.data = types.SimpleNamespace(ptr=array.ctypes.data, device_id=device_id)

        class masked(ndarray):
            __module__ = "somewhere.arrays"

        self.ndarray, self.masked = ndarray, masked
        self.empty = lambda shape, dtype: ndarray(np.empty(shape, dtype), outer.device[0])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(arrays, "_describers", {})
    monkeypatch.setattr(arrays, "_currents", {})
    monkeypatch.setattr(arrays, "_empties", {})
    monkeypatch.setattr(arrays, "_row_copiers", {})
    return fake


def test_rows_that_kernels_can_read(cupy: FakeCupy) -> None:
    """CuPy copies what kernels cannot read, on the array's GPU."""
    base = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float16)

    class Copying(cupy.ndarray):  # type: ignore[name-defined, misc]
        __module__ = "cupy"

        def __dlpack__(self) -> Any:
            raise AssertionError("rows are copied by CuPy")

        def copy(self, order: str) -> Any:
            assert order == "C"
            return Copying(self.array.copy(order), cupy.device[0])

        @property
        def device(self) -> Any:
            return cupy.cuda.Device(1)

    Copying.__name__ = "ndarray"
    plain = Copying(base[:, ::2], 1)
    assert arrays.with_plain_rows(plain) is plain
    for odd in (base[..., ::2], np.broadcast_to(base[:1], base.shape), base.swapaxes(1, 2), base[::-1]):
        copy = arrays.with_plain_rows(Copying(odd, 1))
        assert copy.data.device_id == 1
        assert copy.array.flags.c_contiguous
        assert np.array_equal(copy.array, odd)


def test_fake_cupy_facts(cupy: FakeCupy) -> None:
    base = np.zeros((4, 6, 8), np.float16)
    t = arrays.describe(cupy.ndarray(base[:, ::2], 1), "k")
    assert (t.framework, t.device, t.ordinal, t.dtype, t.readonly) == ("cupy", "cuda", 1, "float16", False)
    assert (t.shape, t.strides, t.ptr) == ((4, 3, 8), (48, 16, 1), base.ctypes.data)
    assert arrays.current_stream(t) == 0x101
    out = arrays.empty_like_framework(t, (2, 3), "float32")
    assert (out.ordinal, out.dtype, out.shape) == (1, "float32", (2, 3))
    assert arrays.finish(out, arrays.prepare([t, out])) is out.obj
    assert cupy.log == []
    with pytest.raises(DtypeError):
        arrays.describe(cupy.ndarray(np.zeros(2, np.complex64), 0), "k")
    packed = np.zeros(4, dtype=[("x", "f4"), ("y", "i1")])["x"]
    with pytest.raises(StrideError, match="argument 'k'"):
        arrays.describe(cupy.ndarray(packed, 0), "k")
    with pytest.raises(UnsupportedError, match=r"somewhere\.arrays"):
        arrays.describe(cupy.masked(base, 0), "k")


def test_fake_cupy_stream_override_waits_for_the_current_stream(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []
    monkeypatch.setattr(events, "keep_until_done", lambda *args: held.append(args))
    t = arrays.describe(cupy.ndarray(np.zeros((2, 8), np.float16), 1), "q")
    assert arrays.prepare([t], 0x101) == 0x101
    arrays.release([t], 0x101)
    assert (cupy.log, held) == ([], [])  # the current stream itself: nothing to do
    assert arrays.prepare([t, t], 0x7000) == 0x7000
    (record, wait) = cupy.log
    assert record[:2] == ("record", 0x101)
    assert wait == ("wait", 0x7000, record[2].ptr)
    assert record[2].device == 1
    arrays.release([t], 0x7000)
    assert held == [(0x7000, 1, [t.obj])]


def test_fake_cupy_per_legacy_handle(cupy: FakeCupy) -> None:
    cupy.current[0] = 1
    t = arrays.describe(cupy.ndarray(np.zeros((2, 8), np.float16), 0), "q")
    assert arrays.current_stream(t) == 0
    assert arrays.prepare([t], 1) == 0
    assert cupy.log == []


class FakeTorchTensor:
    """Only what the allocator is told."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


class FakeTorchStream:
    def __init__(self, name: Any) -> None:
        self.name = name
        self.waited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other.name)


@pytest.fixture
def torch_gpu(monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    arrays.describe(torch.zeros(1), "warm")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: FakeTorchStream(("current", ordinal)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda ordinal: FakeTorchStream(("default", ordinal)))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: FakeTorchStream((ptr, device)))
    monkeypatch.setitem(arrays._currents, "torch", lambda ref: 0x300)

    def make(argument: str = "q") -> Tensor:
        t = Tensor()
        fill(t, FakeTorchTensor(), "torch", 4096, (2, 8), (8, 1), "float16", "cuda", 1, False, argument)
        return t

    return make


@pytest.mark.frameworks
def test_fake_torch_common_path_does_nothing(torch_gpu: Any) -> None:
    tensors = [torch_gpu(), torch_gpu("k")]
    assert arrays.prepare(tensors) == 0x300
    assert arrays.prepare(tensors, 0x300) == 0x300
    arrays.release(tensors, 0x300)
    assert arrays.finish(tensors[0], 0x300) is tensors[0].obj
    assert [t.obj.recorded for t in tensors] == [[], []]


@pytest.mark.parametrize(("stream", "name"), [(0x7000, (0x7000, 1)), (0, ("default", 1)), (1, ("default", 1))])
@pytest.mark.frameworks
def test_fake_torch_stream_override(torch_gpu: Any, stream: int, name: Any) -> None:
    tensors = [torch_gpu(), torch_gpu("out")]
    assert arrays.prepare(tensors, stream) == (0 if stream == 1 else stream)
    for t in tensors:
        (recorded,) = t.obj.recorded
        assert recorded.name == name
        assert recorded.waited == [("current", 1)]
    arrays.release(tensors, stream)


@pytest.mark.frameworks
def test_fake_mixture_of_torch_and_cupy(torch_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    q, k = torch_gpu(), arrays.describe(fake.ndarray(np.zeros((2, 8), np.float16), 1), "k")
    held: list[Any] = []
    monkeypatch.setattr(events, "keep_until_done", lambda *args: held.append(args))
    arrays.require_same_device([q, k])
    assert arrays.prepare([q, k]) == 0x300
    assert [entry[:2] for entry in fake.log] == [("record", 0x101), ("wait", 0x300)]
    assert q.obj.recorded == []
    arrays.release([q, k], 0x300)
    assert held == [(0x300, 1, [k.obj])]
    fake.log.clear()
    assert arrays.prepare([k, q]) == 0x101  # the first one's framework decides
    assert fake.log == []
    assert [s.name for s in q.obj.recorded] == [(0x101, 1)]
