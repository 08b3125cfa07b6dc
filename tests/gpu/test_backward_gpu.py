"""The backward on a GPU: every gradient against float64, identities, special values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import omniattn as oa  # noqa: E402

from .backward_cases import Problem, check, compare, equal_bits, make, naive, run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backward_family")]

DTYPES = ("float16", "bfloat16")


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


_HIDES_ROWS: dict[str, dict[str, Any]] = {
    "causal, fewer keys": {"causal": True},
    "window": {"window": (20, 10)},
    "packed": {"lengths": ([200, 90, 70], [75, 0, 70]), "causal": True},
    "keys": {"mask": np.arange(190) >= np.array([190, 70]).reshape(2, 1, 1, 1), "causal": True, "seqlen_q": 190},
    "mask": {"mask": (np.arange(300)[:, None] // 65 % 2 > 0) & (np.arange(190) % 3 > 0)},
    "bias": {"mask": np.where(np.arange(300)[:, None] % 7 > 0, np.ones(190), -np.inf).astype(np.float32)},
    "softcap": {"causal": True, "softcap": 10.0},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("hides", _HIDES_ROWS)
def test_do_of_a_row_that_attends_to_nothing_may_be_anything(hides: str, head_dim: int, deterministic: bool) -> None:
    options = {"seqlen_q": 300, "seqlen_k": 190, **_HIDES_ROWS[hides]}
    problem = make(batch=2, heads_q=4, heads_kv=2, head_dim=head_dim, dlse=True, **options)
    x = problem.arrays
    forward = oa.attention_varlen if problem.packed else oa.attention
    _, lse = forward(x["q"], x["k"], x["v"], return_lse=True, **problem.forward_options)
    dead = torch.isneginf(lse)
    assert dead.any()
    assert not dead.all()
    rows = dead.movedim(-2, -1)[..., None]
    x["do"] = x["do"].masked_fill(rows, 0.0)
    wanted = ("dq", "dk", "dv")
    clean = run(problem, wanted, deterministic=deterministic)
    for value in (torch.nan, torch.inf):
        x["do"] = x["do"].masked_fill(rows, value)
        x["dlse"] = x["dlse"].masked_fill(dead, value)
        made = run(problem, wanted, deterministic=deterministic)
        # Sums of dq come in another order at each run, unless they shall not.
        assert all(torch.equal(made[name], clean[name]) for name in (wanted if deterministic else ("dk", "dv")))
        assert (made["dq"].double() - clean["dq"].double()).abs().max() <= 1e-2 * clean["dq"].abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_scale_is_as_accurate(dtype: str) -> None:
    """Keys with a mean: dq is what is left of sums that cancel, and delta, of o in 16 bits, decides its error."""
    errors = {}
    for scale in (0.125, -0.125):
        problem = make(
            batch=8, heads_q=4, seqlen_q=4, seqlen_k=587, head_dim=128, dtype=dtype, softmax_scale=scale, seed=8
        )
        for name in ("q", "k", "v", "do"):
            generator = torch.Generator(problem.arrays[name].device).manual_seed(ord(name[0]))
            problem.arrays[name].uniform_(generator=generator)
        exact, made = naive(problem, torch.float64), run(problem)
        errors[scale] = {n: ((made[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in exact}
    for name, limit in (("dq", 0.03), ("dk", 1e-3), ("dv", 1e-3)):
        for scale in errors:
            assert errors[scale][name] <= (limit if dtype == "float16" else 10 * limit), (name, errors)
        assert errors[-0.125][name] <= 1.3 * errors[0.125][name], (name, errors)


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


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_head_asks_for_a_key(head_dim: int) -> None:
    """Without query heads dk and dv are zero."""
    q, k = (torch.ones(2, 40, heads, head_dim, device="cuda", dtype=torch.bfloat16) for heads in (0, 2))
    for kv in (k, k[:, :, :0]):
        o, lse = oa.attention(q, kv, kv, return_lse=True)
        dq, dk, dv = oa.attention_backward(q, q, kv, kv, o, lse)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, kv.shape, kv.shape)
        assert not dk.any()
        assert not dv.any()


def test_an_lse_that_is_nan() -> None:
    """Gradients of the query and of keys that it sees are not finite; those of keys behind it are."""
    q, k, v, do = (torch.randn(1, 130, 2, 64, device="cuda").bfloat16() for _ in range(4))
    o, lse = oa.attention(q, k, v, causal=True, return_lse=True)
    lse[0, 1, 70] = float("nan")
    dq, dk, dv = oa.attention_backward(do, q, k, v, o, lse, causal=True)
    assert not dq[0, 70, 1].isfinite().any()
    assert dq[0, :70].isfinite().all()
    for gradient in (dk, dv):
        assert not gradient[0, :71, 1].isfinite().any()
        assert gradient[0, 71:, 1].isfinite().all()
        assert gradient[0, :, 0].isfinite().all()
