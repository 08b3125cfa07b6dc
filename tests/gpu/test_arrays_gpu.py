"""Every framework's arrays on a real GPU: facts, results, and streams with producers that are slow on purpose."""

from __future__ import annotations

import copy
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself, and torch shares this process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

pytestmark = pytest.mark.gpu

SHAPE = (2, 96, 4, 64)
#: Cycles that a producer wastes: about 100 ms, far longer than a launch takes to arrive.
SLOW = 200_000_000


@pytest.fixture(scope="module")
def oa() -> Any:
    import omniattn

    return omniattn


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch")
    assert module.cuda.is_available(), "these tests need a GPU that torch can use"
    return module


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def jax() -> Any:
    return pytest.importorskip("jax")


def _inputs(seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(SHAPE).astype(np.float16) for _ in range(3))


def _expected(q: Any, k: Any, v: Any) -> np.ndarray[Any, Any]:
    """Attention in float32, NHD."""
    q, k, v = (np.asarray(x, dtype=np.float32).transpose(0, 2, 1, 3) for x in (q, k, v))
    s = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return ((p / p.sum(axis=-1, keepdims=True)) @ v).transpose(0, 2, 1, 3)


def _close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], tolerance: float = 4e-3) -> None:
    error = float(np.abs(got.astype(np.float32) - expected).max())
    assert error <= tolerance, f"max error {error}"  # a NaN fails too


def _torch_inputs(torch: Any, seed: int = 0) -> list[Any]:
    return [torch.from_numpy(x).cuda() for x in _inputs(seed)]


def _slow_fill(torch: Any, targets: list[Any], sources: list[Any]) -> None:
    """Queue, on the current stream, half a second of waiting, longer than a busy host needs for a call, and copies."""
    torch.cuda._sleep(5 * SLOW)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# torch


def test_torch_facts(torch: Any) -> None:
    from omniattn import arrays

    x = torch.zeros(3, 4, 8, dtype=torch.bfloat16, device="cuda")[1:, ::2]
    t = arrays.describe(x, "q")
    assert (t.framework, t.device, t.ordinal, t.dtype) == ("torch", "cuda", x.device.index, "bfloat16")
    assert (tuple(t.shape), t.strides, t.ptr) == ((2, 2, 8), (32, 16, 1), x.data_ptr())
    assert arrays.current_stream(t) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert arrays.current_stream(t) == side.cuda_stream
    assert arrays.resolve_stream(side) == side.cuda_stream


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_torch(oa: Any, torch: Any, dtype: str) -> None:
    q, k, v = (x.to(getattr(torch, dtype)) for x in _torch_inputs(torch))
    o, lse = oa.attention(q, k, v, return_lse=True)
    assert (type(o), o.dtype, o.device, tuple(o.shape)) == (torch.Tensor, q.dtype, q.device, SHAPE)
    assert (lse.dtype, tuple(lse.shape)) == (torch.float32, (2, 4, 96))
    _close(o.float().cpu().numpy(), _expected(*(x.float().cpu().numpy() for x in (q, k, v))), 2e-2)
    out = torch.full_like(q, float("nan"))
    assert oa.attention(q, k, v, out=out) is out
    assert torch.equal(out, o)


def test_torch_current_stream_with_slow_producer(oa: Any, torch: Any) -> None:
    source = _torch_inputs(torch)
    target = [torch.zeros_like(x) for x in source]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _slow_fill(torch, target, source)
        o = oa.attention(*target)
    side.synchronize()
    _close(o.cpu().numpy(), _expected(*_inputs()))


