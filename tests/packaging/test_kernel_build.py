"""The kernel build on a small checkout: the real compiler, real files, real failures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from build_tools import jobs, packs
from build_tools.objects import Compiled, Store
from build_tools.table import Table
from omniattn.registry import KernelSpec

from .conftest import Checkout, tiny_row


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("packs/*/*"), folder / "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.is_file()}


def test_builds_what_the_registry_says(checkout: Checkout) -> None:
    done = checkout.build()
    assert done.returncode == 0, done.stderr
    assert "4 compiled, 0 up to date" in done.stdout
    assert "[   4/4]" in done.stderr
    manifest = json.loads((checkout.out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format"] == 2
    assert manifest["compiler"].startswith("NVRTC 12.9.")
    assert [pack["file"] for pack in manifest["packs"]] == ["packs/80/tiny.xz", "packs/90a/tiny.xz"]
    cubins = packs.read(checkout.out)
    assert cubins.keys() == {(name, arch) for name in ("tiny2", "tiny3") for arch in ("80", "90a")}
    for entry, cubin in cubins.values():
        assert cubin[:4] == b"\x7fELF"
        assert entry.registers > 0
    assert len({cubin for _, cubin in cubins.values()}) == 4
    text = (checkout.out / "manifest.json").read_text(encoding="utf-8")
    assert sum(line.startswith('["tiny') for line in text.splitlines()) == 4, "a line a cubin"


def test_incremental_by_content(checkout: Checkout) -> None:
    assert checkout.build().returncode == 0
    first = snapshot(checkout.out)
    assert "0 compiled, 4 up to date" in checkout.build().stdout
    header = checkout.root / "kernels_cu/ptx/math.cuh"
    old = header.read_text(encoding="utf-8")
    header.write_text(old.replace("scale * x", "scale * x + 1.0f"), encoding="utf-8")
    assert "4 compiled, 0 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) != first
    header.write_text(old.replace("float x", "float   x") + "// a comment\n", encoding="utf-8")
    assert "0 compiled, 4 up to date" in checkout.build().stdout, "the compiler sees no comments"
    header.write_text(old, encoding="utf-8")
    assert "0 compiled, 4 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) == first


def table_of(checkout: Checkout) -> Table:
    return Table.load(checkout.root)


def test_a_table_says_what_was_compiled(checkout: Checkout) -> None:
    absent = checkout.build("--check")
    assert absent.returncode == 1
    assert "build_tools/compiled.csv lacks 7 rows (tiny2 (sm_80), " in absent.stdout
    assert "run python -m build_tools.kernels --changed" in absent.stdout
    done = checkout.build("--table")
    assert "7 compiled; 0 entries of build_tools/compiled.csv are stale" in done.stdout, done.stderr
    assert not (checkout.out / "manifest.json").exists()
    table = table_of(checkout)
    # A row of the family stands for those of GPUs that no wheel has cubins for.
    assert {arch for arch, _ in table} == {"80", "90a", "86", "100a", "120a"}
    assert all(line.registers > 0 and line.size > 0 for line in table.values())
    assert checkout.build("--check").stdout == "build_tools/compiled.csv is true\n"
    assert "0 compiled" in checkout.build("--table").stdout


def test_a_table_that_is_not_true(checkout: Checkout) -> None:
    assert checkout.build("--table").returncode == 0
    table = table_of(checkout)
    for key, line in table.items():
        table[key] = line._replace(registers=line.registers + 1)
    table["80", "gone"] = line
    table.save(checkout.root)
    wrong = checkout.build("--check")
    assert wrong.returncode == 1
    assert "the same code compiles to something else: registers" in wrong.stdout
    assert "has 1 rows that the registry does not have (gone (sm_80))" in wrong.stdout
    # Nor does a wheel come out of it.
    assert "the same code compiles to something else" in checkout.build().stderr
    assert not (checkout.out / "manifest.json").exists()


def test_a_line_that_is_missing_or_broken(checkout: Checkout) -> None:
    assert checkout.build("--table").returncode == 0
    header = checkout.root / "kernels_cu/ptx/math.cuh"
    header.write_text(header.read_text(encoding="utf-8").replace("scale * x", "scale * x + 1.0f"), encoding="utf-8")
    table = table_of(checkout)
    del table["80", "tiny2"]
    table.save(checkout.root)
    # A row of any target that is not there is compiled, whatever is drawn of the rest.
    code = "from build_tools import kernels; kernels.SAMPLE = 0; print(kernels.renew(workers=1))"
    assert checkout.python("-c", code).stdout == "(3, 4)\n"
    assert ("80", "tiny2") in table_of(checkout)
    file = checkout.root / "build_tools/compiled.csv"
    file.write_text(file.read_text(encoding="utf-8") + "<<<<<<< HEAD\n", encoding="utf-8")
    broken = checkout.build("--check")
    assert broken.returncode == 1
    assert "compiled.csv:9: expected eight columns" in broken.stderr


def test_a_changed_source_makes_entries_stale(checkout: Checkout) -> None:
    assert checkout.build("--table").returncode == 0
    header = checkout.root / "kernels_cu/ptx/math.cuh"
    header.write_text(header.read_text(encoding="utf-8").replace("scale * x", "scale * x + 1.0f"), encoding="utf-8")
    stale = checkout.build("--check")
    assert "2 rows for sm_90a are not in build_tools/compiled.csv as they are today" in stale.stdout
    # A small checkout has fewer stale rows of other targets than are drawn.
    assert "7 compiled; 0 entries" in checkout.build("--changed").stdout
    assert checkout.build("--check").returncode == 0
    code = "from build_tools import kernels; kernels.SAMPLE = 1; print(kernels.renew(workers=1))"
    header.write_text(header.read_text(encoding="utf-8").replace("1.0f", "2.0f"), encoding="utf-8")
    assert checkout.python("-c", code).stdout == "(3, 4)\n"
    assert checkout.build("--check").returncode == 0, "entries of other targets may wait for a release"


def test_same_sources_give_the_same_bytes(checkout: Checkout, tmp_path: Path) -> None:
    assert checkout.build().returncode == 0
    first = snapshot(checkout.out)
    assert "4 compiled" in checkout.build(OMNIATTN_BUILD_OBJECTS=str(tmp_path / "elsewhere")).stdout
    assert snapshot(checkout.out) == first


def test_archs_are_narrowed_by_environment_and_option(checkout: Checkout) -> None:
    assert checkout.build(OMNIATTN_CUDA_ARCHS="sm_80").returncode == 0
    assert {name.split("/")[1] for name in snapshot(checkout.out) if "/" in name} == {"80"}
    assert checkout.build("--arch", "90a", OMNIATTN_CUDA_ARCHS="80").returncode == 0
    assert {name.split("/")[1] for name in snapshot(checkout.out) if "/" in name} == {"90a"}
    wrong = checkout.build(OMNIATTN_CUDA_ARCHS="hopper")
    assert wrong.returncode == 1
    assert "OMNIATTN_CUDA_ARCHS" in wrong.stderr
    assert "hopper" in wrong.stderr


def test_a_wheel_of_some_rows(checkout: Checkout) -> None:
    assert "2 cubins" in checkout.build(OMNIATTN_BUILD_ROWS="tiny3 other*").stdout
    assert {name for name, _ in packs.read(checkout.out)} == {"tiny3"}
    assert "received 'tiny9'" in checkout.build(OMNIATTN_BUILD_ROWS="tiny9").stderr


def test_a_failed_build_names_all_failures_and_leaves_the_last_good_one(checkout: Checkout) -> None:
    assert checkout.build().returncode == 0
    before = snapshot(checkout.out)
    source = checkout.root / "kernels_cu/entry/tiny.cu"
    good = source.read_text(encoding="utf-8")
    source.write_text(good.replace("scaled(", "sacled("), encoding="utf-8")
    failed = checkout.build()
    assert failed.returncode == 1
    assert failed.stderr.count("sacled") >= 4
    assert "tiny3 (sm_90a)" in failed.stderr
    assert snapshot(checkout.out) == before
    assert not [path for path in checkout.out.iterdir() if path.name.startswith((".stage", ".tmp"))]


def test_a_new_spill_fails_the_build(checkout: Checkout) -> None:
    # 64 registers a thread, 200 values that volatile loads keep alive at once.
    source = """extern "C" __global__ void __launch_bounds__(1024) tiny(float* x) {
    float r[200];
    #pragma unroll
    for (int i = 0; i < 200; ++i) asm volatile("ld.global.f32 %0, [%1];" : "=f"(r[i]) : "l"(x + i * 1024));
    #pragma unroll
    for (int i = 0; i < 200; ++i) x[i * 1024 + threadIdx.x] = r[i] * r[199 - i] + SCALE;
}
"""
    (checkout.root / "kernels_cu/entry/tiny.cu").write_text(source, encoding="utf-8")
    checkout.rows = [tiny_row("tiny2", 2, prebuild="('80',)")]
    checkout.write_registry()
    failed = checkout.build()
    assert failed.returncode == 1
    assert "tiny2 (sm_80): spills" in failed.stderr
    assert not (checkout.out / "manifest.json").exists()
    refused = checkout.build("--table")
    assert "tiny2 (sm_80): spills" in refused.stderr
    assert ("80", "tiny2") not in table_of(checkout)
    assert checkout.build("--table", "--accept-spills").returncode == 0
    assert table_of(checkout)["80", "tiny2"].spill_bytes > 0
    allowed = checkout.build()
    assert allowed.returncode == 0, allowed.stderr
    assert "0 compiled, 1 up to date" in allowed.stdout
    # Fewer than before are taken up without a word, and are then what may be.
    source = source.replace("float r[200]", "float r[4]").replace("i < 200", "i < 4").replace("r[199 - i]", "r[3 - i]")
    (checkout.root / "kernels_cu/entry/tiny.cu").write_text(source, encoding="utf-8")
    assert checkout.build("--table").returncode == 0
    assert table_of(checkout)["80", "tiny2"].spill_bytes == 0


def test_orphans_and_missing_sources_fail_before_compiling(checkout: Checkout) -> None:
    (checkout.root / "kernels_cu/entry/lonely.cu").write_text("", encoding="utf-8")
    checkout.rows.append(tiny_row("gone", 1, source="'entry/gone.cu'"))
    checkout.write_registry()
    failed = checkout.build()
    assert failed.returncode == 1
    assert "lonely.cu: orphan" in failed.stderr
    assert "gone.cu does not exist" in failed.stderr
    assert not checkout.out.exists()


def test_a_damaged_result_is_put_right(checkout: Checkout) -> None:
    assert checkout.build().returncode == 0
    before = snapshot(checkout.out)
    (checkout.out / "packs/80/tiny.xz").write_bytes(b"damaged")
    (checkout.out / "packs/80/stray.xz").write_bytes(b"stray")
    next(checkout.out.glob("objects/*.cubin")).write_bytes(b"damaged")
    assert "1 compiled, 3 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) == before


def test_another_compiler_is_refused() -> None:
    with pytest.raises(jobs.BuildError, match=r"built by NVRTC 11\.0, found 12\.9.*\n?.*omniattn\[aot\]"):
        jobs.compiler_version(require=(11, 0))


def test_store_forgets_what_does_not_match(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.get("key") is None
    built = Compiled({"sha256": hashlib.sha256(b"cubin").hexdigest()}, b"cubin", "log")
    store.put("key", built)
    assert store.get("key") == built
    (tmp_path / "key.cubin").write_bytes(b"other")
    assert store.get("key") is None
    store.put("key", built)
    (tmp_path / "key.json").write_text("{", encoding="utf-8")
    assert store.get("key") is None


def spec(name: str, head_dim: int, **changes: object) -> KernelSpec:
    fields: dict[str, object] = {
        "family": "f",
        "op": "attention",
        "source": "entry/k.cu",
        "symbol": "k",
        "defines": (),
        "dtype": "float16",
        "block_m": 64,
        "block_n": 64,
        "num_warps": 4,
        "smem_bytes": 0,
        **changes,
    }
    return KernelSpec(name=name, head_dim=head_dim, **fields)  # type: ignore[arg-type]


def test_portability_takes_the_largest_row_of_each_family(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/k.cu").touch()
    rows = [
        spec("a64", 64),
        spec("a128", 128),
        spec("b", 64, family="g", min_arch=(9, 0)),
        spec("c", 64, family="h", arch_specific=True),
    ]
    found = jobs.portable_jobs(rows, "a compiler", jobs.Seen(tmp_path), ["86", "120a"])
    assert {(job.spec.name, job.arch) for job in found} == {("a128", "86"), ("a128", "120a"), ("b", "120a")}
