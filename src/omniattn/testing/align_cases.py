"""The kernel that copies additive masks for tensor maps: the CPU's bits, and nothing written beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import masks
from omniattn.launch.host_struct import At
from omniattn.problems.memory import ITEMSIZE, WORKSPACE_ALIGNMENT
from omniattn.registry import KernelSpec
from omniattn.runtime.record import Program
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.mask_cases import MaskCase, MaskShape, Prepared

_POISON, _GUARD = 0xA5, 2 * WORKSPACE_ALIGNMENT


@dataclass(frozen=True)
class AlignCase(MaskCase):
    """One additive mask."""

    def prepare(self) -> Prepared:
        """The mask, and its copy as bytes: rows at multiples of 16 bytes, which end with zeros."""
        memory, first, view = self.memory()
        np.copyto(view, 2.5, where=np.isnan(view))  # of which frameworks keep no bits
        kind = "float32" if self.shape.kind == "float32" else self.dtype
        words = view.view(np.uint32)
        bits: Values = words
        if kind == "bfloat16":
            bits = (words >> 16).astype(np.uint16)
        elif kind == "float16":
            bits = view.astype(np.float16).view(np.uint16)
        pad = -bits.shape[3] % (16 // ITEMSIZE[kind])
        return Prepared(memory, first, {"copy": np.pad(bits, [(0, 0)] * 3 + [(0, pad)])})

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Launch the kernel, and compare all bytes of the memory."""
        kind = "float32" if self.shape.kind == "float32" else self.dtype
        problem = self.shape.problem(self.dtype)
        records, places = masks.build_aligned(self.spec, problem, At("workspace", _GUARD))
        before: Values = np.full(places.num_bytes + 2 * _GUARD, _POISON, dtype=np.uint8)
        memory, mask = framework.array(before, "uint8"), framework.array(prepared.memory, kind)
        workspace = arrays.describe(memory, "workspace")
        address = arrays.describe(mask, "mask").ptr + prepared.first * ITEMSIZE[kind]
        program = Program(records, ("mask", "workspace"), lambda spec: runtime.load(spec, workspace.ordinal))
        framework.synchronize()
        program.launch(0, [address, workspace.ptr])
        framework.synchronize()
        copy = np.ascontiguousarray(prepared.wanted["copy"]).reshape(-1).view(np.uint8)
        expected: Values = before.copy()
        expected[_GUARD : _GUARD + copy.size] = copy
        wrong = int((framework.to_numpy(memory) != expected).sum())
        return (math.inf, f"{wrong} of {expected.size} bytes differ") if wrong else (0.0, "")


def align_cases(spec: KernelSpec) -> tuple[AlignCase, ...]:
    """Rows at any address, one after the other and not, and memory that ends with the mask."""
    return (
        AlignCase("bfloat16", MaskShape("io", 2, 3, 100, 100), spec),
        AlignCase("float16", MaskShape("io", 2, 3, 77, 197, "b", offset=3), spec),
        AlignCase("bfloat16", MaskShape("io", 2, 3, 70, 133, "h", "columns"), spec),
        AlignCase("bfloat16", MaskShape("io", 1, 2, 70, 133, "", "backwards", pad=2), spec),
        AlignCase("float16", MaskShape("io", 1, 2, 70, 33, "", "spread"), spec),
        AlignCase("bfloat16", MaskShape("float32", 2, 2, 130, 577, "b", offset=1), spec),
        AlignCase("bfloat16", MaskShape("float32", 2, 2, 13, 1, pad=1), spec),
    )
