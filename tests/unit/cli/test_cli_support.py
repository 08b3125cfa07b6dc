"""The support table, from synthetic registry rows; the README that is made from the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniattn.cli import main, readme, support
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.registry.decode import unlisted_rows
from omniattn.runtime import env

ROOT = Path(__file__).resolve().parents[3]


def _spec(name: str, *, dtype: str = "float16", head_dim: int = 64, smem: int = 1024, **more: object) -> KernelSpec:
    fields: dict[str, object] = {
        "name": name, "family": "f", "op": "attention", "source": "entry/x.cu", "symbol": "x", "defines": (),
        "dtype": dtype, "head_dim": head_dim, "block_m": 64, "block_n": 64, "num_warps": 4, "smem_bytes": smem,
    }  # fmt: skip
    return KernelSpec(**{**fields, **more})  # type: ignore[arg-type]


def held(spec: KernelSpec, cc: tuple[int, int]) -> tuple[str, str]:
    """An installation as released."""
    return ("prebuilt", "the wheel has it") if support.is_held(spec, cc) else ("jit", "compiled")


def _texts(rows: list[support.SupportRow]) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in rows]


def test_prebuilt_follows_binary_compatibility() -> None:
    assert [support.is_held(_spec("a", prebuild=("80", "90a")), gpu.cc) for gpu in support.GPUS] == [True] * 4 + [
        False
    ] * 2
    assert support.is_held(_spec("a", prebuild=("100",)), (10, 3))
    assert not support.is_held(_spec("a", prebuild=("100",)), (11, 0))


def test_only_what_calls_take_counts() -> None:
    """A kernel that no call takes on a GPU is not waited for there."""
    specs = [_spec("a", prebuild=("80", "90a")), _spec("b", prebuild=("100", "120"))]
    (row,) = support.support_rows(held, specs)
    assert [cell.text for cell in row.cells] == ["prebuilt"] * 6
    assert row.cells[0].kernels == {"prebuilt": ("a",)}
    assert row.cells[4].kernels == {"prebuilt": ("b",)}
    (row,) = support.support_rows(held, specs[:1])
    assert row.cells[4] == support.Cell({}, "no call takes it there")
    # Of other GPUs nobody knows.
    (row,) = support.support_rows(held, specs, [support.Column((11, 0), "new", 227 << 10)])
    assert row.cells[0].kernels == {"jit": ("a", "b")}


def test_cells_that_are_not_all_of_one_kind_have_numbers() -> None:
    everywhere = {"prebuild": ("80", "90a", "100", "120")}
    specs = [_spec(name, **everywhere) for name in ("a", "b", "c")]
    kinds = {"a": ("jit", "no cubin"), "b": ("prebuilt", "a cubin"), "c": ("jit", "no cubin")}
    (row,) = support.support_rows(lambda spec, _: kinds[spec.name], specs)
    assert row.cells[0].text == "1 prebuilt, 2 JIT"
    assert row.cells[0].reason == "a cubin; no cubin"


def test_gpus_that_cannot_run_a_kernel_say_why() -> None:
    own = _spec("own", min_arch=(9, 0), arch_specific=True, prebuild=("90a",))
    (row,) = support.support_rows(held, [own])
    assert [cell.text for cell in row.cells] == ["–", "–", "–", "prebuilt", "–", "–"]
    assert "9.0 only, sm_80 has 8.0" in row.cells[0].reason
    big = _spec("big", smem=160 << 10, prebuild=("80", "90a", "100"))
    (row,) = support.support_rows(held, [big])
    assert [cell.text for cell in row.cells] == ["prebuilt", "–", "–", "prebuilt", "prebuilt", "–"]
    assert "shared memory" in row.cells[1].reason


def test_wider_kernels_serve_where_none_of_the_width_runs() -> None:
    big, wide = _spec("big", smem=160 << 10, prebuild=("80",)), _spec("wide", head_dim=128, prebuild=("80",))
    narrow, wider = support.support_rows(held, [big, wide])
    assert (narrow.head_dim, wider.head_dim) == ("8–64", "72–128")
    assert [cell.kernels.get("prebuilt") for cell in narrow.cells[:2]] == [("big",), ("wide",)]


def test_classes_with_the_same_cells_are_merged() -> None:
    everywhere = {"prebuild": ("80", "90a", "100", "120")}
    specs = [_spec(f"{t}{d}", dtype=t, head_dim=d, **everywhere) for t in ("float16", "bfloat16") for d in (64, 128)]
    rows = support.support_rows(held, specs)
    assert [(row.dtype, row.head_dim) for row in rows] == [
        ("bfloat16", "8–64"), ("bfloat16", "72–128"), ("float16", "8–64"), ("float16", "72–128")
    ]  # fmt: skip
    merged = support.merge_rows(rows)
    assert [(row.dtype, row.head_dim, row.label) for row in merged] == [("bfloat16, float16", "8–128", "attention")]
    specs = [_spec("a", **everywhere), _spec("b", masks="any", **everywhere)]
    assert [row.label for row in support.support_rows(held, specs)] == ["attention", "attention, with softcap or mask"]
    (merged_row,) = support.merge_rows(support.support_rows(held, specs))
    assert merged_row.label == "attention, plain; with softcap or mask"
    apart = support.support_rows(lambda spec, _: ("jit", spec.name), specs)
    assert len(support.merge_rows(apart)) == 2


def test_formats_of_caches_in_words() -> None:
    names = {"16": "16-bit cache", "int4g32": "int4 cache, group_size 32", "fbgemm": "int4 (FBGEMM's layout) cache"}
    for name, words in {
        **names,
        "fbgemmg64": "int4 (FBGEMM's layout) cache, group_size 64",
        "fp8": "fp8 cache",
    }.items():
        (row,) = support.support_rows(held, [_spec("a", op="decode", cache=(name, name))])
        assert row.features == words
    (row,) = support.support_rows(held, [_spec("a", op="append", cache=("int8", "int4g32"))])
    assert row.label == "append, int8 cache, int4 cache, group_size 32"


def test_a_released_wheel_has_what_every_gpu_can_run() -> None:
    """The complete table: nothing is compiled, and what a GPU does not have it cannot run."""
    rows = support.support_rows(held)
    assert {text for row in _texts(rows) for text in row} == {"prebuilt", "–"}
    generic = [row for row in rows if row.op in ("attention", "attention_split", "decode", "append", "quantize")]
    assert {text for row in _texts(generic) for text in row} == {"prebuilt"}
    e4m3 = [row for row in rows if row.op == "fp8_attention"]
    assert _texts(e4m3) == [["–", "–", "prebuilt", "prebuilt", "prebuilt", "prebuilt"]] * len(e4m3)


def test_own_gpu_comes_first_and_is_not_repeated() -> None:
    columns = support.columns_with([((9, 0), "H200", 232448), ((9, 0), "H200", 232448)])
    assert [column.target for column in columns] == ["sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]
    assert columns[0].products == "H200"


@pytest.mark.parametrize("page", ["README.md", "docs/environment.md"])
def test_generated_tables_do_not_drift(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert readme.filled(text) == text, "run: omniattn info --markdown --write README.md docs/environment.md"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_readme_write_fills_the_markers_and_touches_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    markers = "".join(f"<!-- {name}:begin -->\nstale text\n<!-- {name}:end -->\n" for name in readme.tables())
    path.write_text(f"before\n{markers}after\n", encoding="utf-8")
    assert main(["info", "--markdown", "--write", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert "stale text" not in text
    assert text.startswith("before\n<!-- support-table:begin -->\n| operation |")
    assert text.endswith("<!-- environment-table:end -->\nafter\n")
    assert all(variable.name in text for variable in env.VARIABLES)


def test_readme_without_markers_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="support-table:begin"):
        readme.filled("nothing here")


def test_half_a_marker_is_an_error_and_no_file_is_written(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole.md", tmp_path / "half.md"
    whole.write_text("<!-- support-table:begin -->\nstale\n<!-- support-table:end -->\n", encoding="utf-8")
    half.write_text("<!-- environment-table:begin -->\n", encoding="utf-8")
    assert main(["info", "--markdown", "--write", str(whole), str(half)]) == 2
    assert "stale" in whole.read_text(encoding="utf-8")


def test_the_readme_table() -> None:
    """A line an operation, a column a GPU; what is compiled on first use in a column too, and no footnote."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in support.readme_table().splitlines()]
    header, _, *body = lines
    assert all(gpu.target in cell for gpu, cell in zip(support.GPUS, header[1:-1], strict=True))
    assert {cell for line in body for cell in line[1:-1]} == {"prebuilt", "–"}
    missing = {line[0]: [n for n, cell in enumerate(line[1:-1]) if cell == "–"] for line in body}
    # Tensor cores for e4m3 begin with sm_89.
    assert {name: cells for name, cells in missing.items() if cells} == {
        support.LINES["fp8_attention"][0]: [0, 1],
    }
    assert {support.LINES[support.operation_of(spec)][0] for spec in REGISTRY} == {*missing}
    assert {line[0] for line in body if line[-1]} == {*support.FIRST_USE}
    assert max(map(len, support.readme_table().splitlines())) <= 180