@pytest.mark.parametrize("form", ["object", "handle", "protocol"])
def test_torch_stream_override_waits_for_slow_producer(oa: Any, torch: Any, form: str) -> None:
    source = _torch_inputs(torch)
    target = [torch.zeros_like(x) for x in source]
    oa.attention(*target)
    torch.cuda.synchronize()
    producer, side = torch.cuda.Stream(), torch.cuda.Stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, side.cuda_stream)

    stream = {"object": side, "handle": side.cuda_stream, "protocol": Protocol()}[form]
    with torch.cuda.stream(producer):
        _slow_fill(torch, target, source)
        o = oa.attention(*target, stream=stream)
        assert not side.query()  # it is still waiting, and the host did not
    side.synchronize()
    _close(o.cpu().numpy(), _expected(*_inputs()))


def test_torch_memory_is_not_reused_under_a_foreign_stream(oa: Any, torch: Any) -> None:
    source = _torch_inputs(torch)
    oa.attention(*source)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
    inputs = [x.clone() for x in source]
    o = oa.attention(*inputs, stream=side)
    del inputs
    for _ in range(8):  # would land in the inputs' memory, long before the kernel reads it
        torch.full(SHAPE, float("nan"), dtype=torch.float16, device="cuda")
    side.synchronize()
    _close(o.cpu().numpy(), _expected(*_inputs()))


@pytest.mark.parametrize("fork", [False, True])
def test_torch_graph_capture(oa: Any, torch: Any, fork: bool) -> None:
    q, k, v = _torch_inputs(torch)
    oa.attention(q, k, v)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        o = oa.attention(q, k, v, stream=side) if fork else oa.attention(q, k, v)
        if fork:
            torch.cuda.current_stream().wait_stream(side)
    for seed in (1, 2):
        for target, source in zip((q, k, v), _torch_inputs(torch, seed), strict=True):
            target.copy_(source)
        o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        _close(o.cpu().numpy(), _expected(*_inputs(seed)))


def test_pending_calls_are_looked_after_while_another_thread_captures(oa: Any, torch: Any) -> None:
    """In CUDA's default capture mode a query of an event, from any thread, fails and invalidates the capture."""
    from omniattn.arrays import events

    q, k, v = _torch_inputs(torch)
    expected = oa.attention(q, k, v)
    torch.cuda.synchronize()
    events.collect()
    side, ordinal = torch.cuda.Stream(), torch.cuda.current_device()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as other, torch.cuda.graph(graph, capture_error_mode="global"):
        o = oa.attention(q, k, v)
        # In here, because the capture's beginning waits for everything.
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLOW)
        events.keep_until_done(side.cuda_stream, ordinal, [object()])
        assert other.submit(events.collect).result() == 1
    o.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(o, expected)
    assert events.collect() == 0


# CuPy


def test_cupy(oa: Any, cupy: Any) -> None:
    q, k, v = (cupy.asarray(x) for x in _inputs())
    o, lse = oa.attention(q, k, v, return_lse=True)
    assert (type(o), o.dtype, o.shape, o.device) == (cupy.ndarray, np.float16, SHAPE, q.device)
    assert (lse.dtype, lse.shape) == (np.float32, (2, 4, 96))
    _close(cupy.asnumpy(o), _expected(*_inputs()))
    out = cupy.full_like(q, np.nan)
    assert oa.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(o))


@pytest.mark.parametrize("override", [False, True])
def test_cupy_slow_producer(oa: Any, cupy: Any, torch: Any, override: bool) -> None:
    source = [cupy.asarray(x) for x in _inputs()]
    target = [cupy.zeros_like(x) for x in source]
    oa.attention(*target)
    cupy.cuda.Device().synchronize()
    producer, side = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.ExternalStream(producer.cuda_stream), torch.cuda.stream(producer):
        torch.cuda._sleep(SLOW)
        for t, s in zip(target, source, strict=True):
            t[...] = s
        o = oa.attention(*target, stream=side) if override else oa.attention(*target)
        del target
        for _ in range(8):
            cupy.full(SHAPE, np.nan, dtype=np.float16)
    (side if override else producer).synchronize()
    _close(cupy.asnumpy(o), _expected(*_inputs()))


# JAX


