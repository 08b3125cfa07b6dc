"""Repeated calls by the C module give the same bits as by Python, from any stream, thread and captured graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan import native  # noqa: E402

from .test_repeat_gpu import _calls  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def counts() -> Any:
    """(calls run by the module, calls left to the engine)."""
    module = native.module()
    if module is None:
        pytest.skip("omniattn._native is not built, or this torch has no exchange table")
    return module.counts


def _flat(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def test_every_operation_gives_the_same_bits(counts: Any) -> None:
    taken = 0
    for name, call in _calls().items():
        expected = [x.clone() for x in _flat(call())]
        call()  # learned here
        before = counts()[0]
        for _ in range(3):
            for x, y in zip(_flat(call()), expected, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
        taken += counts()[0] > before
    assert taken >= 4


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
