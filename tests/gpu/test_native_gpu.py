"""Repeated calls by the C module give what they give by Python, from any stream, thread and captured graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan import native  # noqa: E402
from tests.repeated_calls import gradient_calls, plain_calls  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def counts() -> Any:
    """(calls run by the module, calls left to the engine)."""
    module = native.module()
    if module is None:
        pytest.skip("omniattn._native is not built, or this torch has no exchange table")
    return module.counts


@pytest.fixture(autouse=True)
def _fresh(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is learned is learned here, calls with gradients too."""
    monkeypatch.setattr(native, "RUNS_GRADIENTS", True)


def _flat(made: Any) -> list[Any]:
    return [x for part in made for x in _flat(part)] if isinstance(made, (tuple, list)) else [made]


def _same_bits(made: Any, expected: list[Any], name: str) -> None:
    for x, y in zip(_flat(made), expected, strict=True):
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name


def test_every_operation_gives_the_same_bits(counts: Any) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    left = []
    for name, call in plain_calls("cuda", stream).items():
        expected = [x.clone() for x in _flat(call())]
        _same_bits(call(), expected, name)  # learned here
        call()
        hits, misses = counts()
        for _ in range(3):
            _same_bits(call(), expected, name)
        if counts()[1] > misses:
            left.append(name)
        assert counts()[0] > hits or name == "out is q", name
    assert left == ["out is q", "operands"]


def test_gradients(counts: Any) -> None:
    for name, call in gradient_calls("cuda").items():
        expected = [x.clone() for x in _flat(call())]
        for _ in range(2):  # the second learns the backward
            call()
        hits, misses = counts()
        for _ in range(3):
            made = _flat(call())
            if "deterministic" in name:
                _same_bits(made, expected, name)
            for x, y in zip(made, expected, strict=True):  # sums of dq come in no fixed order
                torch.testing.assert_close(x, y, rtol=0.02, atol=0.02, msg=lambda text, name=name: f"{name}: {text}")
        assert (counts()[0] - hits, counts()[1] - misses) == (6, 0), name


def test_gradients_of_threads_and_streams(counts: Any) -> None:
    q, k, v = (x.requires_grad_() for x in _small())
    do = torch.randn_like(q)

    def grad() -> Any:
        return torch.autograd.grad(oa.attention(q, k, v, deterministic=True), (q, k, v), do)

    expected = [x.clone() for x in grad()]
    for _ in range(2):
        grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    before = counts()[0]
    with torch.cuda.stream(stream):
        made = grad()
    stream.synchronize()
    _same_bits(made, expected, "stream")
    assert counts()[0] == before + 2
    wrong: list[str] = []

    def work() -> None:
        torch.cuda.set_device(0)
        for _ in range(50):
            try:
                _same_bits(grad(), expected, "thread")
            except AssertionError as error:
                wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_tensor_maps_are_moved_as_they_are_made() -> None:
    """The driver's own functions: a map of one address, moved to another, is the map made for that one."""
    import ctypes

    from omniattn.runtime.driver import device_context, get_driver

    driver = get_driver()
    move = ctypes.CDLL("libcuda.so.1").cuTensorMapReplaceAddress
    memory = torch.empty(1 << 20, dtype=torch.bfloat16, device="cuda").data_ptr()
    shape = ("bfloat16", (64, 70, 4, 2), (512, 128, 35840), (64, 64, 1, 1))
    with device_context(driver, 0):
        first, other = (driver.encode_tensor_map(shape[0], at, *shape[1:]) for at in (1 << 20, memory))
        room = ctypes.create_string_buffer(192)
        place = -(-ctypes.addressof(room) // 64) * 64
        ctypes.memmove(place, first, 128)
        assert move(ctypes.c_void_p(place), ctypes.c_void_p(memory)) == 0
    assert ctypes.string_at(place, 128) == other


def _small() -> tuple[Any, Any, Any]:
    made = (torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return tuple(made)  # type: ignore[return-value]


def test_streams_threads_and_graphs(counts: Any) -> None:
    q, k, v = _small()
    expected = oa.attention(q, k, v)
    oa.attention(q, k, v)
    before = counts()[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = oa.attention(q, k, v)
    stream.synchronize()
    assert torch.equal(other, expected)
    assert counts()[0] == before + 1
    wrong: list[int] = []

    def work() -> None:
        torch.cuda.set_device(0)
        for i in range(200):
            if not torch.equal(oa.attention(q, k, v), expected):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = oa.attention(q, k, v)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(captured, oa.attention(q, k, v))


def test_what_differs_is_left_to_the_engine(counts: Any) -> None:
    q, k, v = _small()
    for _ in range(3):
        oa.attention(q, k, v)
    before = counts()[0]
    oa.attention(q, k, v, causal=True)
    oa.attention(q[:, :32].contiguous(), k, v)
    assert counts()[0] == before
    leaf = q.clone().requires_grad_()
    oa.attention(leaf, k, v).sum().backward()
    assert leaf.grad is not None
    assert counts()[0] >= before
