"""`flex_attention`: against torch's on the CPU; the text of its kernels compiled for the host, against the same."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, ShapeError, UnsupportedError
from omniattn.launch.score_mod import user_text
from omniattn.problems.score_mod import ModArray, ScoreModProblem
from tests.host_kernels import HostKernels

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import flex_attention as theirs  # noqa: E402

import omniattn.torch as ours  # noqa: E402
from omniattn.torch import flex  # noqa: E402

BATCH, HEADS, QUERIES, KEYS, DIM = 2, 4, 70, 133, 16
made = torch.Generator().manual_seed(3)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(HEADS, 65, generator=made)
BIAS = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=made)
HALF = torch.randn(HEADS, generator=made).half()
BRAIN = torch.randn(KEYS, generator=made).bfloat16()
DOC_Q = torch.randint(0, 3, (BATCH, QUERIES), generator=made).sort().values
DOC_K = torch.randint(0, 3, (BATCH, KEYS), generator=made).int().sort().values
SPECIAL = torch.rand(KEYS, generator=made) < 0.1
SMALL = torch.randint(0, 5, (BATCH,), generator=made).to(torch.uint8)
COUNT = torch.tensor(7)

Function = Callable[..., Any]
#: Score modifications by what they show.
SCORES: dict[str, Function] = {
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "one factor": lambda s, b, h, q, k: s * 0.5 - 1,
    "softcap": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
    "causal by where": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, float("-inf")),
    "table": lambda s, b, h, q, k: s + TABLE[h, (k - q).clamp(-32, 32) + 32],
    "table by parts": lambda s, b, h, q, k: s + TABLE[h][torch.clip(k - q, min=-32, max=32) + 32],
    "bias": lambda s, b, h, q, k: s + BIAS[b, h, q, k],
    "negative index": lambda s, b, h, q, k: s + SLOPES[h - HEADS] * SLOPES[-1],
    "half and bfloat16": lambda s, b, h, q, k: s * HALF[h].float() + BRAIN[k],
    "distance": lambda s, b, h, q, k: s - 0.1 * abs(k - q),
    "log": lambda s, b, h, q, k: s + torch.log(1.0 + (q - k).abs()),
    "floor and remainder": lambda s, b, h, q, k: s + (k - q) // 7 + (k - q) % 5 - (q - k) % -3,
    "of constants": lambda s, b, h, q, k: s + (q // 8 == k // 8) * 0.25 + 17 % 5 + (2 - q) / 4,
    "remainder of floats": lambda s, b, h, q, k: s + torch.remainder(s, 0.7) + (s // 0.3) * 0.01,
    "remainder at multiples": lambda s, b, h, q, k: (
        s + (k - q) % 0.7 + (q - k) // 0.1 * 0.01 + k % -SLOPES[h] + q % torch.where(k > q, 0.3, -0.3)
        + torch.where(k > 9, k % math.inf, -1 // SLOPES[h])
    ),
    "truncated": lambda s, b, h, q, k: s + torch.div(k - q, 9, rounding_mode="trunc") + (s * 3).int(),
    "powers": lambda s, b, h, q, k: s**2 * 0.1 + s**3 * 0.01 + torch.exp(s * 0.1) ** 1.7 + 2.0 ** (-(h + 1)),
    "rounding": lambda s, b, h, q, k: s + s.round() + torch.floor(s) + torch.ceil(s * 2) + torch.sign(s),
    "functions": lambda s, b, h, q, k: (
        torch.sin(s) + torch.cos(s) + torch.erf(s) + torch.sigmoid(s) + F.relu(s) + torch.sqrt(1 + s * s)
        + torch.rsqrt(2 + s * s) + torch.expm1(s * 0.1) + torch.log1p(s * s) + torch.exp2(s * 0.1)
        + torch.log2(3 + s * s)
    ),
    "more functions": lambda s, b, h, q, k: (
        torch.sinh(s * 0.3) + torch.cosh(s * 0.3) + torch.tan(s * 0.1) + torch.atan(s) + torch.asinh(s)
        + torch.log10(2 + s * s) + torch.square(s) * 0.1 + torch.reciprocal(3 + s * s)
    ),
    "limits": lambda s, b, h, q, k: torch.maximum(torch.minimum(s, 2 - s), s * 0.3).clamp(-1.5, 1.5),
    "bits": lambda s, b, h, q, k: s + ((q & 3) ^ (k | 1)) * 0.1 + (q << 1) * 0.01 - (k >> 2) * 0.01 + ~h * 0.1,
    "logic": lambda s, b, h, q, k: torch.where((q > k) | ~SPECIAL[k] & (b == 0), s, s * 0.5) + (q.bool() ^ k.bool()),
    "arithmetic of bools": lambda s, b, h, q, k: (
        s * ((q < 40) + (k < 60)) + torch.where(~((q < 20) * (k < 30)), 0.5, 0.0)
        + ~torch.maximum(q < 9, k < 9) * torch.minimum(q > 5, k > 5) * 0.25
    ),
    "documents": lambda s, b, h, q, k: torch.where(DOC_Q[b, q] == DOC_K[b, k], s, s - 5),
    "wide ints": lambda s, b, h, q, k: s + torch.minimum(DOC_Q[b, q], COUNT) * 0.5 + abs(DOC_Q[b, q] - 2),
    "8 bits": lambda s, b, h, q, k: s + (SMALL[b] // 2 == SMALL[b - 1] % 3) * 0.5 - (SMALL[b].int() - 7).abs() * 0.1,
    "small ints": lambda s, b, h, q, k: s + SMALL[b] * (h % 2),
    "casts": lambda s, b, h, q, k: s.to(torch.float32) + q.to(s.dtype) * 0.01 + (k > q).float() + h.type_as(s),
    "new": lambda s, b, h, q, k: (
        s + torch.ones_like(s) + s.new_full((), 0.5) + torch.zeros_like(q) + torch.full_like(s, 2)
    ),
    "no score": lambda s, b, h, q, k: SLOPES[h] * 0.1 * (q - k),
    "a number": lambda s, b, h, q, k: 1.0,
    "infinite": lambda s, b, h, q, k: torch.where(torch.isinf(s) | torch.isnan(s), 0.0, s),
}  # fmt: skip
MASKS: dict[str, Function] = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k <= 20) & (k - q <= 9),
    "documents": lambda b, h, q, k: DOC_Q[b, q] == DOC_K[b, k],
    "global": lambda b, h, q, k: (abs(q - k) < 5) | SPECIAL[k],
    "both": theirs.and_masks(lambda b, h, q, k: q + 60 >= k, lambda b, h, q, k: (q - k) % 3 != 1),
    "either": theirs.or_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < 9),
    "of heads": lambda b, h, q, k: torch.logical_or(h % 2 == 0, q >= k),
    "not a product": lambda b, h, q, k: ~((q > 20) * (k > 30)),
    "not a sum": lambda b, h, q, k: ~((q > 60) + (k > 100)),
    "nothing hidden": theirs.noop_mask,
}


def tensors(dtype: Any = torch.float32, kv_heads: int = HEADS) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((BATCH, HEADS, QUERIES, DIM), (BATCH, kv_heads, KEYS, DIM), (BATCH, kv_heads, KEYS, DIM))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def by_definition(
    q: Any, k: Any, v: Any, score_mod: Function | None = None, mask: Any = None, scale: float = DIM**-0.5
) -> Any:
    """Attention with the function applied to the whole matrix of scores, by broadcasting."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * scale
    if score_mod is not None:
        places = [torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(s.shape)]
        s = s * 0 + over_all(score_mod, s, *places)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf)
    return torch.nan_to_num(torch.softmax(s, -1)) @ v


