"""torch tensors on the CPU, and bfloat16 rounding bit for bit against torch's."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn import arrays
from omniattn.errors import ArgumentError, DeviceError, DtypeError, UnsupportedError

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from omniattn.arrays import from_torch  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "bool", "uint8", "int8"]
)
def test_facts(dtype: str) -> None:
    base = torch.zeros(2, 3, 4, 8, dtype=getattr(torch, dtype))
    view = base.transpose(1, 2)[1:]
    t = arrays.describe(view, "v")
    assert (t.framework, t.device, t.ordinal, t.dtype, t.argument) == ("torch", "cpu", 0, dtype, "v")
    assert tuple(t.shape) == (1, 4, 3, 8)
    assert t.strides == (96, 8, 32, 1)
    assert t.ptr == base.data_ptr() + 96 * base.element_size()
    assert t.readonly is False
    assert t.obj is view
    expanded = arrays.describe(base[:, :1].expand(2, 5, 4, 8), "k")
    assert expanded.strides[1] == 0


def test_float8_and_small_sizes() -> None:
    assert arrays.describe(torch.zeros(4, dtype=torch.float8_e4m3fn), "k").dtype == "float8_e4m3fn"
    assert tuple(arrays.describe(torch.zeros(0, 8), "k").shape) == (0, 8)
    assert arrays.describe(torch.tensor(1.0), "k").strides == ()


def test_gradients_are_never_cut_silently() -> None:
    x = torch.zeros(2, requires_grad=True)
    for wanting in (x, x * 2, torch.nn.Parameter(torch.zeros(2))):
        with pytest.raises(UnsupportedError) as caught:
            arrays.describe(wanting, "q")
        assert "argument 'q' requires a gradient" in str(caught.value)
        assert "torch.no_grad()" in str(caught.value)
        assert "detach()" in str(caught.value)
        with torch.no_grad():
            assert arrays.describe(wanting, "q").obj is wanting
    assert arrays.describe(x.detach(), "q").dtype == "float32"
    assert arrays.describe(torch.nn.Parameter(torch.zeros(2), requires_grad=False), "q").dtype == "float32"


def test_what_needs_a_gradient() -> None:
    x, y = torch.zeros(2, requires_grad=True), torch.zeros(2)
    assert arrays.needs_gradient((None, y, x))
    assert not arrays.needs_gradient((None, y, 3, "text", np.zeros(2)))
    with torch.no_grad():
        assert not arrays.needs_gradient((x,))
    kept = arrays.without_gradients((x, None, y, 3))
    assert not kept[0].requires_grad
    assert kept[0].data_ptr() == x.data_ptr()
    assert kept[1:] == (None, y, 3)


class OnGpu:
    """A tensor that passes for one on a GPU."""

    is_cuda, layout = True, torch.strided

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        self.tensor, self.address = tensor, address
        self.ndim, self.shape, self.stride, self.element_size = (
            tensor.ndim, tensor.shape, tensor.stride, tensor.element_size
        )  # fmt: skip

    def data_ptr(self) -> int:
        return self.address

    def clone(self, memory_format: object) -> torch.Tensor:
        return self.tensor.clone(memory_format=memory_format)


@pytest.mark.parametrize("multiple", [16, 4])
def test_rows_that_kernels_can_read(multiple: int) -> None:
    base = torch.randn(2, 7, 4, 8).half() if multiple == 16 else torch.randn(2, 4, 7)
    plain = [
        (base, 0x1000),
        (base[:, :3], 0x1000),
        (base.transpose(0, 1), 0x20),
        (base[:1].expand(1, *base.shape[1:]), 0),
    ]
    for x, address in plain:
        there = OnGpu(x, address)
        assert from_torch.with_plain_rows(there, multiple) is there
    ones = torch.ones((), dtype=base.dtype)
    views = [base[:1].expand(base.shape), ones.expand(2, 8), base[..., ::2], base.transpose(-1, -2)]
    if multiple == 16:
        views.append(base.new_zeros(2, 7, 9)[..., :8])
    odd = [(base, 0x1000 + multiple // 2), *((x, 0) for x in views)]
    for x, address in odd:
        copy = from_torch.with_plain_rows(OnGpu(x, address), multiple)
        assert isinstance(copy, torch.Tensor)
        assert copy.is_contiguous()
        assert torch.equal(copy, x)
    # Of other arrays every row will do: nothing is copied on the CPU.
    for x in (base[..., ::2], np.zeros((2, 8))[:, ::2], 3, None):
        assert arrays.with_plain_rows(x, multiple) is x


def test_tangents_are_never_cut_silently() -> None:
    """Forward-mode differentiation, as `torch.autograd.functional.jvp` uses it, marks a tensor in no other way."""
    x, tangent = torch.zeros(2), torch.ones(2)
    with forward_ad.dual_level():
        assert from_torch.torch_facts((x,)) is None, "the fast path looks for no tangents"
        assert arrays.describe(x, "q").obj is x
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(UnsupportedError, match=r"argument 'q' has a tangent.*unpack_dual\(tensor\)\.primal"):
            arrays.describe(dual, "q")
        assert arrays.describe(forward_ad.unpack_dual(dual).primal, "q").dtype == "float32"


def test_outputs_without_memory() -> None:
    like = arrays.describe(torch.zeros(2, 8), "q")
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedError, match="an output that has no memory"):
            arrays.empty_like_framework(like, (2, 8), "float32")
    assert arrays.empty_like_framework(like, (0, 8), "float32").ptr == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_are_refused_wherever_they_come() -> None:
    """Nobody may ask for their shape."""
    nested = torch.nested.nested_tensor([torch.zeros(1, 4, 64), torch.zeros(1, 4, 64)])
    x, lens = torch.zeros(2, 1, 4, 64), torch.ones(2, dtype=torch.int32)
    cache = omniattn.PagedKVCache(2, 2, 4, 64, like=x)
    latent = torch.zeros(9, 576, dtype=torch.float16)
    table = torch.zeros((2, 1), dtype=torch.int32)
    for call, name in (
        (lambda: omniattn.attention(x, x, x, softmax_scale=nested), "softmax_scale"),
        (lambda: omniattn.attention(x, x, x, causal=nested), "causal"),
        (lambda: omniattn.attention(x, x, x, window=nested), "window"),
        (lambda: omniattn.decode(x, cache, seq_lens=lens, block_table=table, shared_prefix=nested), "shared_prefix"),
        (
            lambda: omniattn.attention_with_kvcache(nested, cache, seq_lens=lens, block_table=table, shared_prefix=2),
            "q",
        ),
        (lambda: omniattn.attention_sparse(x[0], latent, indices=nested), "indices"),
        (lambda: omniattn.copy_blocks(cache, nested), "copies"),
    ):
        with pytest.raises((ArgumentError, UnsupportedError), match=f"argument '{name}'"):
            call()


UNREADABLE: dict[str, Callable[[], Any]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": lambda: torch.tensor([0.5, 0.5]).to_sparse(),
    "meta": lambda: torch.full((2,), 0.5, device="meta"),
    "meta scalar": lambda: torch.tensor(0.5, device="meta"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_options_that_cannot_be_read_are_named(kind: str) -> None:
    given = UNREADABLE[kind]()
    x, seqs = torch.zeros(1, 128, 2, 64), omniattn.BlockManager(4, 4)
    seqs.add("a")
    options: dict[str, Callable[..., Any]] = {
        "sparse_blocks": functools.partial(omniattn.sparse_blocks, x, x),
        "attention": functools.partial(omniattn.attention, x, x, x),
        "calibrate_sparse": functools.partial(omniattn.calibrate_sparse, (x, x, x), max_error=0.1),
    }
    calls: list[tuple[str, str, Callable[..., Any]]] = [
        *(("sparse_blocks", name, options["sparse_blocks"]) for name in ("topk", "cdf")),
        ("attention", "out_dtype", options["attention"]),
        ("calibrate_sparse", "file", options["calibrate_sparse"]),
        ("calibrate_sparse", "tensors", lambda tensors: omniattn.calibrate_sparse(tensors, max_error=0.1)),
        ("calibrate_sparse", "tensors", lambda tensors: omniattn.calibrate_sparse((x, tensors, x), max_error=0.1)),
        ("BlockManager.match_prefix", "tokens", lambda tokens: seqs.match_prefix("b", tokens)),
        ("BlockManager.commit", "tokens", lambda tokens: seqs.commit("a", tokens)),
    ]
    for knobs in (omniattn.Int8, omniattn.Int4, omniattn.Fp8, omniattn.Sparse, omniattn.Auto):
        for field in dataclasses.fields(knobs):
            whole = knobs is not omniattn.Sparse or field.name in ("topk", "cdf", "file")
            rest: dict[str, Any] = {} if whole else {"topk": 0.5}
            calls.append((knobs.__name__, field.name, functools.partial(knobs, **rest)))
    for function, name, call in calls:
        with pytest.raises((ArgumentError, UnsupportedError), match=rf"{function}\(\).* '{name}'") as caught:
            call(**{name: given})
        if isinstance(caught.value, ArgumentError):
            assert caught.value.argument == name
            assert caught.value.expected
            assert caught.value.received
    assert seqs.sequences == ("a",)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_what_is_not_plain_memory() -> None:
    class Tagged(torch.Tensor):
        pass

    cases = [
        (torch.zeros(2).as_subclass(Tagged), UnsupportedError, "subclass of torch.Tensor"),
        (torch.zeros(2, 2).to_sparse(), UnsupportedError, "layout sparse_coo"),
        (torch.zeros(2, 2).to_sparse_csr(), UnsupportedError, "layout sparse_csr"),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), UnsupportedError, "nested tensor"),
        (torch.zeros(2, device="meta"), DeviceError, "device meta"),
    ]
    for tensor, error, text in cases:
        with pytest.raises(error) as caught:
            arrays.describe(tensor, "k")
        assert "'k'" in str(caught.value)
        assert text in str(caught.value)
    with pytest.raises(DtypeError) as dtype:
        arrays.describe(torch.zeros(2, dtype=torch.complex64), "k")
    assert dtype.value.received == "complex64"


def test_inside_vmap() -> None:
    def inner(x):
        arrays.describe(x, "q")
        return x

    with pytest.raises(UnsupportedError, match=r"without memory of its own .*vmap"):
        torch.vmap(inner)(torch.zeros(2, 3))


def test_inference_tensor_as_out() -> None:
    with torch.inference_mode():
        out = torch.zeros(2)
        arrays.require_writable(arrays.describe(out, "out"))
    with pytest.raises(ArgumentError, match="an inference tensor outside inference mode"):
        arrays.require_writable(arrays.describe(out, "out"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_store_rounds_as_torch_does(dtype: str) -> None:
    rng = np.random.default_rng(0)
    # Every exponent, both signs, subnormals, zeros, infinities; NaN apart, because its payload is nobody's business.
    bits = np.concatenate(
        [rng.integers(0, 1 << 32, 200_000, dtype=np.uint32), np.arange(0, 1 << 24, 97, dtype=np.uint32)]
    )
    source = bits.view(np.float32)
    expected = torch.from_numpy(source).to(getattr(torch, dtype))
    out = torch.full((source.size, 2), 7.0, dtype=getattr(torch, dtype))
    arrays.store(arrays.describe(out[:, 0], "out"), source)
    nan = np.isnan(source)
    assert torch.isnan(out[:, 0]).numpy().tolist() == nan.tolist()
    keep = torch.from_numpy(~nan)
    width = {"float16": torch.int16, "bfloat16": torch.int16, "float32": torch.int32, "float64": torch.int64}[dtype]
    same = out[:, 0][keep].contiguous().view(width) == expected[keep].view(width)
    assert bool(same.all())
    assert bool((out[:, 1] == 7).all())


def test_to_numpy_of_bfloat16_is_exact() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(256, 256).t()
    got = arrays.to_numpy(arrays.describe(bits, "q"))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, bits.float().numpy())


def test_empty_and_finish() -> None:
    ref = arrays.describe(torch.zeros(2, 3, dtype=torch.bfloat16), "q")
    out = arrays.empty_like_framework(ref, (2, 5), "bfloat16")
    arrays.store(out, np.full((2, 5), 1.5))
    result = arrays.finish(out, arrays.prepare([ref, out]))
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [[1.5] * 5] * 2
    assert out.strides == (5, 1)
    assert arrays.empty_like_framework(ref, (4,), "float32").obj.dtype == torch.float32


def test_numpy_and_torch_may_be_mixed_on_the_cpu() -> None:
    tensors = [arrays.describe(torch.zeros(2), "q"), arrays.describe(np.zeros(2), "k")]
    arrays.require_same_device(tensors)
    assert arrays.prepare(tensors) == 0


def test_lookup_happens_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays.describe(torch.zeros(2), "q")
    monkeypatch.setattr(arrays, "_register", None)
    assert arrays.describe(torch.zeros(2), "q").framework == "torch"
