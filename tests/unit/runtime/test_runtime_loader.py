"""Which binary a GPU gets, in which order, and what is said when none serves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_tools import packs
from omniattn import runtime
from omniattn.errors import ArgumentError, CacheError, CompileError, DriverError, KernelNotFoundError
from omniattn.runtime import nvrtc
from omniattn.runtime.cache import get_cache
from omniattn.runtime.driver_base import LaunchAttributes
from tests.unit.runtime.runtime_fakes import FakeCompiler, FakeDriver, World, isolated, no_nvrtc, toy_spec


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        yield world


def test_order(world: World) -> None:
    """Exact target, family, same major, cache, NVRTC: each is passed over when the driver refuses what came before."""
    world.install("80", "89", "90", "90f", "90a", "100a")
    loaded = runtime.load(world.spec, 0)
    assert (loaded.origin, loaded.arch, loaded.tried) == ("prebuilt sm_90a", "sm_90a", ())
    assert world.compiler.compiled == []

    world.driver.refuse[b"prebuilt"] = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    world.reopen()
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert [what for what, _ in loaded.tried] == [
        "prebuilt sm_90a (sm_90a)",
        "prebuilt sm_90f (sm_90f)",
        "prebuilt sm_90 (sm_90)",
        "disk cache",
    ]
    assert all("CUDA_ERROR_NO_BINARY_FOR_GPU" in reason for _, reason in loaded.tried[:3])

    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache"
    assert world.compiler.compiled == ["sm_90a"]


@pytest.mark.parametrize(
    ("cc", "archs", "origin"),
    [
        ((8, 6), ("80", "89", "90a"), "prebuilt sm_80"),
        ((8, 9), ("80", "86", "89"), "prebuilt sm_89"),
        ((8, 7), ("80", "86", "89"), "prebuilt sm_86"),
        ((9, 0), ("80", "89"), "jit"),
        ((10, 0), ("90a",), "jit"),
        ((10, 3), ("100a", "100f"), "prebuilt sm_100f"),
        ((12, 0), ("100f",), "jit"),
    ],
)
def test_choice_by_compute_capability(world: World, cc: tuple[int, int], archs: tuple[str, ...], origin: str) -> None:
    world.driver.ccs = [cc, cc]
    world.install(*archs)
    assert runtime.load(world.spec, 0).origin == origin


@pytest.mark.parametrize("code", ["CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_NOT_FOUND"])
def test_a_refused_cubin_is_passed_over(world: World, code: str) -> None:
    world.install("90a")
    world.driver.refuse[b"prebuilt"] = code
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert code in loaded.tried[0][1]


def test_other_driver_errors_are_not_the_binarys_fault(world: World) -> None:
    world.install("90a")
    world.driver.refuse[b"prebuilt"] = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DriverError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*What to do: free GPU memory"):
        runtime.load(world.spec, 0)
    assert world.compiler.compiled == []
    assert world.driver.contexts == [], "the context is popped on an error too"


def test_unseen_architecture_then_cache_without_nvrtc(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel whose cubins were taken away compiles; the next process needs no compiler any more."""
    world.install()
    first = runtime.load(world.spec, 0)
    assert first.origin == "jit"
    assert first.tried[0][0] == "prebuilt kernels"
    no_nvrtc(monkeypatch)
    world.reopen()
    assert runtime.load(world.spec, 0).origin == "cache"
    assert world.driver.images[0] == world.driver.images[1]


def test_force_jit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.install("90a")
    monkeypatch.setenv("OMNIATTN_FORCE_JIT", "1")
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert loaded.tried[0] == ("prebuilt kernels", "passed over because of OMNIATTN_FORCE_JIT=1")


def test_disable_jit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    with pytest.raises(KernelNotFoundError) as caught:
        runtime.load(world.spec, 0)
    text = str(caught.value)
    assert text.startswith("no usable binary of kernel 'toy_f3' for sm_90a. Tried, in this order:\n")
    assert "- prebuilt kernels: " in text
    assert f"- disk cache: not in {world.cache}" in text
    assert "- NVRTC: forbidden by OMNIATTN_DISABLE_JIT=1" in text
    assert text.endswith("What to do: unset OMNIATTN_DISABLE_JIT, so that the kernel can be compiled on this machine")
    assert world.compiler.compiled == []


def test_both_policies_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_JIT", "1")
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    with pytest.raises(ArgumentError, match=r"OMNIATTN_FORCE_JIT"):
        runtime.load(world.spec, 0)


