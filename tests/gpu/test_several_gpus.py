"""Several GPUs in one process: the arrays' device decides, not the current one. Needs two GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU in this machine"),
]


def _inputs(device: int) -> list[Any]:
    return [torch.randn(2, 300, 4, 64, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(3)]


def _check(device: int) -> None:
    """Dense, packed, with a score modifier, and merged, on one device."""
    q, k, v = _inputs(device)
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    assert o.device == q.device == lse.device
    hnd = [x.float().transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*hnd, is_causal=True).transpose(1, 2).cpu().numpy()
    testing.assert_close(o.float().cpu().numpy(), want, atol=2e-2)
    cu = torch.tensor([0, 300, 600], dtype=torch.int32, device=q.device)
    sizes = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
    packed = oa.attention_varlen(*(x.reshape(600, 4, 64) for x in (q, k, v)), causal=True, **sizes)
    testing.assert_close(packed.reshape(2, 300, 4, 64).float().cpu().numpy(), want, atol=2e-2)
    capped = oa.attention(q, k, v, causal=True, softcap=1e4)
    testing.assert_close(capped.float().cpu().numpy(), want, atol=2e-2)
    merged, _ = oa.merge_states(o, lse, o, lse)
    testing.assert_close(merged.float().cpu().numpy(), want, atol=2e-2)


@pytest.mark.parametrize("current", [0, 1])
def test_current_device_does_not_matter(current: int) -> None:
    with torch.cuda.device(current):
        for device in (0, 1, 0, 1):
            _check(device)
        assert torch.cuda.current_device() == current


def test_stream_of_another_device() -> None:
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.device(1), torch.cuda.stream(stream):
        _check(1)


def test_threads_on_both() -> None:
    def work(device: int) -> None:
        for _ in range(10):
            _check(device)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, i % 2) for i in range(8)]:
            future.result()


def test_mixed_devices_are_an_error() -> None:
    q, _, v = _inputs(0)
    _, k, _ = _inputs(1)
    with pytest.raises(oa.errors.DeviceError, match="argument 'k': expected an array on cuda:0"):
        oa.attention(q, k, v)
