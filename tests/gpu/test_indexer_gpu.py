"""``index_logits`` and ``top_k`` on a GPU against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from tests.indexer_cases import (  # noqa: E402
    E4M3,
    ROWS,
    LogitsCall,
    logits_of,
    paged_call,
    pooled,
    ranged_call,
    row_of,
    same_logits,
    wanted_positions,
)

pytestmark = pytest.mark.gpu

#: Of the sum of a logit's products' magnitudes: fp32 sums; what Hopper's tensor cores keep of sums of e4m3.
EXACT, HOPPER = 2.0**-20, 2.0**-12


@pytest.fixture(params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the kernels that this GPU gets, and with those that every GPU gets."""
    if request.param == "generic":
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "index_logits_sm80")
    return request.param


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arrays as CUDA tensors."""
    return {name: to_gpu(x) for name, x in arguments.items()}


def to_gpu(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == E4M3:
        return torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def check_logits(call: LogitsCall, family: str) -> float:
    given = on_gpu(call.arguments)
    out = torch.full(call.wanted.shape, float("nan"), device="cuda")
    got = oa.index_logits(**given, out=out)
    assert got is out
    hopper = family == "selected" and torch.cuda.get_device_capability() == (9, 0)
    worst = same_logits(got.cpu().numpy(), call, HOPPER if hopper else EXACT)
    again = oa.index_logits(**given)
    assert torch.equal(again.view(torch.int32), got.view(torch.int32))
    return worst


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("block_size", [64, 16, 7, 1, 100])
@pytest.mark.parametrize(("heads", "next_n"), [(64, 1), (32, 2), (5, 3), (128, 2), (64, 4)])
def test_paged_logits(family: str, heads: int, next_n: int, block_size: int, fused: bool) -> None:
    lengths = (0, 1, 5, 63, 64, 65, 130, 1000, 1025)
    check_logits(paged_call(heads, next_n, block_size, fused, lengths=lengths, seed=heads), family)


@pytest.mark.parametrize("heads", [64, 3, 100])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (9, 300), (33, 1500)])
def test_ranges_of_keys(family: str, rows: int, keys: int, heads: int) -> None:
    check_logits(ranged_call(heads, rows, keys, seed=rows), family)


def test_long_cache(family: str) -> None:
    """Several spans a sequence, some beyond its end, and rows with a stride of their own."""
    call = paged_call(64, 1, 64, True, lengths=(20000, 0, 777), seed=3)
    given = on_gpu(call.arguments)
    wide = torch.full((3, call.wanted.shape[1] + 5), float("nan"), device="cuda")
    got = oa.index_logits(**given, out=wide[:, 2:-3])
    same_logits(got.cpu().numpy(), call, HOPPER)
    assert torch.isnan(wide[:, :2]).all()
    assert torch.isnan(wide[:, -3:]).all()


def test_nan_reaches_the_logits_of_its_key_alone(family: str) -> None:
    call = ranged_call(64, 4, 200)
    given = call.arguments | {"k_start": None, "k_end": None}
    given["k"] = given["k"].copy()
    given["k"].view(np.uint8)[50, 3] = 0xFF
    given["k_scale"] = given["k_scale"].copy()
    given["k_scale"][60] = np.nan
    got = oa.index_logits(**on_gpu(given)).cpu().numpy()
    assert np.isnan(got[:, [50, 60]]).all()
    assert np.isnan(got).sum() == 8


def test_no_rows_and_no_keys(family: str) -> None:
    q = torch.zeros(0, 1, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    k = torch.zeros(4, 64, 1, 132, device="cuda", dtype=torch.uint8)
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")
    w, table = torch.zeros(0, 64, device="cuda"), empty.new_zeros(0, 3)
    assert oa.index_logits(q, k, w, seq_lens=empty, block_table=table).shape == (0, 192)
    rows, keys = q.new_zeros(3, 64, 128), q.new_zeros(0, 128)
    got = oa.index_logits(rows, keys, w.new_zeros(3, 64), k_scale=w.new_zeros(0))
    assert got.shape == (3, 0)
    assert (oa.top_k(got, 5) == -1).all()
    assert oa.top_k(got[:0], 5).shape == (0, 5)


@pytest.fixture(params=[spec.name for spec in REGISTRY if spec.op == "top_k"])
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    spec = next(spec for spec in REGISTRY if spec.name == request.param)
    if spec.unfit(torch.cuda.get_device_capability()):
        pytest.skip("for another GPU")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", request.param)
    return str(request.param)


def top_k(logits: Any, k: int, **options: Any) -> np.ndarray[Any, Any]:
    """By a call into an array of other numbers, and a second one, which repeats it."""
    out = torch.full((len(logits), k), 12345, dtype=torch.int32, device="cuda")
    got = oa.top_k(logits, k, **options, out=out)
    assert got is out
    assert torch.equal(oa.top_k(logits, k, **options), got)
    return got.cpu().numpy()


@pytest.mark.parametrize("kind", ROWS)
def test_top_k(row: str, kind: str) -> None:
    for n in (1, 1000, 9001, 32768):
        logits = np.stack([row_of(kind, n, seed) for seed in range(3)])
        for k in (1, 50, 2048):
            np.testing.assert_array_equal(top_k(to_gpu(logits), k), wanted_positions(logits, k), f"{n} {k}")


@pytest.mark.parametrize("pooled_rows", [False, True])
def test_parts_of_rows(row: str, pooled_rows: bool) -> None:
    logits, options, starts, lengths = logits_of(rows=64, width=4001, next_n=2)
    wanted = wanted_positions(logits, 300, starts, lengths)
    if pooled_rows:
        table = pooled(32, 4001, 24)
        options |= {"block_table": table, "block_size": 24}
        rows, at = np.repeat(table, 2, axis=0), np.maximum(wanted, 0)
        wanted = np.where(wanted >= 0, np.take_along_axis(rows, at // 24, axis=1) * 24 + at % 24, -1)
    wide = torch.full((64, 4004), float("nan"), device="cuda")
    wide[:, 1:4002] = to_gpu(logits)
    np.testing.assert_array_equal(top_k(wide[:, 1:4002], 300, **on_gpu(options)), wanted)


@pytest.mark.parametrize("kind", ["normal", "one bin", "equal", "low bits"])
def test_long_rows(row: str, kind: str) -> None:
    logits = row_of(kind, 200_003)[None]
    order = np.lexsort((np.arange(200_003), -logits[0]))[:2048]
    np.testing.assert_array_equal(top_k(to_gpu(logits), 2048)[0], np.sort(order))


def test_other_lengths_in_a_graph() -> None:
    """A call that is captured reads the lengths when it is replayed."""
    call = paged_call(64, 2, 64, True, lengths=(300, 500))
    given = on_gpu(call.arguments)
    oa.top_k(oa.index_logits(**given), 64, lengths=given["seq_lens"], next_n=2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = oa.index_logits(**given)
        chosen = oa.top_k(logits, 64, lengths=given["seq_lens"], next_n=2)
    for lengths in ((300, 500), (0, 1), (77, 20)):
        given["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        logits.fill_(float("nan")), chosen.fill_(-7)
        graph.replay()
        ends = np.array([n - 1 + i for n in lengths for i in range(2)])[:, None]
        wanted = np.where(np.arange(call.wanted.shape[1]) < ends, call.wanted, -np.inf)
        same_logits(logits.cpu().numpy(), LogitsCall({}, wanted, call.bound), HOPPER)
        scores = logits.cpu().numpy()
        np.testing.assert_array_equal(chosen.cpu().numpy(), wanted_positions(scores, 64))
