"""Cubins, cache, NVRTC and both drivers on a real GPU; threads, forks, streams and graphs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import reference, runtime, testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import KernelSpec, by_name  # noqa: E402
from omniattn.runtime import loader  # noqa: E402
from omniattn.runtime.arch import Arch  # noqa: E402
from omniattn.runtime.compile import compile_spec  # noqa: E402
from omniattn.runtime.driver import get_driver  # noqa: E402
from omniattn.runtime.driver_base import IMAGE_ERRORS  # noqa: E402
from omniattn.runtime.store import Store, set_store  # noqa: E402
from omniattn.testing.cases import CASES  # noqa: E402

from .attention_cases import poisoned, run_dense, to_gpu, to_numpy  # noqa: E402
from .installations import ROOT, Cubins, finish, run, start, wheel_layout, write_cubins  # noqa: E402
from .kernel_cases import poisoned_outputs  # noqa: E402
from .runtime_child import NOT_CALLED  # noqa: E402

pytestmark = pytest.mark.gpu

KERNEL = "attn_fwd_sm80_fp16_d64"
#: The largest source after expansion, so the longest to compile.
LARGEST = "attn_fwd_sm80_fp16_d256_mods"
#: CPU time that the first JIT of a kernel may take, start of NVRTC included: some 3 s, and more on cores whose other
#: thread is busy. It does not count for how long other processes of the suite had the cores.
FIRST_JIT_SECONDS = 6.0


def own_arch() -> Arch:
    """Target of the GPU that these tests run on."""
    return Arch.of_device(runtime.device_info(0).cc)


def cubins(spec: KernelSpec, *archs: str) -> dict[tuple[KernelSpec, str], bytes]:
    """``spec`` compiled for each target."""
    return {(spec, arch): compile_spec(spec, arch).cubin for arch in archs}


def foreign_archs() -> list[str]:
    """Prebuilt targets whose binaries do not run on this GPU."""
    return [arch for arch in by_name(KERNEL).prebuild if not Arch.parse(arch).runs_on(runtime.device_info(0).cc)]


def forget() -> None:
    """Leave this process as if it had loaded nothing and seen no call; files stay."""
    PLANS.clear()
    loader.reset()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Cubins], Path]]:
    """Gives this process a wheel's store with the given cubins and an empty cache (returned), with nothing loaded."""
    for name in [name for name in os.environ if name.startswith("OMNIATTN_")]:
        monkeypatch.delenv(name)
    cache = tmp_path / "cache"
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(cache))

    def use(images: Cubins) -> Path:
        folder = tmp_path / "installed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_cubins(folder, images)
        set_store(Store.open("wheel", ROOT / "kernels_cu", folder))
        forget()
        return cache

    yield use
    set_store(None)
    forget()


