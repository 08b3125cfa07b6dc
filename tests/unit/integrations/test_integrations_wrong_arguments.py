"""What models hand to attention of transformers and it must not take: refused by name, and nothing is dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from omniattn.integrations import transformers as integration  # noqa: E402
from omniattn.integrations.masks import PackedMask, StructuredMask  # noqa: E402

pytestmark = pytest.mark.frameworks

LENGTH = 6


@pytest.fixture(autouse=True)
def _registered() -> None:
    integration.register()


def _lengths(**changed: Any) -> dict[str, Any]:
    starts = torch.tensor([0, 2, LENGTH], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4, "max_length_k": 4}
    return {**given, **changed}


def _attend(**changed: Any) -> Any:
    made = torch.Generator().manual_seed(1)
    arguments = {name: torch.randn(1, 2, LENGTH, 16, generator=made) for name in ("query", "key", "value")}
    arguments = {"module": SimpleNamespace(is_causal=True), "attention_mask": None, **arguments, **changed}
    return transformers.AttentionInterface()["omniattn"](**arguments)[0]


def _all_true(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.bool)


def _masked(mask: Any, bias: Any) -> dict[str, Any]:
    return {"attention_mask": mask, "position_bias": bias}


_NAN = float("nan")
#: A window of parts, for a batch and a number of tokens.
_OF_OTHERS = [(3, LENGTH), (1, 4)]
_STARTS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGER = {"key": torch.zeros(1, 2, 9, 16), "value": torch.zeros(1, 2, 9, 16)}


@pytest.mark.parametrize(
    ("argument", "error", "options"),
    [
        *(("dropout", ArgumentError, {"dropout": x}) for x in (_NAN, -0.5, 1.0, None, "0.1", [0.1])),
        *(("sliding_window", ArgumentError, {"sliding_window": x}) for x in (0, -1, 2.5, _NAN, True, "3", [3])),
        *(("sliding_window", ArgumentError, _lengths(sliding_window=x)) for x in (0, -1, 2.5, "3")),
        *(("is_causal", ArgumentError, {"is_causal": x}) for x in ("no", 0.0, [False])),
        *((name, ArgumentError, {name: [1.0]}) for name in ("query", "key", "value", "attention_mask")),
        *((name, ArgumentError, {name: 1.5}) for name in ("s_aux", "position_bias")),
        *((name, ShapeError, {name: torch.zeros(2, LENGTH, 16)}) for name in ("query", "key", "value")),
        ("value", ShapeError, {**_LONGER, "value": torch.zeros(1, 2, 12, 16)}),
        ("value", ShapeError, {**_LONGER, "value": torch.zeros(1, 2, 7, 16)}),
        ("value", ShapeError, _lengths(value=torch.zeros(2, 2, LENGTH, 16))),
        ("key", ShapeError, {name: torch.zeros(b, 2, 6, 16) for name, b in (("query", 2), ("key", 3), ("value", 3))}),
        *(("position_bias", ShapeError, {"position_bias": torch.zeros(1, 2, 6, n), **_LONGER}) for n in (6, 30)),
        ("position_bias", ShapeError, _masked(_all_true(1, 1, 6, 6), torch.zeros(1, 3, 5, 5))),
        ("position_bias", ShapeError, {"position_bias": torch.tensor(1.0)}),
        ("position_bias", DtypeError, {"position_bias": torch.zeros(1, 2, 6, 6, dtype=torch.complex64)}),
        ("position_bias", DeviceError, {"position_bias": torch.zeros(1, 2, 6, 6, device="meta")}),
        ("attention_mask", ShapeError, _masked(_all_true(1, 1, 5, 5), torch.zeros(1, 2, 6, 6))),
        ("s_aux", DtypeError, {"s_aux": torch.zeros(2, dtype=torch.complex64)}),
        ("attention_mask", ShapeError, _lengths(attention_mask=_all_true(1, 1, 5, 5))),
        *(
            ("attention_mask", ShapeError, {"attention_mask": StructuredMask(_all_true(0), b, n, n, 0, 2, 0), **packed})
            for b, n in _OF_OTHERS
            for packed in ({}, _lengths())
        ),
        (
            "attention_mask", ShapeError,
            _lengths(attention_mask=PackedMask(torch.tensor([0, 4], dtype=torch.int32), 1, 4, 4, 2, 0)),
        ),
        *((name, ArgumentError, _lengths(**{name: [0, 2, 6]})) for name in _STARTS),
        *((name, DtypeError, _lengths(**{name: torch.tensor([0, 2.7, 6])})) for name in _STARTS),
        ("cu_seq_lens_q", ArgumentError, _lengths(cu_seq_lens_q=torch.tensor([0, 2, 6 + 2**32]))),
        *(
            (name, ArgumentError, _lengths(**{name: x}))
            for name in ("max_length_q", "max_length_k")
            for x in (4.5, _NAN, "4", [4], -4, True, torch.tensor(4.5), torch.tensor([4, 4]))
        ),
        *((name, ArgumentError, {name: _NAN}) for name in ("scaling", "softcap")),
        ("s_aux", ShapeError, {"s_aux": torch.zeros(3)}),
        ("key", DtypeError, {"key": torch.zeros(1, 2, LENGTH, 16, dtype=torch.float64)}),
        ("attention_mask", ShapeError, {"attention_mask": _all_true(1, 1, 6, 9)}),
        ("max_length_k", ArgumentError, _lengths(max_length_k=1)),
        ("position_ids", ArgumentError, {"position_ids": torch.zeros((1, LENGTH), device="meta")}),
        *(("deterministic", ArgumentError, {"deterministic": x}) for x in ("yes", 1.5)),
    ],
)  # fmt: skip
def test_refused_by_name(
    argument: str, error: type[Exception], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error) as caught:
        _attend(**options)
    assert type(caught.value) is error
    assert f"omniattn.integrations.transformers(): argument '{argument}'" in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_is_handed_on(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    name = "attention_varlen" if packed else "attention"
    function = getattr(oa, name)

    def recorded(*arrays: Any, **options: Any) -> Any:
        got.append(options.get("deterministic"))
        return function(*arrays, **options)

    monkeypatch.setattr(oa, name, recorded)
    for given in (True, False, None):
        _attend(deterministic=given, **(_lengths() if packed else {}))
    assert got == [True, False, None]


def test_padding_in_parts_counts_beside_lengths() -> None:
    rows = torch.tensor([[True, True, False, True, True, True]])
    parts = StructuredMask(rows, 1, LENGTH, LENGTH, 0, -1, 0)
    want = _attend(attention_mask=parts.visible(), **_lengths())
    torch.testing.assert_close(_attend(attention_mask=parts, **_lengths()), want, rtol=0, atol=1e-6)
    without = _attend(**_lengths())
    assert not torch.allclose(want, without)


def test_lengths_in_tensors_of_one() -> None:
    want = _attend(**_lengths())
    wide = torch.tensor([0, 2, LENGTH])
    got = _attend(**_lengths(cu_seq_lens_q=wide, cu_seq_lens_k=wide, max_length_q=torch.tensor(4)))
    assert torch.equal(got, want)


def test_autocast_leaves_float64() -> None:
    arrays = {name: torch.randn(1, 2, LENGTH, 16, dtype=torch.float64) for name in ("query", "key", "value")}
    want = _attend(**arrays)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = _attend(**arrays)
        sdpa = torch.nn.functional.scaled_dot_product_attention(*arrays.values(), is_causal=True)
    assert got.dtype == sdpa.dtype == torch.float64
    assert torch.equal(got, want)
