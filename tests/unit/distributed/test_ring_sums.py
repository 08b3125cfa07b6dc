"""Sums of partial results of a ring: gradients, and results merged by their LSEs, whatever rows they are of."""

from __future__ import annotations

import itertools
import random

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from omniattn.distributed.steps import Merged, Sum, unseen  # noqa: E402

ROWS = 23


def some_rows(number: random.Random) -> tuple[int, int]:
    """All of them, or some."""
    begin = number.choice([0, 0, number.randrange(ROWS)])
    return begin, number.choice([ROWS, ROWS, number.randint(begin + 1, ROWS)])


def test_unseen_rows() -> None:
    number = random.Random(0)
    for _ in range(300):
        rows, seen = some_rows(number), [some_rows(number) for _ in range(number.randrange(4))]
        left = {row for row in range(*rows) if not any(a <= row < b for a, b in seen)}
        found = unseen(rows, seen)
        assert {row for a, b in found for row in range(a, b)} == left
        assert all(a < b for a, b in found)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_gradients_are_rounded_once(dtype: torch.dtype, count: int) -> None:
    number = random.Random(count)
    torch.manual_seed(count)
    for _ in range(50):
        total, expected = Sum(torch.empty(2, ROWS, 3, 8, dtype=dtype), ROWS, count), torch.zeros(2, ROWS, 3, 8)
        for _ in range(number.randrange(count + 1)):
            rows = some_rows(number)
            x = torch.randn(2, rows[1] - rows[0], 3, 8).to(dtype)
            expected[:, rows[0] : rows[1]] += x.float()
            total.add(rows, x)
        assert torch.equal(total.result(), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_summand_that_is_complete_last(dtype: torch.dtype, count: int) -> None:
    """Its memory is read once the others are there."""
    number = random.Random(count)
    torch.manual_seed(count)
    for _ in range(50):
        like = torch.empty(2, ROWS, 3, 8, dtype=dtype)
        whole = torch.full_like(like, float("nan"))
        total, expected = Sum(like, ROWS, count, whole), torch.zeros(2, ROWS, 3, 8)
        for _ in range(number.randrange(count)):
            rows = some_rows(number)
            x = torch.randn(2, rows[1] - rows[0], 3, 8).to(dtype)
            expected[:, rows[0] : rows[1]] += x.float()
            total.add(rows, x)
        whole.copy_(torch.randn(2, ROWS, 3, 8))
        expected += whole.float()
        assert torch.equal(total.result(), expected.to(dtype))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_merged_results(count: int) -> None:
    number = random.Random(count)
    torch.manual_seed(count)
    like = torch.empty(2, ROWS, 3, 8)
    for _ in range(50):
        merged = Merged((2, ROWS, 3, 8), like, count)
        weights, values = torch.zeros(2, 3, ROWS, dtype=torch.float64), torch.zeros(2, ROWS, 3, 8, dtype=torch.float64)
        for _ in range(count):
            (a, b), here = (rows := some_rows(number)), (slice(None), slice(*rows))
            o, lse = torch.randn(2, b - a, 3, 8), torch.randn(2, 3, b - a)
            lse[:, :, torch.rand(b - a) < 0.2] = -torch.inf
            weight = lse.double().exp()
            weights[:, :, a:b] += weight
            values[here] += torch.where(weight.mT[..., None] > 0, o.double() * weight.mT[..., None], 0.0)
            merged.add(rows, torch.where(weight.mT[..., None] > 0, o, 0.0), lse)
        o, lse = merged.result(None)
        seen = weights.mT[..., None]
        torch.testing.assert_close(o.double(), torch.where(seen > 0, values / seen, 0.0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), weights.log(), atol=1e-5, rtol=1e-5)
