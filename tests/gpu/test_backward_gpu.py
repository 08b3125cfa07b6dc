"""The backward on a GPU: every gradient against float64, identities, special values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .backward_cases import Problem, check, choose_from, compare, equal_bits, make, mask_of, naive, put, run  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16")


@pytest.fixture(autouse=True, params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every test with the kernels that this GPU gets, and with those that every GPU gets."""
    choose_from(monkeypatch, request.param)
    yield str(request.param)
    PLANS.clear()


FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 11)},
    "window of one key": {"window": (0, 0)},
    "window left": {"window": (64, -1), "causal": True},
    "window right": {"window": (-1, 5)},
    "softcap": {"softcap": 3.0},
    "softcap, causal": {"softcap": 20.0, "causal": True},
    "saturated softcap": {"softcap": 0.5, "softmax_scale": 3.0},
    "sinks": {"sinks": [-1.0, 0.5, 4.0, 0.0], "dlse": True},
    "sinks, causal": {"sinks": [-np.inf, 0.5, -np.inf, 2.0], "causal": True},
    "dlse": {"dlse": True},
    "negative scale": {"softmax_scale": -0.2, "causal": True},
    "scale 0": {"softmax_scale": 0.0},
    "large scale": {"softmax_scale": 2.0},
    "HND": {"layout": "HND", "causal": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_features(head_dim: int, feature: str, dtype: str) -> None:
    problem = make(
        batch=2, seqlen_q=150, seqlen_k=203, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype, seed=head_dim,
        **FEATURES[feature],
    )  # fmt: skip
    check(problem, f"{feature} d{head_dim}")


@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 136, 192, 200, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(head_dim: int, dtype: str) -> None:
    for options in ({"causal": True}, {"softcap": 5.0}):
        check(make(seqlen_q=140, seqlen_k=333, head_dim=head_dim, dtype=dtype, seed=1, **options), f"{options}")


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(7, 1), (71, 1), (14, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_query_heads_of_a_kv_head(heads_q: int, heads_kv: int, head_dim: int) -> None:
    check(make(batch=2, seqlen_q=90, seqlen_k=150, heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, causal=True))


@pytest.mark.parametrize("seqlen_q", [1, 63, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize("seqlen_k", [1, 63, 65, 127, 128, 129, 260])
@pytest.mark.parametrize("causal", [False, True])
def test_tile_edges(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    """Causal with more queries than keys has rows that attend to nothing."""
    for head_dim in (64, 128, 192):
        problem = make(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, dtype="float16", causal=causal, dlse=True
        )
        check(problem, f"d{head_dim}")


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (-1, 0), (0, -1), (500, 500)])
def test_rows_that_attend_to_nothing(window: tuple[int, int]) -> None:
    """Windows that lie outside the keys for most rows, and for all: gradients 0."""
    problem = make(seqlen_q=400, seqlen_k=20, heads_q=4, heads_kv=2, head_dim=128, window=window, dlse=True)
    made = check(problem)
    if window[1] == 0:
        assert not made["dq"][:, :380].any()
    hidden = make(seqlen_q=100, seqlen_k=90, head_dim=64, mask=np.zeros((100, 90), dtype=np.bool_), dlse=True)
    assert not any(gradient.any() for gradient in run(hidden).values())


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


LENGTHS: dict[str, tuple[list[int], list[int]]] = {
    "mixed": ([100, 1, 0, 257, 64], [130, 300, 5, 257, 0]),
    "empty in the middle": ([129, 0, 127], [129, 0, 127]),
    "one": ([200], [200]),
    "none": ([0, 0], [0, 0]),
    "many": ([3, 0, 17] * 20, [5, 9, 1] * 20),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rest", [0, 37])
def test_packed_sequences(name: str, head_dim: int, rest: int) -> None:
    """rest: cu_seqlens end before the arrays do; rows behind the last sequence have gradient 0."""
    if name == "none" and not rest:
        return
    for options in ({"causal": True, "dlse": True}, {"softcap": 8.0, "layout": "HND", "sinks": [0.0, 1.0, -1.0, 2.0]}):
        problem = make(lengths=LENGTHS[name], rest=rest, heads_q=4, heads_kv=2, head_dim=head_dim, **options)
        made = check(problem, f"{options}")
        for x, of in (("dq", 0), ("dk", 1), ("dv", 1)):
            rows = made[x] if options.get("layout") != "HND" else made[x].movedim(-2, -3)
            assert not rows[sum(LENGTHS[name][of]) :].any()


def test_packed_masks() -> None:
    for shape in ((5, 4, 257, 300), (1, 1, 1, 300), (4, 257, 1)):
        for form in ("bool", "float"):
            check(make(lengths=LENGTHS["mixed"], heads_q=4, mask=mask_of(form, shape), causal=True), f"{form} {shape}")


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


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_size_of_do(factor: float) -> None:
    """In bfloat16 any size of do; in float16 what its range has room for."""
    problem = make(heads_q=2, head_dim=128, causal=True, dtype="bfloat16")
    scaled = Problem({**problem.arrays, "do": problem.arrays["do"] * factor}, problem.options)
    made, exact, plain = run(scaled), naive(scaled, torch.float64), naive(scaled, torch.bfloat16)
    for name, gradient in made.items():
        compare(
            name, gradient.double().div(factor).to(gradient.dtype), exact[name] / factor, plain[name] / factor,
            "bfloat16", f"{name} x {factor}", 2.5, 1e-4,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["outlier", "channel_bias", "mean_shift", "huge_logits"])
def test_kinds_of_inputs(kind: str, dtype: str) -> None:
    for head_dim in (64, 128):
        check(make(kind=kind, seqlen_q=200, seqlen_k=260, head_dim=head_dim, dtype=dtype, causal=True, seed=4), kind)


def test_nan_stays_in_its_sequence_and_head() -> None:
    problem = make(batch=2, heads_q=4, heads_kv=2, seqlen_q=300, seqlen_k=300, head_dim=128, causal=True)
    clean = run(problem, deterministic=True)
    problem.arrays["k"][1, 250, 0] = torch.nan
    made = run(problem, deterministic=True)
    for name, heads in (("dq", slice(2, 4)), ("dk", slice(1, 2)), ("dv", slice(1, 2))):
        assert torch.equal(made[name][0], clean[name][0]), name
        assert torch.equal(made[name][1][:, heads], clean[name][1][:, heads]), name
    assert made["dq"][1, 250:, :2].isnan().all()
    packed = make(lengths=([100, 70, 130], [100, 70, 130]), head_dim=64)
    clean = run(packed, deterministic=True)
    packed.arrays["v"][100:170] = torch.inf
    packed.arrays["q"][100:170] = torch.nan
    made = run(packed, deterministic=True)
    for name in ("dq", "dk", "dv"):
        assert torch.equal(made[name][:100], clean[name][:100]), name
        assert torch.equal(made[name][170:], clean[name][170:]), name


def test_rows_of_nobody_may_hold_anything() -> None:
    packed = make(lengths=([100, 70], [90, 80]), rest=50, head_dim=128, causal=True)
    clean = run(packed, deterministic=True)
    for name, end in (("q", 170), ("do", 170), ("k", 170), ("v", 170)):
        packed.arrays[name][end:] = torch.nan
    assert equal_bits(run(packed, deterministic=True), clean)


# Identities


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_identities(head_dim: int) -> None:
    problem = make(batch=2, seqlen_q=150, seqlen_k=200, heads_q=4, heads_kv=2, head_dim=head_dim, dtype="float16")
    x = problem.arrays
    before = run(problem, deterministic=True)
    # Keys in another order.
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).to(x["k"].device)
    after = run(Problem({**x, "k": x["k"][:, order], "v": x["v"][:, order]}, problem.options), deterministic=True)
    for name, expected in (("dq", before["dq"]), ("dk", before["dk"][:, order]), ("dv", before["dv"][:, order])):
        assert (after[name].double() - expected.double()).abs().max() <= 4e-3 * expected.abs().max(), name
    # A constant added to every key (exactly: small integers) leaves dq.
    whole = x["k"].mul(4).round().div(4)
    first = run(Problem({**x, "k": whole}, problem.options), ("dq",))["dq"]
    moved = run(Problem({**x, "k": whole + 1}, problem.options), ("dq",))["dq"]
    assert (first.double() - moved.double()).abs().max() <= 8e-3 * first.abs().max() + 2e-3
    # Ones in do: dv is the column sums of P in every channel.
    made = run(Problem({**x, "do": torch.ones_like(x["do"])}, problem.options), ("dv",))["dv"]
    assert (made.amax(-1) - made.amin(-1)).abs().max() == 0


def test_merged_halves_add_up() -> None:
    """Ring attention: halves of the keys, each with the o and LSE of all."""
    problem = make(batch=2, seqlen_q=150, seqlen_k=260, heads_q=4, heads_kv=2, head_dim=128, dtype="float16")
    x = problem.arrays
    halves = [[x[n][:, keys].contiguous() for n in ("k", "v")] for keys in (slice(0, 100), slice(100, 260))]
    states = [oa.attention(x["q"], k, v, return_lse=True) for k, v in halves]
    o, lse = oa.merge_states(*states[0], *states[1])
    made = [oa.attention_backward(x["do"], x["q"], k, v, o, lse) for k, v in halves]
    exact = naive(problem, torch.float64)
    found = {"dq": made[0][0].double() + made[1][0].double()}
    found |= {n: torch.cat([part[i] for part in made], dim=1).double() for i, n in ((1, "dk"), (2, "dv"))}
    for name, gradient in found.items():
        assert (gradient - exact[name]).abs().max() <= 4e-3 * exact[name].abs().max(), name


# Score modifications


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


# Everything


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
