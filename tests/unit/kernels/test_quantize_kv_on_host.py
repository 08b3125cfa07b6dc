"""K and V in two launches, before attention that quantizes Q: the kernels' code, run on the CPU, has NumPy's bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from omniattn import testing
from omniattn.launch import quantize_kv
from omniattn.launch.attn_int8 import in_workspace
from omniattn.launch.host_struct import At
from omniattn.problems import QuantizeProblem, Target
from omniattn.reference import quantize as reference
from omniattn.registry import REGISTRY
from omniattn.select import select_kv
from omniattn.select.fit import KV_OPS, fit
from tests.host_kernels import HostKernels

HOPPER = Target((9, 0), 232448, 132)
#: dtype, head_dim, batch, kv heads, keys: one key, ends of blocks, all keys in the sums, samples, several chunks.
SHAPES = [
    ("bfloat16", 64, 2, 2, 1), ("float16", 128, 1, 2, 127), ("bfloat16", 72, 1, 1, 300), ("bfloat16", 128, 2, 1, 640),
    ("float16", 64, 1, 1, 1500), ("bfloat16", 128, 1, 1, 2048),
]  # fmt: skip
KINDS = ["normal", "mean", "outlier", "zeros", "huge", "nan"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernels]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield HostKernels(Path(tmp_path_factory.mktemp("kernels")), monkeypatch)


def arrays_of(kind: str, shape: tuple[Any, ...]) -> tuple[Any, Any]:
    """K and V, (batch, keys, heads, head_dim)."""
    dtype, d, batch, heads, keys = shape
    _, k, v = testing.make_qkv(
        "channel_bias" if kind == "mean" else "normal", batch=batch, seqlen_q=1, seqlen_k=keys, heads_q=heads,
        heads_kv=heads, head_dim=d, seed=keys + d, dtype=dtype,
    )  # fmt: skip
    if kind == "outlier":  # beyond what a sample has: the head is quantized again
        k[:, keys // 2, :, d // 3] = v[:, keys // 2, :, d // 3] = 3000.0
        v[-1, keys - 1, :, 0] = -2000.0
    elif kind == "zeros":
        k[:, ::2], v[..., 1::3] = 0, 0
        v[0, keys // 3] = 1.0
    elif kind == "huge":  # sums and differences beyond fp32
        most = 65504.0 if dtype == "float16" else 3.3895314e38
        k[..., :4] = v[..., :4] = most
        k[:, ::2, :, 1] = v[:, ::2, :, 1] = -most
    elif kind == "nan":
        k[0, keys // 2, 0, d - 1] = v[0, keys // 2, 0, d - 1] = np.nan
        k[-1, 0, -1, 2], v[-1, 0, -1, 2] = np.inf, -np.inf
    sized = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    return k.astype(sized), v.astype(sized)


def problem_of(shape: tuple[Any, ...]) -> QuantizeProblem:
    dtype, d, batch, heads, keys = shape
    return QuantizeProblem(dtype, batch, 0, keys, 2 * heads, heads, d, False, smooth_v=True, unpacked=True)


def quantized(
    kernels: HostKernels, problem: QuantizeProblem, arrays: dict[str, Any], starts: list[int] | None = None
) -> dict[str, Any]:
    """What the kernels make of arrays by their names in a call, k and v (batch, keys, heads, head_dim) or without a
    batch; checks the copies of cu_seqlens, of which that of keys is to be ``starts``.
    """
    pair = select_kv(problem, HOPPER)
    assert pair is not None
    outputs, end = in_workspace(problem)
    specs = pair[0].spec, pair[1].spec
    steps = tuple(
        (0 if x.ndim == 3 or x.shape[0] == 1 else x.strides[0] // 2, x.strides[-3] // 2, x.strides[-2] // 2)
        for x in (arrays["k"], arrays["v"])
    )
    memory_at = At("workspace", end)
    records = quantize_kv.build(*specs, problem, steps, outputs, memory_at, 1000)  # type: ignore[arg-type]
    memory = np.full(end + quantize_kv.scratch_bytes(specs[0], problem) + 256, 0xFF, np.uint8)
    base = memory.ctypes.data + -memory.ctypes.data % 256
    addresses = {name: x.ctypes.data for name, x in arrays.items()} | {"workspace": base}
    for record in records:
        data = bytearray(record.arguments)
        for p in record.pointers:
            data[p.offset : p.offset + 8] = (addresses[p.operand] + p.add).to_bytes(8, "little")
        kernels.library(record.spec).launch(bytes(data) + bytes(8), *record.grid[:2], record.threads)
    begin, found = base - memory.ctypes.data, {}
    for name, (sizes, dtype) in problem.shapes().items():
        size = int(np.prod(sizes)) * np.dtype(dtype).itemsize
        found[name] = memory[begin + outputs[name].offset :][:size].view(dtype).reshape(sizes)
    if starts is not None:  # those of queries clamped to 1000 rows
        copies = quantize_kv.starts_in(specs[0], problem, memory_at)
        of_q, of_k = (memory[begin + x.offset :][: 4 * len(starts)].view(np.int32).tolist() for x in copies)
        assert of_k == starts
        assert of_q == np.minimum(np.maximum.accumulate(arrays["cu_seqlens_q"]), 1000).tolist()
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits(kernels: HostKernels, shape: tuple[Any, ...], kind: str) -> None:
    problem, (k, v) = problem_of(shape), arrays_of(kind, shape)
    found = quantized(kernels, problem, {"k": k, "v": v})
    q = np.zeros((k.shape[0], 0, 2 * k.shape[2], k.shape[3]), k.dtype)
    with np.errstate(all="ignore"):
        wanted = reference.quantize(problem, *(x.swapaxes(1, 2) for x in (q, k, v)))
    for name, got in found.items():
        np.testing.assert_array_equal(got, wanted[name], err_msg=name)


@pytest.mark.parametrize(
    "starts",
    [
        [0, 130, 130, 131, 900],  # none, one key, samples
        [0, 0, 640],
        [3, 200, 150, 400],  # backwards: the second sequence is empty; rows of nobody before and behind
        [*range(0, 280, 7), 800],  # more sequences than a warp has lanes
    ],
    ids=str,
)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kind", ["normal", "outlier", "nan"])
def test_packed(kernels: HostKernels, starts: list[int], used: bool, kind: str) -> None:
    """Each sequence has the bits that it has as a batch of one."""
    keys, heads, d = 900, 2, 64
    k, v = (x[0] for x in arrays_of(kind, ("bfloat16", d, 1, heads, keys)))
    batch = len(starts) - 1
    problem = replace(
        problem_of(("bfloat16", d, batch, heads, keys)), varlen=True, max_seqlen_k=keys, used=(False, used)
    )
    lengths = np.maximum(np.diff(np.maximum.accumulate(starts)), 0)
    if used:
        lengths = np.where(np.arange(batch) % 2 == 0, lengths, np.maximum(lengths - 77, 0))
    arrays = {"k": k, "v": v, "cu_seqlens_k": np.array(starts, np.int32), "seqused_k": lengths.astype(np.int32)}
    of_queries = [3 * start for start in starts]
    of_queries[batch // 2] = -1  # backwards
    arrays["cu_seqlens_q"] = np.array(of_queries, np.int32)
    monotone = np.maximum.accumulate(starts).tolist()
    found = quantized(kernels, problem, arrays, monotone)
    for b, (begin, length) in enumerate(zip(monotone[:-1], lengths.tolist(), strict=True)):
        if not length:
            continue
        rows = slice(begin, begin + length)
        alone = problem_of(("bfloat16", d, 1, heads, length))
        with np.errstate(all="ignore"):
            wanted = reference.quantize(
                alone, np.zeros((1, 2 * heads, 0, d), k.dtype), *(x[None, rows].swapaxes(1, 2) for x in (k, v))
            )
        slot, blocks = -(-begin // 128) + b, -(-length // 128)
        np.testing.assert_array_equal(found["k_int"][:, rows], wanted["k_int"][0])
        np.testing.assert_array_equal(found["k_scale"][:, 4 * slot : 4 * (slot + blocks)], wanted["k_scale"][0])
        np.testing.assert_array_equal(found["v"][..., 128 * slot : 128 * (slot + blocks)], wanted["v"][0])
        for name in ("k_mean", "v_scale", "v_mean"):
            np.testing.assert_array_equal(found[name][b], wanted[name][0], err_msg=name)


def test_what_they_are_for() -> None:
    """K and V by the defaults alone; where there is Q, or anything else, others quantize."""
    problem = problem_of(SHAPES[0])
    row = next(spec for spec in REGISTRY if spec.op == KV_OPS[1])
    assert fit(row, replace(problem, dtype=row.dtype), HOPPER) is None
    for changes in ({"rows_q": 1}, {"smooth_k": False}, {"smooth_v": False}, {"varlen": True}, {"rows_k": 0}):
        assert fit(row, replace(problem, dtype=row.dtype, **changes), HOPPER) is not None
    assert select_kv(problem, HOPPER, "quantize_sm80_bf16_d64_common") is None
    assert select_kv(problem, Target((10, 0), 232448, 148)) is None
