"""Wrong calls of the public functions: an error that names argument, expected and received, and `out` left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import omniattn
from omniattn import Int4, Int8, reference
from omniattn.errors import ArgumentError
from omniattn.testing import assert_close
from tests.unit.argument_faults import (
    ATTENTION,
    ATTENTION_VARLEN,
    MARK,
    MERGE_STATES,
    Call,
    Fault,
    check_error,
    good_states,
    head_axis,
    logits_shape,
    problems,
)


def run_fault(function: Callable[..., Any], fault: Fault, data: st.DataObject, call: Call) -> None:
    broken = fault(data, call)
    arguments = dict(call)
    before = call["out"].tobytes() if isinstance(call["out"], np.ndarray) else None
    with pytest.raises(broken.error) as caught:
        function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    check_error(caught.value, function.__name__, broken)
    if before is not None:
        assert call["out"].tobytes() == before


#: Of each fault, which has a few forms at most.
thorough = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("fault", ATTENTION, ids=lambda fault: fault.__name__)
@thorough
@given(data=st.data())
def test_attention(fault: Fault, data: st.DataObject):
    run_fault(omniattn.attention, fault, data, data.draw(problems(varlen=False)))


@pytest.mark.parametrize("fault", ATTENTION_VARLEN, ids=lambda fault: fault.__name__)
@thorough
@given(data=st.data())
def test_attention_varlen(fault: Fault, data: st.DataObject):
    run_fault(omniattn.attention_varlen, fault, data, data.draw(problems(varlen=True)))


@pytest.mark.parametrize("varlen", [False, True])
@thorough
@given(data=st.data())
def test_valid_calls(varlen: bool, data: st.DataObject):
    """The calls that the faults start from, with every option that a fault touches given a good value."""
    call = data.draw(problems(varlen))
    function = omniattn.attention_varlen if varlen else omniattn.attention
    oracle = reference.attention_varlen if varlen else reference.attention
    rng = np.random.default_rng(0)
    heads = call["q"].shape[head_axis(call)]
    extra = {
        "window": data.draw(st.none() | st.tuples(st.integers(-1, 4), st.integers(-1, 2**40))),
        "softcap": data.draw(st.sampled_from([0, 0.0, 2.5])),
        "softmax_scale": data.draw(st.sampled_from([None, 0.25, 1, np.float32(0.5)])),
        "mask": data.draw(st.sampled_from([None, rng.random(logits_shape(call)) < 0.8])),
        "sinks": data.draw(st.sampled_from([None, np.zeros(heads, np.float32), np.ones(heads, call["q"].dtype)])),
    }
    out, arguments = call["out"], {**call, **extra}
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    o, lse = function(q, k, v, **arguments, precision="exact", return_lse=True)
    assert o is out
    assert lse.dtype == np.float32
    arguments.pop("out")
    o_ref, lse_ref = oracle(q, k, v, **arguments, compute_dtype=np.float64)
    # Rounding of scores in fp32 grows with them.
    rounding = 4e-6 * max(1.0, np.abs(lse_ref[np.isfinite(lse_ref)]).max(initial=0.0) / 4)
    assert_close(o, o_ref, atol=2e-3 if q.dtype == np.float16 else rounding)
    assert_close(lse, lse_ref, atol=rounding)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "precision",
    ["int8", "int4", Int8(), Int4(), Int8(granularity="per_token", smooth_q=True, smooth_v=True, pv="fp16")],
    ids=str,
)
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_low_precisions_are_taken(varlen: bool, precision: str | Int8, data: st.DataObject):
    """On the CPU, every knob; a name is short for the object with its defaults."""
    call = data.draw(problems(varlen))
    call.pop("out")
    function = omniattn.attention_varlen if varlen else omniattn.attention
    q, k, v = (call.pop(name) for name in ("q", "k", "v"))
    o, lse = function(q, k, v, **call, precision=precision, return_lse=True)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert not np.isnan(o).any()
    assert not np.isnan(lse).any()
    knobs = {"int8": Int8(), "int4": Int4()}.get(precision, precision) if isinstance(precision, str) else precision
    again = function(q, k, v, **call, precision=knobs)
    np.testing.assert_array_equal(o, again)


@pytest.mark.parametrize("precision", ["int16", "INT8", None, 8, Int8, ("int8",)], ids=str)
def test_wrong_precision_names_what_is_expected(precision: Any):
    x = np.zeros((1, 2, 1, 8), np.float32)
    for function in (omniattn.attention, omniattn.explain):
        with pytest.raises(ArgumentError) as caught:
            function(x, x, x, precision=precision)
        text = str(caught.value)
        assert "'precision'" in text
        assert "expected one of 'exact', 'int8', 'int4', 'fp8', 'auto', an Int8, an Int4, an Fp8 or an Auto" in text
        assert repr(precision) in text


@pytest.mark.parametrize("varlen", [False, True])
@settings(deadline=None, max_examples=20)
@given(
    data=st.data(),
    name=st.sampled_from(["is_causal", "scale", "dropout", "attn_mask", "Causal"]) | st.from_regex(r"x_[a-z]{1,8}"),
)
def test_unknown_keyword(varlen: bool, data: st.DataObject, name: str):
    """Python itself rejects it, because no function takes **kwargs."""
    call = data.draw(problems(varlen))
    out = call["out"]
    function = omniattn.attention_varlen if varlen else omniattn.attention
    with pytest.raises(TypeError) as caught:
        function(call.pop("q"), call.pop("k"), call.pop("v"), **call, **{name: 1})
    assert name.strip() in str(caught.value)
    assert np.all(out == MARK)


def test_options_are_keyword_only():
    q = np.zeros((1, 2, 1, 8), np.float32)
    with pytest.raises(TypeError, match="positional"):
        omniattn.attention(q, q, q, "NHD")


@pytest.mark.parametrize(
    "fault",
    MERGE_STATES,
    ids=lambda fault: fault.__name__,
)
@thorough
@given(data=st.data())
def test_merge_states(fault: Fault, data: st.DataObject):
    call = good_states(data)
    broken = fault(data, call)
    with pytest.raises(broken.error) as caught:
        omniattn.merge_states(**call)
    check_error(caught.value, "merge_states", broken)


@thorough
@given(data=st.data())
def test_merge_states_valid(data: st.DataObject):
    call = good_states(data)
    o, lse = omniattn.merge_states(**call)
    o_ref, lse_ref = reference.merge_states(**call, compute_dtype=np.float64)
    assert o.dtype == call["o_a"].dtype
    assert_close(o, o_ref, atol=2e-3 if o.dtype == np.float16 else 4e-6)
    assert_close(lse, lse_ref, atol=4e-6)
