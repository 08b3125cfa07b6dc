"""Arrays that a call writes: which of them share memory with others, and which calls that stops."""

from __future__ import annotations

import importlib
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays
from omniattn.arrays import Tensor, contiguous_strides
from omniattn.arrays.tensor import fill
from omniattn.checks.memory import check_memory
from omniattn.errors import ArgumentError, StrideError

# The package has the functions of these names.
append, attention, attention_backward, decode, index_logits, merge, sparse, top_k, with_cache = (
    importlib.import_module(f"omniattn.ops.{name}")
    for name in (
        "append", "attention", "attention_backward", "decode", "index_logits", "merge", "sparse", "top_k", "with_cache",
    )
)  # fmt: skip

#: Nothing is there: whoever reads it ends the process.
BASE = 0x7000_0000_0000


def tensor(
    name: str, shape: tuple[int, ...], at: int = 0, strides: tuple[int, ...] | None = None, dtype: str = "bfloat16",
    device: str = "cuda",
) -> Tensor:  # fmt: skip
    """An array whose first element is ``at`` bytes behind BASE."""
    t = Tensor()
    steps = contiguous_strides(shape) if strides is None else strides
    fill(t, None, "cupy", BASE + at, shape, steps, dtype, device, 0, False, name)
    return t


def parts(
    shape: tuple[int, ...], dim: int, *ranges: tuple[int, int], at: int = 0, names: str = "abc", **more: Any
) -> list[Tensor]:
    """Ranges of a dimension of one contiguous array."""
    steps = contiguous_strides(shape)
    return [
        tensor(
            name, (*shape[:dim], end - begin, *shape[dim + 1 :]), at + 2 * begin * steps[dim], steps, **more
        )
        for name, (begin, end) in zip(names, ranges, strict=False)
    ]  # fmt: skip


def elements(t: Tensor) -> set[int]:
    """Addresses of all bytes."""
    found = set()
    for index in itertools.product(*map(range, t.shape)):
        first = t.ptr + t.itemsize * sum(i * s for i, s in zip(index, t.strides, strict=True))
        found |= set(range(first, first + t.itemsize))
    return found


def test_shared_memory_as_its_bytes_say() -> None:
    rng = random.Random(3)
    kinds = {True: 0, False: 0}
    extents = {True: 0, False: 0}
    for _ in range(3000):
        a, b = (
            tensor(
                name, tuple(rng.randrange(0 if rng.random() < 0.05 else 1, 5) for _ in range(rank)),
                rng.randrange(60), tuple(rng.choice([-12, -5, -1, 0, 1, 2, 3, 4, 8, 12, 30]) for _ in range(rank)),
                rng.choice(["int8", "bfloat16", "float32"]),
            )
            for name, rank in (("a", rng.randrange(4)), ("b", rng.randrange(4)))
        )  # fmt: skip
        shared = bool(elements(a) & elements(b))
        assert (arrays.first_shared([a], [b]) is not None) is shared, (a, b, a.ptr - BASE, b.ptr - BASE)
        kinds[shared] += 1
        ends = [(min(x), max(x)) for x in (elements(a), elements(b)) if x]
        if len(ends) == 2:
            extents[ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]] += 1
        for t in (a, b):
            low, high = arrays.span(t)
            found = elements(t)
            assert (t.ptr + low, t.ptr + high) == (min(found), max(found) + 1) if found else low == high
    assert min(kinds.values()) > 500, kinds
    assert extents[True] > kinds[True] + 200, "arrays with one extent and no common element"


LARGE = (4, 4096, 3, 32, 128)


