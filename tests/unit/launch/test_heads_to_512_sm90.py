"""Which calls attn_fwd_d512_sm90 takes, and how it is launched."""

from __future__ import annotations

from typing import Any

import pytest

from omniattn.bench.shape_cases import ShapeCase
from omniattn.problems import AttentionProblem
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.record import LaunchRecord
from omniattn.select.cost import step_us
from omniattn.select.features import features
from omniattn.select.fit import fit
from omniattn.select.model import coefficients_of
from omniattn.select.orders import places_of
from tests.unit.select.shape_plans import GPUS, fastest, is_whole, planned, problem_of, row_of

H200 = GPUS["H200"]
FAMILY = "attn_fwd_d512_sm90"
ROWS = [spec for spec in REGISTRY if spec.family == FAMILY]


def call(head_dim: int = 512, head_dim_v: int = 0, length: int = 4096, packed: str = "", **options: Any) -> Any:
    own = head_dim_v if head_dim_v != head_dim else 0
    lengths = (length,) * 4
    return problem_of(ShapeCase(head_dim, 8, lengths, lengths, own_head_dim_v=own, packed=packed, **options))


def is_here(way: Any) -> bool:
    return way.row.family == FAMILY and is_whole(way)


def record_of(problem: AttentionProblem) -> LaunchRecord:
    records = planned(problem, H200, is_here).records
    assert len(records) == 1
    return records[0]


@pytest.mark.parametrize("packed", ["", "alike"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "row"),
    [
        (512, 512, "d512"),
        (264, 264, "d384"),
        (320, 384, "d384"),
        (392, 392, "d512"),
        (512, 64, "d512v256"),
        (8, 512, "d256v512"),
        (320, 512, "d512"),
    ],
)
def test_rows_by_head_dims(head_dim: int, head_dim_v: int, row: str, packed: str) -> None:
    chosen = row_of(call(head_dim, head_dim_v, packed=packed), H200)
    assert chosen.name == f"{FAMILY}_bf16_{row}" + ("_varlen" if packed else "")


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0)}, {"softcap": 30.0}, {"group": 8}], ids=str)
def test_options_that_it_honours(options: dict[str, Any]) -> None:
    assert row_of(call(**options), H200).family == FAMILY


@pytest.mark.parametrize("packed", ["", "alike"])
@pytest.mark.parametrize("head_dim", [264, 512])
@pytest.mark.parametrize(("mask", "ending"), [("half", "mods"), ("padding", "mods"), ("bias_heads", "bias16")])
def test_masks_have_rows_of_512_channels(mask: str, ending: str, head_dim: int, packed: str) -> None:
    problem = call(head_dim, mask=mask, packed=packed)
    if packed and ending == "bias16":
        assert row_of(problem, H200).name == "attn_fwd_sm80_bf16_d512_mods"
        return
    assert row_of(problem, H200).name == f"{FAMILY}_bf16_d512{'_varlen' if packed else ''}_{ending}"
    for spec in ROWS:
        if spec.masks == "none":
            assert fit(spec, problem, H200) is not None


def test_plain_calls_take_no_row_for_masks() -> None:
    for options in ({}, {"causal": True}, {"packed": "alike"}):
        assert not row_of(call(**options), H200).score_mods
    # With a softcap they are faster, where they are not too wide.
    assert row_of(call(softcap=30.0), H200).name.endswith("_d512_mods")
    assert row_of(call(384, softcap=30.0), H200).name.endswith("_d384")


def test_launches_with_a_mask() -> None:
    launches = planned(call(mask="half"), H200, is_here)
    assert [x.spec.family for x in launches.records] == ["mask_pack_sm80", "mask_list_sm80", FAMILY]
    (record,) = planned(call(mask="bias_heads"), H200, is_here).records
    assert [(x.operand, x.box) for x in record.tensor_maps[3:]] == [("mask", (64, 128, 1, 1))]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(256, 256), (64, 128), (192, 128)])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}], ids=str)
def test_narrower_heads_have_their_own_kernels(head_dim: int, head_dim_v: int, options: dict[str, Any]) -> None:
    problem = call(head_dim, head_dim_v, **options)
    assert row_of(problem, H200).family == "attn_fwd_sm90"
    for spec in ROWS:
        if spec.dtype == "bfloat16" and spec.sequences == "dense" and spec.head_dim_v >= head_dim_v:
            assert fit(spec, problem, H200) == "it is for head dims above 256"


@pytest.mark.parametrize("gpu", ["A100", "L40S", "B200", "RTX 5090"])
def test_other_gpus(gpu: str) -> None:
    assert all("compute capability 9.0 only" in str(fit(spec, call(), GPUS[gpu])) for spec in dense("bfloat16", 512))


def dense(dtype: str, head_dim: int) -> list[KernelSpec]:
    rows = [x for x in ROWS if x.masks == "none"]
    return [x for x in rows if (x.dtype, x.head_dim, x.head_dim_v, x.sequences) == (dtype, head_dim, head_dim, "dense")]


@pytest.mark.parametrize(("length", "clusters"), [(4096, 66), (128, 32), (1, 32)])
def test_grid_of_clusters(length: int, clusters: int) -> None:
    record = record_of(call(length=length))
    assert record.grid == (2 * clusters, 1, 1)
    assert record.threads == 384
    assert places_of(record.spec, H200) == 66


def test_copies() -> None:
    maps = record_of(call(320, 512)).tensor_maps
    assert [(x.operand, x.dims[0], x.box) for x in maps] == [
        ("q", 320, (64, 128, 1, 1)),
        ("k", 320, (64, 64, 1, 1)),
        ("v", 512, (64, 32, 1, 1)),
    ]


def test_nothing_to_do() -> None:
    assert not planned(call(length=0), H200, is_here).records


def test_model_counts_a_ctas_part() -> None:
    """Two SMs share a step of 128 keys: 64 keys of all channels are what each multiplies."""
    problem = call()
    counted = features(fastest(problem, H200, is_here), problem, H200).passes[0]
    assert (counted.keys, counted.groups, counted.channels, counted.scores) == (64, 2, 512, "as they are")
    assert counted.steps == 16 * 32  # 1024 tiles of 66 clusters
    assert step_us(counted, coefficients_of(H200)) > 0
    assert features(fastest(call(softcap=1.0), H200, is_here), call(softcap=1.0), H200).passes[0].scores == "functions"
