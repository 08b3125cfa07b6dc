"""What the runtime tests do in fresh processes: ``python runtime_child.py COMMAND ...``; prints one line of JSON.

Nothing of omniattn but the public names is imported before the command needs it, because what happens at first use is
what is tested.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import omniattn as oa

SHAPE: dict[str, Any] = {"batch": 2, "seqlen_q": 77, "seqlen_k": 130, "heads_q": 4, "heads_kv": 2, "head_dim": 64}


def hide(name: str) -> None:
    """Make the module ``name`` impossible to import from now on."""
    parent, _, leaf = name.rpartition(".")
    package = sys.modules.get(parent)
    if package is not None and hasattr(package, leaf):
        delattr(package, leaf)
    sys.modules[name] = None  # type: ignore[assignment]


def hide_nvrtc() -> None:
    """Neither binding of NVRTC can be imported any more."""
    hide("cuda.bindings.nvrtc")
    hide("cupy.cuda.nvrtc")


def first_use(name: str, *options: str) -> dict[str, Any]:
    """Load kernel ``name``, take its CPU time, attend; CuPy arrays in float16, moved without a kernel of CuPy's."""
    import cupy

    if "--no-nvrtc" in options:
        hide_nvrtc()
    from omniattn import reference, runtime, testing
    from omniattn.registry import by_name

    spec = by_name(name)
    assert spec.dtype == "float16"
    os.environ["OMNIATTN_FORCE_KERNEL"] = name
    host = testing.make_qkv(**{**SHAPE, "head_dim": spec.head_dim}, dtype="float16")
    q, k, v = (cupy.asarray(x.astype(np.float16)) for x in host)
    out = cupy.asarray(np.full(host[0].shape, np.nan, dtype=np.float16))
    report: dict[str, Any] = {"package": str(Path(oa.__file__).parent)}
    explained = oa.explain(q, k, v, causal=True)
    report |= {"kernel": explained.kernel, "explained": explained.origin, "reason": explained.origin_reason}
    start = time.process_time()
    try:
        loaded = runtime.load(spec, 0)
    except oa.errors.KernelNotFoundError as error:
        return report | {"error": str(error)}
    report |= {"cpu_seconds": time.process_time() - start, "origin": loaded.origin, "arch": loaded.arch}
    assert oa.attention(q, k, v, causal=True, out=out) is out
    exact, _ = reference.attention(*host, causal=True, compute_dtype=np.float64)
    naive, _ = testing.same_dtype_naive(*host, causal=True, dtype="float16")
    testing.assert_close(cupy.asnumpy(out), exact, naive=naive, dtype="float16", atol=1e-6)
    return report | {"tried": loaded.tried}


def operations(file: str, *options: str) -> dict[str, Any]:
    """Every operation in every dtype against its reference; the results' bits go to ``file``."""
    import torch

    if "--no-cuda-bindings" in options:
        hide("cuda.bindings")
    from kernel_cases import cases, run_case  # type: ignore[import-not-found]

    from omniattn.registry import REGISTRY, by_name
    from omniattn.runtime import nvrtc
    from omniattn.runtime.driver import get_driver
    from omniattn.testing.cases import CASES, operation_of

    # CuPy has no tensor maps: the kernels that both drivers can launch.
    select: Any = importlib.import_module("omniattn.select.candidates")
    select.REGISTRY = tuple(spec for spec in REGISTRY if not spec.tensor_maps)
    bits = {}
    low = by_name("attn_int8_sm80_bf16_d64")  # speaks for what GPUs without a choice of their own take
    of_cases = {(operation_of(spec), spec.dtype) for spec in REGISTRY if operation_of(spec) in CASES}
    for op, dtype in sorted((op, dtype) for op, dtype in of_cases if op not in NOT_CALLED):
        for case in cases(op):
            if (
                "blocks" in case.arrays
            ):  # at 8 bits, of kernels with tensor maps alone; `_blocks_and_lists` has exact ones
                continue
            for name, output in run_case(torch, case, op, dtype, 64, low if op == operation_of(low) else None).items():
                label = f"{op} {dtype} {case.name} {name}".replace("/", " ")
                bits[label] = output.contiguous().view(torch.uint8).cpu().numpy()
    bits |= _caches()
    bits |= _blocks_and_lists()
    np.savez(file, **bits)
    compiler = nvrtc._compiler  # None: not loaded
    return {"driver": get_driver().name, "compiler": compiler.binding if compiler else None}


#: Operations with cases that a call of another one runs, and only where its schedule is chosen.
NOT_CALLED = ("attention_split", "attention_combine", "attention_combine_lse", "attention_combine_packed")


def _caches() -> dict[str, Any]:
    """append, copy_blocks and decode, planes and results."""
    import torch

    found = {}
    generator = torch.Generator("cuda").manual_seed(0)
    for k_dtype in ("bf16", "fp8", "int4"):
        q, k, v = (
            torch.randn(2, n, h, 64, device="cuda", generator=generator).bfloat16()
            for n, h in ((1, 8), (300, 1), (300, 1))
        )
        cache = oa.PagedKVCache(80, 16, 1, 64, like=q, k_dtype=k_dtype)
        lens = torch.full((2,), 300, dtype=torch.int32, device="cuda")
        table = torch.arange(38, dtype=torch.int32, device="cuda").reshape(2, 19)
        oa.append(cache, k, v, seq_lens=lens, block_table=table)
        oa.copy_blocks(cache, [(i, 40 + i) for i in range(38)])
        o, lse = oa.decode(q, cache, seq_lens=lens, block_table=table + 40, return_lse=True)
        values = {"append k": cache.k[:18], "append v": cache.v[:18], "decode o": o, "decode lse": lse}
        for name, x in values.items():
            label = f"{name.split()[0]} {k_dtype} {name.split()[1]}"
            found[label] = x.contiguous().view(torch.uint8).cpu().numpy()
    q, pool = (torch.randn(*n, 576, device="cuda", generator=generator).bfloat16() for n in ((2, 1, 16), (40, 16, 1)))
    latent = oa.PagedKVCache.from_arrays(pool, head_dim_v=512)
    for name, x in zip(("o", "lse"), oa.decode(q, latent, seq_lens=lens, block_table=table, return_lse=True)):
        found[f"latent_decode bf16 {name}"] = x.contiguous().view(torch.uint8).cpu().numpy()
    return found


