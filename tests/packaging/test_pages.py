"""Measured tables and the figure: what the pages show is what the committed results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from build_tools import decode_tables, figures, page_tables, pages, tuning_records
from omniattn.bench import document
from omniattn.cli import build_parser
from omniattn.registry import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
PERFORMANCE = sorted((ROOT / "docs/performance").glob("*.md"))
RESULTS = sorted((ROOT / pages.RESULTS).glob("*.json"))
ENVIRONMENT = {
    "device": "NVIDIA Test", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "cudnn": "91900", "python": "3.12",
}  # fmt: skip


def head(name: str, **others: Any) -> dict[str, Any]:
    """A report without rows."""
    bench = page_tables.SOURCES[name].bench
    protocol = "host" if bench == "host" else "interleaved"
    return {
        "schema": 1, "bench": bench, "protocol": protocol, "command": f"omniattn bench {name}", "date": "2026-01-02",
        "environment": ENVIRONMENT, "anchor": "cudnn", "labels": {}, **others,
    }  # fmt: skip


def forward_row(head_dim: int, seqlen: int, causal: bool, contender: str, speed: float) -> dict[str, Any]:
    return {
        "shape": f"d{head_dim} s{seqlen} {'causal' if causal else 'full'}", "batch": 16384 // seqlen,
        "heads": 2048 // head_dim, "seqlen": seqlen, "head_dim": head_dim, "causal": causal, "contender": contender,
        "median_us": 100.0 / speed, "tflops": 400 * speed, "ratio_to_anchor": speed, "ratio_to_exact": speed / 1.25,
        "sm_mhz": None,
    }  # fmt: skip


def reports() -> dict[str, dict[str, Any]]:
    """One small report of every required kind; the numbers are made up."""
    speeds = {"cudnn": 1.0, "omniattn": 1.25, "omniattn_int8": 1.5, "omniattn_int8_kernel": 1.75}
    rows = [
        forward_row(head_dim, seqlen, causal, contender, speed)
        for head_dim in page_tables.HEAD_DIMS
        for seqlen in page_tables.LENGTHS
        for causal in (False, True)
        for contender, speed in speeds.items()
    ]
    exact = [row for row in rows if row["contender"] in ("cudnn", "omniattn")]
    steps = [
        {
            "shape": f"b{batch} h8/1 t8192 d128", "batch": batch, "heads_q": 8, "heads_kv": 1, "seqlen": 8192,
            "block_size": block, "ragged": False, "format": name, "median_us": time * 50, "tb_per_s": 3.5,
            "time_relative_to_anchor": time,
        }
        for block in (0, 16)
        for batch in (1, 128)
        for name, time in (("cudnn", 1.0), ("bf16", 0.8), ("fp8", 0.6), ("int8", 0.6), ("int4", 0.4))
    ]  # fmt: skip
    calls = [
        {"name": name, "median_us": us, "p10_us": us - 1, "p90_us": us + 1, "ratio_to_sdpa": us / 13.0}
        for name, us in (("attention", 11.0), ("torch SDPA", 13.0))
    ]
    return {
        "forward": head("forward", rows=exact, geometric_mean_ratio={"omniattn": 1.25}),
        "int8": head("int8", rows=rows, geometric_mean_ratio={"omniattn": 1.25}),
        "decode": head("decode", rows=steps),
        "host": head(
            "host",
            rows=calls,
            first_jit={"kernel": "k", "seconds": 0.5},
            **{"import": {"total_ms": 180, "numpy_ms": 90}},
        ),
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with results, and a page that asks for every part."""
    (tmp_path / pages.RESULTS).mkdir(parents=True)
    for name, report in reports().items():
        (tmp_path / pages.RESULTS / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    markers = "\n".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in page_tables.PARTS)
    (tmp_path / "README.md").write_text(f"# Page\n\n{markers}", encoding="utf-8")
    return tmp_path


