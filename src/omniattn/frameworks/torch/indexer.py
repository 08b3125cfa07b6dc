"""`index_logits` and `top_k` as operators."""

from __future__ import annotations

from typing import Any

import torch

from ...plan.engine import Call
from .. import FUNCTIONS
from .caches import check_no_gradient
from .library import LIBRARY, TAGS, fail, plain

LIBRARY.define(
    "index_logits(Tensor q, Tensor k, Tensor weights, Tensor? k_scale, Tensor? seq_lens, Tensor? block_table, "
    "SymInt? max_keys, Tensor? k_start, Tensor? k_end) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "top_k(Tensor logits, SymInt k, Tensor? lengths, Tensor? starts, SymInt next_n, Tensor? block_table, "
    "SymInt? block_size) -> Tensor",
    tags=TAGS,
)


def _index_logits(
    q: Any, k: Any, weights: Any, k_scale: Any, seq_lens: Any, block_table: Any, max_keys: Any, k_start: Any, k_end: Any
) -> torch.Tensor:
    made: torch.Tensor = FUNCTIONS["index_logits"](
        q, k, weights, k_scale=k_scale, seq_lens=seq_lens, block_table=block_table, max_keys=max_keys, k_start=k_start,
        k_end=k_end,
    )  # fmt: skip
    return made


def _index_logits_shape(
    q: Any, k: Any, weights: Any, k_scale: Any, seq_lens: Any, block_table: Any, max_keys: Any, k_start: Any, k_end: Any
) -> torch.Tensor:
    keys = max_keys
    if keys is None:
        keys = k.shape[0] if block_table is None else block_table.shape[1] * k.shape[1]
    made: torch.Tensor = weights.new_empty((weights.shape[0], keys))
    return made


def _top_k(
    logits: Any, k: int, lengths: Any, starts: Any, next_n: int, block_table: Any, block_size: int | None
) -> torch.Tensor:
    made: torch.Tensor = FUNCTIONS["top_k"](
        logits, k, lengths=lengths, starts=starts, next_n=next_n, block_table=block_table, block_size=block_size
    )
    return made


def _top_k_shape(
    logits: Any, k: Any, lengths: Any, starts: Any, next_n: Any, block_table: Any, block_size: Any
) -> torch.Tensor:
    made: torch.Tensor = logits.new_empty((logits.shape[0], k), dtype=torch.int32)
    return made


for _name, _kernel, _shape in (
    ("index_logits", _index_logits, _index_logits_shape),
    ("top_k", _top_k, _top_k_shape),
):
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"omniattn::{_name}", _shape, lib=LIBRARY)


def run(call: Call) -> list[Any]:
    """A call by its operator; results as `plan.engine.run`."""
    function = call.operation.name
    given = dict(zip(call.operation.arrays, call.objects, strict=True))
    for name, x in (("out", given.pop("out")), ("stream", call.stream)):
        if x is not None:
            fail("argument", name, "None in a traced or compiled call", "one", function=function)
    for name, x in given.items():
        if x is None and name in call.operation.required:
            fail("argument", name, "a tensor", "None", function=function)
        if x is not None and not isinstance(x, torch.Tensor):
            fail(
                "unsupported", f"{function}(): argument {name!r} is a {type(x).__name__} in a traced or compiled call",
                instead="torch tensors",
            )  # fmt: skip
    check_no_gradient(given)
    x = plain(call.options)
    if function == "top_k":
        arguments = (given["logits"], x.k, given["lengths"], given["starts"], x.next_n, given["block_table"])
        return [torch.ops.omniattn.top_k.default(*arguments, x.block_size)]
    return [
        torch.ops.omniattn.index_logits.default(
            given["q"], given["k"], given["weights"], given["k_scale"], given["seq_lens"], given["block_table"],
            x.max_keys, given["k_start"], given["k_end"],
        )
    ]  # fmt: skip
