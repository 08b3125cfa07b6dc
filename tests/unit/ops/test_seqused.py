"""``seqused_q`` and ``seqused_k``, against packed sequences without the rows that do not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError
from omniattn.launch.structs import CLEAR_UNUSED
from omniattn.launch.used_rows import Cleared, build_clear
from omniattn.plan import engine
from omniattn.registry import by_name
from omniattn.runtime.device import DeviceInfo
from omniattn.testing import normal
from tests.unit.launch.launch_fakes import unpacked

HEADS, HEADS_KV, DIM = 4, 2, 16


def starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def rows_of(cu: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Rows that count."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(cu, used, strict=False)] + [np.arange(0)]).astype(int)


class Packed:
    """A call, and the same without the rows that do not count."""

    def __init__(self, pairs: list[tuple[int, int]], used_q: list[int] | None, used_k: list[int] | None) -> None:
        lengths_q, lengths_k = [p[0] for p in pairs], [p[1] for p in pairs]
        cu_q, cu_k = starts(lengths_q), starts(lengths_k)
        rows_q, rows_k = int(cu_q[-1]) + 2, int(cu_k[-1]) + 1
        self.q = normal((rows_q, HEADS, DIM), 1, "float32")
        self.k, self.v = (normal((rows_k, HEADS_KV, DIM), seed, "float32") for seed in (2, 3))
        self.longest = {"max_seqlen_q": max(lengths_q, default=0), "max_seqlen_k": max(lengths_k, default=0)}
        self.starts = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        self.used = {
            name: np.array(x, np.int32) for name, x in (("seqused_q", used_q), ("seqused_k", used_k)) if x is not None
        }
        counted_q, counted_k = (own if x is None else x for own, x in ((lengths_q, used_q), (lengths_k, used_k)))
        self.rows_q, self.rows_k = rows_of(cu_q, np.array(counted_q)), rows_of(cu_k, np.array(counted_k))
        self.own = {"cu_seqlens_q": starts(counted_q), "cu_seqlens_k": starts(counted_k)}

    def run(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        made: tuple[np.ndarray, np.ndarray] = oa.attention_varlen(
            self.q, self.k, self.v, **self.starts, **self.longest, **self.used, return_lse=True, **options
        )
        return made

    def expected(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        o, lse = np.zeros_like(self.q), np.full((HEADS, len(self.q)), -np.inf, "float32")
        q, k, v = self.q[self.rows_q], self.k[self.rows_k], self.v[self.rows_k]
        made = oa.attention_varlen(q, k, v, **self.own, **self.longest, return_lse=True, **options)
        o[self.rows_q], lse[:, self.rows_q] = made
        return o, lse


SOME = Packed([(5, 9), (0, 4), (7, 0), (3, 3)], [3, 0, 7, 2], [6, 4, 0, 0])


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_random_lengths(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=4))
    given_q, given_k = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    used_q = [data.draw(st.integers(0, p[0])) for p in pairs] if given_q else None
    used_k = [data.draw(st.integers(0, p[1])) for p in pairs] if given_k else None
    packed = Packed(pairs, used_q, used_k)
    options = {
        "causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.just((2, 1))),
        "softcap": data.draw(st.sampled_from([0.0, 3.0])),
    }  # fmt: skip
    for a, b in zip(packed.run(**options), packed.expected(**options), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_low_precision_quantizes_the_rows_that_count(precision: str) -> None:
    loud = Packed([(5, 9), (0, 4), (7, 0), (3, 3)], [3, 0, 7, 2], [6, 4, 0, 0])
    hidden = np.setdiff1d(np.arange(len(loud.k)), loud.rows_k)
    loud.k[hidden], loud.v[hidden] = 1e4, 1e4
    for a, b in zip(loud.run(precision=precision), loud.expected(precision=precision), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_count_is_never_read() -> None:
    packed = Packed([(5, 9), (3, 3)], None, [6, 1])
    hidden = np.setdiff1d(np.arange(len(packed.k)), packed.rows_k)
    packed.k[hidden] = packed.v[hidden] = np.nan
    o, lse = packed.run(causal=True)
    assert not np.isnan(o).any()
    assert not np.isnan(lse).any()


def test_sinks_and_one_mask_for_all() -> None:
    sinks = normal((HEADS,), 5, "float32")
    mask = np.random.default_rng(0).random((HEADS, 7, 9)) < 0.6
    for a, b in zip(SOME.run(sinks=sinks, mask=mask), SOME.expected(sinks=sinks, mask=mask), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_mask_for_each_sequence() -> None:
    mask = np.random.default_rng(1).random((4, 1, 7, 9)) < 0.6
    for a, b in zip(SOME.run(mask=mask), SOME.expected(mask=mask), strict=True):
        np.testing.assert_array_equal(a, b)


def test_score_mods_get_the_number_of_the_callers_sequence() -> None:
    bias = normal((4,), 7, "float32")
    mod = oa.ScoreMod(
        "score + bias[b] * k + (b > 1)", mask="k < 7 - b",
        reference=lambda score, b, h, q, k, bias: np.where(k < 7 - b, score + bias[b] * k + (b > 1), -np.inf),
        bias=bias,
    )  # fmt: skip
    for a, b in zip(SOME.run(score_mod=mod), SOME.expected(score_mod=mod), strict=True):
        np.testing.assert_array_equal(a, b)


def test_factors_of_e4m3_arrays() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    packed = Packed([(5, 9), (7, 4)], [3, 7], [6, 4])
    for name in "qkv":
        setattr(packed, name, getattr(packed, name).astype(ml_dtypes.float8_e4m3fn))
    factors = {f"descale_{name}": np.random.default_rng(i).random((2, HEADS_KV), np.float32) + 0.5
               for i, name in enumerate("qkv")}  # fmt: skip
    made, lse = packed.run(**factors)
    q, k, v = packed.q[packed.rows_q], packed.k[packed.rows_k], packed.v[packed.rows_k]
    o, own = oa.attention_varlen(q, k, v, **packed.own, **packed.longest, return_lse=True, **factors)
    np.testing.assert_array_equal(made[packed.rows_q], o)
    np.testing.assert_array_equal(lse[:, packed.rows_q], own)


def test_gradients() -> None:
    o, lse = SOME.run(causal=True)
    do = normal(SOME.q.shape, 9, "float32")
    given_ = {**SOME.starts, **SOME.longest, **SOME.used}
    made = oa.attention_varlen_backward(do, SOME.q, SOME.k, SOME.v, o, lse, causal=True, **given_)
    rows, keys = SOME.rows_q, SOME.rows_k
    own = oa.attention_varlen_backward(
        do[rows], SOME.q[rows], SOME.k[keys], SOME.v[keys], o[rows], np.ascontiguousarray(lse[:, rows]), causal=True,
        **SOME.own, **SOME.longest,
    )  # fmt: skip
    for whole, part, at in zip(made, own, (rows, keys, keys), strict=True):
        expected = np.zeros_like(whole)
        expected[at] = part
        np.testing.assert_array_equal(whole, expected)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 64), (1000, 65)])
def test_launch_that_clears(batch: int, rows: int) -> None:
    """A slot of 64 rows for any division of the rows among the sequences."""
    spec = by_name("clear_unused_sm80")
    arrays = [Cleared("dq", "q", rows, 4, 64, (0, 256, 64)), Cleared("dk", "k", 3 * rows, 2, 64, (0, 128, 64))]
    (record,) = build_clear(spec, batch, arrays)
    values = unpacked(record.arguments, CLEAR_UNUSED)
    assert record.grid == (-(-3 * rows // 64) + batch, 2, 1)
    assert (values["batch"], values["rows"], values["heads"]) == (batch, (rows, 3 * rows, 0), (4, 2, 0))
    assert [(p.operand, p.offset) for p in record.pointers] == [
        ("dq", 0), ("dk", 8), ("cu_seqlens_q", 24), ("cu_seqlens_k", 32), ("seqused_q", 48), ("seqused_k", 56)
    ]  # fmt: skip


def test_nothing_to_clear() -> None:
    spec = by_name("clear_unused_sm80")
    assert build_clear(spec, 0, [Cleared("o", "q", 5, 4, 64, (0, 256, 64))]) == ()
    assert build_clear(spec, 3, [Cleared("o", "q", 0, 4, 64, (0, 256, 64))]) == ()


@pytest.mark.parametrize("names", [("seqused_q", "seqused_k"), ("seqused_q",), ("seqused_k",), ()])
def test_launches(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU would have them: the forward clears queries, the backward what is used of neither."""
    describe = engine.describe

    def on_gpu(call: Any, raw: Any) -> dict[str, Any]:
        tensors = describe(call, raw)
        for i, t in enumerate(tensors.values()):
            t.device, t.framework, t.ptr = "cuda", "torch", 0x10000 * (i + 1)
        return tensors

    call = Packed([(5, 9), (0, 4), (7, 0)], None, None)
    q, k, v = (x.astype(np.float16) for x in (call.q, call.k, call.v))
    used = {name: np.zeros(3, np.int32) for name in names}
    monkeypatch.setattr(engine, "describe", on_gpu)
    monkeypatch.setattr(oa.runtime, "has_tensor_maps", lambda: True)
    info = DeviceInfo(0, "Hopper", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(oa.runtime, "device_info", lambda ordinal: info)
    explained = oa.explain(q, k, v, **call.starts, **call.longest, **used)
    assert explained.problem.used == ("seqused_q" in names, "seqused_k" in names)
    assert [x.kernel for x in explained.launches].count("clear_unused_sm80") == ("seqused_q" in names)
    if "seqused_q" in names:  # behind what merges partial results, which has garbage of rows that are not used
        assert explained.launches[-1].kernel == "clear_unused_sm80"
    lse = np.zeros((HEADS, len(q)), np.float32)
    backward = oa.explain(oa.attention_varlen_backward, q, q, k, v, q, lse, **call.starts, **call.longest, **used)
    assert [x.kernel for x in backward.launches].count("clear_unused_sm80") == bool(names)
    only_dk = oa.explain(
        oa.attention_varlen_backward, q, q, k, v, q, lse, wanted=("dk",), **call.starts, **call.longest, **used
    )
    assert [x.kernel for x in only_dk.launches].count("clear_unused_sm80") == ("seqused_k" in names)


def test_explain_needs_packed_sequences() -> None:
    assert oa.explain(SOME.q, SOME.k, SOME.v, **SOME.starts, **SOME.longest, **SOME.used).problem.batch == 4
    with pytest.raises(ArgumentError, match=r"'seqused_k': expected nothing, without cu_seqlens_q"):
        oa.explain(SOME.q[None], SOME.k[None], SOME.v[None], seqused_k=np.ones(1, np.int32))


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_errors(name: str) -> None:
    packed = Packed([(4, 4), (2, 2)], None, None)
    call = (packed.q, packed.k, packed.v)
    options = {**packed.starts, **packed.longest}
    cases: list[tuple[Any, type[Exception], str]] = [
        (np.array([1, 2]), DtypeError, "expected int32, received int64"),
        (np.array([[1, 2]], np.int32), ShapeError, r"received \(1, 2\)"),
        (np.array([1, 0, 2, 0], np.int32)[::2], StrideError, "expected a contiguous array, received stride 2"),
        (np.array([1, 2, 1], np.int32), ShapeError, r"\(batch,\) = \(2,\), received \(3,\)"),
        (np.array([5, 2], np.int32), ArgumentError, "from 0 to 4, the rows of sequence 0, received 5"),
        (np.array([4, -1], np.int32), ArgumentError, "from 0 to 2, the rows of sequence 1, received -1"),
    ]
    for value, error, text in cases:
        with pytest.raises(error, match=rf"attention_varlen\(\): argument '{name}'.*{text}"):
            oa.attention_varlen(*call, **options, **{name: value})
    with pytest.raises(ArgumentError, match=rf"argument '{name}': expected an array.*received builtins\.list"):
        oa.attention_varlen(*call, **options, **{name: [1, 2]})
    fine = {name: np.array([1, 2], np.int32)}
    with pytest.raises(ArgumentError, match=r"'cu_seqlens_k'.*received None"):
        oa.attention_varlen(*call, **{**options, "cu_seqlens_k": None}, **fine)
    bad = np.array([0, 5, 2], np.int32)
    with pytest.raises(ArgumentError, match=r"'cu_seqlens_q'.*never decrease"):
        oa.attention_varlen(*call, **{**options, "cu_seqlens_q": bad}, **fine)
    qk = oa.quantize_qk(*call[:2], **options)
    v8 = oa.quantize_v(call[2], cu_seqlens_k=packed.starts["cu_seqlens_k"], max_seqlen_k=4)
    with pytest.raises(ArgumentError, match=f"'{name}': expected None, because quantized operands"):
        oa.attention_varlen(qk.q, qk.k, v8, precision="int8", **fine)
