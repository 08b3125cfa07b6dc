"""What the launches of attention on quantized operands share: where the operands are."""

from __future__ import annotations

from dataclasses import dataclass

from ..problems import QuantizeProblem
from ..problems.quantize import carve
from .structs import At


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
    """

    problem: QuantizeProblem
    at: dict[str, At]
    starts: tuple[At, At]

    def values(self) -> dict[str, object]:
        """The fields of QuantizedOperands."""
        p, at, shapes = self.problem, self.at, self.problem.shapes()
        delta = shapes["delta_s"][0] if "delta_s" in shapes else (0, 0)
        return {
            "q_scale": at["q_scale"],
            "k_scale": at["k_scale"],
            "row_bias": at["row_bias"],
            "v_scale": at["v_scale"],
            "v_mean": at["v_mean"] if p.smooth_v else None,
            "delta_s": at.get("delta_s"),
            "q_scale_stride_h": shapes["q_scale"][0][-1],
            "k_scale_stride_h": shapes["k_scale"][0][-1],
            "delta_stride_h": delta[-2] * delta[-1],
            "delta_columns": delta[-1],
            "head_dim_pad": p.head_dim_pad,
        }


def given(problem: QuantizeProblem) -> OperandPlaces:
    """Operands that the caller gave, as arguments of their own names."""
    return OperandPlaces(
        problem, {name: At(name) for name in problem.shapes()}, (At("cu_seqlens_q"), At("cu_seqlens_k"))
    )


def in_workspace(problem: QuantizeProblem) -> tuple[dict[str, At], int]:
    """Places of all outputs of a quantization at the beginning of the workspace, and their size in bytes."""
    offsets, size = carve(problem.shapes())
    return {name: At("workspace", offset) for name, offset in offsets.items()}, size
