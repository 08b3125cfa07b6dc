"""``quantize_qk`` and ``quantize_v``: operands of low-precision attention, made early or by `attention` itself."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..checks import quantize as checks
from ..checks.memory import check_memory
from ..checks.quantize import QuantizeQKOptions, QuantizeVOptions
from ..frameworks import FUNCTIONS, compiling
from ..plan.engine import Call, Operation, run
from ..plan.others import plan_quantize
from ..problems import QuantizedQK, QuantizedV, QuantizeProblem
from . import on_cpu
from .traced import run_traced

_QUANTIZE_QK = Operation(
    "quantize_qk", checks.ARRAYS_QK, checks.check_quantize_qk, check_memory, plan_quantize,
    on_cpu.quantize, ("q", "k"), checks.ALIGNED, traced=run_traced,
)  # fmt: skip
_QUANTIZE_V = Operation(
    "quantize_v", checks.ARRAYS_V, checks.check_quantize_v, check_memory, plan_quantize,
    on_cpu.quantize, ("v",), checks.ALIGNED, traced=run_traced,
)  # fmt: skip
#: Of `quantize_around`: in torch, whose modes see the launch alone.
_AROUND = Operation(
    "quantize_qk", checks.ARRAYS_AROUND, checks.check_quantize_qk, check_memory, plan_quantize,
    on_cpu.quantize, ("q", "k", "k_mean", "k_ready"), checks.ALIGNED | {"k_mean"},
)  # fmt: skip
#: A word that says that a mean is there (``kReady`` of kernels_cu/quantize/items.cuh).
MEAN_IS_READY = -(2**31)


def quantize_qk(
    q: Any,
    k: Any,
    *,
    layout: str = "NHD",
    dtype: str = "int8",
    granularity: str | None = None,
    grouping: str = "sm90",
    smooth_k: bool | None = None,
    smooth_q: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    with_bias: bool = False,
    hadamard: bool | None = None,
    seed: int = 0,
    stream: Any = None,
) -> QuantizedQK:
    """Quantize queries and keys for low-precision attention.

    ::

        k_int = round(R (k - k_mean) / k_scale);   q_int = round(R (q - q_mean) / q_scale)
        q . k = q_scale k_scale (q_int . k_int) + delta_s + row_bias            (up to rounding)

    R is 1 without ``hadamard``, else H D / sqrt(n): a random sign for each channel (D), then a Hadamard transform (H)
    of n channels, which is a rotation (R.T R = 1).

    Parameters
    ----------
    q, k : array
        As `attention` takes them, or packed as `attention_varlen` takes them when ``cu_seqlens_*`` are given.
    layout : "NHD" or "HND"
    dtype : "int8", "int4" or "float8_e4m3"
        Values -127 to 127, or -7 to 7: two to a byte in the sm80 grouping, one in the sm90 grouping, because Hopper's
        tensor cores multiply bytes. "float8_e4m3": 8-bit floats up to 448, as bytes.
    granularity : str, optional
        Rows that share a scale, see `omniattn.Int8`; "per_thread" unless given. Of "float8_e4m3" see `omniattn.Fp8`;
        "per_block" unless given.
    grouping : "sm90" or "sm80"
        Which kernels will read it. "sm90": groups of 2 queries and 32 of 128 keys, on compute capability 9.0. "sm80":
        4 queries and 16 of 64 keys, on every GPU (docs/quantization.md says what suits which). The CPU reads both.
        "float8_e4m3" has none: leave it out.
    smooth_k : bool, optional
        Take K's mean over the keys of the sequence (of a long one, a sample of them) away. Unless given, True for
        integers and False for "float8_e4m3".
    smooth_q : bool
        Take Q's mean over each block of 128 queries away, and compute ``delta_s``.
    cu_seqlens_q, cu_seqlens_k : array, (batch + 1,), int32, optional
        Both or neither: packed sequences.
    max_seqlen_q, max_seqlen_k : int
        With ``cu_seqlens_*``: at least the longest sequence; smaller ones raise on the CPU. max_seqlen_k is the extent
        of ``delta_s``: a smaller one makes NaN on a GPU.
    with_bias : bool
        Compute q . k_mean for every query: LSE, sinks and softcap need it.
    hadamard : bool, optional
        Rotate q and k before they are rounded (docs/quantization.md has signs and transform). Unless given, False for
        integers and True for "float8_e4m3".
    seed : int
        Of the signs, 0 to 2^32 - 1.
    stream : optional
        As in `attention`.

    Returns
    -------
    QuantizedQK
        Its parts ``q`` and ``k`` take the places of q and k in `attention` and `attention_varlen`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    A query with NaN or infinity becomes zeros and is marked in ``row_bias``; a key with one makes the scale of its
    group NaN. e4m3 keeps both as NaN. GPUs: compute capability 8.0 and newer; arrays on the CPU run the NumPy
    reference, which gives the same integers and scales bit for bit. SageAttention2 (Zhang et al. 2024), sections 3.1
    and 3.2; FlashAttention-3 (Shah et al. 2024), section 3.3.
    """
    options = QuantizeQKOptions(
        layout, dtype, granularity, grouping, smooth_k, smooth_q, max_seqlen_q, max_seqlen_k, with_bias, hadamard, seed
    )
    made, problem = _run(Call(_QUANTIZE_QK, (q, k, cu_seqlens_q, cu_seqlens_k), options, stream))
    return QuantizedQK(
        made["q_int"], made["k_int"], made["q_scale"], made["k_scale"], made.get("row_bias"), made.get("k_mean"),
        made.get("q_mean"), made.get("delta_s"), made.get("cu_seqlens_q"), made.get("cu_seqlens_k"), problem, layout,
    )  # fmt: skip


def quantize_v(
    v: Any,
    *,
    layout: str = "NHD",
    dtype: str = "float8_e4m3",
    smooth_v: bool = True,
    pv_accumulator: str = "fp32",
    cu_seqlens_k: Any = None,
    max_seqlen_k: int | None = None,
    stream: Any = None,
) -> QuantizedV:
    """Quantize values for low-precision attention, one scale a channel.

    ::

        v = v_scale * v_quantized + v_mean                                     (up to rounding)

    Parameters
    ----------
    v : array
        As `attention` takes it, or packed as `attention_varlen` takes it when ``cu_seqlens_k`` is given.
    layout : "NHD" or "HND"
    dtype : "float8_e4m3" or "float16"
        8 bits, transposed; or fp16 with a power of two as scale, which no bfloat16 value overflows.
    smooth_v : bool
        Take the mean over the keys (a sample of long sequences) away, in channels where it is more than 1/16 of the
        range.
        With e4m3 v_mean has the mean of what rounding takes away too, so that the mean over the keys of
        v_scale * v_quantized + v_mean is that of v.
    pv_accumulator : "fp32" or "fp16"
        "fp16": e4m3 values so small that sums of their products may be fp16, which is faster on GeForce GPUs from sm_89
        on (docs/precision.md). float16 values always are.
    cu_seqlens_k : array, (batch + 1,), int32, optional
    max_seqlen_k : int
        With ``cu_seqlens_k``: at least the longest sequence.
    stream : optional
        As in `attention`.

    Returns
    -------
    QuantizedV
        Takes v's place in `attention` and `attention_varlen`.

    Raises
    ------
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As in `attention`.

    Notes
    -----
    NaN and infinity stay where they are: e4m3 has one NaN for both. GPUs and CPU as in `quantize_qk`.
    """
    options = QuantizeVOptions(layout, dtype, smooth_v, pv_accumulator, max_seqlen_k)
    made, problem = _run(Call(_QUANTIZE_V, (v, cu_seqlens_k), options, stream))
    return QuantizedV(made["v"], made["v_scale"], made["v_mean"], made.get("cu_seqlens_k"), problem, layout)


def quantize_around(
    q: Any, k: Any, mean: Any, ready: Any, *, dtype: str, granularity: str, grouping: str, hadamard: bool, seed: int
) -> QuantizedQK:
    """`quantize_qk`, without smooth_k, of k less a vector of each head.

    Parameters
    ----------
    mean : array, (batch, num_kv_heads, channels), float32
        channels: head_dim rounded up to a multiple of 32.
    ready : array, (batch * num_kv_heads,), int32
        `MEAN_IS_READY` each.
    """
    options = QuantizeQKOptions(
        "NHD", dtype, granularity, grouping, True, False, None, None, False, hadamard, seed
    )  # fmt: skip
    made, problem = _run(Call(_AROUND, (q, k, None, None, mean, ready), options))
    return QuantizedQK(
        made["q_int"], made["k_int"], made["q_scale"], made["k_scale"], made.get("row_bias"), None, None, None, None,
        None, _without_mean(problem), "NHD",
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _without_mean(problem: QuantizeProblem) -> QuantizeProblem:
    """The same object for equal problems: plans of calls on operands are found by it."""
    return dataclasses.replace(problem, smooth_k=False, given_mean=False)


def _run(call: Call) -> tuple[dict[str, Any], QuantizeProblem]:
    """Results by name, and what was quantized."""
    if compiling():
        from ..frameworks.torch.quantizers import trace

        return trace(call.operation.name, call.objects, call.options)
    results = run(call)
    return {o.name: x for o, x in zip(call.problem.outputs, results, strict=True)}, call.problem.problem


def _results(operation: Operation) -> Any:
    return lambda objects, options: run(Call(operation, objects, options))


for _operation in (_QUANTIZE_QK, _QUANTIZE_V):
    FUNCTIONS[f"operation of {_operation.name}"] = _operation  # type: ignore[assignment]
    FUNCTIONS[f"run {_operation.name}"] = _results(_operation)