@pytest.mark.parametrize(("version", "extra"), [("12.9.10", "jit12"), ("13.0.3", "jit13")])
def test_missing_nvrtc(world: World, monkeypatch: pytest.MonkeyPatch, version: str, extra: str) -> None:
    monkeypatch.setattr(nvrtc, "_installed", lambda package: version if package == "cuda-bindings" else None)
    no_nvrtc(monkeypatch)
    with pytest.raises(KernelNotFoundError) as caught:
        runtime.load(world.spec, 0)
    text = str(caught.value)
    assert "NVRTC, the run-time compiler, cannot be loaded (cuda-bindings: " in text
    assert text.endswith(
        f'What to do: pip install "omniattn[{extra}]", so that the kernel can be compiled on this machine'
    )


def test_nvrtc_of_the_other_major_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"cuda-bindings": "13.0.3", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    monkeypatch.setattr(nvrtc, "_installed", versions.get)
    no_nvrtc(monkeypatch)
    with pytest.raises(CompileError) as caught:
        nvrtc.get_compiler()
    assert str(caught.value).endswith(
        "nvidia-cuda-nvrtc-cu12 12.9.86 is installed, but cuda-bindings 13.0.3 looks for the library of CUDA 13. "
        'What to do: pip install "omniattn[jit13]"'
    )


def test_source_that_does_not_compile(world: World) -> None:
    world.compiler.error = "toy.cu(3): error: no such thing"
    with pytest.raises(KernelNotFoundError) as caught:
        runtime.load(world.spec, 0)
    assert "NVRTC for sm_90a: kernel 'toy_f3' does not compile for sm_90a with NVRTC 12.9" in str(caught.value)
    assert "toy.cu(3): error: no such thing" in str(caught.value)


def test_jit_result_that_the_driver_refuses(world: World) -> None:
    """As an NVRTC that is newer than the driver gives it."""
    world.driver.refuse[b"jit"] = "CUDA_ERROR_INVALID_IMAGE"
    with pytest.raises(
        KernelNotFoundError, match=r"update the NVIDIA driver, or install an NVRTC that fits it"
    ) as caught:
        runtime.load(world.spec, 0)
    assert [what for what, _ in caught.value.tried] == ["prebuilt kernels", "disk cache", "jit (sm_90a)"]


def test_stale_cubin_of_a_checkout_is_not_used(world: World) -> None:
    world.install("90a", kind="checkout")
    assert runtime.load(world.spec, 0).origin == "prebuilt sm_90a"
    header = world.root / "ptx" / "scale.cuh"
    header.write_text(header.read_text() + "\n")
    world.reopen("checkout")
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert loaded.tried[0] == ("prebuilt sm_90a", "stale: its sources have changed since it was built")


def test_changed_defines_make_a_cubin_stale(world: World) -> None:
    world.install("90a", kind="checkout")
    loaded = runtime.load(toy_spec(defines=(("FACTOR", "5.0f"),)), 0)
    assert loaded.origin == "jit"
    assert loaded.tried[0][1].startswith("stale")


def test_damaged_and_missing_cubins(world: World) -> None:
    world.install("90", "90f", "90a")
    (own,), (family,), (older,) = (world.cubins.glob(f"packs/{arch}/*.xz") for arch in ("90a", "90f", "90"))
    own.write_bytes(packs.compress(b"\x7fELF prebuilt sm_89?"))
    family.write_bytes(family.read_bytes()[:40])
    older.unlink()
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert "damaged: toy_f3" in loaded.tried[0][1]
    assert "does not have the sha256 of the manifest" in loaded.tried[0][1]
    assert "damaged" in loaded.tried[1][1]
    assert loaded.tried[2][1].endswith("is missing")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 1, "kernels": []}',
        '{"format": 2, "packs": [{"file": "x"}]}',
        '{"format": 2}',
        '{"format": 2, "packs": [{"file": "x", "arch": "90a", "sha256": "", "size": 1, "kernels": [["x"]]}]}',
    ],
)
def test_unusable_manifest(world: World, text: str) -> None:
    (world.cubins / "manifest.json").write_text(text)
    world.reopen()
    loaded = runtime.load(world.spec, 0)
    assert loaded.origin == "jit"
    assert "manifest.json is unusable" in loaded.tried[0][1]


def test_manifest_with_an_unknown_target_or_field(world: World) -> None:
    world.install("90a", future_field=[1])
    assert runtime.load(world.spec, 0).origin == "prebuilt sm_90a"
    data = json.loads((world.cubins / "manifest.json").read_text())
    data["packs"][0]["arch"] = "hopper"
    (world.cubins / "manifest.json").write_text(json.dumps(data))
    assert "hopper" in world.reopen().problem