@pytest.mark.parametrize(
    ("which", "shared"),
    [
        (parts(LARGE, 2, (0, 1), (1, 2), (2, 3)), False),  # qkv[:, :, 0] and so on
        (parts((4, 4096, 48, 128), 2, (0, 32), (32, 40), (40, 48)), False),  # grouped heads
        (parts((4, 4096, 32, 384), 3, (0, 128), (128, 256), (256, 384)), False),
        (parts((4, 4096, 32, 128), 3, (0, 64), (64, 128)), False),
        (parts((4, 8, 2, 64), 1, (0, 4), (4, 8)), False),
        (parts((4, 8, 2, 64), 1, (0, 4), (2, 8)), True),  # b[:, :4] and b[:, 2:]
        (parts((4, 4096, 48, 128), 2, (0, 32), (31, 40), (40, 48)), True),
        (parts((4, 4096, 32, 384), 3, (0, 128), (128, 257), (256, 384)), True),
        ([tensor("a", (8, 64), 7 * 128, (-64, 1)), tensor("b", (8, 64))], True),  # flipped
        ([tensor("a", (4, 64), 6 * 128, (-128, 1)), tensor("b", (4, 64), 128, (128, 1))], False),
        ([tensor("a", (4, 64)), tensor("b", (9, 1), 2 * 255, (0, 1), "int8")], True),
        ([tensor("a", (4, 64)), tensor("b", (9, 1), 2 * 256, (0, 1), "int8")], False),
        ([tensor("a", (4, 0, 64)), tensor("b", (4, 64))], False),
    ],
)
def test_parts_of_one_buffer(which: list[Tensor], shared: bool) -> None:
    for order in itertools.permutations(which):
        assert (arrays.first_shared(order) is not None) is shared
        found = [arrays.first_shared([order[0]], order[1:]), arrays.first_shared(order[:2], order[2:])]
        assert shared or found == [None, None]


def test_a_search_without_end_counts_as_shared() -> None:
    a = tensor("a", (40,) * 6, 0, (100003, 100019, 100043, 100049, 100057, 100069))
    b = tensor("b", (40,) * 6, 2, (100103, 100109, 100129, 100151, 100153, 100169))
    assert arrays.first_shared([a], [b]) == (a, b)


def test_others_may_share() -> None:
    one, same, out = tensor("q", (4, 64)), tensor("k", (4, 64)), tensor("out", (4, 64), 1024)
    assert arrays.first_shared([out], [one, same]) is None
    assert arrays.first_shared([one], [same, out], [same]) is None
    assert arrays.first_shared([one], [same, out], [out]) == (one, same)
    # As a whole: not in another order, of another type, shape or place.
    for other in (
        tensor("k", (4, 64), 0, (64, -1)), tensor("k", (4, 64), 0, dtype="float16"), tensor("k", (64, 4)),
        tensor("k", (4, 64), 2), tensor("k", (3, 64)),
    ):  # fmt: skip
        assert arrays.first_shared([one], [other], [other]) == (one, other)
    assert arrays.first_shared([tensor("a", (1, 64), 0, (7, 1))], [x := tensor("b", (1, 64), 0, (9, 1))], [x]) is None


def call_of(operation: Any, tensors: dict[str, Tensor], cache: Any = None) -> None:
    """`check_memory` of a call."""
    check_memory(SimpleNamespace(operation=operation, cache=cache), tensors)  # type: ignore[arg-type]


SHAPE = (2, 64, 2, 64)
BYTES = 2 * 2 * 64 * 2 * 64


