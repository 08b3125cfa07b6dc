"""The backward functions without a GPU: results, what is refused, what kernels are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays, reference, runtime
from omniattn.checks import backward as checks
from omniattn.checks.backward import ARRAYS, GIVEN, BackwardOptions
from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, StrideError, UnsupportedError
from omniattn.ops.attention_backward import arrays_of, call_of
from omniattn.ops.extras import Extras
from omniattn.plan import engine
from omniattn.plan.engine import PLANS, operand_names
from omniattn.problems import BackwardProblem
from omniattn.problems.score_mod import ScoreModProblem

STARTS = {
    "cu_seqlens_q": np.array([0, 3, 3, 7], np.int32), "cu_seqlens_k": np.array([0, 2, 5, 9], np.int32),
    "max_seqlen_q": 4, "max_seqlen_k": 4,
}  # fmt: skip
MASK = np.random.default_rng(7).standard_normal((2, 1, 7, 9)).astype(np.float32)
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


def inputs(dtype: Any = np.float32, *, packed: bool = False, layout: str = "NHD") -> dict[str, np.ndarray]:
    """do, q, k, v of 7 queries and 9 keys."""
    rng = np.random.default_rng(0)
    shapes = {"do": (7, 4, 8), "q": (7, 4, 8), "k": (9, 2, 8), "v": (9, 2, 8)}
    made = {}
    for name, shape in shapes.items():
        x = rng.standard_normal(shape if packed else (2, *shape)).astype(dtype)
        made[name] = x if layout == "NHD" else np.ascontiguousarray(x.swapaxes(-3, -2))
    return made


def with_results(x: dict[str, np.ndarray], **options: Any) -> tuple[np.ndarray, ...]:
    """The arrays of a backward call, in its order."""
    function = oa.attention_varlen if "cu_seqlens_q" in options else oa.attention
    o, lse = function(x["q"], x["k"], x["v"], return_lse=True, **options)
    return x["do"], x["q"], x["k"], x["v"], o, lse


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"causal": True, "softcap": 2.0}, {"window": (2, 1), "softmax_scale": -0.7}, {"mask": MASK > 0},
        {"mask": MASK, "sinks": SINKS},
    ],
    ids=["plain", "softcap", "window", "bool", "mask, sinks"],
)  # fmt: skip
def test_is_the_reference(dtype: str, layout: str, options: dict[str, Any]) -> None:
    call = with_results(inputs(dtype, layout=layout), layout=layout, **options)
    wanted = ("dq", "dk", "dv", *(("dsinks", "dmask") if "sinks" in options else ()))
    dlse = np.random.default_rng(1).standard_normal((2, 4, 7)).astype(np.float32)
    made = oa.attention_backward(*call, dlse=dlse, layout=layout, wanted=wanted, **options)
    expected = reference.attention_backward(
        *call, dlse=dlse, layout=layout, wanted=wanted,
        compute_dtype="float64" if dtype == "float64" else "float32", **options,
    )  # fmt: skip
    for name, gradient in zip(wanted, made, strict=True):
        sums = name in ("dsinks", "dmask") and dtype == "float16"
        assert gradient.dtype == ("float32" if sums else dtype)
        if dtype == "float64":  # 1 / sqrt(8) and 8**-0.5 differ in the last bit
            assert np.abs(gradient - expected[name]).max() <= 1e-13
        else:
            assert np.array_equal(gradient, expected[name].astype(gradient.dtype)), name
    if "mask" in options and "sinks" in options:
        assert made[-1].shape == MASK.shape


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_sequences(layout: str) -> None:
    x = inputs(packed=True, layout=layout)
    call = with_results(x, layout=layout, causal=True, **STARTS)
    made = oa.attention_varlen_backward(*call, layout=layout, causal=True, **STARTS)
    expected = reference.attention_varlen_backward(*call, layout=layout, causal=True, **STARTS)
    assert [np.array_equal(a, b) for a, b in zip(made, expected.values(), strict=True)] == [True] * 3


def test_results_are_in_the_order_of_wanted() -> None:
    call = with_results(inputs(), sinks=SINKS, mask=MASK)
    options = {"sinks": SINKS, "mask": MASK}
    names = ("dq", "dk", "dv", "dsinks", "dmask")
    whole = dict(zip(names, oa.attention_backward(*call, wanted=names, **options), strict=True))
    assert len(oa.attention_backward(*call, **options)) == 4
    assert len(oa.attention_backward(*with_results(inputs()))) == 3
    for wanted in (("dv",), ("dmask", "dq"), ["dsinks", "dk"], names[::-1]):
        made = oa.attention_backward(*call, wanted=wanted, **options)
        assert isinstance(made, tuple)
        assert len(made) == len(wanted)
        for name, gradient in zip(wanted, made, strict=True):
            assert np.array_equal(gradient, whole[name]), name


def test_given_arrays_are_written_and_returned() -> None:
    call = with_results(inputs())
    expected = oa.attention_backward(*call)
    for names in (("dq",), ("dk", "dv"), ("dq", "dk", "dv")):
        given = {name: np.full((2, 4, n, 8), np.nan, np.float32)[:, :h].swapaxes(1, 2)
                 for name, n, h in (("dq", 7, 4), ("dk", 9, 2), ("dv", 9, 2)) if name in names}  # fmt: skip
        made = oa.attention_backward(*call, **given)
        for name, gradient, right in zip(("dq", "dk", "dv"), made, expected, strict=True):
            assert np.array_equal(gradient, right)
            assert (gradient is given[name]) if name in names else gradient.flags.c_contiguous


@pytest.mark.parametrize("form", ["zero", "transposed", "reversed", "last"])
def test_strides_of_do(form: str) -> None:
    x = inputs()
    x["do"] = {
        "zero": np.broadcast_to(np.float32(1), x["do"].shape),
        "transposed": np.ascontiguousarray(x["do"].swapaxes(1, 3)).swapaxes(1, 3),
        "reversed": x["do"][:, ::-1], "last": np.ascontiguousarray(x["do"][..., ::-1])[..., ::-1],
    }[form]  # fmt: skip
    call = with_results(x)
    for a, b in zip(
        oa.attention_backward(*call), oa.attention_backward(np.ascontiguousarray(call[0]), *call[1:]), strict=True
    ):
        assert np.array_equal(a, b)


def test_merged_halves_add_up() -> None:
    """The gradients of two halves of the keys, with the merged o and LSE."""
    x = inputs(np.float64)
    whole = oa.attention_backward(*with_results(x))
    halves = [{**x, "k": x["k"][:, keys], "v": x["v"][:, keys]} for keys in (slice(0, 4), slice(4, 9))]
    states = [with_results(half)[4:] for half in halves]
    o, lse = oa.merge_states(*states[0], *states[1])
    made = [oa.attention_backward(x["do"], x["q"], half["k"], half["v"], o, lse) for half in halves]
    assert np.abs(made[0][0] + made[1][0] - whole[0]).max() < 1e-6
    for i in (1, 2):
        assert np.abs(np.concatenate([part[i] for part in made], axis=1) - whole[i]).max() < 1e-6


def test_empty_calls() -> None:
    for sq, sk, batch in ((0, 3, 2), (3, 0, 2), (3, 3, 0)):
        q, k = np.ones((batch, sq, 4, 8), np.float32), np.ones((batch, sk, 2, 8), np.float32)
        o, lse = oa.attention(q, k, k, return_lse=True)
        dq, dk, dv = oa.attention_backward(q, q, k, k, o, lse)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)
        assert not dq.any()
        assert not dk.any()
        assert not dv.any()


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return np.tanh(score) + slopes[h] * (k - q)


def alibi_grad(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return 1 - np.tanh(score) ** 2


TEXT = "tanhf(score) + slopes[h] * (k - q)"
DERIVATIVE = "1.0f - tanhf(score) * tanhf(score)"


def test_score_mod() -> None:
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    mod = oa.ScoreMod(TEXT, grad=DERIVATIVE, reference=alibi, reference_grad=alibi_grad, slopes=slopes)
    assert (mod.grad, mod.reference_grad) == (DERIVATIVE, alibi_grad)
    assert "grad=" in repr(mod)
    x = inputs(np.float64)
    call = with_results(x, score_mod=mod)
    made = oa.attention_backward(*call, score_mod=mod)

    def loss(q: Any) -> float:
        return float((oa.attention(q, x["k"], x["v"], score_mod=mod) * x["do"]).sum())

    step = np.zeros_like(x["q"])
    step[1, 2, 3, 4] = 1e-6
    assert made[0][1, 2, 3, 4] == pytest.approx((loss(x["q"] + step) - loss(x["q"] - step)) / 2e-6, abs=1e-6)
    # A derivative for the GPU alone does not help here, and one for the CPU alone does.
    with pytest.raises(UnsupportedError, match="reference_grad="):
        oa.attention_backward(*call, score_mod=oa.ScoreMod(TEXT, grad=DERIVATIVE, reference=alibi, slopes=slopes))
    with pytest.raises(UnsupportedError, match=r"without its derivative.*grad="):
        oa.attention_backward(*call, score_mod=oa.ScoreMod(TEXT, reference=alibi, slopes=slopes))
    with pytest.raises(UnsupportedError, match="reference="):
        oa.attention_backward(*call, score_mod=oa.ScoreMod(TEXT, grad=DERIVATIVE, slopes=slopes))
    own = oa.ScoreMod(TEXT, reference=alibi, reference_grad=alibi_grad, slopes=slopes)
    assert np.array_equal(oa.attention_backward(*call, score_mod=own)[0], made[0])


@pytest.mark.parametrize("text", ["score; q", "", "{score}", 3, "__syncthreads()"])
def test_derivatives_are_expressions(text: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^ScoreMod\(\): argument 'grad'"):
        oa.ScoreMod("score", grad=text)
    with pytest.raises(ArgumentError, match="argument 'reference_grad'"):
        oa.ScoreMod("score", reference_grad=3)


def refused(error: type[Exception], argument: str, **changes: Any) -> None:
    """A call of which something is changed raises before anything is written."""
    names = ("do", "q", "k", "v", "o", "lse")
    call = dict(zip(names, with_results(inputs()), strict=True))
    dv = np.full_like(call["v"], 7.75)
    call.update({name: changes.pop(name) for name in names if name in changes})
    if "dv" not in changes and "dv" in changes.get("wanted", ("dv",)):
        changes["dv"] = dv
    with pytest.raises(error, match=rf"attention_backward\(\): argument '{argument}'"):
        oa.attention_backward(*call.values(), **changes)
    assert (dv == 7.75).all()


def test_what_is_refused() -> None:
    x = inputs()
    q, k, o, lse = x["q"], x["k"], x["q"], np.zeros((2, 4, 7), np.float32)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (DtypeError, "do", {"do": o.astype(np.float16)}), (ShapeError, "do", {"do": o[:, :3]}),
        (ShapeError, "o", {"o": o[..., :4]}), (DtypeError, "o", {"o": o.astype(np.float64)}),
        (ShapeError, "lse", {"lse": lse[:, :, :3]}), (DtypeError, "lse", {"lse": lse.astype(np.float64)}),
        (ShapeError, "dlse", {"dlse": lse.swapaxes(1, 2)}), (DtypeError, "dlse", {"dlse": lse.astype(np.float16)}),
        (ShapeError, "dq", {"dq": k}), (DtypeError, "dk", {"dk": k.astype(np.float16)}),
        (StrideError, "dq", {"dq": np.empty((2, 7, 4, 16), np.float32)[..., ::2]}),
        (ArgumentError, "dv", {"dv": np.broadcast_to(np.float32(0), k.shape)}),
        (ArgumentError, "dq", {"dq": np.empty_like(q), "wanted": ("dv",)}),
        (ArgumentError, "wanted", {"wanted": ()}), (ArgumentError, "wanted", {"wanted": "dq"}),
        (ArgumentError, "wanted", {"wanted": ("dq", "dq", "dv")}), (ArgumentError, "wanted", {"wanted": ("o",)}),
        (ArgumentError, "wanted", {"wanted": ("dsinks", "dv")}), (ArgumentError, "wanted", {"wanted": ("dmask",)}),
        (ArgumentError, "wanted", {"wanted": ("dmask",), "mask": MASK > 0}),
        (ShapeError, "mask", {"mask": MASK[..., :4]}), (ShapeError, "sinks", {"sinks": SINKS[:3]}),
        (ArgumentError, "layout", {"layout": "BSHD"}), (ArgumentError, "causal", {"causal": 1}),
        (ArgumentError, "window", {"window": (1, 2, 3)}), (ArgumentError, "softcap", {"softcap": -1.0}),
        (ArgumentError, "softmax_scale", {"softmax_scale": float("nan")}),
        (ArgumentError, "deterministic", {"deterministic": None}),
        (ArgumentError, "score_mod", {"score_mod": "score"}),
    ]  # fmt: skip
    for error, argument, changes in cases:
        refused(error, argument, **changes)
    for name in ("do", "o", "lse", "q"):
        with pytest.raises(ArgumentError, match=f"argument '{name}'"):
            oa.attention_backward(**{**x, "o": o, "lse": lse, name: None})
    both = np.empty_like(k)
    with pytest.raises(ArgumentError, match=r"memory of its own, received an array that shares memory with 'd[kv]'"):
        oa.attention_backward(*with_results(x), dk=both, dv=both)
    for unknown in ("precision", "out", "return_lse"):
        with pytest.raises(TypeError, match=unknown):
            oa.attention_backward(*with_results(x), **{unknown: None})
    with pytest.raises(ArgumentError, match=r"attention_varlen_backward\(\): argument 'cu_seqlens_q'"):
        oa.attention_varlen_backward(*with_results(inputs(packed=True), **STARTS))
    bad = {**STARTS, "cu_seqlens_k": np.array([0, 5, 2, 9], np.int32)}
    with pytest.raises(ArgumentError, match=r"attention_varlen_backward\(\): argument 'cu_seqlens_k'"):
        oa.attention_varlen_backward(*with_results(inputs(packed=True), **STARTS), **bad)


def test_explain_and_repeated_calls() -> None:
    call = with_results(inputs())
    said = oa.explain(oa.attention_backward, *call, causal=True)
    assert said.kernel == "reference (NumPy, CPU)"
    assert isinstance(said.problem, BackwardProblem)
    forward = oa.explain(oa.attention, *call[1:4], causal=True)
    assert said.flops == forward.flops * 5 // 2  # type: ignore[operator]
    assert said.min_bytes == 4 * (2 * 7 * 4 * 8 * 4 + 2 * 9 * 2 * 8 * 4 + 2 * 7 * 4)
    assert "GFLOP" in str(said)
    PLANS.clear()
    for _ in range(3):
        oa.attention_backward(*call)
    assert len(PLANS) == 1
    oa.attention_backward(*call, wanted=("dq",))
    assert len(PLANS) == 2


@pytest.mark.frameworks
def test_jax() -> None:
    """Arrays of JAX on the CPU, with a gradient that is broadcast; they cannot be written to."""
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    x = {name: jax.device_put(y, cpu) for name, y in inputs().items()}
    x["do"] = jax.numpy.ones_like(x["do"])
    call = with_results(x)
    made = oa.attention_backward(*call, wanted=("dk", "dq"))
    expected = oa.attention_backward(*(np.asarray(y) for y in call), wanted=("dk", "dq"))
    for gradient, right in zip(made, expected, strict=True):
        assert isinstance(gradient, jax.Array)
        assert np.array_equal(np.asarray(gradient), right)
    with pytest.raises(ArgumentError, match=r"argument 'dk'.*jax\.Array"):
        oa.attention_backward(*call, dk=jax.numpy.zeros_like(x["k"]))


@pytest.mark.frameworks
def test_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    x = {name: torch.from_numpy(y).bfloat16() for name, y in inputs().items()}
    made = oa.attention_backward(*with_results(x), causal=True)  # type: ignore[arg-type]
    exact = oa.attention_backward(*(y.double() for y in with_results(x)), causal=True)  # type: ignore[arg-type, attr-defined]
    for gradient, right in zip(made, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - right).abs().max() <= 2.0**-8 * right.abs().max()


# As kernels see it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays pass for a GPU's."""
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    monkeypatch.setattr(arrays, "describe", on_gpu)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)


