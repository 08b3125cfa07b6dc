"""The backward on a GPU: masks, score modifications, what is wanted and given, random problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402

from .backward_cases import Problem, check, equal_bits, make, mask_of, put, run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backward_family")]

DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("form", ["bool", "float", "-inf"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 150, 203), (2, 1, 150, 203), (1, 4, 1, 203), (150, 203), (203,), (4, 150, 1), ()]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(form: str, shape: tuple[int, ...], dtype: str) -> None:
    """With the gradients of those that are added."""
    if form == "-inf" and shape == ():
        return
    for options in ({"causal": True, "head_dim": 64}, {"softcap": 10.0, "head_dim": 128, "mask_dtype": dtype}):
        own = {**options, "mask_dtype": "bool" if form == "bool" else options.get("mask_dtype", "float32")}
        mask = np.asarray(mask_of(form, shape))
        if own["mask_dtype"] not in ("bool", "float32"):
            mask = put(mask, dtype).float().cpu().numpy()
        check(make(batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, dtype=dtype, mask=mask, **own), f"{own}")


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_slopes_of_a_softcap(head_dim: int, dtype: str) -> None:
    """Where all scores are far beyond the cap, P times the slope is 1e-7, which fp16 has no bits for."""
    g = torch.Generator("cuda").manual_seed(1)
    cap, keys, scale = 0.3, 820, head_dim**-0.5

    def near(*shape: int) -> Any:
        return 0.95 + 0.1 * torch.rand(*shape, 1, device="cuda", generator=g)

    unit = torch.randn(head_dim, device="cuda", generator=g)
    sign = torch.where(torch.rand(1, keys, 1, 1, device="cuda", generator=g) < 0.5, -1.0, 1.0)
    q = near(1, 3, 2) * unit
    k = sign * near(1, keys, 2) * unit * (5.5 * cap / (scale * float(unit @ unit)))
    v, do = (torch.randn(1, n, 2, head_dim, device="cuda", generator=g) for n in (keys, 3))
    q, k, v, do = (x.to(getattr(torch, dtype)) for x in (q, k, v, 8 * do))
    o, lse = oa.attention(q, k, v, softcap=cap, return_lse=True)
    found = oa.attention_backward(do, q, k, v, o, lse, softcap=cap)
    x, y, z = (t.double().transpose(1, 2).requires_grad_() for t in (q, k, v))
    p = torch.softmax(cap * torch.tanh(x @ y.transpose(-1, -2) * scale / cap), -1)
    expected = torch.autograd.grad(p @ z, (x, y, z), do.double().transpose(1, 2))
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        # Less what fp16 rounds the results themselves by, half of its least number.
        error = ((a.double().transpose(1, 2) - b).abs() - 2.0**-25).clamp(min=0.0)
        error = float(error.sum() / b.abs().sum())
        assert error < 0.02, f"{name}: relative L1 {error:.3g}"


@pytest.mark.parametrize("wanted", [
    ("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dv"), ("dsinks",), ("dmask",), ("dmask", "dq"), ("dsinks", "dk"),
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_only_what_is_wanted(wanted: tuple[str, ...], head_dim: int) -> None:
    problem = make(
        seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, causal=True, sinks=[0.0, 1.0, 2.0, -1.0],
        mask=mask_of("float", (150, 203)),
    )  # fmt: skip
    check(problem, f"{wanted}", wanted)


def test_given_arrays_keep_what_lies_between_their_rows() -> None:
    problem = make(batch=2, heads_q=4, heads_kv=2, head_dim=128, causal=True)
    x = problem.arrays
    o, lse = oa.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True)
    expected = run(problem, deterministic=True)
    into = {}
    for name in ("q", "k", "v"):
        shape = x[name].shape
        memory = torch.full((*shape[:-1], 2 * shape[-1]), 7.0, device=x[name].device, dtype=x[name].dtype)
        into[f"d{name}"] = memory[..., : shape[-1]]
    made = oa.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, causal=True, deterministic=True, **into)
    for (name, given_array), gradient in zip(into.items(), made, strict=True):
        assert gradient is given_array
        assert torch.equal(gradient, expected[name])
        beside = given_array.as_strided(given_array.shape, given_array.stride(), given_array.shape[-1])
        assert (beside == 7).all(), f"{name}: something was written behind its rows"


@pytest.mark.parametrize("form", ["0 everywhere", "0 along the batch", "transposed", "misaligned"])
def test_strides_of_do(form: str) -> None:
    problem = make(batch=2, heads_q=4, head_dim=64, causal=True)
    do = problem.arrays["do"]
    made = {
        "0 everywhere": torch.ones((), device=do.device, dtype=do.dtype).expand(do.shape),
        "0 along the batch": do[:1].expand(do.shape),
        "transposed": do.transpose(1, 3).contiguous().transpose(1, 3),
        "misaligned": torch.empty(do.numel() + 1, device=do.device, dtype=do.dtype)[1:].view(do.shape).copy_(do),
    }[form]
    strided = Problem({**problem.arrays, "do": made}, problem.options)
    check(strided, form)
    plain = Problem({**problem.arrays, "do": made.contiguous().clone()}, problem.options)
    assert equal_bits(run(strided, deterministic=True), run(plain, deterministic=True))


def squash(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=score.device, dtype=score.dtype)
    return 2 * torch.tanh(score / 2) + slopes[h] * ((k - q) / 64), (q + k) % 3 != 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_score_mods(head_dim: int, dtype: str) -> None:
    slopes = put(np.array([0.5, 0.25, 0.125, 0.0625]), "float32")
    mod = oa.ScoreMod(
        "2.0f * tanhf(score / 2.0f) + slopes[h] * (float(k - q) / 64.0f)", mask="(q + k) % 3 != 0",
        grad="1.0f - tanhf(score / 2.0f) * tanhf(score / 2.0f)", slopes=slopes,
    )  # fmt: skip
    for options in ({}, {"causal": True, "softcap": 5.0}):
        problem = make(
            seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype, mod=(mod, squash),
            **options,
        )  # fmt: skip
        check(problem, f"{options}")


def test_a_score_mod_without_derivative_is_refused() -> None:
    problem = make(mod=(oa.ScoreMod("score * 0.5f"), None))
    with pytest.raises(oa.errors.UnsupportedError, match="grad="):
        run(problem)


SIDES = st.one_of(st.just(-1), st.integers(0, 300))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    heads_kv, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 5]))
    heads, dtype = heads_kv * group, data.draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = {
        "head_dim": 8 * data.draw(st.integers(1, 32)),
        "layout": data.draw(st.sampled_from(["NHD", "HND"])),
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.one_of(st.none(), st.tuples(SIDES, SIDES))),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        "softmax_scale": data.draw(st.sampled_from([None, None, -0.1, 0.0, 0.2])),
        "dlse": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 99)),
    }
    length = st.integers(1, 300)
    if packed := data.draw(st.booleans()):
        batch = data.draw(st.integers(1, 4))
        lengths = [[data.draw(st.one_of(st.just(0), length)) for _ in range(batch)] for _ in range(2)]
        lengths[0][0], lengths[1][0] = lengths[0][0] or 1, lengths[1][0] or 1
        options |= {"lengths": (lengths[0], lengths[1]), "rest": data.draw(st.sampled_from([0, 3]))}
        extent = (max(lengths[0]), max(lengths[1]))
    else:
        batch = data.draw(st.integers(1, 3))
        extent = (data.draw(length), data.draw(length))
        options |= {"batch": batch, "seqlen_q": extent[0], "seqlen_k": extent[1]}
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 2, heads)
    form = data.draw(st.sampled_from(["none", "none", "bool", "float", "-inf"]))
    if form != "none":
        shape = tuple(data.draw(st.sampled_from([1, n])) for n in (batch, heads, *extent))
        options["mask"] = mask_of(form, shape, data.draw(st.integers(0, 99)))
    problem = make(heads_q=heads, heads_kv=heads_kv, dtype=dtype, **options)
    wanted = tuple(name for name in problem.wanted if data.draw(st.booleans())) or problem.wanted
    # The gradient of a mask that is broadcast has no fixed order of its sums.
    deterministic = data.draw(st.booleans()) and "dmask" not in wanted
    check(problem, f"packed {packed} {options}", wanted, deterministic=deterministic)
