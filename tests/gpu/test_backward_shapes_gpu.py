"""The backward on a GPU: lengths, heads, head_dims, packed sequences."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from .backward_cases import check, make, mask_of, run  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("backward_family")]

DTYPES = ("float16", "bfloat16")


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