def over_all(function: Function, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """The function of every element: of tensors, as torch broadcasts them."""
    places = [x.broadcast_to(s.shape).int() for x in (b, h, q, k)]

    def one(score: Any, *places: Any) -> Any:
        made = function(score, *places)
        return made if isinstance(made, torch.Tensor) else torch.as_tensor(made, dtype=score.dtype)

    flat = [x.reshape(-1) for x in (s, *places)]
    with theirs.TransformGetItemToIndex() if hasattr(theirs, "TransformGetItemToIndex") else _index_mode():
        return torch.vmap(one)(*flat).to(s.dtype).reshape(s.shape)


def _index_mode() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    q, k, v = tensors()
    want = by_definition(q, k, v, SCORES[name])
    torch.testing.assert_close(ours.flex_attention(q, k, v, SCORES[name]), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["alibi", "causal by where", "table", "documents", "softcap"])
def test_as_torch_computes_it(name: str) -> None:
    """The other tests' definition, by torch's own function."""
    q, k, v = tensors()
    want, lse = theirs.flex_attention(q, k, v, SCORES[name], scale=0.3, return_lse=True)
    got, got_lse = ours.flex_attention(q, k, v, SCORES[name], scale=0.3, return_lse=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


#: With a gradient, and for which torch has one: none for `//` of floats.
SMOOTH = [name for name in SCORES if name not in ("no score", "a number") and not name.startswith("remainder")]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(torch.float64))
    do = torch.randn(BATCH, HEADS, QUERIES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    want = torch.autograd.grad(by_definition(q, k, v, SCORES[name]), (q, k, v), do)
    got = torch.autograd.grad(ours.flex_attention(q, k, v, SCORES[name]), (q, k, v), do)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_channels_of_query_and_key_are_compared_before_they_are_padded() -> None:
    q, k, v = tensors()
    with pytest.raises(ShapeError, match=r"flex_attention\(\): argument 'key': expected head_dim 15, like query"):
        ours.flex_attention(q[..., :15], k, v)


AT_ZERO: dict[str, Function] = {
    "relu": lambda s, b, h, q, k: F.relu(s) * (k + 1) * 0.01,
    "power of a table": lambda s, b, h, q, k: s ** (k % 3 * 1.0) * 0.1,
    "power by the score": lambda s, b, h, q, k: (k % 2 * 1.0) ** s,
    "power by itself": lambda s, b, h, q, k: (s * 0.3) ** (s * 0.2) * SLOPES[h],
}


@pytest.mark.parametrize("name", AT_ZERO)
def test_gradients_of_scores_that_are_0(name: str) -> None:
    q, k, v = tensors(torch.float64)
    q[:, :, ::2] = 0
    q, k, v = (x.requires_grad_() for x in (q.abs(), k.abs(), v))
    do = torch.randn(BATCH, HEADS, QUERIES, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    want = torch.autograd.grad(by_definition(q, k, v, AT_ZERO[name]), (q, k, v), do)
    got = torch.autograd.grad(ours.flex_attention(q, k, v, AT_ZERO[name]), (q, k, v), do)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_ints_wrap_around_at_32_bits_as_those_of_torch() -> None:
    q, k, v = tensors()

    def mixed(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where((q * 1103515245 + k * 69069 + 2**30 + 12345) % 7 < 3, s, s - 1)

    want = by_definition(q, k, v, mixed)
    torch.testing.assert_close(ours.flex_attention(q, k, v, mixed), want, rtol=1e-5, atol=1e-5)
    # What may be negative then has another remainder in C++.
    assert ours.trace_score_mod(mixed).expression.count("%") == 2


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda s, b, h, q, k: s[()], "an index of a score"),
        (lambda s, b, h, q, k: s + DOC_Q[b, q].masked_fill(q > k, math.inf), "masked_fill"),
        (lambda s, b, h, q, k: s + q.masked_fill(q > k, -math.inf), "masked_fill"),
    ],
)
def test_what_torch_has_no_number_for_is_refused_by_its_name(function: Function, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        ours.trace_score_mod(function)


@pytest.mark.parametrize("size", [64, 128, 32, (128, 64)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name: str, size: Any) -> None:
    q, k, v = tensors(kv_heads=2)
    blocks = theirs.create_block_mask(MASKS[name], BATCH, HEADS, QUERIES, KEYS, device="cpu", BLOCK_SIZE=size)
    mask = theirs.create_mask(MASKS[name], BATCH, HEADS, QUERIES, KEYS, device="cpu")
    want = by_definition(q, k, v, SCORES["alibi"], mask)
    got = ours.flex_attention(q, k, v, SCORES["alibi"], block_mask=blocks, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ours.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True), by_definition(q, k, v, None, mask),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    q.requires_grad_(), v.requires_grad_()
    do = torch.randn(got.shape, generator=torch.Generator().manual_seed(9))
    for mod in (None, SCORES["softcap"]):
        got = torch.autograd.grad(ours.flex_attention(q, k, v, mod, block_mask=blocks, enable_gqa=True), (q, v), do)
        want = torch.autograd.grad(by_definition(q, k, v, mod, mask), (q, v), do)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("with_full", [False, True])
def test_a_list_of_blocks_counts_whatever_its_function_says(with_full: bool, grad: bool) -> None:
    """Blocks that are not listed are hidden, full ones are shown; the function decides about the others."""
    q, k, v = tensors()
    q.requires_grad_(grad)
    counts = torch.tensor([[[2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 2, 1], [1, 0, 2]]]], dtype=torch.int32)
    full = (
        (torch.tensor([[[1, 0]]]).int(), torch.tensor([[[[1, 0, 2], [0, 1, 2]]]]).int()) if with_full else (None, None)
    )
    blocks = theirs.BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=64, mask_mod=MASKS["window"], seq_lengths=(QUERIES, KEYS)
    )
    listed = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    shown = torch.tensor([[0, with_full, 0], [0, 0, 0]], dtype=torch.bool)
    tile = [x.repeat_interleave(64, 0).repeat_interleave(64, 1)[:QUERIES, :KEYS] for x in (listed, shown)]
    mask = theirs.create_mask(MASKS["window"], 1, 1, QUERIES, KEYS, device="cpu") & tile[0] | tile[1]
    got = ours.flex_attention(q, k, v, block_mask=blocks)
    torch.testing.assert_close(got, by_definition(q, k, v, None, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "names"), [(64, {"block_mask", "block_size", "score_mod"}), (32, {"score_mod"})])
def test_gradients_pass_over_blocks_of_whole_tiles(size: int, names: set[str]) -> None:
    q, k, v = tensors()
    blocks = theirs.create_block_mask(MASKS["window"], None, None, QUERIES, KEYS, device="cpu", BLOCK_SIZE=size)
    assert set(flex._modified(q.requires_grad_(), k, v, None, blocks)) == names


def test_other_shapes_and_results() -> None:
    q, k, v = tensors()
    torch.testing.assert_close(
        ours.flex_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), atol=1e-5, rtol=1e-5
    )
    odd = ours.flex_attention(q[..., :13], k[..., :13], v[..., :5], SCORES["alibi"])
    want = by_definition(q[..., :13], k[..., :13], v[..., :5], SCORES["alibi"], scale=13**-0.5)
    torch.testing.assert_close(odd, want, atol=1e-5, rtol=1e-5)
    one = ours.flex_attention(q, k[:1], v[:1], SCORES["alibi"])
    torch.testing.assert_close(one, by_definition(q, k[:1].expand_as(k), v[:1].expand_as(v), SCORES["alibi"]))
    if hasattr(theirs, "AuxRequest"):
        o, aux = ours.flex_attention(q, k, v, return_aux=theirs.AuxRequest(lse=True))
        assert torch.equal(aux.lse, ours.flex_attention(q, k, v, return_lse=True)[1])
        assert torch.equal(o, ours.flex_attention(q, k, v))
        with pytest.raises(UnsupportedError, match="max_scores"):
            ours.flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))


