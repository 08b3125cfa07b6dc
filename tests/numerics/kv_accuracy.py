"""Accuracy of `decode` per format of a KV cache, on the CPU: inputs, formats, and the table of docs/kv_formats.md.

``PYTHONPATH=src:. python -m tests.numerics.kv_accuracy`` prints the table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from omniattn import reference, testing
from omniattn.bench.document import reference_environment
from omniattn.data import load_activations
from omniattn.kv.cache import PagedKVCache
from omniattn.ops import append, decode
from omniattn.testing import Report, compare
from tests.numerics.accuracy_report import Row, row, run

#: Tokens that mean and scales of K's channels are taken from: a prompt. Only queries behind it are counted.
PROMPT = 64
#: Every fourth query behind it.
STEP = 4
SEQLEN, HEADS, KV_HEADS, DIM = 320, 9, 3, 64
#: Channels of a kv head that are strong in "outlier channels", and how strong.
STRONG, TIMES = 4, 8.0

_INT4: dict[str, Any] = {"k_dtype": "int4"}
#: Rows of the table: options of a cache; "k_mean" and "k_channel_scale" name how their values are found.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"k_dtype": "bf16"},
    "fp8": {"k_dtype": "fp8"},
    "fp8, K mean": {"k_dtype": "fp8", "k_mean": True},
    "int8": {"k_dtype": "int8"},
    "int4": _INT4,
    "int4, groups of 32": _INT4 | {"group_size": 32},
    "int4, K mean": _INT4 | {"k_mean": True},
    "int4, K Hadamard": _INT4 | {"hadamard": True},
    "int4, K channel scales": _INT4 | {"k_channel_scale": True},
    "int4, K mean, Hadamard": _INT4 | {"k_mean": True, "hadamard": True},
    "int4, K mean, channel scales": _INT4 | {"k_mean": True, "k_channel_scale": True},
    "int4, groups of 32, K mean, channel scales": _INT4 | {"k_mean": True, "k_channel_scale": True, "group_size": 32},
    "int4, the newest 32 in 16 bits": _INT4 | {"recent_window": 32},
    "int4, K mean, channel scales, the newest 32": _INT4
    | {
        "k_mean": True,
        "k_channel_scale": True,
        "recent_window": 32,
    },
    "K int8, V int4, groups of 32": {"k_dtype": "int8", "v_dtype": "int4", "group_size": 32},
}


@functools.lru_cache(maxsize=1)
def inputs() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Columns of the table: q, k, v of one sequence of 320 tokens, 9 query and 3 kv heads of 64 channels."""
    found = {f"layer {x.layer}": (x.q, x.k, x.v) for x in load_activations()}
    shape = {"seqlen_q": SEQLEN, "heads_q": HEADS, "heads_kv": KV_HEADS, "head_dim": DIM}
    q, k, v = testing.make_qkv("normal", **shape)
    strong = k.copy()
    rng = np.random.default_rng(5)
    for head in range(KV_HEADS):
        strong[:, :, head, rng.choice(DIM, STRONG, replace=False)] *= np.float32(TIMES)
    found["normal"] = (q, k, v)
    found["shifted K"] = (q, testing.make_qkv("mean_shift", **shape)[1], v)
    found["biased K"] = (q, testing.make_qkv("channel_bias", **shape)[1], v)
    found["outlier channels"] = (q, strong, v)
    return found


@functools.lru_cache(maxsize=16)
def _exact(name: str) -> np.ndarray:
    q, k, v = inputs()[name]
    o, _ = reference.attention(q, k, v, causal=True, compute_dtype=np.float64)
    return np.asarray(o[0, PROMPT::STEP, None])


@functools.lru_cache(maxsize=256)
def accuracy(fmt: str, name: str, v_dtype: str | None = None) -> Report:
    """`decode` of single tokens behind the prompt, against attention on the unquantized K and V."""
    q, k, v = inputs()[name]
    options = dict(FORMATS[fmt])
    prompt = k[:, :PROMPT]
    mean = prompt.mean(axis=(0, 1), dtype=np.float32)
    if "k_mean" in options:
        options["k_mean"] = mean
        prompt = prompt - mean
    if "k_channel_scale" in options:
        # A channel that the prompt leaves at zero is not divided by zero.
        options["k_channel_scale"] = np.maximum(np.abs(prompt).max(axis=(0, 1)), np.float32(1e-3))
    if v_dtype is not None:
        options["v_dtype"] = v_dtype
    # All positions are sequences of their own that share the one block.
    positions = np.arange(PROMPT, SEQLEN, STEP)
    lengths, table = (positions + 1).astype(np.int32), np.zeros((len(positions), 1), np.int32)
    window = options.get("recent_window", 0)
    slots = np.arange(len(positions), dtype=np.int32) if window else None
    cache = PagedKVCache(
        1, SEQLEN, KV_HEADS, DIM, like=k, **options | ({} if slots is None else {"recent_slots": slots.size})
    )
    places: dict[str, Any] = {"block_table": table, "recent_slots": slots}
    append(
        cache, k, v, seq_lens=np.array([SEQLEN], np.int32), block_table=table[:1],
        recent_slots=None if slots is None else slots[:1],
    )  # fmt: skip
    if window:  # each one's newest tokens a second time, into its own slot
        rows = (lengths[:, None] - window + np.arange(window)).ravel()
        starts = np.arange(len(positions) + 1, dtype=np.int32) * window
        append(cache, k[0, rows], v[0, rows], seq_lens=lengths, cu_seqlens=starts.astype(np.int32), **places)
    o = decode(np.ascontiguousarray(q[0, positions, None]), cache, seq_lens=lengths, **places)
    return compare(o, _exact(name))


def token_bytes(fmt: str) -> int:
    """Bytes that one token and kv head take, K and V."""
    options = {name: value for name, value in FORMATS[fmt].items() if name not in ("k_mean", "k_channel_scale")}
    options.pop("recent_window", None)  # that many tokens a sequence, however long it is
    return PagedKVCache(1, 1, 1, DIM, like=np.zeros(1, np.float32), **options).token_bytes


def measure() -> Iterator[Row]:
    """All rows."""
    for fmt in FORMATS:
        for name in inputs():
            found = accuracy(fmt, name)
            yield row("caches", name, fmt, found.cosine, found.rel_l1, token_bytes=token_bytes(fmt))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and show."""
    run("kv_accuracy", "python -m tests.numerics.kv_accuracy", reference_environment, measure, arguments)


if __name__ == "__main__":
    main()
