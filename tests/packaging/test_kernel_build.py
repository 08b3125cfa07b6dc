"""The kernel build on a small checkout: the real compiler, real files, real failures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from build_tools import kernels
from build_tools.objects import Compiled, Store
from omniattn.registry import KernelSpec
from omniattn.runtime.sources import Sources

from .conftest import Checkout, tiny_row


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("cubins/**/*.cubin"), folder / "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if path.is_file()}


def test_builds_what_the_registry_says(checkout: Checkout) -> None:
    done = checkout.build()
    assert done.returncode == 0, done.stderr
    assert "4 compiled, 0 up to date" in done.stdout
    assert "[  4/4]" in done.stderr
    manifest = json.loads((checkout.out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["format"] == 1
    assert manifest["compiler"].startswith("NVRTC 12.9.")
    assert {(entry["name"], entry["arch"]) for entry in manifest["kernels"]} == {
        (name, arch) for name in ("tiny2", "tiny3") for arch in ("80", "90a")
    }
    for entry in manifest["kernels"]:
        cubin = (checkout.out / entry["file"]).read_bytes()
        assert cubin[:4] == b"\x7fELF"
        assert entry["size"] == len(cubin)
        assert entry["sha256"] == hashlib.sha256(cubin).hexdigest()
        assert entry["registers"] > 0
        assert f"--gpu-architecture=sm_{entry['arch']}" in entry["options"]
    assert len({entry["sha256"] for entry in manifest["kernels"]}) == 4


def test_incremental_by_content(checkout: Checkout) -> None:
    assert checkout.build("--check").returncode == 1
    assert checkout.build().returncode == 0
    first = snapshot(checkout.out)
    assert checkout.build("--check").returncode == 0
    assert "0 compiled, 4 up to date" in checkout.build().stdout
    header = checkout.root / "kernels_cu/ptx/math.cuh"
    old = header.read_text(encoding="utf-8")
    header.write_text(old.replace("scale * x", "scale * x + 1.0f"), encoding="utf-8")
    refused = checkout.build("--check")
    assert refused.returncode == 1
    assert "4 of 4 cubins are not up to date" in refused.stderr
    assert "4 compiled, 0 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) != first
    header.write_text(old, encoding="utf-8")
    assert "0 compiled, 4 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) == first


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


def test_only_one_row_leaves_the_manifest(checkout: Checkout) -> None:
    done = checkout.build("--only", "tiny3")
    assert "2 cubins" in done.stdout
    assert not (checkout.out / "manifest.json").exists()
    assert "received 'tiny9'" in checkout.build("--only", "tiny9").stderr


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


def test_an_undeclared_spill_fails_the_build(checkout: Checkout) -> None:
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
    # A cached object is judged again, by today's row.
    checkout.rows = [tiny_row("tiny2", 2, prebuild="('80',)", allowed_spill_bytes="100000")]
    checkout.write_registry()
    allowed = checkout.build()
    assert allowed.returncode == 0, allowed.stderr
    assert "0 compiled, 1 up to date" in allowed.stdout


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
    (checkout.out / "cubins/80/tiny2.cubin").write_bytes(b"damaged")
    (checkout.out / "cubins/80/stray.cubin").write_bytes(b"stray")
    next(checkout.out.glob("objects/*.cubin")).write_bytes(b"damaged")
    assert "1 compiled, 3 up to date" in checkout.build().stdout
    assert snapshot(checkout.out) == before


def test_another_compiler_is_refused() -> None:
    with pytest.raises(kernels.BuildError, match=r"built by NVRTC 11\.0, found 12\.9.*\n?.*omniattn\[aot\]"):
        kernels.compiler_version(require=(11, 0))


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
    jobs = kernels.portable_jobs(rows, ["86", "120a"], "a compiler", Sources(tmp_path))
    assert {(job.spec.name, job.arch) for job in jobs} == {("a128", "86"), ("a128", "120a"), ("b", "120a")}


def test_portability_compiles_and_reports(checkout: Checkout) -> None:
    first = checkout.build("--portable")
    assert "sm_120a" in first.stdout
    assert "[  3/3]" in first.stderr
    # What was compiled for one check is not compiled again for another.
    again = checkout.build("--portable")
    assert "sm_120a" in again.stdout
    assert "to compile" not in again.stderr
    source = checkout.root / "kernels_cu/entry/tiny.cu"
    text = source.read_text(encoding="utf-8")
    source.write_text(text + "\n#if __CUDA_ARCH__ >= 1200\n#error not for Blackwell\n#endif\n", encoding="utf-8")
    failed = checkout.build("--portable")
    assert failed.returncode == 1
    assert "not for Blackwell" in failed.stderr
    assert "(sm_120a)" in failed.stderr
    assert "(sm_86)" not in failed.stderr
