"""Gradients of calls with a block mask without a GPU: results, lists of tiles, what kernels are told."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from omniattn.launch import tile_kinds
from omniattn.launch.host_struct import At
from omniattn.launch.structs import MASK_LIST, TILE_KINDS
from omniattn.plan.backward import plan_backward
from omniattn.problems.dropout import DropoutProblem
from omniattn.problems.score_mod import BlockMaskProblem
from omniattn.reference import mask_tiles
from omniattn.registry import REGISTRY
from omniattn.select.fit import fit
from tests.unit.launch.launch_fakes import fields_of_record
from tests.unit.launch.test_launch_backward import AMPERE, HOPPER, of, problem

Arrays = dict[str, np.ndarray]


def inputs(heads: int = 4) -> Arrays:
    """q, k, v, do and blocks of 64 x 64, of which one row and one column are hidden."""
    rng = np.random.default_rng(3)
    made = {
        name: rng.standard_normal((2, rows, n, 8))
        for name, rows, n in (("do", 150, heads), ("q", 150, heads), ("k", 203, 2), ("v", 203, 2))
    }
    blocks = rng.random((2, heads, 3, 4)) < 0.6
    blocks[:, :, 1], blocks[..., 2] = False, False
    return {**made, "blocks": blocks}


def spread(blocks: np.ndarray, rows: int = 150, keys: int = 203) -> np.ndarray:
    """The mask that says the same as blocks of 64 x 64."""
    visible: np.ndarray = blocks.repeat(64, axis=2)[:, :, :rows].repeat(64, axis=3)[..., :keys]
    return visible


def gradients(x: Arrays, wanted: tuple[str, ...], **options: Any) -> tuple[np.ndarray, ...]:
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True, **options)
    found: tuple[np.ndarray, ...] = oa.attention_backward(
        x["do"], x["q"], x["k"], x["v"], o, lse, wanted=wanted, **options
    )
    return found


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (90, 30)}, {"softcap": 2.0}, {"layout": "HND"}])
def test_a_block_mask_is_the_same_as_a_mask(options: dict[str, Any]) -> None:
    x = inputs()
    if options.get("layout") == "HND":
        x |= {name: np.ascontiguousarray(x[name].swapaxes(1, 2)) for name in ("do", "q", "k", "v")}
    wanted = ("dk", "dq", "dv")
    got = gradients(x, wanted, block_mask=x["blocks"], block_size=64, **options)
    want = gradients(x, wanted, mask=spread(x["blocks"]), **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a).max() > 0
    dk, dq, dv = (g.swapaxes(1, 2) if options.get("layout") == "HND" else g for g in got)
    assert not dq[:, 64:128].any()
    assert not dk[:, 128:192].any()
    assert not dv[:, 128:192].any()


def test_gradients_are_differences_of_the_forward() -> None:
    x, blocks = inputs(), np.array([[True, False], [False, True]])
    options: dict[str, Any] = {"block_mask": blocks, "block_size": (128, 192), "causal": True}
    found = dict(zip(("dq", "dk", "dv"), gradients(x, ("dq", "dk", "dv"), **options), strict=True))
    rng = np.random.default_rng(5)
    for name in ("q", "k", "v"):
        step = rng.standard_normal(x[name].shape)
        sums = [
            float((oa.attention(**{n: x[n] for n in "qkv"} | {name: x[name] + e * step}, **options) * x["do"]).sum())
            for e in (1e-5, -1e-5)
        ]
        np.testing.assert_allclose((found[f"d{name}"] * step).sum(), (sums[0] - sums[1]) / 2e-5, rtol=1e-6)


@pytest.mark.parametrize("shape", [(150, 203), (1, 4, 150, 203), (2, 1, 1, 203), (4, 1, 1)])
def test_the_gradient_of_a_mask_beside_blocks(shape: tuple[int, ...]) -> None:
    x = inputs()
    bias = np.random.default_rng(1).standard_normal(shape)
    (got,) = gradients(x, ("dmask",), mask=bias, block_mask=x["blocks"], block_size=64)
    (full,) = gradients(x, ("dmask",), mask=np.where(spread(x["blocks"]), bias, -np.inf))
    assert got.shape == shape
    lead = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(lead) if n == 1 < full.shape[i])
    np.testing.assert_allclose(got, full.sum(axis=axes, keepdims=True).reshape(shape), atol=1e-12)


def test_with_a_score_mod() -> None:
    x = inputs()
    mod = oa.ScoreMod(
        "score * 1.5f", reference=lambda score, *_: score * 1.5, grad="1.5f", reference_grad=lambda *_: 1.5
    )
    blocks: dict[str, Any] = {"block_mask": x["blocks"], "block_size": 64}
    got = gradients(x, ("dq", "dk", "dv"), score_mod=mod, **blocks)
    want = gradients(x, ("dq", "dk", "dv"), softmax_scale=1.5 * 8**-0.5, **blocks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_what_is_refused() -> None:
    x = inputs()
    o, lse = oa.attention(x["q"], x["k"], x["v"], return_lse=True)

    def refused(error: type[Exception], text: str, **options: Any) -> None:
        with pytest.raises(error, match=rf"attention_backward\(\).*{text}"):
            oa.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, **options)

    refused(ArgumentError, "block_size.*nothing, without block_mask", block_size=64)
    refused(ArgumentError, "block_size.*multiple of 64", block_mask=x["blocks"], block_size=32)
    refused(ShapeError, r"block_mask.*\(2, 4, 2, 2\)", block_mask=x["blocks"])
    refused(DtypeError, "block_mask.*bool", block_mask=x["blocks"].astype(np.uint8), block_size=64)
    refused(UnsupportedError, "boolean mask", block_mask=x["blocks"], block_size=64, mask=spread(x["blocks"]))
    with pytest.raises(TypeError, match="block_mask"):
        oa.attention_varlen_backward(*(x[n][0] for n in ("do", "q", "k", "v")), o[0], lse[0], block_mask=x["blocks"])


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 30)])
def test_lists_hold_what_blocks_and_windows_leave(block: int, keys: bool, window: tuple[int, int]) -> None:
    """The reference of the kernels of lists, on the numbers that they are told: tiles of queries of each tile of keys,
    or of keys of each tile of queries."""
    rng = np.random.default_rng(block)
    shown = rng.random((2, 4, 3, 3)) < 0.4  # blocks of 128 queries and 192 keys
    strides = (36, 9, 3, 1)
    call = problem(block_mask=BlockMaskProblem((2, 3), strides), window_left=window[0], window_right=window[1]).forward
    told = tile_kinds.of_keys(call) if keys else tile_kinds.of_queries(call)
    rows = next(row for row in REGISTRY if row.op == "tile_kinds")
    listing = next(row for row in REGISTRY if row.op == "mask_list")
    count = -(-told.seqlen_q // block)
    records, found = tile_kinds.build(rows, listing, told, block, 0, count, At("workspace", 0))
    of_kinds, of_lists = (fields_of_record(r, s) for r, s in zip(records, (TILE_KINDS, MASK_LIST), strict=True))
    of_head = count * (1 + found.num_tiles)
    assert (found.lists_stride_b, found.lists_stride_h) == (4 * of_head, of_head)
    # What tile_kinds_sm80 makes of the blocks.
    kinds = np.zeros((2, 4, of_kinds["m_tiles"], of_kinds["n_tiles"]), np.uint8)
    flat = shown.reshape(-1)
    for b, h, m, n in np.ndindex(kinds.shape):
        at = (
            b * of_kinds["block_stride_b"]
            + h * of_kinds["block_stride_h"]
            + m // of_kinds["block_rows"] * of_kinds["block_stride_q"]
            + n // of_kinds["block_keys"] * of_kinds["block_stride_k"]
        )
        whole = (n + 1) * 64 <= of_kinds["seqlen_k"]
        kinds[b, h, m, n] = (2 if whole else 1) if flat[at] else 0
    names = ("num_m_blocks", "block_m", "lead_rows", "seqlen_q", "seqlen_k", "window_left", "window_right")
    lists = mask_tiles.lists(kinds, **{name: of_lists[name] for name in names}, broadcast_rows=False)
    # What is visible, pair by pair.
    visible = shown.repeat(128, axis=2)[:, :, :300].repeat(192, axis=3)[..., :500].copy()
    i, j = np.arange(300)[:, None] + 200, np.arange(500)
    if window[1] >= 0:
        visible &= j <= i + window[1]
    if window[0] >= 0:
        visible &= j >= i - window[0]
    if keys:
        visible = visible.swapaxes(2, 3)
    for b, h, m in np.ndindex(2, 4, count):
        entries = lists[b, h, m, 1 : 1 + lists[b, h, m, 0]]
        tiles = entries & (mask_tiles.FIRST_GROUP - 1)
        own = visible[b, h, m * block : (m + 1) * block]
        needed = {n for n in range(-(-own.shape[1] // 64)) if own[:, 64 * n : 64 * n + 64].any()}
        assert needed <= set(tiles.tolist()), "nothing visible is passed over"
        assert sorted(tiles.tolist(), reverse=True) == tiles.tolist()
        for entry, tile in zip(entries.tolist(), tiles.tolist(), strict=True):
            for group in range(max(block // 64, 1)):
                part = own[64 * group : 64 * group + 64, 64 * tile : 64 * tile + 64]
                hidden = entry >> (22 + 2 * group) & 3 == 0
                assert not (hidden and part.any())


@pytest.mark.parametrize(("target", "tile"), [(HOPPER, 128), (AMPERE, 128)])
def test_what_the_kernels_are_told(target: Any, tile: int) -> None:
    blocks = BlockMaskProblem((2, 1), (40, 0, 8, 1))
    launches = plan_backward(problem(block_mask=blocks), target, None)
    kinds, lists, prepare, main, _ = launches.records
    told = of(main)
    of_lists, of_kinds = fields_of_record(lists, MASK_LIST), fields_of_record(kinds, TILE_KINDS)
    assert told["lists"] == of_lists["lists"]
    assert told["num_list_tiles"] == of_lists["n_tiles"] == 5  # 300 queries
    assert (of_lists["block_m"], of_lists["num_m_blocks"]) == (tile, 4)  # 500 keys
    assert (told["lists_stride_b"], told["lists_stride_h"]) == (4 * 6, 0)  # the same for all heads
    assert of_kinds["blocks"] == At("block_mask")
    assert [of_kinds[f"block_stride_{x}"] for x in "bhqk"] == [40, 0, 1, 8]
    assert (of_kinds["block_rows"], of_kinds["block_keys"]) == (1, 2)
    # Rows may attend to nothing, and sums of dq may get nothing: they are cleared.
    assert told["stray_do"] is not None
    assert of(prepare)["dq_accum"] == told["dq_accum"]
    assert of(prepare)["lists"] is None
    ends = [of_lists["lists"].offset + 4 * 2 * 4 * 6, told["dq_accum"].offset + 4 * 2 * 384 * 4 * 128]
    assert max(ends) <= launches.workspace_bytes


def test_rows_for_block_masks() -> None:
    call = problem(block_mask=BlockMaskProblem((2, 1), (40, 0, 8, 1)), head_dim=128)
    of_hopper = [row for row in REGISTRY if row.op.startswith("attention_backward") and row.block_masks]
    assert of_hopper
    for row in of_hopper:
        assert row.arch_specific
        assert row.lists
        plain = dataclasses.replace(call, forward=dataclasses.replace(call.forward, block_mask=None))
        if row.dtype == "bfloat16" and row.head_dim == 128 and row.softcap == "never":
            assert fit(row, call, HOPPER) is None
            assert fit(row, plain, HOPPER) == "it is for calls with a block_mask"
    plain_row = next(row for row in REGISTRY if row.name == "attn_bwd_sm90_bf16_d128")
    assert fit(plain_row, call, HOPPER) == "it visits every tile"
    longest = dataclasses.replace(call, forward=dataclasses.replace(call.forward, seqlen_q=(64 << 22) + 1))
    assert "lists count tiles" in str(fit(of_hopper[0], longest, HOPPER)) or of_hopper[0].dtype != "bfloat16"


@pytest.mark.parametrize("deterministic", [False, True])
def test_dropout_takes_the_general_kernels(deterministic: bool) -> None:
    call = dataclasses.replace(
        problem(block_mask=BlockMaskProblem((2, 1), (40, 0, 8, 1)), dropout=DropoutProblem(26), head_dim=128),
        deterministic=deterministic,
    )
    names = [record.spec.name for record in plan_backward(call, HOPPER, None).records]
    of_gradients = [name for name in names if name.endswith("_dropout")]
    assert len(of_gradients) == 1 + deterministic
    assert all("_sm80_" in name and "_mods" in name for name in of_gradients)


def listed_blocks(steps: list[int], most: int) -> list[int]:
    """ListedBwdTiles (kernels_cu/scheduler/bwd_lists.cuh): tiles of keys of a head as they are drawn."""
    shift = max(most.bit_length() - 6, 0)
    classes = [n >> shift for n in steps]
    assert max(classes) < 64

    def above(of: int) -> int:
        return sum(c > of for c in classes)

    found = []
    for rank in range(len(steps)):
        low, high = 0, 63
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if above(middle) <= rank else (middle + 1, high)
        found.append([n for n, c in enumerate(classes) if c == low][rank - above(low)])
    return found


def test_tiles_of_keys_are_drawn_longest_first() -> None:
    rng = np.random.default_rng(0)
    for most in (1, 2, 63, 64, 65, 1000):
        for blocks in (1, 5, 32, 33, 90):
            steps = rng.integers(0, most, blocks, endpoint=True).tolist()
            found = listed_blocks(steps, most)
            assert sorted(found) == list(range(blocks))
            resolution = max(most // 32, 1)
            assert all(steps[a] > steps[b] - resolution for a, b in pairwise(found))
            if most < 64:
                assert found == sorted(range(blocks), key=lambda n: (-steps[n], n))
