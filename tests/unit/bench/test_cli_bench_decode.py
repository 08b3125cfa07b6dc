"""``omniattn bench decode``: shapes, bytes, ratios, forms; the whole run on torch tensors on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

import omniattn
from omniattn.bench import decode, sustained
from omniattn.bench.ceilings import Ceilings
from omniattn.bench.decode_report import (
    DECODE_SHAPES,
    WITH_PREFIX,
    DecodeMeasurement,
    DecodeReport,
    DecodeShape,
    filter_decode_shapes,
)
from omniattn.bench.timing import Timing
from omniattn.cli import main
from omniattn.errors import ArgumentError
from tests.unit.bench.bench_fakes import DecodeTorch, WallClock, WithMemory

SHAPES = (
    DecodeShape(2, 4, 2, 40, 128),
    DecodeShape(3, 4, 1, 24, 128, block_size=16),
    DecodeShape(3, 2, 1, 24, 128, block_size=8, ragged=True),
    DecodeShape(2, 4, 2, 40, 128, queries=5),
    DecodeShape(3, 2, 1, 24, 128, block_size=8, prefix=16),
)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(decode, "require_torch", DecodeTorch)
    monkeypatch.setattr(sustained, "TorchClock", WallClock)
    monkeypatch.setattr(decode, "measure_ceilings", lambda *_: Ceilings(100.0, 1.0))
    monkeypatch.setattr("omniattn.cli.bench.filter_decode_shapes", lambda _: SHAPES)


# Shapes


def test_shapes_are_those_of_the_goals() -> None:
    names = [shape.name for shape in DECODE_SHAPES]
    assert len(set(names)) == len(names)
    for batch in (1, 32, 128, 512):
        assert f"b{batch} h8/1 t8192 d128" in names
    for name in ("b1 h64/8 t131072 d128", "b16 h64/8 t8192 d128", "b64 h64/8 t32768 d128"):
        assert name in names
    for size in (1, 16, 64, 256):
        assert f"b128 h8/1 t8192 d128 p{size}" in names
    assert "b128 h8/1 t8192 d128 p64 ragged" in names
    for name in ("b32 h32/8 t8192 d128 q16", "b32 h71/1 t8192 d64", "b32 h32/8 t8192 d96", "b256 h32/8 t128 d128"):
        assert name in names
    for name in ("b64 h8/1 t8448", "b256 h8/1 t8448", "b64 h64/8 t33024"):
        assert any(found.startswith(f"{name} d128 p64 shared") for found in names)


def test_bytes_are_those_of_the_format_tables() -> None:
    shape = DecodeShape(2, 8, 2, 100)
    tokens = 2 * 100 * 2
    assert shape.cache_bytes("bf16") == tokens * 512
    assert shape.cache_bytes("fp8") == shape.cache_bytes("int8") == tokens * 2 * (128 + 4)
    assert shape.cache_bytes("int4") == tokens * 2 * (64 + 4)
    assert shape.cache_bytes("int4", 32) == tokens * 2 * (64 + 16)
    caches = shape.cache_bytes("bf16") + shape.cache_bytes("int4", 32)
    assert shape.needed_bytes([("bf16", None), ("int4", 32)]) >= caches + 2 * shape.cache_bytes("bf16")


def test_ragged_lengths_have_the_same_tokens_in_all() -> None:
    shape = next(shape for shape in DECODE_SHAPES if shape.ragged)
    lengths = shape.lengths()
    assert lengths == shape.lengths()
    assert len(lengths) == shape.batch
    assert sum(lengths) == shape.batch * shape.seqlen
    assert min(lengths) >= 1
    assert max(lengths) > 3 * shape.seqlen
    assert len(set(lengths)) > 100
    assert DecodeShape(3, 8, 1, 70).lengths() == [70] * 3


def test_shared_tokens_count_once() -> None:
    shape = DecodeShape(3, 8, 2, 24, block_size=8, prefix=16)
    assert shape.new_tokens() == [24, 8, 8]
    assert shape.cache_bytes("bf16") == (16 + 3 * 8) * 2 * 512
    assert shape.cache_bytes("bf16", shared=False) == 3 * 24 * 2 * 512
    assert shape.name.endswith("p8 shared16")


def test_filters() -> None:
    assert filter_decode_shapes([]) == DECODE_SHAPES
    assert [s.batch for s in filter_decode_shapes(["h8/1 b1", "b512"])] == [1, 512]
    assert {s.block_size for s in filter_decode_shapes(["p16", "p1"])} == {1, 16}
    assert [s.batch for s in filter_decode_shapes(["h8/1 contiguous"])] == [1, 32, 128, 512]
    with pytest.raises(ArgumentError, match="t131072"):
        filter_decode_shapes(["p17"])


# Runs


@pytest.mark.frameworks
def test_every_format_runs_is_checked_and_compared(on_the_cpu: None) -> None:
    report = decode.run_decode(SHAPES, anchor="fa2", formats=tuple(decode.FORMATS), iters=2)
    assert report.shapes == SHAPES
    with_prefix = {name + WITH_PREFIX: fmt for name, fmt in decode.FORMATS.items() if fmt.shares}
    assert set(report.keys) == {*decode.FORMATS, *with_prefix, "fa2"}
    assert set(decode.FORMATS) - {key.removesuffix(WITH_PREFIX) for key in with_prefix} == {
        "int4w128", "bf16det", "int4det"
    }  # fmt: skip
    for shape in SHAPES:
        for name, fmt in (decode.FORMATS | (with_prefix if shape.prefix else {})).items():
            found = report.find(shape, name)
            assert found is not None
            assert found.reason == ""
            assert found.cache_bytes == shape.cache_bytes(fmt.dtype, fmt.group_size)
            assert found.relative_l1 is not None
            assert 0 < found.relative_l1 < decode.ERROR_LIMITS[fmt.dtype]
            assert (report.ratio(found) is None) == shape.ragged
        anchor = report.find(shape, "fa2")
        assert anchor is not None
        assert anchor.cache_bytes == shape.cache_bytes("bf16", shared=False)
        if shape.ragged:
            assert anchor.timing is None
            assert "equal ones only" in anchor.reason
        else:
            assert report.ratio(anchor) == 1.0


@pytest.mark.frameworks
def test_queries_see_what_is_before_them(on_the_cpu: None) -> None:
    shape = DecodeShape(2, 4, 2, 9, 64, queries=3)
    tokens = decode.Tokens(DecodeTorch(), shape)
    assert tokens.visible(9).sum(dim=1).tolist() == [7, 8, 9]
    steps = (decode.own_step(DecodeTorch(), tokens, "bf16"), decode._torch_step(DecodeTorch(), tokens, "fa2"))
    for step in steps:
        output = step()
        assert tokens.sampled_error(output) < 0.01
        assert tokens.sampled_error(output.flip(1)) > 0.1


@pytest.mark.frameworks
def test_formats_without_the_head_dim_are_left_out(on_the_cpu: None) -> None:
    report = decode.run_decode([DecodeShape(1, 2, 1, 24, 96)], formats=["bf16", "fbgemm"], iters=1)
    assert {m.key for m in report.measurements} == {"bf16", "cudnn"}
    assert decode.FORMATS["fbgemm"].has(64)
    assert not decode.FORMATS["fbgemm4"].has(64)


@pytest.mark.frameworks
def test_options_reach_the_calls(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool, int]] = []
    step = omniattn.decode

    def watched(q: Any, cache: Any, **options: Any) -> Any:
        seen.append((options["shared_prefix"], options["deterministic"], cache.recent_window))
        return step(q, cache, **options)

    monkeypatch.setattr(omniattn, "decode", watched)
    decode.run_decode(SHAPES[-1:], anchor="fa2", formats=["int4", "int4w128", "int4det"], iters=1)
    assert set(seen) == {(0, False, 0), (16, False, 0), (0, False, 128), (0, True, 0)}


@pytest.mark.frameworks
def test_many_tokens_are_appended_in_parts(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_APPEND_ROWS", 10)
    calls = []
    append = omniattn.append

    def counted(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        append(*arguments, **options)

    monkeypatch.setattr(omniattn, "append", counted)
    report = decode.run_decode(SHAPES, anchor="fa2", formats=["int8"], iters=1)
    # The last shape's cache is filled twice.
    assert len(calls) == sum(shape.batch for shape in (*SHAPES, SHAPES[-1]))
    assert [m.reason for m in report.measurements if m.key.startswith("int8")] == [""] * 6


@pytest.mark.frameworks
@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_wrong_result_gets_no_time_and_fails_the_command(
    wrong: float, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(omniattn, "decode", lambda q, *_, **__: q * 0 + wrong)
    assert main(["bench", "decode", "--anchor", "fa2", "--format", "int4", "--iters", "1", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    mine = [row for row in rows if row["format"] == "int4"]
    assert len(mine) == len(SHAPES)
    assert len([row for row in rows if row["format"] == "int4" + WITH_PREFIX]) == 1
    assert all("wrong result" in row["reason"] and row["median_us"] is None for row in mine)


@pytest.mark.frameworks
def test_shapes_that_do_not_fit_are_left_out_with_a_reason(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WithMemory, "free", 1000)
    report = decode.run_decode(SHAPES[:1], iters=1)
    assert all(m.timing is None and "GiB are free" in m.reason for m in report.measurements)


@pytest.mark.frameworks
@pytest.mark.parametrize("form", ["table", "markdown"])
def test_tables(
    form: str, on_the_cpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    options = ["--markdown"] if form == "markdown" else []
    command = ["bench", "decode", "--anchor", "fa2", "--format", "bf16", "--format", "int4g32", "--iters", "1"]
    assert main([*command, *options]) == 0
    output = capsys.readouterr().out
    for words in ("b2 h4/2 t40 d128", "p8 ragged", "int4g32", "torch FA2 bf16", "TB/s", "copy 1.00 TB/s"):
        assert words in output
    assert "fp8" not in output


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("bench decode --only fa2", "--only"),
        ("bench decode --plot x.png", "--plot"),
        ("bench decode --precision int8", "--precision"),
        ("bench decode --anchor fa3", "--anchor"),
        ("bench decode --format int3", "invalid choice"),
        ("bench decode --shapes b7", "b128"),
        ("bench host --format int4", "--format"),
        ("bench --format int4", "--format"),
    ],
)
def test_options_that_do_not_fit(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(command.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"anchor": "fa3"}, {"formats": ["int3"]}, {"formats": []}])
def test_unknown_names_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        decode.run_decode(SHAPES, iters=1, **options)


# Arithmetic


def _report() -> DecodeReport:
    shape, other = DecodeShape(32, 8, 1, 8192), DecodeShape(128, 8, 1, 8192)

    def row(shape: DecodeShape, key: str, microseconds: float, dtype: str) -> DecodeMeasurement:
        return DecodeMeasurement(shape, key, Timing((microseconds,) * 3), shape.cache_bytes(dtype), 0.01)

    return DecodeReport(
        "cudnn",
        {"device": "TEST"},
        4.0,
        (
            row(shape, "bf16", 40.0, "bf16"),
            row(shape, "int4", 20.0, "int4"),
            row(shape, "cudnn", 50.0, "bf16"),
            row(other, "bf16", 100.0, "bf16"),
            row(other, "int4", 110.0, "int4"),
            DecodeMeasurement(other, "cudnn", None, 0, None, "no such kernel"),
        ),
    )


def test_rates_and_ratios() -> None:
    report = _report()
    header, (first, second) = report.table()
    assert header == ["shape", "bf16", "int4", "torch cuDNN bf16"]
    assert first == [
        "b32 h8/1 t8192 d128", "40.0 ±0.0% 3.36 TB/s (0.80×)", "20.0 ±0.0% 1.78 TB/s (0.40×)",
        "50.0 ±0.0% 2.68 TB/s",
    ]  # fmt: skip
    assert second[1:] == ["100.0 ±0.0% 5.37 TB/s", "110.0 ±0.0% 1.30 TB/s", "–"]
    assert report.slower_than_larger() == ["b128 h8/1 t8192 d128: int4 is slower than bf16"]
    data = json.loads(report.to_json())
    assert data["slower_than_larger"] == report.slower_than_larger()
    assert data["rows"][1]["time_relative_to_anchor"] == pytest.approx(0.4)
    assert data["rows"][5]["reason"] == "no such kernel"
    assert report.markdown().count("\n") == 3
