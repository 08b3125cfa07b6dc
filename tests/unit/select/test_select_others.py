"""Selection of the kernels of decode, append, copies, merges and quantizers, with no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from omniattn import registry
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.kv.formats import KV_BITS, LAYOUTS, ROW_DIMS, KVFormat, check_format
from omniattn.kv.layout import CacheLayout
from omniattn.problems import AppendProblem, QuantizeProblem, Target
from omniattn.registry import REGISTRY, by_name
from omniattn.registry.decode import QUERY_TILES, unlisted_rows
from omniattn.select import (
    select_append,
    select_copy,
    select_decode,
    select_delta,
    select_merge,
    select_quantizer,
)
from omniattn.select.cache import append_spec, decode_spec

HOPPER = Target((9, 0), 227 << 10)
TURING = Target((7, 5), 64 << 10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_merge_states(dtype: str) -> None:
    found = select_merge(dtype, HOPPER)
    assert (found.spec.op, found.spec.dtype) == ("merge_states", dtype)
    assert found.why


def test_merge_states_of_other_types() -> None:
    with pytest.raises(UnsupportedError, match="float64"):
        select_merge("float64", HOPPER)


def formats(k_dtype: str, v_dtype: str, head_dim: int = 128) -> tuple[KVFormat, KVFormat]:
    k = check_format(k_dtype, head_dim, None, True, "test", is_key=True)
    return k, check_format(v_dtype, head_dim, None, True, "test", is_key=False)


def appended(k_dtype: str, v_dtype: str, dtype: str = "bfloat16") -> AppendProblem:
    cache = CacheLayout(
        False, 2, 64, 2, 128, *formats(k_dtype, v_dtype), False, (), 0, 0, 0, None, "cuda", 0,
    )  # fmt: skip
    return AppendProblem(dtype, cache, 2, 2, 1, 128, 2, 64, 64, 2, 0, "none", 0, 0)


def selected(op: str, target: Target, force: str | None = None) -> str:
    """The row that one plain call of an operation takes."""
    problem = QuantizeProblem("bfloat16", 1, 8, 8, 2, 2, 128, False, smooth_q=True)
    found = {
        "decode": lambda: select_decode("bfloat16", *formats("int8", "int8"), ((1, 1),), target=target, force=force)[0],
        "decode_combine": lambda: select_decode(
            "bfloat16", *formats("int8", "int8"), ((1, 1),), target=target, force=force
        )[1],
        "append": lambda: select_append(appended("int8", "int8"), target, force),
        "copy_blocks": lambda: select_copy(target, force),
        "merge_states": lambda: select_merge("bfloat16", target, force),
        "quantize": lambda: select_quantizer(problem, target, force),
        "quantize_delta": lambda: select_delta(problem, target, force),
    }[op]()
    assert found.spec.op == op
    assert found.why
    assert (found.why == (f"OMNIATTN_FORCE_KERNEL={force}",)) == (force is not None and found.spec.name in force)
    return found.spec.name


#: operation -> another row of it, and why that one cannot serve the call of `selected`; None: it can.
OTHERS = {
    "decode": ("decode_sm80_bf16_d128_kvint4", "the call takes 'decode_sm80_bf16_d128_kvint8'"),
    "decode_combine": ("decode_combine_sm80_bf16_d64", "the call takes 'decode_combine_sm80_bf16_d128'"),
    "append": ("kv_append_sm80_bf16_d128_kvfp8", "the call takes 'kv_append_sm80_bf16_d128_kvint8'"),
    "copy_blocks": ("", None),
    "merge_states": ("merge_states_sm80_fp16", "the call takes 'merge_states_sm80_bf16'"),
    "quantize": ("quantize_sm80_bf16_d256", None),
    "quantize_delta": ("quantize_delta_sm80_bf16_d64", "it takes head_dim up to 64, not 128"),
}


@pytest.mark.parametrize("op", OTHERS)
def test_forced_kernels_of_every_operation(op: str) -> None:
    name = selected(op, HOPPER)
    assert selected(op, HOPPER, name) == name
    assert selected(op, HOPPER, f"attn_fwd_sm80_bf16_d64, {name}") == name
    # Rows of other operations do not matter.
    assert selected(op, HOPPER, "attn_fwd_sm80_bf16_d64") == name
    other, reason = OTHERS[op]
    if other:
        assert by_name(other).op == op
        if reason is None:
            assert selected(op, HOPPER, other) == other
        else:
            with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL") as caught:
                selected(op, HOPPER, other)
            assert reason in str(caught.value)
        assert selected(op, HOPPER, f"{name},{other}") == name
        assert selected(op, HOPPER, f"{other},{name}") == (other if reason is None else name)
    with pytest.raises(ArgumentError, match=r"names of kernels, separated by commas.*'nobody'"):
        selected(op, HOPPER, f"{name},nobody")


def test_kernels_of_unlisted_formats_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation may look at the names of another's kernels before that has asked for one."""
    mixed = formats("int8", "int4")
    force = "kv_append_sm80_bf16_d128_kint8_vint4,decode_sm80_bf16_d128_kint8_vint4_n2,decode_combine_sm80_bf16_d128_n2"
    listed = {spec.name: spec for spec in REGISTRY}
    for order in (0, 1):
        monkeypatch.setattr(registry, "_BY_NAME", dict(listed))
        calls = [
            lambda: select_append(appended("int8", "int4"), HOPPER, force).spec.name,
            lambda: select_decode("bfloat16", *mixed, ((2, 1),), target=HOPPER, force=force)[0].spec.name,
        ]
        names = [calls[order](), calls[1 - order]()]
        assert sorted(names) == sorted(force.split(",")[:2])
        assert not any(name in listed for name in names)