def kept(cache: Path) -> list[Path]:
    """Files of a cache but for those that processes wait by."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def attend(seed: int = 0, head_dim: int = 64) -> None:
    """One small causal problem against the reference."""
    q, k, v = testing.make_qkv(seqlen_q=70, seqlen_k=99, head_dim=head_dim, dtype="float16", seed=seed)
    run_dense(q, k, v, "float16", causal=True)


# Where binaries come from


@pytest.mark.parametrize("kernel", [KERNEL, LARGEST])
def test_unseen_architecture(kernel: str, tmp_path: Path) -> None:
    """A wheel that holds nothing for this GPU: NVRTC, then the cache without NVRTC, then an error that says all."""
    spec = by_name(kernel)
    others = foreign_archs()
    assert others, "the wheel would hold nothing for any other GPU"
    package = wheel_layout(tmp_path / "site", cubins(spec, *others))
    cache = tmp_path / "cache"
    own = str(own_arch())

    first = run("first_use", kernel, package=package, OMNIATTN_CACHE_DIR=str(cache))
    assert first["package"] == str(package / "omniattn")
    assert (first["kernel"], first["explained"], first["origin"], first["arch"]) == (kernel, "jit", "jit", own)
    assert f"for {own}" in first["reason"]
    assert first["cpu_seconds"] <= FIRST_JIT_SECONDS
    held = ", ".join(f"sm_{arch}" for arch in others)
    assert first["tried"][0][0] == "prebuilt kernels"
    assert first["tried"][0][1].startswith(f"the wheel holds {held}, none of which runs on compute capability")
    assert first["tried"][1] == ["disk cache", f"not in {cache}"]

    second = run("first_use", kernel, "--no-nvrtc", package=package, OMNIATTN_CACHE_DIR=str(cache))
    assert (second["explained"], second["origin"], second["arch"]) == ("cache", "cache", own)

    shutil.rmtree(cache)
    third = run("first_use", kernel, "--no-nvrtc", package=package, OMNIATTN_CACHE_DIR=str(cache))
    assert third["explained"] == "unsupported"
    text = third["error"]
    assert text.startswith(f"no usable binary of kernel {kernel!r} for {own}. Tried, in this order:\n")
    assert f"\n  - prebuilt kernels: the wheel holds {held}, none of which runs on compute capability" in text
    assert f"\n  - disk cache: not in {cache}\n" in text
    assert f"\n  - NVRTC for {own}: NVRTC, the run-time compiler, cannot be loaded" in text
    advice = text.partition("\nWhat to do: ")[2]
    assert 'pip install "omniattn[jit' in advice


def test_prebuilt_is_used_even_without_jit(install: Callable[[Cubins], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = by_name(KERNEL), own_arch()
    cache = install(cubins(spec, own.number, *foreign_archs()))
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    loaded = runtime.load(spec, 0)
    assert (loaded.origin, loaded.arch, loaded.tried) == (f"prebuilt {own}", str(own), ())
    assert runtime.load(spec, 0) is loaded
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", KERNEL)
    attend()
    # Nothing was compiled, and the opened pack is kept.
    assert [path.parent for path in kept(cache)] == [cache / "opened"]


def test_force_jit(install: Callable[[Cubins], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, own = by_name(KERNEL), own_arch()
    cache = install(cubins(spec, own.number))
    monkeypatch.setenv("OMNIATTN_FORCE_JIT", "1")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", KERNEL)
    loaded = runtime.load(spec, 0)
    assert (loaded.origin, loaded.arch) == ("jit", str(own))
    assert loaded.tried[0] == ("prebuilt kernels", "passed over because of OMNIATTN_FORCE_JIT=1")
    attend()
    assert len(kept(cache)) == 1
    forget()
    assert runtime.load(spec, 0).origin == "cache"
    attend(seed=1)


def test_disable_jit(install: Callable[[Cubins], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = install({})
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", KERNEL)
    with pytest.raises(oa.errors.KernelNotFoundError) as caught:
        attend()
    text = str(caught.value)
    assert "\n  - NVRTC: forbidden by OMNIATTN_DISABLE_JIT=1\n" in text
    assert text.endswith("What to do: unset OMNIATTN_DISABLE_JIT, so that the kernel can be compiled on this machine")
    assert not cache.exists()


def test_a_cubin_of_another_architecture_is_passed_over(
    install: Callable[[Cubins], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where this GPU's belongs, and the manifest vouches for its bytes: only the driver can tell."""
    spec, own = by_name(KERNEL), own_arch()
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", KERNEL)
    others = foreign_archs()
    assert others
    for foreign in others:
        cache = install({(spec, own.number): compile_spec(spec, foreign).cubin})
        shutil.rmtree(cache, ignore_errors=True)
        loaded = runtime.load(spec, 0)
        assert loaded.origin == "jit"
        what, reason = loaded.tried[0]
        assert what == f"prebuilt {own} ({own})"
        assert any(code in reason for code in IMAGE_ERRORS), reason
        attend()


def test_a_damaged_cache_entry_is_compiled_again(install: Callable[[Cubins], Path]) -> None:
    spec = by_name(KERNEL)
    cache = install({})
    assert runtime.load(spec, 0).origin == "jit"
    (path,) = kept(cache)
    path.write_bytes(path.read_bytes()[:-100])
    forget()
    loaded = runtime.load(spec, 0)
    assert loaded.origin == "jit"
    assert "is damaged" in dict(loaded.tried)["disk cache"]
    forget()
    assert runtime.load(spec, 0).origin == "cache"