def _jax_inputs(jax: Any, seed: int = 0) -> list[Any]:
    gpu = jax.devices("gpu")[0]
    return [jax.device_put(x, gpu) for x in _inputs(seed)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_jax(oa: Any, jax: Any, dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in _jax_inputs(jax))
    o, lse = oa.attention(q, k, v, return_lse=True)
    assert isinstance(o, jax.Array)
    assert isinstance(lse, jax.Array)
    assert (str(o.dtype), o.shape, o.devices()) == (dtype, SHAPE, q.devices())
    assert (str(lse.dtype), lse.shape) == ("float32", (2, 4, 96))
    _close(np.asarray(o.astype("float32")), _expected(*(np.asarray(x.astype("float32")) for x in (q, k, v))), 2e-2)


@pytest.mark.parametrize("override", [False, True])
def test_jax_slow_producer_and_reader(oa: Any, jax: Any, torch: Any, override: bool) -> None:
    q, k, v = _jax_inputs(jax)
    oa.attention(q, k, v)

    @jax.jit
    def slow(x: Any, heavy: Any) -> Any:
        for _ in range(40):
            heavy = heavy @ heavy * 0
        return x + heavy[0, 0].astype(x.dtype)

    heavy = jax.numpy.ones((4096, 4096), dtype="float32")
    slow(q, heavy).block_until_ready()
    side = torch.cuda.Stream()
    late = [slow(x, heavy) for x in (q, k, v)]
    o = oa.attention(*late, stream=side) if override else oa.attention(*late)
    # Read at once by JAX, which has to wait for a stream that it knows nothing of.
    doubled = o.astype("float32") * 2
    _close(np.asarray(doubled) / 2, _expected(*_inputs()))


def test_jax_memory_is_held_until_the_kernel_is_through(oa: Any, jax: Any, torch: Any) -> None:
    from omniattn.arrays import events

    side = torch.cuda.Stream()
    inputs = _jax_inputs(jax)
    oa.attention(*inputs)
    jax.numpy.full(SHAPE, np.nan, dtype="float16").block_until_ready()  # compiled before it counts
    torch.cuda.synchronize()
    events.collect()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
    o = oa.attention(*inputs, stream=side)
    del inputs
    assert events.collect() == 1
    for _ in range(8):
        jax.numpy.full(SHAPE, np.nan, dtype="float16").block_until_ready()
    _close(np.asarray(o), _expected(*_inputs()))
    torch.cuda.synchronize()
    assert events.collect() == 0


def _jax_cache(oa: Any, jax: Any) -> tuple[Any, dict[str, Any]]:
    """An empty cache, and what `append` takes to fill it."""
    k, v = (x[:1] for x in _jax_inputs(jax)[1:])
    lengths = jax.device_put(np.array([SHAPE[1]], np.int32), jax.devices("gpu")[0])
    jax.block_until_ready([k, v, lengths])
    return oa.KVCache(1, 128, SHAPE[2], SHAPE[3], like=k, k_dtype="fp16"), {"k": k, "v": v, "seq_lens": lengths}


@pytest.mark.parametrize("way", ["read", "computed with", "copied"])
def test_jax_reads_a_cache_behind_the_append(oa: Any, jax: Any, torch: Any, way: str) -> None:
    """The append is queued on the legacy default stream, of which JAX knows nothing, and starts late."""
    done, tokens = _jax_cache(oa, jax)
    oa.append(done, **tokens)
    torch.cuda.synchronize()
    # Behind the tokens is whatever the memory held.
    tokens_of = (slice(None), slice(None), slice(SHAPE[1]))
    expected = [np.asarray(done.k)[tokens_of], np.asarray(done.v)[tokens_of]]
    late, tokens = _jax_cache(oa, jax)
    double = jax.jit(lambda x: x * 2)
    double(done.k).block_until_ready()  # compiled before it counts
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream()):
        torch.cuda._sleep(SLOW)
    oa.append(late, **tokens)
    seen = copy.deepcopy(late) if way == "copied" else late
    for plane, wanted in zip((seen.k, seen.v), expected, strict=True):
        got = np.asarray(double(plane)) / 2 if way == "computed with" else np.asarray(plane)
        np.testing.assert_array_equal(got[tokens_of], wanted)