def test_one_text_for_the_same_function() -> None:
    """What is compiled is found again: numbers are text, contents of tensors are not."""
    first, second = (
        ours.trace_score_mod(lambda s, b, h, q, k, x=x: s + x[h] * x[h] - SLOPES[h]) for x in (SLOPES + 1, SLOPES + 2)
    )
    assert first.expression == second.expression == "((score + (t0(h) * t0(h))) - t1(h))"
    assert (first.mask, first.grad) == (None, "1.0f")
    assert list(first.arrays) == ["t0", "t1"]
    assert "0.25f" in ours.trace_score_mod(lambda s, b, h, q, k: s * 0.25).expression


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s, b, h, q, k: s if q > k else -s, "a decision"),
        (lambda s, b, h, q, k: s * [1.0, 2.0][h], "a Python integer"),
        (lambda s, b, h, q, k: s * float(h), "a Python float"),
        (lambda s, b, h, q, k: torch.special.bessel_j0(s), "torch function 'special_bessel_j0'"),
        (lambda s, b, h, q, k: s.item(), "'item'"),
        (lambda s, b, h, q, k: s.add_(1), "'add_'"),
        (lambda s, b, h, q, k: s + BIAS[b, :, q, k], "the index slice"),
        (lambda s, b, h, q, k: s + SLOPES, "a tensor of shape"),
        (lambda s, b, h, q, k: s + SLOPES.double()[h], "torch.float64"),
        (lambda s, b, h, q, k: s + TABLE[h].sum(), "'sum' of a part"),
        (lambda s, b, h, q, k: s + TABLE[h], "operand of type 'TracedArray'"),
        (lambda s, b, h, q, k: s + float("nan"), "the constant NaN"),
        (lambda s, b, h, q, k: s + torch.max(s), "'max' with these arguments"),
        (lambda s, b, h, q, k: s + sum(torch.full((HEADS,), i)[h] for i in range(9)), "more than 8 tensors"),
        (lambda s, b, h, q, k: s & 1, "'__and__' (bits of floats)"),
        (lambda s, b, h, q, k: s.half(), "'half'"),
        (lambda s, b, h, q, k: s + (SMALL[b] - SMALL[h]).abs(), "'__sub__' (int8 and uint8 alone"),
        (lambda s, b, h, q, k: torch.where(SMALL[b] - 1 > 3, s, 0.0), "'__sub__' (int8 and uint8 alone"),
        (lambda s, b, h, q, k: s + ((q > k) - (q < k)), "'__sub__' (a difference of bools)"),
        (lambda s, b, h, q, k: s.to(torch.float64), "'to' (torch.float64"),
        (lambda s, b, h, q, k: s + s.detach(), "'detach'"),
        (lambda s, b, h, q, k: s + q**h, "'__pow__' (an integer"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_named(function: Function, text: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        ours.flex_attention(*tensors(), function)
    assert text in str(raised.value)
    assert "cannot be translated" in str(raised.value)


def test_wrong_arguments_are_named() -> None:
    q, k, v = tensors()
    for arguments, options, name in (
        ((q, k, v, 3), {}, "score_mod"),
        ((q, k, v, lambda s, b, h, q, k: None), {}, "score_mod"),
        ((q, k, v, None, torch.ones(2, 2)), {}, "block_mask"),
        ((q[0], k, v), {}, "query"),
        ((q, k[:, :2], v[:, :2]), {}, "key"),
        ((q, k, v.double()), {}, "value"),
        ((q, k, v), {"scale": "1"}, "scale"),
        ((q, k, v), {"enable_gqa": "no"}, "enable_gqa"),
        ((q, k, v), {"return_lse": torch.ones(2)}, "return_lse"),
        ((q, k, v), {"return_aux": True}, "return_aux"),
    ):
        with pytest.raises(ArgumentError) as raised:
            ours.flex_attention(*arguments, **options)
        assert (raised.value.function, raised.value.argument) == ("flex_attention", name)
    with pytest.raises(UnsupportedError, match=r"flex_attention\(\): argument 'key' is a sparse"):
        ours.flex_attention(q, k.to_sparse(), v)
    for call, name in (({"score_mod": 3}, "score_mod"), ({"score_mod": SCORES["alibi"], "device": "x"}, "device")):
        with pytest.raises(ArgumentError) as raised:
            ours.trace_score_mod(**call)
        assert (raised.value.function, raised.value.argument) == ("trace_score_mod", name)
    blocks = theirs.create_block_mask(MASKS["causal"], 1, 1, 64, KEYS, device="cpu")
    with pytest.raises(ShapeError, match="block_mask"):
        ours.flex_attention(q, k, v, block_mask=blocks)
    with pytest.raises(UnsupportedError, match="kernel_options"):
        ours.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64})
    with pytest.raises(ArgumentError, match="trace_score_mod"):
        ours.trace_score_mod()
    wants = SLOPES.clone().requires_grad_()
    with pytest.raises(oa.errors.OmniattnError):
        ours.flex_attention(q.requires_grad_(), k, v, lambda s, b, h, q, k: s + wants[h])


