"""``layout_fp8_sm80``, which only attention starts: every byte of what it makes of V against NumPy, none beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import fp8
from omniattn.launch.host_struct import At
from omniattn.problems import FP8_ARRAYS, AttentionProblem, AttentionStrides, Descale, Descales
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.problems.quantize import BLOCK_ROWS, carve
from omniattn.reference.e4m3 import decode_e4m3
from omniattn.reference.quantize import KEY_ORDER, sequences
from omniattn.registry import KernelSpec
from omniattn.runtime.record import Program
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework

_POISON = 0xA5
_HEADS, _BATCH = 2, 3
#: Of packed sequences: one without keys, one that ends a block.
_STARTS = (0, 70, 70, 198)


@dataclass(frozen=True)
class LayoutCase:
    """One array of V: `RowCase`.

    Attributes
    ----------
    keys : int
    below : int
        How far head_dim lies below the kernel's own.
    packed, factors : bool
        Sequences one behind the other; a factor for each head of a sequence.
    spec : KernelSpec
    """

    keys: int
    below: int
    packed: bool
    factors: bool
    spec: KernelSpec

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.keys} keys, head_dim {self.head_dim}, packed {self.packed}, factors {self.factors}"

    @property
    def head_dim(self) -> int:
        """Of V."""
        return self.spec.head_dim - self.below

    @property
    def width(self) -> int:
        """Elements between two heads of a key: rows begin at multiples of 16 bytes."""
        return -(-self.head_dim // 16) * 16

    @property
    def problem(self) -> AttentionProblem:
        """The call's facts."""
        d, none, row = self.head_dim, (0, 0, 0), _HEADS * self.width
        of_v = (0 if self.packed else self.keys * row, row, self.width)
        descale = Descale("per_head", (_HEADS, 1, 0)) if self.factors else Descale()
        return AttentionProblem(
            "bfloat16", _BATCH, 1, self.keys, _HEADS, _HEADS, d, -1, -1, 1.0, 0.0, "none", "none", self.packed,
            FP8_ARRAYS, strides=AttentionStrides(none, none, of_v, none, (0, 0), (0, 0, 0, 0)),
            descales=Descales(v=descale),
        )  # fmt: skip

    def prepare(self) -> tuple[Values, Values, dict[str, Values]]:
        """V's bytes, factors, and what must come out, with `_POISON` where nothing is written."""
        whole = self.problem.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=False)
        rng = np.random.default_rng(self.keys)
        lead = () if self.packed else (_BATCH,)
        v: Values = rng.integers(0, 256, (*lead, self.keys, _HEADS, self.width), dtype=np.uint8)
        v[v & 127 == 127] = 0  # NaN
        v[..., 100:, 1, :] &= 127  # one sign
        factors = rng.random((_BATCH, _HEADS)).astype(np.float32)
        shapes = whole.shapes()
        out: Values = np.full(shapes["v"][0], _POISON, dtype=np.uint8)
        for s in sequences(whole, self.keys, np.array(_STARTS) if self.packed else None):
            blocks, first = -(-s.length // BLOCK_ROWS), s.slot(BLOCK_ROWS, self.packed)
            rows: Values = np.zeros((blocks * BLOCK_ROWS, _HEADS, whole.head_dim_pad), dtype=np.uint8)
            own = (v if self.packed else v[s.batch])[s.begin : s.begin + s.length, :, : self.head_dim]
            rows[: s.length, :, : self.head_dim] = own
            ordered = rows.reshape(-1, 16, *rows.shape[1:])[:, KEY_ORDER].reshape(rows.shape).transpose(1, 2, 0)
            part = out if self.packed else out[s.batch]
            part[:, :, first * BLOCK_ROWS : (first + blocks) * BLOCK_ROWS] = ordered
        drift: Values = np.full(fp8.layout_shapes(whole)["drift"][0], _POISON, dtype=np.uint8)
        for s in sequences(whole, self.keys, np.array(_STARTS) if self.packed else None):
            values = (v if self.packed else v[s.batch])[s.begin : s.begin + s.length, :, : self.head_dim]
            for i in range(-(-s.length // BLOCK_ROWS)):
                block = decode_e4m3(values[i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS]).astype(np.float64)
                squares, energy = block.sum(axis=0) ** 2, (block**2).sum(axis=0)
                drifts = (squares > 36 * energy).any(axis=-1) | (squares.sum(axis=-1) > 4 * energy.sum(axis=-1))
                part = drift if self.packed else drift[s.batch]
                part[:, s.slot(BLOCK_ROWS, self.packed) + i] = drifts
        scale = factors if self.factors else np.ones_like(factors)
        scales = np.ascontiguousarray(np.broadcast_to(scale[:, :, None], shapes["v_scale"][0]))
        return v, factors, {"v": out, "v_scale": scales, "drift": drift}

    def check(self, framework: Framework, prepared: tuple[Values, Values, dict[str, Values]]) -> tuple[float, str]:
        """Launch the kernel, and compare all bytes of the memory."""
        v, factors, wanted = prepared
        problem = self.problem
        whole = problem.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=False)
        offsets, size = carve(fp8.layout_shapes(whole))
        at = {name: At("workspace", WORKSPACE_ALIGNMENT + offset) for name, offset in offsets.items()}
        expected: Values = np.full(size + 2 * WORKSPACE_ALIGNMENT, _POISON, dtype=np.uint8)
        before = expected.copy()
        for name, values in wanted.items():
            expected[at[name].offset : at[name].offset + values.nbytes] = values.view(np.uint8).reshape(-1)
        names: dict[str, tuple[Values, str]] = {
            "v": (v, "uint8"), "descale_v": (factors, "float32"),
            "cu_seqlens_k": (np.array(_STARTS, dtype=np.int32), "int32"), "workspace": (before, "uint8"),
        }  # fmt: skip
        given: dict[str, Any] = {name: framework.array(values, dtype) for name, (values, dtype) in names.items()}
        described = [arrays.describe(x, name) for name, x in given.items()]
        records = fp8.build_layout(self.spec, problem, whole, at)
        program = Program(records, tuple(given), lambda spec: runtime.load(spec, described[0].ordinal))
        framework.synchronize()
        program.launch(0, [x.ptr for x in described])
        framework.synchronize()
        wrong = int((framework.to_numpy(given["workspace"]) != expected).sum())
        return (float("inf"), f"{wrong} bytes differ") if wrong else (0.0, "")


def layout_cases(spec: KernelSpec) -> tuple[LayoutCase, ...]:
    """The cases of a row."""
    facts = ((300, 0, False, True), (129, 8, False, False), (_STARTS[-1], 0, True, True), (128, 24, False, True))
    return tuple(LayoutCase(*one, spec) for one in facts)
