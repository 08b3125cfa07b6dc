"""Cases of registry rows on the CPU: each row's own formats, right results pass, faults are found."""

from __future__ import annotations

import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest

import omniattn
from omniattn.kv.formats import IN_ORDER
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.registry.decode import QUERY_TILES, SHARED_TILES
from omniattn.select.cache import append_spec, combine_spec, decode_spec
from omniattn.testing.cache_cases import CACHE_OPS, Formats, cache_cases, decode_errors, formats_of
from omniattn.testing.frameworks import E4m3Array, NumpyFramework
from omniattn.testing.gradient_cases import BACKWARD_OPS
from omniattn.testing.latent_cases import LATENT_OPS
from omniattn.testing.rows import cases_of, run_row

ROWS = [s for s in REGISTRY if s.op in (*CACHE_OPS, *LATENT_OPS) and s.dtype == "float16"]


def _cache(formats: Formats, dim: int) -> omniattn.KVCache:
    if formats.layout != IN_ORDER:
        return omniattn.KVCache(1, 1, 1, dim, like=np.zeros(1, np.float32), **formats._asdict())
    dtype = ml_dtypes.float8_e4m3fn if formats.k_dtype == "fp8" else np.int8
    return omniattn.KVCache.from_arrays(*(np.zeros((1, 1, 1, dim), dtype) for _ in "kv"))


@pytest.mark.parametrize("spec", ROWS, ids=lambda spec: spec.name)
def test_each_row_of_caches_passes_on_the_reference(spec: KernelSpec) -> None:
    result = run_row(NumpyFramework(), spec)
    assert not result.failures
    assert result.cases == 3
    assert result.worst <= 0.5


@pytest.mark.parametrize(
    "spec",
    [s for s in REGISTRY if s.op in CACHE_OPS and not s.op.startswith("dequantize")],
    ids=lambda spec: spec.name,
)
def test_each_row_of_caches_is_what_its_cases_choose(spec: KernelSpec) -> None:
    dtype = "bfloat16" if spec.dtype == "uint8" else spec.dtype
    formats = formats_of(spec)
    for case in cache_cases(spec):
        dim = case._dim
        cache = _cache(formats, dim)
        k, v, tiles = cache.k_format, cache.v_format, (1, 1)
        if spec.op in ("decode", "decode_combine") and spec.block_m > 8 * QUERY_TILES[spec.head_dim][-1]:
            assert k.bits == v.bits == 16  # others have no such rows (select.decode_ways.query_tiles)
        rows = case.q_len * (8 if case.q_len > 1 else 4)
        if spec.op in ("decode", "decode_combine"):
            able = (*((n, 1) for n in QUERY_TILES[spec.head_dim]), *SHARED_TILES.get(spec.head_dim, ()))
            tiles = next(tiles for tiles in able if rows <= 8 * tiles[0] * tiles[1])
        chosen = {
            "decode": lambda k=k, v=v, tiles=tiles: decode_spec(dtype, k, v, *tiles, beside=spec.beside),
            "decode_combine": lambda k=k, tiles=tiles: combine_spec(dtype, k.row_dim, *tiles),
            "append": lambda k=k, v=v: append_spec(dtype, k, v),
            "copy_blocks": lambda: by_name("kv_copy_sm80"),
        }[spec.op]()
        assert chosen == spec


@pytest.mark.parametrize("op", ["decode", "append"])
def test_a_wrong_result_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(s for s in ROWS if s.op == op)
    right = omniattn.append

    def wrong(cache: omniattn.KVCache, k: np.ndarray, v: np.ndarray, **more: object) -> None:
        right(cache, k, v * np.float16(1.02), **more)

    monkeypatch.setattr(omniattn, "append", wrong)
    assert run_row(NumpyFramework(), spec).failures


def test_copies_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cache_cases(by_name("kv_copy_sm80")):
        case = dataclasses.replace(case, dtype="float16")
        numbers = case.prepare()
        assert numbers.copies
        assert case.check(NumpyFramework(), numbers) == (0.0, "")
        with monkeypatch.context() as patch:
            patch.setattr(omniattn, "copy_blocks", lambda *_: None)
            assert case.check(NumpyFramework(), numbers)[1] == "k differs from the reference"


@pytest.mark.parametrize("fault", ["nan", "lse", "empty row", "o"])
def test_errors_of_decoding(fault: str) -> None:
    rng = np.random.default_rng(0)
    ref_o, ref_lse = rng.standard_normal((2, 1, 4, 8)), rng.standard_normal((2, 4, 1))
    ref_o[1], ref_lse[1] = 0.0, -np.inf
    o, lse = ref_o.copy(), ref_lse.copy()
    assert decode_errors(o, lse, ref_o, ref_lse, "float16", "io") == (0.0, 0.0)
    if fault == "nan":
        o[0, 0, 0, 0] = np.nan
    elif fault == "lse":
        lse[0] += 1e-3
    elif fault == "empty row":
        o[1, 0, 0, 0] = 1e-6
    else:
        o[0] *= 1.01
    assert max(decode_errors(o, lse, ref_o, ref_lse, "float16", "io")) > 1.0


def test_every_row_has_cases_that_travel_between_processes() -> None:
    for spec in REGISTRY:
        cases = cases_of(spec)
        assert cases, spec.name
        assert list(pickle.loads(pickle.dumps(cases))) == list(cases)
        assert len({case.name for case in cases}) == len(cases)
    assert {s.op for s in REGISTRY if s.op in CACHE_OPS} == set(CACHE_OPS)


@pytest.mark.parametrize("op", ["append", "attention", "quantize"])
def test_numbers_travel_between_processes(op: str) -> None:
    spec = min((s for s in REGISTRY if s.op == op), key=lambda s: s.head_dim)
    numbers = cases_of(spec)[0].prepare()
    assert type(pickle.loads(pickle.dumps(numbers))) is type(numbers)


BACKWARD = [s for s in REGISTRY if s.op in BACKWARD_OPS and s.head_dim in (64, 256) and s.dtype == "float16"]


@pytest.mark.parametrize("spec", [*BACKWARD[:1], *[s for s in BACKWARD if s.op.endswith("_dq")][:1]],
                         ids=lambda spec: spec.name)  # fmt: skip
def test_rows_of_the_backward_pass_on_the_reference(spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_row(NumpyFramework(), spec)
    assert not result.failures
    assert result.cases == len(cases_of(spec))
    right = omniattn.attention_backward
    monkeypatch.setattr(
        omniattn, "attention_backward", lambda *x, **given: tuple(y * np.float16(1.01) for y in right(*x, **given))
    )
    assert run_row(NumpyFramework(), spec).failures


def test_every_row_has_cases() -> None:
    assert all(cases_of(spec) for spec in REGISTRY)


def test_bytes_as_e4m3_numbers() -> None:
    """For libraries without the type."""
    codes = np.arange(256, dtype=np.uint8)[:112]
    array = E4m3Array(codes.reshape(7, 16))
    found = omniattn.arrays.describe(array, "k")
    assert (found.dtype, tuple(found.shape)) == ("float8_e4m3fn", (7, 16))
    assert omniattn.arrays.e4m3_bytes(found).tobytes() == codes.tobytes()
