"""``calibrate_sparse``, its file, and ``Sparse(file=)``, on the CPU."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError
from omniattn.ops.calibrate_sparse import SHARES
from omniattn.problems.sparse import shares_of
from omniattn.problems.sparse_blocks import visible_count
from omniattn.reference.sparse_blocks import visible_blocks


def local(seed: int = 0, rows: int = 512, heads: int = 3, batch: int = 1, strength: float = 4.0) -> list[Any]:
    """Queries that look at their neighbours, those of later heads less."""
    rng = np.random.default_rng(seed)
    at = np.arange(rows)[:, None] / rows * np.arange(1, 17)
    waves = np.concatenate([np.cos(at), np.sin(at)], 1)[None, :, None] * np.linspace(strength, 0.5, heads)[:, None]
    q, k = (waves + 0.3 * rng.standard_normal((batch, rows, heads, 32)) for _ in range(2))
    v = rng.standard_normal((batch, rows, heads, 32))
    return [x.astype(np.float32) for x in (q, k / np.linspace(strength, 0.5, heads)[:, None], v)]


def errors_of(x: list[Any], low: Any, **options: Any) -> Any:
    """Relative L1 of each head of an exact call without the blocks that a Sparse leaves out."""
    q, k, v = x
    blocks = oa.sparse_blocks(
        q, k, topk=low.topk, cdf=low.cdf, similarity=low.similarity, block_size=low.block_size,
        keep_first=low.keep_first, **options,
    )  # fmt: skip
    o = oa.attention(q, k, v, block_mask=blocks, block_size=low.sizes, **options)
    exact = oa.attention(q, k, v, **options)
    axes = (0, 1, 3) if options.get("layout", "NHD") == "NHD" else (0, 2, 3)
    return np.abs(o - exact).sum(axes) / np.abs(exact).sum(axes)


@pytest.mark.parametrize(
    ("by", "options", "rule"),
    [
        ("topk", {}, {}),
        ("topk", {"causal": True}, {"keep_first": 1, "block_size": 64}),
        ("cdf", {}, {"similarity": 0.1}),
        ("cdf", {"layout": "HND"}, {}),
    ],
)
def test_each_head_has_the_smallest_share_within_the_bound(
    by: str, options: dict[str, Any], rule: dict[str, Any], tmp_path: Path
) -> None:
    samples = [local(seed) for seed in range(2)]
    if "layout" in options:
        samples = [[np.ascontiguousarray(x.swapaxes(1, 2)) for x in one] for one in samples]
    file = tmp_path / "own.json"
    found = oa.calibrate_sparse(
        {"first": samples, "second": samples[0]}, max_error=0.1, by=by, file=file, **rule, **options
    )
    assert list(found.entries) == ["first", "second"]
    one = found.entries["first"]
    assert (one.samples, one.seqlen_q, one.seqlen_k, one.head_dim) == (2, 512, 512, 32)
    assert set(one.shares) <= set(SHARES[by])
    assert len(set(one.shares)) > 1
    low = oa.Sparse(file=file, name="first")
    assert getattr(low, by) == one.shares
    assert (low.similarity, low.sizes, low.keep_first) == (found.similarity, found.block_size, found.keep_first)
    worst = np.max([errors_of(x, low, **options) for x in samples], 0)
    np.testing.assert_allclose(worst, one.errors, rtol=1e-3)
    assert (worst <= 0.1).all()
    smaller = [SHARES[by][max(SHARES[by].index(x) - 1, 0)] for x in one.shares]
    tighter = np.max(
        [errors_of(x, dataclasses.replace(found.sparse("first"), **{by: smaller}), **options) for x in samples], 0
    )
    assert all(error > 0.1 or share == SHARES[by][0] for error, share in zip(tighter, one.shares, strict=True))
    assert low == dataclasses.replace(low)
    assert pickle.loads(pickle.dumps(low)) == low
    assert hash(low) == hash(oa.Sparse(file=str(file), name="first"))
    assert dataclasses.replace(low, file=None, name=None) == found.sparse("first")
    assert f"{by} of each head: at most 0.1" in str(found)


def test_it_goes_into_a_call(tmp_path: Path) -> None:
    q, k, v = local()
    found = oa.calibrate_sparse((q, k, v), max_error=0.1, file=tmp_path / "a.json")
    assert list(found.entries) == ["attention"]
    low = oa.Sparse(file=tmp_path / "a.json")
    assert low.name == "attention"
    got = oa.attention(q, k, v, precision=oa.Int8(sparse=low))
    blocks = oa.sparse_blocks(q, k, topk=low.topk)
    np.testing.assert_array_equal(got, oa.attention(q, k, v, precision="int8", block_mask=blocks, block_size=(128, 64)))
    said = str(oa.explain(q, k, v, precision=oa.Int8(sparse=low)))
    counts = [max(int(np.float32(x) * np.float32(8)), 1) for x in low.topk]
    assert f"keeps {min(counts)} to {max(counts)} of 8 blocks of keys (topk, kept share per head from file" in said
    assert f"{str(tmp_path / 'a.json')!r}, 'attention'" in said
    kept = blocks.mean((0, 2, 3))
    np.testing.assert_allclose(found.entries["attention"].kept, kept)
    with pytest.raises(ArgumentError, match=r"precision.sparse.topk.*3 numbers of .*a.json"):
        oa.attention(q[:, :, :2], k[:, :, :2], v[:, :, :2], precision=oa.Int8(sparse=low))
    of_weights = str(oa.explain(q, k, v, precision=oa.Int8(sparse=oa.Sparse(cdf=(0.5, 0.7, 0.9)))))
    assert "a share of 0.5 to 0.9 of the weights (cdf, kept share per head: 0.5 to 0.9, mean 0.7)" in of_weights


def test_with_the_error_of_a_precision() -> None:
    x = local()
    found = oa.calibrate_sparse(x, max_error=0.1, precision=oa.Int8(), shares=[0.25, 0.5, 0.75])
    exact = oa.calibrate_sparse(x, max_error=0.1, shares=[0.25, 0.5, 0.75])
    assert set(found.entries["attention"].shares) <= {0.25, 0.5, 0.75, 1.0}
    assert all(
        a >= b for a, b in zip(found.entries["attention"].shares, exact.entries["attention"].shares, strict=True)
    )
    with pytest.raises(ArgumentError, match=r"'max_error'.*at least what all blocks give.* of head 0 of 'attention'"):
        oa.calibrate_sparse(x, max_error=1e-4, precision="int8")


def test_names_and_samples_may_be_read_as_they_are_wanted() -> None:
    class Samples:
        asked = 0

        def __iter__(self) -> Iterator[Any]:
            Samples.asked += 1
            yield tuple(local(1))

    class Layers(Mapping[str, Any]):
        def __getitem__(self, name: str) -> Any:
            return Samples()

        def __iter__(self) -> Iterator[str]:
            yield from ("a", "b")

        def __len__(self) -> int:
            return 2

    found = oa.calibrate_sparse(Layers(), max_error=0.2)
    assert found.entries["a"] == found.entries["b"] == oa.calibrate_sparse(local(1), max_error=0.2).entries["attention"]
    assert Samples.asked >= 4


def test_nothing_to_lose() -> None:
    zeros = [np.zeros((1, 256, 2, 16), np.float32)] * 3
    one = oa.calibrate_sparse(zeros).entries["attention"]
    assert (one.shares, one.errors) == ((0.05, 0.05), (0.0, 0.0))
    empty = [np.zeros((1, 0, 2, 16), np.float32)] * 3
    assert oa.calibrate_sparse(empty).entries["attention"].shares == (0.05, 0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_visible_blocks_are_counted(causal: bool) -> None:
    for rows, keys in ((500, 700), (700, 500), (1, 64), (128, 1), (65, 640), (640, 65), (0, 5), (5, 0)):
        for size in ((128, 64), (64, 128)):
            assert visible_count(rows, keys, size, causal) == visible_blocks(rows, keys, size, causal).sum()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_error": 0.0}, "'max_error'"),
        ({"max_error": float("nan")}, "'max_error'"),
        ({"by": "weights"}, "'by'"),
        ({"shares": []}, "'shares'"),
        ({"shares": [0.5, 2.0]}, "'shares'"),
        ({"shares": "0.5"}, "'shares'"),
        ({"precision": "auto"}, "'precision'"),
        ({"precision": oa.Int8(sparse=oa.Sparse(topk=0.5))}, "'precision'"),
        ({"precision": "int9"}, "'precision'"),
        ({"block_size": 100}, "'block_size'"),
        ({"layout": "BHSD"}, "'layout'"),
        ({"causal": 1}, "'causal'"),
        ({"keep_first": -1}, "'keep_first'"),
        ({"file": "no/such/folder/own.json"}, "'file'.*a folder that exists"),
        ({"file": "."}, "'file'.*a folder that exists"),  # not after all is measured
        ({"by": ["topk"]}, "calibrate_sparse.*'by'"),
        ({"precision": "int9"}, "calibrate_sparse.*'precision'"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        oa.calibrate_sparse(local(rows=128), **given)


def test_tensors_that_are_refused() -> None:
    x = tuple(local(rows=128))
    for given, said in (
        ({}, "an empty mapping"),
        ({3: x}, "the name 3"),
        ({"a": []}, "none of 'a'"),
        ({"a": x[0]}, "ndarray of 'a'"),
        ({"a": iter([x])}, "an iterator of 'a'"),
        ({"a": [x, x[:2]]}, "tuple among those of 'a'"),
        ({"a": [x, [y[:, :, :2] for y in x]]}, "with 3 query heads, as the first has, received 2"),
        (3, "int of 'attention'"),
    ):
        with pytest.raises(ArgumentError, match=f"'tensors'.*{said}"):
            oa.calibrate_sparse(given)
    broken = [y.copy() for y in x]
    broken[2][0, 5, 1] = np.nan
    with pytest.raises(ArgumentError, match="nan of head 1"):
        oa.calibrate_sparse(broken)


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    oa.calibrate_sparse({"a": local(rows=128), "b": local(rows=128)}, file=file)
    good = json.loads(file.read_text())
    assert oa.Sparse(file=file, name="b", similarity=-0.1, block_size=(128, 64)).name == "b"

    def changed(**changes: Any) -> str:
        return json.dumps({**good, **changes})

    one = good["entries"]["a"]
    for text, said in (
        ("{", "no JSON"),
        ("[]", "no JSON object of kind"),
        (changed(kind="other"), "no JSON object of kind"),
        (changed(format=2), "format 2, not 1"),
        (changed(rule={}), "rule {}"),
        (changed(rule={**good["rule"], "block_size": [128]}), r"block_size \[128\]"),
        (changed(rule={**good["rule"], "block_size": [100, 64]}), "block_size"),
        (changed(rule={**good["rule"], "similarity": None}), "similarity None"),
        (changed(rule={**good["rule"], "keep_first": 1.5}), "keep_first 1.5"),
        (changed(entries={}), "no entries"),
        (changed(entries={"a": {**one, "shares": [0.5, 0.0, 0.5]}}), "shares of 'a'"),
        (changed(entries={"a": {**one, "shares": [0.5, float("nan"), 0.5]}}), "shares of 'a'"),
        (changed(entries={"a": {**one, "shares": []}}), "shares of 'a'"),
        (changed(entries={"a": {**one, "num_heads": 2}}), "num_heads of 'a': 2, with 3 shares"),
        (changed(entries={"a": 5}), "shares of 'a': None"),
    ):
        file.write_text(text)
        with pytest.raises(ArgumentError, match=f"'file'.*own.json: {said}"):
            oa.Sparse(file=file, name="a")
    with pytest.raises(ArgumentError, match=r"'file'.*none\.json"):
        oa.Sparse(file=tmp_path / "none.json")
    file.write_text(json.dumps(good))
    for given, said in (
        ({"file": file}, "'name'.*one of 'a', 'b'"),
        ({"file": file, "name": "c"}, "'name'.*one of 'a', 'b'"),
        ({"file": file, "name": 3}, "'name'"),
        ({"file": 3}, "'file'"),
        ({"file": file, "name": "a", "topk": 0.123}, "'topk'"),
        ({"file": file, "name": "a", "cdf": 0.5}, "both"),
        ({"file": file, "name": "a", "keep_first": 3}, "'keep_first'.*nothing, or 0"),
        ({"topk": 0.5, "name": "a"}, "'name'.*without file="),
    ):
        with pytest.raises(ArgumentError, match=said):
            oa.Sparse(**given)


def test_shares_in_every_form() -> None:
    for given in ([0.5, 1], (0.5, 1.0), np.array([0.5, 1.0]), np.float32([0.5, 1])):
        assert oa.Sparse(topk=given).topk == (0.5, 1.0)
        assert hash(oa.Sparse(cdf=given)) == hash(oa.Sparse(cdf=(0.5, 1.0)))
    assert shares_of(np.float64(0.5), "topk", "f") == 0.5
    for wrong in ([], [0.5, 0.0], [[0.5]], [True, 0.5], "0.5", [0.5, None], np.array([np.nan])):
        with pytest.raises(ArgumentError, match="'topk'"):
            oa.Sparse(topk=wrong)
