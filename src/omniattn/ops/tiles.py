"""What masks leave of a call of attention: its tiles, counted by the kernels that find them for the call itself."""

from __future__ import annotations

import itertools
import operator
import struct
from dataclasses import dataclass

from .. import arrays
from ..arrays import Tensor
from ..launch.structs import MASK_LIST
from ..plan.engine import Call, Plan, operand_names, workspace_of
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..registry.masks import MASK_TILE
from ..runtime import load
from ..runtime.driver import Driver, device_context, get_driver
from ..runtime.record import LaunchRecord, Program

#: Operations of the kernels that prepare a mask; the last one lists what is left.
_FINDING = ("block_means", "choose_blocks", "mask_pack", "tile_kinds", "mask_list")


@dataclass(frozen=True)
class TileCounts:
    """What a mask does to tiles of 64 queries and 64 keys.

    Attributes
    ----------
    hidden, cut, whole : int
        Tiles of the mask, as far as it is not broadcast, that it hides from all queries, hides a part of, and does not
        change. One that is the same for all queries has one tile of them. Of packed sequences with a mask each, those
        beyond a sequence's end are hidden; of a `ScoreMod`, the sequences' own tiles.
    steps, most_steps : int
        Tiles of 64 keys that the kernel's tiles of queries load, and that they would load without mask, causal and
        window; both for one head where the mask is the same for all.
    """

    hidden: int
    cut: int
    whole: int
    steps: int
    most_steps: int

    def __str__(self) -> str:
        return (
            f"{self.hidden} tiles hidden, {self.cut} cut, {self.whole} whole; {self.steps} of {self.most_steps} steps"
        )


def finding(plan: Plan) -> tuple[LaunchRecord, ...]:
    """The launches of a plan that find out about tiles; none where nobody has to."""
    if plan.launches is None:
        return ()
    found = tuple(record for record in plan.launches.records if record.spec.op in _FINDING)
    return found if found and found[-1].spec.op == "mask_list" else ()


def count_tiles(call: Call, plan: Plan, tensors: dict[str, Tensor]) -> TileCounts | None:
    """Run the kernels that look at masks, and wait for what they find; None where a call has none."""
    from ..reference.mask_tiles import EMPTY, FULL, MIXED, NO_LIST

    records = finding(plan)
    if not records:
        return None
    assert plan.launches is not None
    place = next(iter(tensors.values()))
    memory = workspace_of(place, plan.launches.workspace_bytes)
    base = -(-memory.ptr // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    given = {**{name: t.ptr for name, t in tensors.items()}, "workspace": base}
    names = operand_names(call.operation, False, plan.problem)
    everything = [*tensors.values(), memory]
    handle = arrays.prepare(everything, call.stream)
    Program(records, names, lambda spec: load(spec, plan.ordinal)).launch(handle, [given.get(n, 0) for n in names])
    listing = records[-1]
    number = {
        name: struct.unpack_from("<i", listing.arguments, MASK_LIST.offsets[name])[0]
        for name in ("mask_batch", "mask_heads", "m_tiles", "n_tiles", "num_m_blocks", "block_m", "kinds_of_slots")
    }
    at = {p.offset: base + p.add for p in listing.pointers}
    packed = "cu_seqlens_q" in tensors
    heads, n_tiles = number["mask_heads"], number["n_tiles"]
    masks = number["mask_batch"] * heads
    lists, entries = (heads if packed else masks) * number["num_m_blocks"], (2 if packed else 1) + n_tiles
    driver = get_driver()
    with device_context(driver, plan.ordinal):
        kinds = driver.read(at[MASK_LIST.offsets["kinds"]], masks * number["m_tiles"] * n_tiles, handle)
        listed = driver.read(at[MASK_LIST.offsets["lists"]], 4 * lists * entries, handle)
        lengths = [_lengths(driver, tensors, side, handle) for side in "qk" if packed]
    arrays.release(everything, handle)
    counts = [struct.unpack_from("<i", listed, 4 * i * entries)[0] for i in range(lists)]
    hidden, cut, whole = (kinds.count(kind) for kind in (EMPTY, MIXED, FULL))
    if not packed:
        return TileCounts(hidden, cut, whole, sum(counts), lists * n_tiles)
    tiles_k, tiles_q, blocks = (
        [-(-n // size) for n in of]
        for of, size in ((lengths[1], MASK_TILE), (lengths[0], MASK_TILE), (lengths[0], number["block_m"]))
    )
    if number["kinds_of_slots"]:
        hidden = heads * sum(map(operator.mul, tiles_q, tiles_k)) - cut - whole
    of_sequence = (struct.unpack_from("<i", listed, 4 * i * entries + 4)[0] for i in range(lists))
    steps = sum(tiles_k[b] if count == NO_LIST else count for count, b in zip(counts, of_sequence, strict=True))
    return TileCounts(hidden, cut, whole, steps, heads * sum(map(operator.mul, blocks, tiles_k)))


def _lengths(driver: Driver, tensors: dict[str, Tensor], side: str, stream: int) -> list[int]:
    """Used rows of each packed sequence."""
    found = [tensors[name] for name in (f"cu_seqlens_{side}", f"seqused_{side}") if name in tensors]
    starts, *used = (struct.unpack(f"<{t.size}i", driver.read(t.ptr, 4 * t.size, stream)) for t in found)
    lengths = [max(b - a, 0) for a, b in itertools.pairwise(starts)]
    return [max(min(pair), 0) for pair in zip(lengths, *used, strict=True)]