def test_force_kernel_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", KERNEL)
    with pytest.raises(oa.errors.ArgumentError, match=r"OMNIATTN_FORCE_KERNEL.*head_dim up to 64, not 128"):
        attend(head_dim=128)


# Drivers


def test_both_drivers_give_the_same_bits(tmp_path: Path) -> None:
    """Each driver in a process of its own; in a third, without cuda-bindings, CuPy has to bring NVRTC as well."""
    pytest.importorskip("cupy")
    cache = str(tmp_path / "cache")
    files = {name: tmp_path / f"{name}.npz" for name in ("cuda", "cupy", "alone")}
    processes = {
        name: start("operations", str(files[name]), OMNIATTN_DRIVER=name, OMNIATTN_CACHE_DIR=cache)
        for name in ("cuda", "cupy")
    }
    processes["alone"] = start(
        "operations", str(files["alone"]), "--no-cuda-bindings", OMNIATTN_FORCE_JIT="1",
        OMNIATTN_CACHE_DIR=str(tmp_path / "empty"),
    )  # fmt: skip
    reports = {name: finish(process) for name, process in processes.items()}
    assert {name: report["driver"] for name, report in reports.items()} == {
        "cuda": "cuda", "cupy": "cupy", "alone": "cupy",
    }  # fmt: skip
    assert reports["alone"]["compiler"] == "CuPy"
    bits = {name: dict(np.load(file)) for name, file in files.items()}
    operations = {label.split()[0] for label in bits["cuda"]}
    others = {"append", "decode", "latent_decode", "block_mask", "sparse_blocks", "index_logits", "top_k"}
    assert operations == {*CASES, *others, "attention_sparse"} - {*NOT_CALLED}
    assert bits["cuda"].keys() == bits["cupy"].keys() == bits["alone"].keys()
    for label, expected in bits["cuda"].items():
        # What CuPy's own NVRTC makes may differ in rounding; the child has compared it with the reference.
        np.testing.assert_array_equal(bits["cupy"][label], expected, err_msg=label)


# Contexts, threads, forks


@pytest.mark.parametrize("given", [False, True], ids=["new output", "out="])
def test_thread_without_a_context(given: bool) -> None:
    host = testing.make_qkv(seqlen_q=70, seqlen_k=99, dtype="bfloat16")
    q, k, v = (to_gpu(x, "bfloat16") for x in host)
    out = poisoned(host[0].shape, "bfloat16") if given else None
    expected = oa.attention(q, k, v)
    torch.cuda.synchronize()
    found: dict[str, Any] = {}

    def work() -> None:
        found["device before"] = get_driver().current_device()
        found["o"] = oa.attention(q, k, v, out=out)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found["device before"] is None
    torch.cuda.synchronize()
    assert torch.equal(found["o"], expected)
    assert not found["o"].isnan().any()


