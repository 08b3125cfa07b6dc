"""The cuda-bindings driver against a stand-in for libcuda, compiled here: every call that it makes, for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="needs Linux and a C compiler for the stand-in"
)

PRELUDE = """
import ctypes, os
from omniattn.errors import OmniattnError
from omniattn.runtime import device_info, load_image
from omniattn.runtime.driver import get_driver, device_context
from omniattn.runtime.driver_base import LaunchAttributes
from tests.unit.runtime.runtime_fakes import toy_spec
value = ctypes.c_uint64(77)
address = ctypes.addressof(value)
def attempt(work):
    try:
        print(work())
    except OmniattnError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libcuda")
    source = Path(__file__).with_name("test_runtime_fake_libcuda.c")
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1"), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=600)
    return folder


def run(libcuda: Path, code: str, **variables: str) -> tuple[str, list[str]]:
    """Standard output, and the calls of the driver, of a new process."""
    root = Path(__file__).parents[3]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNIATTN_")}
    environment.update(
        LD_LIBRARY_PATH=str(libcuda), PYTHONPATH=f"{root / 'src'}{os.pathsep}{root}", FAKE_CUDA_TRACE="1", **variables
    )
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_events_are_queried_in_relaxed_capture_mode(libcuda: Path) -> None:
    """A query in another mode fails and invalidates the graph that another thread captures."""
    code = "from omniattn.arrays import events; events.keep_until_done(0x7000, 1, [1]); print(events.collect())"
    out, calls = run(libcuda, code)
    assert out == "0\n"
    first = calls.index("event recorded on 0x7000")
    seen = [call for call in calls[first:] if "event" in call or "mode" in call]
    assert seen == [
        "event recorded on 0x7000",
        "capture mode 2",
        "event queried in capture mode 2",
        "capture mode 0",
        "event destroyed",
    ]


def test_memory_in_the_order_of_streams(libcuda: Path) -> None:
    code = """
import numpy as np
from omniattn.arrays import capsule
from omniattn.arrays.exporter import OwnArray
one = OwnArray((2, 4), "float32", "cuda", 0x7000, 1)
one.clear(0x7000)
taken = capsule.Capsule(one.__dlpack__(stream=0x8000), "x")
copied = capsule.Capsule(one.__dlpack__(stream=0x9000, copy=True), "x")
host = capsule.Capsule(one.__dlpack__(dl_device=(1, 0)), "x")
print(host.shape, host.dtype, *(ctypes.string_at(x.ptr, 32) == bytes(32) for x in (host, copied)))
del one
taken.release()
print("end")
copied.release()
"""
    out, calls = run(libcuda, code)
    assert out == "(2, 4) float32 True True\nend\n"
    kinds = ("bytes", "waits", "recorded", "free", "wait for")
    assert [call for call in calls if any(kind in call for kind in kinds)] == [
        "32 bytes on 0x7000 in capture mode 2", "event recorded on 0x7000",
        "32 bytes are 0 on 0x7000", "event recorded on 0x7000",
        "0x8000 waits",
        "32 bytes on 0x9000 in capture mode 2", "event recorded on 0x9000", "0x9000 waits", "copy 32 bytes on 0x9000",
        "event recorded on 0x9000", "0x9000 waits",
        "0x51de waits", "wait for 0x51de",
        "event recorded on 0x8000", "0x51de waits", "free on 0x51de",
        "event recorded on 0x9000", "0x51de waits", "free on 0x51de",
    ]  # fmt: skip


