"""Stand-ins for the GPU, NVRTC and an installation, for the tests of the runtime."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from build_tools import kernels, packs
from build_tools.jobs import Job
from build_tools.objects import Compiled
from omniattn.errors import CompileError
from omniattn.registry import KernelSpec
from omniattn.runtime import log, nvrtc
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver import set_driver
from omniattn.runtime.driver_base import Launcher, driver_error
from omniattn.runtime.sources import Sources
from omniattn.runtime.store import Store, set_store

SOURCE = """#include "ptx/scale.cuh"
struct Params { float* out; int n; };
extern "C" __global__ void toy(const Params p) {
    extern __shared__ float staged[];
    staged[threadIdx.x] = scaled(FACTOR);
    __syncthreads();
    if (threadIdx.x < p.n) p.out[threadIdx.x] = staged[threadIdx.x];
}
"""
HEADER = "__device__ inline float scaled(float x) { return 2.0f * x; }\n"


def toy_spec(**changes: Any) -> KernelSpec:
    """A registry row for `SOURCE`."""
    spec = KernelSpec(
        name="toy_f3",
        family="toy_sm80",
        op="attention",
        source="entry/toy.cu",
        symbol="toy",
        defines=(("FACTOR", "3.0f"),),
        dtype="float16",
        head_dim=64,
        block_m=64,
        block_n=64,
        num_warps=4,
        smem_bytes=4096,
    )
    return replace(spec, **changes)


class FakeDriver:
    """Two GPUs, a stack of contexts, and a list of what was asked of it."""

    name = "fake"

    def __init__(self, cc: tuple[int, int] = (9, 0), cc1: tuple[int, int] | None = None) -> None:
        self.ccs = [cc, cc1 or cc]
        self.version = (13, 0)
        self.contexts: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.images: list[bytes] = []
        #: Error code for images that contain a text.
        self.refuse: dict[bytes, str] = {}
        self.launch_error = False

    def device_count(self) -> int:
        return 2

    def device_info(self, ordinal: int) -> DeviceInfo:
        return DeviceInfo(ordinal, f"Fake GPU {ordinal}", self.ccs[ordinal], 132, 232448, 50 << 20, self.version)

    def current_device(self) -> int | None:
        return self.contexts[-1] if self.contexts else None

    def push_primary(self, ordinal: int) -> None:
        self.calls.append(("push", ordinal))
        self.contexts.append(ordinal)

    def pop(self, token: None) -> None:
        self.calls.append(("pop", self.contexts.pop()))

    def read(self, address: int, num_bytes: int, stream: int) -> bytes:
        assert self.contexts, "memory was read without a context"
        self.calls.append(("read", address, num_bytes, stream))
        return bytes(num_bytes)

    def load(self, image: bytes, symbol: str, ordinal: int, smem_bytes: int) -> Launcher:
        assert self.current_device() == ordinal, "a module was loaded without a context of its device"
        self.images.append(image)
        for text, code in self.refuse.items():
            if text in image:
                raise driver_error("cuLibraryGetKernel", code, "refused by the test")
        self.calls.append(("load", symbol, ordinal, smem_bytes))

        def launch(grid: Any, threads: int, stream: int, params: int, attributes: Any = None) -> None:
            assert self.current_device() == ordinal, "a kernel was launched without a context of its device"
            if self.launch_error:
                raise driver_error("cuLaunchKernel", "CUDA_ERROR_INVALID_VALUE", "refused by the test")
            self.calls.append(("launch", grid, threads, stream, params, attributes))

        return launch


class FakeCompiler:
    """NVRTC that returns a label instead of code, and counts."""

    binding = "fake"

    def __init__(self, version: tuple[int, int] = (12, 9), archs: tuple[int, ...] = (80, 86, 89, 90, 100, 120)) -> None:
        self.version = version
        self.archs = archs
        self.compiled: list[str] = []
        self.error = ""

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...], ptx: bool
    ) -> tuple[bytes, str]:
        target = options[0].partition("=")[2]
        self.compiled.append(target)
        if self.error:
            raise CompileError("nvrtcCompileProgram failed: NVRTC_ERROR_COMPILATION", log=self.error)
        return (
            b"" if ptx else b"\x7fELF"
        ) + f"jit {target} by {self.version}".encode(), "ptxas info : Used 32 registers\n"


class World:
    """An installation in a temporary folder."""

    def __init__(self, folder: Path, driver: FakeDriver, compiler: FakeCompiler) -> None:
        self.root = folder / "kernels"
        self.cubins = folder / "cubins"
        self.cache = folder / "cache"
        self.driver = driver
        self.compiler = compiler
        self.spec = toy_spec()
        for name, text in {"entry/toy.cu": SOURCE, "ptx/scale.cuh": HEADER}.items():
            path = self.root / name
            path.parent.mkdir(parents=True)
            path.write_text(text)

    def install(self, *archs: str, kind: str = "wheel", **changes: Any) -> Store:
        """Make and use a store with a prebuilt cubin of the toy kernel per target; ``changes`` go into its manifest."""
        built = []
        for arch in archs:
            image = f"\x7fELF prebuilt sm_{arch}".encode()
            entry = {"size": len(image), "sha256": hashlib.sha256(image).hexdigest(), "registers": 32,
                     "smem_static_bytes": 0, "spill_bytes": 0}  # fmt: skip
            built.append((Job(self.spec, arch, ""), Compiled(entry, image, "")))
        manifest, files = packs.make(built, "0", "NVRTC 12.9.86", Sources(self.root))
        kernels.publish(self.cubins, {**manifest, **changes}, files)
        return self.reopen(kind)

    def reopen(self, kind: str = "wheel") -> Store:
        """Read the folder anew, as a new process would, and forget what is loaded."""
        store = Store.open(kind, self.root, self.cubins)
        set_store(store)
        set_driver(self.driver)
        return store

    def use_compiler(self, compiler: FakeCompiler | None) -> None:
        """Have this NVRTC from now on."""
        nvrtc.set_compiler(compiler)


@contextmanager
def isolated(monkeypatch: pytest.MonkeyPatch, folder: Path, cc: tuple[int, int] = (9, 0)) -> Iterator[World]:
    """A world with no cubins, a working NVRTC, a GPU of compute capability ``cc``, and its own cache."""
    for name in [name for name in os.environ if name.startswith("OMNIATTN_")]:
        monkeypatch.delenv(name)
    world = World(folder, FakeDriver(cc), FakeCompiler())
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(world.cache))
    log.reset()
    world.use_compiler(world.compiler)
    world.install()
    try:
        yield world
    finally:
        set_store(None)
        set_driver(None)
        nvrtc.set_compiler(None)
        log.reset()


def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take NVRTC away: both bindings fail as they do without libnvrtc."""

    def fail(self: object) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"')

    monkeypatch.setattr(nvrtc.CudaBindingsCompiler, "__init__", fail)
    monkeypatch.setattr(nvrtc.CupyCompiler, "__init__", fail)
    nvrtc.set_compiler(None)
