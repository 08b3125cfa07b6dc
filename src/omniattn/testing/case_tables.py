"""What the calls of `omniattn.testing.cases` are: facts without numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import omniattn

Int8, Int4, Fp8 = omniattn.Int8, omniattn.Int4, omniattn.Fp8


@dataclass(frozen=True)
class Case:
    """One call of a public function.

    Attributes
    ----------
    name : str
    function : str
        ``"attention"``, ``"attention_varlen"``, ``"merge_states"``, ``"quantize_qk"`` or ``"quantize_v"``.
    lengths : tuple of (seqlen_q, seqlen_k)
        One a sequence; all the same unless ``packed``.
    heads_q, heads_kv : int
    below : int
        How far head_dim lies below the kernel's own: not every head_dim fills a tile.
    layout : str
    options : mapping
        Plain keyword arguments of the call.
    arrays : tuple of str
        Which array arguments to make: ``"sinks"``, and for ``mask`` one of ``"mask"`` (booleans), ``"bias"`` (fp32),
        ``"io"`` (q's dtype) and ``"keys"`` (fp32, the same for all queries); ``"blocks"`` for ``block_mask``. Packed:
        one of those for ``mask``.
    packed : bool
        Sequences one behind the other, with cu_seqlens.
    head_dim_v : int
        Of the kernel, where it takes v of another head_dim; `build` sets it.
    """

    name: str
    function: str
    lengths: tuple[tuple[int, int], ...]
    heads_q: int = 4
    heads_kv: int = 2
    below: int = 0
    layout: str = "NHD"
    options: Mapping[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    packed: bool = False
    head_dim_v: int = 0


#: Lengths of packed sequences: without queries, without keys, longer than a tile.
_RAGGED = ((5, 70), (0, 3), (130, 130), (9, 0))
#: The same where rows of a mask have whole 16 bytes.
_RAGGED_MASK = ((5, 70), (0, 3), (210, 136), (9, 0), (64, 130))

ATTENTION_CASES: tuple[Case, ...] = (
    Case("full", "attention", ((257, 257),) * 2),
    Case("causal, seqlen_q < seqlen_k", "attention", ((77, 300),), 6, 2, options={"causal": True}),
    Case("causal, rows without keys, HND", "attention", ((190, 60),), layout="HND", options={"causal": True}),
    Case("one query row", "attention", ((1, 513),), 8, 1, options={"causal": True}),
    Case("window", "attention", ((200, 200),), below=8, options={"window": (64, 17)}),
    Case("sinks, causal", "attention", ((70, 40),), options={"causal": True}, arrays=("sinks",)),
    Case("softcap and sinks", "attention", ((130, 140),), options={"softcap": 20.0}, arrays=("sinks",)),
    Case("boolean mask with an empty row", "attention", ((100, 150),), below=8, arrays=("mask",)),
    Case("additive mask", "attention", ((65, 129),), arrays=("bias",)),
    Case("additive mask, aligned, causal", "attention", ((200, 136),), arrays=("bias",), options={"causal": True}),
    Case("additive mask of q's type, softcap", "attention", ((130, 264),), arrays=("io",), options={"softcap": 5.0}),
    Case("additive mask of keys", "attention", ((100, 150),), arrays=("keys",)),
    Case("varlen, softcap", "attention_varlen", _RAGGED, options={"softcap": 3.0}, packed=True),
    Case("varlen, causal, empty sequences", "attention_varlen", _RAGGED, options={"causal": True}, packed=True),
    Case("varlen, boolean masks", "attention_varlen", _RAGGED_MASK, arrays=("mask",), packed=True),
    Case("varlen, boolean masks, softcap, causal", "attention_varlen", _RAGGED_MASK, arrays=("mask",), packed=True,
         options={"softcap": 3.0, "causal": True}),
    Case("varlen, additive mask of keys", "attention_varlen", _RAGGED_MASK, below=8, arrays=("keys",), packed=True),
    Case("varlen, additive mask, causal", "attention_varlen", _RAGGED_MASK, arrays=("bias",), packed=True,
         options={"causal": True}),
    Case("varlen, additive masks of q's type", "attention_varlen", _RAGGED_MASK, arrays=("io",), packed=True),
)  # fmt: skip

#: Few queries on many keys, which are split wherever kernels can.
SPLIT_CASES: tuple[Case, ...] = (
    Case("few queries", "attention", ((5, 6000),), 8, 2),
    Case("few queries, causal, HND", "attention", ((77, 7003),), 6, 2, layout="HND", options={"causal": True}),
    Case("few queries, window", "attention", ((33, 9000),), below=8, options={"window": (8500, 20)}),
    Case("one query row, sinks", "attention", ((1, 5001),) * 2, 12, 1, options={"causal": True}, arrays=("sinks",)),
    Case("few queries, softcap, causal", "attention", ((40, 5000),), options={"softcap": 3.0, "causal": True}),
    Case("few queries, boolean mask", "attention", ((20, 4500),) * 2, arrays=("mask",)),
    Case("few queries, additive mask of keys", "attention", ((9, 5000),), below=8, arrays=("keys",)),
    Case("few queries, additive mask, window", "attention", ((70, 5000),), arrays=("bias",),
         options={"window": (4800, 9)}),
    Case("few queries, additive mask of q's type, softcap", "attention", ((66, 4504),), arrays=("io",),
         options={"softcap": 5.0}),
    Case("two tiles of queries, boolean mask, causal", "attention", ((200, 2100),), arrays=("mask",),
         options={"causal": True}),
)  # fmt: skip

#: The same packed: Hopper divides all keys evenly among its CTAs.
PACKED_SPLIT_CASES: tuple[Case, ...] = (
    Case("few queries, packed, causal", "attention_varlen", ((5, 4000), (0, 3), (70, 2500), (9, 0)), packed=True,
         options={"causal": True}),
    Case("few queries, packed, heads of 7", "attention_varlen", ((1, 6000), (130, 4100), (3, 70)), 7, 1, below=8,
         packed=True),
    Case("few queries, packed, softcap, causal", "attention_varlen", ((2, 7000), (33, 2100), (100, 5000)), 8, 2,
         packed=True, options={"softcap": 3.0, "causal": True}),
    Case("few queries, packed, window", "attention_varlen", ((40, 5000), (20, 7000)), 4, 2, packed=True,
         options={"window": (4000, 3)}),
)  # fmt: skip

#: A row of the registry takes those with its own smooth_q and score modifiers, and dense or packed arrays.
QUANTIZED_CASES: tuple[Case, ...] = (
    Case("full", "attention", ((257, 257),) * 2, options={"precision": Int8()}),
    Case("causal", "attention", ((77, 300),), 6, 2, options={"precision": Int8(), "causal": True}),
    Case("fast_exp", "attention", ((300, 700),), 6, 2, options={"precision": Int8(fast_exp=True), "causal": True}),
    Case("one query row", "attention", ((1, 513),), 8, 1, options={"precision": Int8()}),
    Case(
        "window, V as it is, HND",
        "attention",
        ((200, 200),),
        below=8,
        layout="HND",
        options={"precision": Int8(granularity="per_block", smooth_v=False), "window": (64, 17)},
    ),
    Case(
        "sinks, rows without keys",
        "attention",
        ((190, 60),),
        options={"precision": Int8(), "causal": True},
        arrays=("sinks",),
    ),
    Case("full, smooth_q", "attention", ((257, 257),) * 2, options={"precision": Int8(smooth_q=True)}),
    Case("smooth K only, int4", "attention", ((140, 200),), options={"precision": Int4(smooth_q=False)}),
    Case(
        "softcap and sinks, smooth_v",
        "attention",
        ((130, 140),),
        options={"precision": Int8(smooth_v=True), "softcap": 20.0},
        arrays=("sinks",),
    ),
    Case(
        "boolean mask with an empty row, smooth_q",
        "attention",
        ((100, 150),),
        below=8,
        options={"precision": Int8(smooth_q=True)},
        arrays=("mask",),
    ),
    Case("additive mask, int4", "attention", ((65, 129),), options={"precision": Int4()}, arrays=("bias",)),
    Case("additive mask, aligned, int4", "attention", ((65, 132),), options={"precision": Int4()}, arrays=("bias",)),
    Case(
        "additive mask of q's type, smooth_q",
        "attention",
        ((130, 264),),
        options={"precision": Int8(smooth_q=True)},
        arrays=("io",),
    ),
    Case("causal, int4", "attention", ((300, 330),), below=8, options={"precision": Int4(), "causal": True}),
    Case(
        "varlen, causal, empty sequences",
        "attention_varlen",
        _RAGGED,
        options={"precision": Int8(), "causal": True},
        packed=True,
    ),
    Case(
        "varlen, V as it is",
        "attention_varlen",
        ((200, 300), (64, 128), (1, 1)),
        options={"precision": Int8(smooth_v=False)},
        packed=True,
    ),
    Case(
        "varlen, causal, smooth_q",
        "attention_varlen",
        ((200, 300), (64, 128), (1, 1)),
        options={"precision": Int8(smooth_q=True), "causal": True},
        packed=True,
    ),
    Case(
        "varlen, int4, empty sequences",
        "attention_varlen",
        _RAGGED,
        below=8,
        options={"precision": Int4()},
        packed=True,
    ),
    Case("few queries, HND", "attention", ((9, 1900),), 8, 2, layout="HND", options={"precision": Int8()}),
    Case("few queries, causal, sinks", "attention", ((77, 1200),), 6, 2, arrays=("sinks",),
         options={"precision": Int8(), "causal": True}),
    Case("blocks", "attention", ((300, 520),), below=8, arrays=("blocks",),
         options={"precision": Int8(), "block_size": (128, 64)}),
    Case("blocks of 64, causal, sinks", "attention", ((300, 1300),), 2, 1, arrays=("sinks", "blocks"),
         options={"precision": Int8(smooth_v=False), "block_size": 64, "causal": True}),
)  # fmt: skip

#: Of rows whose Q and K are e4m3.
FP8_CASES: tuple[Case, ...] = (
    Case("full", "attention", ((257, 257),) * 2, options={"precision": Fp8()}),
    Case("causal", "attention", ((77, 300),), 6, 2, options={"precision": Fp8(seed=3), "causal": True}),
    Case("one query row", "attention", ((1, 513),), 8, 1, options={"precision": Fp8()}),
    Case("window, V and rows as they are, HND", "attention", ((200, 200),), below=8, layout="HND",
         options={"precision": Fp8(hadamard=False, smooth_v=False), "window": (64, 17)}),
    Case("sinks, smooth K, rows without keys", "attention", ((190, 60),), arrays=("sinks",),
         options={"precision": Fp8(smooth_k=True), "causal": True}),
    Case("softcap and sinks", "attention", ((130, 140),), options={"precision": Fp8(), "softcap": 20.0},
         arrays=("sinks",)),
    Case("boolean mask with an empty row", "attention", ((100, 150),), below=8, options={"precision": Fp8()},
         arrays=("mask",)),
    Case("additive mask, aligned", "attention", ((65, 132),), options={"precision": Fp8()}, arrays=("bias",)),
    Case("additive mask of q's type", "attention", ((130, 264),), options={"precision": Fp8()}, arrays=("io",)),
    Case("additive mask of keys", "attention", ((100, 150),), options={"precision": Fp8()}, arrays=("keys",)),
    Case("varlen, causal, empty sequences", "attention_varlen", _RAGGED, packed=True,
         options={"precision": Fp8(), "causal": True}),
    Case("varlen, softcap", "attention_varlen", _RAGGED, packed=True, below=8,
         options={"precision": Fp8(smooth_k=True), "softcap": 3.0}),
    Case("few queries, HND", "attention", ((9, 1900),), 8, 2, layout="HND", options={"precision": Fp8()}),
    Case("blocks", "attention", ((300, 520),), below=8, arrays=("blocks",),
         options={"precision": Fp8(), "block_size": (128, 64)}),
    Case("blocks of 64, causal, sinks", "attention", ((300, 1300),), 2, 1, arrays=("sinks", "blocks"),
         options={"precision": Fp8(), "block_size": 64, "causal": True}),
)  # fmt: skip

QUANTIZE_FP8_CASES: tuple[Case, ...] = (
    Case("rotated", "quantize_qk", ((200, 333),) * 2, options={"dtype": "float8_e4m3", "seed": 5}),
    Case("as they are, HND", "quantize_qk", ((130, 70),), below=8, layout="HND",
         options={"dtype": "float8_e4m3", "hadamard": False}),
)  # fmt: skip

QUANTIZE_CASES: tuple[Case, ...] = (
    Case("q and k, with bias", "quantize_qk", ((200, 333),) * 2, options={"with_bias": True}),
    Case(
        "q and k in int4, a scale a token, HND",
        "quantize_qk",
        ((130, 70),),
        below=8,
        layout="HND",
        options={"dtype": "int4", "granularity": "per_token", "grouping": "sm80"},
    ),
    Case("q and k, packed", "quantize_qk", _RAGGED, packed=True),
    Case("q and k, rotated", "quantize_qk", ((200, 333),) * 2, options={"hadamard": True, "seed": 1}),
    Case("q and k in e4m3, smoothed, packed", "quantize_qk", _RAGGED, below=8, packed=True,
         options={"dtype": "float8_e4m3", "smooth_k": True}),
    Case("v", "quantize_v", ((1, 333),) * 2),
    Case("v in fp16, smoothed", "quantize_v", ((1, 70),), below=8, options={"dtype": "float16", "smooth_v": True}),
    Case("v, packed", "quantize_v", _RAGGED, options={"smooth_v": True}, packed=True),
)  # fmt: skip

QUANTIZE_DELTA_CASES: tuple[Case, ...] = (
    Case("smooth_q", "quantize_qk", ((200, 333),) * 2, options={"smooth_q": True}),
    Case("smooth_q, int4, packed", "quantize_qk", _RAGGED, below=8, options={"smooth_q": True, "dtype": "int4"},
         packed=True),
)  # fmt: skip

MERGE_CASES: tuple[Case, ...] = (
    Case("merge", "merge_states", ((100, 100),) * 2),
    Case("merge, one side empty", "merge_states", ((33, 33),), below=8),
)


CASES: dict[str, tuple[Case, ...]] = {
    "attention": ATTENTION_CASES,
    "attention_split": (*SPLIT_CASES, *PACKED_SPLIT_CASES),
    "attention_combine": SPLIT_CASES,
    "attention_combine_packed": PACKED_SPLIT_CASES,
    "quantized_attention": QUANTIZED_CASES,
    # Parts of Hopper's kernels alone are merged by it; INT4 is served by kernels whose scales belong to other rows.
    "attention_combine_lse": tuple(
        case for case in QUANTIZED_CASES if "int4" not in case.name and "blocks" not in case.arrays
    ),
    "fp8_attention": FP8_CASES,
    "merge_states": MERGE_CASES,
    "quantize": QUANTIZE_CASES,
    "quantize_delta": QUANTIZE_DELTA_CASES,
    "quantize_fp8": QUANTIZE_FP8_CASES,
}