def test_no_manifest(world: World) -> None:
    (world.cubins / "manifest.json").unlink()
    assert world.reopen("checkout").why_none("toy_f3", (9, 0)) == "none are built in this checkout"
    assert world.reopen("wheel").why_none("toy_f3", (9, 0)).endswith("manifest.json is missing")


def test_why_a_store_has_nothing(world: World) -> None:
    store = world.install("80", "89")
    assert store.why_none("other", (9, 0)) == "the wheel holds none of this kernel"
    assert store.why_none("toy_f3", (9, 0)) == (
        "the wheel holds sm_80, sm_89, none of which runs on compute capability 9.0"
    )


def test_old_nvrtc_gives_ptx(world: World) -> None:
    world.driver.ccs = [(12, 1), (12, 1)]
    world.use_compiler(FakeCompiler((12, 8), (80, 90, 100, 120)))
    loaded = runtime.load(world.spec, 0)
    assert (loaded.origin, loaded.arch) == ("jit", "compute_120")
    assert loaded.tried[-1][0] == "NVRTC for sm_121a"
    assert "does not know it: compute_120 PTX was compiled instead" in loaded.tried[-1][1]
    assert world.driver.images[-1].startswith(b"jit compute_120")


def test_arch_specific_kernels_get_no_ptx(world: World) -> None:
    world.use_compiler(FakeCompiler(archs=(80, 89)))
    with pytest.raises(
        KernelNotFoundError, match=r"does not know sm_90a, and this kernel cannot be compiled for an older"
    ):
        runtime.load(toy_spec(arch_specific=True, min_arch=(9, 0)), 0)


