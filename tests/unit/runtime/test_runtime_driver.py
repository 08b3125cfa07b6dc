"""Contexts, launches, the choice of the driver, and errors without one."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omniattn import runtime
from omniattn.arrays import events
from omniattn.errors import DeviceError, DriverError, DriverMissingError, UnsupportedError
from omniattn.runtime import driver as seam
from omniattn.runtime.driver import get_driver, set_driver
from omniattn.runtime.driver_base import LaunchAttributes
from tests.unit.runtime.runtime_fakes import World, isolated


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        world.install("90a")
        yield world


def test_the_frameworks_context_is_used(world: World) -> None:
    world.driver.contexts.append(1)
    runtime.load(world.spec, 1).launch((3, 2, 1), 128, 0xABC, 0xDEF)
    assert world.driver.calls == [
        ("load", "toy", 1, 4096),
        ("launch", (3, 2, 1), 128, 0xABC, 0xDEF, None),
    ]


@pytest.mark.parametrize("current", [[], [0]], ids=["no context", "another device's context"])
def test_otherwise_the_primary_context_is_pushed_and_popped(world: World, current: list[int]) -> None:
    world.driver.contexts.extend(current)
    loaded = runtime.load(world.spec, 1)
    assert world.driver.calls == [("push", 1), ("load", "toy", 1, 4096), ("pop", 1)]
    world.driver.calls.clear()
    loaded.launch((1, 1, 1), 32, 0, 1, (2, 1, 1))
    assert world.driver.calls == [("push", 1), ("launch", (1, 1, 1), 32, 0, 1, (2, 1, 1)), ("pop", 1)]
    assert world.driver.contexts == current


def test_the_context_is_popped_when_the_launch_fails(world: World) -> None:
    loaded = runtime.load(world.spec, 0)
    world.driver.launch_error = True
    with pytest.raises(DriverError, match=r"cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE"):
        loaded.launch((1, 1, 1), 32, 0, 1)
    assert world.driver.contexts == []


def test_device_info_is_asked_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = world.driver.device_info

    def ask(ordinal: int) -> runtime.DeviceInfo:
        asked.append(ordinal)
        return real(ordinal)

    monkeypatch.setattr(world.driver, "device_info", ask)
    infos = [runtime.device_info(0), runtime.device_info(0), runtime.device_info(1)]
    assert asked == [0, 1]
    assert infos[0] is infos[1]
    assert infos[2].name == "Fake GPU 1"


def test_importing_initializes_nothing() -> None:
    """Neither CUDA bindings nor NumPy, whatever the package's own ``__init__`` imports."""
    package = Path(runtime.__file__).parent.parent
    code = (
        "import sys, types\n"
        "package = types.ModuleType('omniattn')\n"
        f"package.__path__ = [{str(package)!r}]\n"
        "sys.modules['omniattn'] = package\n"
        "import omniattn.runtime\n"
        # ('cuda' alone is a namespace that a .pth file of the environment may make at start-up.)
        "print(sorted({'cuda.bindings', 'cuda.pathfinder', 'cupy', 'numpy', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr == ""
    assert done.stdout == "[]\n"


def test_no_driver_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.runtime import driver_cuda

    def fail(flags: int) -> Any:
        raise RuntimeError('"cuda" is an NVIDIA driver library')

    monkeypatch.delenv("OMNIATTN_DRIVER", raising=False)
    monkeypatch.setattr(driver_cuda.cu, "cuInit", fail)
    set_driver(None)
    with pytest.raises(DriverMissingError) as caught:
        get_driver()
    text = str(caught.value)
    assert "no CUDA driver library (libcuda.so.1, on Windows nvcuda.dll) could be loaded" in text
    assert text.endswith(
        "install the NVIDIA driver, R525 or newer (in a container: start it with --gpus all), or pass CPU arrays"
    )


def _block(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have ``import`` of these fail, and of the modules that import them start afresh."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    for module in ("omniattn.runtime.driver_cuda", "omniattn.runtime.driver_cupy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(seam.importlib.util, "find_spec", lambda name: None if name in names else object())
    set_driver(None)


def test_no_bindings_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIATTN_DRIVER", raising=False)
    _block(monkeypatch, "cuda.bindings", "cupy")
    with pytest.raises(DriverMissingError) as caught:
        get_driver()
    assert "and CuPy is not installed either" in str(caught.value)
    assert str(caught.value).endswith('What to do: pip install "cuda-bindings>=12.9.4,<14"')


def test_cuda_asked_for_but_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_DRIVER", "cuda")
    _block(monkeypatch, "cuda.bindings")
    with pytest.raises(DriverMissingError, match=r"import cuda.bindings failed with IMPORT_ERROR") as caught:
        get_driver()
    assert "CuPy" not in str(caught.value)


def test_cupy_asked_for_but_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_DRIVER", "cupy")
    _block(monkeypatch, "cupy")
    with pytest.raises(DriverMissingError, match=r"CuPy cannot be imported .*pip install cupy-cuda12x or cupy-cuda13x"):
        get_driver()


class FakeCupy:
    """The parts of CuPy that the driver uses: contexts are the numbers 100 + device."""

    def __init__(self) -> None:
        self.current = 0
        self.calls: list[tuple[Any, ...]] = []
        self.version = 13000
        #: Of this thread: 0 is global, 2 relaxed. Whether some thread captures a graph, and whether it still can.
        self.mode, self.capturing, self.captured = 0, False, True

        class CUDADriverError(RuntimeError):
            pass

        class CUDARuntimeError(RuntimeError):
            pass

        cu, rt, cuda = types.ModuleType("driver"), types.ModuleType("runtime"), types.ModuleType("cupy.cuda")
        cu.CUDADriverError, rt.CUDARuntimeError = CUDADriverError, CUDARuntimeError  # type: ignore[attr-defined]
        cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # type: ignore[attr-defined]

        def module_load(image: bytes) -> int:
            if self.capturing and self.mode != 2:
                self.captured = False
                raise CUDADriverError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: not while a stream is capturing")
            self.calls.append(("load", self.current))
            return 7

        def get_function(module: int, name: str) -> int:
            if name == "absent":
                raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
            return 1000 + self.current

        def launch(*args: Any) -> None:
            if args[1] == 0:
                raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
            self.calls.append(("launch", *args[:9], args[10]))

        def set_context(context: int) -> None:
            self.current = context

        functions: dict[str, Any] = {
            "ctxGetCurrent": lambda: self.current,
            "ctxGetDevice": lambda: self.current - 100,
            "ctxSetCurrent": set_context,
            "moduleLoadData": module_load,
            "moduleGetFunction": get_function,
            "moduleUnload": lambda module: self.calls.append(("unload",)),
            "funcSetAttribute": lambda *args: self.calls.append(("attribute", *args)),
            "launchKernel": launch,
            "funcGetAttribute": lambda attribute, function: attribute + 10,
        }
        for name, function in functions.items():
            setattr(cu, name, function)
        rt.memGetInfo = lambda: (5 << 20, 100 << 20)  # type: ignore[attr-defined]
        rt.driverGetVersion = lambda: self.version  # type: ignore[attr-defined]
        rt.getDeviceCount = lambda: 2  # type: ignore[attr-defined]
        rt.setDevice = lambda ordinal: set_context(100 + ordinal)  # type: ignore[attr-defined]
        rt.getDeviceProperties = lambda ordinal: {  # type: ignore[attr-defined]
            "name": b"Fake", "major": 9, "minor": 0, "multiProcessorCount": 132, "l2CacheSize": 50 << 20,
        }  # fmt: skip
        cuda.driver, cuda.runtime = cu, rt  # type: ignore[attr-defined]
        cuda.Device = lambda ordinal: types.SimpleNamespace(  # type: ignore[attr-defined]
            attributes={"MaxSharedMemoryPerBlockOptin": 232448}
        )
        self.modules = {"cupy.cuda": cuda, "cupy.cuda.driver": cu, "cupy.cuda.runtime": rt}
        self.cu = cu

    def exchange(self, mode: Any) -> int:
        """cuThreadExchangeStreamCaptureMode of libcuda, by a pointer of ctypes."""
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    fake = FakeCupy()
    root = types.ModuleType("cupy")
    root.cuda = fake.modules["cupy.cuda"]  # type: ignore[attr-defined]
    for name, module in {"cupy": root, **fake.modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "omniattn.runtime.driver_cupy", raising=False)
    monkeypatch.setenv("OMNIATTN_DRIVER", "cupy")
    module = importlib.import_module("omniattn.runtime.driver_cupy")
    monkeypatch.setattr(module, "_exchange", lambda: fake.exchange)
    set_driver(None)
    yield fake
    set_driver(None)


def test_cupy_driver(cupy: FakeCupy) -> None:
    driver = get_driver()
    assert driver.name == "cupy"
    info = runtime.device_info(1)
    assert (info.name, info.cc, info.sm_count, info.max_smem_optin, info.driver_version) == (
        "Fake", (9, 0), 132, 232448, (13, 0),
    )  # fmt: skip
    assert driver.current_device() is None
    with seam.device_context(driver, 1):
        assert driver.current_device() == 1
        launch = driver.load(b"image", "toy", 1, 4096)
        launch((3, 2, 1), 128, 0xABC, 0xDEF, None)
        # Behind the kernel before it: slower, and right.
        launch((3, 2, 1), 128, 0xABC, 0xDEF, LaunchAttributes(overlap=True))
        with pytest.raises(
            UnsupportedError, match=r"launched in clusters \(2, 1, 1\), for which CuPy has no"
        ) as caught:
            launch((2, 1, 1), 128, 0, 0, LaunchAttributes((2, 1, 1)))
        assert "cuda-bindings" in str(caught.value)
        said = (
            r"cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE: invalid argument\. Launch: the kernel has 14 "
            ".*up to 18 bytes of dynamic shared memory; 5 of 100 MiB of GPU memory are free.*report it with this"
        )
        with pytest.raises(DriverError, match=said):
            launch((0, 1, 1), 128, 0, 0, None)
    assert cupy.current == 0
    assert cupy.calls == [
        ("load", 101),
        ("attribute", 1101, 8, 4096),
        *[("launch", 1101, 3, 2, 1, 128, 1, 1, 4096, 0xABC, 0)] * 2,
    ]


def test_cupy_loads_again_in_another_context_of_the_device(cupy: FakeCupy) -> None:
    driver = get_driver()
    cupy.current = 100
    launch = driver.load(b"image", "toy", 0, 0)
    cupy.current = 555
    launch((1, 1, 1), 32, 0, 0, None)
    launch((1, 1, 1), 32, 0, 0, None)
    assert [call[:2] for call in cupy.calls] == [("load", 100), ("load", 555), ("launch", 1555), ("launch", 1555)]


def test_cupy_loads_while_a_graph_is_captured(cupy: FakeCupy) -> None:
    """In relaxed mode, which is the thread's for that time alone; in another context at a launch, too."""
    driver = get_driver()
    cupy.current, cupy.capturing = 100, True
    launch = driver.load(b"image", "toy", 0, 0)
    assert cupy.mode == 0
    cupy.current, cupy.mode = 555, 1
    launch((1, 1, 1), 32, 0, 0, None)
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_FOUND"):
        driver.load(b"image", "absent", 0, 0)
    assert (cupy.mode, cupy.captured) == (1, True)


def test_cupys_events_are_queried_in_the_same_mode(cupy: FakeCupy) -> None:
    with events._Cupy().relaxed():
        assert cupy.mode == 2
    assert cupy.mode == 0


def test_a_refused_exchange_of_modes_is_told(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = get_driver()
    monkeypatch.setattr(cupy, "exchange", lambda mode: 999)
    with pytest.raises(DriverError, match="cuThreadExchangeStreamCaptureMode failed with CUDA error 999"):
        driver.load(b"image", "toy", 0, 0)
    assert cupy.calls == []


def test_cupy_errors(cupy: FakeCupy) -> None:
    driver = get_driver()
    cupy.current = 100
    with pytest.raises(DriverError) as caught:
        driver.load(b"image", "absent", 0, 0)
    assert caught.value.code == "CUDA_ERROR_NOT_FOUND"
    assert cupy.calls[-1] == ("unload",)
    with pytest.raises(DeviceError, match=r"argument 'device': expected a CUDA device number below 2, received 2"):
        driver.device_info(2)


def test_cupy_without_a_driver_library(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError("CuPy failed to load libcuda.so.1: OSError")

    cupy.version = 0
    monkeypatch.setattr(cupy.cu, "ctxGetCurrent", fail)
    with pytest.raises(DriverMissingError, match=r"no CUDA driver library .*failed to load libcuda.so.1"):
        get_driver()


def test_cupy_is_used_when_cuda_bindings_are_missing(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNIATTN_DRIVER")
    _block(monkeypatch, "cuda.bindings")
    assert get_driver().name == "cupy"
