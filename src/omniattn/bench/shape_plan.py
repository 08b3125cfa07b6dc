"""Cases of ``omniattn bench few`` and its kin as selection sees them on a GPU, with no GPU and without their memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from omniattn.bench.option_cases import MASKS
from omniattn.bench.shape_cases import ShapeCase
from omniattn.problems import AttentionProblem


def problem_of(case: ShapeCase, **changes: Any) -> AttentionProblem:
    """The checked call in bf16, with addresses as GPU arrays have them. Nothing reads the arrays it is made from."""
    import omniattn

    heads_kv, options = case.heads // case.group, {**case.options, "precision": case.precision}
    batch, queries, keys = len(case.lengths_q), case.lengths_q[0], case.lengths_k[0]
    if case.packed:
        sizes: list[tuple[int, ...]] = [(sum(case.lengths_q),), (sum(case.lengths_k),)]
        for name, lengths in (("q", case.lengths_q), ("k", case.lengths_k)):
            options[f"cu_seqlens_{name}"] = np.cumsum([0, *lengths], dtype=np.int32)
            options[f"max_seqlen_{name}"] = max(lengths)
    else:
        sizes = [(batch, queries), (batch, keys)]
    q = np.empty((*sizes[0], case.heads, case.head_dim), np.float16)
    k, v = (np.empty((*sizes[1], heads_kv, width), np.float16) for width in (case.head_dim, case.head_dim_v))
    if case.expanded:
        k, v = (np.broadcast_to(x[:1] if case.expanded == "batch" else x[:, :, :1], x.shape) for x in (k, v))
    if case.mask:
        kind, extents = MASKS[case.mask], {"b": batch, "h": case.heads, "q": queries, "k": keys}
        size = [n if letter in kind.extents else 1 for letter, n in extents.items()]
        options["mask"] = np.empty(size, {"bool": np.bool_, "fp32": np.float32, "q": np.float16}[kind.values])
    function = omniattn.attention_varlen if case.packed else omniattn.attention
    problem = omniattn.explain(function, q, k, v, **options).problem
    assert isinstance(problem, AttentionProblem)
    if case.operands:
        whole = problem.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True)
        changes = {"operands": dataclasses.replace(whole, dtype="bfloat16"), **changes}
    made = {"dtype": "bfloat16", "tensor_maps": True, "mask_map": case.mask == "bias_heads", **changes}
    return dataclasses.replace(problem, **made)
