"""Launches that the driver refuses: what the error says, and that the next call works."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
cu = pytest.importorskip("cuda.bindings.driver")

import omniattn as oa  # noqa: E402
from omniattn import runtime  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.runtime.nvrtc import get_compiler  # noqa: E402
from omniattn.runtime.record import LaunchRecord, Pointer, Program  # noqa: E402

pytestmark = pytest.mark.gpu

#: Of local memory a thread: nearly all that a kernel may have (512 KiB).
LOCAL_BYTES = 500_000
SOURCE = f"""
struct Params {{ unsigned char* out; long long n; }};
extern "C" __global__ void hungry(const Params p) {{
    volatile unsigned char own[{LOCAL_BYTES}];
    for (long long i = threadIdx.x; i < p.n; i += 7) own[i] = (unsigned char)i;
    if (p.out) p.out[threadIdx.x] = own[p.n / 2];
}}
extern "C" __global__ void modest(const Params p) {{
    extern __shared__ unsigned char staged[];
    staged[threadIdx.x] = 7;
    if (p.out) p.out[threadIdx.x] = staged[threadIdx.x];
}}
"""


def _program(symbol: str, smem_bytes: int = 0) -> tuple[Program, Any]:
    arch = Arch.of_device(runtime.device_info(0).cc)
    image, _ = get_compiler().compile(SOURCE, "failures.cu", {}, (f"--gpu-architecture={arch}",), False)
    spec = dataclasses.replace(REGISTRY[0], name=symbol, symbol=symbol, smem_bytes=smem_bytes)
    kernel = runtime.load_image(spec, 0, image)
    record = LaunchRecord(spec, (1, 1, 1), 32, bytes(16), (Pointer(0, "out"),))
    return Program([record], ("out",), lambda spec: kernel, "a test of out uint8 (32,)"), kernel


def _launch(program: Program) -> Any:
    out = torch.zeros(32, dtype=torch.uint8, device="cuda")
    program.launch(torch.cuda.current_stream().cuda_stream, [out.data_ptr()])
    return out


def _works() -> None:
    q = torch.randn(1, 70, 2, 64, device="cuda", dtype=torch.float16)
    assert not oa.attention(q, q, q).isnan().any()


@pytest.mark.alone  # the driver may take all there is before it finds that it is too little
def test_more_local_memory_than_the_gpu_has() -> None:
    """What a nearly full GPU does to the first launch of any kernel that needs more than the launches before it."""
    properties = torch.cuda.get_device_properties(0)
    needed = LOCAL_BYTES * properties.max_threads_per_multi_processor * properties.multi_processor_count
    program, _ = _program("hungry")
    taken = max(0, torch.cuda.mem_get_info()[0] - needed + (4 << 30))
    filler = torch.empty(taken, dtype=torch.uint8, device="cuda")
    with pytest.raises(oa.errors.DriverError) as caught:
        _launch(program)
    del filler
    torch.cuda.empty_cache()
    text = str(caught.value)
    assert caught.value.call == "cuLaunchKernel", text
    assert "Launch: kernel hungry, grid (1, 1, 1), block (32, 1, 1), 0 bytes of dynamic shared memory" in text
    assert "of a test of out uint8 (32,)" in text
    assert " bytes of local memory a thread" in text
    assert "MiB of GPU memory are free" in text
    assert "the first launch of a kernel takes local memory" in text
    _works()


def test_shared_memory_that_the_function_does_not_allow() -> None:
    program, kernel = _program("modest", 100 << 10)
    assert (_launch(program) == 7).all()
    code, function = cu.cuKernelGetFunction(cu.CUkernel(kernel.function))
    assert not code
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert not cu.cuFuncSetAttribute(function, attribute, 1 << 10)[0]
    with pytest.raises(oa.errors.DriverError) as caught:
        _launch(program)
    text = str(caught.value)
    assert text.startswith("cuLaunchKernel failed with CUDA_ERROR_INVALID_VALUE"), text
    assert "102400 bytes of dynamic shared memory, 16 bytes of arguments" in text
    assert "up to 1024 bytes of dynamic shared memory" in text
    _works()
