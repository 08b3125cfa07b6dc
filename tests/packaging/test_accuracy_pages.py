"""Tables of errors: what precision.md, quantization.md and kv_formats.md show is what the committed results say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from build_tools import accuracy_tables, pages
from omniattn.bench import document
from tests.numerics import accuracy_report
from tests.packaging.test_pages import reports, typed_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/precision.md", "docs/quantization.md", "docs/kv_formats.md")
#: Cosine similarity / relative L1.
ERRORS = re.compile(r"[01]?\.\d{3,} / \d?\.\d{3,}")


def report(bench: str = "kv_accuracy", **others: Any) -> dict[str, Any]:
    """A result of two caches on two inputs; the numbers are made up."""
    rows = [
        accuracy_report.row("caches", label, cache, 0.99 + error / 100, error, token_bytes=size)
        for cache, size, error in (("bf16", 256, 0.0), ("int4", 72, 0.25))
        for label in ("layer 0", "normal")
    ]
    return {
        "schema": 1, "bench": bench, "protocol": "accuracy", "command": f"python -m {bench}", "date": "2026-01-02",
        "environment": {"date": "2026-01-02", "device": "CPU", "python": "3.12.1", "omniattn": "1", "numpy": "2.5"},
        "rows": rows, **others,
    }  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the required results, one of errors, and a page that shows it."""
    (tmp_path / pages.RESULTS).mkdir(parents=True)
    for name, found in {**reports(), "kv_accuracy": report()}.items():
        put(tmp_path, name, found)
    (tmp_path / "docs/page.md").write_text("<!-- table: kv_accuracy -->\n<!-- end -->\n", encoding="utf-8")
    return tmp_path


def put(checkout: Path, name: str, found: dict[str, Any]) -> None:
    (checkout / pages.RESULTS / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_no_error_is_typed_by_hand(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert ERRORS.search(text)
    assert [table.splitlines()[0] for _, _, table in typed_tables(text) if ERRORS.search(table)] == []


def test_typed_errors_are_found() -> None:
    for cell in (".99940 / .034", "1.00000 / .0018", "0.9984 / 0.047", ".65839 / 1.6094"):
        assert ERRORS.search(f"| normal | {cell} |")


@pytest.mark.parametrize("name", list(accuracy_tables.PARTS))
def test_committed_results_fill_every_cell(name: str) -> None:
    part = accuracy_tables.PARTS[name]
    found = pages.results(ROOT)
    if not set(part.sources) <= found.keys():
        assert name == "accuracy_gpu", "only this one needs a GPU"
        return
    made = part.make(*(found[source] for source in part.sources))
    lines = [line for line in made.splitlines() if "–" in line and not line.startswith("<sub>")]
    # SageAttention2 has no published figures of the recorded layers.
    assert all(name == "accuracy_gpu" and line.startswith("| SmolLM2") and line.count("–") == 1 for line in lines)


def test_results_of_the_reference_name_no_machine() -> None:
    for name, source in accuracy_tables.SOURCES.items():
        if name == "accuracy_gpu":
            continue
        found = pages.results(ROOT)[name]
        assert found["environment"].keys() == {"date", "device", "python", "omniattn", "numpy"}
        assert found["command"] in (source.command, source.command.removesuffix(" --json"))
        assert not re.search(r'": "/|\\\\|/home|/tmp', json.dumps(found))


def test_a_table_is_what_the_result_says(checkout: Path) -> None:
    assert "docs/page.md" in pages.write(checkout)
    assert (checkout / "docs/page.md").read_text(encoding="utf-8").splitlines() == [
        "<!-- table: kv_accuracy -->",
        "| cache | bytes | layer 0 | normal |",
        "|---|---|---|---|",
        "| bf16 | 256 | 0.9900 / 0.000 | 0.9900 / 0.000 |",
        "| int4 | 72 | 0.9925 / 0.250 | 0.9925 / 0.250 |",
        "",
        "<sub>CPU, NumPy 2.5, Python 3.12.1; 2026-01-02; errors against double precision. Measured by `python",
        "-m kv_accuracy`.</sub>",
        "<!-- end -->",
    ]


def test_a_wrong_number_is_found(checkout: Path) -> None:
    pages.write(checkout)
    page = checkout / "docs/page.md"
    page.write_text(page.read_text(encoding="utf-8").replace("0.250", "0.249", 1), encoding="utf-8")
    assert pages.differences(checkout) == ["docs/page.md"]


def test_a_row_that_is_missing_is_a_dash() -> None:
    found = report()
    del found["rows"][-1]
    assert "| int4 | 72 | 0.9925 / 0.250 | – |" in accuracy_tables.kv_accuracy(found)


def test_a_table_that_is_missing_is_an_error(checkout: Path) -> None:
    put(checkout, "kv_accuracy", report(rows=[]))
    with pytest.raises(pages.PageError, match=r"page\.md: results of 'kv_accuracy' without a row of 'caches'"):
        pages.expected(checkout)


def test_published_figures_stand_beside_measured_ones() -> None:
    name = "precisions"
    others = [accuracy_report.row(name, "normal", "SageAttention2", 0.99928, 0.038)]
    rows = [accuracy_report.row(name, label, "int8", 1.0, 1.25) for label in ("normal", "layer")]
    found = report("accuracy_gpu", rows=rows, published={"source": "there", "rows": others})
    made = accuracy_tables.tables(found)
    assert "| normal | .99928 / .038 | 1.00000 / 1.250 | – | – | – | – |" in made
    assert "| layer | – | 1.00000 / 1.250 | – | – | – | – |" in made
    # A result with published figures alone is none.
    with pytest.raises(pages.PageError, match="without a row of 'precisions'"):
        accuracy_tables.tables(report("accuracy_gpu", rows=[], published=found["published"]))


def test_scripts_print_and_write_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "result.json", report()

    def run(*arguments: str) -> str:
        environment = made["environment"]
        accuracy_report.run("kv_accuracy", "python -m this", lambda: environment, lambda: made["rows"], arguments)
        return capsys.readouterr().out

    text = run("--json", "--out", str(path))
    assert text == path.read_text(encoding="utf-8")
    printed = json.loads(text)
    assert text == document.to_json(printed) + "\n"
    assert printed == {**made, "command": "python -m this --json"}
    assert "| int4 | 72 | 0.9925 / 0.250 | 0.9925 / 0.250 |" in run()
    with pytest.raises(SystemExit):
        run("--out", str(tmp_path / "none" / "x.json"))
    assert "existing folder" in capsys.readouterr().err