def test_copies_to_the_host_and_back(libcuda: Path) -> None:
    """As bytes where they lie as one, in rows where they do not, each row where rows are too far apart for that."""
    code = """
import gc
from omniattn.arrays import events
from omniattn.kv.swap import _PinnedMemory
memory, backend = _PinnedMemory(64, 1), events.backend()
device = ctypes.create_string_buffer(bytes(range(64)), 64)
here = ctypes.addressof(device)
with backend.context(1):
    backend.copy_rows(memory.address, 8, here, 8, 8, 2, 0x7000)
    print(ctypes.string_at(memory.address, 16) == bytes(range(16)))
    backend.copy_rows(memory.address, 8, here, 16, 8, 3, 0x7000)
    print(ctypes.string_at(memory.address, 24) == bytes([*range(8), *range(16, 24), *range(32, 40)]))
    backend.copy_rows(here, 20, memory.address, 8, 8, 2, 0x7000)
    print(ctypes.string_at(here + 20, 8) == bytes(range(16, 24)))
    events._MAX_PITCH = 8
    backend.copy_rows(memory.address, 8, here + 40, 12, 4, 2, 0x7000)
    print(ctypes.string_at(memory.address + 8, 4) == bytes(range(52, 56)))
memory.last = events.Event(0x7000, 1)
del memory
gc.collect()
"""
    out, calls = run(libcuda, code)
    assert out == 4 * "True\n"
    kinds = ("on the host", "copy of", "host waits")
    assert [call for call in calls if any(kind in call for kind in kinds)] == [
        "64 bytes on the host, flags 1, in capture mode 2",
        "copy of 16 bytes on 0x7000", "copy of 3 x 8 bytes on 0x7000", "copy of 2 x 8 bytes on 0x7000",
        "copy of 4 bytes on 0x7000", "copy of 4 bytes on 0x7000",
        "host waits in capture mode 2", "free on the host",
    ]  # fmt: skip


def test_device_info(libcuda: Path) -> None:
    out, calls = run(libcuda, "print(device_info(1)); attempt(lambda: device_info(2))")
    assert out.splitlines() == [
        "DeviceInfo(ordinal=1, name='Fake GPU 1', cc=(8, 0), sm_count=132, max_smem_optin=232448, l2_bytes=52428800, "
        "driver_version=(13, 0), clock_mhz=1980.0, memory_gb_s=3352.32)",
        "DeviceError argument 'device': expected a CUDA device number below 2, received 2",
    ]
    assert calls == ["cuInit"]


def test_load_and_launch(libcuda: Path) -> None:
    code = """
kernel = load_image(toy_spec(), 1, b"good image")
kernel.launch((3, 2, 1), 128, 0xABC, address)
kernel.launch((4, 2, 1), 256, 0xABC, address, LaunchAttributes((2, 1, 1)))
get_driver().push_primary(1)
kernel.launch((5, 1, 1), 128, 0, address)
kernel.launch((6, 1, 1), 128, 2, address, LaunchAttributes((2, 1, 1)))
kernel.launch((7, 1, 1), 128, 2, address, LaunchAttributes(overlap=True))
kernel.launch((8, 1, 1), 128, 2, address, LaunchAttributes((2, 1, 1), True))
"""
    out, calls = run(libcuda, code)
    assert out == ""
    assert calls == [
        "cuInit",
        "retain 1",
        "push 1",
        "capture mode 2",
        "load good image",
        "attribute 8 = 4096 on 1",
        "capture mode 0",
        "pop 1",
        "push 1",
        "launch 3,2,1 x 128 smem 4096 stream 0xabc param 77 on 1",
        "pop 1",
        "push 1",
        "launchex 4,2,1 x 256 smem 4096 stream 0xabc attribute 4 cluster 2,1,1 param 77 on 1",
        "pop 1",
        "push 1",
        "launch 5,1,1 x 128 smem 4096 stream (nil) param 77 on 1",
        "launchex 6,1,1 x 128 smem 4096 stream 0x2 attribute 4 cluster 2,1,1 param 77 on 1",
        "launchex 7,1,1 x 128 smem 4096 stream 0x2 attribute 6 = 1 param 77 on 1",
        "launchex 8,1,1 x 128 smem 4096 stream 0x2 attribute 6 = 1 attribute 4 cluster 2,1,1 param 77 on 1",
    ]


