"""What rows say that they take, and the one function that answers by it, with no GPU."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from typing import Any

import pytest

from omniattn.problems import QuantizeProblem, Target
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.select.fit import RowsOf, fit, fitting_rows
from tests.unit.select import every_call

TARGETS = [Target((8, 0), 163 << 10, 108), Target((8, 9), 99 << 10, 58), Target((9, 0), 227 << 10, 132)]
ATTENTION = ("attention", "attention_split")
#: Fields that follow from the constants that a row is compiled with.
BY_CONSTANT: dict[str, Any] = {
    "SCORE_MODS": lambda s: s.score_mods,
    "MASKS": lambda s: s.masks != "none",
    "SOFTCAP": lambda s: s.softcap != "never",
    "MASK_LISTS": lambda s: s.lists,
    "BLOCK_MASK": lambda s: s.block_masks,
    "LISTS": lambda s: s.lists and s.block_masks,
    "KEY_MASK": lambda s: s.masks == "keys",
    "PAGED": lambda s: s.paged,
    "VARLEN": lambda s: s.sequences == "packed",
    "WITH_LSE": lambda s: s.lse,
    "VALUE_FACTORS": lambda s: s.value_factors,
    "OWN_HEAD_DIM_V": lambda s: s.other_head_dim_v,
    "DMASK": lambda s: s.dmask,
    "ORDERED": lambda s: s.ordered_dq,
    "FRAGMENTS": lambda s: s.fragments,
    "ROTATED": lambda s: s.rotated,
}


@pytest.mark.parametrize("constant", BY_CONSTANT)
def test_rows_say_what_they_are_compiled_with(constant: str) -> None:
    values = [(spec, int(dict(spec.defines)[constant])) for spec in REGISTRY if constant in dict(spec.defines)]
    assert {value for _, value in values} == {0, 1}
    wrong = [spec.name for spec, value in values if BY_CONSTANT[constant](spec) != bool(value)]
    assert wrong == []


def test_rows_contradict_themselves_nowhere() -> None:
    for spec in REGISTRY:
        assert (spec.masks == "tiles") == (spec.bias_bytes > 0), spec.name
        assert spec.score_mods or not (spec.score_mod or spec.lists), spec.name
        assert spec.smooth_q == "never" or spec.quantized, spec.name
        assert not (spec.dmask or spec.ordered_dq) or spec.dq, spec.name
        if spec.op in ATTENTION or spec.op in ("attention_backward", "attention_backward_dq"):
            assert spec.tensor_maps == spec.arch_specific, spec.name
            assert (spec.arch_specific or spec.paged) == (spec.sequences != "any"), spec.name


def test_what_follows_from_fields_is_kept() -> None:
    spec = next(s for s in REGISTRY if s.score_mods and s.softcap == "any")
    assert dataclasses.replace(spec, softcap="never", masks="none").score_mods is False
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)).score_mods


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: "sm_{}{}".format(*target.cc))
@pytest.mark.parametrize("op", ATTENTION)
def test_rows_sorted_out_by_class_are_those_that_fit(op: str, target: Target) -> None:
    calls = [*every_call.exact_calls(True), *every_call.low_precision_calls(True)]
    rows = [spec for spec in REGISTRY if spec.op == op]
    some = 0
    for call in calls[:: max(1, len(calls) // 120)]:
        expected = [spec for spec in rows if fit(spec, call, target) is None]
        assert fitting_rows(REGISTRY, op, call, target) == expected
        some += bool(expected)
    assert some > 10


def test_rows_of_another_registry_are_looked_at_anew() -> None:
    call = next(iter(every_call.exact_calls(True)))
    both = REGISTRY, tuple(spec for spec in REGISTRY if not spec.arch_specific)
    for registry in (*both, *both):
        found = fitting_rows(registry, "attention", call, TARGETS[2])
        assert found == [s for s in registry if s.op == "attention" and fit(s, call, TARGETS[2]) is None]
        assert any(s.arch_specific for s in found) == (registry is REGISTRY)


def test_classes_are_looked_at_once_and_among_some_rows() -> None:
    asked: list[str] = []

    def serves(row: KernelSpec, of: str) -> bool:
        asked.append(row.name)
        return row.dtype == of

    rows = REGISTRY[:8]
    of_class: RowsOf[str] = RowsOf(serves, among=lambda registry, of: registry[:4])
    for _ in range(2):
        assert of_class(rows, "float16") == tuple(row for row in rows[:4] if row.dtype == "float16")
    assert asked == [row.name for row in rows[:4]]


def test_quantizers() -> None:
    """Which of the three kinds each call takes, whatever the row."""
    rows = [spec for spec in REGISTRY if spec.op == "quantize" and (spec.dtype, spec.head_dim) == ("float16", 64)]
    for qk_dtype, hadamard in itertools.product(("int8", "float8_e4m3"), (False, True)):
        call = QuantizeProblem(
            "float16", 1, 8, 8, 1, 1, 64, False, qk_dtype=qk_dtype, hadamard=hadamard, row_bias="none"
        )
        able = [spec for spec in rows if fit(spec, call, TARGETS[2]) is None]
        assert able
        assert {spec.rotated for spec in able} == {hadamard or qk_dtype == "float8_e4m3"}


def test_without_rules_the_gpu_decides() -> None:
    own = next(spec for spec in REGISTRY if spec.op == "attention_combine_packed")
    assert fit(own, None, TARGETS[2]) is None
    assert fit(own, None, TARGETS[0]) == "it is for compute capability 9.0 only, this GPU has 8.0"
