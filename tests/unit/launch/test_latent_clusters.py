"""Which calls over lists of latent rows have clusters of CTAs, and their launches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ops.test_sparse import all_planned, field, planned


@pytest.mark.parametrize(
    ("batch", "heads", "cluster", "each", "merged"),
    [(1, 128, 8, 8, False), (2, 64, 8, 8, False), (8, 16, 8, 8, False), (2, 128, 4, 4, False), (4, 128, 2, 4, True)],
)
def test_few_lists_have_clusters(batch: int, heads: int, cluster: int, each: int, merged: bool) -> None:
    main, *combine = all_planned("656", batch=batch, heads=heads)
    assert main.spec.name == "mla_decode_few_sm90_bf16_d576v512_656_clusters"
    assert main.grid == (heads // 16, batch * each, 1)
    assert main.cluster == (1, cluster, 1)
    assert field(main, "cluster") == cluster
    assert len(combine) == merged


@pytest.mark.parametrize(
    ("batch", "more", "name"),
    [
        (1, {"fmt": "16", "has_lengths": True}, "mla_decode_few_sm90_fp16_d576v512"),
        (1, {"has_lengths": True}, "mla_decode_few_sm90_bf16_d576v512_656"),
        (1, {"tensor_maps": False}, "mla_decode_few_sm90_bf16_d576v512_656"),
        (1, {"deterministic": True}, "mla_decode_rows8_sm90_bf16_d576v512_656"),
        (1, {"fmt": "e4m3"}, "mla_decode_sm90_fp16_d576v512_e4m3"),
        (3, {"heads": 16}, "mla_decode_few_sm90_bf16_d576v512_656"),
        (5, {}, "mla_decode_rows8_sm90_bf16_d576v512_656"),
    ],
)
def test_lists_without_clusters(batch: int, more: dict[str, Any], name: str) -> None:
    main = planned(**{"fmt": "656", "batch": batch, **more})
    assert main.spec.name == name
    assert main.cluster is None
    assert field(main, "cluster") == 1
