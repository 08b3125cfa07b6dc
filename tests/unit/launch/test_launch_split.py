"""Keys split over CTAs, without a GPU: records carried out in NumPy as the kernels do it, against the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from omniattn.errors import ArgumentError
from omniattn.launch import attn_fwd_split
from omniattn.launch.structs import ATTN_FWD_SPLIT_MODS_SM90, ATTN_FWD_SPLIT_SM90
from omniattn.plan.attention import plan_attention
from omniattn.problems import AttentionProblem, AttentionStrides, Pages, Target
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.problems.split import ONE_HEAD, SplitKV, gqa_packing
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.runtime.record import LaunchRecord, TensorMap
from omniattn.select import candidates, ranked
from omniattn.testing.cases import cases_for
from tests.unit.launch.launch_fakes import fields_of_merge, fields_of_record
from tests.unit.select.shape_plans import planned

HOPPER = Target((9, 0), 227 << 10, 132)
AMPERE, BLACKWELL = Target((8, 0), 163 << 10, 108), Target((10, 0), 227 << 10, 148)
SPLIT = [
    spec for spec in REGISTRY if spec.op == "attention_split" and not spec.quantized and spec.sequences != "packed"
]
SPLIT_SM90 = [spec for spec in SPLIT if spec.arch_specific and not spec.score_mods]
COMBINE = by_name("attn_combine_sm80_fp16")
#: Small tiles, so that small problems have many; kernels of such tiles do not exist.
SMALL = dataclasses.replace(by_name("attn_fwd_sm90_fp16_d64_m128n128_split"), block_m=16, block_n=8)


def own_strides(shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """Strides (batch, seq, head) of a contiguous array of logical shape (batch, seq, heads, head_dim); 0 of one."""
    b, s, h, d = shape
    found = (s * h * d, h * d, d) if layout == "NHD" else (s * h * d, d, s * d)
    b_, s_, h_ = (0 if n == 1 else x for n, x in zip((b, s, h), found, strict=True))
    return b_, s_, h_


def problem_of(
    batch: int = 1, sq: int = 5, sk: int = 64, hq: int = 4, hk: int = 2, d: int = 8, left: int = -1, right: int = -1,
    layout: str = "NHD", sinks: str = "none", dtype: str = "float16", **changes: Any,
) -> AttentionProblem:  # fmt: skip
    q, kv = own_strides((batch, sq, hq, d), layout), own_strides((batch, sk, hk, d), layout)
    strides = AttentionStrides(q, kv, kv, q, (0 if batch == 1 else hq * sq, 0 if hq == 1 else sq), (0, 0, 0, 0))
    plain = AttentionProblem(
        dtype, batch, sq, sk, hq, hk, d, left, right, 0.25, 0.0, "none", sinks, False, lse=True, layout=layout,
        strides=strides,
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def box_of(m: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """What a copy brings from flat ``memory`` of 2-byte elements: rows of the box, zeros outside the tensor."""
    grids = np.meshgrid(*(np.arange(n) + c for n, c in zip(m.box[::-1], coordinates[::-1], strict=True)), indexing="ij")
    strides = (2, *m.strides_bytes)[::-1]
    inside = np.ones(grids[0].shape, bool)
    at = np.zeros(grids[0].shape, np.int64)
    for index, extent, stride in zip(grids, m.dims[::-1], strides, strict=True):
        inside &= (index >= 0) & (index < extent)
        at += index * stride
    found = np.where(inside, memory[np.where(inside, at // 2, 0)], 0.0)
    return found.reshape(-1, m.box[0])


def visible(row: int, sq: int, sk: int, left: int, right: int) -> tuple[int, int]:
    center = row + sk - sq
    lo = 0 if left < 0 else max(min(center - left, sk), 0)
    return lo, sk if right < 0 else max(min(center + right + 1, sk), 0)


def items_of(f: dict[str, Any], ctas: int) -> list[int]:
    """PersistentItems: every CTA's items, round after round; every second round runs backwards."""
    found = []
    for cta in range(ctas):
        begin, backwards = 0, False
        while (item := begin + (ctas - 1 - cta if backwards else cta)) < f["tiles.num_items"]:
            found.append(item)
            begin, backwards = begin + ctas, not backwards
    return found


