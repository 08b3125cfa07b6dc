"""``block_table``: K and V in pages of a pool, against packed sequences of the same keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, StrideError, UnsupportedError
from omniattn.launch.attn_fwd import page_rows
from omniattn.launch.structs import ATTN_FWD_SM90
from omniattn.plan import engine
from omniattn.plan.with_cache import plan_varlen
from omniattn.problems import Pages, Target
from omniattn.registry import REGISTRY
from omniattn.runtime.device import DeviceInfo
from omniattn.testing import normal
from omniattn.testing.pages import pools
from tests.unit.launch.launch_fakes import fields_of_record

HEADS, HEADS_KV, DIM = 4, 2, 16


def starts(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class Paged:
    """A call over pages, and the same over packed keys. What no token owns is NaN, entries behind are wild."""

    def __init__(self, pairs: list[tuple[int, int]], page: int, layout: str = "NHD", seed: int = 0) -> None:
        self.layout = layout
        queries, keys = [p[0] for p in pairs], [p[1] for p in pairs]
        self.packed = [normal((sum(keys), HEADS_KV, DIM), s, "float32") for s in (2, 3)]
        made, table = pools(self.packed, keys, page, seed)
        q = normal((sum(queries), HEADS, DIM), 1, "float32")
        self.q = q if layout == "NHD" else np.ascontiguousarray(q.swapaxes(0, 1))
        self.k, self.v = (x if layout == "NHD" else np.ascontiguousarray(x.swapaxes(1, 2)) for x in made)
        self.longest = {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}
        self.given = {
            "cu_seqlens_q": starts(queries), "seqused_k": np.array(keys, np.int32), "block_table": table,
            "layout": layout, **self.longest,
        }  # fmt: skip
        self.starts_k = starts(keys)

    def run(self, **options: Any) -> Any:
        return oa.attention_varlen(self.q, self.k, self.v, **self.given, return_lse=True, **options)

    def expected(self, **options: Any) -> Any:
        k, v = (x if self.layout == "NHD" else x.swapaxes(0, 1) for x in self.packed)
        call = {"cu_seqlens_q": self.given["cu_seqlens_q"], "cu_seqlens_k": self.starts_k, **self.longest}
        return oa.attention_varlen(self.q, k, v, **call, layout=self.layout, return_lse=True, **options)


SOME = Paged([(3, 9), (0, 4), (7, 0), (1, 13)], 4)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_pages(data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=4))
    page, layout = data.draw(st.sampled_from([1, 2, 3, 8, 16])), data.draw(st.sampled_from(["NHD", "HND"]))
    call = Paged(pairs, page, layout, data.draw(st.integers(0, 9)))
    options = {
        "causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.just((3, 1))),
        "softcap": data.draw(st.sampled_from([0.0, 3.0])),
    }  # fmt: skip
    for a, b in zip(call.run(**options), call.expected(**options), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mask_sinks_and_used_queries() -> None:
    sinks = normal((HEADS,), 5, "float32")
    mask = np.random.default_rng(0).random((4, HEADS, 7, 13)) < 0.6
    for a, b in zip(SOME.run(sinks=sinks, mask=mask), SOME.expected(sinks=sinks, mask=mask), strict=True):
        np.testing.assert_array_equal(a, b)
    used = np.array([2, 0, 5, 1], np.int32)
    for a, b in zip(SOME.run(seqused_q=used), SOME.expected(seqused_q=used), strict=True):
        np.testing.assert_array_equal(a, b)


def test_views_of_a_pool_with_k_beside_v() -> None:
    """As vLLM has them: one row for K and V of a token and head."""
    both = np.concatenate((SOME.k, SOME.v), axis=-1)
    k, v = both[..., :DIM], both[..., DIM:]
    made = oa.attention_varlen(SOME.q, k, v, **SOME.given)
    np.testing.assert_array_equal(made, SOME.expected()[0])


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"cu_seqlens_k": SOME.starts_k}, ArgumentError, "'cu_seqlens_k': expected None, because block_table"),
    ({"seqused_k": None}, ArgumentError, r"'seqused_k': expected an int32 array of shape \(batch,\).*received None"),
    ({"seqused_k": np.array([9, 4, 0, 99], np.int32)}, ArgumentError, "'seqused_k': expected from 0 to 24.*99 of seq"),
    ({"block_table": SOME.given["block_table"].astype(np.int64)}, DtypeError, "'block_table': expected int32"),
    ({"block_table": SOME.given["block_table"][:3]}, ShapeError, r"'block_table': expected shape \(4, max_blocks\)"),
    ({"block_table": np.asfortranarray(SOME.given["block_table"])}, StrideError, "'block_table': expected rows of"),
    ({"block_table": SOME.given["block_table"] * 0 - 1}, ArgumentError, "'block_table': expected pages from 0 to 10"),
    ({"precision": "int8"}, UnsupportedError, "block_table with precision='int8'"),
    ({"max_seqlen_k": None}, ArgumentError, "'max_seqlen_k'"),
])  # fmt: skip
def test_errors(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"attention_varlen\(\).*{text}"):
        oa.attention_varlen(SOME.q, SOME.k, SOME.v, **{**SOME.given, **changes})


def test_no_heads_and_no_pages() -> None:
    made = oa.attention_varlen(SOME.q[:, :0], SOME.k[:, :, :0], SOME.v[:, :, :0], **SOME.given)
    assert made.shape == (len(SOME.q), 0, DIM)
    none = {**SOME.given, "seqused_k": np.zeros(4, np.int32)}
    o, lse = oa.attention_varlen(SOME.q, SOME.k[:0], SOME.v[:0], **none, return_lse=True)
    assert not o.any()
    assert np.isneginf(lse).all()


def test_ranks() -> None:
    with pytest.raises(ShapeError, match=r"'k': expected 4 dimensions \(blocks, tokens, heads, head_dim\)"):
        oa.attention_varlen(SOME.q, SOME.k[0], SOME.v[0], **SOME.given)
    call = {name: x for name, x in SOME.given.items() if name not in ("block_table", "seqused_k")}
    with pytest.raises(ShapeError, match=r"'k': expected 3 dimensions \(rows, heads, head_dim\)"):
        oa.attention_varlen(SOME.q, SOME.k, SOME.v, cu_seqlens_k=SOME.starts_k, **call)


def test_rows_of_a_copy() -> None:
    """They divide pages and tiles, so that none reaches into the next page."""
    for page in (1, 2, 3, 12, 16, 24, 48, 64, 100, 256, 784):
        for block_n in (32, 64, 96, 128):
            rows = page_rows(Pages(page, 9, 9, 9), block_n)
            assert page % rows == block_n % rows == 0
            assert rows & (rows - 1) == 0
            assert page % (2 * rows) or block_n % (2 * rows)


@pytest.fixture(params=[(9, 0), (8, 0)], ids=["9.0", "8.0"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    describe = engine.describe

    def on_gpu(call: Any, raw: Any) -> dict[str, Any]:
        tensors = describe(call, raw)
        for i, t in enumerate(tensors.values()):
            t.device, t.framework, t.ptr = "cuda", "torch", 0x10000 * (i + 1)
        return tensors

    monkeypatch.setattr(engine, "describe", on_gpu)
    monkeypatch.setattr(oa.runtime, "has_tensor_maps", lambda: request.param == (9, 0))
    info = DeviceInfo(0, "Test GPU", request.param, 132, 227 << 10, 50 << 20, (13, 0))
    monkeypatch.setattr(oa.runtime, "device_info", lambda ordinal: info)
    cc: tuple[int, int] = request.param
    return cc


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"softcap": 5.0}, {"mask": np.ones((9, 99), bool)}, {"window": (64, 0)},
    {"return_lse": True, "sinks": np.zeros(4, np.float16)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 300])
def test_every_call_has_a_kernel_over_pages(
    gpu: tuple[int, int], options: dict[str, Any], head_dim: int, queries: int
) -> None:
    q = np.zeros((4 * queries, 4, head_dim), np.float16)
    pool = np.zeros((40, 16, 2, head_dim), np.float16)
    table, used = np.zeros((4, 7), np.int32), np.full(4, 99, np.int32)
    made = oa.explain(
        q, pool, pool, cu_seqlens_q=starts([queries] * 4), seqused_k=used, block_table=table, max_seqlen_q=queries,
        max_seqlen_k=99, **{**options, **({"mask": np.ones((queries, 99), bool)} if "mask" in options else {})},
    )  # fmt: skip
    (spec,) = [spec for spec in REGISTRY if spec.name == made.kernel]
    if queries == 1 and "mask" not in options:
        assert spec.op == "decode"
        return
    # On Hopper it may be faster to copy keys and values one behind the other first.
    assert spec.paged or (gpu == (9, 0) and any(x.kernel.startswith("kv_dequantize") for x in made.launches))
    assert spec.arch_specific == (gpu == (9, 0) and "mask" not in options)


def test_packed_queries_over_pages_run_as_over_a_cache(gpu: tuple[int, int]) -> None:
    """Few queries a sequence on the kernels of `decode`, prompts and single tokens on both; arrays by their names."""
    pool = np.zeros((40, 16, 2, 64), np.float16)
    table, used = np.zeros((9, 7), np.int32), np.full(9, 99, np.int32)

    def launches(counts: list[int], k: Any = pool, v: Any = pool, **options: Any) -> list[tuple[str, set[str]]]:
        q = np.zeros((sum(counts) + 3, 4, 64), np.float16)
        made = oa.explain(
            q, k, v, cu_seqlens_q=starts(counts), seqused_k=used, block_table=table, max_seqlen_q=max(counts),
            max_seqlen_k=99, **{"causal": True, **options},
        )  # fmt: skip
        records = plan_varlen(made.problem, Target(gpu, 227 << 10, 132), None).records
        return [(r.spec.op, {p.operand for p in (*r.pointers, *r.tensor_maps)} - {"workspace"}) for r in records]

    arrays = {"q", "k", "v", "o", "cu_seqlens_q", "seqused_k", "block_table"}
    for counts, ops in (
        ([1] * 9, ["decode", "decode_combine"]),
        ([16, 0, 3, *[1] * 6], ["decode", "decode_combine"]),
        ([300, *[1] * 8], ["decode", "attention", "decode_combine"]),
    ):
        found = launches(counts, return_lse=True)
        assert [op for op, _ in found] == ops
        assert all(names <= arrays | {"lse"} for _, names in found)
        assert all(names == arrays | {"lse"} for _, names in found[:1])
    apart = np.zeros((40, 16, 2, 128), np.float16)[..., :64]
    for counts, more in (
        ([1] * 9, {"mask": np.ones((1, 99), bool)}),
        ([2] * 9, {"causal": False}),
        ([1] * 9, {"k": apart}),
        ([1] * 9, {"score_mod": oa.ScoreMod("score")}),
        ([300, *[1] * 8], {"causal": False}),
        ([300, *[250] * 8], {}),
    ):
        assert all("decode" not in op for op, _ in launches(counts, **more))
    assert [op for op, _ in launches([1] * 9, k=apart, v=apart)] == ["decode", "decode_combine"]


@pytest.mark.parametrize("longest", [0, 1, 10**6])
def test_keys_are_none_only_where_no_page_can_be_read(gpu: tuple[int, int], longest: int) -> None:
    """A graph is replayed with other lengths than the longest that it was captured with."""
    for blocks, expected in ((40, 2 * min(longest or 7 * 16, 7 * 16)), (0, 0)):
        q, pool = np.zeros((600, 4, 64), np.float16), np.zeros((blocks, 16, 2, 64), np.float16)
        made = oa.explain(
            q, pool, pool, cu_seqlens_q=starts([300, 300]), seqused_k=np.zeros(2, np.int32), max_seqlen_q=300,
            max_seqlen_k=longest, block_table=np.zeros((2, 7), np.int32),
        )  # fmt: skip
        assert made.problem.seqlen_k == expected
        assert made.problem.pages.capacity == (7 * 16 if blocks else 0)


def test_bounds_are_those_of_a_sequence(gpu: tuple[int, int]) -> None:
    """Positions are counted within a sequence, however many keys all of them have; pages are counted in 32 bits."""
    mod = oa.ScoreMod("score + 0.1f * (q - k)")
    q, table = np.zeros((128, 4, 128), np.float16), np.zeros((128, 4096), np.int32)
    call = {
        "cu_seqlens_q": starts([1] * 128), "seqused_k": np.ones(128, np.int32), "max_seqlen_q": 1,
        "max_seqlen_k": 196_608, "block_table": table,
    }  # fmt: skip

    def explained(blocks: int) -> Any:
        pool = np.broadcast_to(np.zeros((1, 48, 2, 128), np.float16), (blocks, 48, 2, 128))
        return oa.explain(q, pool, pool, score_mod=mod, **call)

    assert "paged" in explained(40).kernel
    with pytest.raises(ShapeError, match=r"'k': expected at most 2147483136 pages, received 2147483653"):
        explained(2**31 + 5)


def test_copies_of_a_page_a_sequence_are_whole_tiles() -> None:
    assert page_rows(Pages(1001, 8, 1, 1), 128) == 128
    assert page_rows(Pages(1001, 8, 2, 2), 128) == 1


@pytest.mark.parametrize("gpu", [(9, 0)], indirect=True)
def test_what_the_kernel_is_told(gpu: tuple[int, int]) -> None:
    from omniattn.plan.attention import plan_attention
    from omniattn.plan.tuning import target_of

    q = np.zeros((600, 4, 128), np.float16)
    pool = np.zeros((40, 48, 2, 256), np.float16)
    table = np.zeros((2, 10), np.int32)[:, :7]
    call = {"cu_seqlens_q": starts([300, 300]), "seqused_k": np.full(2, 300, np.int32), "max_seqlen_q": 300}
    made = oa.explain(q, pool[..., :128], pool[..., 128:], block_table=table, max_seqlen_k=300, **call)
    problem = made.problem
    assert (problem.pages, problem.seqlen_k) == (Pages(48, 40, 7, 10), 600)
    target = target_of(oa.runtime.device_info(0))
    launches = plan_attention(problem, target, "attn_fwd_sm90_fp16_d128_m128n128_varlen_paged")
    (record,) = launches.records
    found = fields_of_record(record, ATTN_FWD_SM90)
    assert (found["fwd.page_size"], found["fwd.page_rows_log2"], found["fwd.table_stride"]) == (48, 4, 10)
    assert (found["fwd.seqlen_k"], found["fwd.cu_seqlens_k"]) == (7 * 48, None)
    assert found["fwd.block_table"].operand == "block_table"
    k = found["map_k"]
    assert (k.dims, k.box) == ((128, 48, 2, 40), (64, 16, 1, 1))
    assert k.strides_bytes == (2 * 512, 2 * 256, 2 * 48 * 512)
