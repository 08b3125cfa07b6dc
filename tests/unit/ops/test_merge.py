"""merge_states on the CPU: the equation, out=, aliasing, empty sides, streams."""

from __future__ import annotations

import numpy as np
import pytest

import omniattn
from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError
from omniattn.testing import assert_close

State = tuple[np.ndarray, np.ndarray]


def state(seed: int, dtype: str = "float32", packed: bool = False) -> State:
    """A partial output, and an LSE with empty rows in it."""
    rng = np.random.default_rng(seed)
    o = rng.standard_normal((2, 5, 3, 16)).astype(dtype)
    lse = (4 * rng.standard_normal((2, 3, 5))).astype(np.float32)
    lse[0, seed % 3] = -np.inf
    return (o[0], lse[0]) if packed else (o, lse)


def by_definition(a: State, b: State) -> State:
    """The equation in float64, row by row."""
    (o_a, lse_a), (o_b, lse_b) = ((o.astype(np.float64), lse.astype(np.float64)) for o, lse in (a, b))
    o, lse = np.zeros_like(o_a), np.full_like(lse_a, -np.inf)
    for index in np.ndindex(lse.shape):
        row = (*index[:-2], index[-1], index[-2])
        sides = [(x[index], y[row]) for x, y in ((lse_a, o_a), (lse_b, o_b)) if x[index] != -np.inf]
        if sides:
            lse[index] = np.logaddexp.reduce([x for x, _ in sides])
            o[row] = sum(np.exp(x - lse[index]) * y for x, y in sides)
    return o, lse


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "atol"), [("float16", 2e-3), ("float32", 2e-6), ("float64", 1e-6)])
def test_equation(dtype: str, atol: float, packed: bool) -> None:
    a, b = state(0, dtype, packed), state(1, dtype, packed)
    o, lse = omniattn.merge_states(*a, *b)
    expected_o, expected_lse = by_definition(a, b)
    assert (o.dtype, o.shape) == (a[0].dtype, a[0].shape)
    assert (lse.dtype, lse.shape) == (np.float32, a[1].shape)
    assert_close(o, expected_o, atol=atol)
    assert_close(lse, expected_lse, atol=2e-6)


def test_two_halves_of_the_keys_are_the_whole() -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, n, 2, 8)).astype(np.float32) for n in (6, 10, 10))
    halves = [omniattn.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(0, 3), slice(3, 10))]
    o, lse = omniattn.merge_states(*halves[0], *halves[1])
    expected_o, expected_lse = omniattn.attention(q, k, v, return_lse=True)
    assert_close(o, expected_o, atol=2e-6)
    assert_close(lse, expected_lse, atol=2e-6)


def test_an_empty_side_is_not_looked_at() -> None:
    (o_a, lse_a), (o_b, lse_b) = state(0), state(1)
    lse_b[:] = -np.inf
    o_b[:] = np.nan
    lse_a[1] = -np.inf
    o_a[1] = np.inf
    o, lse = omniattn.merge_states(o_a, lse_a, o_b, lse_b)
    seen = np.isfinite(lse_a[0]).T
    assert np.array_equal(o[0][seen], o_a[0][seen])
    assert (o[1] == 0).all()
    assert np.array_equal(lse, lse_a)


def test_a_state_that_is_not_a_number_stays_visible() -> None:
    (o_a, lse_a), (o_b, lse_b) = state(0), state(1)
    lse_a[1, 0, 0], lse_b[1, 0, 0] = -np.inf, np.nan
    o, lse = omniattn.merge_states(o_a, lse_a, o_b, lse_b)
    assert np.isnan(lse[1, 0, 0])
    assert np.isnan(o[1, 0, 0]).all()
    assert np.isnan(lse).sum() == 1


def test_large_logarithms_do_not_overflow() -> None:
    (o_a, lse_a), (o_b, lse_b) = state(0), state(1)
    lse_a[:], lse_b[:] = 3e38, 1e38
    o, lse = omniattn.merge_states(o_a, lse_a, o_b, lse_b)
    assert np.array_equal(o, o_a)
    assert np.array_equal(lse, lse_a)


def test_out_is_written_and_given_back() -> None:
    a, b = state(0), state(1)
    expected, _ = omniattn.merge_states(*a, *b)
    wide = np.full((2, 5, 3, 32), 7.5, np.float32)
    out = wide[..., :16]
    o, _ = omniattn.merge_states(*a, *b, out=out)
    assert o is out
    assert np.array_equal(out, expected)
    assert (wide[..., 16:] == 7.5).all()


@pytest.mark.parametrize("which", [0, 1])
def test_out_may_be_one_of_the_inputs(which: int) -> None:
    a, b = state(0), state(1)
    expected, expected_lse = omniattn.merge_states(*a, *b)
    o, lse = omniattn.merge_states(*a, *b, out=(a, b)[which][0])
    assert o is (a, b)[which][0]
    assert np.array_equal(o, expected)
    assert np.array_equal(lse, expected_lse)


def test_the_result_has_memory_of_its_own() -> None:
    a, b = state(0), state(1)
    before = [x.copy() for x in (*a, *b)]
    o, lse = omniattn.merge_states(*a, *b)
    for x, y in zip((*a, *b), before, strict=True):
        assert np.array_equal(x, y)
        assert not np.shares_memory(o, x)
        assert not np.shares_memory(lse, x)


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((2, 5, 3, 8), np.float32), ShapeError),
        (np.zeros((2, 5, 3, 16), np.float16), DtypeError),
        (np.zeros((2, 5, 3, 32), np.float32)[..., ::2], StrideError),
        (np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (2, 5, 3, 16), (0, 0, 0, 4)), StrideError),
        (np.frombuffer(bytes(2 * 5 * 3 * 16 * 4), np.float32).reshape(2, 5, 3, 16), ArgumentError),
        ("no array", ArgumentError),
    ],
)
def test_unusable_out(out: object, error: type[ArgumentError]) -> None:
    with pytest.raises(error) as caught:
        omniattn.merge_states(*state(0), *state(1), out=out)
    assert caught.value.argument == "out"


@pytest.mark.parametrize("stream", [0, 7])
def test_a_stream_with_arrays_on_the_cpu(stream: int) -> None:
    out = np.full((2, 5, 3, 16), 7.5, np.float32)
    with pytest.raises(ArgumentError, match="'stream'") as caught:
        omniattn.merge_states(*state(0), *state(1), out=out, stream=stream)
    assert not isinstance(caught.value, DeviceError)
    assert (out == 7.5).all()


@pytest.mark.parametrize("shape", [(0, 5, 3, 16), (2, 0, 3, 16), (2, 5, 0, 16), (0, 3, 16)])
def test_nothing_to_merge(shape: tuple[int, ...]) -> None:
    o = np.zeros(shape, np.float32)
    lse = np.zeros((*shape[:-3], shape[-2], shape[-3]), np.float32)
    got, got_lse = omniattn.merge_states(o, lse, o, lse)
    assert got.shape == shape
    assert got_lse.shape == lse.shape