def attend(
    spec: KernelSpec, record: LaunchRecord, memory: dict[str, np.ndarray], workspace: np.ndarray, key_counts: np.ndarray
) -> None:
    """attn_fwd_sm90 with SPLIT_KEYS. key_counts: [batch, head, row, key], how often each pair was looked at."""
    f = fields_of_record(record, ATTN_FWD_SPLIT_SM90)
    map_q, map_k, map_v = (next(m for m in record.tensor_maps if m.operand == x) for x in "qkv")
    pack, splits, queries = (f[f"tiles.{name}"] for name in ("pack", "num_splits", "num_queries"))
    rows = f["fwd.seqlen_q"]
    sk, d, heads, blocks = f["fwd.seqlen_k"], f["fwd.head_dim"], f["fwd.num_q_heads"], f["fwd.num_m_blocks"]
    window = (f["fwd.window_left"], f["fwd.window_right"])
    group = heads // f["fwd.num_kv_heads"]
    assert map_q.box[1] * map_q.box[2] == spec.block_m
    o_at, ml_at = f["partial_o"].offset // 4, f["partial_ml"].offset // 4
    c = f["fwd.softmax_scale"] * np.log2(np.e)
    seen_items = items_of(f, record.grid[0])
    assert sorted(seen_items) == list(range(f["tiles.num_items"]))
    for item in seen_items:
        per_head = blocks * splits
        head = item // per_head
        block = per_head - 1 - (item - head * per_head)
        split, m0 = block // blocks, block % blocks * spec.block_m
        batch, head = divmod(head, heads)
        top = visible(m0 // pack, queries, sk, *window)
        bottom = visible((min(m0 + spec.block_m, rows) - 1) // pack, queries, sk, *window)
        first, end = top[0] // spec.block_n, -(-bottom[1] // spec.block_n)
        each, rest = divmod(max(end - first, 0), splits)
        first += split * each + min(split, rest)
        end = first + each + (split < rest)
        q = np.concatenate(
            [box_of(map_q, memory["q"], (x, 0, m0 // pack, head, batch)) for x in range(0, d, map_q.box[0])], axis=1
        )[:, :d]
        m2, total, o = np.full(spec.block_m, -3e38), np.zeros(spec.block_m), np.zeros((spec.block_m, d))
        seen = np.array([visible((m0 + r) // pack, queries, sk, *window) for r in range(spec.block_m)])
        exist = np.flatnonzero(m0 + np.arange(spec.block_m) < rows)
        for n in range(end - 1, first - 1, -1):
            k, v = (
                np.concatenate(
                    [box_of(m, memory[x], (y, n * spec.block_n, head // group, batch)) for y in range(0, d, 64)], axis=1
                )[:, :d]
                for x, m in (("k", map_k), ("v", map_v))
            )
            s = q @ k.T * c
            keys = n * spec.block_n + np.arange(spec.block_n)
            shown = (keys >= seen[:, :1]) & (keys < seen[:, 1:])
            s[~shown] = -np.inf
            inside = keys < sk  # no key behind the last one is shown
            key_counts[batch, head, (m0 + exist)[:, None], keys[inside]] += shown[exist][:, inside]
            base = np.maximum(m2, s.max(axis=1))
            p = np.exp2(s - base[:, None])
            alpha = np.exp2(m2 - base)
            m2, total, o = base, total * alpha + p.sum(axis=1), o * alpha[:, None] + p @ v
        place = (batch * heads + head) * splits + split
        for r in range(min(spec.block_m, rows - m0)):
            at = place * rows + m0 + r
            spot = slice(o_at + at * d, o_at + at * d + d)
            assert np.isnan(workspace[spot]).all()
            assert np.isnan(workspace[ml_at + 2 * at])
            workspace[spot] = o[r]
            workspace[ml_at + 2 * at : ml_at + 2 * at + 2] = m2[r], total[r]


def combine(record: LaunchRecord, workspace: np.ndarray, o: np.ndarray, lse: np.ndarray, sinks: Any) -> None:
    """attn_combine_sm80; o and lse are flat."""
    f = fields_of_merge(record)
    o_at, ml_at = f["partial_o"].offset // 4, f["partial_ml"].offset // 4
    d, chunks, rows, splits = f["head_dim"], f["head_dim"] // 4, f["rows"], f["num_splits"]
    own = 1 << f["threads_log2"]
    assert 32 <= own <= record.threads == 256
    columns = [x * own + t for x in range(record.grid[0]) for t in range(own)]
    assert set(range(f["num_columns"])) <= set(columns)
    for column in columns:
        if column >= f["num_columns"]:
            continue
        flat, chunk = divmod(column, chunks)
        place, row = divmod(flat, rows)
        at = place * splits * rows + row + np.arange(splits) * rows
        ml = workspace[ml_at + 2 * at[:, None] + np.arange(2)]
        part = workspace[o_at + at[:, None] * d + chunk * 4 + np.arange(4)]
        batch, query = place // f["heads"], row // f["pack"]
        if row % f["pack"] >= f["pack_heads"]:
            continue
        head = place % f["heads"] * f["pack_heads"] + row % f["pack"]
        sink = -3e38 if sinks is None else sinks[head] * np.log2(np.e)
        top = max(ml[:, 0].max(), sink)
        weight = np.exp2(ml[:, 0] - top)
        below, total = (ml[:, 1] * weight).sum(), (part * weight[:, None]).sum(axis=0)
        denominator = below if sinks is None else below + np.exp2(sink - top)
        to = batch * f["o_stride_b"] + query * f["o_stride_s"] + head * f["o_stride_h"] + chunk * 4
        assert np.isnan(o[to : to + 4]).all()
        o[to : to + 4] = total / denominator if denominator else 0.0
        if chunk == 0:
            if f["partial_lse"] is not None:
                own_ml = workspace[f["partial_lse"].offset // 4 + 2 * at[:, None] + np.arange(2)]
                top = max(own_ml[:, 0].max(), sink)
                below = (own_ml[:, 1] * np.exp2(own_ml[:, 0] - top)).sum()
                denominator = below if sinks is None else below + np.exp2(sink - top)
            with np.errstate(divide="ignore"):
                value = np.log(2) * top + np.log(denominator) if denominator else -np.inf
            lse[batch * f["lse_stride_b"] + head * f["lse_stride_h"] + query] = value


def carried_out(p: AttentionProblem, spec: KernelSpec, splits: int) -> None:
    """Both records of a split in NumPy against the definition, in float64."""
    heads, pack = pack_gqa = gqa_packing(p, spec.block_m)
    (main, merged), num_bytes = attn_fwd_split.build(spec, COMBINE, p, HOPPER, pack_gqa, SplitKV(splits))
    rng = np.random.default_rng(p.seqlen_q * 1000 + splits)
    s = p.strides
    assert s is not None

    def flat(x: np.ndarray) -> np.ndarray:
        return (x if p.layout == "NHD" else x.transpose(0, 2, 1, 3)).ravel()

    q = rng.standard_normal((p.batch, p.seqlen_q, p.num_q_heads, p.head_dim))
    k, v = (rng.standard_normal((p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim)) for _ in range(2))
    sinks = rng.standard_normal(p.num_q_heads) if p.sinks != "none" else None
    workspace = np.full(num_bytes // 4, np.nan)
    o, lse = np.full(q.size, np.nan), np.full(p.batch * p.num_q_heads * p.seqlen_q, np.nan)
    counts = np.zeros((p.batch, p.num_q_heads // heads, p.seqlen_q * pack, p.seqlen_k), int)
    attend(spec, main, {"q": flat(q), "k": flat(k), "v": flat(v)}, workspace, counts)
    combine(merged, workspace, o, lse, sinks)
    group = p.num_q_heads // p.num_kv_heads
    wanted, wanted_lse = np.full_like(o, np.nan), np.full_like(lse, np.nan)  # compared as a whole, which is quicker
    for b in range(p.batch):
        for h in range(p.num_q_heads):
            for i in range(p.seqlen_q):
                lo, hi = visible(i, p.seqlen_q, p.seqlen_k, p.window_left, p.window_right)
                of_row = counts[b, h // heads, i * pack + h % heads]
                assert (of_row[lo:hi] == 1).all()
                assert of_row.sum() == max(hi - lo, 0)
                scores = k[b, lo:hi, h // group] @ q[b, i, h] * p.softmax_scale
                terms = np.exp(scores)
                total = terms.sum() + (0.0 if sinks is None else np.exp(sinks[h]))
                expected = terms @ v[b, lo:hi, h // group] / total if total else np.zeros(p.head_dim)
                at = b * s.o[0] + i * s.o[1] + h * s.o[2]
                wanted[at : at + p.head_dim] = expected
                wanted_lse[b * s.lse[0] + h * s.lse[1] + i] = np.log(total) if total else -np.inf
    assert not np.isnan(wanted).any()
    assert not np.isnan(wanted_lse).any()
    np.testing.assert_allclose(o, wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 9, 40])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (13, 0), (5, 6), (0, 0)])
def test_every_visible_key_counts_once(splits: int, window: tuple[int, int]) -> None:
    """More splits than tiles too; more queries than keys, whose first rows see nothing."""
    left, right = window
    for sq, sk, hq, hk in ((5, 61, 4, 2), (1, 70, 8, 1), (33, 20, 2, 2), (7, 64, 6, 2), (16, 8, 3, 1)):
        carried_out(problem_of(2, sq, sk, hq, hk, left=left, right=right), SMALL, splits)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sinks", ["none", "float32"])
def test_layouts_sinks_and_wide_heads(layout: str, sinks: str) -> None:
    carried_out(problem_of(2, 3, 40, 4, 1, d=72, right=0, layout=layout, sinks=sinks), SMALL, 3)
    carried_out(problem_of(1, 1, 30, 1, 1, d=64, layout=layout, sinks=sinks), SMALL, 4)


def test_a_split_of_the_real_tiles() -> None:
    carried_out(problem_of(1, 9, 300, 16, 1, d=64, right=0), by_name("attn_fwd_sm90_fp16_d64_m128n128_split"), 2)


# Plans


#: Few queries on many keys: (batch, query heads, kv heads, queries, keys).
FEW = [(1, 32, 8, 16, 32768), (1, 32, 8, 64, 32768), (1, 32, 8, 128, 32768), (1, 16, 16, 256, 65536),
       (8, 32, 8, 32, 8192), (1, 32, 8, 1, 32768)]  # fmt: skip


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("extents", FEW)
def test_few_queries_are_split(extents: tuple[int, ...], right: int) -> None:
    """By the model in a part of the time: what is launched then."""
    b, hq, hk, sq, sk = extents
    p = problem_of(b, sq, sk, hq, hk, d=128, right=right, dtype="bfloat16")
    (us, first), *others = ranked(p, HOPPER)
    assert first.row.op == "attention_split"
    assert us < 0.9 * min(time for time, way in others if way.row.op == "attention" and way.row.arch_specific)
    launches = planned(p, HOPPER, lambda way: way.row in SPLIT_SM90)
    spec, (main, *merging) = launches.selection.spec, launches.records
    assert (spec.op, spec.dtype, spec.head_dim) == ("attention_split", "bfloat16", 128)
    assert main.spec is spec
    merges = fields_of_record(main, ATTN_FWD_SPLIT_SM90)["tiles.num_splits"] > 1
    assert [r.spec.op for r in merging] == [x.spec.op for x in launches.others] == ["attention_combine"] * merges
    assert [r.overlap for r in launches.records] == [False, True][: len(launches.records)]
    assert main.num_ctas <= HOPPER.sm_count * spec.ctas_per_sm


@pytest.mark.parametrize("changes", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}], ids=str)
def test_what_no_split_serves_is_not_split(changes: dict[str, Any]) -> None:
    p = dataclasses.replace(problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16"), **changes)
    assert {way.row.op for way in candidates(p, HOPPER)} == {"attention"}
    with pytest.raises(ArgumentError):
        plan_attention(p, HOPPER, "attn_fwd_sm90_bf16_d128_m128n128_split")


def test_used_rows_of_packed_sequences_change_no_choice() -> None:
    """Of ``seqused_k``: all keys may be used."""
    whole = problem_of(3, 16, 32768, 32, 8, 128, varlen=True, max_seqlen_q=16, max_seqlen_k=32768)
    assert candidates(dataclasses.replace(whole, used=(True, True)), HOPPER) == candidates(whole, HOPPER)


@pytest.mark.parametrize("used", [False, True])
def test_queries_that_are_not_used_are_not_merged(used: bool) -> None:
    """They have no partial results: no tile is theirs."""
    whole = problem_of(3, 16, 4096, 8, 8, 128, varlen=True, max_seqlen_q=16, max_seqlen_k=4096)
    p, spec = dataclasses.replace(whole, used=(used, False)), by_name("attn_fwd_sm80_fp16_d128_split")
    (_, merged), _ = attn_fwd_split.build(spec, COMBINE, p, HOPPER, ONE_HEAD, SplitKV(3))
    fields = fields_of_merge(merged)
    assert (fields["cu_seqlens_q"].operand, fields["rows"]) == ("cu_seqlens_q", p.seqlen_q)
    assert (fields["seqused_q"] is not None) == used


def test_forced_rows() -> None:
    few = problem_of(1, 16, 32768, 32, 8, d=128, dtype="bfloat16")
    whole = plan_attention(few, HOPPER, "attn_fwd_sm90_bf16_d128_m192n64")
    assert [r.spec.name for r in whole.records] == ["attn_fwd_sm90_bf16_d128_m192n64"]
    short = problem_of(1, 16, 32, 2, 2, d=64, dtype="bfloat16")
    for name in ("attn_fwd_sm90_bf16_d64_m128n128_split", "attn_fwd_sm90_bf16_d256_m128n64_split"):
        assert plan_attention(short, HOPPER, name).records[0].spec.name == name


@pytest.mark.parametrize("spec", SPLIT_SM90, ids=lambda spec: spec.name)
def test_boxes_and_workspace(spec: KernelSpec) -> None:
    """A copy brings whole tiles of rows, from boxes that a tensor map may have; results have places of their own."""
    for hq, hk in ((32, 8), (7, 1), (48, 1), (128, 1), (12, 4), (256, 2), (5, 5)):
        p = problem_of(2, 9, 5000, hq, hk, d=spec.head_dim, dtype=spec.dtype)
        pack_gqa = gqa_packing(p, spec.block_m)
        (main, merged), num_bytes = attn_fwd_split.build(spec, COMBINE, p, HOPPER, pack_gqa, SplitKV(3))
        for m in main.tensor_maps:
            assert all(1 <= n <= 256 for n in m.box)
            assert all(x > 0 and x % 16 == 0 for x in m.strides_bytes)
        assert np.prod(main.tensor_maps[0].box[1:]) == spec.block_m
        f, ml = fields_of_record(main, ATTN_FWD_SPLIT_SM90), 2 * 9 * pack_gqa.pack * hq // pack_gqa.heads * 3
        assert f["partial_ml"].offset % WORKSPACE_ALIGNMENT == 0
        assert f["partial_ml"].offset >= 4 * ml * spec.head_dim
        assert num_bytes == f["partial_ml"].offset + 8 * ml
        merged_fields = fields_of_merge(merged)
        assert all(merged_fields[name] == f[name] for name in ("partial_o", "partial_ml"))
        assert spec.smem_bytes <= HOPPER.max_smem


@pytest.mark.parametrize(
    "spec",
    [s for s in REGISTRY if s.op in ("attention_split", "attention_combine", "attention_combine_packed")
     if not s.quantized],
    ids=lambda s: s.name,
)  # fmt: skip
def test_rows_are_what_their_cases_launch(spec: KernelSpec) -> None:
    """Forced, as the GPU tests run them. A case that is not split would say nothing of the kernel behind it."""
    taken = 0
    for case in cases_for(spec.op):
        ((sq, sk), *more) = case.lengths
        left, right = case.options.get("window", (-1, 0 if case.options.get("causal") else -1))
        merges = spec.op != "attention_split"
        d = (128 if merges else spec.head_dim) - case.below
        of_mods = spec.score_mods or merges
        modified = not {*case.arrays} <= {"sinks"} or "softcap" in case.options
        taken_by = (
            {"packed"}
            if spec.sequences == "packed"
            else {"dense"}
            if spec.sequences == "dense"
            else {"packed", "dense"}
        )
        if (modified and not of_mods) or ("packed" if case.packed else "dense") not in taken_by:
            continue
        p = problem_of(
            1 + len(more), sq, sk, case.heads_q, case.heads_kv, d, left, right, case.layout,
            "float32" if "sinks" in case.arrays else "none", spec.dtype, softcap=case.options.get("softcap", 0.0),
        )  # fmt: skip
        kinds = {"mask": "bool", "bias": "float32", "keys": "float32", "io": "io"}
        for name in {*kinds} & {*case.arrays}:
            assert p.strides is not None
            of_mask = dataclasses.replace(p.strides, mask=(0, sq * sk, 0 if name == "keys" else sk, 1))
            p = dataclasses.replace(p, mask=kinds[name], strides=of_mask, mask_map=True)
        if case.packed:
            rows = {f"seqlen_{x}": sum(n) for x, n in zip("qk", zip(*case.lengths, strict=True), strict=True)}
            p = dataclasses.replace(p, varlen=True, max_seqlen_q=sq, max_seqlen_k=sk, **rows)
            if spec.paged:
                p = dataclasses.replace(p, pages=Pages(16, 9999, 999, 999))
        try:
            launches = plan_attention(p, HOPPER, spec.name)
        except ArgumentError:  # one of Hopper's rows with scores, each for other forms
            assert spec.arch_specific
            assert of_mods
            continue
        taken += 1
        assert spec in [record.spec for record in launches.records], case.name
        (main,) = (record for record in launches.records if record.spec.op == "attention_split")
        of_sm90 = main.spec.arch_specific
        if of_sm90 and case.packed:
            assert main.grid[0] == HOPPER.sm_count * main.spec.ctas_per_sm
            continue
        layout = ATTN_FWD_SPLIT_MODS_SM90 if main.spec.score_mods else ATTN_FWD_SPLIT_SM90
        of_main = fields_of_record(main, layout)["tiles.num_splits"] if of_sm90 else main.grid[1]
        assert of_main > 1, case.name
    assert taken >= 1
