"""decode of more than 16 query rows a kv head, whose warps share keys, on the GPU against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.select import decode_ways  # noqa: E402
from omniattn.select.model import rules  # noqa: E402
from tests.gpu.decode_cases import Case, Filled, compare  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")


@pytest.fixture(autouse=True)
def _shared_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small caches too take the kernels whose warps share keys."""
    found = dataclasses.replace(rules(), shared_keys=0)
    monkeypatch.setattr(decode_ways, "rules", lambda: found)
    PLANS.clear()
    yield
    PLANS.clear()


#: (q_len, query heads, kv heads) around the numbers of rows at which another kernel serves, and beyond the largest.
ROWS = (
    (2, 9, 1), (4, 16, 2), (1, 33, 1), (16, 8, 2), (13, 5, 1), (1, 71, 1), (5, 16, 1), (9, 9, 1), (16, 9, 1),
    (16, 17, 1),
)  # fmt: skip


def check(case: Case, *chosen: dict[str, Any]) -> None:
    filled = Filled(case)
    filled.append()
    for options in chosen or ({},):
        host = {name: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        host.pop("deterministic", None)
        label = f"{case.q_len} x {case.heads_q}/{case.heads_kv} {case.block_size} {options}"
        compare(filled.decode(**options), filled.reference(**host), case, label)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_a_kv_head(dtype: str, head_dim: int) -> None:
    for i, (q_len, heads_q, heads_kv) in enumerate(ROWS):
        block_size = (0, 16, 1, 48)[i % 4]
        rows: dict[str, Any] = {"q_len": q_len, "heads_q": heads_q, "heads_kv": heads_kv, "block_size": block_size}
        check(
            Case(dtype, head_dim=head_dim, lengths=(300, 3, 0, 129, 1711), **rows), {}, {"deterministic": True},
            {"window": (70, 0)}, {"softcap": 5.0, "sinks": torch.linspace(-1, 3, heads_q, device="cuda")},
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", [40, 72, 96, 120])
def test_narrow_rows(head_dim: int) -> None:
    check(Case(head_dim=head_dim, q_len=7, heads_q=12, heads_kv=2, block_size=16), {}, {"window": (20, 0)})


@pytest.mark.parametrize("lengths", [(20000,), tuple(range(1, 400)), (0,) * 5 + (700,), (8192,) * 3], ids=len)
def test_long_and_many_sequences(lengths: tuple[int, ...]) -> None:
    check(Case(lengths=lengths, q_len=3, heads_q=20), {}, {"deterministic": True})
    check(Case(lengths=lengths, head_dim=64, heads_q=71))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_shared_prefix_and_a_recent_window(head_dim: int) -> None:
    more: dict[str, Any] = {"head_dim": head_dim, "q_len": 3, "heads_q": 16, "heads_kv": 2, "block_size": 16}
    filled = Filled(Case(lengths=(460, 323, 700, 900, 600), **more))
    filled.append()
    assert filled.table is not None
    filled.table[:, :20] = filled.table[0, :20].clone()
    compare(filled.decode(shared_prefix=320), filled.reference(), filled.case, "prefix")
    recent = Case(k_dtype="int8", v_dtype="int8", lengths=(460, 3, 700), **more)
    recent.cache_options = {"recent_window": 64, "recent_slots": 3}
    check(recent)


def test_repeats_give_the_same_bits_and_graphs_follow_lengths() -> None:
    filled = Filled(Case(lengths=(900, 400, 900), q_len=16, heads_q=4))
    filled.append()
    first = filled.decode()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, filled.decode(), strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = filled.decode()
    torch.cuda.current_stream().wait_stream(stream)
    for lengths in ((900, 400, 900), (16, 0, 333), (512, 400, 17)):
        filled.lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        compare(results, filled.reference(), filled.case, str(lengths))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tiles", [(2, 2), (2, 4), (3, 3), (2, 8)], ids=str)
def test_every_width_serves_every_number_of_rows(
    head_dim: int, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most warps have no rows, or the last block of rows has few."""
    monkeypatch.setattr(decode_ways, "SHARED_TILES", {64: (tiles,), 128: (tiles,)})
    for q_len, heads_q in ((1, 17), (16, 4), (1, 71), (3, 30), (16, 16)):
        case = Case(head_dim=head_dim, lengths=(300, 0, 1000, 81), q_len=q_len, heads_q=heads_q)
        check(case, {}, {"deterministic": True})