def _blocks_and_lists() -> dict[str, Any]:
    """Block masks, given and predicted; the indexer's logits, what it chooses, and attention to that."""
    import torch

    generator = torch.Generator("cuda").manual_seed(1)

    def numbers(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator)

    def integers(*shape: int) -> Any:
        return torch.arange(int(np.prod(shape)), dtype=torch.int32, device="cuda").reshape(shape)

    q, k, v = (numbers(1, n, h, 64).bfloat16() for n, h in ((300, 4), (520, 2), (520, 2)))
    made = {"sparse_blocks blocks": oa.sparse_blocks(q, k, topk=0.4, causal=True, keep_first=1)}
    blocks = made["sparse_blocks blocks"]
    o, lse = oa.attention(q, k, v, block_mask=blocks, block_size=(128, 64), causal=True, return_lse=True)
    made |= {"block_mask o": o, "block_mask lse": lse}
    exact = oa.attention(
        *(x.double().cpu().numpy() for x in (q, k, v)), block_mask=blocks.cpu().numpy(), block_size=(128, 64),
        causal=True,
    )  # fmt: skip
    assert np.abs(o.double().cpu().numpy() - exact).max() < 0.02

    of_index, of_keys = (x.to(torch.float8_e4m3fn) for x in (numbers(2, 2, 8, 128), numbers(10, 64, 128)))
    lens, table = torch.tensor([300, 77], dtype=torch.int32, device="cuda"), integers(2, 5)
    logits = oa.index_logits(
        of_index, of_keys, numbers(4, 8), k_scale=numbers(10, 64).abs(), seq_lens=lens, block_table=table
    )
    rows = oa.top_k(logits, 50, lengths=lens, next_n=2, block_table=table, block_size=64)
    made |= {"index_logits logits": logits, "top_k rows": rows}
    pool = numbers(10, 64, 1, 576).bfloat16()
    latent = oa.PagedKVCache.from_arrays(pool, head_dim_v=512)
    found = oa.attention_sparse(
        numbers(4, 3, 576).bfloat16(), latent, indices=rows, return_lse=True, return_max=True, softmax_scale=0.07
    )
    made |= {f"attention_sparse {name}": x for name, x in zip(("o", "lse", "max"), found)}
    return {label: x.contiguous().view(torch.uint8).cpu().numpy() for label, x in made.items()}


def capture() -> dict[str, Any]:
    """The first call of the process happens inside a CUDA-graph capture."""
    import torch

    from omniattn import reference, testing

    host = [testing.make_qkv(**SHAPE, dtype="bfloat16", seed=seed) for seed in (1, 2, 3)]
    sets = [[torch.from_numpy(x).to("cuda", torch.bfloat16) for x in qkv] for qkv in host]
    q, k, v = (torch.zeros_like(x) for x in sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    for values, arrays in zip(host, sets, strict=True):
        for target, source in zip((q, k, v), arrays, strict=True):
            target.copy_(source)
        o.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        exact, exact_lse = reference.attention(*values, causal=True, compute_dtype=np.float64)
        naive, naive_lse = testing.same_dtype_naive(*values, causal=True, dtype="bfloat16")
        testing.assert_close(o.float().cpu().numpy(), exact, naive=naive, dtype="bfloat16", atol=1e-6)
        testing.assert_close(lse.cpu().numpy(), exact_lse, naive=naive_lse, atol=1e-4)
    return {"replays": len(sets)}


def fork() -> dict[str, Any]:
    """A child made before the first use of CUDA has its own; one made after it gets an error that says why."""
    import torch

    assert not torch.cuda.is_initialized()
    x = np.ones((1, 8, 1, 8), dtype=np.float32)
    oa.attention(x, x, x)
    before = _in_fork(_attend_in_torch)
    _attend_in_torch()
    after = _in_fork(_load_any)
    _attend_in_torch()
    return {"before": before, "after": after}


def _attend_in_torch() -> str:
    import torch

    from omniattn import reference, testing

    host = testing.make_qkv(**SHAPE, dtype="float16")
    q, k, v = (torch.from_numpy(x).to("cuda", torch.float16) for x in host)
    out = torch.full_like(q, float("nan"))
    oa.attention(q, k, v, out=out)
    exact, _ = reference.attention(*host, compute_dtype=np.float64)
    naive, _ = testing.same_dtype_naive(*host, dtype="float16")
    testing.assert_close(out.float().cpu().numpy(), exact, naive=naive, dtype="float16", atol=1e-6)
    return "right"


def _load_any() -> str:
    from omniattn import runtime
    from omniattn.registry import REGISTRY

    return runtime.load(REGISTRY[0], 0).origin


def _in_fork(work: Callable[[], str]) -> str:
    """What ``work`` returns in a forked child, or the error that it raises there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        # Without interpreter shutdown: exit handlers belong to the parent.
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "first_use": first_use,
    "operations": operations,
    "capture": capture,
    "fork": fork,
}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