def test_pages_are_what_the_results_say() -> None:
    assert pages.differences() == [], "run: python -m build_tools.pages --write"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_file_has_a_row_a_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    report = json.loads(text)
    assert text == document.to_json(report) + "\n", "written by omniattn.bench.document.write"
    lines = [line.strip().removesuffix(",") for line in text.splitlines()]
    assert all(lines.count(json.dumps(row)) == report["rows"].count(row) for row in report["rows"])


def test_every_part_is_on_a_page() -> None:
    pages_ = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    texts = (page.read_text(encoding="utf-8") for page in pages_)
    named = {name for text in texts for name in re.findall(r"<!-- (?:table|value): (\w+) -->", text)}
    assert named == set(page_tables.PARTS)


def test_every_part_is_made(checkout: Path) -> None:
    figures = [figure.path.as_posix() for figure in page_tables.FIGURES if set(figure.sources) <= set(reports())]
    assert {page_tables.FIGURE.as_posix(), "docs/performance/figures/decode.svg"} <= set(figures)
    assert pages.write(checkout) == ["README.md", *figures]
    assert pages.differences(checkout) == []
    text = (checkout / "README.md").read_text(encoding="utf-8")
    optional = [name for name, part in page_tables.PARTS.items() if not set(part.sources) <= set(reports())]
    # Of the required results decode_shared alone finds no rows here.
    assert text.count(pages.NOT_MEASURED) == len(optional) + 1
    assert "| d128 s4096 | 500 | 1.25× | 500 | 1.25× |" in text
    assert "| d64 b4 h32 s4096 full | 500 | 1.25× | 600 | 1.50× | 1.20× | 700 | 1.75× |" in text
    assert "| int4 | 20.0, 3.50, 0.40 | 20.0, 3.50, 0.40 |" in text
    assert "| cuDNN | 50.0, 3.50 | 50.0, 3.50 |" in text
    assert "| `decode`, int4 cache | 8192 tokens, 8 query heads on 1, batch 1 / 128 | 2.50× / 2.50× |" in text
    assert '| `attention`, `precision="int8"` | head_dim 128, causal, 1k / 4k / 16k tokens | 1.50× / 1.50×' in text
    assert "medians. Measured by `omniattn bench int8`, `omniattn bench decode`.</sub>" in " ".join(text.split())
    assert "| attention | 11.0 | 10.0–12.0 | 0.85 |" in text
    assert "| `decode.json` | `omniattn bench decode --json` | yes |" in text
    assert "| d64 | 1.20× | 1.20× | 1.20× | 1.20× | 1.20× | 1.20× |" in text
    assert "NVIDIA Test, driver 580.1, CUDA 13.0, torch 2.11.0, cuDNN 9.19.0; 2026-01-02;" in text
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith(("|", "![")))


def test_a_page_that_differs_is_found(checkout: Path) -> None:
    pages.write(checkout)
    page = checkout / "README.md"
    page.write_text(page.read_text(encoding="utf-8").replace("500 | 1.25×", "510 | 1.28×", 1), encoding="utf-8")
    assert pages.differences(checkout) == ["README.md"]
    pages.write(checkout)
    figure = checkout / page_tables.FIGURE
    figure.write_text(figure.read_text(encoding="utf-8").replace("1.25", "1.35"), encoding="utf-8")
    assert pages.differences(checkout) == [page_tables.FIGURE.as_posix()]
    figure.unlink()
    assert pages.differences(checkout) == [page_tables.FIGURE.as_posix()]


def test_a_new_result_makes_the_page_old(checkout: Path) -> None:
    pages.write(checkout)
    report = reports()["forward"]
    report["geometric_mean_ratio"] = {"omniattn": 1.5}
    (checkout / pages.RESULTS / "forward.json").write_text(json.dumps(report), encoding="utf-8")
    assert pages.differences(checkout) == ["README.md"]


def test_without_results_a_page_says_so(tmp_path: Path) -> None:
    text = "<!-- table: decode -->\nold\n<!-- end -->, <!-- value: forward_mean -->1.3<!-- end -->\n"
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert pages.write(tmp_path) == ["README.md"]
    expected = (
        f"<!-- table: decode -->\n{pages.NOT_MEASURED}\n<!-- end -->, <!-- value: forward_mean -->–<!-- end -->\n"
    )
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == expected


