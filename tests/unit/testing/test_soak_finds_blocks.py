"""``omniattn verify --soak`` finds what is wrong with predicted blocks and block masks: faults put into the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.testing.soak import blocks
from omniattn.testing.soak.problem import Problem
from tests.unit.testing.test_soak_finds_sparse import first, found_in

pytest.importorskip("ml_dtypes")

Call = Callable[..., Any]
#: Options that keep other blocks than those of large scores.
_OTHERS = {"similarity", "causal", "keep_first"}


def _several(one: Problem) -> bool:
    """Several blocks of keys, not all of them kept."""
    of_q, of_k = (one.facts["arrays"][name]["shape"] for name in "qk")
    keys = max(of_k[1:3])
    share = one.facts["options"].get("topk", one.facts["options"].get("cdf", 1.0))
    return 0 not in of_q and keys > 300 and 0.3 < share < 0.8 and one.facts["arrays"]["k"]["scale"] == 1


def _with(**changes: Any) -> Callable[[Call], Call]:
    return lambda right: lambda *a, **options: right(*a, **{**options, **changes})


def _of_more(right: Call) -> Call:
    def wrong(*a: Any, topk: float, **options: Any) -> Any:
        return right(*a, topk=min(2.0 * topk, 1.0), **options)

    return wrong


def _of_few_weights(right: Call) -> Call:
    def wrong(*a: Any, cdf: float, **options: Any) -> Any:
        return right(*a, cdf=0.3 * cdf, **options)

    return wrong


def _of_negated_keys(right: Call) -> Call:
    return lambda q, k, **options: right(q, -k, **options)


def _without_one(right: Call) -> Call:
    def wrong(*a: Any, **options: Any) -> Any:
        found = right(*a, **options)
        found[tuple(np.argwhere(found)[-1])] = False
        return found

    return wrong


@pytest.mark.parametrize(
    ("fits", "fault"),
    [
        (lambda f: "topk" in f["options"] and not _OTHERS & set(f["options"]), _of_more),
        (lambda f: f["options"].get("cdf", 0) > 0.5 and not _OTHERS & set(f["options"]), _of_few_weights),
        (lambda f: "similarity" not in f["options"], _of_negated_keys),
        (lambda f: f["options"].get("causal") and "similarity" not in f["options"], _with(causal=False)),
        (lambda f: "keep_first" in f["options"] and "similarity" not in f["options"], _with(keep_first=0)),
        (lambda f: f["options"].get("similarity") in (0.02, 0.1), _with(similarity=-1.0)),
        (lambda f: "similarity" not in f["options"], _with(similarity=1.0)),
        (lambda f: True, _without_one),
    ],
    ids=["more", "fewer weights", "keys", "causal", "first", "no similarity", "similarity", "one"],
)
def test_other_blocks(
    fits: Callable[[dict[str, Any]], bool], fault: Callable[[Call], Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = first(lambda one: _several(one) and fits(one.facts), "sparse_blocks")
    monkeypatch.setattr(omniattn, "sparse_blocks", fault(omniattn.sparse_blocks))
    assert "blocks" in found_in(one)


def test_attention_that_predicts_others(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda one: _several(one) and one.facts["attend"] is not None, "sparse_blocks")
    right = omniattn.attention

    def wrong(*a: Any, precision: Any, **options: Any) -> Any:
        if precision.sparse is not None:
            precision = type(precision)(sparse=omniattn.Sparse(topk=1.0))
        return right(*a, precision=precision, **options)

    monkeypatch.setattr(omniattn, "attention", wrong)
    assert found_in(one) >= {"o", "lse"}


def test_a_block_mask_in_low_precision_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(one: Problem) -> bool:
        shape = one.facts["arrays"].get("block_mask", {"shape": ()})["shape"]
        hides = bool(shape) and not one.numbers("block_mask", one.facts["arrays"]["block_mask"]).all()
        return hides and 0 not in one.facts["arrays"]["q"]["shape"] and "min_seqlen" not in str(one.facts["options"])

    one, right = first(fits, "low precision"), omniattn.attention
    monkeypatch.setattr(
        omniattn, "attention",
        lambda *a, block_mask, **options: right(*a, block_mask=np.ones_like(block_mask), **options),
    )  # fmt: skip
    assert "o" in found_in(one)


def test_what_single_precision_cannot_tell_apart_passes() -> None:
    """Means that are off by less than rounding to float32 may do it, beside the rule in float64."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 2, n, 64)).astype(np.float32) for n in (4000, 20000))
    near = 0
    for options in ({"topk": 0.3}, {"cdf": 0.4}, {"topk": 0.2, "similarity": 0.0156}, {"cdf": 0.9, "causal": True}):
        sizes = options.get("block_size", (128, 64))
        wanted = omniattn.sparse_blocks(q, k, layout="HND", **options)
        moved = (x + 2e-4 * rng.standard_normal(x.shape).astype(np.float32) for x in (q, k))
        found = omniattn.sparse_blocks(*moved, layout="HND", **options)
        near += int((found != wanted).sum())
        given = {**options, "block_size": sizes}
        assert blocks.wrong(wanted, q, k, given, on_cpu=True) == ""
        assert blocks.wrong(found, q, k, given, on_cpu=False) == ""
    assert near > 0, "nothing was near"
