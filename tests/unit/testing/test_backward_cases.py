"""The bounds of the GPU tests of the backward, on the CPU: its results pass, and wrong ones do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from tests.gpu import backward_cases as cases  # noqa: E402


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")


PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "dlse": True, "layout": "HND"},
    "softcap": {"softcap": 3.0, "dtype": "float16", "heads_kv": 1},
    "sinks, mask": {
        "sinks": [0.5, -1.0],
        "mask": np.random.default_rng(0).standard_normal((130, 1)).astype(np.float32),
    },
    "one key": {"window": (0, 0), "dtype": "float16"},
    "negative scale": {"softmax_scale": -0.3},
    "packed": {"lengths": ([60, 0, 33], [40, 7, 50]), "rest": 5, "causal": True},
    "biased": {"kind": "channel_bias", "causal": True},
    "one query": {"seqlen_q": 1, "seqlen_k": 1, "sinks": [0.0, 1.0], "dtype": "float16"},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_right_results_pass(name: str) -> None:
    cases.check(cases.make(**PROBLEMS[name]), name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_lost_tile_is_found_where_most_rows_attend_to_one_key(head_dim: int, dtype: str) -> None:
    """Where the slack of dk is largest: 32 of 200 queries are left out."""
    problem = cases.make(
        kind="channel_bias", seqlen_q=200, seqlen_k=260, head_dim=head_dim, dtype=dtype, causal=True, seed=4
    )
    exact, plain = cases.naive(problem, torch.float64), cases.naive(problem, problem.arrays["q"].dtype)
    x = problem.arrays
    o, lse = cases.oa.attention(x["q"], x["k"], x["v"], causal=True, return_lse=True)
    part, seen = slice(96, 128), 128 + 60
    (of_tile,) = cases.oa.attention_backward(
        x["do"][:, part], x["q"][:, part], x["k"][:, :seen], x["v"][:, :seen], o[:, part], lse[:, :, part],
        causal=True, wanted=("dk",),
    )  # fmt: skip
    whole = cases.run(problem)["dk"]
    broken = whole.double()
    broken[:, :seen] -= of_tile.double()
    slack = cases.slack_of(problem, "dk")
    cases.compare("dk", whole, exact["dk"], plain["dk"], dtype, "dk", 2.0, slack)
    with pytest.raises(AssertionError):
        cases.compare("dk", broken.to(whole.dtype), exact["dk"], plain["dk"], dtype, "dk", 2.0, slack)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("damage", ["a lost tile", "a tile twice", "one element", "NaN", "no D", "a lost head"])
def test_wrong_results_do_not(damage: str, dtype: str) -> None:
    """A tile of 64 of 1024 keys, small beside the largest element of dq, is found by the other bounds."""
    problem = cases.make(seqlen_q=256, seqlen_k=1024, heads_q=2, dtype=dtype)
    exact, plain = cases.naive(problem, torch.float64), cases.naive(problem, problem.arrays["q"].dtype)
    x = problem.arrays
    tile = {**x, "k": x["k"][:, :64], "v": x["v"][:, :64]}
    o, lse = cases.oa.attention(x["q"], x["k"], x["v"], return_lse=True)
    whole = cases.run(problem)["dq"].double()
    (of_tile,) = cases.oa.attention_backward(tile["do"], tile["q"], tile["k"], tile["v"], o, lse, wanted=("dq",))
    (no_delta,) = cases.oa.attention_backward(x["do"], x["q"], x["k"], x["v"], o * 0, lse, wanted=("dq",))
    broken = {
        "a lost tile": whole - of_tile.double(), "a tile twice": whole + of_tile.double(), "one element": whole.clone(),
        "NaN": whole.clone(), "no D": no_delta.double(), "a lost head": whole.clone(),
    }[damage].to(x["q"].dtype)  # fmt: skip
    if damage == "one element":
        broken[0, 100, 1, 5] += 0.5 * whole.abs().max()
    if damage == "NaN":
        broken[0, 100, 1, 5] = torch.nan
    if damage == "a lost head":
        broken[:, :, 1] = 0

    def compare(gradient: Any) -> None:
        slack = cases.slack_of(problem, "dq")
        cases.compare("dq", gradient, exact["dq"], plain["dq"], dtype, "dq", 2.0, slack)

    compare(whole.to(x["q"].dtype))
    with pytest.raises(AssertionError):
        compare(broken)
