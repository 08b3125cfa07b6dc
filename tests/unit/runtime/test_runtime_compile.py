"""Sources, options, and the real NVRTC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniattn import runtime
from omniattn.errors import CompileError, KernelNotFoundError
from omniattn.runtime.cache import get_cache
from omniattn.runtime.compile import compile_options, compile_spec
from omniattn.runtime.nvrtc import get_compiler
from omniattn.runtime.sources import Sources, source_digest
from tests.unit.runtime.runtime_fakes import HEADER, FakeCompiler, World, isolated, toy_spec

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) toy(float* data) {
    float held[96];
    for (int i = 0; i < 96; ++i) held[i] = data[i * 1024 + threadIdx.x];
    for (int round = 0; round < 9; ++round) {
        for (int i = 0; i < 96; ++i) held[i] = held[i] * held[(i + 7) % 96] + held[(i + 31) % 96];
        __syncthreads();
    }
    for (int i = 0; i < 96; ++i) data[i * 1024 + threadIdx.x] = held[i];
}
"""

STATIC = """
extern "C" __global__ void toy(int* data) {
    __shared__ int staged[256];
    staged[threadIdx.x] = data[0];
    __syncthreads();
    data[1] = staged[7];
}
"""

# The accumulator is read between the issue of wgmma and its wait, so ptxas has to serialize.
SERIALIZED = """
extern "C" __global__ void toy(float* out, unsigned long long a, unsigned long long b) {
    float d[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; ++i) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"
                     "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0; }"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
        out[threadIdx.x] = d[0];
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """A world with the real NVRTC."""
    with isolated(monkeypatch, tmp_path) as world:
        world.use_compiler(None)
        yield world


def test_closure_is_recursive_and_ignores_comments(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n// #include "no.cuh"\n/* \n#include "no.cuh"\n*/\n')
    (tmp_path / "b.cuh").write_text('  #  include "c.cuh"\n#pragma once\n')
    (tmp_path / "c.cuh").write_text('#include "b.cuh"\n')
    assert list(Sources(tmp_path).closure("a.cu")) == ["a.cu", "b.cuh", "c.cuh"]


def test_missing_source(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(CompileError, match=r"kernel source 'gone.cuh' cannot be read below .*What to do: reinstall"):
        Sources(tmp_path).closure("a.cu")


def test_system_headers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(
        CompileError, match=r"a.cu includes <cuda_fp16.h>: kernels include only files of the kernels folder"
    ):
        Sources(tmp_path).closure("a.cu")


def test_source_digest(world: World) -> None:
    sources = Sources(world.root)
    base = source_digest(world.spec, sources)
    assert re.fullmatch("[0-9a-f]{64}", base)
    changed = {
        source_digest(toy_spec(defines=(("FACTOR", "4.0f"),)), sources),
        source_digest(toy_spec(defines=(("FACTOR", "3.0f"), ("EXTRA", "1"))), sources),
        source_digest(toy_spec(symbol="other"), sources),
    }
    (world.root / "ptx" / "scale.cuh").write_text(HEADER.replace("2.0f", "3.0f"))
    changed.add(source_digest(world.spec, Sources(world.root)))
    assert len({base, *changed}) == 5


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy_spec()
    assert compile_options(spec, "90a") == (
        "--gpu-architecture=sm_90a", "-std=c++17", "--ptxas-options=-v", "-DFACTOR=3.0f",
    )  # fmt: skip
    assert compile_options(spec, "compute_80") == ("--gpu-architecture=compute_80", "-std=c++17", "-DFACTOR=3.0f")
    assert "-lineinfo" in compile_options(spec, "90a", lineinfo=True)
    monkeypatch.setenv("OMNIATTN_LINEINFO", "1")
    assert "-lineinfo" in compile_options(spec, "90a")
    assert "-lineinfo" not in compile_options(spec, "90a", lineinfo=False)


@pytest.mark.parametrize("arch", ["80", "86", "89", "90a", "100a", "120a"])
def test_real_compilation(world: World, arch: str) -> None:
    result = compile_spec(world.spec, arch)
    assert result.cubin[:4] == b"\x7fELF"
    assert result.arch == f"sm_{arch}"
    assert 0 < result.registers < 64
    assert (result.spill_bytes, result.warnings, result.ptx) == (0, (), False)
    assert result.nvrtc_version == get_compiler().version
    assert "Compiling entry function 'toy'" in result.log


def test_compilation_is_reproducible(world: World) -> None:
    assert compile_spec(world.spec, "90a").cubin == compile_spec(world.spec, "90a", Sources(world.root)).cubin


def test_ptx(world: World) -> None:
    result = compile_spec(world.spec, "compute_80")
    assert result.ptx
    assert b".target sm_80" in result.cubin
    assert result.registers == 0


def test_static_shared_memory_and_spills(world: World) -> None:
    (world.root / "spill.cu").write_text(SPILLING)
    spilling = compile_spec(toy_spec(source="spill.cu", defines=()), "80")
    assert spilling.registers <= 32
    assert spilling.spill_bytes > 0
    (world.root / "static.cu").write_text(STATIC)
    assert compile_spec(toy_spec(source="static.cu", defines=()), "80").smem_static_bytes == 1024


def test_serialized_wgmma_is_a_warning(world: World) -> None:
    (world.root / "wgmma.cu").write_text(SERIALIZED)
    result = compile_spec(toy_spec(source="wgmma.cu", defines=()), "90a")
    assert any("wgmma" in line and "serialized" in line for line in result.warnings), result.log


def test_compiler_warnings_are_returned(world: World) -> None:
    (world.root / "warn.cu").write_text('extern "C" __global__ void toy() { int unused; }')
    result = compile_spec(toy_spec(source="warn.cu", defines=()), "80")
    assert any("unused" in line and "warning" in line for line in result.warnings)


def test_error_has_the_log_and_the_file(world: World) -> None:
    (world.root / "bad.cu").write_text('extern "C" __global__ void toy() { undeclared(); }')
    with pytest.raises(CompileError) as caught:
        compile_spec(toy_spec(source="bad.cu", defines=()), "80")
    text = str(caught.value)
    assert text.startswith("kernel 'toy_f3' does not compile for sm_80 with NVRTC ")
    assert "NVRTC_ERROR_COMPILATION" in text
    assert 'bad.cu(1): error: identifier "undeclared" is undefined' in text
    assert text.endswith(caught.value.log.rstrip())


def test_unknown_target(world: World) -> None:
    with pytest.raises(CompileError, match=r"does not know sm_75a|does not know sm_199a"):
        compile_spec(world.spec, "199a")


def test_unseen_architecture_for_real(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real NVRTC, real cache: compiled once, then found by a process that may not compile."""
    assert runtime.load(world.spec, 0).origin == "jit"
    assert world.driver.images[0][:4] == b"\x7fELF"
    world.reopen()
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    assert runtime.load(world.spec, 0).origin == "cache"
    assert world.driver.images[0] == world.driver.images[1]
    for path in get_cache().entries():
        path.unlink()
    world.reopen()
    with pytest.raises(KernelNotFoundError):
        runtime.load(world.spec, 0)


@pytest.mark.parametrize(
    ("version", "expected"), [((12, 8), ()), ((12, 9), ("--no-cache",)), ((13, 0), ("--no-cache",))]
)
def test_compiling_past_the_cache_of_nvrtc(
    world: World, version: tuple[int, int], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC keeps binaries on disk from 12.9 on; before, the option would be an error."""
    given: list[tuple[str, ...]] = []
    compiler = FakeCompiler(version)
    monkeypatch.setattr(compiler, "compile", lambda *args: given.append(args[3]) or (b"\x7fELF", ""))
    results = [compile_spec(toy_spec(), "90a", compiler=compiler, nvrtc_cache=cache) for cache in (True, False)]
    assert given[0] == results[0].options
    assert given[1] == results[1].options + expected
    assert results[0].options == results[1].options, "the binary is the same, and so is its name in the cache"
