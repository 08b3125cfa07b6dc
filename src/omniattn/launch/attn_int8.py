"""What the launches of attention on quantized operands share: where the operands are."""

from __future__ import annotations

from dataclasses import dataclass

from ..problems import AttentionProblem, Descales, QuantizeProblem
from ..problems.quantize import BLOCK_ROWS, Strides3, carve, operand_strides
from .host_struct import At

#: Blocks of scales, where there is one for every row that a sequence can have.
_UNLIMITED = 2**24


@dataclass(frozen=True)
class OperandPlaces:
    """Where a kernel finds its quantized operands.

    Attributes
    ----------
    problem : QuantizeProblem
        What describes them.
    at : dict
        Places by the names of `QuantizeProblem.shapes`.
    starts : (At, At)
        cu_seqlens that never decrease, of queries and keys.
    strides : (Strides3, Strides3)
        Bytes between batch entries, rows and heads of q and k.
    width : int
        Channels of a row of q and k that there are; those behind them, up to the tile's, are zeros.
    descales : Descales, optional
        Of e4m3 operands of the caller: how the scales lie. None: as `problem` says.
    longest : (int, int)
        With descales: rows of the longest sequence of queries and of keys.
    """

    problem: QuantizeProblem
    at: dict[str, At]
    starts: tuple[At, At]
    strides: tuple[Strides3, Strides3]
    width: int
    descales: Descales | None = None
    longest: tuple[int, int] = (0, 0)

    def values(self) -> dict[str, object]:
        """The fields of QuantizedOperands."""
        p, at, shapes = self.problem, self.at, self.problem.shapes()
        delta = shapes["delta_s"][0] if "delta_s" in shapes else (0, 0)
        return {
            "q_scale": at.get("q_scale"),
            "k_scale": at.get("k_scale"),
            "row_bias": at.get("row_bias"),
            "v_scale": at["v_scale"],
            "v_mean": at["v_mean"] if p.smooth_v else None,
            "delta_s": at.get("delta_s"),
            "q_scale_stride_h": shapes["q_scale"][0][-1],
            "k_scale_stride_h": shapes["k_scale"][0][-1],
            "delta_stride_h": delta[-2] * delta[-1],
            "delta_columns": delta[-1],
            "head_dim_pad": p.head_dim_pad,
        }

    def block_scales(self) -> dict[str, object]:
        """The fields of BlockScales; zeros for integers, which have other scales."""
        p, given = self.problem, self.descales
        shared = p.heads_q // p.heads_kv if given is not None and given.q.granularity == "per_head" else 1
        by_slot = int(p.varlen and given is None)
        values: dict[str, object] = {"by_slot": by_slot, "q_heads": shared, "row_bytes": self.width}
        for name, rows, heads in (("q", p.rows_q, p.heads_q), ("k", p.rows_k, p.heads_kv)):
            steps, blocks = (0, 0, 0), _UNLIMITED
            if given is not None:
                own, longest = (given.q, self.longest[0]) if name == "q" else (given.k, self.longest[1])
                # As many as the longest sequence is said to have; those of V count as keys' blocks.
                limited = own.granularity == "per_block" or (name == "k" and given.v.granularity == "per_block")
                blocks = -(-longest // BLOCK_ROWS) if limited else _UNLIMITED
                steps = own.strides if blocks else (0, 0, 0)
            elif p.e4m3:
                count = p.slots(rows, BLOCK_ROWS)
                steps = (0 if p.varlen else heads * count, count, 1)
            values |= dict(zip((f"{name}_stride_b", f"{name}_stride_h", f"{name}_stride_block"), steps, strict=True))
            values[f"{name}_blocks"] = blocks
        drift = self.at.get("drift")
        return values | {"drift": drift, "drift_stride_h": p.slots(p.rows_k, BLOCK_ROWS)}

    def value_factors(self) -> dict[str, object]:
        """The fields of ValueFactors, for a kernel that takes them."""
        assert self.descales is not None
        found = self.longest[1] > 0
        strides = self.descales.v.strides if found else (0, 0, 0)
        steps = dict(zip(("stride_b", "stride_h", "stride_block"), strides, strict=True))
        return {"factors": At("descale_v") if found else None, **steps}


def own(problem: QuantizeProblem, at: dict[str, At], starts: tuple[At, At]) -> OperandPlaces:
    """Operands as a quantizer makes them."""
    of_q, of_k, _ = operand_strides(problem)
    return OperandPlaces(problem, at, starts, (of_q, of_k), problem.head_dim_pad)


def given(problem: QuantizeProblem) -> OperandPlaces:
    """Operands that the caller gave, as arguments of their own names."""
    return own(problem, {name: At(name) for name in problem.shapes()}, (At("cu_seqlens_q"), At("cu_seqlens_k")))


def in_e4m3(problem: AttentionProblem, values: QuantizeProblem, at: dict[str, At]) -> OperandPlaces:
    """Q and K as they are, in e4m3, with the caller's scales; ``at``: where v is, transposed, and its scales.

    values: what describes them.
    """
    assert problem.strides is not None
    assert problem.descales is not None
    descales = problem.descales
    places = {"q_int": At("q"), "k_int": At("k"), **at}
    longest = problem.mask_extent
    for name, of, rows in (("q_scale", descales.q, longest[0]), ("k_scale", descales.k, longest[1])):
        if of.granularity in ("scalar", "per_head") or (of.granularity == "per_block" and rows):
            places[name] = At(f"descale_{name[0]}")
    starts = (At("cu_seqlens_q"), At("cu_seqlens_k"))
    return OperandPlaces(
        values, places, starts, (problem.strides.q, problem.strides.k), problem.head_dim, descales, longest
    )


def in_workspace(problem: QuantizeProblem) -> tuple[dict[str, At], int]:
    """Places of all outputs of a quantization at the beginning of the workspace, and their size in bytes."""
    offsets, size = carve(problem.shapes())
    return {name: At("workspace", offset) for name, offset in offsets.items()}, size