RECORDS = """\
[[record]]
title = "Result"

[[record.part]]
text = '''
On 2026-01-02.
'''

[[record.part]]
columns = ["shape", "time"]
rows = [
  ["a", "1.5 µs"],
]
source = "One NVIDIA Test, driver 580, 2026-01-02; medians of 15, cold L2, all of the contenders interleaved"

[[record.part]]
columns = ["tried", "outcome"]
rows = [
  ["b", "2.5 µs"],
]

[[record]]
title = "Links"

[[record.part]]
columns = ["shape"]
rows = [
  ["[a](../a.md)"],
]
source = "One NVIDIA Test, 2026-01-02"
"""


def keep_records(root: Path) -> Path:
    """A file of records named ``some`` below ``root``."""
    path = root / tuning_records.FOLDER / "some.toml"
    path.parent.mkdir(parents=True)
    path.write_text(RECORDS, encoding="utf-8")
    return path


def test_a_table_of_a_record_stands_on_a_page(tmp_path: Path) -> None:
    path = keep_records(tmp_path)
    page = tmp_path / "docs/performance/some.md"
    page.write_text('# Some\n\n<!-- record: some "Result" 1 -->\n| old |\n<!-- end -->\n', encoding="utf-8")
    assert pages.write(tmp_path) == ["docs/performance/some.md"]
    assert page.read_text(encoding="utf-8") == (
        '# Some\n\n<!-- record: some "Result" 1 -->\n| shape | time |\n|---|---|\n| a | 1.5 µs |\n\n'
        "<sub>One NVIDIA Test, driver 580, 2026-01-02; medians of 15, cold L2, all of the contenders\n"
        "interleaved.</sub>\n<!-- end -->\n"
    )
    assert typed_measurements(page.read_text(encoding="utf-8")) == []
    path.write_text(RECORDS.replace("1.5 µs", "1.4 µs"), encoding="utf-8")
    assert pages.differences(tmp_path) == ["docs/performance/some.md"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- table: nothing -->\n<!-- end -->\n", "no table or value 'nothing'"),
        ("<!-- table: decode -->\n", "without its end"),
        ("<!-- table: decode -->\n<!-- table: host -->\n<!-- end -->\n", "without its end"),
        ('<!-- record: some "Result" 1 -->\n', "without its end"),
        ('<!-- record: some "Result" -->\n<!-- end -->\n', "not complete"),
        ("<!-- record: some -->\n<!-- end -->\n", "expected <!-- record: NAME"),
        ('<!-- table: decode "Result" 1 -->\n<!-- end -->\n', "or a name alone"),
        ('<!-- record: others "Result" 1 -->\n<!-- end -->\n', "no records 'others'"),
        ('<!-- record: some "Results" 1 -->\n<!-- end -->\n', "no table 1 of 0"),
        ('<!-- record: some "Result" 3 -->\n<!-- end -->\n', "no table 3 of 2"),
        ('<!-- record: some "Result" 0 -->\n<!-- end -->\n', "no table 0 of 2"),
        ('<!-- record: some "Result" 2 -->\n<!-- end -->\n', "table 2: expected a source"),
        ('<!-- record: some "Links" 1 -->\n<!-- end -->\n', "table 1: expected no links"),
    ],
)
def test_a_wrong_marker_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    keep_records(tmp_path)
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    with pytest.raises(pages.PageError, match=words):
        pages.expected(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("forward", {"bench": "decode"}, "'forward' expected"),
        ("forward", {"schema": 2}, "schema 1"),
        ("forwards", {}, "not one of"),
        ("host", None, "without those of host"),
    ],
)
def test_a_wrong_result_file_is_an_error(checkout: Path, name: str, change: dict[str, Any] | None, words: str) -> None:
    path = checkout / pages.RESULTS / f"{name}.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**reports()["forward"], **change}), encoding="utf-8")
    with pytest.raises(pages.PageError, match=words):
        pages.expected(checkout)