def test_many_threads_at_once(install: Callable[[Cubins], Path]) -> None:
    """16 threads, each with a stream and shapes of its own, race to load, plan and launch."""
    install({})
    count = 16
    barrier = threading.Barrier(count)
    problems = [
        testing.make_qkv(seqlen_q=40 + 7 * i, seqlen_k=90, head_dim=(32, 64)[i % 2], dtype="float16", seed=i)
        for i in range(count)
    ]
    inputs = [[to_gpu(x, "float16") for x in qkv] for qkv in problems]
    outputs = [[poisoned(qkv[0].shape, "float16") for _ in range(8)] for qkv in problems]
    torch.cuda.synchronize()

    def work(i: int) -> None:
        barrier.wait(timeout=60)
        with torch.cuda.stream(torch.cuda.Stream()):
            for out in outputs[i]:
                oa.attention(*inputs[i], causal=True, out=out)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, i) for i in range(count)]:
            future.result()
    torch.cuda.synchronize()
    for qkv, outs in zip(problems, outputs, strict=True):
        exact, _ = reference.attention(*qkv, causal=True, compute_dtype=np.float64)
        naive, _ = testing.same_dtype_naive(*qkv, causal=True, dtype="float16")
        for out in outs:
            testing.assert_close(to_numpy(out), exact, naive=naive, dtype="float16", atol=1e-6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork() -> None:
    report = run("fork")
    assert report["before"] == "right"
    assert report["after"].startswith("DriverError: cuInit failed with CUDA_ERROR_NOT_INITIALIZED")
    assert "multiprocessing.get_context('spawn')" in report["after"]


# torch: streams, graphs, gradients, dtypes


def test_non_default_stream() -> None:
    """The library follows torch's current stream, and both ways order the work by streams alone."""
    host = testing.make_qkv(seqlen_q=130, dtype="float16")
    source = [to_gpu(x, "float16") for x in host]
    late = [torch.zeros_like(x) for x in source]
    expected = oa.attention(*source)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # some 500 ms
        for target, x in zip(late, source, strict=True):
            target.copy_(x)
        o = oa.attention(*late)
        copy = o.clone()
        assert not stream.query(), "the producer ended too early to prove anything"
    stream.synchronize()
    assert torch.equal(copy, expected)


@pytest.mark.parametrize("jit", ["any binary", "jit"])
def test_first_call_of_a_process_inside_a_capture(jit: str, tmp_path: Path) -> None:
    forced: dict[str, Any] = {"OMNIATTN_FORCE_JIT": "1"} if jit == "jit" else {}
    assert run("capture", OMNIATTN_CACHE_DIR=str(tmp_path), **forced) == {"replays": 3}


def test_graph_of_varlen_and_merge() -> None:
    """Lengths are read on the device, so a captured call follows them as it follows the values."""
    rows, heads, dim = 200, 4, 64
    q, k, v = (torch.zeros(rows, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu = torch.zeros(4, device="cuda", dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": rows, "max_seqlen_k": rows, "return_lse": True}

    def both() -> tuple[Any, Any]:
        o, lse = oa.attention_varlen(q, k, v, causal=True, **options)
        return oa.merge_states(o, lse, *oa.attention_varlen(q, k, v, window=(5, 3), **options))

    both()  # loads the kernels: of a process's first calls see test_first_call_of_a_process_inside_a_capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = both()
    for seed, lengths in ((1, [200, 0, 0]), (2, [1, 60, 139]), (3, [50, 50, 50])):
        for t, x in zip((q, k, v), testing.make_qkv(batch=None, seqlen_q=rows, heads_q=heads, seed=seed), strict=True):
            t.copy_(to_gpu(x, "bfloat16"))
        cu.copy_(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32))
        o.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        with poisoned_outputs():
            expected_o, expected_lse = both()
        assert torch.equal(o, expected_o), lengths
        assert torch.equal(lse, expected_lse), lengths
        assert o[: sum(lengths)].abs().max() > 0
        assert not o.isnan().any()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode: Any) -> None:
    host = testing.make_qkv(seqlen_q=70, dtype="float16")
    q, k, v = (to_gpu(x, "float16").requires_grad_() for x in host)
    with pytest.raises(oa.errors.UnsupportedError, match=r"'v' requires a gradient.*torch\.no_grad\(\)"):
        oa.quantize_v(v)
    with mode():
        o = oa.attention(q, k, v)
        assert o.is_inference() == (mode is torch.inference_mode)
        made_here = oa.attention(q.clone(), k.clone(), v.clone())
    assert not o.requires_grad
    expected = oa.attention(q.detach(), k.detach(), v.detach())
    assert torch.equal(o, expected)
    assert torch.equal(made_here, expected)
    assert not expected.isnan().any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_dtypes_without_a_gpu_kernel(dtype: str) -> None:
    x = torch.zeros(1, 16, 2, 64, device="cuda", dtype=getattr(torch, dtype))
    with pytest.raises(oa.errors.DtypeError) as caught:
        oa.attention(x, x, x)
    expected = f"attention(): argument 'q': expected float16 or bfloat16 or float8_e4m3fn on cuda, received {dtype}"
    assert str(caught.value) == expected
