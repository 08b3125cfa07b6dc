"""Numbers as users have them: scalars of torch, NumPy and JAX for scales, softcaps, flags and factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, OmniattnError, UnsupportedError

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")
from jax import numpy as jnp  # noqa: E402

import omniattn.jax  # noqa: E402
import omniattn.torch  # noqa: E402
from omniattn.compat import flash_attn as fa2  # noqa: E402
from omniattn.compat import flash_attn_interface as fa3  # noqa: E402
from omniattn.compat import sageattention as sage  # noqa: E402
from tests.unit.compat.compat_cases import randoms, starts  # noqa: E402

pytestmark = pytest.mark.frameworks

#: Every type here holds the numbers of these tests exactly.
SCALARS: dict[str, Callable[[float], Any]] = {
    "np.float16": np.float16, "np.float32": np.float32, "np.float64": np.float64, "ml_dtypes": ml_dtypes.bfloat16,
    "np.array": np.array, "jnp.float32": jnp.float32, "jnp.asarray": jnp.asarray, "torch": torch.tensor,
    "torch.bfloat16": lambda x: torch.tensor(x).bfloat16(), "torch.float64": lambda x: torch.tensor(x).double(),
}  # fmt: skip
every_scalar = pytest.mark.parametrize("make", SCALARS.values(), ids=SCALARS)
FLAGS: list[Any] = [True, np.bool_(True), np.array(True), jnp.bool_(True), torch.tensor(True)]
SCORE = {"softmax_scale": 0.5, "softcap": 2.0}
PACKED = {"cu_seqlens_q": starts([5, 5]), "cu_seqlens_k": starts([7, 7]), "max_seqlen_q": 5, "max_seqlen_k": 7}


def tensors(dtype: Any = torch.float32) -> list[Any]:
    return randoms((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), dtype=dtype)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(*(np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for x in (a, b)))


@every_scalar
def test_scales(make: Callable[[float], Any]) -> None:
    """Every function that has them: the bits of Python's numbers."""
    q, k, v = tensors()
    own = {name: make(x) for name, x in SCORE.items()}
    want, lse = oa.attention(q, k, v, return_lse=True, **SCORE)
    for arrays in ((q, k, v), [x.numpy() for x in (q, k, v)], [jnp.asarray(x.numpy()) for x in (q, k, v)]):
        assert equal(oa.attention(*arrays, **own), want)
    assert oa.explain(q, k, v, **own).problem == oa.explain(q, k, v, **SCORE).problem
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    assert equal(oa.attention_varlen(*flat, **PACKED, **own), want.flatten(0, 1))
    backward = [oa.attention_backward(want, q, k, v, want, lse, **score) for score in (own, SCORE)]
    assert equal(*backward)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = [torch.autograd.grad(oa.attention(*leaves, **score).sum(), leaves) for score in (own, SCORE)]
    assert equal(*gradients)
    cache = oa.KVCache(2, 16, 2, 8, like=q, k_dtype="fp16")
    lengths = torch.tensor([7, 7], dtype=torch.int32)
    oa.append(cache, k, v, seq_lens=lengths)
    assert equal(*(oa.decode(q, cache, seq_lens=lengths, **score) for score in (own, SCORE)))


@every_scalar
def test_scales_of_other_interfaces(make: Callable[[float], Any]) -> None:
    q, k, v = tensors()
    scale, softcap = make(0.5), make(2.0)
    for module in (fa2, fa3):
        want = module.flash_attn_func(q, k, v, softmax_scale=0.5, softcap=2.0)
        assert equal(module.flash_attn_func(q, k, v, softmax_scale=scale, softcap=softcap), want)
        want = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, softmax_scale=0.5, softcap=2.0)
        made = module.flash_attn_with_kvcache(q, k, v, cache_seqlens=6, softmax_scale=scale, softcap=softcap)
        assert equal(made, want)
    assert equal(fa2.flash_attn_func(q, k, v, make(0.0), scale), fa2.flash_attn_func(q, k, v, 0.0, 0.5))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert equal(sage.sageattn(*turned, sm_scale=scale), sage.sageattn(*turned, sm_scale=0.5))
    wide = [x[:, : turned[1].shape[1]] for x in turned]
    assert equal(omniattn.torch.sdpa(*wide, scale=scale), omniattn.torch.sdpa(*wide, scale=0.5))
    with omniattn.torch.use_sdpa():
        made = torch.nn.functional.scaled_dot_product_attention(*wide, scale=scale)
    assert equal(made, omniattn.torch.sdpa(*wide, scale=0.5))
    of_jax = [jnp.asarray(x.numpy()) for x in (q, k, v)]
    made, want = (omniattn.jax.dot_product_attention(*of_jax, scale=x) for x in (scale, 0.5))
    assert equal(made, want)


