"""``omniattn verify --soak`` finds what is wrong with sparse attention and latent rows: faults put into the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.reference import kv_cache
from omniattn.testing.soak import outcome
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.operations import problem
from omniattn.testing.soak.problem import Problem
from omniattn.testing.soak.sparse import lists

pytest.importorskip("ml_dtypes")

Facts = dict[str, Any]


def first(fits: Callable[[Problem], bool], operation: str = "sparse attention") -> Problem:
    """The first problem that fits; it passes."""
    for number in range(20000):
        one = problem(1, number, cpu=True)
        if one.operation == operation and fits(one):
            found = outcome.run(Machine(), one)
            assert (found.status, found.text) == (outcome.PASSED, "")
            return one
    raise AssertionError("no such problem")


def found_in(one: Problem) -> set[str]:
    """What fails."""
    found = outcome.run(Machine(), one)
    assert found.status == outcome.FAILED
    assert not found.raised, found.text
    return {line.split(":")[0] for line in found.text.splitlines()}


def _without_last(indices: Any) -> Any:
    indices[..., -1] = -1
    return indices


def _named_once(indices: Any) -> Any:
    for row in indices.reshape(-1, indices.shape[-1]):
        again = np.ones(len(row), bool)
        again[np.unique(row, return_index=True)[1]] = False
        row[again] = -1
    return indices


def _taken_as_last(indices: Any) -> Any:
    indices[indices < 0] = 0
    return indices


@pytest.mark.parametrize("function", ["attention_sparse", "decode"])
@pytest.mark.parametrize("change", [_without_last, _named_once, _taken_as_last])
def test_other_lists(change: Callable[[Any], Any], function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(one: Problem) -> bool:
        f, made = one.facts, lists(one)
        rows = int(np.prod(f["lead"]))
        plain = "topk_length" not in f and not {"softmax_scale", "softcap"} & set(f["options"]) and not f["poisoned"]
        repeated = any(len(set(keys.tolist())) < len(keys) for keys in made.keys)
        last, wrong = (made.indices[:, -1] >= 0) & (made.indices[:, -1] < rows), (made.indices < 0).any()
        return f["function"] == function and plain and rows > 1 and repeated and bool(last.all() and wrong)

    one, right = first(fits), getattr(omniattn, function)
    monkeypatch.setattr(
        omniattn, function, lambda *a, indices, **options: right(*a, indices=change(indices.copy()), **options)
    )
    assert "o" in found_in(one)


def test_lengths_that_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda one: "topk_length" in one.facts and one.facts["topk"] > 8 and not one.facts["invalid"])
    right = getattr(omniattn, one.facts["function"])
    monkeypatch.setattr(omniattn, one.facts["function"], lambda *a, topk_length, **options: right(*a, **options))
    assert "o" in found_in(one)


def test_a_maximum_that_counts_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda one: "sinks" in one.facts["arrays"] and "return_max" in one.facts["options"])
    right = omniattn.attention_sparse

    def wrong(*arrays: Any, **options: Any) -> Any:
        results = right(*arrays, **options)
        return *results[:-1], np.maximum(results[-1], options["sinks"].astype(np.float32))

    monkeypatch.setattr(omniattn, "attention_sparse", wrong)
    assert found_in(one) == {"row_max"}


def test_results_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(one: Problem) -> bool:
        f = one.facts
        several = f["function"] == "attention_sparse" and f["arrays"]["q"]["shape"][0] > 2
        return several and one.dtype == "float16" and "deterministic" in f["options"]

    one, right = first(fits), omniattn.attention_sparse

    def wrong(q: Any, *arrays: Any, **options: Any) -> Any:
        result = right(q, *arrays, **options)
        o = result[0] if isinstance(result, tuple) else result
        o[...] = np.nextafter(o, np.inf if len(q) > 1 else -np.inf, dtype=o.dtype)
        return result

    monkeypatch.setattr(omniattn, "attention_sparse", wrong)
    assert "result 0 alone" in found_in(one)


@pytest.mark.parametrize("operation", ["sparse attention", "latent caches"])
def test_scales_of_rows(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(one: Problem) -> bool:
        loud = one.facts["arrays"]["k"]["scale"] == 1.0
        return one.facts["rows"]["format"] == "656" and loud and not one.facts.get("topk_length")

    one, right = first(fits, operation), kv_cache.decode_656

    def wrong(data: Any) -> Any:
        """The scale of the next group."""
        moved = data.copy()
        moved[..., 512:528] = np.roll(data[..., 512:528], 4, axis=-1)
        return right(moved)

    monkeypatch.setattr(kv_cache, "decode_656", wrong)
    assert "o" in found_in(one)


@pytest.mark.parametrize("operation", ["sparse attention", "latent caches"])
def test_one_scale_of_all_rows(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda one: "k_scale" in one.facts["arrays"] and not one.facts.get("topk_length"), operation)
    for kind in (omniattn.PagedKVCache, omniattn.KVCache):
        right = kind.from_arrays

        def wrong(k: Any, *, k_scale: Any, right: Any = right, **options: Any) -> Any:
            return right(k, k_scale=k_scale * np.float32(1.05), **options)

        monkeypatch.setattr(kind, "from_arrays", wrong)
    assert "o" in found_in(one)
