"""``clear_unused_sm80``, which only attention starts: every byte of the arrays against NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import used_rows
from omniattn.registry import KernelSpec
from omniattn.runtime.record import Program
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework


@dataclass(frozen=True)
class ClearCase:
    """Three packed arrays, one of queries with an LSE and two of keys: `RowCase`.

    Attributes
    ----------
    batch, longest : int
        Sequences, and how long they are at most.
    heads, head_dim : int
    hnd : bool
        Heads come first.
    spec : KernelSpec
    """

    batch: int
    longest: int
    heads: int
    head_dim: int
    hnd: bool
    spec: KernelSpec

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.batch} sequences of up to {self.longest}, {self.heads} x {self.head_dim}, HND {self.hnd}"

    def prepare(self) -> tuple[dict[str, Values], dict[str, Values], tuple[used_rows.Cleared, ...]]:
        """Arrays before and after, and what the launch is told of them."""
        rng = np.random.default_rng(self.batch + self.head_dim)
        before: dict[str, Values] = {}
        rows = {}
        for side in "qk":
            # Rows that belong to no sequence stand before the first and behind the last one.
            starts = 3 + np.cumsum([0, *rng.integers(0, self.longest + 1, self.batch)])
            used = rng.integers(-3, self.longest + 9, self.batch)
            used[2::5] = 2**31 - 1
            before |= {f"cu_seqlens_{side}": starts.astype(np.int32), f"seqused_{side}": used.astype(np.int32)}
            rows[side] = int(starts[-1]) + 5
        cleared = []
        for name, side in (("o", "q"), ("dk", "k"), ("dv", "k")):
            head_dim = self.head_dim + 8 * (name == "dv")
            lead = (self.heads, rows[side]) if self.hnd else (rows[side], self.heads)
            # A row is longer than what is cleared of it.
            before[name] = np.ones((*lead, head_dim + 8), dtype=np.float16)
            steps = before[name].strides[0] // 2, before[name].strides[1] // 2
            strides = (0, *(steps[::-1] if self.hnd else steps))
            cleared.append(used_rows.Cleared(name, side, rows[side], self.heads, head_dim, strides))
        before["lse"] = np.zeros((self.heads, rows["q"]), dtype=np.float32)
        after = {name: x.copy() for name, x in before.items()}
        for x in cleared:
            of_rows = after[x.name].swapaxes(0, 1) if self.hnd else after[x.name]
            starts, used = before[f"cu_seqlens_{x.side}"], before[f"seqused_{x.side}"]
            for begin, end, count in zip(starts[:-1], starts[1:], used, strict=True):
                first = begin + min(max(int(count), 0), end - begin)
                of_rows[first:end, :, : x.head_dim] = 0
                if x.name == "o":
                    after["lse"][:, first:end] = -np.inf
        return before, after, tuple(cleared)

    def check(
        self, framework: Framework, prepared: tuple[dict[str, Values], dict[str, Values], tuple[used_rows.Cleared, ...]]
    ) -> tuple[float, str]:
        """Launch the kernel, and compare all arrays."""
        before, after, cleared = prepared
        given: dict[str, Any] = {name: framework.array(x, x.dtype.name) for name, x in before.items()}
        described = [arrays.describe(x, name) for name, x in given.items()]
        records = used_rows.build_clear(self.spec, self.batch, cleared, before["lse"].shape[1])
        program = Program(records, tuple(given), lambda spec: runtime.load(spec, described[0].ordinal))
        framework.synchronize()
        program.launch(0, [x.ptr for x in described])
        framework.synchronize()
        wrong = {name: int((framework.to_numpy(given[name]) != x).sum()) for name, x in after.items()}
        found = ", ".join(f"{count} elements of {name}" for name, count in wrong.items() if count)
        return (float("inf"), f"{found} differ") if found else (0.0, "")


def clear_cases(spec: KernelSpec) -> tuple[ClearCase, ...]:
    """The cases of a row: slots of several CTAs, empty sequences, rows of many heads, no sequence."""
    facts = ((0, 5, 2, 64, False), (1, 200, 3, 40, False), (40, 90, 4, 128, True), (300, 3, 1, 256, False))
    return tuple(ClearCase(*one, spec) for one in facts)