@every_scalar
def test_scales_of_integrations(make: Callable[[float], Any]) -> None:
    comfyui = pytest.importorskip("omniattn.integrations.comfyui")
    q = tensors()[0]
    override = comfyui.make_override(devices=("cpu",))
    made, want = (override(None, q.flatten(2), q.flatten(2), q.flatten(2), 4, scale=x) for x in (make(0.5), 0.5))
    assert equal(made, want)
    pytest.importorskip("diffusers")
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    from omniattn.integrations import diffusers as of_diffusers

    of_diffusers.register()
    made, want = (dispatch_attention_fn(q, q, q, scale=x, backend="omniattn") for x in (make(0.5), 0.5))
    assert equal(made, want)
    pytest.importorskip("transformers")
    from omniattn.integrations import transformers as of_transformers

    turned, attend = q.transpose(1, 2), of_transformers._attention_function("exact")
    made, want = (
        attend(torch.nn.Module(), turned, turned, turned, None, scaling=x, softcap=x)[0] for x in (make(0.5), 0.5)
    )
    assert equal(made, want)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda x: f"{type(x).__module__}.{type(x).__name__}")
def test_flags(flag: Any) -> None:
    q, k, v = tensors()
    want = oa.attention(q, k, v, causal=True, return_lse=True)
    assert equal(oa.attention(q, k, v, causal=flag, return_lse=flag, deterministic=flag), want)
    assert equal(fa2.flash_attn_func(q, k, v, causal=flag), want[0])
    assert equal(fa3.flash_attn_func(q, k, v, causal=flag, return_attn_probs=flag), want)


def test_zero_and_one_are_flags_of_the_originals_alone() -> None:
    """flash-attn and SageAttention take them; attention does not, as torch's SDPA does not."""
    q, k, v = tensors()
    for value in (1, 0, np.int64(1), torch.tensor(1)):
        want = oa.attention(q, k, v, causal=bool(value))
        assert equal(fa2.flash_attn_func(q, k, v, causal=value), want)
        assert equal(fa3.flash_attn_func(q, k, v, causal=value, deterministic=value), want)
        assert equal(fa2.flash_attn_with_kvcache(q, k, v, causal=value), want)
        same = sage.sageattn(q, q, q, "NHD", value)
        assert equal(same, sage.sageattn(q, q, q, "NHD", bool(value)))
        with pytest.raises(ArgumentError, match="causal"):
            oa.attention(q, k, v, causal=value)
    for value in (2, -1, 1.0, "yes", None, torch.tensor([1])):
        with pytest.raises(ArgumentError, match="causal"):
            fa2.flash_attn_func(q, k, v, causal=value)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_number_that_changes(make: Callable[[float], Any]) -> None:
    """A plan is found by values, not by the arrays that hold them."""
    q, k, v = tensors()
    scale, left = make(0.5), make(1)
    for factor, window in ((1.0, 1), (0.25, 3), (1.0, 1)):
        scale[...], left[...] = 0.5 * factor, window
        made = oa.attention(q, k, v, softmax_scale=scale, window=(left, 0))
        assert equal(made, oa.attention(q, k, v, softmax_scale=0.5 * factor, window=(window, 0)))
    lengths, longest = starts([5, 5]), make(7)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    mask = torch.rand(2, 1, 1, 7) < 0.6
    options = {"cu_seqlens_q": lengths, "cu_seqlens_k": starts([7, 7]), "max_seqlen_q": 5, "max_seqlen_k": longest}
    oa.attention_varlen(*flat, mask=mask, **options)
    longest[...] = 8
    with pytest.raises(ArgumentError, match="mask"):  # the extent of the mask
        oa.attention_varlen(*flat, mask=mask, **options)


@pytest.mark.parametrize(
    "value",
    [torch.tensor([0.5]), np.array([0.5]), torch.tensor(float("nan")), np.float32("inf"), torch.tensor(True),
     np.bool_(True), torch.tensor(1j), "0.5"],
    ids=str,
)  # fmt: skip
def test_what_is_no_number(value: Any) -> None:
    q, k, v = tensors()
    for call in (
        lambda: oa.attention(q, k, v, softmax_scale=value), lambda: oa.attention(q, k, v, softcap=value),
        lambda: fa2.flash_attn_func(q, k, v, softmax_scale=value), lambda: oa.explain(q, k, v, softmax_scale=value),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"softmax_scale|softcap"):
            call()


def test_a_scale_has_no_gradient() -> None:
    """A learned scale raises, where its gradient would be lost."""
    q, k, v = tensors()
    scale = torch.tensor(0.5, requires_grad=True)
    for call in (
        lambda: oa.attention(q, k, v, softmax_scale=scale),
        lambda: fa3.flash_attn_func(q, k, v, softmax_scale=scale),
        lambda: omniattn.torch.sdpa(q, q, q, scale=scale),
    ):
        with pytest.raises(ArgumentError, match="multiply q by it"):
            call()
    with torch.no_grad():
        assert equal(oa.attention(q, k, v, softmax_scale=scale), oa.attention(q, k, v, softmax_scale=0.5))


