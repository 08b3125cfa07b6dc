"""FBGEMM's int4 rows on the GPU: bytes of append and values of decode against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omniattn.kv.cache import PagedKVCache  # noqa: E402
from omniattn.ops import copy_blocks  # noqa: E402
from omniattn.reference.decode import append_tokens  # noqa: E402
from tests.gpu.decode_cases import Case, Filled, compare  # noqa: E402

pytestmark = pytest.mark.gpu
#: head_dim, group_size.
ROWS = ((128, None), (128, 32), (64, None), (256, 64))


def case(dim: int, group: int | None, **more: Any) -> Case:
    options = {"layout": "fbgemm"} | more.pop("cache_options", {})
    return Case(k_dtype="int4", v_dtype="int4", head_dim=dim, group_size=group, cache_options=options, **more)


def check_bytes(filled: Filled) -> None:
    filled.append()
    host = filled.on_host()
    got = [host.k.copy(), host.v.copy()]
    for plane in (host.k, host.v):
        plane[...] = 0xFF
    k, v = (x.float().cpu().numpy() for x in (filled.k, filled.v))
    at = 0
    for b, n in enumerate(filled.case.lengths):
        table = np.array([b]) if filled.table is None else filled.table[b].cpu().numpy()
        append_tokens(host, k[at : at + n], v[at : at + n], table, 0)
        at += n
    np.testing.assert_array_equal(got[0], host.k)
    np.testing.assert_array_equal(got[1], host.v)


@pytest.mark.parametrize(("dim", "group"), ROWS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_append_and_decode(dim: int, group: int | None, dtype: str) -> None:
    for block_size, heads, kind in ((0, 1, "normal"), (0, 2, "biased"), (16, 4, "normal"), (3, 1, "wild")):
        filled = Filled(case(dim, group, dtype=dtype, heads_kv=heads, block_size=block_size, kind=kind))
        if kind == "wild":  # scales that differ by orders of magnitude, but within fp16
            filled.v.clamp_(-2e4, 2e4)
        check_bytes(filled)
        label = f"{dim} {group} {block_size} {kind}"
        compare(filled.decode(), filled.reference(), filled.case, label)
        compare(filled.decode(deterministic=True), filled.reference(), filled.case, label)


def test_options_and_several_queries() -> None:
    rng = np.random.default_rng(1)
    mean = rng.standard_normal((2, 128)).astype(np.float32)
    scale = np.exp(rng.standard_normal((2, 128))).astype(np.float32)
    for group in (None, 32):
        changes = {"k_mean": mean, "k_channel_scale": scale, "hadamard": True}
        filled = Filled(
            case(128, group, heads_kv=2, q_len=3, kind="biased", cache_options=changes, lengths=(500, 0, 33, 129))
        )
        check_bytes(filled)
        for options in ({}, {"window": (70, 0)}, {"softcap": 10.0}):
            compare(filled.decode(**options), filled.reference(**options), filled.case, f"{group} {options}")


def test_values_that_fp16_cannot_hold_stay_where_they_are() -> None:
    filled = Filled(case(128, 32, lengths=(200, 200), heads_kv=2))
    filled.k[50, 0, 3] = float("nan")
    filled.v[300, 1, 5] = -1e5
    check_bytes(filled)
    o, lse = filled.decode()
    assert torch.isnan(o[0, 0, :4]).all()
    assert torch.isnan(lse[0, :4]).all()
    assert torch.isfinite(o[0, 0, 4:]).all()
    assert torch.isfinite(o[1, 0, :4]).all()
    assert torch.isnan(o[1, 0, 4:, :32]).all()
    assert torch.isfinite(lse[1]).all()


def test_copies_of_blocks() -> None:
    filled = Filled(case(128, None, lengths=(200, 31), block_size=3, heads_kv=3))
    filled.append()
    cache = filled.cache
    assert isinstance(cache, PagedKVCache)
    before = [cache.k.clone(), cache.v.clone()]
    copy_blocks(cache, [(0, 5), (7, 2)])
    for plane, now in zip(before, (cache.k, cache.v), strict=True):
        plane[5], plane[2] = plane[0].clone(), plane[7].clone()
        assert torch.equal(plane, now)