def every_cache_format() -> Iterator[tuple[KVFormat, KVFormat]]:
    """All pairs that `check_format` lets a cache have."""
    for head_dim, group, layout in itertools.product(ROW_DIMS, (None, 32, 64, 128, 256), LAYOUTS):
        for k_dtype, v_dtype in itertools.product(KV_BITS, KV_BITS):
            try:
                yield (
                    check_format(k_dtype, head_dim, group, True, "test", is_key=True, layout=layout),
                    check_format(v_dtype, head_dim, group, True, "test", is_key=False, layout=layout),
                )
            except (ArgumentError, UnsupportedError):  # of quantized rows of 512 channels
                continue


def test_every_format_of_a_cache_has_a_row_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BY_NAME", {spec.name: spec for spec in REGISTRY})
    pairs = list(every_cache_format())
    assert len(pairs) > 250
    rows = {
        row.name: row
        for (k, v), dtype in itertools.product(pairs, ("float16", "bfloat16"))
        for row in (append_spec(dtype, k, v), *(decode_spec(dtype, k, v, n) for n in QUERY_TILES[k.row_dim]))
    }
    # A fresh registry: what is known by name are the rows that calls take.
    monkeypatch.setattr(registry, "_BY_NAME", {spec.name: spec for spec in REGISTRY})
    assert all(by_name(name) == row for name, row in rows.items())
    assert {row.name for row in unlisted_rows()} <= set(rows)


@pytest.mark.parametrize("op", OTHERS)
def test_no_operation_serves_a_gpu_that_is_too_old(op: str) -> None:
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        selected(op, TURING)
    with pytest.raises((ArgumentError, UnsupportedError), match=r"this GPU has 7\.5"):
        selected(op, TURING, selected(op, HOPPER))  # forced


def test_a_specialized_quantizer_serves_its_own_problem_only() -> None:
    special = next(spec for spec in REGISTRY if spec.specialization == ("sm90", "float8_e4m3"))
    general = QuantizeProblem(special.dtype, 1, 8, 8, 2, 2, 64, False)
    with pytest.raises(ArgumentError, match="made for the defaults of int8 attention in the sm90 grouping"):
        select_quantizer(general, HOPPER, special.name)
    served = dataclasses.replace(general, smooth_v=True)
    assert select_quantizer(served, HOPPER).spec.specialization == special.specialization
    assert select_quantizer(general, HOPPER).spec.specialization is None