def problem_of(function: str = "attention_backward", **changes: Any) -> BackwardProblem:
    packed = "varlen" in function
    x = inputs(np.float16, packed=packed)
    lse = np.zeros((4, 7) if packed else (2, 4, 7), np.float32)
    objects: dict[str, Any] = dict.fromkeys(arrays_of(function)) | x | {"o": x["q"], "lse": lse}
    fields = {**BackwardOptions("NHD", False, None, None, 0.0, False, ("dq", "dk", "dv"))._asdict()}
    mod = changes.pop("score_mod", None)
    for name, value in changes.items():
        (fields if name in fields else objects)[GIVEN.get(name, name)] = value
    call = call_of(function, tuple(objects.values()), BackwardOptions(**fields), Extras(mod))
    tensors = engine.describe(call, None)
    problem: BackwardProblem = checks.check_backward(call, tensors)
    return problem


@pytest.mark.usefixtures("gpu")
def test_strides_that_kernels_are_told() -> None:
    problem = problem_of()
    assert problem.strides is not None
    assert problem.strides.d_o == problem.strides.dq == problem.forward.strides.o == (224, 32, 8)  # type: ignore[union-attr]
    assert problem.strides.dk == problem.strides.dv == (144, 16, 8)
    assert problem.forward.strides.lse == (28, 7)  # type: ignore[union-attr]
    assert (problem.dlse, problem.forward.lse, problem.forward.tensor_maps) == (False, True, True)
    dk = np.empty((2, 2, 9, 16), np.float16).swapaxes(1, 2)[..., :8]
    o = np.empty((2, 4, 7, 8), np.float16).swapaxes(1, 2)
    dlse = np.empty((4, 2, 7), np.float32).swapaxes(0, 1)
    problem = problem_of(dk=dk, o=o, dlse=dlse, deterministic=True, wanted=("dk", "dv"))
    assert problem.strides is not None
    assert problem.strides.dk == (288, 16, 144)
    assert problem.strides.dlse == (7, 14)
    assert problem.strides.dq == (0, 0, 0)
    assert problem.forward.strides.o == (224, 8, 56)  # type: ignore[union-attr]
    assert (problem.dlse, problem.deterministic, problem.wanted) == (True, True, ("dk", "dv"))
    problem = problem_of("attention_varlen_backward", **STARTS, wanted=("dv", "dq"))
    assert problem.strides is not None
    assert problem.forward.varlen
    assert problem.forward.batch == 3
    assert problem.strides.dq == (0, 32, 8)
    assert problem.forward.strides.lse == (0, 7)  # type: ignore[union-attr]
    assert problem.wanted == ("dq", "dv")
    assert [x.name for x in problem.outputs] == ["dq", "dv"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(2, 1, 7, 9), (9,), (1, 4, 1, 9), (4, 7, 1), (2, 4, 7, 9)])
