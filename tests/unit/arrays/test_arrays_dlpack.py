"""DLPack capsules, in and out. Device arrays are faked: only their addresses are looked at, and events only logged."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omniattn import arrays
from omniattn.arrays import capsule, events
from omniattn.arrays.exporter import Exporter, OwnArray
from omniattn.errors import ArgumentError, DeviceError, DriverError, DtypeError, UnsupportedError

# Test modules are imported without a package (importlib mode), so a neighbour is loaded by its path.
_spec = importlib.util.spec_from_file_location("arrays_fakes", Path(__file__).with_name("arrays_fakes.py"))
assert _spec is not None
assert _spec.loader is not None
_fakes = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("arrays_fakes", _fakes)
_spec.loader.exec_module(_fakes)
FakeExporter, FakeEvents, exports = _fakes.FakeExporter, _fakes.FakeEvents, _fakes.exports

GPU = (2, 1)


@pytest.fixture
def log():
    backend = FakeEvents()
    events.set_backend(backend)
    yield backend
    events.set_backend(None)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("knows_max_version", [True, False])
def test_facts_and_one_delete(versioned: bool, knows_max_version: bool) -> None:
    x = FakeExporter((2, 3), versioned=versioned, strides=(8, -1), byte_offset=64, knows_max_version=knows_max_version)
    t = arrays.describe(x, "q")
    assert (t.framework, t.device, t.ordinal, t.dtype) == ("dlpack", "cpu", 0, "float32")
    assert (t.shape, t.strides, t.ptr, t.readonly) == ((2, 3), (8, -1), x.address + 64, False)
    assert x.requests == [{"max_version": (1, 1)} if knows_max_version else {}]
    assert (x.made, x.deleted) == (1, 0)
    t.capsule.release()
    t.capsule.release()
    del t
    gc.collect()
    assert (x.made, x.deleted) == (1, 1)


def test_delete_when_the_tensor_is_dropped() -> None:
    x = FakeExporter()
    t = arrays.describe(x, "q")
    view = arrays.to_numpy(t)
    del t
    gc.collect()
    assert x.deleted == 0  # the view still needs the memory
    assert view.shape == (2, 8)
    del view
    gc.collect()
    assert x.deleted == 1


def test_strides_may_be_missing_and_so_may_the_deleter() -> None:
    x = FakeExporter((4, 0, 3), has_deleter=False)
    assert arrays.describe(x, "q").strides == (3, 3, 1)
    assert x.deleted == 0
    assert arrays.describe(FakeExporter(()), "q").shape == ()


def test_read_only_flag() -> None:
    t = arrays.describe(FakeExporter(flags=1), "out")
    assert t.readonly is True
    with pytest.raises(ArgumentError, match="argument 'out': expected a writable array, received a read-only array"):
        arrays.require_writable(t)
    assert arrays.describe(FakeExporter(flags=2), "out").readonly is False


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"version": (2, 0)}, UnsupportedError, "argument 'v' was exported with DLPack version 2.0"),
        ({"versioned": False, "lanes": 4}, DtypeError, "received float32 in vectors of 4"),
        ({"versioned": False, "code": 5, "bits": 64}, DtypeError, "received complex64"),
        ({"code": 5, "bits": 64}, DtypeError, "received complex64"),
        ({"code": 17, "bits": 4}, DtypeError, "received DLPack type code 17, 4"),
        ({"lanes": 4}, DtypeError, "received float32 in vectors of 4"),
    ],
)
def test_errors_delete_too(options: dict[str, Any], error: type[Exception], text: str) -> None:
    x = FakeExporter(**options)
    with pytest.raises(error) as caught:
        arrays.describe(x, "v")
    assert text in str(caught.value)
    del caught
    gc.collect()
    assert (x.made, x.deleted) == (1, 1)


def test_device_that_is_out_of_reach() -> None:
    x = FakeExporter(device=(10, 0))
    with pytest.raises(DeviceError) as caught:
        arrays.describe(x, "k")
    assert "an array on the CPU or on an NVIDIA GPU, received ROCm (DLPack device type 10)" in str(caught.value)
    assert x.made == 0
    made = capsule.Capsule(FakeExporter(device=(3, 0)).__dlpack__(), "q")
    assert (made.device, made.ordinal) == ("cpu", 0)
    made = capsule.Capsule(FakeExporter(device=(13, 1)).__dlpack__(), "q")
    assert (made.device, made.ordinal) == ("cuda", 1)


@pytest.mark.parametrize("error", [BufferError("no"), RuntimeError("no"), ValueError("no"), TypeError("no")])
def test_refusal_of_the_exporter(error: Exception) -> None:
    with pytest.raises(ArgumentError) as caught:
        arrays.describe(FakeExporter(error=error), "k")
    assert (
        f"argument 'k': expected an array that can be exported by __dlpack__, received {type(error).__name__}"
        in str(caught.value)
    )
    assert caught.value.__cause__ is error


def test_what_is_no_capsule() -> None:
    with pytest.raises(ArgumentError, match="to return a DLPack capsule, received an object of type int"):
        capsule.Capsule(3, "q")
    exporter = FakeExporter()  # which owns what the capsule points to
    made = exporter.__dlpack__()
    capsule.Capsule(made, "q")
    with pytest.raises(ArgumentError, match="a DLPack capsule that nobody has consumed"):
        capsule.Capsule(made, "q")


def test_real_exporter_numpy() -> None:
    source = np.arange(6, dtype=np.float64).reshape(2, 3)

    class Wrapped:
        def __dlpack__(self, **options: Any) -> Any:
            return source.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return source.__dlpack_device__()

    before = sys.getrefcount(source)
    t = arrays.describe(Wrapped(), "q")
    assert sys.getrefcount(source) > before
    np.testing.assert_array_equal(arrays.to_numpy(t), source)
    del t
    gc.collect()
    assert sys.getrefcount(source) == before


# Streams, with a faked GPU.


@pytest.mark.parametrize(("stream", "asked"), [(None, 1), (0, 1), (2, 2), (0x7000, 0x7000)])
def test_exporter_is_asked_for_the_launch_stream(stream: int | None, asked: int) -> None:
    x = FakeExporter(device=GPU)
    t = arrays.describe(x, "q", stream)
    assert x.requests == [{"stream": asked, "max_version": (1, 1)}]
    assert (t.device, t.ordinal, t.synced) == ("cuda", 1, stream or 0)
    assert arrays.current_stream(t) == 0


def test_prepare_asks_again_only_for_another_stream() -> None:
    x, y = FakeExporter(device=GPU), FakeExporter(device=GPU)
    tensors = [arrays.describe(x, "q"), arrays.describe(y, "k", 0x7000)]
    assert arrays.prepare(tensors) == 0
    assert [r["stream"] for r in x.requests] == [1]
    assert [r["stream"] for r in y.requests] == [0x7000, 1]
    assert (y.made, y.deleted) == (2, 1)
    assert arrays.prepare(tensors, 0x8000) == 0x8000
    assert [r["stream"] for r in x.requests] == [1, 0x8000]
    assert [t.synced for t in tensors] == [0x8000, 0x8000]
    tensors[0].obj.address += 16
    with pytest.raises(ArgumentError, match=r"argument 'q'.*another address at the second export"):
        arrays.prepare(tensors, 0x9000)
    assert (x.made, x.deleted) == (3, 2)


def test_capsules_live_until_the_kernel_is_through(log: Any) -> None:
    x, y = FakeExporter(device=GPU), FakeExporter(device=GPU)
    for exporter in (x, y):
        tensors = [arrays.describe(exporter, "q")]
        arrays.release(tensors, arrays.prepare(tensors))
        del tensors
    gc.collect()
    assert (x.deleted, y.deleted) == (0, 0)
    (_, first, _), (_, second, _) = [entry for entry in log.log if entry[0] == "record"]
    assert [entry[2] for entry in log.log if entry[0] == "record"] == [0, 0]
    log.passed.add(second)  # streams finish in any order
    assert events.collect() == 1
    assert (x.deleted, y.deleted) == (0, 1)
    log.passed.add(first)
    assert events.collect() == 0
    assert (x.deleted, y.deleted) == (1, 1)
    assert ("destroy", first) in log.log
    assert log.depth == 0


def _hold(exporters: list[FakeExporter]) -> None:
    """A call per exporter, whose kernels have not run yet; nobody but the list of pending calls has the arrays."""
    for exporter in exporters:
        tensors = [arrays.describe(exporter, "q")]
        arrays.release(tensors, arrays.prepare(tensors))
        del tensors
    gc.collect()


def test_another_threads_graph_capture_is_left_alone(log: Any) -> None:
    x = FakeExporter(device=GPU)
    _hold([x])
    log.captured_elsewhere = True
    assert events.collect() == 1
    log.passed.add(log.log[0][1])
    assert events.collect() == 0
    assert (x.deleted, log.relaxations, log.depth) == (1, 0, 0)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_nothing_is_freed_while_it_cannot_be_known_whether_it_is_in_use(log: Any, broken: int) -> None:
    """Whatever the place of the failing query among the pending ones, before or behind calls that have passed."""
    exporters = [FakeExporter(device=GPU) for _ in range(3)]
    _hold(exporters)
    handles = [entry[1] for entry in log.log if entry[0] == "record"]
    log.failing.add(handles[broken])
    with pytest.raises(DriverError, match=r"cuEventQuery failed with CUDA_ERROR_LAUNCH_FAILED"):
        events.collect()
    gc.collect()
    assert [x.deleted for x in exporters] == [0, 0, 0]
    log.failing.clear()
    log.passed.update(handles)
    assert events.collect() == 0
    assert [x.deleted for x in exporters] == [1, 1, 1]


def test_nothing_is_held_during_graph_capture(log: Any) -> None:
    log.capture_streams.add(0x7000)
    x = FakeExporter(device=GPU)
    tensors = [arrays.describe(x, "q", 0x7000)]
    arrays.release(tensors, arrays.prepare(tensors, 0x7000))
    assert [entry for entry in log.log if entry[0] == "record"] == []
    del tensors
    gc.collect()
    assert x.deleted == 1


class _Library:
    """An array library that imports by DLPack and reads on its own stream 0x5000."""

    imported: Any = None

    @classmethod
    def from_dlpack(cls, exporter: Any) -> tuple[str, Any]:
        cls.imported = exporter.__dlpack__(stream=0x5000, max_version=(1, 0))
        return ("imported", exporter)


class _LibraryArray(FakeExporter):
    def __array_namespace__(self) -> Any:
        return _Library


@pytest.mark.parametrize("owned", [True, False])
def test_finish_makes_the_library_wait(log: Any, owned: bool) -> None:
    out = arrays.describe(_LibraryArray((2, 8), device=GPU), "out", 0x7000)
    out.owned = owned
    result = arrays.finish(out, 0x7000)
    (record, wait) = log.log[:2]
    assert record[::2] == ("record", 0x7000)
    assert wait == ("wait", 0x5000, record[1])
    if owned:
        assert result[0] == "imported"
    else:
        assert result is out.obj
    again = capsule.Capsule(_Library.imported, "again")
    _Library.imported = None
    assert (again.ptr, again.shape, again.strides, again.dtype) == (out.ptr, (2, 8), (8, 1), "float32")
    assert (again.device, again.ordinal) == ("cuda", 1)


def test_finish_without_a_way_back(log: Any) -> None:
    out = arrays.describe(FakeExporter(device=GPU), "out")
    assert arrays.finish(out, 0) is out.obj


def test_exporter_protocol(log: Any) -> None:
    out = arrays.describe(FakeExporter((2, 8), device=GPU), "out")
    sent = Exporter(out, events.Event(0x7000, 1))
    handle = log.log[-1][1]
    assert sent.__dlpack_device__() == (2, 1)
    for stream, waits in ((None, 0), (1, 0), (2, 2), (0x5000, 0x5000)):
        sent.__dlpack__(stream=stream)
        assert log.log[-1] == ("wait", waits, handle)
    count = len(log.log)
    sent.__dlpack__(stream=-1)
    assert len(log.log) == count
    for options in ({"stream": 0}, {"stream": -2}, {"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError):
            sent.__dlpack__(**options)
    assert "versioned" not in repr(sent.__dlpack__(stream=-1))
    assert "versioned" not in repr(sent.__dlpack__(stream=-1, max_version=(0, 8)))
    newest = repr(sent.__dlpack__(stream=-1, max_version=(1, 0), dl_device=(2, 1), copy=False))
    assert ("dltensor_versioned" in newest) == _fakes.MAKES_VERSIONED
    on_cpu = Exporter(arrays.describe(FakeExporter(), "out"), None)
    with pytest.raises(BufferError, match="takes no stream"):
        on_cpu.__dlpack__(stream=1)


# Our own capsules.


class _Owner:
    pass


@pytest.mark.parametrize("versioned", [True, False])
def test_our_capsules_let_go_of_their_owner(versioned: bool) -> None:
    memory = (ctypes.c_float * 6)(*range(6))
    before = exports()

    def make() -> Any:
        address = ctypes.addressof(memory)
        return capsule.export(address, (2, 3), (3, 1), "float32", (1, 0), _Owner(), versioned=versioned)

    unused = make()
    assert exports() == before + 1
    del unused
    gc.collect()
    assert exports() == before
    taken = capsule.Capsule(make(), "q")
    gc.collect()
    assert exports() == before + 1
    taken.release()
    assert exports() == before


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", sorted(capsule._CODES))
def test_our_capsules_say_what_they_were_told(dtype: str, versioned: bool) -> None:
    """Memory that the host cannot read, of any element type, strides and number of dimensions."""
    code, bits = capsule._CODES[dtype]
    for shape, strides in (((2, 3, 4), (100, 4, 1)), ((2, 3), (1, 2)), ((3, 2), (0, 5)), ((5,), (-2,)), ((), ())):
        made = capsule.export(0x7F0000000100, shape, strides, dtype, (2, 3), None, versioned=versioned)
        taken = capsule.Capsule(made, "q")
        assert (taken.ptr, taken.shape, taken.strides) == (0x7F0000000100, shape, strides)
        assert (taken.dtype, taken.device, taken.ordinal, taken.readonly) == (dtype, "cuda", 3, False)
        kind = capsule.DLManagedTensorVersioned if "versioned" in repr(made) else capsule.DLManagedTensor
        tensor = kind.from_address(taken._managed).dl_tensor
        assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes, tensor.byte_offset) == (code, bits, 1, 0)
    empty = capsule.Capsule(capsule.export(0, (0, 8), (8, 1), dtype, (2, 3), None, versioned=versioned), "q")
    assert (empty.ptr, empty.shape) == (0, (0, 8))


_READ_BY_NUMPY = ["float32", "float16", "int64", "uint8"]
if np.lib.NumpyVersion(np.__version__) >= "1.25.0":
    _READ_BY_NUMPY.append("bool")


@pytest.mark.parametrize("dtype", _READ_BY_NUMPY)
def test_numpy_reads_our_capsules(dtype: str) -> None:
    source = np.arange(24).reshape(4, 6).astype(dtype)
    before = exports()

    class Source:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            version = options.get("max_version")
            view = source[::2, ::-1]
            strides = tuple(s // source.itemsize for s in view.strides)
            return capsule.export(
                view.ctypes.data, view.shape, strides, dtype, (1, 0), view, versioned=bool(version and version[0] >= 1)
            )

    got = np.from_dlpack(Source())
    np.testing.assert_array_equal(got, source[::2, ::-1])
    assert got.ctypes.data == source[::2, ::-1].ctypes.data
    del got
    gc.collect()
    assert exports() == before


# Results in the exporter's own library.


def test_result_by_the_array_api_namespace() -> None:
    xp = pytest.importorskip("array_api_strict")
    q = arrays.describe(xp.ones((2, 3), dtype=xp.float64), "q")
    assert q.framework == "dlpack"
    out = arrays.empty_like_framework(q, (4, 2), "float64")
    lse = arrays.empty_like_framework(q, (2,), "float32")
    assert out.readonly is False
    arrays.store(out, np.full((4, 2), 3.0))
    result = arrays.finish(out, arrays.prepare([q, out, lse]))
    assert type(result) is type(q.obj)
    assert bool(xp.all(result == 3.0))
    assert lse.obj.dtype == xp.float32
    # What the namespace lacks is an array of our own.
    assert type(arrays.empty_like_framework(q, (2,), "bfloat16").obj) is OwnArray
