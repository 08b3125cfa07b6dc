"""``packed_parts_sm80``, which only attention starts: every start against NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from omniattn.ops.parts import packed_parts
from omniattn.reference import parts as reference
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework


@dataclass(frozen=True)
class PartsCase:
    """Packed sequences, and which of the two lengths are given: `RowCase`.

    Attributes
    ----------
    batch : int
    used_q, used_k : bool
    """

    batch: int
    used_q: bool
    used_k: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.batch} sequences, seqused_q {self.used_q}, seqused_k {self.used_k}"

    def prepare(self) -> tuple[list[Values | None], list[Values]]:
        """Arrays, with lengths below, at and beyond those of their sequences; the starts that must come out."""
        rng = np.random.default_rng(self.batch)
        given: list[Values | None] = []
        for _ in range(2):
            lengths = rng.integers(0, 50, self.batch)
            given.append(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        for is_given in (self.used_q, self.used_k):
            used: Values = rng.integers(-3, 60, self.batch).astype(np.int32)
            used[5::7] = 2**31 - 1
            given.append(used if is_given else None)
        cu_q, cu_k, used_q, used_k = given
        assert cu_q is not None
        assert cu_k is not None
        return given, list(reference.packed_parts(cu_q, cu_k, used_q, used_k))

    def check(self, framework: Framework, prepared: tuple[list[Values | None], list[Values]]) -> tuple[float, str]:
        """Call and compare all starts."""
        given, expected = prepared
        made = packed_parts(*(None if x is None else framework.array(x, "int32") for x in given))
        framework.synchronize()
        for name, own, wanted in zip("qk", made, expected, strict=True):
            found = framework.to_numpy(own)
            if found.shape != wanted.shape or (found != wanted).any():
                return math.inf, f"starts of {name}: {found.tolist()[:20]}, expected {wanted.tolist()[:20]}"
        return 0.0, ""


#: The kernel's cases: threads of several CTAs, a last CTA that only writes the end, no sequence.
PARTS_CASES: tuple[PartsCase, ...] = tuple(
    PartsCase(batch, *used) for batch in (0, 1, 128, 1000) for used in ((True, True), (True, False), (False, True))
)
