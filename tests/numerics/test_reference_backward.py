"""Gradients of the reference: finite differences of its forward, and identities; everything in float64."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniattn import reference
from omniattn.errors import ArgumentError, ShapeError
from omniattn.reference import core

# The reference promises to be silent, whatever the input.
pytestmark = pytest.mark.filterwarnings("error")

ALL = ("dq", "dk", "dv", "dsinks", "dmask")
F64 = np.float64
#: Directions of each input that finite differences are taken along: with one, a wrong part may be hidden.
DIRECTIONS = 4


def squashed(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """A modification with a derivative that is no constant, and that hides keys."""
    return np.where((q + k + h) % 5 == 4, -np.inf, np.sin(score) + 0.1 * (k - q))


def squashed_grad(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return np.cos(score)


MOD = {"score_mod": squashed, "score_mod_grad": squashed_grad}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "window left": {"window": (1, -1), "causal": True},
    "window outside": {"window": (0, 0), "softmax_scale": 0.3},
    "softcap": {"softcap": 0.8},
    "scale": {"softmax_scale": -0.4},
    "scale 0": {"softmax_scale": 0.0},
    "score_mod": MOD,
    "score_mod, softcap": {**MOD, "softcap": 1.5, "causal": True},
    "HND": {"layout": "HND", "causal": True, "softcap": 2.0},
}
MASKS = {
    "none": None, "bool": ("bool", (2, 4, 0, 0)), "full": ("add", (2, 4, 0, 0)), "heads": ("add", (1, 4, 1, 0)),
    "rows": ("add", (0, 1)), "one": ("add", (1,)), "keys": ("add", (0,)), "batch": ("add", (2, 1, 0, 0)),
    "-inf": ("-inf", (2, 1, 0, 0)),
}  # fmt: skip


def make_mask(kind: str, sq: int, sk: int, seed: int = 5) -> np.ndarray | None:
    """0 stands for the full extent of the last two dimensions."""
    if MASKS[kind] is None:
        return None
    form, shape = MASKS[kind]
    extents = [n or (sk if i == len(shape) - 1 else sq) for i, n in enumerate(shape)]
    rng = np.random.default_rng(seed)
    if form == "bool":
        return rng.random(extents) < 0.7
    mask = rng.standard_normal(extents)
    if form == "-inf":
        mask[rng.random(extents) < 0.3] = -np.inf
    return mask


def inputs(sq: int, sk: int, *, hq: int = 4, hkv: int = 2, dim: int = 5, layout: str = "NHD") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sq * 100 + sk)
    shapes = {"q": (2, sq, hq, dim), "k": (2, sk, hkv, dim), "v": (2, sk, hkv, dim), "do": (2, sq, hq, dim)}
    made = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if layout == "HND":
        made = {name: x.swapaxes(1, 2).copy() for name, x in made.items()}
    return {**made, "dlse": rng.standard_normal((2, hq, sq)), "sinks": rng.standard_normal(hq)}


def forward_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name != "score_mod_grad"}


def loss(x: dict[str, np.ndarray], mask: Any, sinks: bool, options: dict[str, Any]) -> float:
    """The sum over the outputs of the forward that do and dlse are the weights of; -inf counts as 0."""
    o, lse = forward(x, mask, sinks, options)
    return float((o * x["do"]).sum() + (np.where(np.isneginf(lse), 0, lse) * x["dlse"]).sum())


def forward(x: dict[str, np.ndarray], mask: Any, sinks: bool, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    function = reference.attention_varlen if "cu_seqlens_q" in options else reference.attention
    return function(
        x["q"], x["k"], x["v"], mask=mask, sinks=x["sinks"] if sinks else None, compute_dtype=F64,
        **forward_options(options),
    )  # fmt: skip


def backward(
    x: dict[str, np.ndarray], mask: Any, sinks: bool, options: dict[str, Any], wanted: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    o, lse = forward(x, mask, sinks, options)
    additive = mask is not None and mask.dtype != np.bool_
    everything = tuple(n for n in ALL if (n != "dmask" or additive) and (n != "dsinks" or sinks))
    varlen = "cu_seqlens_q" in options
    return (reference.attention_varlen_backward if varlen else reference.attention_backward)(
        x["do"], x["q"], x["k"], x["v"], o, lse, dlse=x["dlse"], mask=mask, sinks=x["sinks"] if sinks else None,
        wanted=wanted or everything, compute_dtype=F64, **options,
    )  # fmt: skip


def difference(
    x: dict[str, np.ndarray], name: str, direction: np.ndarray, mask: Any, sinks: bool, options: dict[str, Any]
) -> float:
    """Central difference of `loss` for an input along a direction."""
    step = 1e-5
    sides = []
    for sign in (1, -1):
        if name == "mask":
            sides.append(loss(x, mask + sign * step * direction, sinks, options))
        else:
            sides.append(loss({**x, name: x[name] + sign * step * direction}, mask, sinks, options))
    return (sides[0] - sides[1]) / (2 * step)


def check(x: dict[str, np.ndarray], mask: Any, sinks: bool, options: dict[str, Any]) -> None:
    """Gradients against differences along random directions, in which every element that can move has a part."""
    made = backward(x, mask, sinks, options)
    rng = np.random.default_rng(7)
    for name, gradient in made.items():
        array = mask if name == "dmask" else x[name[1:]]
        assert gradient.shape == array.shape
        assert gradient.dtype == F64
        moves = ~np.isneginf(array)
        assert (gradient[~moves] == 0).all(), name
        for _ in range(DIRECTIONS):
            direction = rng.standard_normal(array.shape) * moves
            direction /= max(np.linalg.norm(direction), 1e-300)
            expected = difference(x, name[1:], direction, mask, sinks, options)
            assert abs((gradient * direction).sum() - expected) <= 2e-8 * max(1, abs(expected)), name


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_one_wrong_element_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.attention_backward

    def wrong(*arrays: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
        made = right(*arrays, **options)
        made[name].flat[7] += 1e-6
        return made

    monkeypatch.setattr(reference, "attention_backward", wrong)
    with pytest.raises(AssertionError, match=name):
        check(inputs(3, 4), None, False, {})


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(3, 4), (5, 3), (1, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_against_finite_differences(option: str, sq: int, sk: int, sinks: bool) -> None:
    options = OPTIONS[option]
    check(inputs(sq, sk, layout=options.get("layout", "NHD")), None, sinks, options)


@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "none"])
@pytest.mark.parametrize("option", ["plain", "causal", "score_mod, softcap"])
def test_masks_against_finite_differences(kind: str, option: str) -> None:
    check(inputs(4, 5), make_mask(kind, 4, 5), kind == "-inf", OPTIONS[option])


PACKED = {"cu_seqlens_q": [0, 3, 3, 5, 6], "cu_seqlens_k": [0, 2, 4, 4, 7]}


def packed_inputs(layout: str = "NHD") -> dict[str, np.ndarray]:
    """Sequences without queries, without keys, and rows that belong to no sequence."""
    rng = np.random.default_rng(3)
    made = {
        name: rng.standard_normal((8, heads, 5))
        for name, heads in zip(("q", "k", "v", "do"), (4, 2, 2, 4), strict=True)
    }
    if layout == "HND":
        made = {name: x.swapaxes(0, 1).copy() for name, x in made.items()}
    return {**made, "dlse": rng.standard_normal((4, 8)), "sinks": rng.standard_normal(4)}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["none", "full", "heads", "bool"])
@pytest.mark.parametrize(
    "option",
    [{}, {"causal": True}, {"window": (1, 0), "softcap": 1.0}, MOD],
    ids=["full", "causal", "window", "score_mod"],
)
def test_packed_sequences_against_finite_differences(layout: str, kind: str, option: dict[str, Any]) -> None:
    form = MASKS[kind]
    mask = None
    if form is not None:
        shape = (4 if form[1][0] == 2 else 1, 4, 1 if form[1][2] == 1 else 4, 3)
        rng = np.random.default_rng(8)
        mask = rng.random(shape) < 0.7 if form[0] == "bool" else rng.standard_normal(shape)
    options = {**PACKED, "max_seqlen_q": 4, "layout": layout, **option}
    x = packed_inputs(layout)
    check(x, mask, kind == "full", options)
    made = backward(x, None, True, options)
    for name, rest in (("dq", 6), ("dk", 7), ("dv", 7)):
        heads_last = made[name] if layout == "NHD" else made[name].swapaxes(0, 1)
        assert not heads_last[rest:].any()


def test_a_constant_added_to_all_keys_leaves_dq() -> None:
    x = inputs(6, 9)
    x["dlse"][...] = 0
    before = backward(x, None, False, {"causal": False})
    moved = {**x, "k": x["k"] + np.random.default_rng(1).standard_normal(5)}
    after = backward(moved, None, False, {"causal": False})
    assert np.abs(after["dq"] - before["dq"]).max() <= 1e-13
    assert np.abs(after["dv"] - before["dv"]).max() <= 1e-13


def test_ones_in_do_make_dv_the_column_sums_of_p() -> None:
    x = inputs(6, 9, hq=2)
    x["do"][...] = 1
    made = backward(x, None, False, {})
    scores = np.einsum("bqhd,bkhd->bhqk", x["q"], x["k"]) / np.sqrt(5)
    p = np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))
    expected = np.broadcast_to(p.sum(2).swapaxes(1, 2)[..., None], made["dv"].shape)
    assert np.abs(made["dv"] - expected).max() <= 1e-13


def test_a_permutation_of_the_keys_permutes_dk_and_dv() -> None:
    x, mask, order = inputs(6, 9), make_mask("full", 6, 9), np.random.default_rng(2).permutation(9)
    before = backward(x, mask, True, {"softcap": 1.0})
    after = backward({**x, "k": x["k"][:, order], "v": x["v"][:, order]}, mask[..., order], True, {"softcap": 1.0})
    for name, expected in {
        "dq": before["dq"], "dk": before["dk"][:, order], "dv": before["dv"][:, order],
        "dmask": before["dmask"][..., order], "dsinks": before["dsinks"],
    }.items():  # fmt: skip
        assert np.abs(after[name] - expected).max() <= 1e-13, name


def test_the_halves_of_a_merged_attention_add_up() -> None:
    """Each with the o and LSE of all keys, as ring attention has them."""
    x = inputs(5, 8)
    o, lse = forward(x, None, True, {})
    whole = backward(x, None, True, {})
    made = []
    for keys in (slice(0, 3), slice(3, 8)):
        part = reference.attention_backward(
            x["do"], x["q"], x["k"][:, keys], x["v"][:, keys], o, lse, dlse=x["dlse"], sinks=x["sinks"],
            wanted=("dq", "dk", "dv", "dsinks"), compute_dtype=F64,
        )  # fmt: skip
        made.append(part)
    assert np.abs(made[0]["dq"] + made[1]["dq"] - whole["dq"]).max() <= 1e-13
    for name in ("dk", "dv"):
        assert np.abs(np.concatenate([part[name] for part in made], axis=1) - whole[name]).max() <= 1e-13
    # The sink is in the LSE once: either half gives all of its gradient.
    assert np.abs(made[0]["dsinks"] - whole["dsinks"]).max() <= 1e-13


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_attend_to_nothing(sinks: bool) -> None:
    """Causal with more queries than keys; NaN and infinity in what belongs to such rows do not show."""
    x = inputs(6, 3)
    if sinks:
        x["sinks"][...] = -np.inf
    o, lse = forward(x, None, sinks, {"causal": True})
    assert np.isneginf(lse[:, :, :3]).all()
    clean = backward(x, None, sinks, {"causal": True})
    o[:, :3], x["do"][:, :3], x["dlse"][:, :, :3], x["q"][:, :3] = np.inf, np.nan, np.nan, np.nan
    made = reference.attention_backward(
        x["do"], x["q"], x["k"], x["v"], o, lse, dlse=x["dlse"], sinks=x["sinks"] if sinks else None, causal=True,
        wanted=tuple(clean), compute_dtype=F64,
    )  # fmt: skip
    assert not made["dq"][:, :3].any()
    for name, gradient in made.items():
        assert np.array_equal(gradient, clean[name]), name


def test_infinite_sinks() -> None:
    """-inf takes nothing. +inf is NaN forward, and in the gradients of its own head only."""
    x = inputs(4, 5)
    plain = backward(x, None, False, {})
    x["sinks"] = np.array([np.inf, -np.inf, -np.inf, -np.inf])
    made = backward(x, None, True, {})
    assert np.isnan(made["dq"][:, :, 0]).all()
    assert np.isnan(made["dsinks"][0])
    assert np.abs(made["dq"][:, :, 1:] - plain["dq"][:, :, 1:]).max() <= 1e-15
    assert np.abs(made["dk"][:, :, 1] - plain["dk"][:, :, 1]).max() <= 1e-15
    assert not made["dsinks"][1:].any()


def test_nan_stays_in_its_sequence_and_head() -> None:
    x = inputs(4, 5)
    clean = backward(x, None, False, {})
    x["k"][1, 2, 0] = np.nan
    made = backward(x, None, False, {})
    for name, heads in (("dq", slice(2, 4)), ("dk", slice(1, 2)), ("dv", slice(1, 2))):
        assert np.array_equal(made[name][0], clean[name][0])
        assert np.array_equal(made[name][1][:, heads], clean[name][1][:, heads])
    assert np.isnan(made["dq"][1][:, :2]).all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_hidden_keys_may_hold_anything(name: str) -> None:
    x = inputs(4, 5)
    mask = np.ones((2, 1, 1, 5), dtype=np.bool_)
    mask[..., 3:] = False
    clean = backward(x, mask, False, {})
    x[name][:, 3:] = np.nan
    made = backward(x, mask, False, {})
    for key, gradient in made.items():
        assert np.array_equal(gradient, clean[key]), key


def test_only_what_is_wanted() -> None:
    x, mask = inputs(4, 5), make_mask("full", 4, 5)
    whole = backward(x, mask, True, {})
    for name in ALL:
        made = backward(x, mask, True, {}, wanted=(name,))
        assert list(made) == [name]
        assert np.array_equal(made[name], whole[name])


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = inputs(37, 23), make_mask("heads", 37, 23)
    options = {"window": (5, 9), "softcap": 1.0}
    whole = backward(x, mask, True, options)
    monkeypatch.setattr(core, "BLOCK_SCORES", 64)
    monkeypatch.setattr(core, "MIN_BLOCK_ROWS", 3)
    for name, gradient in backward(x, mask, True, options).items():
        assert np.abs(gradient - whole[name]).max() <= 1e-12, name


def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, 6000, 1, 8), dtype=np.float32) for _ in range(4))
    o, lse = reference.attention(q, k, v, causal=True)
    tracemalloc.start()
    reference.attention_backward(do, q, k, v, o, lse, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6, "scores of all queries would take 144 MB"


@settings(max_examples=40, deadline=None)
@given(
    sq=st.integers(1, 4), sk=st.integers(1, 4), causal=st.booleans(), sinks=st.booleans(),
    window=st.tuples(st.integers(-1, 3), st.integers(-1, 3)), softcap=st.sampled_from([0.0, 1.0]),
    kind=st.sampled_from(sorted(MASKS)), scale=st.sampled_from([None, -0.5, 1.5]), mod=st.booleans(),
)  # fmt: skip
def test_random_options(
    sq: int, sk: int, causal: bool, sinks: bool, window: Any, softcap: float, kind: str, scale: Any, mod: bool
) -> None:
    options = {"causal": causal, "window": window, "softcap": softcap, "softmax_scale": scale, **(MOD if mod else {})}
    check(inputs(sq, sk, dim=3), make_mask(kind, sq, sk), sinks, options)


def test_wrong_arguments() -> None:
    x = inputs(4, 5)
    o, lse = forward(x, None, False, {})
    call = (x["do"], x["q"], x["k"], x["v"], o, lse)
    for options, error in (
        ({"wanted": ("dx",)}, ArgumentError), ({"wanted": ("dmask",)}, ArgumentError),
        ({"score_mod": squashed}, ArgumentError), ({"dlse": x["dlse"][:1]}, ShapeError),
    ):  # fmt: skip
        with pytest.raises(error):
            reference.attention_backward(*call, **options)  # type: ignore[arg-type]
    with pytest.raises(ShapeError):
        reference.attention_backward(x["do"][:, :2], *call[1:])