def test_the_figure_is_an_svg_with_every_bar(checkout: Path) -> None:
    svg = page_tables.figure(reports()["int8"])
    texts = [node.text for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("1.25") == texts.count("1.50") == 18
    assert svg == page_tables.figure(reports()["int8"])
    panel = figures.Panel("one", (figures.Group(("a & b",), (None, 2.0)),))
    svg = figures.bars("title", ("x", "y"), [panel], "there & then")
    assert "a &amp; b" in svg
    assert "there &amp; then" in svg
    assert "prefers-color-scheme: dark" in svg


# ------------------------------------------------------------------------------------------------- Tables typed by hand


def typed_tables(text: str) -> list[tuple[str, str, str]]:
    """Tables outside of markers: second-level heading, what the section says before the table, the table."""
    found = []
    text = re.sub(r"<!-- (?:table|record): .*?<!-- end -->", "", text, flags=re.DOTALL)
    for section in re.split(r"^(?=## )", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.DOTALL), flags=re.M):
        heading = section.splitlines()[0] if section.strip() else ""
        for table in re.finditer(r"(?:^\|.*\n)+", section, re.M):
            found.append((heading, section[: table.start()], table.group()))
    return found


def test_typed_tables_are_found() -> None:
    text = "# A\n\n## Result\n\n<!-- table: x -->\n| a |\n|---|\n<!-- end -->\n\nTyped:\n\n| b |\n|---|\n"
    assert typed_tables(text) == [("## Result", "## Result\n\n\n\nTyped:\n\n", "| b |\n|---|\n")]


#: Pages that speak of the present code. Examples show what their own programs print.
CURRENT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
#: Sections whose tables are typed: what is asked for; what was computed, or found once, on a day that is named.
ASKED, DATED = ("## Goals",), ("## Floors", "## Model", "## What did not pay", "## Records")
#: A number with a fraction or a unit, but for compute capabilities.
MEASURED = re.compile(r"(?<![\w./])(?!(?:8|9|10|12)\.\d(?!\d))\d*\.\d+|\d\s?(?:µs|ms|TB/s|TFLOP/s|×|%)(?!\w)")