def test_a_number_that_is_learned_raises() -> None:
    """A parameter without dimensions would become a number of the text, and its gradient would be missing."""
    q, k, v = tensors()
    factor = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(UnsupportedError, match=r"requires a gradient.*detach"):
        ours.flex_attention(q.requires_grad_(), k, v, lambda s, b, h, q, k: s * factor)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        ours.trace_score_mod(lambda s, b, h, q, k: s * (2 * factor))
    expected = by_definition(q, k, v, lambda s, b, h, q, k: s * 0.5).detach()
    with torch.no_grad():
        made = ours.flex_attention(q, k, v, lambda s, b, h, q, k: s * factor)
    assert torch.allclose(made, expected, atol=1e-5)


DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.int32: "int32",
          torch.int64: "int64", torch.uint8: "uint8", torch.bool: "bool"}  # fmt: skip


class Arrays(ctypes.Structure):
    """ScoreModArrays of kernels_cu/params/score_mod.cuh."""

    _fields_ = (("data", ctypes.c_void_p * 8), ("strides", ctypes.c_int64 * 32), ("extents", ctypes.c_int32 * 32))


def test_the_texts_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very text that NVRTC gets, compiled by g++ with the headers of the kernels."""
    kernels = HostKernels(tmp_path, monkeypatch)
    code, mods = (
        [
            '#include "cuda.h"\n#include <algorithm>\n#include "attention/score_mod_types.cuh"\n'
            "using std::max, std::min;\ninline float rsqrtf(float x) { return 1.0f / sqrtf(x); }\n"
        ],
        {},
    )
    for i, (name, mask) in enumerate([*((n, None) for n in SCORES), *(("alibi", n) for n in MASKS)]):
        mod = ours.trace_score_mod(SCORES[name], None if mask is None else MASKS[mask])
        arrays = tuple(ModArray(n, DTYPES[x.dtype], tuple(x.shape), tuple(x.stride())) for n, x in mod.arrays.items())
        text = user_text(ScoreModProblem(mod.expression, mod.mask, arrays, grad=mod.grad), backward=True)
        text = "\n".join(line for line in text.splitlines() if not line.startswith(("#pragma", "#include")))
        code.append(
            f"namespace f{i} {{\n{text}\n}}\n"
            f'extern "C" void run{i}(int rows, int keys, int b, int h, const float* s, const ScoreModArrays& a, '
            "float* score, float* grad) {\n"
            "    for (int q = 0; q < rows; ++q)\n        for (int k = 0; k < keys; ++k) {\n"
            "            auto x = score_position(q), y = score_position(k);\n            int at = q * keys + k;\n"
            f"            bool shown = f{i}::user_mask(b, h, x, y, a);\n"
            f"            score[at] = shown ? f{i}::user_score(s[at], b, h, x, y, a) : -INFINITY;\n"
            f"            grad[at] = f{i}::user_grad(s[at], b, h, x, y, a);\n        }}\n}}\n"
        )  # fmt: skip
        mods[i] = (name, mask, mod)
    (tmp_path / "texts.cc").write_text("".join(code), encoding="utf-8")
    root = Path(__file__).resolve().parents[3]
    folders = (tmp_path, root / "tests/host_cta", root / "kernels_cu")
    assert not (failed := kernels._compile("texts", str(tmp_path / "texts.cc"), *(f"-I{x}" for x in folders))), failed
    library = ctypes.CDLL(str(tmp_path / "texts.so"))
    rng = np.random.default_rng(7)
    scores = (3 * rng.standard_normal((QUERIES, KEYS))).astype(np.float32)
    b, h = 1, 2
    for i, (name, mask, mod) in mods.items():
        given = Arrays()
        for slot, x in enumerate(mod.arrays.values()):
            given.data[slot] = x.data_ptr()
            for axis in range(x.dim()):
                given.strides[4 * slot + axis], given.extents[4 * slot + axis] = x.stride(axis), x.shape[axis]
        score, grad = np.empty_like(scores), np.empty_like(scores)
        library[f"run{i}"](
            QUERIES, KEYS, b, h, scores.ctypes.data_as(ctypes.c_void_p), ctypes.byref(given),
            score.ctypes.data_as(ctypes.c_void_p), grad.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        x = torch.from_numpy(scores).requires_grad_()
        places = [torch.tensor(b), torch.tensor(h), torch.arange(QUERIES)[:, None], torch.arange(KEYS)]
        want = x * 0 + over_all(SCORES[name], x, *places)
        slope = torch.full_like(x, 2.0)
        if name != "remainder of floats":
            slope = torch.autograd.grad(want.sum(), x)[0]
        if mask is not None:
            visible = over_all(lambda s, *at, m=mask: MASKS[m](*at), x, *places).bool()
            want = want.masked_fill(~visible, -math.inf)
        np.testing.assert_allclose(score, want.detach().numpy(), rtol=2e-5, atol=2e-5, err_msg=f"{name} {mask}")
        np.testing.assert_allclose(grad, slope.numpy(), rtol=1e-4, atol=1e-4, err_msg=f"derivative of {name}")