def test_return_codes_become_errors(libcuda: Path) -> None:
    code = """
attempt(lambda: load_image(toy_spec(), 0, b"WRONG"))
attempt(lambda: load_image(toy_spec(symbol="absent"), 0, b"good"))
kernel = load_image(toy_spec(), 0, b"good")
attempt(lambda: kernel.launch((0, 1, 1), 128, 0, address))
attempt(lambda: kernel.launch((0, 1, 1), 128, 0, address, LaunchAttributes((2, 1, 1))))
print(get_driver().current_device())
"""
    out, calls = run(libcuda, code)
    assert out.splitlines() == [
        "DriverError cuLibraryGetKernel failed with CUDA_ERROR_NO_BINARY_FOR_GPU: text of the driver",
        "DriverError cuLibraryGetKernel failed with CUDA_ERROR_NOT_FOUND: text of the driver",
        *(
            f"DriverError {call} failed with CUDA_ERROR_INVALID_VALUE: invalid argument. Launch: the kernel has 104 "
            "registers a thread, 103 bytes of local memory a thread, CTAs of up to 100 threads, 101 bytes of static "
            "shared memory, up to 108 bytes of dynamic shared memory; 31 of 81559 MiB of GPU memory are free. What to "
            "do: free GPU memory and call again, if little is free: the first launch of a kernel takes local memory "
            "for all threads that the GPU can hold. Otherwise report it with this message"
            for call in ("cuLaunchKernel", "cuLaunchKernelEx")
        ),
        "None",
    ]
    assert calls.count("unload") == 2
    assert calls.count("capture mode 0") == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "100",
            "DriverError cuInit failed with CUDA_ERROR_NO_DEVICE: text of the driver. What to do: check nvidia-smi",
        ),
        (
            "3",
            "DriverError cuInit failed with CUDA_ERROR_NOT_INITIALIZED: text of the driver. What to do: if this",
        ),
    ],
)
def test_cuda_cannot_be_initialized(libcuda: Path, code: str, text: str) -> None:
    out, _ = run(libcuda, "attempt(get_driver)", FAKE_CUDA_INIT=code)
    assert out.startswith(text)


def test_fork_after_import_and_after_use(libcuda: Path) -> None:
    code = """
def fork(work):
    import sys
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        attempt(work)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
fork(lambda: device_info(0).name)
kernel = load_image(toy_spec(), 0, b"good")
fork(lambda: device_info(0).name)
fork(lambda: kernel.launch((1, 1, 1), 32, 0, address))
print(device_info(0).name)
"""
    out, _ = run(libcuda, code)
    lines = out.splitlines()
    assert lines[0] == lines[3] == "Fake GPU 0"
    assert "had already used CUDA through omniattn when it forked" in lines[1]
    assert "cuCtxGetDevice failed with CUDA_ERROR_NOT_INITIALIZED" in lines[2]
    assert "multiprocessing.get_context('spawn')" in lines[2]


def test_launches_from_many_threads_keep_their_parameters(libcuda: Path) -> None:
    code = """
import threading
kernel = load_image(toy_spec(), 0, b"good")
def work(number):
    mine = ctypes.c_uint64(number)
    for _ in range(50):
        kernel.launch((number + 1, 1, 1), 32, 0, ctypes.addressof(mine))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    _, calls = run(libcuda, code)
    launches = [line.split() for line in calls if line.startswith("launch ")]
    assert len(launches) == 400
    assert all(int(words[1].split(",")[0]) == int(words[words.index("param") + 1]) + 1 for words in launches)


def test_no_libcuda(tmp_path: Path) -> None:
    """On a machine with a driver the library is found on the system's path, and there is nothing to see."""
    out, _ = run(tmp_path, "attempt(lambda: get_driver().name)")
    assert out == "cuda\n" or (
        out.startswith("DriverMissingError cuInit failed with LIBRARY_NOT_FOUND: no CUDA driver library (libcuda.so.1")
        and "install the NVIDIA driver, R525 or newer" in out
    )
