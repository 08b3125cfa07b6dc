"""Results for exporters whose library gives no memory: NumPy's on the CPU, our own arrays on a GPU, which is faked."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays
from omniattn.arrays import capsule, events, exporter
from omniattn.errors import UnsupportedError
from tests.unit.arrays.arrays_fakes import MAKES_VERSIONED, FakeEvents, FakeExporter

GPU = (2, 1)


class Bare:
    """An array that shows nothing but the two methods."""

    def __init__(self, array: Any, dtype: str | None = None) -> None:
        self._array = np.ascontiguousarray(array)
        self._dtype = dtype or self._array.dtype.name

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> Any:
        x = self._array
        strides = tuple(s // x.itemsize for s in x.strides)
        versioned = max_version is not None
        return capsule.export(x.ctypes.data, x.shape, strides, self._dtype, (1, 0), x, versioned=versioned)


def _inputs(dtype: str = "float32") -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 6, 4, 16)).astype(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_on_the_cpu_results_are_numpy_arrays(dtype: str) -> None:
    q, k, v = _inputs(dtype)
    got = oa.attention(*map(Bare, (q, k, v)), causal=True, return_lse=True)
    for x, want in zip(got, oa.attention(q, k, v, causal=True, return_lse=True), strict=True):
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, want)


def test_every_operation_has_results() -> None:
    q, k, v = _inputs()
    bare = [Bare(x) for x in (q, k, v)]
    o, lse = oa.attention(q, k, v, return_lse=True)
    starts = np.asarray([0, 2, 6], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    of = {name: Bare(x) if name.startswith("cu") else x for name, x in packed.items()}
    lengths = np.asarray([1, 1], np.int32)

    def decoded(like: Any, new: Any, q: Any, lengths: Any) -> Any:
        cache = oa.KVCache(2, 8, 4, 16, like=like, k_dtype="int8", recent_window=2)
        oa.append(cache, new, new, seq_lens=lengths)
        return oa.decode(q, cache, seq_lens=lengths)

    pairs = (
        (oa.attention(*bare, precision="int8"), oa.attention(q, k, v, precision="int8")),
        (oa.attention_varlen(*(Bare(x[0]) for x in (q, k, v)), **of), oa.attention_varlen(q[0], k[0], v[0], **packed)),
        (oa.attention_backward(bare[1], *bare, Bare(o), Bare(lse)), oa.attention_backward(k, q, k, v, o, lse)),
        (oa.merge_states(Bare(o), Bare(lse), Bare(q), Bare(lse)), oa.merge_states(o, lse, q, lse)),
        (oa.quantize_qk(*bare[:2]).q_int, oa.quantize_qk(q, k).q_int),
        (decoded(*(Bare(x) for x in (q, k[:, :1], q[:, :1], lengths))), decoded(q, k[:, :1], q[:, :1], lengths)),
    )
    for got, want in pairs:
        made, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, want))
        for a, b in zip(made, wanted, strict=True):
            assert type(a) is np.ndarray
            np.testing.assert_array_equal(a, b)


def test_bfloat16_which_numpy_does_not_export() -> None:
    q, k, v = _inputs()
    bits = [arrays.bfloat16_bits(x) for x in (q, k, v)]
    exact = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
    got = oa.attention(*(Bare(x, "bfloat16") for x in bits))
    assert (type(got), got.shape, got.dtype) == (exporter.OwnArray, q.shape, "bfloat16")
    assert repr(got) == "<array of omniattn for DLPack: bfloat16, shape (2, 6, 4, 16), cpu>"
    values = arrays.to_numpy(arrays.describe(got, "o"))
    np.testing.assert_allclose(values, oa.attention(*exact), atol=1e-2)
    # It goes on as any other array, and is written where it lies.
    again = oa.attention(got, got, got, out=got)
    assert again is got
    assert not np.array_equal(arrays.to_numpy(arrays.describe(got, "o")), values)
    twin = capsule.Capsule(got.__dlpack__(copy=True, max_version=(1, 0)), "twin")
    own = capsule.Capsule(got.__dlpack__(dl_device=(1, 0)), "own")
    assert ctypes.string_at(twin.ptr, 2 * q.size) == ctypes.string_at(own.ptr, 2 * q.size)
    assert twin.ptr != own.ptr
    with pytest.raises(BufferError, match="takes no stream"):
        got.__dlpack__(stream=1)
    with pytest.raises(BufferError, match=r"not \(2, 0\)"):
        got.__dlpack__(dl_device=(2, 0))


@pytest.mark.frameworks
def test_torch_reads_what_numpy_does_not() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).bfloat16() for x in _inputs())
    bare = [Bare(x.view(torch.uint16).numpy(), "bfloat16") for x in (q, k, v)]
    assert torch.equal(torch.from_dlpack(oa.attention(*bare)), oa.attention(q, k, v))


# On a GPU that is faked: memory of the host, and a log.


@pytest.fixture
def gpu() -> Iterator[FakeEvents]:
    backend = FakeEvents()
    events.set_backend(backend)
    yield backend
    gc.collect()
    assert not backend.memory, "memory that nobody gave back"
    events.set_backend(None)


def _made(gpu: FakeEvents, stream: int | None = None, shape: tuple[int, ...] = (4, 8), dtype: str = "float16") -> Any:
    return arrays.empty_like_framework(arrays.describe(FakeExporter(device=GPU), "q", stream), shape, dtype)


def _kinds(gpu: FakeEvents) -> list[Any]:
    return [entry[0] for entry in gpu.log]


def _recorded(gpu: FakeEvents) -> tuple[int, int]:
    """Event and stream of the last record."""
    return [entry[1:] for entry in gpu.log if entry[0] == "record"][-1]  # type: ignore[return-value]


@pytest.mark.parametrize("stream", [None, 0x7000])
def test_memory_comes_in_the_order_of_the_launch(gpu: FakeEvents, stream: int | None) -> None:
    t = _made(gpu, stream)
    raw = stream or 0
    assert gpu.log[0] == ("allocate", 64, raw)
    assert (t.framework, t.device, t.ordinal, t.dtype, t.shape, t.strides) == (
        "dlpack", "cuda", 1, "float16", (4, 8), (8, 1),
    )  # fmt: skip
    assert not t.readonly
    gpu.log.clear()
    assert arrays.prepare([t], stream) == raw
    assert gpu.log == []
    # Another stream waits for the memory first.
    assert arrays.prepare([t], 0x9000) == 0x9000
    assert [entry[:2] for entry in gpu.log] == [("wait", 0x9000)]


def test_whoever_imports_a_result_waits_for_its_kernel(gpu: FakeEvents) -> None:
    t = _made(gpu, 0x7000)
    result = arrays.finish(t, arrays.prepare([t], 0x7000))
    assert (type(result), result.shape, result.dtype) == (exporter.OwnArray, (4, 8), "float16")
    event, stream = _recorded(gpu)
    assert stream == 0x7000
    assert result.__dlpack_device__() == GPU
    for named, raw in ((None, 0), (1, 0), (2, 2), (0x5000, 0x5000)):
        taken = capsule.Capsule(result.__dlpack__(stream=named), "x")
        assert gpu.log[-1] == ("wait", raw, event)
        assert (taken.ptr, taken.device, taken.ordinal, taken.shape) == (t.ptr, "cuda", 1, (4, 8))
    count = len(gpu.log)
    newest = repr(result.__dlpack__(stream=-1, max_version=(1, 1), dl_device=GPU, copy=False))
    assert ("versioned" in newest) == MAKES_VERSIONED
    assert "versioned" not in repr(result.__dlpack__(stream=-1, max_version=(0, 8)))
    assert len(gpu.log) == count
    for options in ({"stream": 0}, {"stream": -2}, {"dl_device": (2, 0)}, {"dl_device": (1, 0), "copy": False}):
        with pytest.raises(BufferError):
            result.__dlpack__(**options)
    # The next kernel that writes it is what an import waits for.
    t = arrays.describe(result, "out")
    arrays.finish(t, 0x7000)
    result.__dlpack__(stream=2)
    assert gpu.log[-1] == ("wait", 2, _recorded(gpu)[0])
    assert _recorded(gpu)[0] != event


def test_memory_goes_back_behind_its_readers(gpu: FakeEvents) -> None:
    t = _made(gpu)
    result = arrays.finish(t, 0)
    del t
    taken = [capsule.Capsule(result.__dlpack__(stream=named), "x") for named in (1, 0x5000, 0x6000)]
    capsule.Capsule(result.__dlpack__(stream=-1), "x").release()
    del result
    gc.collect()
    assert len(gpu.memory) == 1
    gpu.capture_streams = {0x6000}  # what a graph reads is its owner's to keep
    gpu.log.clear()
    while taken:
        assert len(gpu.memory) == 1
        taken.pop().release()
    gc.collect()
    assert not gpu.memory
    side = events.side_stream(1)
    assert sorted(entry[2] for entry in gpu.log if entry[0] == "record") == [0, 0x5000]
    assert [entry[1] for entry in gpu.log if entry[0] == "wait"] == [side, side]
    assert gpu.log[-1] == ("free", side)
    assert gpu.relaxations == 0


def test_a_stream_that_is_gone(gpu: FakeEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    result = arrays.finish(_made(gpu), 0)
    capsule.Capsule(result.__dlpack__(stream=0x5000), "x").release()

    def record(event: int, stream: int) -> None:
        raise oa.errors.DriverError("cuEventRecord", "CUDA_ERROR_INVALID_HANDLE", "gone")

    monkeypatch.setattr(gpu, "record", record)
    del result
    gc.collect()
    assert not gpu.memory


def test_kernels_keep_what_they_read_without_naming_their_stream(gpu: FakeEvents) -> None:
    result = arrays.finish(_made(gpu), 0)
    t = arrays.describe(result, "q", 0x5000)
    arrays.release([t], 0x5000)
    del t, result
    gc.collect()
    assert len(gpu.memory) == 1
    gpu.passed = set(range(1000))
    gpu.log.clear()
    assert events.collect() == 0
    assert _kinds(gpu).count("record") == 0  # nobody else has read it
    assert not gpu.memory


def test_no_memory_while_a_graph_is_captured(gpu: FakeEvents) -> None:
    gpu.capture_streams = {0x7000}
    with pytest.raises(UnsupportedError, match=r"while a CUDA graph is captured.*out=, in calls that need no scratch"):
        _made(gpu, 0x7000)
    assert _made(gpu, 0x7000, shape=(0, 8)).ptr == 0


def test_empty_results(gpu: FakeEvents) -> None:
    t = _made(gpu, shape=(0, 8))
    result = arrays.finish(t, 0)
    assert "allocate" not in _kinds(gpu)
    taken = capsule.Capsule(result.__dlpack__(stream=1), "x")
    assert (taken.shape, taken.device) == ((0, 8), "cuda")
    capsule.Capsule(result.__dlpack__(stream=1, copy=True), "x")


def test_copies(gpu: FakeEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    t = _made(gpu, shape=(2, 4), dtype="float32")
    ctypes.memmove(t.ptr, np.arange(8, dtype=np.float32).ctypes.data, 32)
    result = arrays.finish(t, 0x7000)
    event, _ = _recorded(gpu)
    gpu.log.clear()
    twin = capsule.Capsule(result.__dlpack__(stream=0x5000, copy=True), "x")
    assert twin.ptr != t.ptr
    assert ctypes.string_at(twin.ptr, 32) == ctypes.string_at(t.ptr, 32)
    assert gpu.log.index(("wait", 0x5000, event)) < gpu.log.index(("copy", 32, 0x5000))
    twin.release()
    copied = copy.deepcopy(result)
    assert _kinds(gpu).count("copy") == 2
    assert _recorded(gpu)[0] != event
    taken = capsule.Capsule(copied.__dlpack__(stream=0x5000), "x")
    assert ctypes.string_at(taken.ptr, 32) == ctypes.string_at(t.ptr, 32)
    assert taken.ptr != t.ptr

    def read(address: int, num_bytes: int, stream: int) -> bytes:
        assert gpu.depth
        assert gpu.log[-1] == ("wait", stream, event)
        return ctypes.string_at(address, num_bytes)

    monkeypatch.setattr(exporter, "get_driver", lambda: types.SimpleNamespace(read=read))

    class OnHost:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            return result.__dlpack__(dl_device=(1, 0), **{n: x for n, x in options.items() if n == "max_version"})

    host = np.from_dlpack(OnHost())
    np.testing.assert_array_equal(host, np.arange(8, dtype=np.float32).reshape(2, 4))


def test_zeros(gpu: FakeEvents) -> None:
    t = arrays.zeros_like_framework(arrays.describe(FakeExporter(device=GPU), "q", 0x7000), (3, 4), "int32")
    assert ("clear", 48, 0x7000) in gpu.log
    # Who reads them on another stream waits for the zeros.
    t.obj.__dlpack__(stream=0x5000)
    assert gpu.log.index(("clear", 48, 0x7000)) < gpu.log.index(("record", *_recorded(gpu)))
    assert gpu.log[-1] == ("wait", 0x5000, _recorded(gpu)[0])
    assert ctypes.string_at(t.ptr, 48) == bytes(48)


def test_it_is_not_pickled(gpu: FakeEvents) -> None:
    with pytest.raises(TypeError, match="not pickled: import it into a library"):
        pickle.dumps(arrays.finish(_made(gpu), 0))


def test_memory_of_another_process_is_left_alone(gpu: FakeEvents) -> None:
    result = arrays.finish(_made(gpu), 0)
    events._forget()
    events.set_backend(gpu)
    del result
    gc.collect()
    assert "free" not in _kinds(gpu)
    gpu.memory.clear()