def test_strides_of_dmask(shape: tuple[int, ...]) -> None:
    problem = problem_of(mask=np.zeros(shape, np.float32), wanted=("dmask",))
    full = (1,) * (4 - len(shape)) + shape
    steps = arrays.contiguous_strides(full)
    assert problem.strides is not None
    assert problem.strides.dmask == tuple(s if n > 1 else 0 for n, s in zip(full, steps, strict=True))
    (output,) = problem.outputs
    assert (output.shape, output.dtype) == (shape, "float32")


@pytest.mark.usefixtures("gpu")
def test_score_mods_that_kernels_are_told() -> None:
    slopes = np.ones(4, np.float32)
    problem = problem_of(score_mod=oa.ScoreMod(TEXT, grad=DERIVATIVE, slopes=slopes))
    mod = problem.forward.score_mod
    assert isinstance(mod, ScoreModProblem)
    assert (mod.expression, mod.grad, mod.arrays[0].name) == (TEXT, DERIVATIVE, "slopes")
    with pytest.raises(UnsupportedError, match="without its derivative"):
        problem_of(score_mod=oa.ScoreMod(TEXT, reference=alibi, reference_grad=alibi_grad, slopes=slopes))


@pytest.mark.usefixtures("gpu")
def test_strides_that_kernels_cannot_read() -> None:
    lse = np.zeros((2, 7, 4), np.float32).swapaxes(1, 2)
    do = np.zeros((2, 7, 4, 8), np.float16)
    for argument, changes in (
        ("lse", {"lse": lse}), ("dlse", {"dlse": lse}), ("do", {"do": np.broadcast_to(np.float16(1), do.shape)}),
        ("do", {"do": np.zeros((2, 7, 4, 9), np.float16)[..., :8]}), ("o", {"o": do[..., ::-1]}),
        ("dq", {"dq": np.zeros((2, 7, 4, 9), np.float16)[..., :8]}),
    ):  # fmt: skip
        with pytest.raises(StrideError, match=f"argument '{argument}'"):
            problem_of(**changes)
    # Rows that repeat can be read by tensor maps too, reversed ones not.
    repeated = problem_of(do=np.broadcast_to(do[:1], do.shape))
    assert repeated.strides is not None
    assert repeated.strides.d_o[0] == 0
    assert repeated.forward.tensor_maps
    assert not problem_of(do=do[:, ::-1]).forward.tensor_maps


