"""``decode(shared_prefix=...)`` on a GPU where some sequences pause."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.decode_cases import Case, Filled, compare

pytestmark = pytest.mark.gpu

PREFIX = 320


@pytest.mark.parametrize("k_dtype", ["io", "int4"])
@pytest.mark.parametrize(("q_len", "heads_q", "heads_kv"), [(1, 8, 1), (3, 6, 2)])
@pytest.mark.parametrize("paused", [(0,), (0, 1), (2,), (0, 1, 2, 3)], ids=str)
def test_sequences_that_pause_see_nothing_and_the_others_all(
    k_dtype: str, q_len: int, heads_q: int, heads_kv: int, paused: tuple[int, ...]
) -> None:
    """Lengths and blocks of the first sequence are no others': with it paused, the others lost the prefix."""
    case = Case(
        k_dtype=k_dtype, v_dtype=k_dtype, lengths=(460, 323, 700, 900), heads_q=heads_q, heads_kv=heads_kv, q_len=q_len,
        block_size=16,
    )  # fmt: skip
    filled = Filled(case)
    filled.append()
    assert filled.table is not None
    filled.table[:, : PREFIX // 16] = filled.table[0, : PREFIX // 16].clone()
    for b in paused:
        filled.lens[b] = 0
        filled.table[b] = -1
    compare(filled.decode(shared_prefix=PREFIX), filled.reference(), case, f"{paused} pause")
