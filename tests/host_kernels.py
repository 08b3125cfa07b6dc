"""Kernels for sm_80 on the CPU: compiled by g++, a CTA's threads as fibers (host_cta). For tests without a GPU.

What is tested is the device code itself: which lane has what, which bytes it reads and writes. Not what is fast, what
races between CTAs, or what ptxas makes of it. Approximate functions are exact here.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniattn import arrays, runtime
from omniattn.kv.layout import ADDRESSES
from omniattn.plan import engine
from omniattn.registry import KernelSpec
from omniattn.runtime.device import DeviceInfo

TESTS = Path(__file__).parent
#: Headers of kernels_cu/ptx in whose place host_cta/ptx.h is.
_REPLACED = (
    "cluster_copy cluster_memory cp_async cvt cvt_quant gpu_sync half2 l2 ldmatrix load_ahead math mbarrier min_nan "
    "mma_sync rsqrt shared tma"
)
_PARAMS = {
    "attn_fwd_sm80": "Params", "index_logits_sm80": "IndexLogitsParams", "kv_append_sm80": "KvAppendParams",
    "kv_dequantize_sm80": "KvDequantizeParams",
    "kv_rounds_sm80": "KvDequantizeParams", "merge_states_sm80": "MergeStatesParams",
    "quantize_kv_sm90": "QuantizeParams",
    "top_k_sm80": "TopKParams",
    "latent_append_sm80": "LatentAppendParams",
    "block_means_sm80": "BlockMeansParams", "choose_blocks_sm80": "ChooseBlocksParams",
}  # fmt: skip
_DTYPES = {
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int32": np.int32,
    "bool": np.bool_,
}  # fmt: skip
#: Bytes in front of a result and behind it that nobody may write.
_GUARD = 4096


class HostKernels:
    """Calls of the package on NumPy's arrays, planned for a GPU and run by its kernels on the CPU.

    Parameters
    ----------
    folder : Path
        For what is compiled.
    monkeypatch : pytest.MonkeyPatch
    cc, sm_count
        The GPU that calls are planned for.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, cc: tuple[int, int] = (9, 0), sm_count: int = 132
    ) -> None:
        self._folder, self._libraries = folder, dict[str, ctypes.CDLL]()
        self._on_gpu: list[tuple[Any, str, str]] | None = None
        (folder / "ptx").mkdir(exist_ok=True)
        for name in _REPLACED.split():
            (folder / f"ptx/{name}.cuh").write_text('#include "ptx.h"\n', encoding="utf-8")
        types = (TESTS.parent / "kernels_cu/ptx/types.cuh").read_text(encoding="utf-8")
        types = re.sub(r'asm volatile\("mov\.b\d\d %0, %1;" .*\);', "y = x;", types)
        (folder / "ptx/types.cuh").write_text(types, encoding="utf-8")
        probe = "#include <ucontext.h>\n#include <cstdint>\n_Float16 half(float x) { return _Float16(x); }\n"
        (folder / "probe.cc").write_text(probe, encoding="utf-8")
        if shutil.which("g++") is None or self._compile("probe", str(folder / "probe.cc")):
            pytest.skip("there is no g++ 12 or newer with _Float16 and ucontext.h")
        describe = engine.describe

        def described(call: Any, raw: Any) -> dict[str, Any]:
            tensors = describe(call, raw)
            if self._on_gpu is not None:
                for t in [*tensors.values(), *([] if call.cache is None else call.cache.tensors)]:
                    self._on_gpu.append((t, t.device, t.framework))
                    t.device, t.framework = "cuda", "cupy"
            return tensors

        info = DeviceInfo(0, "Test GPU", cc, sm_count, 227 << 10, 50 << 20, (13, 0))
        monkeypatch.setattr(engine, "describe", described)
        monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
        monkeypatch.setattr(runtime, "has_tensor_maps", lambda: False)

    def __call__(self, function: Any, *given: Any, **options: Any) -> list[Any]:
        """The results, whose memory held NaN; the cache is written in place."""
        made = self._planned(function, *given, **options)
        launches = made.plan.launches
        addresses = {
            name: arrays.describe(x, name).ptr
            for name, x in zip(made.call.operation.arrays, made.call.objects, strict=True)
            if x is not None
        }
        if made.call.cache is not None:
            addresses |= {f"cache.{name}": made.call.cache.address(name) for name in ADDRESSES}
        memory, results = [], []
        for output in made.plan.problem.outputs:
            dtype = np.dtype(_DTYPES[output.dtype])
            memory.append(np.full(int(np.prod(output.shape)) * dtype.itemsize + 2 * _GUARD, 0xFF, np.uint8))
            addresses[output.name] = memory[-1].ctypes.data + _GUARD
            results.append(memory[-1][_GUARD:-_GUARD].view(dtype).reshape(output.shape))
        workspace = np.full(launches.workspace_bytes + 256, 0xFF, np.uint8)
        addresses["workspace"] = workspace.ctypes.data + -workspace.ctypes.data % 256
        for record in launches.records:
            data = bytearray(record.arguments)
            for p in record.pointers:
                data[p.offset : p.offset + 8] = (addresses[p.operand] + p.add).to_bytes(8, "little")
            library = self.library(record.spec)
            library.launch(bytes(data) + bytes(8), *record.grid[:2], record.threads)
        for around in memory:
            assert set(around[:_GUARD]) | set(around[-_GUARD:]) == {0xFF}, "written outside of a result"
        return results

    def operations(self, function: Any, *given: Any, **options: Any) -> list[str]:
        """What the kernels of a call compute, in their order."""
        return [record.spec.op for record in self._planned(function, *given, **options).plan.launches.records]

    def _planned(self, function: Any, *given: Any, **options: Any) -> engine.Described:
        self._on_gpu = []
        try:
            with engine.describing(), pytest.raises(engine.Described) as made:
                function(*given, **options)
        finally:
            for t, device, framework in self._on_gpu:
                t.device, t.framework = device, framework
            self._on_gpu = None
        return made.value

    def library(self, spec: KernelSpec) -> ctypes.CDLL:
        """A kernel, compiled once."""
        if spec.name not in self._libraries:
            # A CTA's own variables are static: one CTA runs at a time. Dynamic shared memory is launch.cc's.
            macros = {
                "KERNEL": f'"{spec.source}"', "SYMBOL": spec.symbol,
                "PARAMS": _PARAMS.get(spec.symbol, "DecodeParams"),
                "__shared__": "" if spec.smem_bytes else "static", **dict(spec.defines),
            }  # fmt: skip
            folders = (self._folder, TESTS / "host_cta", TESTS.parent / "kernels_cu")
            failed = self._compile(
                spec.name, str(TESTS / "host_cta/launch.cc"), *(f"-I{x}" for x in folders),
                *(f"-D{name}={value}" for name, value in macros.items()),
            )  # fmt: skip
            assert not failed, failed[:4000]
            self._libraries[spec.name] = ctypes.CDLL(str(self._folder / f"{spec.name}.so"))
        return self._libraries[spec.name]

    def _compile(self, name: str, *arguments: str) -> str:
        """What g++ says if it fails."""
        flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off"]
        command = ["g++", *flags, *arguments, "-o", str(self._folder / f"{name}.so")]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        return made.stderr or "failed" if made.returncode else ""