@pytest.mark.usefixtures("gpu")
def test_float32_has_no_kernels() -> None:
    with pytest.raises(DtypeError, match="argument 'q': expected float16 or bfloat16 on cuda"):
        problem_of(q=np.zeros((2, 7, 4, 8), np.float32))


def test_arrays_on_two_devices() -> None:
    x = inputs()
    call = with_results(x)
    described = {
        name: arrays.describe(y, name) for name, y in zip(("do", "q", "k", "v", "o", "lse"), call, strict=True)
    }
    described["do"].device = "cuda"
    with pytest.raises(DeviceError, match="argument 'do'"):
        arrays.require_same_device(described[name] for name in ("q", "k", "do"))


def test_names_of_a_programs_operands() -> None:
    """Results have the names of `BackwardProblem.wanted`, whether the caller gives arrays for them or not."""
    problem = BackwardProblem(oa.explain(oa.attention, *with_results(inputs())[1:4]).problem, ("dq", "dv", "dsinks"))
    call = call_of("attention_backward", (None,) * 14, BackwardOptions(*[None] * 6, ()), Extras())
    names = operand_names(call.operation, False, problem)
    assert names == (*ARRAYS, "dq", "dv", "dsinks", "workspace")
    assert len(set(names)) == len(names)


def test_strides_of_an_empty_lse_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy gives strides of 0 to arrays without elements, and a GPU library may do the same."""
    described = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = described(value, name)
        t.device = "cuda"
        return t

    info = runtime.DeviceInfo(0, "Hopper", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(arrays, "describe", on_gpu)
    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    x = np.zeros((0, 7, 4, 8), np.float16)
    lse = np.lib.stride_tricks.as_strided(np.zeros(0, np.float32), (0, 4, 7), (0, 0, 0))
    assert lse.strides == (0, 0, 0)
    assert oa.explain(oa.attention_backward, x, x, x, x, x, lse).problem.forward.batch == 0
