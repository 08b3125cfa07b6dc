"""P of integers in attn_int8_sm90: its accuracy beside special functions, and scores that leave the range of a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.select.choice import VARIABLE  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's kernels"
    ),
]

FAST = oa.Int8(fast_exp=True)
#: What the error may grow by, relative to itself: as normal inputs have it, where no other error hides it.
MOST = {"d64_q16_fast": 1.13, "d128_q16": 1.07, "d128": 1.07}
ROWS = list(MOST)


@pytest.fixture
def attend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Attention by a row of attn_int8_sm90, and by the one that makes the LSE, with special functions alone.

    Other rows may be chosen for a call as small as these.
    """

    def by_row(row: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
        short = "fp16" if q.dtype == torch.float16 else "bf16"
        monkeypatch.setenv(VARIABLE, f"attn_int8_sm90_{short}_{row}")
        PLANS.clear()
        given = {"precision": FAST if "fast" in row else "int8", "return_lse": "lse" in row} | options
        o = oa.attention(q, k, v, **given)
        return o[0] if given["return_lse"] else o

    return by_row


def beside(row: str) -> str:
    """The row with special functions."""
    return row.partition("_")[0] + "_lse"


def head_dim_of(row: str) -> int:
    return int(row.partition("_")[0][1:])


def exact(q: Any, k: Any, v: Any, causal: bool, scale: float | None = None) -> Any:
    """In float64, (batch, queries, heads, head_dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        rows, keys = s.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=s.device).triu(keys - rows + 1)
        s.masked_fill_(hidden, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def l1(o: Any, want: Any) -> float:
    return float((o.double() - want).abs().sum() / want.abs().sum())


def arrays(kind: str, head_dim: int, queries: int = 700, keys: int = 2500, dtype: Any = None) -> list[Any]:
    made = testing.make_qkv(
        kind, batch=2, seqlen_q=queries, seqlen_k=keys, heads_q=4, heads_kv=2, head_dim=head_dim, seed=head_dim
    )
    return [torch.from_numpy(np.asarray(x, dtype=np.float32)).cuda().to(dtype or torch.bfloat16) for x in made]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", [0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("kind", ["normal", "outlier", "channel_bias", "mean_shift"])
@pytest.mark.parametrize("row", ROWS)
def test_error_beside_special_functions(row: str, kind: str, factor: float, causal: bool, attend: Any) -> None:
    """On the same integers.

    Where scores are nearly equal (a hundredth of q) all P round to 28 or 26, so the place of that boundary decides: a
    form whose boundary is nearer to 28 than that of rounding to nearest has half as much error again. Of outliers most
    P are below 2^-6, where integers make 0 of them: such steps are to take special functions.
    """
    for head_dim in (head_dim_of(row), head_dim_of(row) - 24):
        q, k, v = arrays(kind, head_dim, dtype=torch.float16 if head_dim % 64 else None)
        q = q * factor
        want = exact(q, k, v, causal)
        nearest = l1(attend(beside(row), q, k, v, causal=causal), want)
        found = l1(attend(row, q, k, v, causal=causal), want)
        assert found <= MOST[row] * nearest + 2e-4, (found, nearest)


@pytest.mark.parametrize("row", ROWS)
def test_it_is_used(row: str, attend: Any) -> None:
    """Results of normal inputs have other bits than with special functions, are as near, and the same again."""
    q, k, v = arrays("normal", head_dim_of(row))
    a, b = attend(beside(row), q, k, v), attend(row, q, k, v)
    assert not torch.equal(a, b)
    assert (a.double() - b.double()).abs().max() <= 0.03
    for _ in range(3):
        assert torch.equal(attend(row, q, k, v), b)


def scores_apart(head_dim: int, units: list[tuple[int, float]]) -> list[Any]:
    """Q of ones, and K whose scores are near 0 but for those keys: (key, score to base e)."""
    torch.manual_seed(head_dim)
    q = torch.ones(1, 256, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1024, 2, head_dim, device="cuda") * 0.05
    for key, score in units:
        k[:, key] += score / head_dim**0.5
    return [q, k.bfloat16(), torch.randn(1, 1024, 2, head_dim, device="cuda").bfloat16()]


@pytest.mark.parametrize("octaves", [4, 9, 20, 120, 200, 250, 260, 300, 480, 500, 520, 700, 1000])
@pytest.mark.parametrize("row", ROWS)
def test_scores_far_from_the_base(row: str, octaves: int, attend: Any) -> None:
    """Keys are walked from the last on: scores far above and far below the base that the first 64 keys gave."""
    away = octaves * 0.6931
    for units in ([(5, away)], [(5, -away)], [(1020, away), (5, 0.0)], [(1020, away), (300, away - 3), (4, -away)],
                  [(1020, -away), (200, away)]):  # fmt: skip
        q, k, v = scores_apart(head_dim_of(row), units)
        o = attend(row, q, k, v)
        assert not o.isnan().any()
        error = (o.double() - attend(beside(row), q, k, v).double()).abs().max()
        assert error <= 0.13 * float(v.abs().max()), units


@pytest.mark.parametrize("row", ROWS)
def test_scales_that_differ_by_group_of_keys(row: str, attend: Any) -> None:
    """A group of keys with 2000 times the scale: its steps are computed again, the others are not."""
    q, k, v = arrays("normal", head_dim_of(row))
    for first in (64, 900, 2300):
        large = k.clone()
        large[:, first : first + 40] *= 2000
        want = exact(q, large, v, False)
        nearest = l1(attend(beside(row), q, large, v), want)
        assert l1(attend(row, q, large, v), want) <= 1.13 * nearest + 1e-3


@pytest.mark.parametrize("row", ROWS)
def test_not_a_number(row: str, attend: Any) -> None:
    """NaN in Q and in K of any step reaches the rows that it reaches with special functions."""
    q, k, v = arrays("normal", head_dim_of(row))
    q[0, 33, 1, 3] = torch.nan
    k[1, 700, 0, 5] = torch.nan
    for causal in (False, True):
        o = attend(row, q, k, v, causal=causal)
        assert torch.equal(o.isnan(), attend(beside(row), q, k, v, causal=causal).isnan())
        assert o.isnan().any()


def test_what_explain_says() -> None:
    """A batch that is large enough for its keys not to be split."""
    said = {}
    for head_dim in (64, 128):
        q, k, v = (torch.randn(4, 2048, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        for name, options in {
            "int8": {"precision": "int8"}, "fast": {"precision": FAST}, "lse": {"precision": FAST, "return_lse": True},
        }.items():  # fmt: skip
            said[head_dim, name] = str(oa.explain(q, k, v, **options))
    assert "made of integers" not in said[64, "int8"]
    assert "half of P" in said[128, "int8"]
    assert "_q16_fast" in said[64, "fast"]
    assert "_q16_fast" not in said[128, "fast"]
    for call in ((128, "fast"), (64, "lse"), (128, "lse")):
        assert "fast_exp changes nothing" in said[call]
