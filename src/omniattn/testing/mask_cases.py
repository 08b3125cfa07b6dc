"""The kernels that prepare masks, which only attention starts: the CPU's bits, and nothing written beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omniattn import arrays, runtime
from omniattn.launch import masks
from omniattn.launch.host_struct import At
from omniattn.problems import AttentionProblem, AttentionStrides
from omniattn.problems.memory import ITEMSIZE, WORKSPACE_ALIGNMENT
from omniattn.reference import mask_tiles as reference
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.record import Program
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.rounding import round_to

#: Operations of the registry that have these cases, and all that prepare masks.
PACK_OPS: tuple[str, ...] = ("mask_pack", "mask_list")
MASK_OPS: tuple[str, ...] = (*PACK_OPS, "mask_align", "tile_kinds")
#: What the memory holds before, and bytes of it before and behind the results.
_POISON, _GUARD = 0xA5, 2 * WORKSPACE_ALIGNMENT


@dataclass(frozen=True)
class MaskShape:
    """A mask in memory, and the call that it belongs to.

    Attributes
    ----------
    kind : str
        ``"bool"``, ``"float32"`` or ``"io"``.
    batch, heads, seqlen_q, seqlen_k : int
    broadcast : str
        Dimensions of stride 0, out of ``"bhqk"``; additive masks have ``"q"`` among them.
    layout : str
        ``"rows"``: keys next to each other; ``"spread"``: every second element; ``"columns"``: queries next to each
        other; ``"backwards"``: rows from the last to the first.
    pad, offset : int
        Elements between rows (columns), and before the first one.
    window : (left, right)
    block_m, lead_rows : int
        Of the attention kernel.
    """

    kind: str
    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    broadcast: str = ""
    layout: str = "rows"
    pad: int = 0
    offset: int = 0
    window: tuple[int, int] = (-1, -1)
    block_m: int = 128
    lead_rows: int = 0

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Of what lies in memory: 1 where the mask is broadcast."""
        full = (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        b, h, q, k = (1 if name in self.broadcast else extent for name, extent in zip("bhqk", full, strict=True))
        return b, h, q, k

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements; 0 for extents of 1."""
        b, h, q, k = self.extents
        step = 2 if self.layout == "spread" else 1
        pitch = (q if self.layout == "columns" else step * k) + self.pad
        rows = {"columns": (1, pitch), "backwards": (-pitch, 1)}.get(self.layout, (pitch, step))
        plane = pitch * (k if self.layout == "columns" else q)
        found = [0 if n == 1 else s for n, s in zip((b, h, q, k), (plane * h, plane, *rows), strict=True)]
        return found[0], found[1], found[2], found[3]

    @property
    def num_m_blocks(self) -> int:
        """Tiles of query rows of a head."""
        return -(-(self.seqlen_q + self.lead_rows) // self.block_m)

    def problem(self, dtype: str) -> AttentionProblem:
        """The call's facts."""
        none = (0, 0, 0)
        return AttentionProblem(
            dtype, self.batch, self.seqlen_q, self.seqlen_k, self.heads, 1, 64, *self.window, 1.0, 0.0, self.kind,
            "none", False, strides=AttentionStrides(none, none, none, none, (0, 0), self.strides),
        )  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """Memory of the mask, the element of it at which the mask begins, and what must come out by name."""

    memory: Values
    first: int
    wanted: dict[str, Values]


@dataclass(frozen=True)
class MaskCase:
    """One mask for one row of the registry: `RowCase`.

    Attributes
    ----------
    dtype : str
        Element type of q.
    shape : MaskShape
    spec : KernelSpec
        The row. The numbers are the same for both operations.
    """

    dtype: str
    shape: MaskShape
    spec: KernelSpec = field(compare=False)

    @property
    def name(self) -> str:
        """What messages call it."""
        s = self.shape
        facts = [f"{s.kind} mask of {' x '.join(map(str, s.extents))}", s.layout, f"blocks of {s.block_m}"]
        facts += [f"window {s.window}"] if s.window != (-1, -1) else []
        facts += [f"{name} {n}" for name, n in (("pad", s.pad), ("offset", s.offset), ("lead", s.lead_rows)) if n]
        return ", ".join(facts)

    def memory(self) -> tuple[Values, int, Values]:
        """Memory, the element of it at which the mask begins, and the mask."""
        s, extents = self.shape, self.shape.extents
        rng = np.random.default_rng([s.seqlen_q, s.seqlen_k, s.block_m])
        reach = [stride * (n - 1) for stride, n in zip(s.strides, extents, strict=True)]
        first = s.offset - sum(min(x, 0) for x in reach)
        size = first + sum(max(x, 0) for x in reach) + 1 if 0 not in extents else first
        if s.kind == "bool":
            memory = rng.integers(0, 256, size, dtype=np.uint8)  # what lies between rows is not the mask's
        else:
            memory = np.full(size, np.nan, dtype=np.float32)
        view = np.lib.stride_tricks.as_strided(
            memory[first:], extents, tuple(stride * memory.itemsize for stride in s.strides)
        )
        view[...] = _values(rng, s.kind, extents, "float32" if s.kind == "float32" else self.dtype)
        return memory, first, view

    def prepare(self) -> Prepared:
        """The mask, and what must come out."""
        s, extents = self.shape, self.shape.extents
        memory, first, view = self.memory()
        visible = np.broadcast_to(view, (*extents[:3], s.seqlen_k))
        name, make = ("bits", reference.pack_bits) if s.kind == "bool" else ("key_bias", reference.key_bias)
        packed, kinds = make(visible != 0 if s.kind == "bool" else visible[:, :, 0])
        lists = reference.lists(
            kinds, num_m_blocks=s.num_m_blocks, block_m=s.block_m, lead_rows=s.lead_rows, seqlen_q=s.seqlen_q,
            seqlen_k=s.seqlen_k, window_left=s.window[0], window_right=s.window[1], broadcast_rows=extents[2] == 1,
        )  # fmt: skip
        return Prepared(memory, first, {name: packed, "kinds": kinds, "lists": lists})

    def check(self, framework: Framework, prepared: Prepared) -> tuple[float, str]:
        """Launch the row's kernel, and compare all bytes of the memory."""
        note = self.run(framework, prepared, (self.spec.op,))
        return (math.inf if note else 0.0), note

    def run(self, framework: Framework, prepared: Prepared, ops: tuple[str, ...] = PACK_OPS) -> str:
        """Launch the kernels of one operation, or of both; what is wrong, empty if nothing."""
        kind = {"bool": "uint8", "float32": "float32", "io": self.dtype}[self.shape.kind]
        mask = framework.array(prepared.memory, kind)
        address = arrays.describe(mask, "mask").ptr + prepared.first * ITEMSIZE[kind]
        return run_kernels(framework, self.shape, self.shape.problem(self.dtype), address, prepared.wanted, ops)


def run_kernels(
    framework: Framework,
    shape: MaskShape,
    problem: AttentionProblem,
    address: int,
    wanted: dict[str, Values],
    ops: tuple[str, ...] = PACK_OPS,
) -> str:
    """Launch the kernels of ``ops`` on a mask that begins at ``address``, and compare all bytes of the workspace.

    Without ``mask_pack`` the lists are made from the kinds in ``wanted``.
    """
    pack = next(row for row in REGISTRY if row.op == "mask_pack" and row.dtype == problem.dtype)
    listing = next(row for row in REGISTRY if row.op == "mask_list")
    facts = (shape.block_m, shape.lead_rows, shape.num_m_blocks)
    records, places = masks.build(pack, listing, problem, *facts, At("workspace", _GUARD))
    before: Values = np.full(places.num_bytes + 2 * _GUARD, _POISON, dtype=np.uint8)
    at = {"bits": places.bits, "key_bias": places.key_bias, "kinds": places.kinds, "lists": places.lists}
    parts = {name: (at[name], values) for name, values in wanted.items()}
    if "mask_pack" not in ops:
        _put(before, *parts["kinds"])
        parts = {"lists": parts["lists"]}
    if "mask_list" not in ops:
        del parts["lists"]
    memory = framework.array(before, "uint8")
    workspace = arrays.describe(memory, "workspace")
    assert workspace.ptr % WORKSPACE_ALIGNMENT == 0
    chosen = [record for record in records if record.spec.op in ops]
    program = Program(chosen, ("mask", "workspace"), lambda spec: runtime.load(spec, workspace.ordinal))
    framework.synchronize()
    program.launch(0, [address, workspace.ptr])
    framework.synchronize()
    return difference(framework.to_numpy(memory), before, parts)


def difference(got: Values, before: Values, wanted: dict[str, tuple[At | None, Values]]) -> str:
    """How memory differs from what was there ``before`` with the results ``wanted`` in it; empty if it does not."""
    expected: Values = before.copy()
    notes = []
    for name, (at, values) in wanted.items():
        assert at is not None
        result = got[at.offset : at.offset + values.nbytes].view(values.dtype).reshape(values.shape)
        exact = values
        if name == "lists":
            poison = np.full(1, _POISON * 0x01010101, dtype=np.uint32).view(np.int32)
            exact = np.where(values == reference.UNWRITTEN, poison, values)
        elif name == "key_bias":  # a NaN has many bit patterns
            exact = np.where(np.isnan(values) & np.isnan(result), result, values)
        _put(expected, at, exact)
        wrong = int((result.view(np.uint8) != exact.view(np.uint8)).sum())
        if wrong:
            notes.append(f"{name} differs in {wrong} of {values.nbytes} bytes")
    if not notes and not np.array_equal(got, expected):
        notes.append(f"{int((got != expected).sum())} bytes outside the results were written")
    return "; ".join(notes)


def _put(memory: Values, at: At | None, values: Values) -> None:
    assert at is not None
    memory[at.offset : at.offset + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _values(rng: Any, kind: str, extents: tuple[int, int, int, int], dtype: str) -> Values:
    """Tiles of all sorts: wholly visible, wholly hidden, with one exception, random."""
    b, h, q, k = extents
    sort = rng.integers(0, 5, (b, h, -(-q // 64), -(-k // 64))).repeat(64, axis=2).repeat(64, axis=3)[:, :, :q, :k]
    odd = rng.random(extents) < 1 / 2048
    dense = rng.random(extents) < 0.5
    visible = np.select([sort == 0, sort == 1, sort == 2, sort == 3], [True, False, odd, ~odd], dense)
    if kind == "bool":
        return np.where(visible, rng.choice(np.array([1, 1, 2, 0x80, 0xFF], dtype=np.uint8), extents), np.uint8(0))
    odd_values = rng.choice(np.array([-np.inf, np.nan, np.inf, -1.5, 3.14159, -0.0, 1e-7]), extents)
    numbers = np.where(visible, 0.0, np.where(sort == 1, -np.inf, odd_values)).astype(np.float32)
    return round_to(numbers, dtype)


_PACK_BOOL = (
    MaskShape("bool", 2, 3, 300, 1000, layout="rows"),
    MaskShape("bool", 1, 2, 130, 333, "h", pad=1, offset=3),
    MaskShape("bool", 2, 2, 70, 200, "b", "columns"),
    MaskShape("bool", 2, 1, 257, 700, "q", pad=4),
)
_PACK_ADDITIVE = (
    MaskShape("float32", 2, 2, 100, 700, "hq"),
    MaskShape("io", 2, 2, 100, 333, "q", "spread", offset=1),
)
_LISTS = (
    MaskShape("bool", 2, 2, 1000, 10000, "b", window=(700, 90), block_m=192),
    MaskShape("bool", 1, 1, 520, 520, window=(-1, 0), block_m=128, lead_rows=64),
    MaskShape("float32", 2, 1, 300, 9000, "q", window=(-1, 0), block_m=64),
)


def mask_cases(spec: KernelSpec) -> tuple[MaskCase, ...]:
    """The cases of a row of `PACK_OPS`."""
    chosen = _LISTS if spec.op == "mask_list" else _PACK_BOOL + _PACK_ADDITIVE
    dtype = "float16" if spec.op == "mask_list" else spec.dtype
    return tuple(MaskCase(dtype, shape, spec) for shape in chosen)