def test_under_jit() -> None:
    """A concrete scalar is a constant of the program, a traced one raises by name."""
    q, k, v = (jnp.asarray(x.numpy()) for x in tensors())
    scale = jnp.float32(0.5)
    made = jax.jit(lambda q: oa.attention(q, k, v, softmax_scale=scale))(q)
    assert equal(made, jax.jit(lambda q: oa.attention(q, k, v, softmax_scale=0.5))(q))
    with pytest.raises(ArgumentError, match=r"softmax_scale.*known when the call is traced"):
        jax.jit(lambda q, scale: oa.attention(q, k, v, softmax_scale=scale))(q, scale)


@pytest.mark.parametrize("scalar", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_compiled(scalar: Any) -> None:
    """torch.compile ends the graph to read a tensor's number."""
    torch._dynamo.reset()
    q, k, v = tensors()

    def call(q: Any, scale: Any) -> Any:
        o = oa.attention(q * 2, k, v, softmax_scale=scale, softcap=scale)
        return o + 1, fa2.flash_attn_func(q, k, v, softmax_scale=scale)

    assert equal(torch.compile(call, backend="eager")(q, scalar), call(q, 0.5))
    leaf = q.clone().requires_grad_()
    made = torch.compile(lambda q, s: oa.attention(q, k, v, softmax_scale=s), backend="eager")(leaf, scalar)
    want = oa.attention(leaf, k, v, softmax_scale=0.5)
    assert equal(*(torch.autograd.grad(x.sum(), [leaf]) for x in (made, want)))


# Factors


def low() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 9, heads, 16, generator=generator).to(torch.float8_e4m3fn) for heads in (4, 2, 2)]


@pytest.mark.parametrize("make", [float, *SCALARS.values()], ids=["float", *SCALARS])
def test_factors(make: Callable[[float], Any]) -> None:
    q, k, v = low()
    numbers = (0.5, 2.0, -0.25)
    given = dict(zip(("descale_q", "descale_k", "descale_v"), map(make, numbers), strict=True))
    want = oa.attention(q, k, v, **{name: torch.tensor(x) for name, x in zip(given, numbers, strict=True)}).float()
    assert equal(oa.attention(q, k, v, **given).float(), want)
    of_numpy = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    assert equal(oa.attention(*of_numpy, **given).astype(np.float32), want)
    of_jax = [jnp.asarray(x) for x in of_numpy]
    assert equal(oa.attention(*of_jax, **given).astype(jnp.float32), want)
    assert equal(jax.jit(lambda *x: oa.attention(*x, **given))(*of_jax).astype(jnp.float32), want)
    original = {f"{name[-1]}_descale": x for name, x in given.items()}
    assert equal(fa3.flash_attn_func(q, k, v, **original).float(), want)
    cu, used = starts([9, 9]), torch.tensor([9, 9], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    made = fa3.flash_attn_varlen_func(*flat, cu, cu, 9, 9, seqused_k=used, **original)
    assert equal(made.float(), want.flatten(0, 1))


def test_factors_compiled() -> None:
    torch._dynamo.reset()
    q, k, v = low()
    call = torch.compile(
        lambda q, x: oa.attention(q, k, v, descale_q=x, descale_k=2), fullgraph=True, backend="aot_eager"
    )
    want = oa.attention(q, k, v, descale_q=torch.tensor(0.5), descale_k=torch.tensor(2.0)).float()
    for x in (0.5, torch.tensor(0.5), torch.tensor(0.5).double()):
        assert equal(call(q, x).float(), want)


def test_a_traced_factor() -> None:
    """Of JAX it stays an argument of the program, whatever its type."""
    q, k, v = (jnp.asarray(x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)) for x in low())
    call = jax.jit(lambda q, x: oa.attention(q, k, v, descale_q=x))
    for x in (jnp.float32(0.5), jnp.bfloat16(0.5), 0.5):
        assert equal(call(q, x).astype(jnp.float32), oa.attention(q, k, v, descale_q=0.5).astype(jnp.float32))


@pytest.mark.parametrize("value", [True, -1.0, float("nan"), "1", [1.0], torch.tensor(True), np.float32(-1)], ids=str)
def test_what_is_no_factor(value: Any) -> None:
    with pytest.raises(OmniattnError, match="descale_q"):
        oa.attention(*low(), descale_q=value)


def test_factors_of_other_arrays() -> None:
    """Those of 16-bit arrays and quantized operands raise as they did, numbers too; gradients do not exist."""
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"descale_v.*not in e4m3"):
        oa.attention(q, k, v, descale_v=1.0)
    qk, v8 = oa.quantize_qk(q, k), oa.quantize_v(v)
    with pytest.raises(ArgumentError, match="quantized operands bring their scales"):
        oa.attention(qk.q, qk.k, v8, descale_v=1.0)
    with pytest.raises(UnsupportedError, match="have none"):
        oa.attention(*low(), descale_q=torch.tensor(1.0, requires_grad=True))
