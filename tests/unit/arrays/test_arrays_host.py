"""NumPy arrays, CPU views, and rounding into them."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest

import omniattn
from omniattn import arrays
from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError, UnsupportedError


def test_import_loads_no_framework() -> None:
    code = (
        "import sys; from omniattn import arrays; "
        "print(sorted({'torch', 'cupy', 'jax', 'jaxlib', 'numpy', 'cuda.bindings'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_numpy_facts() -> None:
    base = np.zeros((2, 3, 4, 8), dtype=np.float16)
    view = base.transpose(0, 2, 1, 3)[:, ::-1]
    t = arrays.describe(view, "k")
    assert (t.framework, t.device, t.ordinal, t.dtype, t.argument) == ("numpy", "cpu", 0, "float16", "k")
    assert t.shape == (2, 4, 3, 8)
    assert t.strides == (96, -8, 32, 1)
    assert t.ptr == base.ctypes.data + 3 * 8 * 2
    assert t.readonly is False
    assert t.obj is view
    view.flags.writeable = False
    assert arrays.describe(view, "k").readonly is True


def test_a_type_that_numpy_lacks_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UnsupportedError, match=r"pip install ml_dtypes.*fp16"):
        omniattn.KVCache(1, 16, 1, 64, like=np.zeros(1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_ml_dtypes(dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    t = arrays.describe(np.zeros((2, 8), dtype=getattr(ml_dtypes, dtype)), "q")
    assert t.dtype == dtype
    again = arrays.empty_like_framework(t, (3,), dtype)
    assert again.obj.dtype == getattr(ml_dtypes, dtype)


@pytest.mark.parametrize("thing", [[1.0], 3, None, "text", np.float32(1.0), {"a": 1}])
def test_no_array(thing: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        arrays.describe(thing, "q")
    assert "argument 'q': expected an array: torch, CuPy, JAX, NumPy, or any object with __dlpack__" in str(
        caught.value
    )
    assert type(thing).__qualname__ in str(caught.value)


def test_numpy_element_types_that_do_not_exist_here() -> None:
    for bad, text in (
        (np.zeros(2, np.complex64), "complex64"),
        (np.zeros(2, ">f4"), "float32 in foreign byte order"),
        (np.zeros(2, "O"), "object"),
        (np.zeros(2, [("a", "f4")]), "[('a', '<f4')]"),
        (np.zeros(2, "M8[s]"), "datetime64[s]"),
    ):
        with pytest.raises(DtypeError, match="argument 'mask'") as caught:
            arrays.describe(bad, "mask")
        assert caught.value.received == text


def test_numpy_strides_between_elements() -> None:
    packed = np.zeros(4, dtype=[("x", "f4"), ("y", "i1")])["x"]
    with pytest.raises(StrideError) as caught:
        arrays.describe(packed, "v")
    assert "multiples of the element size (4 bytes), received 5 bytes in dimension 0" in str(caught.value)
    assert arrays.describe(packed[:1], "v").shape == (1,)


@pytest.mark.parametrize("make", [lambda: np.ma.zeros(3), lambda: np.zeros((2, 2)).view(np.matrix)])
def test_numpy_subclasses_are_refused(make) -> None:
    with pytest.raises(UnsupportedError, match=r"numpy\.asarray"):
        arrays.describe(make(), "q")


def test_to_numpy_is_a_view_that_keeps_the_memory() -> None:
    source = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1, ::2]
    view = arrays.to_numpy(arrays.describe(source, "q"))
    np.testing.assert_array_equal(view, source)
    assert view.ctypes.data == source.ctypes.data
    assert not view.flags.writeable
    expected = source.copy()
    held = weakref.ref(source)
    del source
    gc.collect()
    assert held() is not None  # the view holds the tensor, which holds the array
    np.testing.assert_array_equal(view, expected)
    del view
    gc.collect()
    assert held() is None


def test_to_numpy_of_broadcast_bool_scalar_and_empty() -> None:
    mask = np.broadcast_to(np.array([True, False]), (3, 2))
    t = arrays.describe(mask, "mask")
    assert t.strides == (0, 1)
    np.testing.assert_array_equal(arrays.to_numpy(t), mask)
    assert arrays.to_numpy(arrays.describe(np.full((), 2.5), "x")).item() == 2.5
    empty = arrays.to_numpy(arrays.describe(np.zeros((0, 4), np.float16), "x"))
    assert (empty.shape, empty.dtype) == ((0, 4), np.float16)


def test_store_respects_strides() -> None:
    base = np.full((4, 6), np.nan, dtype=np.float16)
    arrays.store(arrays.describe(base[::2, ::-2], "out"), np.arange(6, dtype=np.float64).reshape(2, 3))
    np.testing.assert_array_equal(base[::2, ::-2], np.arange(6).reshape(2, 3))
    assert np.isnan(base).sum() == 18


def test_store_refuses() -> None:
    out = np.zeros(3, np.float32)
    with pytest.raises(ShapeError, match="argument 'out'"):
        arrays.store(arrays.describe(out, "out"), np.zeros(4))
    with pytest.raises(DtypeError, match="float16, bfloat16, float32, float64, int32 or bool, received int16"):
        arrays.store(arrays.describe(np.zeros(3, np.int16), "out"), np.zeros(3))
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="argument 'out': expected a writable array, received a read-only one"):
        arrays.store(arrays.describe(out, "out"), np.zeros(3))
    with pytest.raises(ArgumentError, match="a read-only array"):
        arrays.require_writable(arrays.describe(out, "out"))


def test_store_overflow_is_infinity_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    out = np.zeros(4, np.float16)
    arrays.store(arrays.describe(out, "out"), np.array([1e6, -1e6, np.nan, 1e-9]))
    np.testing.assert_array_equal(out, [np.inf, -np.inf, np.nan, 0])
    assert not recwarn.list


def _bfloat16_value(bits: int) -> float:
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])


def test_float64_to_bfloat16_rounds_once() -> None:
    # Just above a tie: by way of float32 it becomes the tie, and would go down to the even neighbour.
    tie = (_bfloat16_value(0x3F80) + _bfloat16_value(0x3F81)) / 2
    assert arrays.bfloat16_bits(np.array([tie]))[0] == 0x3F80
    assert arrays.bfloat16_bits(np.array([tie * (1 + 2.0**-50)]))[0] == 0x3F81
    odd_tie = (_bfloat16_value(0x3F81) + _bfloat16_value(0x3F82)) / 2
    assert arrays.bfloat16_bits(np.array([odd_tie]))[0] == 0x3F82
    assert arrays.bfloat16_bits(np.array([odd_tie * (1 - 2.0**-50)]))[0] == 0x3F81
    assert arrays.bfloat16_bits(np.array([-odd_tie * (1 - 2.0**-50)]))[0] == 0xBF81


def test_float64_to_bfloat16_against_exact_neighbours() -> None:
    rng = np.random.default_rng(5)
    exponents = rng.integers(-140, 128, 4000)
    values = rng.standard_normal(4000) * 2.0**exponents
    got = arrays.bfloat16_bits(values)
    table = np.arange(0x7F80, dtype=np.uint32)  # every finite magnitude, in order
    magnitudes = (table << 16).view(np.float32).astype(np.float64)
    for value, bits in zip(np.abs(values), got & 0x7FFF, strict=True):
        if bits == 0x7F80:
            assert value >= magnitudes[-1] + (magnitudes[-1] - magnitudes[-2]) / 2
            continue
        error = abs(magnitudes[bits] - value)
        for neighbour in (int(bits) - 1, int(bits) + 1):
            if 0 <= neighbour < 0x7F80:
                assert error <= abs(magnitudes[neighbour] - value)
    np.testing.assert_array_equal(got >> 15, np.signbit(values))


def test_bfloat16_of_special_values() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -1e300, 1e-300, 2.0**-133, 2.0**-134])
    expected = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F80, 0xFF80, 0x0000, 0x0001, 0x0000]
    assert arrays.bfloat16_bits(values).tolist() == expected
    nan = arrays.bfloat16_bits(np.array([np.nan, -np.nan], dtype=np.float32))
    assert ((nan & 0x7FFF) == 0x7FC0).all()
    all_bits = np.arange(1 << 16, dtype=np.uint32)
    finite = (all_bits & 0x7F80) != 0x7F80
    back = arrays.bfloat16_bits((all_bits << 16).view(np.float32))
    np.testing.assert_array_equal(back[finite], all_bits[finite])


def test_devices() -> None:
    a = arrays.describe(np.zeros(2), "q")
    b = arrays.describe(np.zeros(2), "cu_seqlens_k")
    arrays.require_same_device([a, b])
    b.device, b.ordinal = "cuda", 1
    with pytest.raises(DeviceError) as caught:
        arrays.require_same_device([a, b])
    assert str(caught.value) == "argument 'cu_seqlens_k': expected an array on cpu, like 'q', received one on cuda:1"
    with pytest.raises(DeviceError, match="expected an array on the CPU, received cuda:1"):
        arrays.to_numpy(b)


def test_cpu_calls_take_no_stream() -> None:
    t = arrays.describe(np.zeros(2), "q")
    assert arrays.prepare([t]) == 0
    with pytest.raises(ArgumentError, match="argument 'stream': expected None, because the arrays are on the CPU"):
        arrays.prepare([t], 0)
    arrays.release([t], 0)
    assert arrays.finish(t, 0) is t.obj
    assert arrays.current_stream(t) == 0


def test_empty_numpy() -> None:
    t = arrays.empty_like_framework(arrays.describe(np.zeros(2), "q"), (2, 0, 3), "float32")
    assert (t.shape, t.dtype, t.readonly, t.size) == ((2, 0, 3), "float32", False, 0)
    assert arrays.contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert arrays.contiguous_strides(()) == ()


def test_element_types_without_numpy_views() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    t = arrays.describe(np.zeros(2, ml_dtypes.float8_e5m2), "k")
    with pytest.raises(DtypeError, match=r"argument 'k'.*received float8_e5m2"):
        arrays.to_numpy(t)
    assert "float8_e5m2" in repr(t)
    assert "cpu" in repr(t)
