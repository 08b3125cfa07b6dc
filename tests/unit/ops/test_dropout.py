"""Dropout: the mask's definition, o and gradients beside what is written out, arguments, plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.bench.shape_cases import ShapeCase
from omniattn.checks.dropout import check_dropout
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from omniattn.launch.dropout import with_dropout
from omniattn.ops.dropout import of_call
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, Fp8, Int8, Target
from omniattn.problems.dropout import DropoutProblem, dropout_of
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.reference.dropout import Dropout, philox
from omniattn.registry import REGISTRY
from tests.unit.select.shape_plans import GPUS, problem_of

RNG = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


def _arrays(*extents: int, packed: bool = False) -> list[Any]:
    batch, queries, keys, heads, heads_kv, head_dim = extents
    r = np.random.default_rng(0)
    lead = () if packed else (batch,)
    shapes = ((queries, heads), (keys, heads_kv), (keys, heads_kv))
    return [r.standard_normal((*lead, *s, head_dim)) for s in shapes]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_known_numbers(counter: Any, key: Any, expected: Any) -> None:
    """Those of Random123's file of known answers, philox4x32 10."""
    assert tuple(int(x) for x in philox(counter, key)) == expected


def test_the_byte_of_a_probability_stands_where_the_definition_says() -> None:
    """Element by element, as attention/dropout.cuh writes it."""
    seed, offset = RNG
    words = philox((offset & 0xFFFFFFFF, offset >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    key = int(words[0]), int(words[1])
    mask = omniattn.dropout_mask((2, 3, 37, 41), 0.4, RNG)
    for b, h, q, k in [(0, 0, 0, 0), (1, 2, 36, 40), (1, 0, 17, 9), (0, 2, 8, 31), (1, 1, 25, 24), (0, 1, 30, 7)]:
        made = philox((4 * (k // 16) + k // 2 % 4, 4 * (q // 16) + q // 2 % 4, h, b), key)
        byte = int(made[q % 2 + 2 * (k % 2)]) >> 8 * (q // 8 % 2 + 2 * (k // 8 % 2)) & 255
        assert mask[b, h, q, k] == (byte >= round(0.4 * 256))


def test_a_larger_mask_begins_with_the_smaller_one() -> None:
    """Nothing depends on extents: tiles, splits and packing cannot."""
    small, large = (omniattn.dropout_mask(s, 0.3, RNG) for s in ((1, 2, 50, 33), (3, 5, 130, 200)))
    assert (large[:1, :2, :50, :33] == small).all()


@pytest.mark.parametrize(("p", "threshold"), [(0.0, 0), (1e-9, 1), (0.1, 26), (0.5, 128), (0.9999, 255)])
def test_p_is_rounded_to_256ths(p: float, threshold: int) -> None:
    """And never to nothing, or to all."""
    made = dropout_of(p)
    assert (0 if made is None else made.threshold) == threshold
    if made is not None:
        assert made.scale == pytest.approx(1 / (1 - made.p))


def test_a_share_is_dropped_and_neighbours_are_independent() -> None:
    """Within six standard deviations."""
    for p in (0.1, 0.5, 0.8):
        mask = omniattn.dropout_mask((2, 2, 256, 256), p, RNG).astype(np.float64)
        share = round(p * 256) / 256
        deviation = (share * (1 - share)) ** 0.5
        assert abs(1 - mask.mean() - share) < 6 * deviation / mask.size**0.5
        centred = mask - mask.mean()
        for axis in range(1, 4):
            for step in (1, 2, 8, 16) if axis > 1 else (1,):
                n = mask.shape[axis] - step
                pairs = centred.take(range(n), axis) * centred.take(range(step, n + step), axis)
                assert abs(pairs.mean()) < 6 * deviation**2 / pairs.size**0.5


def test_seeds_offsets_batches_and_heads_differ() -> None:
    """One bit of a seed or an offset changes half of a mask of p = 1/2."""
    base = omniattn.dropout_mask((2, 2, 128, 128), 0.5, (1, 2))
    for other in ((0, 2), (1, 3), (1 | 1 << 40, 2), (1, 2 | 1 << 63)):
        assert 0.45 < (omniattn.dropout_mask((2, 2, 128, 128), 0.5, other) != base).mean() < 0.55
    assert 0.45 < (base[0] != base[1]).mean() < 0.55
    assert 0.45 < (base[:, 0] != base[:, 1]).mean() < 0.55


def _written_out(arrays: list[Any], mask: Any, scale: float, causal: bool) -> Any:
    q, k, v = arrays
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat(group, 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = s.shape[-2:]
        s = np.where(np.arange(keys) <= np.arange(rows)[:, None] + keys - rows, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p * mask * scale, v)


@pytest.mark.parametrize("causal", [False, True])
def test_o_is_what_is_kept(causal: bool) -> None:
    """And the LSE that without dropout."""
    arrays = _arrays(2, 45, 70, 4, 2, 16)
    o, lse, rng = omniattn.attention(
        *arrays, causal=causal, dropout_p=0.3, dropout_rng=RNG, return_lse=True, return_rng=True
    )
    mask = omniattn.dropout_mask((2, 4, 45, 70), 0.3, rng)
    np.testing.assert_allclose(o, _written_out(arrays, mask, 256 / (256 - 77), causal), atol=1e-12)
    np.testing.assert_array_equal(lse, omniattn.attention(*arrays, causal=causal, return_lse=True)[1])


def test_with_a_block_mask_it_is_what_a_mask_with_dropout_is() -> None:
    """Forward and gradients; a score_mod beside both raises."""
    x = _arrays(2, 150, 203, 4, 2, 8)
    blocks = np.random.default_rng(3).random((2, 4, 3, 4)) < 0.6
    visible = blocks.repeat(64, axis=2)[:, :, :150].repeat(64, axis=3)[..., :203]
    own = {"causal": True, "dropout_p": 0.3, "dropout_rng": RNG}
    made = []
    for hidden in ({"block_mask": blocks, "block_size": 64}, {"mask": visible}):
        o, lse = omniattn.attention(*x, return_lse=True, **own, **hidden)
        made.append((o, lse, *omniattn.attention_backward(np.ones_like(o), *x, o, lse, **own, **hidden)))
    for a, b in zip(*made, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.abs(a).max() > 0 for a in made[0][2:])
    o, lse = made[0][:2]
    mod = omniattn.ScoreMod("score", reference=lambda s, *_: s, grad="1.0f", reference_grad=lambda s, *_: 1.0 + 0 * s)
    with pytest.raises(UnsupportedError, match=r"dropout_p=0\.3 with score_mod"):
        omniattn.attention_backward(o, *x, o, lse, block_mask=blocks, block_size=64, score_mod=mod, **own)


def test_a_block_mask_on_a_gpu_raises() -> None:
    """By name, forward and backward alike."""
    problem = replace(problem_of(ShapeCase(64, 4, (512,), (512,))), block_mask=BlockMaskProblem((1, 1), (0, 64, 8, 1)))
    rng: Any = SimpleNamespace(dtype="int64", shape=(2,), strides=(1,), device="cpu")
    assert check_dropout(problem, {"dropout_rng": rng}, 0.1, False, "attention") == DropoutProblem(26)
    rng.device = "cuda"
    with pytest.raises(UnsupportedError, match=r"attention\(\): dropout_p=0\.1 with block_mask on a GPU"):
        check_dropout(problem, {"dropout_rng": rng}, 0.1, False, "attention")


def test_gradients_are_those_of_differences() -> None:
    """Of dq, dk, dv, dsinks and dmask, by central differences in one direction each."""
    q, k, v = _arrays(1, 20, 37, 2, 1, 8)
    r = np.random.default_rng(1)
    given = {"q": q, "k": k, "v": v, "mask": r.standard_normal((1, 2, 20, 37)), "sinks": r.standard_normal(2)}
    given["mask"], given["sinks"] = given["mask"].astype(np.float32), given["sinks"].astype(np.float32)
    do = r.standard_normal(q.shape)
    known = {"dropout_p": 0.25, "dropout_rng": RNG, "softcap": 5.0}

    def value(x: dict[str, Any]) -> float:
        x = dict(x)
        o = omniattn.attention(x.pop("q"), x.pop("k"), x.pop("v"), **x, **known)
        return float((o * do).sum())

    o, lse = omniattn.attention(q, k, v, mask=given["mask"], sinks=given["sinks"], return_lse=True, **known)
    names = ("dq", "dk", "dv", "dsinks", "dmask")
    made = omniattn.attention_backward(
        do, q, k, v, o, lse, mask=given["mask"], sinks=given["sinks"], wanted=names, **known
    )
    for name, gradient in zip(names, made, strict=True):
        x = given[name[1:]]
        step = r.standard_normal(x.shape).astype(x.dtype)
        e = 1e-3 if x.dtype == np.float32 else 1e-6
        found = [value(given | {name[1:]: (x + sign * e * step).astype(x.dtype)}) for sign in (1, -1)]
        assert (found[0] - found[1]) / (2 * e) == pytest.approx(float((gradient * step).sum()), rel=2e-3, abs=2e-3)


def test_packed_sequences_drop_what_a_batch_drops() -> None:
    """Sequence b of packed ones is sequence b of a batch, with used rows too."""
    lengths = (5, 0, 40, 17)
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    packed = _arrays(0, sum(lengths), sum(lengths), 2, 2, 8, packed=True)
    known = {"causal": True, "dropout_p": 0.4, "dropout_rng": RNG}
    used = np.array([3, 0, 40, 16], np.int32)
    for counts in (None, used):
        own = {} if counts is None else {"seqused_q": counts, "seqused_k": counts}
        o = omniattn.attention_varlen(
            *packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=40, max_seqlen_k=40, **own, **known
        )
        for b, n in enumerate(lengths if counts is None else counts):
            one = [np.zeros((len(lengths), n, *x.shape[1:])) for x in packed]
            for x, y in zip(one, packed, strict=True):
                x[b] = y[starts[b] : starts[b] + n]
            np.testing.assert_allclose(omniattn.attention(*one, **known)[b], o[starts[b] : starts[b] + n], atol=1e-12)


def test_an_array_of_words_is_the_pair() -> None:
    """(2,) of 64 bits, (4,) of 32 bits, or two integers."""
    arrays = _arrays(1, 9, 9, 1, 1, 8)
    pair = np.array(RNG, np.uint64)
    forms = [RNG, list(RNG), pair, pair.view(np.int64), pair.view(np.uint32), pair.view(np.int32)]
    results = [omniattn.attention(*arrays, dropout_p=0.5, dropout_rng=rng) for rng in forms]
    masks = [omniattn.dropout_mask((1, 1, 9, 9), 0.5, rng) for rng in forms]
    assert all((x == results[0]).all() for x in results)
    assert all((x == masks[0]).all() for x in masks)


def test_without_dropout_nothing_changes() -> None:
    """p of 0 with an rng, which is handed out."""
    arrays = _arrays(1, 9, 9, 1, 1, 8)
    o, rng = omniattn.attention(*arrays, dropout_p=0.0, dropout_rng=RNG, return_rng=True)
    assert rng == RNG
    assert (o == omniattn.attention(*arrays)).all()
    assert omniattn.dropout_mask((1, 1, 2, 2), 0.0, None).all()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dropout_p": float("nan")}, ArgumentError, "dropout_p"),
        ({"dropout_p": -0.1}, ArgumentError, "dropout_p"),
        ({"dropout_p": 1.0}, ArgumentError, "less than 1"),
        ({"dropout_p": "a"}, ArgumentError, "dropout_p"),
        ({"dropout_rng": None}, ArgumentError, "dropout_rng"),
        ({"dropout_rng": (1, -1)}, ArgumentError, "dropout_rng"),
        ({"dropout_rng": (1, 2**64)}, ArgumentError, "dropout_rng"),
        ({"dropout_rng": (1, 2, 3)}, ArgumentError, "dropout_rng"),
        ({"dropout_rng": np.zeros(2, np.float32)}, DtypeError, "dropout_rng"),
        ({"dropout_rng": np.zeros(3, np.int64)}, ShapeError, "dropout_rng"),
        ({"dropout_rng": np.zeros(2, np.int32)}, ShapeError, "dropout_rng"),
        ({"precision": "int8"}, UnsupportedError, "dropout_p=0.1 with precision='int8'"),
        ({"precision": Int8()}, UnsupportedError, "with precision"),
        ({"precision": Fp8()}, UnsupportedError, "with precision"),
        ({"score_mod": omniattn.ScoreMod("score", reference=lambda s, *_: s)}, UnsupportedError, "score_mod"),
    ],
)
def test_what_raises(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    """By name, before anything runs."""
    arrays = [x.astype(np.float32) for x in _arrays(1, 9, 9, 1, 1, 8)]
    with pytest.raises(error, match=text):
        omniattn.attention(*arrays, **{"dropout_p": 0.1, "dropout_rng": RNG, **changes})


@pytest.mark.parametrize("library", ["numpy", "cupy", "another"])
def test_without_a_generator_the_error_shows_how_to_pass_seed_and_offset(library: str) -> None:
    q = np.zeros((1, 9, 1, 8)) if library == "numpy" else type("ndarray", (), {"__module__": library})()
    with pytest.raises(ArgumentError, match=r"received None, .*\. For example dropout_rng=\(1234, 0\)") as caught:
        of_call(q, 0.1, None, "attention")
    assert (caught.value.function, caught.value.argument) == ("attention", "dropout_rng")


@pytest.mark.parametrize(
    ("rng", "received"), [(5, "the int 5"), (1.5, "the float 1.5"), ("a", "str"), (np.int64(5), "the int64 5")]
)
def test_what_is_neither_a_pair_nor_an_array(rng: Any, received: str) -> None:
    """Both are expected, and not an array alone."""
    x = _arrays(1, 9, 9, 1, 1, 8)
    for call in (
        lambda: omniattn.attention(*x, dropout_p=0.1, dropout_rng=rng),
        lambda: omniattn.dropout_mask((1, 1, 9, 9), 0.1, rng),
    ):
        with pytest.raises(ArgumentError, match=r"'dropout_rng': expected \(seed, offset\)") as caught:
            call()
        assert caught.value.received == received


@pytest.mark.parametrize("rng", ["junk", 5, 1.5, {}, (1, 2, 3), (1,), (1, -1), (1, True), (1.0, 2), np.int64(3)])
def test_without_dropout_a_wrong_rng_raises_too(rng: Any) -> None:
    """A call that only hands it out, and one whose dropout is off, name it before the first step that needs it."""
    x = _arrays(1, 9, 9, 1, 1, 8)
    o, lse = omniattn.attention(*x, return_lse=True)
    starts = {"cu_seqlens_q": np.array([0, 9], np.int32), "cu_seqlens_k": np.array([0, 9], np.int32)}
    for call in (
        lambda **said: omniattn.attention(*x, **said),
        lambda **said: omniattn.attention_varlen(*(a[0] for a in x), **starts, max_seqlen_q=9, max_seqlen_k=9, **said),
        lambda **said: omniattn.attention_backward(o, *x, o, lse, **said),
    ):
        with pytest.raises(ArgumentError) as caught:
            call(dropout_rng=rng)
        assert caught.value.argument == "dropout_rng"
        call(dropout_rng=RNG)
        call(dropout_rng=np.array(RNG, np.uint64))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("flag", ["no", 1, 0, None, (), np.ones(2)])
def test_return_rng_is_a_flag(flag: Any, p: float) -> None:
    arrays = [x.astype(np.float32) for x in _arrays(1, 9, 9, 1, 1, 8)]
    starts = {"cu_seqlens_q": np.array([0, 9], np.int32), "cu_seqlens_k": np.array([0, 9], np.int32)}
    for function, x, more in (
        (omniattn.attention, arrays, {}),
        (omniattn.attention_varlen, [a[0] for a in arrays], {**starts, "max_seqlen_q": 9, "max_seqlen_k": 9}),
    ):
        said = {"dropout_p": p, "dropout_rng": RNG, **more}
        with pytest.raises(ArgumentError, match=rf"{function.__name__}\(\).*'return_rng': expected True or False"):
            function(*x, return_rng=flag, **said)
        o, rng = function(*x, return_rng=np.bool_(True), **said)
        assert o.shape == x[0].shape
        assert rng is not None
        assert function(*x, return_rng=False, **said).shape == x[0].shape


def test_quantized_operands_pages_and_backwards_without_rng_raise() -> None:
    """What is left of the refusals."""
    q, k, v = (x.astype(np.float32) for x in _arrays(1, 64, 64, 1, 1, 64))
    pair, value = omniattn.quantize_qk(q, k), omniattn.quantize_v(v)
    with pytest.raises(UnsupportedError, match=r"dropout_p=0\.1 with quantized operands"):
        omniattn.attention(pair.q, pair.k, value, dropout_p=0.1, dropout_rng=RNG)
    o, lse = omniattn.attention(q, k, v, return_lse=True)
    with pytest.raises(ArgumentError, match=r"It is what the forward was given, dropout_rng=\(1234, 0\) say"):
        omniattn.attention_backward(o, q, k, v, o, lse, dropout_p=0.1)
    starts, counts = np.array([0, 64], np.int32), np.array([64], np.int32)
    with pytest.raises(UnsupportedError, match="block_table"):
        omniattn.attention_varlen(
            q[0], k.reshape(4, 16, 1, 64), v.reshape(4, 16, 1, 64), cu_seqlens_q=starts, seqused_k=counts,
            max_seqlen_q=64, max_seqlen_k=64, block_table=np.arange(4, dtype=np.int32)[None], dropout_p=0.1,
            dropout_rng=RNG,
        )  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 1, 2, -1), "abcd"])
def test_bad_shapes_of_masks_raise(shape: Any) -> None:
    """Four extents."""
    with pytest.raises(ArgumentError, match="shape"):
        omniattn.dropout_mask(shape, 0.1, RNG)


def _planned(target: Target, head_dim: int, **changes: Any) -> list[str]:
    case = ShapeCase(head_dim, 4, (512,), (512,))
    problem: AttentionProblem = replace(problem_of(case), dropout=DropoutProblem(26), **changes)
    return [record.spec.name for record in plan_attention(problem, target, None).records]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("gpu", list(GPUS))
def test_every_gpu_has_kernels(gpu: str, head_dim: int) -> None:
    """Compiled with dropout; Hopper its own ones."""
    (name,) = _planned(GPUS[gpu], head_dim)
    assert name.endswith("_dropout")
    assert ("sm90" in name) == (gpu == "H200")


def test_rows_with_dropout_are_of_calls_that_drop() -> None:
    """No row of the registry drops by itself, and the text is the only difference."""
    row = next(spec for spec in REGISTRY if spec.dropout)
    made = with_dropout(row, DropoutProblem(1))
    assert made.prebuild == ()
    assert [name for name, _ in made.generated] == ["attention/dropout_mode.cuh"]
    assert with_dropout(row, None) is row
    assert not any(spec.generated for spec in REGISTRY)


def test_the_reference_takes_blocks_of_any_rows() -> None:
    """Positions far from the first."""
    whole = Dropout(100, *RNG).kept(3, 5, np.arange(100), np.arange(90))
    part = Dropout(100, *RNG).kept(3, 5, np.arange(37, 61), np.arange(11, 90))
    assert (whole[37:61, 11:] == part).all()
