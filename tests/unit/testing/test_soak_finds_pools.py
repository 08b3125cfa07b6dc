"""``omniattn verify --soak`` finds what is wrong with caches on arrays of the caller: faults put into the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.testing.soak import outcome
from omniattn.testing.soak.machines import Machine
from omniattn.testing.soak.operations import problem
from omniattn.testing.soak.problem import Problem

pytest.importorskip("ml_dtypes")

Facts = dict[str, Any]


def first(fits: Callable[[Facts], bool], operation: str = "caches") -> Problem:
    """The first problem on pages of the caller that fits and has tokens; it passes."""
    for number in range(20000):
        one = problem(1, number, cpu=True)
        paged = one.operation == operation and {"pool", "block_size"} <= set(one.facts)
        if paged and min(one.facts["lengths"]) > 3 and fits(one.facts):
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


def break_arrays(monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """A `from_arrays` that takes other arrays than it is given."""
    right = omniattn.PagedKVCache.from_arrays

    def wrong(*arrays: Any, **options: Any) -> Any:
        arrays, options = change(arrays, options)
        return right(*arrays, **options)

    monkeypatch.setattr(omniattn.PagedKVCache, "from_arrays", wrong)


def break_call(monkeypatch: pytest.MonkeyPatch, name: str, after: Callable[[Any, dict[str, Any]], None]) -> None:
    """A function on a cache that does something else behind its work."""
    right = getattr(omniattn, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = right(*arguments, **options)
        after(arguments[0], options)
        return result

    monkeypatch.setattr(omniattn, name, wrong)


def _scales(f: Facts, *kinds: str) -> bool:
    return f["pool"].get("scales") in kinds


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("scales", ["one", "head", "sequence", "token"])
def test_exchanged_scales(scales: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K's as V's: the tokens that are written, or what is read, are others."""
    one = first(lambda f: _scales(f, scales) and f["cache"]["k_dtype"] == dtype)
    break_arrays(monkeypatch, lambda a, o: (a, o | {"k_scale": o["v_scale"], "v_scale": o["k_scale"]}))
    wrong = {"sequence": "o", "token": "cache.k_scale"}.get(scales, "cache.k")
    assert wrong in found_in(one)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_scale_that_is_a_little_off(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By less than codes are apart: some codes are not the nearest ones."""
    one = first(lambda f: _scales(f, "one") and f["cache"]["k_dtype"] == dtype and min(f["lengths"]) > 20)
    kept = lambda o: {"k_scale": o["k_scale"] * np.float32(1.002), "v_scale": o["v_scale"] * np.float32(1)}  # noqa: E731
    break_arrays(monkeypatch, lambda a, o: (a, o | kept(o)))
    assert "cache.k" in found_in(one)


@pytest.mark.parametrize("operation", ["caches", "attention_with_kvcache"])
def test_scales_of_another_sequence(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda f: _scales(f, "sequence") and len(f["lengths"]) > 1 and "expand" not in f["pool"]["scale_view"]
                and min(f["lengths"]) > 20 and min(f.get("queries", [1])) > 0, operation)  # fmt: skip
    swap = lambda x: np.ascontiguousarray(x[::-1])  # noqa: E731
    break_arrays(monkeypatch, lambda a, o: (a, o | {name: swap(o[name]) for name in ("k_scale", "v_scale")}))
    assert "o" in found_in(one)


@pytest.mark.parametrize("kind", ["apart", "pair", "halves"])
@pytest.mark.parametrize("operation", ["caches", "attention_with_kvcache"])
def test_k_and_v_exchanged(operation: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda f: f["pool"]["kind"] == kind and f["steps"] and not _scales(f, "token"), operation)
    break_arrays(monkeypatch, lambda a, o: (a[::-1], o))
    assert {"cache.k", "cache.v"} <= found_in(one)


def test_a_row_that_is_written_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are where they should be; another block has changed too."""
    one = first(lambda f: f["steps"] and not any("by_slot" in step for step in f["steps"]))

    def spill(cache: Any, options: dict[str, Any]) -> None:
        free = set(range(cache.num_blocks)) - set(options["block_table"].reshape(-1).tolist())
        cache.v[min(free), 0, 0] = 1

    break_call(monkeypatch, "append", spill)
    assert found_in(one) == {"elsewhere"}


@pytest.mark.parametrize("scales", [None, "token"])
def test_a_byte_in_a_gap(scales: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    view = "view" if scales is None else "scale_view"
    one = first(lambda f: f["steps"] and _scales(f, scales) and any(f["pool"][view].get("before", ())))

    def spill(cache: Any, options: dict[str, Any]) -> None:
        base = cache.k if scales is None else cache.k_scale
        while base.base is not None:
            base = base.base
        base.reshape(-1).view(np.uint8)[0] = 0

    break_call(monkeypatch, "append", spill)
    assert "elsewhere" in found_in(one)


def test_a_copy_without_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda f: _scales(f, "token") and f["copies"] and sum(f["lengths"]) > 60)
    right = omniattn.copy_blocks

    def wrong(cache: Any, copies: Any) -> None:
        kept = cache.k_scale.copy()
        right(cache, copies)
        cache.k_scale[...] = kept

    monkeypatch.setattr(omniattn, "copy_blocks", wrong)
    assert "copy_blocks" in found_in(one)


@pytest.mark.parametrize("operation", ["caches", "attention_with_kvcache"])
def test_a_block_left_of_all_windows_that_is_read(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And multiplied by 0: its NaN shows."""

    def fits(f: Facts) -> bool:
        left, queries = f["options"].get("window", (-1,))[0], f.get("queries", [f.get("q_len")])[0]
        far = left >= 0 and f["lengths"][0] - queries - left >= f["block_size"]
        return bool(far and f["nobody"] == "unused" and f["cache"]["k_dtype"] != "int8")

    one = first(fits, operation)
    name = one.facts.get("function", "decode" if operation == "caches" else operation)
    right = getattr(omniattn, name)

    def wrong(q: Any, cache: Any, **options: Any) -> Any:
        result = right(q, cache, **options)
        o = result[0] if isinstance(result, tuple) else result
        o += (0.0 * cache.v[options["block_table"][0, 0]].astype(np.float32).sum()).astype(o.dtype)
        return result

    monkeypatch.setattr(omniattn, name, wrong)
    assert "o" in found_in(one)
    whole = dataclasses.replace(one, facts=one.facts | {"options": one.facts["options"] | {"window": (-1, -1)}})
    assert outcome.run(Machine(), whole).status == outcome.PASSED


def test_a_write_into_the_cache_by_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    one = first(lambda f: f["pool"]["kind"] == "apart" and "function" not in f)
    right = omniattn.decode

    def wrong(q: Any, cache: Any, **options: Any) -> Any:
        result = right(q, cache, **options)
        cache.k[0, 0, 0, 0] = 3
        return result

    monkeypatch.setattr(omniattn, "decode", wrong)
    assert "operands" in found_in(one)