def typed_measurements(text: str) -> list[str]:
    """What is wrong with tables that hold measured numbers outside of generated parts."""
    wrong = []
    for heading, before, table in typed_tables(
        re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", text, flags=re.S)
    ):
        row = next((line for line in table.splitlines() if MEASURED.search(line)), None)
        if row is None or heading.startswith(ASKED):
            continue
        if not heading.startswith(DATED):
            wrong.append(f"typed, not generated: {row}")
        elif not re.search(r"\b20\d\d-\d\d-\d\d\b", before):
            wrong.append(f"no date before: {row}")
    return wrong


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_measured_tables_are_generated_or_records(page: Path) -> None:
    assert typed_measurements(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", tuning_records.files(), ids=lambda path: path.stem)
def test_measured_tables_of_records_are_dated(path: Path) -> None:
    """A record says its day itself, or stands below a title that does."""
    text = "## Records\n\n" + "\n\n".join(tuning_records.blocks(tuning_records.load(path)))
    assert typed_measurements(re.sub(r"^##(?=#* (?!Records))", "###", text, flags=re.M)) == []


def test_typed_measurements_are_found() -> None:
    row, plain = "| d128 | 796 | 1.17× |", "| GPU of 8.0 or 9.0 | 128 | e4m3 |"
    assert typed_measurements(f"## Result\n\n{plain}\n{row}\n") == [f"typed, not generated: {row}"]
    assert typed_measurements(f"## Result\n<!-- table: a -->\n{row}\n<!-- end -->\n## Goals\n{row}\n") == []
    assert typed_measurements(f"## Records\n\nA\n\n{row}\n") == [f"no date before: {row}"]
    assert typed_measurements(f"## Records\n\n### On 2026-01-02\n\n{row}\n") == []
    assert typed_measurements("| append | 12 µs |\n") == ["typed, not generated: | append | 12 µs |"]


def test_results_are_of_the_commands_that_the_page_names() -> None:
    reports = pages.results()
    assert reports
    for name, report in reports.items():
        named = page_tables.SOURCES[name].command
        assert report["command"].removesuffix(" --json") == named.removesuffix(" --json")


@pytest.mark.frameworks  # some of the scripts import torch or JAX
@pytest.mark.parametrize("name", page_tables.SOURCES)
def test_commands_of_results_can_be_run(name: str, tmp_path: Path) -> None:
    """Every command is parsed by its program, or stands word by word in the help of a script."""
    command, variables = pages.command_of(name, tmp_path / "x.json")
    assert set(variables) <= {"OMNIATTN_FORCE_KERNEL"}
    assert all(spec in known for known in [{s.name for s in REGISTRY}]
               for value in variables.values() for spec in value.split(","))  # fmt: skip
    if "omniattn.cli" in command:
        parsed = build_parser().parse_args(command[3:])
        assert parsed.out == tmp_path / "x.json"
        assert not parsed.json
        return
    if "tests.gpu.accuracy_table" in command:  # its words are those of the other accuracy scripts; it imports torch
        assert (ROOT / "tests/gpu/accuracy_table.py").is_file()
        return
    sources = [(ROOT / word).read_text(encoding="utf-8") for word in command if word.endswith(".py")]
    for framework in ("torch", "jax"):
        if any(re.search(rf"^import {framework}$", source, re.MULTILINE) for source in sources):
            pytest.importorskip(framework)
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert [word for word in command if word.startswith("--") and word not in shown.stdout] == []


def test_measure_runs_and_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    program = "import os, sys; open(sys.argv[-1], 'w').write(os.environ['WHAT']); sys.exit(int(sys.argv[1]))"
    (tmp_path / "3.json").write_text("good", encoding="utf-8")
    monkeypatch.setattr(
        pages,
        "command_of",
        lambda name, path: ([sys.executable, "-c", program, name, "--out", str(path)], {"WHAT": "it"}),
    )
    assert pages.measure(["0", "3"], tmp_path) == ["3"]
    assert (tmp_path / "0.json").read_text(encoding="utf-8") == "it"
    assert (tmp_path / "3.json").read_text(encoding="utf-8") == "good"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "3.json"]
    assert "0: exit code 0" in capsys.readouterr().out


def test_tables_of_caches() -> None:
    """What the required results of the other tests have no rows for."""
    step = {"batch": 64, "heads_q": 8, "heads_kv": 1, "seqlen": 8448, "block_size": 64, "ragged": False, "prefix": 8192,
            "tb_per_s": 1.0, "time_relative_to_anchor": 0.5}  # fmt: skip
    shared = [
        {**step, "shape": "b64 shared8192", "format": name, "median_us": us}
        for name, us in (("int4", 30.0), ("int4 shared_prefix", 20.0), ("int4w128", 40.0), ("cudnn", 90.0))
    ]
    decode = reports()["decode"]
    assert decode_tables.decode_shared(decode) == pages.NOT_MEASURED
    decode["rows"] += shared
    assert "| b64 shared8192 | 30.0 → 20.0 (1.50×) | 90.0 |" in decode_tables.decode_shared(decode)
    assert "shared8192" not in decode_tables.decode_others(decode) + decode_tables.decode(decode)
    options = [{**row, "format": "int4det"} for row in decode["rows"] if row["format"] == "int4"]
    assert "| int4, `deterministic=True` | 20.0, 3.50, 0.40 |" in decode_tables.decode(head("decode", rows=options))
    rows = [
        {"case": case, "shape": shape, "median_us": 100.0, "of_a_copy": 0.75}
        for case, shape in (("int8", "b64"), ("int8, one token", "b64"), ("int8", "b64 p16"))
    ]
    text = decode_tables.beside_copy(head("append", rows=rows, ceilings={"copy_tb_per_s": 4.2}))
    assert "| int8 | 100.0, 0.75 | 100.0, 0.75 |\n| int8, one token | 100.0, 0.75 | –, – |" in text
    assert "A copy in the same run: 4.20 TB/s." in text