def apart(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Arrays one behind the other."""
    return {name: tensor(name.removeprefix("given."), SHAPE, i * BYTES) for i, name in enumerate(names)}


OPERATIONS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    # the operation, what it reads, and what it writes
    "attention": (attention._ATTENTION, ("q", "k", "v", "cu_seqlens_q", "mask", "sinks"), ("out",)),
    "attention on operands": (
        attention._ON_OPERANDS["attention"], ("q_int", "q_scale", "k_int", "v", "v_mean", "mask"), ("out",),
    ),
    "attention with descales": (attention._WITH_DESCALES["attention"], ("q", "k", "v", "descale_v"), ("out",)),
    "attention with more": (
        attention._with_arrays("attention", ("block_mask", "score_mod.x")),
        ("q", "k", "v", "block_mask", "score_mod.x"), ("out",),
    ),
    "backward": (
        attention_backward._operation("attention_backward"), ("q", "k", "v", "do", "o", "lse", "dlse", "mask"),
        ("given.dq", "given.dk", "given.dv"),
    ),
    "decode": (decode._DECODE, ("q", "seq_lens", "block_table", "sinks"), ("out",)),
    "attention_sparse": (sparse._SPARSE, ("q", "indices", "topk_length", "sinks"), ("out",)),
    "with cache": (with_cache._WITH_CACHE, ("q", "seq_lens", "block_table", "cu_seqlens_q", "sinks"), ("out",)),
    "merge": (merge._MERGE, ("o_a", "o_b", "lse_a", "lse_b"), ("out",)),
    "index_logits": (
        index_logits._INDEX_LOGITS, ("q", "k", "weights", "k_scale", "seq_lens", "block_table", "k_start"), ("out",),
    ),
    "top_k": (top_k._TOP_K, ("logits", "lengths", "starts", "block_table"), ("out",)),
}  # fmt: skip
SAME = {"attention": ("q",), "attention with more": ("q",), "merge": ("o_a", "o_b")}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_overlap_nothing_that_is_read(name: str) -> None:
    operation, read, written = OPERATIONS[name]
    call_of(operation, apart((*read, *written)))
    for result, other in [(w, r) for w in written for r in read] + list(itertools.permutations(written, 2)):
        for shift in (0, 16, -16, BYTES - 16, 16 - BYTES):
            tensors = apart((*read, *written))
            # Somewhere else than all others: one array lies over the other alone.
            for x, at in ((other, 0), (result, shift)):
                tensors[x] = tensor(x.removeprefix("given."), SHAPE, 100 * BYTES + at)
            if shift == 0 and other in SAME.get(name, ()):
                call_of(operation, tensors)
                continue
            with pytest.raises(ArgumentError, match="memory of its own") as caught:
                call_of(operation, tensors)
            both = {result.removeprefix("given."), other.removeprefix("given.")}
            assert caught.value.argument in both
            assert caught.value.received.split("'")[1] in both
            # Kernels read; on the CPU everything has been computed by then. But two results are two.
            for t in tensors.values():
                t.device = "cpu"
            if other in written:
                with pytest.raises(ArgumentError, match="shares memory"):
                    call_of(operation, tensors)
            else:
                call_of(operation, tensors)


def test_q_of_another_size_is_no_place_for_o() -> None:
    tensors = apart(("q", "k", "v"))
    tensors["out"] = tensor("out", (*SHAPE[:3], 32))
    with pytest.raises(ArgumentError, match=r"'out': expected memory of its own, or q itself with its strides, rec"):
        call_of(attention._ATTENTION, tensors)


def test_parts_of_packed_arrays_are_taken() -> None:
    at = 50 * BYTES
    lots = parts((2, 64, 3, 2, 64), 2, (0, 1), (1, 2), (2, 3), at=at)
    for t in lots:
        t.shape, t.strides = (2, 64, 2, 64), (3 * 64 * 128, 3 * 128, 64, 1)
    gradients = dict(zip(("given.dq", "given.dk", "given.dv"), lots, strict=True))
    call_of(OPERATIONS["backward"][0], apart(("q", "k", "v", "do", "o", "lse")) | gradients)
    packed = dict(zip(("q", "k", "out"), lots, strict=True))
    call_of(attention._ATTENTION, apart(("q", "k", "v")) | packed)


def numpy_cache(**changes: Any) -> oa.KVCache:
    return oa.KVCache(2, 16, 2, 64, like=np.zeros(1, np.float32), k_dtype="fp16", **changes)


LENS = np.array([4, 4], np.int32)


def test_append_takes_nothing_from_the_cache_that_it_writes() -> None:
    cache, other = numpy_cache(), numpy_cache()
    k = np.ones((2, 4, 2, 64), np.float16)
    for x in (cache, other):
        x.k[...], x.v[...] = 3.0, 4.0
    of_k, of_v = (x.transpose(0, 2, 1, 3)[:, 3:7] for x in (cache.k, cache.v))
    for name, given in (("k", {"k": of_k, "v": k}), ("v", {"k": k, "v": of_v}), ("v", {"k": k, "v": of_k})):
        with pytest.raises(ArgumentError, match=r"shares memory with 'cache\.[kv]', which is written") as caught:
            oa.append(cache, **given, seq_lens=LENS)
        assert caught.value.argument == name
        assert (cache.k == 3).all()
        assert (cache.v == 4).all()
    oa.append(other, of_k, of_v, seq_lens=LENS)
    assert (other.k[:, :, :4] == 3).all()
    lens = cache.k.view(np.int32)[0, 0, 0, :2]
    lens[...] = LENS
    with pytest.raises(ArgumentError, match=r"'seq_lens'.*shares memory with 'cache\.k'"):
        oa.append(cache, k, k, seq_lens=lens)


@pytest.mark.parametrize("operation", ["append", "copy_blocks"])
def test_planes_of_a_cache_are_apart(operation: str) -> None:
    cache = oa.PagedKVCache(4, 4, 2, 64, like=np.zeros(1, np.float32), k_dtype="fp16")
    one = cache.on([cache.k, cache.k], [])
    cache.k[...] = 3.0
    k, table = np.ones((1, 2, 2, 64), np.float16), np.arange(4, dtype=np.int32)[None]
    calls = {
        "append": lambda: oa.append(one, k, k, seq_lens=LENS[:1], block_table=table),
        "copy_blocks": lambda: oa.copy_blocks(one, [(0, 1)]),
    }
    with pytest.raises(ArgumentError, match=rf"{operation}\(\): argument 'cache.k'.*shares memory with 'cache.v'"):
        calls[operation]()
    assert (cache.k == 3).all()
    # What only reads may have one array for both.
    oa.decode(np.ones((1, 1, 2, 64), np.float16), one, seq_lens=LENS[:1], block_table=table)


def test_decode_writes_into_no_plane_on_a_gpu() -> None:
    cache = numpy_cache()
    planes = [tensor(f"cache.{x}", SHAPE, (50 + i) * BYTES) for i, x in enumerate("kv")]
    for t in planes:
        cache.planes[t.argument[6:]] = t
    tensors = apart(("q", "seq_lens", "out"))
    call_of(decode._DECODE, tensors, cache)
    for at in (50 * BYTES, 52 * BYTES - 16):
        with pytest.raises(ArgumentError, match=r"'out'.*shares memory with 'cache\.[kv]'"):
            call_of(decode._DECODE, tensors | {"out": tensor("out", SHAPE, at)}, cache)
    call_of(append._APPEND, apart(("k", "v", "seq_lens")), cache)
    with pytest.raises(ArgumentError, match=r"'v'.*shares memory with 'cache\.k'"):
        call_of(append._APPEND, tensors | {"v": tensor("v", SHAPE, 51 * BYTES - 16)}, cache)


def test_results_on_the_cpu() -> None:
    """The example of two gradients in one buffer; and o over its inputs, which have been read by then."""
    x = {name: np.random.default_rng(i).standard_normal((1, 4, 2, 8)) for i, name in enumerate(("do", "q", "k", "v"))}
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True)
    dq, dk, dv = oa.attention_backward(*x.values(), o, lse)
    buffer = np.full((1, 12, 2, 8), 7.0)
    with pytest.raises(ArgumentError, match="'dq': expected memory of its own, received an array that shares memory"):
        oa.attention_backward(*x.values(), o, lse, dq=buffer[:, :4], dk=buffer[:, 2:6])
    assert (buffer == 7).all()
    got = oa.attention_backward(*x.values(), o, lse, dq=buffer[:, :4], dk=buffer[:, 4:8], dv=buffer[:, 8:])
    for a, b in zip(got, (dq, dk, dv), strict=True):
        np.testing.assert_array_equal(a, b)
    wide = np.concatenate([x["q"], x["q"]], axis=1)
    got = oa.attention(wide[:, :4], x["k"], x["v"], out=wide[:, 2:6])
    np.testing.assert_array_equal(got, o)
    with pytest.raises(StrideError, match="elements that do not share memory"):
        oa.attention(x["q"], x["k"], x["v"], out=np.broadcast_to(np.zeros((1, 1, 2, 8)), (1, 4, 2, 8)))
