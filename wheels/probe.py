"""What the smoke test runs inside the clean environment: ``python -I probe.py NAME``. Prints one line, or fails."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_IMPORT_SECONDS = 0.200


def imports() -> str:
    """The package comes from this environment, and importing it neither loads a CUDA library nor a framework."""
    import omniattn

    home = Path(omniattn.__file__).resolve()
    assert Path(sys.prefix).resolve() in home.parents, f"imported from {home}, not from the clean environment"
    heavy = [
        name
        for name in ("cuda.bindings.driver", "cuda.bindings.nvrtc", "torch", "cupy", "jax", "rich")
        if name in sys.modules
    ]
    assert not heavy, f"import omniattn imports {heavy}"
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = [line.split()[-1] for line in maps.read_text().splitlines() if "libcuda" in line or "libnvrtc" in line]
        assert not loaded, f"import omniattn loads {loaded[0]}"
    return f"import: omniattn {omniattn.__version__} from the environment, no CUDA library loaded"


def import_time() -> str:
    """``import omniattn`` in a fresh process, best of seven; CPU time, since other work on the machine is not ours."""
    code = "import time; start = time.process_time(); import omniattn; print(time.process_time() - start)"
    best = min(float(subprocess.check_output([sys.executable, "-I", "-c", code])) for _ in range(7))
    assert best <= MAX_IMPORT_SECONDS, (
        f"import omniattn: expected at most {MAX_IMPORT_SECONDS} s, received {best:.3f} s"
    )
    return f"import time: {best * 1e3:.0f} ms"


def cpu() -> str:
    """A call on NumPy arrays against the equation written out."""
    import numpy as np

    import omniattn as oa

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 5, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, 7, 2, 16)).astype(np.float32) for _ in range(2))
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    worst = 0.0
    for b in range(2):
        for h in range(4):
            scores = q[b, :, h].astype(np.float64) @ k[b, :, h // 2].T.astype(np.float64) / 4.0
            scores[np.arange(7)[None, :] > np.arange(5)[:, None] + 2] = -np.inf
            weights = np.exp(scores)
            total = weights.sum(axis=1)
            worst = max(worst, np.abs(o[b, :, h] - weights @ v[b, :, h // 2] / total[:, None]).max())
            worst = max(worst, np.abs(lse[b, h] - np.log(total)).max())
    assert o.dtype == np.float32, f"expected float32, received {o.dtype}"
    assert worst <= 1e-5, f"CPU result: expected within 1e-5 of the equation, received {worst:.2e}"
    return f"CPU call: within {worst:.1e} of the equation"


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class _Dtype(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _ManagedTensor(ctypes.Structure):
    """``DLManagedTensor`` of DLPack 0.x, which every consumer still takes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Dtype),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class GpuArray:
    """An fp16 array that says it is on GPU 0, as a framework's would: enough to get as far as the driver."""

    shape = (1, 128, 2, 64)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        self._shape = (ctypes.c_int64 * 4)(*self.shape)
        self._tensor = _ManagedTensor(1 << 20, _Device(2, 0), 4, _Dtype(2, 16, 1), self._shape, None, 0, None, None)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


def gpu_error() -> str:
    """A GPU call on a machine without a driver names what is missing and what to do."""
    import omniattn as oa
    from omniattn import errors

    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return "GPU call: not tried, this machine has a driver"
    array = GpuArray()
    try:
        oa.attention(array, array, array)
    except errors.DriverMissingError as error:
        text = str(error)
    else:
        raise AssertionError("a GPU call without a driver returned")
    assert "driver" in text.lower(), f"the error does not speak of the driver: {text}"
    assert "install" in text.lower(), f"the error does not say what to do: {text}"
    return f"GPU call without a driver: {text.splitlines()[0]}"


def kernels() -> str:
    """The installed store offers every prebuilt row of the registry, and its files are whole."""
    from omniattn.registry import REGISTRY
    from omniattn.runtime.store import get_store

    store = get_store()
    assert store.kind == "wheel", f"expected the wheel's kernels, received the {store.kind}'s"
    rows = {spec.name: spec for spec in REGISTRY}
    entries = [entry for alike in store.entries.values() for entry in alike]
    for entry in entries:
        store.read(entry, rows[entry.name])
    for spec in REGISTRY:
        store.sources.closure(spec.source)
    return f"kernels: {len(entries)} prebuilt and whole, sources of {len(rows)} rows complete"


def native() -> str:
    """The C module loads, and links neither CUDA nor a framework."""
    from omniattn import _native

    _native.clear()
    counts = _native.counts()
    assert not any(counts.values() if isinstance(counts, dict) else counts), f"expected counts of 0, received {counts}"
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded = [line.split()[-1] for line in maps.read_text().splitlines() if "libcuda" in line or "libtorch" in line]
        assert not loaded, f"the C module loads {loaded[0]}"
    return f"C module: {Path(_native.__file__).name} loads without CUDA and frameworks"


PROBES: dict[str, Callable[[], str]] = {
    "imports": imports,
    "import-time": import_time,
    "cpu": cpu,
    "gpu-error": gpu_error,
    "kernels": kernels,
    "native": native,
}

if __name__ == "__main__":
    started = time.monotonic()
    print(f"{PROBES[sys.argv[1]]()} ({time.monotonic() - started:.1f} s)")