def test_nvrtc_that_knows_nothing_suitable(world: World) -> None:
    world.use_compiler(FakeCompiler(archs=(50, 75)))
    with pytest.raises(KernelNotFoundError, match=r"nor an older target that this kernel can be compiled for"):
        runtime.load(world.spec, 0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_arch": (10, 0)}, "needs compute capability 10.0 or newer, this GPU has 9.0"),
        ({"min_arch": (8, 9), "arch_specific": True}, "for compute capability 8.9 only, this GPU has 9.0"),
        ({"smem_bytes": 300000}, "needs 300000 bytes of shared memory, this GPU gives 232448"),
    ],
)
def test_kernels_that_can_never_run(world: World, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(KernelNotFoundError, match=reason):
        runtime.load(toy_spec(**changes), 0)
    assert world.driver.images == []


def test_loaded_once_per_device(world: World) -> None:
    world.install("90a")
    first, second = runtime.load(world.spec, 0), runtime.load(world.spec, 1)
    assert runtime.load(world.spec, 0) is first
    assert (first.ordinal, second.ordinal) == (0, 1)
    assert [call for call in world.driver.calls if call[0] == "load"] == [
        ("load", "toy", 0, 4096),
        ("load", "toy", 1, 4096),
    ]
    assert first.spec is world.spec
    assert repr(first) == "<LoadedKernel toy_f3 on device 0, prebuilt sm_90a>"


@pytest.mark.parametrize(
    ("cc", "arch", "overlaps"), [((9, 0), "90a", True), ((10, 0), "100a", True), ((8, 9), "89", False)]
)
def test_only_code_that_waits_itself_begins_before_the_kernel_ahead_ends(
    world: World, cc: tuple[int, int], arch: str, overlaps: bool
) -> None:
    world.driver = FakeDriver(cc)
    world.install(arch)
    kernel = runtime.load(world.spec, 0)
    assert kernel.can_overlap == overlaps
    assert kernel.attributes(None, True) == (LaunchAttributes(None, True) if overlaps else None)
    assert kernel.attributes((2, 1, 1), True) == LaunchAttributes((2, 1, 1), overlaps)
    assert kernel.attributes((2, 1, 1), False) == LaunchAttributes((2, 1, 1), False)
    assert kernel.attributes(None, False) is None
    # Of a given image nobody knows what it was compiled for.
    assert not runtime.load_image(world.spec, 0, b"PTX").can_overlap


def test_an_older_driver_does_not_overlap_launches(world: World) -> None:
    """They became part of captured graphs with CUDA 12.3."""
    world.driver = FakeDriver((9, 0))
    world.driver.version = (12, 3)
    world.install("90a")
    assert not runtime.load(world.spec, 0).can_overlap


def test_gpus_of_different_architecture(world: World) -> None:
    world.driver = FakeDriver((9, 0), (8, 6))
    world.install("80", "90a")
    assert [runtime.load(world.spec, i).origin for i in (0, 1)] == ["prebuilt sm_90a", "prebuilt sm_80"]


def test_many_threads_compile_once(world: World) -> None:
    start = threading.Barrier(8)
    found = []

    def work() -> None:
        start.wait()
        found.append(runtime.load(world.spec, 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert world.compiler.compiled == ["sm_90a"]


def test_resolve(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU."""
    world.install("80", "90a")
    assert runtime.resolve(world.spec, (8, 6)) == runtime.Resolution("prebuilt", "sm_80", "wheel holds sm_80")
    jit = runtime.resolve(world.spec, (10, 0))
    assert (jit.kind, jit.arch) == ("jit", "sm_100a")
    assert jit.reason == "compiled at first use by NVRTC 12.9 for sm_100a"
    runtime.compile_to(world.spec, "sm_100")
    assert runtime.resolve(world.spec, (10, 0)).kind == "cache"
    old = runtime.resolve(world.spec, (7, 5))
    assert (old.kind, old.arch) == ("unsupported", "sm_75")
    assert old.reason == "it needs compute capability 8.0 or newer, sm_75 has 7.5"
    no_nvrtc(monkeypatch)
    missing = runtime.resolve(world.spec, (12, 0))
    assert missing.kind == "unsupported"
    assert "not prebuilt, and cannot be compiled: NVRTC" in missing.reason
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    assert "OMNIATTN_DISABLE_JIT=1 forbids" in runtime.resolve(world.spec, (12, 0)).reason
    assert world.driver.calls == []


def test_compile_to_a_folder(world: World, tmp_path: Path) -> None:
    done = runtime.compile_to(world.spec, "sm_100a", tmp_path / "out")
    assert done.path == tmp_path / "out" / "100a" / "toy_f3.cubin"
    assert done.path.read_bytes() == done.result.cubin
    assert runtime.compile_to(world.spec, "compute_80", tmp_path / "out").path.name == "toy_f3.ptx"
    assert get_cache().entries() == []


def test_compile_to_the_cache_is_what_load_finds(world: World) -> None:
    done = runtime.compile_to(world.spec, "sm_90")
    assert done.result.arch == "sm_90a"
    assert get_cache().entries() == [done.path]
    assert runtime.load(world.spec, 0).origin == "cache"


def test_compile_to_errors(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"argument 'arch': expected a binary target.*received 'compute_80'"):
        runtime.compile_to(world.spec, "compute_80")
    with pytest.raises(CompileError, match=r"'toy_f3' is not for sm_75: it needs compute capability 8.0"):
        runtime.compile_to(world.spec, "sm_75")
    with pytest.raises(CompileError, match=r"NVRTC 12.9 does not know sm_130a \(it knows 80, 86"):
        runtime.compile_to(world.spec, "sm_130")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot be written .*choose a folder that can be written"):
        runtime.compile_to(world.spec, "sm_90a", tmp_path / "file" / "out")
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match=r"What to do: set OMNIATTN_CACHE_DIR to a folder that can"):
        runtime.compile_to(world.spec, "sm_90a")


def test_load_image(world: World) -> None:
    loaded = runtime.load_image(world.spec, 1, b"any binary", "experiment")
    assert (loaded.origin, loaded.ordinal) == ("experiment", 1)
    assert world.driver.images == [b"any binary"]
    assert world.driver.contexts == []


def test_dump(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNIATTN_DUMP", str(tmp_path / "dump"))
    runtime.load(world.spec, 0)
    folder = tmp_path / "dump" / "toy_f3-sm_90a-jit"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"options.txt", "log.txt", "toy_f3.cubin", "src/entry/toy.cu", "src/ptx/scale.cuh"}
    assert (folder / "toy_f3.cubin").read_bytes() == world.driver.images[0]
    assert "--gpu-architecture=sm_90a\n" in (folder / "options.txt").read_text()
    assert "Used 32 registers" in (folder / "log.txt").read_text()
    world.compiler.error = "the log of a failure"
    with pytest.raises(KernelNotFoundError):
        runtime.load(toy_spec(name="broken", defines=(("FACTOR", "9.0f"),)), 0)
    assert (tmp_path / "dump" / "broken-sm_90a-failed" / "log.txt").read_text() == "the log of a failure"


def test_dump_that_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OMNIATTN_DUMP", str(tmp_path / "file" / "below"))
    assert runtime.load(world.spec, 0).origin == "jit"