def test_what_is_compiled_on_first_use() -> None:
    """Of decode and append what the registry does not list: no pair of equal formats."""
    rows = list(unlisted_rows())
    assert {f"`{row.op}`" for row in rows} == {name for name, what in support.FIRST_USE.items() if "K and V" in what}
    assert all(row.cache[0] != row.cache[1] for row in rows)
    assert all(spec.cache[0] == spec.cache[1] for spec in REGISTRY if spec.cache)


@pytest.mark.parametrize("columns", [80, 120, 240])
def test_no_cell_is_cut_off_whatever_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Narrow terminals get one column for all GPUs."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["info"]) == 0
    table = capsys.readouterr().out.split("Which kernels this installation has")[1]
    lines = [line for line in table.splitlines() if line and line[0] in "┏┃┡│├└"]
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line[0] == "│"]
    assert len({len(row) for row in cells}) == 1
    words = "".join(row[0].replace(" ", "") for row in cells)  # the narrowest terminal breaks them
    for op in {row.op for row in support.support_rows(held)}:
        assert op in words
    for column in support.GPUS:
        assert column.target in table
    assert (len(cells[0]) == 4) == (columns < 190)


def test_long_labels_leave_the_other_columns_their_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing runs many rows are one, whose label has all their names."""
    monkeypatch.setenv("COLUMNS", "190")
    monkeypatch.setattr(support, "runtime_resolver", lambda *_: ("unsupported", "no compiler"))
    assert main(["info"]) == 0
    table = capsys.readouterr().out.split("Which kernels this installation has")[1]
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]
    assert max(len(row[0]) for row in rows) > 10
    assert all(any(row[i] for row in rows) for i in range(len(rows[0])))
    assert any(row[1] == "bfloat16" or "bfloat16," in row[1] for row in rows)


def test_reasons_are_not_repeated_and_not_those_of_kernels_for_other_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    everywhere = {"prebuild": ("80", "90a", "100", "120")}
    newer = _spec("newer", min_arch=(9, 0), **everywhere)
    specs = [_spec("generic", **everywhere), newer]
    (row,) = support.support_rows(lambda *_: ("unsupported", "no compiler"), specs)
    assert {cell.reason for cell in row.cells} == {"no compiler"}
    (row,) = support.support_rows(lambda *_: ("unsupported", "no compiler"), [newer])
    assert "compute capability 9.0 or newer, sm_80 has 8.0" in row.cells[0].reason
    monkeypatch.setattr(support, "runtime_resolver", lambda *_: ("unsupported", "no compiler"))
    assert main(["info"]) == 0
    text = capsys.readouterr().out.replace("\n  ", " ")  # paragraphs in one line
    reasons = dict(line.split(": ", 1) for line in text.splitlines() if line.startswith("sm_"))
    assert reasons["sm_90"] == "no compiler"
    # e4m3 products begin with sm_89.
    assert ["8.9 or newer" in reasons[gpu.target] for gpu in support.GPUS] == [True, True, *[False] * 4]
