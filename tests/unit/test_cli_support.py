"""The support table, from synthetic registry rows; the README that is made from the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omniattn.cli import main, readme, support
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime import env

ROOT = Path(__file__).resolve().parent.parent.parent


def _spec(name: str, *, dtype: str = "float16", head_dim: int = 64, smem: int = 1024, **more: object) -> KernelSpec:
    fields: dict[str, object] = {
        "name": name, "family": "f", "op": "attention", "source": "entry/x.cu", "symbol": "x", "defines": (),
        "dtype": dtype, "head_dim": head_dim, "block_m": 64, "block_n": 64, "num_warps": 4, "smem_bytes": smem,
    }  # fmt: skip
    return KernelSpec(**{**fields, **more})  # type: ignore[arg-type]


def _texts(rows: list[support.SupportRow]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    return [(row.op, row.dtype, row.head_dim, tuple(cell.text for cell in row.cells)) for row in rows]


def test_prebuilt_follows_binary_compatibility() -> None:
    rows = support.support_rows(support.wheel_resolver, [_spec("a", prebuild=("80", "90a"))])
    assert _texts(rows) == [
        ("attention", "float16", "8–64", ("prebuilt", "prebuilt", "prebuilt", "prebuilt", "JIT", "JIT"))
    ]


def test_arch_specific_and_minimum_capability() -> None:
    specs = [_spec("a", min_arch=(9, 0), arch_specific=True, prebuild=("90a",))]
    (row,) = support.support_rows(support.wheel_resolver, specs)
    assert [cell.text for cell in row.cells] == ["–", "–", "–", "prebuilt", "–", "–"]
    assert "9.0" in row.cells[0].reason


def test_shared_memory_excludes_small_gpus_unless_another_row_fits() -> None:
    big = _spec("big", smem=160 << 10, prebuild=("80", "90a"))
    (row,) = support.support_rows(support.wheel_resolver, [big])
    assert [cell.text for cell in row.cells] == ["prebuilt", "–", "–", "prebuilt", "JIT", "–"]
    assert "shared memory" in row.cells[1].reason
    (row,) = support.support_rows(support.wheel_resolver, [big, _spec("small", prebuild=())])
    assert [cell.text for cell in row.cells] == ["prebuilt", "JIT", "JIT", "prebuilt", "JIT", "JIT"]
    assert row.cells[1].kernels == ("small",)


def test_head_dim_classes_and_merging() -> None:
    specs = [_spec(f"{t}{d}", dtype=t, head_dim=d) for t in ("float16", "bfloat16") for d in (64, 128)]
    rows = support.support_rows(support.wheel_resolver, specs)
    assert [(row.dtype, row.head_dim) for row in rows] == [
        ("bfloat16", "8–64"), ("bfloat16", "72–128"), ("float16", "8–64"), ("float16", "72–128")
    ]  # fmt: skip
    merged = support.merge_rows(rows)
    assert [(row.dtype, row.head_dim) for row in merged] == [("bfloat16, float16", "8–128")]


def test_features_have_rows_of_their_own_that_merge_when_alike() -> None:
    specs = [_spec("a"), _spec("b", features=frozenset({"score_mods"}))]
    rows = support.support_rows(support.wheel_resolver, specs)
    assert [row.label for row in rows] == ["attention", "attention, with softcap or mask"]
    assert [row.label for row in support.merge_rows(rows)] == ["attention, also with softcap or mask"]
    specs[1] = _spec("b", features=frozenset({"score_mods"}), prebuild=())
    apart = support.merge_rows(support.support_rows(support.wheel_resolver, specs))
    assert [row.label for row in apart] == ["attention", "attention, with softcap or mask"]


def test_a_kernel_that_lacks_something_does_not_speak_for_the_whole_class() -> None:
    generic = [_spec(f"g{d}", head_dim=d, prebuild=("80",)) for d in (64, 96, 128)]
    own = _spec("own", head_dim=128, family="fast", min_arch=(9, 0), arch_specific=True, prebuild=("90a",),
                lacks=frozenset({"varlen", "any_strides"}))  # fmt: skip
    rows = support.support_rows(support.wheel_resolver, [*generic, own])
    assert [row.head_dim for row in rows] == ["8–64", "72–96", "104–128"]
    for row, spec in zip(rows, generic, strict=True):
        sm_80, _, _, sm_90, sm_100, _ = row.cells
        assert (sm_80.text, sm_80.kernels) == ("prebuilt", (spec.name,))
        # Packed sequences compile at run time there, whatever dense arrays get.
        assert (sm_90.kind, sm_90.text) == ("jit", "JIT; dense: fast (prebuilt)")
        assert sm_90.kernels == (spec.name, "own")
        assert (sm_100.text, sm_100.partial) == ("JIT", "")
    assert len(support.merge_rows(rows)) == 1


def test_kernels_for_dense_and_packed_arrays_together_still_leave_odd_strides() -> None:
    fast = {"family": "fast", "min_arch": (9, 0), "arch_specific": True, "prebuild": ("90a",)}
    specs = [
        _spec("generic"),
        _spec("dense", lacks=frozenset({"varlen", "any_strides"}), **fast),
        _spec("packed", lacks=frozenset({"dense", "any_strides"}), **fast),
    ]
    (row,) = support.support_rows(support.wheel_resolver, specs)
    assert row.cells[3].text == "prebuilt; dense, packed: fast"
    (row,) = support.support_rows(support.wheel_resolver, [specs[0], specs[2]])
    assert row.cells[3].text == "prebuilt; packed: fast"


def test_a_kernel_for_dense_arrays_alone_says_so() -> None:
    own = _spec("own", family="fast", min_arch=(9, 0), arch_specific=True, prebuild=("90a",),
                lacks=frozenset({"varlen"}))  # fmt: skip
    (row,) = support.support_rows(support.wheel_resolver, [own])
    assert [cell.text for cell in row.cells] == ["–", "–", "–", "only dense: fast (prebuilt)", "–", "–"]
    assert "9.0" in row.cells[0].reason


def test_kernels_that_lack_nothing_together_speak_for_the_whole_class() -> None:
    fast = {"family": "fast", "min_arch": (9, 0), "arch_specific": True, "prebuild": ("90a",), "qk": "int8"}
    dense, packed = (_spec(lack, lacks=frozenset({lack}), **fast) for lack in ("varlen", "dense"))
    (row,) = support.support_rows(support.wheel_resolver, [dense, packed])
    assert [cell.text for cell in row.cells] == ["–", "–", "–", "prebuilt", "–", "–"]
    assert row.cells[3].kernels == ("varlen", "dense")
    assert row.label == "quantized_attention (precision int8, int4)"
    # A kernel that takes everything and is compiled at run time is the worse offer.
    (row,) = support.support_rows(support.wheel_resolver, [_spec("all", qk="int8", prebuild=()), dense, packed])
    assert [cell.text for cell in row.cells] == ["JIT", "JIT", "JIT", "prebuilt", "JIT", "JIT"]


def test_rows_of_the_registry_for_low_precision() -> None:
    rows = support.merge_rows(support.support_rows(support.wheel_resolver))
    low = [row for row in rows if row.op == "quantized_attention"]
    assert {row.dtype for row in low} == {"bfloat16, float16"}
    assert {row.head_dim for row in low} == {"8–64", "72–128", "8–128", "136–256"}
    for row in low:
        by_target = {gpu.target: cell.text for gpu, cell in zip(support.GPUS, row.cells, strict=True)}
        assert all(text.startswith(("prebuilt", "JIT")) for text in by_target.values())
        assert "attn_int8_sm90" in by_target["sm_90"]
    for op in ("quantize", "quantize_delta"):
        (row,) = [row for row in rows if row.op == op and not row.features]
        assert [cell.text for cell in row.cells] == ["prebuilt"] * 6
    (row,) = [row for row in rows if row.op == "quantize" and row.features]
    assert [cell.text for cell in row.cells] == ["JIT"] * 6


def test_rows_of_the_registry_for_e4m3() -> None:
    rows = support.merge_rows(support.support_rows(support.wheel_resolver))
    for row in (row for row in rows if row.op == "fp8_attention"):
        by_target = {gpu.target: cell.text for gpu, cell in zip(support.GPUS, row.cells, strict=True)}
        assert by_target["sm_80"] == by_target["sm_86"] == "–"
        assert all(by_target[target] == "JIT" for target in ("sm_89", "sm_100", "sm_120"))
        # With both a factor of v and a mask there is the generic kernel only.
        both = row.features == "a factor for 128 rows of v, with softcap or mask"
        assert ("attn_fp8_sm90" in by_target["sm_90"]) is not both


def test_rows_with_different_cells_are_not_merged() -> None:
    specs = [_spec("a", head_dim=64), _spec("b", head_dim=128, prebuild=())]
    assert len(support.merge_rows(support.support_rows(support.wheel_resolver, specs))) == 2


def test_own_gpu_comes_first_and_is_not_repeated() -> None:
    columns = support.columns_with([((9, 0), "H200", 232448), ((9, 0), "H200", 232448)])
    assert [column.target for column in columns] == ["sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120"]
    assert columns[0].products == "H200"


def test_readme_tables_do_not_drift() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.filled(text) == text, "run: omniattn info --markdown --write README.md"


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


def test_readme_names_every_registered_operation() -> None:
    assert REGISTRY, "the registry is empty"
    lines = support.readme_table().splitlines()
    for op in {support.operation_of(spec) for spec in REGISTRY}:
        assert sum(line.startswith(f"| {support.LINES[op]} |") for line in lines) == 1


def test_the_readme_table_fits_a_screen() -> None:
    """A line an operation, a column for GPUs that have the same, and every exception says what it is."""
    table, _, notes = support.readme_table().partition("\n\n")
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    assert len(lines) == 2 + len({support.LINES[support.operation_of(spec)] for spec in REGISTRY}) <= 11
    assert len(lines[0]) <= 7
    assert all(gpu.target in "".join(lines[0]) for gpu in support.GPUS)
    marks = {mark for line in lines[2:] for cell in line for mark in re.findall("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", cell)}
    listed = [note.split()[0] for note in notes.splitlines()]
    assert set(listed) == marks
    assert listed == [str(n + 1).translate(support._DIGITS) for n in range(len(listed))]
    assert max(map(len, table.splitlines() + notes.splitlines())) <= 160


def test_readme_table_of_synthetic_rows() -> None:
    fast = {"family": "fast", "min_arch": (9, 0), "arch_specific": True, "prebuild": ("90a",)}
    mods = {"features": frozenset({"score_mods"})}
    specs = [
        *(_spec(f"g{d}", head_dim=d, prebuild=() if d == 256 else ("80", "89")) for d in (64, 128, 256)),
        *(_spec(f"m{d}", head_dim=d, prebuild=("80",) if d == 128 else (), **mods) for d in (64, 128, 256)),
        *(
            _spec(f"own{lack}", head_dim=256, lacks=frozenset({lack, "any_strides"}), **fast)
            for lack in ("varlen", "dense")
        ),
        _spec("append", op="append", prebuild=("80", "89")),
    ]
    assert support.readme_table(specs).splitlines() == [
        "| operation | A100, A30, A10, A40, RTX 30, L4, L40, RTX 40 (sm_80, sm_86, sm_89) | H100, H200 (sm_90) "
        "| B200, RTX 50 (sm_100, sm_120) |",
        "|---|---|---|---|",
        "| `attention`, `attention_varlen` | prebuilt ¹ | prebuilt ² ³ ⁴ | JIT |",
        "| `append` | prebuilt | JIT | JIT |",
        "",
        "¹ JIT: head_dim 136–256; with softcap or mask at head_dim 8–64  ",
        "² JIT: with softcap or mask  ",
        "³ JIT: in part, arrays that tensor maps cannot describe  ",
        "⁴ dense, packed: fast",
    ]  # fmt: skip


def test_an_exception_of_one_dtype_names_it() -> None:
    specs = [_spec(t, dtype=t) for t in ("float16", "bfloat16")]
    specs += [
        _spec(f"{t}256", dtype=t, head_dim=256, prebuild=("80",) * (t == "float16")) for t in ("float16", "bfloat16")
    ]
    assert "\n¹ JIT: head_dim 72–256, bfloat16" in support.readme_table(specs)


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
    words = " ".join(row[0] for row in cells)
    for op in {row.op for row in support.support_rows(support.wheel_resolver)}:
        assert support.BESIDE.get(op, op) in words
    for column in support.GPUS:
        assert column.target in table
    assert (len(cells[0]) == 4) == (columns < 190)


def test_kernels_without_softcap_say_so() -> None:
    fast = {"family": "fast", "min_arch": (9, 0), "arch_specific": True, "prebuild": ("90a",)}
    masks = _spec("masks", lacks=frozenset({"varlen", "any_strides", "softcap"}), **fast)
    (row,) = support.support_rows(support.wheel_resolver, [_spec("generic"), masks])
    assert row.cells[3].text == "prebuilt; dense without softcap: fast"
    both = _spec("both", lacks=frozenset({"varlen", "any_strides"}), **fast)
    (row,) = support.support_rows(support.wheel_resolver, [_spec("generic"), masks, both])
    assert row.cells[3].text == "prebuilt; dense: fast"


def test_reasons_are_not_repeated_and_not_those_of_kernels_for_other_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    newer = _spec("newer", min_arch=(9, 0))
    (row,) = support.support_rows(lambda *_: ("unsupported", "no compiler"), [_spec("generic"), newer])
    assert {cell.reason for cell in row.cells} == {"no compiler"}
    (row,) = support.support_rows(lambda *_: ("unsupported", "no compiler"), [newer])
    assert "compute capability 9.0 or newer, sm_80 has 8.0" in row.cells[0].reason
    monkeypatch.setattr(support, "runtime_resolver", lambda *_: ("unsupported", "no compiler"))
    assert main(["info"]) == 0
    *_, older, newer_gpus = capsys.readouterr().out.splitlines()
    # e4m3 products begin with sm_89.
    assert older.startswith("sm_86: no compiler; it needs compute capability 8.9 or newer")
    assert newer_gpus == "sm_89, sm_90, sm_100, sm_120: no compiler"
