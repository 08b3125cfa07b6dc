"""P of integers in attn_int8_sm90: its accuracy beside special functions, and scores that leave the range of a word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's kernels"
    ),
]

FAST = oa.Int8(fast_exp=True)
#: What the error may grow by, relative to itself: as normal inputs have it, where no other error hides it.
MOST = {64: 1.05, 128: 1.07, "fast": 1.13}


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


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
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_error_beside_special_functions(head_dim: int, kind: str, factor: float, causal: bool) -> None:
    """A call with an LSE runs special functions alone, on the same integers."""
    q, k, v = arrays(kind, head_dim, dtype=torch.float16 if head_dim == 72 else None)
    q = q * factor
    want = exact(q, k, v, causal)
    nearest = l1(oa.attention(q, k, v, causal=causal, precision="int8", return_lse=True)[0], want)
    for precision, most in (("int8", MOST[64 if head_dim == 64 else 128]), (FAST, MOST["fast"])):
        found = l1(oa.attention(q, k, v, causal=causal, precision=precision), want)
        assert found <= most * nearest + 2e-4, (precision, found, nearest)


def test_small_errors_where_it_is_used() -> None:
    """It is used: results of normal inputs have other bits than with special functions, and are as near."""
    for head_dim in (64, 128):
        q, k, v = arrays("normal", head_dim)
        a, b, c = (
            oa.attention(q, k, v, precision="int8", return_lse=True)[0],
            oa.attention(q, k, v, precision="int8"),
            oa.attention(q, k, v, precision=FAST),
        )
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)
        assert (a.double() - b.double()).abs().max() <= 0.02
        assert (a.double() - c.double()).abs().max() <= 0.03


def scores_apart(head_dim: int, units: list[tuple[int, float]]) -> list[Any]:
    """Q of ones, and K whose scores are 0 but for those keys: (key, score to base e)."""
    torch.manual_seed(head_dim)
    q = torch.ones(1, 256, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 1024, 2, head_dim, device="cuda") * 0.05
    for key, score in units:
        k[:, key] += score / head_dim**0.5
    return [q, k.bfloat16(), torch.randn(1, 1024, 2, head_dim, device="cuda").bfloat16()]


@pytest.mark.parametrize("precision", ["int8", FAST], ids=["int8", "fast"])
@pytest.mark.parametrize("octaves", [4, 9, 20, 120, 200, 250, 260, 300, 480, 500, 520, 700, 1000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_far_from_the_base(head_dim: int, octaves: int, precision: Any) -> None:
    """Keys are walked from the last on: scores far above and far below the base that the first 64 keys gave.

    With scales of their own, and in groups of keys whose scales are small.
    """
    away = octaves * 0.6931
    for units in ([(5, away)], [(5, -away)], [(1020, away), (5, 0.0)], [(1020, away), (300, away - 3), (4, -away)],
                  [(1020, -away), (200, away)]):  # fmt: skip
        q, k, v = scores_apart(head_dim, units)
        o = oa.attention(q, k, v, precision=precision, softmax_scale=head_dim**-0.5)
        beside = oa.attention(q, k, v, precision="int8", softmax_scale=head_dim**-0.5, return_lse=True)[0]
        assert not o.isnan().any()
        assert (o.double() - beside.double()).abs().max() <= 0.13 * float(v.abs().max()), units


@pytest.mark.parametrize("precision", ["int8", FAST], ids=["int8", "fast"])
def test_scales_that_differ_by_group_of_keys(precision: Any) -> None:
    """A later group of keys with 2000 times the scale: its steps are computed again, the others are not."""
    for head_dim in (64, 128):
        q, k, v = arrays("normal", head_dim)
        for first in (64, 900, 2300):
            large = k.clone()
            large[:, first : first + 40] *= 2000
            want = exact(q, large, v, False)
            nearest = l1(oa.attention(q, large, v, precision="int8", return_lse=True)[0], want)
            assert l1(oa.attention(q, large, v, precision=precision), want) <= 1.13 * nearest + 1e-3


@pytest.mark.parametrize("precision", ["int8", FAST], ids=["int8", "fast"])
def test_not_a_number(precision: Any) -> None:
    """NaN in Q and in K of any step reaches the rows that it reaches with special functions."""
    for head_dim in (64, 128):
        q, k, v = arrays("normal", head_dim)
        q[0, 33, 1, 3] = torch.nan
        k[1, 700, 0, 5] = torch.nan
        for causal in (False, True):
            o = oa.attention(q, k, v, causal=causal, precision=precision)
            beside = oa.attention(q, k, v, causal=causal, precision="int8", return_lse=True)[0]
            assert torch.equal(o.isnan(), beside.isnan())
            assert o.isnan().any()


def test_what_explain_says() -> None:
    q, k, v = arrays("normal", 128)
    assert "half of P" in str(oa.explain(q, k, v, precision="int8"))
    fast = str(oa.explain(q, k, v, precision=FAST))
    assert "_q16_fast" in fast
    assert "fast_exp" in fast
    assert "fast_exp changes nothing" in str(oa.explain(q, k, v, precision=FAST, return_lse=True))
    first = oa.attention(q, k, v, causal=True, precision=FAST)
    for _ in range(5):
        assert torch.equal(oa.attention(q, k, v, causal=True, precision=FAST), first)
