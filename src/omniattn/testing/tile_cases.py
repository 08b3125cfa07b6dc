"""``tile_kinds_sm80``, which only attention starts: every byte of its kinds against NumPy, and none beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import tile_kinds
from omniattn.launch.host_struct import At
from omniattn.launch.score_mod import with_score_mod
from omniattn.problems import AttentionProblem, AttentionStrides
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.problems.score_mod import BlockMaskProblem, ScoreModProblem
from omniattn.reference import mask_tiles as reference
from omniattn.registry import KernelSpec, by_name
from omniattn.runtime.record import Program
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework

_GUARD = 2 * WORKSPACE_ALIGNMENT
_POISON = 0xA5

#: Mask expressions, with the same by NumPy; of queries and keys as columns and rows.
EXPRESSIONS: dict[str, Any] = {
    "": lambda b, h, q, k: True,
    "k <= q + 70 && (q ^ k) % 977 != 5": lambda b, h, q, k: (k <= q + 70) & ((q ^ k) % 977 != 5),
    "k >= 64 * (b + h) && q < 200": lambda b, h, q, k: (k >= 64 * (b + h)) & (q < 200),
}


@dataclass(frozen=True)
class TileCase:
    """A map of blocks and a mask expression: `RowCase`.

    Attributes
    ----------
    extents : (int, int, int, int)
        batch, heads, seqlen_q, seqlen_k.
    blocks : tuple of int
        Shape of the map; empty: none.
    size : (int, int)
        Tiles of a block.
    expression : str
        Key of `EXPRESSIONS`.
    spec : KernelSpec
    """

    extents: tuple[int, int, int, int]
    blocks: tuple[int, ...]
    size: tuple[int, int]
    expression: str
    spec: KernelSpec = field(compare=False)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{' x '.join(map(str, self.extents))}, blocks {self.blocks} of {self.size}, {self.expression or 'all'}"

    @property
    def problem(self) -> AttentionProblem:
        """The call's facts."""
        batch, heads, seqlen_q, seqlen_k = self.extents
        none = (0, 0, 0)
        made = AttentionProblem(
            "float16", batch, seqlen_q, seqlen_k, heads, heads, 64, -1, -1, 1.0, 0.0, "none", "none", False,
            strides=AttentionStrides(none, none, none, none, (0, 0), (0, 0, 0, 0)),
        )  # fmt: skip
        if self.blocks:
            steps = [math.prod(self.blocks[i + 1 :]) if n > 1 else 0 for i, n in enumerate(self.blocks)]
            made = replace(made, block_mask=BlockMaskProblem(self.size, (steps[0], steps[1], steps[2], steps[3])))
        if self.expression:
            made = replace(made, score_mod=ScoreModProblem("score", self.expression, ()))
        return made

    def prepare(self) -> tuple[Values, Values]:
        """The map, and the kinds that must come out."""
        e, (_, _, seqlen_q, seqlen_k) = tile_kinds.extents(self.problem), self.extents
        rng = np.random.default_rng(self.extents)
        blocks: Values = rng.random(self.blocks or (1, 1, 1, 1)) < 0.6
        visible = np.ones((e.batch, e.heads, seqlen_q, seqlen_k), dtype=np.bool_)
        b, h = np.arange(e.batch)[:, None, None, None], np.arange(e.heads)[:, None, None]
        q, k = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
        visible &= EXPRESSIONS[self.expression](b, h, q, k)
        if self.blocks:
            whole = blocks.repeat(64 * self.size[0], axis=2).repeat(64 * self.size[1], axis=3)
            visible &= whole[:, :, :seqlen_q, :seqlen_k]
        return blocks, reference.pack_bits(visible)[1]

    def check(self, framework: Framework, prepared: tuple[Values, Values]) -> tuple[float, str]:
        """Launch the kernel, and compare all bytes of the memory."""
        blocks, kinds = prepared
        problem = self.problem
        row = with_score_mod(self.spec, problem.score_mod)
        (record, _), places = tile_kinds.build(
            row, by_name("mask_list_sm80"), problem, 128, 0, 1, At("workspace", _GUARD)
        )
        before: Values = np.full(places.num_bytes + 2 * _GUARD, _POISON, dtype=np.uint8)
        memory, given = framework.array(before, "uint8"), framework.array(blocks.astype(np.uint8), "uint8")
        workspace, at = arrays.describe(memory, "workspace"), arrays.describe(given, "block_mask")
        program = Program([record], ("block_mask", "workspace"), lambda spec: runtime.load(spec, workspace.ordinal))
        framework.synchronize()
        program.launch(0, [at.ptr, workspace.ptr])
        framework.synchronize()
        expected: Values = before.copy()
        expected[places.kinds.offset : places.kinds.offset + kinds.nbytes] = kinds.reshape(-1)
        wrong = int((framework.to_numpy(memory) != expected).sum())
        return (math.inf, f"{wrong} of {expected.nbytes} bytes differ") if wrong else (0.0, "")


def tile_cases(spec: KernelSpec) -> tuple[TileCase, ...]:
    """Cases without an expression, which the row as it is serves."""
    return (
        TileCase((2, 3, 300, 1000), (2, 3, 5, 16), (1, 1), "", spec),
        TileCase((2, 3, 700, 500), (1, 3, 3, 2), (4, 5), "", spec),
        TileCase((2, 1, 64, 64), (2, 1, 1, 1), (2, 2), "", spec),
    )


def expression_cases(spec: KernelSpec) -> tuple[TileCase, ...]:
    """Cases with an expression, which is compiled."""
    names = [name for name in EXPRESSIONS if name]
    return (
        TileCase((2, 2, 300, 1000), (), (1, 1), names[0], spec),
        TileCase((2, 3, 300, 500), (), (1, 1), names[1], spec),
        TileCase((2, 3, 300, 500), (2, 1, 3, 2), (2, 4), names[0], spec),
    )
