"""Errors that do not come from a function's own checks name the function too: streams, gradients, layouts, devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DeviceError, UnsupportedError

E4M3, INT32 = ml_dtypes.float8_e4m3fn, np.int32


def numbers(*shape: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def pool(*, is_latent: bool) -> Any:
    if is_latent:
        return oa.PagedKVCache.from_arrays(numbers(4, 8, 1, 576), head_dim_v=512)
    return oa.PagedKVCache(4, 8, 1, 64, like=numbers(1), k_dtype="fp16")


def calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """A valid call of each function on arrays: by its name, the function, arguments, options."""
    q, k = numbers(2, 3, 4, 64), numbers(2, 5, 2, 64)
    cu = np.array([0, 2, 3], INT32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 2, "max_seqlen_k": 2}
    lens, table = np.array([3, 9], INT32), np.arange(4, dtype=INT32).reshape(2, 2)
    at = {"seq_lens": lens, "block_table": table}
    lists = np.zeros((2, 1, 3), INT32)
    o, lse = oa.attention(q, k, k, return_lse=True)
    latent, other = pool(is_latent=True), pool(is_latent=False)
    return {
        "attention": (oa.attention, (q, k, k), {}),
        "attention_varlen": (oa.attention_varlen, (q[0], k[0, :3], k[0, :3]), packed),
        "attention_backward": (oa.attention_backward, (o, q, k, k, o, lse), {}),
        "attention_with_kvcache": (oa.attention_with_kvcache, (numbers(2, 1, 2, 64), other), at),
        "attention_sparse": (oa.attention_sparse, (numbers(2, 3, 576), numbers(9, 576)), {"indices": lists[:, 0]}),
        "decode": (oa.decode, (numbers(2, 1, 3, 576), latent), at),
        "append": (oa.append, (latent, numbers(2, 1, 1, 576)), at),
        "copy_blocks": (oa.copy_blocks, (latent, [(0, 1)]), {}),
        "merge_states": (oa.merge_states, (o, lse, o, lse), {}),
        "quantize_qk": (oa.quantize_qk, (q, k), {}),
        "quantize_v": (oa.quantize_v, (k,), {}),
        "index_logits": (
            oa.index_logits, (numbers(2, 4, 128, dtype=E4M3), numbers(5, 128, dtype=E4M3), numbers(2, 4, dtype="f4")),
            {"k_scale": np.ones(5, np.float32)},
        ),
        "top_k": (oa.top_k, (numbers(2, 9, dtype="f4"), 3), {}),
        "sparse_blocks": (oa.sparse_blocks, (q, k), {"topk": 0.5}),
    }  # fmt: skip


NAMES = (
    "attention", "attention_varlen", "attention_backward", "attention_with_kvcache", "attention_sparse", "decode",
    "append", "copy_blocks", "merge_states", "quantize_qk", "quantize_v", "index_logits", "top_k", "sparse_blocks",
)  # fmt: skip


def test_names_are_those_of_the_calls() -> None:
    assert tuple(calls()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_streams(name: str) -> None:
    function, arguments, options = calls()[name]
    function(*arguments, **options)
    for stream in (0, 7, -1, "default", 1.5):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments, **options, stream=stream)
        assert (caught.value.function, caught.value.argument) == (name, "stream")
    if name != "append" and not name.startswith("copy"):
        with pytest.raises(ArgumentError, match=rf"^{name}\(\): argument 'stream'"):
            oa.explain(function, *arguments, **options, stream=7)


def test_decode_over_lists_says_decode() -> None:
    q, lists = numbers(2, 1, 3, 576), np.zeros((2, 1, 3), INT32)
    with pytest.raises(ArgumentError, match=r"^decode\(\): argument 'stream'"):
        oa.decode(q, pool(is_latent=True), indices=lists, stream=3)


@pytest.mark.parametrize("name", ["attention", "decode", "top_k", "merge_states", "attention_sparse", "append"])
def test_memory_that_cannot_be_written(name: str) -> None:
    function, arguments, options = calls()[name]
    if name == "append":
        rows = numbers(4, 8, 1, 576)
        rows.flags.writeable = False
        arguments = (oa.PagedKVCache.from_arrays(rows, head_dim_v=512), *arguments[1:])
    else:
        found = function(*arguments, **options)
        out = found[0] if isinstance(found, tuple) else found
        out.flags.writeable = False
        options = {**options, "out": out}
    with pytest.raises(ArgumentError, match="expected a writable array") as caught:
        function(*arguments, **options)
    assert caught.value.function == name


@pytest.mark.frameworks
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("copy_blocks", "attention_backward")])
def test_tensors_that_no_kernel_reads(name: str) -> None:
    torch = pytest.importorskip("torch")
    function, arguments, options = calls()[name]
    index = next(i for i, x in enumerate(arguments) if isinstance(x, np.ndarray))

    def broken(x: Any) -> tuple[Any, ...]:
        return (*arguments[:index], x, *arguments[index + 1 :])

    x = torch.from_numpy(arguments[index].astype(np.float32)).to_sparse()
    with pytest.raises(UnsupportedError, match=rf"^{name}\(\): argument '\w+' has layout sparse_coo"):
        function(*broken(x), **options)
    x = torch.from_numpy(arguments[index].astype(np.float32)).to("meta")
    with pytest.raises(DeviceError) as caught:
        function(*broken(x), **options)
    assert caught.value.function == name
    if name in ("attention", "attention_varlen"):  # these have gradients
        return
    x = torch.from_numpy(arguments[index].astype(np.float32)).requires_grad_()
    with pytest.raises(UnsupportedError, match=rf"^{name}\(\): argument '\w+' requires a gradient"):
        function(*broken(x), **options)


@pytest.mark.frameworks
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("copy_blocks", "append")])
def test_what_torch_has_besides_tensors(name: str) -> None:
    torch = pytest.importorskip("torch")
    function, arguments, options = calls()[name]
    index = next(i for i, x in enumerate(arguments) if isinstance(x, np.ndarray))
    for wrong in (torch.float16, torch.device("cpu"), torch.Size((2, 3))):
        with pytest.raises(ArgumentError, match=r"argument '\w+': expected an array") as caught:
            function(*arguments[:index], wrong, *arguments[index + 1 :], **options)
        assert caught.value.function == name


@pytest.mark.frameworks
def test_hints_are_of_the_argument() -> None:
    torch = pytest.importorskip("torch")
    q, k = numbers(2, 3, 4, 64), numbers(2, 5, 2, 64)
    learned = torch.ones((), requires_grad=True)
    with pytest.raises(ArgumentError, match="multiply q by it"):
        oa.attention(q, k, k, softmax_scale=learned)
    with pytest.raises(ArgumentError, match="'similarity': expected a number, which has no gradient") as caught:
        oa.sparse_blocks(q, k, topk=0.5, similarity=learned)
    assert caught.value.hint is None


@pytest.mark.parametrize("size", [[128, 64], (64,), (64, 64, 64), 63, "64", None, (64, 0), 2**40])
def test_block_sizes(size: Any) -> None:
    q, k = numbers(2, 3, 4, 64), numbers(2, 5, 2, 64)
    with pytest.raises(ArgumentError, match="'block_size': expected a multiple of 64, or two of them"):
        oa.sparse_blocks(q, k, topk=0.5, block_size=size)
    if size is not None:  # the default
        with pytest.raises(ArgumentError, match="'block_size': expected a multiple of 64, or two of them"):
            oa.attention(q, k, k, block_mask=np.ones((1, 1), bool), block_size=size)
    with pytest.raises(ArgumentError, match="'block_size': expected a multiple of 64, or two of them"):
        oa.Sparse(topk=0.5, block_size=size)


def test_knobs_take_scalars_of_other_libraries() -> None:
    made = oa.Sparse(
        topk=np.float32(0.5), similarity=np.array(0.25), block_size=(np.int64(128), np.int32(64)),
        keep_first=np.uint8(1),
    )  # fmt: skip
    assert made == oa.Sparse(topk=0.5, similarity=0.25, block_size=(128, 64), keep_first=1)
    assert type(made.topk) is float
    assert type(made.sizes[0]) is int
    knobs = oa.Int8(smooth_k=np.False_, seed=np.int64(3), min_seqlen=np.array(7), sparse=made)
    assert knobs == oa.Int8(smooth_k=False, seed=3, min_seqlen=7, sparse=made)
    assert oa.Fp8(smooth_v=np.bool_(True)) == oa.Fp8(smooth_v=True)
    assert oa.Auto(max_error=np.float64(0.1)) == oa.Auto(max_error=0.1)
    for wrong in ({"seed": np.float32(3)}, {"smooth_k": np.int64(1)}, {"min_seqlen": np.array([7])}):
        with pytest.raises(ArgumentError):
            oa.Int8(**wrong)


def test_deterministic_packed_calls_over_latent_caches_say_so() -> None:
    lens, table = np.array([3, 9], INT32), np.arange(4, dtype=INT32).reshape(2, 2)
    with pytest.raises(UnsupportedError) as caught:
        oa.attention_with_kvcache(
            numbers(4, 30, 576), pool(is_latent=True), seq_lens=lens, block_table=table,
            cu_seqlens_q=np.array([0, 2, 4], INT32), max_seqlen_q=2, deterministic=True,
        )  # fmt: skip
    assert str(caught.value).count("packed and deterministic") == 2