def test_launches_on_a_jax_cache_wait_for_each_other(oa: Any, jax: Any, torch: Any) -> None:
    done, tokens = _jax_cache(oa, jax)
    q = _jax_inputs(jax)[0][:1, :1]
    oa.append(done, **tokens)
    expected = np.asarray(oa.decode(q, done, seq_lens=tokens["seq_lens"]))
    late, tokens = _jax_cache(oa, jax)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW)
    oa.append(late, **tokens, stream=side)
    np.testing.assert_array_equal(np.asarray(oa.decode(q, late, seq_lens=tokens["seq_lens"])), expected)


def test_jax_out_is_refused(oa: Any, jax: Any) -> None:
    q, k, v = _jax_inputs(jax)
    with pytest.raises(oa.errors.ArgumentError, match=r"argument 'out'.*jax\.Array"):
        oa.attention(q, k, v, out=q)


# Any other exporter, and mixtures


class OnlyDlpack:
    """A torch tensor that shows nothing but the two DLPack methods."""

    def __init__(self, tensor: Any, versioned: bool = True) -> None:
        self._tensor = tensor
        self._versioned = versioned

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
        version = max_version if self._versioned else None
        return self._tensor.__dlpack__(stream=stream, max_version=version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("versioned", [True, False])
def test_plain_exporter_with_slow_producer(oa: Any, torch: Any, versioned: bool) -> None:
    source = _torch_inputs(torch)
    target = [torch.zeros_like(x) for x in source]
    out = torch.full_like(source[0], float("nan"))
    wrapped = OnlyDlpack(out, versioned)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        _slow_fill(torch, target, source)
        result = oa.attention(*(OnlyDlpack(x, versioned) for x in target), out=wrapped)
    assert result is wrapped
    # Documented: without a library to tell, the result is ordered on the legacy default stream, torch's default.
    torch.cuda.default_stream().synchronize()
    _close(out.cpu().numpy(), _expected(*_inputs()))


@pytest.mark.parametrize("case", ["plain", "int8", "mask", "split keys", "backward", "decode"])
def test_plain_exporter_gets_arrays_of_ours(oa: Any, torch: Any, case: str) -> None:
    """The bits of torch's call; all but the first take scratch memory."""
    q, k, v = _torch_inputs(torch)

    def call(wrap: Any) -> Any:
        a, b, c = (wrap(x) for x in (q, k, v))
        if case == "backward":
            o, lse = oa.attention(q, k, v, return_lse=True)
            return oa.attention_backward(wrap(k), a, b, c, wrap(o), wrap(lse))
        if case == "decode":
            lengths = wrap(torch.full((2,), 96, dtype=torch.int32, device="cuda"))
            cache = oa.KVCache(2, 96, 4, 64, like=a, k_dtype="fp16")
            oa.append(cache, b, c, seq_lens=lengths)
            return oa.decode(wrap(q[:, -1:]), cache, seq_lens=lengths, deterministic=True, return_lse=True)
        if case == "split keys":
            few, many = q[:1, :1], k[:1].repeat(1, 64, 1, 1)
            return oa.attention(wrap(few), wrap(many), wrap(many), return_lse=True)
        mask = torch.tril(torch.ones(96, 96, dtype=torch.bool, device="cuda"))
        options = {"int8": {"precision": "int8"}, "mask": {"mask": wrap(mask)}}.get(case, {})
        return oa.attention(a, b, c, return_lse=True, **options)

    want, got = call(lambda x: x), call(OnlyDlpack)
    for a, b in zip(got, want, strict=True):
        assert not isinstance(a, torch.Tensor)
        assert (a.shape, a.dtype, a.__dlpack_device__()) == (
            tuple(b.shape), str(b.dtype).removeprefix("torch."), (2, b.device.index),
        )  # fmt: skip
        assert torch.equal(torch.from_dlpack(a), b)
    one = got[0]
    assert torch.equal(torch.from_dlpack(copy.deepcopy(one)), want[0])
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        np.testing.assert_array_equal(np.from_dlpack(one, device="cpu"), want[0].cpu().numpy())


def test_imports_of_our_arrays_wait_for_the_kernel(oa: Any, torch: Any) -> None:
    source = _torch_inputs(torch)
    target = [torch.zeros_like(x) for x in source]
    oa.attention(*map(OnlyDlpack, target))
    torch.cuda.synchronize()
    producer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        _slow_fill(torch, target, source)
        o = oa.attention(*map(OnlyDlpack, target), stream=producer)
    with torch.cuda.stream(reader):
        copied = torch.from_dlpack(o).clone()
        assert not reader.query()  # it waits, and the host did not
    reader.synchronize()
    _close(copied.cpu().numpy(), _expected(*_inputs()))


def test_memory_of_our_arrays_goes_back_behind_its_readers(oa: Any, torch: Any) -> None:
    source, other = (list(map(OnlyDlpack, _torch_inputs(torch, seed))) for seed in (0, 1))
    oa.attention(*source)
    before = _pool_bytes(torch)
    with torch.cuda.stream(torch.cuda.Stream()):
        read = torch.from_dlpack(oa.attention(*source))
        torch.cuda._sleep(SLOW)
        copied = read.clone()
        del read  # the copy has not begun
    for _ in range(8):
        oa.attention(*other)
    torch.cuda.synchronize()
    _close(copied.cpu().numpy(), _expected(*_inputs()))
    assert _pool_bytes(torch) <= before


def _pool_bytes(torch: Any) -> int:
    """What this process has taken of the driver's pool and not given back, when everything has run."""
    from omniattn.arrays import events

    cu = pytest.importorskip("cuda.bindings.driver")
    gc.collect()
    torch.cuda.synchronize()
    assert events.collect() == 0
    torch.cuda.synchronize()
    code, pool = cu.cuDeviceGetDefaultMemPool(0)
    assert not code
    code, used = cu.cuMemPoolGetAttribute(pool, cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    assert not code
    return int(used)


def test_our_arrays_under_capture(oa: Any, torch: Any) -> None:
    inputs = list(map(OnlyDlpack, _torch_inputs(torch)))
    want = torch.from_dlpack(oa.attention(*inputs)).clone()
    out = torch.zeros_like(want)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        handle = torch.cuda.current_stream().cuda_stream
        with pytest.raises(oa.errors.UnsupportedError, match="while a CUDA graph is captured"):
            oa.attention(*inputs, stream=handle)
        oa.attention(*inputs, out=OnlyDlpack(out), stream=handle)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_mixture_with_slow_producers(oa: Any, torch: Any, cupy: Any, jax: Any) -> None:
    q, k, _ = _torch_inputs(torch)
    late = torch.zeros_like(k)
    v = _jax_inputs(jax)[2]
    torch.cuda.synchronize()
    producer = torch.cuda.Stream()
    with cupy.cuda.ExternalStream(producer.cuda_stream):
        with torch.cuda.stream(producer):
            _slow_fill(torch, [late], [k])
        # CuPy's current stream is the slow one, torch's is not.
        o = oa.attention(q, cupy.from_dlpack(late), v)
    assert isinstance(o, torch.Tensor)
    _close(o.cpu().numpy(), _expected(*_inputs()))


def test_arrays_on_different_devices(oa: Any, torch: Any) -> None:
    q, k, v = _torch_inputs(torch)
    with pytest.raises(oa.errors.DeviceError) as caught:
        oa.attention(q, k.cpu(), v)
    assert "argument 'k': expected an array on cuda:0, like 'q', received one on cpu" in str(caught.value)
