"""Loads of shared memory that may be under way when a barrier is arrived at: ``python -m build_tools.pending_loads``.

It takes cubins for sm_90a, or ``--rows NAME...``, rows of the registry, which it compiles.

A stage that bulk copies fill is given back by an arrival (pipeline/ring.cuh). The arrival orders no load whose result
nobody has waited for: the next copy may overtake it (docs/performance/records/attn_bwd_sm90.toml, v20). Who waits
stands in the instructions: one that takes its time counts up one of six scoreboards and counts it down when its result
is there, and any instruction may wait until some of them are 0. This walks all ways through the code and lists, for
every arrival, the loads whose scoreboard nobody has waited for since.

Such a load is a fault only if the arrival gives back what it reads, and if copies refill that. Which barrier it is, the
machine code does not say, and some of the ways are never taken. So this is a list for a reader of the source. Threads
of one warp on different ways are not followed.

Bits of an instruction besides those of ``build_tools/sass.py``: 24 to 31 the register of a load's address, 32 to 37 the
uniform one if bit 91 is set, 40 to 63 its offset; 110 to 112 the scoreboard that counts the result (7: none), 116 to
121 the scoreboards that it waits for.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from build_tools import sass

_LOADS = {0x184: "LDS", 0x03B: "LDSM", 0x180: "LD"}  # LD: generic, so it may read shared memory
_IN_ORDER = ("LDS", "LDSM")
_BRANCH, _CALL, _RETURN, _EXIT, _COLLECTIVE, _DEPBAR = 0x147, 0x144, 0x150, 0x14D, 0x148, 0x11A
_NOT_RELATIVE = {0x143: "CALL.ABS", 0x149: "BRX", 0x14A: "JMP", 0x14C: "JMX"}
_NO_SCOREBOARD, _NO_REGISTER, _NEVER = 7, 0xFF, 15
#: SYNCS in the form of arrivals; in others (0x5A7) it asks for a phase.
_ARRIVE = 0x9A7
_ONE_ARRIVAL = 1 << 84  # .A1T0; without it the arrival expects bytes
_NO_UNIFORM = 0x3F
#: Where a kernel's dynamic shared memory begins (kSmemBase in ptx/shared.cuh).
_SMEM_BASE = 1024
#: ULEA with a constant; how far ahead of an arrival it may stand; R2UR and S2UR, which write uniform registers as well
#: as all operations from 0x80 to 0xBF do.
_ULEA, _NEAR, _TO_UNIFORM = 0x891, 256, (0x0CA, 0x1C3)


@dataclass(frozen=True)
class Load:
    """A load of shared memory: its place in the code, its name, registers of its address (None: none), and offset."""

    at: int
    name: str
    register: int | None
    uniform: int | None
    offset: int
    scoreboard: int | None

    def __str__(self) -> str:
        registers = "" if self.register is None else f"R{self.register}+"
        registers += "" if self.uniform is None else f"UR{self.uniform}+"
        return f"{self.name} [{registers}{self.offset:#x}] at {16 * self.at:#x}"


@dataclass(frozen=True)
class Arrival:
    """An arrival at a barrier, and the loads that may be under way then, in the code's order.

    ``barrier`` is the shared address of the barrier, or of the first one of its ring; None where the code does not show
    it. ``expects_bytes``: a producer's, ahead of a copy.
    """

    at: int
    expects_bytes: bool
    barrier: int | None
    loads: tuple[Load, ...]

    def __str__(self) -> str:
        barrier = "a computed address" if self.barrier is None else f"{self.barrier:#x}"
        return f"arrival {'with bytes ' if self.expects_bytes else ''}on {barrier} at {16 * self.at:#x}"


def _words(cubin: bytes) -> list[int]:
    text = sass.code(cubin)
    return [low | high << 64 for low, high in struct.iter_unpack("<QQ", text)]


def scoreboard(word: int) -> int | None:
    """The scoreboard that counts an instruction's result, of its 128 bits."""
    index = word >> 110 & 7
    return None if index == _NO_SCOREBOARD else index


def waits_for(word: int) -> set[int]:
    """The scoreboards that are 0 once an instruction has been issued, of its 128 bits."""
    waited = {i for i in range(6) if word >> 116 + i & 1}
    # DEPBAR.LE SBn, count, {others}: bits 44 to 46, 38 to 43, 32 to 37. Of a count above 0 nothing is known.
    if word & 0x1FF == _DEPBAR:
        waited |= {i for i in range(6) if word >> 32 + i & 1}
        if word >> 47 & 1 and word >> 38 & 0x3F == 0:
            waited.add(word >> 44 & 7)
    return waited


def load_of(at: int, word: int) -> Load | None:
    """The load of shared memory that instruction ``at`` is, or None."""
    name = _LOADS.get(word & 0x1FF)
    if name is None or word >> 12 & 15 == _NEVER:
        return None
    register = word >> 24 & 0xFF
    return Load(
        at,
        name,
        None if register == _NO_REGISTER else register,
        word >> 32 & 0x3F if word >> 91 & 1 else None,
        _signed(word >> 40 & 0xFFFFFF, 24),
        scoreboard(word),
    )


def followers(words: Sequence[int]) -> list[list[int]]:
    """Which instructions may come next, of each; a return comes back behind every call.

    Raises
    ------
    ValueError
        A branch is not relative.
    """
    calls = [i + 1 for i, word in enumerate(words) if word & 0x1FF == _CALL]
    found = []
    for i, word in enumerate(words):
        operation, always = word & 0x1FF, word >> 12 & 15 == sass.ALWAYS
        if operation in _NOT_RELATIVE:
            raise ValueError(f"{_NOT_RELATIVE[operation]} at {16 * i:#x}: only relative branches are followed")
        to = []
        if operation in (_BRANCH, _CALL, _COLLECTIVE) and not _is_meeting_of_all(word):
            to.append(i + 1 + sass.distance(word, "90") // 4)
        if operation == _RETURN:
            to += calls
        # A branch has a condition of its own besides the predicate, and forms such as BRA.DIV: bits 82 to 91.
        plain = operation != _BRANCH or word >> 82 & 0x3FF == 0xE0
        if not (operation in (_BRANCH, _CALL, _RETURN, _EXIT) and always and plain):
            to.append(i + 1)
        found.append([j for j in to if 0 <= j < len(words)])
    return found


def _is_meeting_of_all(word: int) -> bool:
    """Whether a WARPSYNC has no target: only the collective form has one, in bit 90."""
    return word & 0x1FF == _COLLECTIVE and not word >> 90 & 1


def arrivals(cubin: bytes) -> list[Arrival]:
    """Every arrival in the one kernel of a cubin for sm_90a.

    Raises
    ------
    ValueError
        The file is no 64-bit ELF file with one kernel, or a branch is not relative.
    """
    words = _words(cubin)
    loads = [load for load in map(load_of, range(len(words)), words) if load is not None]
    under_way = _under_way(words, loads)
    found = []
    for i, word in enumerate(words):
        if word & 0xFFF == _ARRIVE:
            listed = tuple(load for k, load in enumerate(loads) if under_way[i] >> k & 1)
            found.append(Arrival(i, not word & _ONE_ARRIVAL, _barrier(words, i), listed))
    return found


def _barrier(words: Sequence[int], at: int) -> int | None:
    """Where the barrier of arrival ``at`` is, or its ring: a constant, to which 8 times a stage may have been added."""
    word = words[at]
    register, uniform = word >> 24 & 0xFF, word >> 64 & 0x3F
    offset = _signed(word >> 40 & 0xFFFFFF, 24)
    if offset >= _SMEM_BASE:
        return offset
    if register != _NO_REGISTER or uniform == _NO_UNIFORM:
        return None
    for before in reversed(words[max(at - _NEAR, 0) : at]):
        operation = before & 0x1FF
        if (0x80 <= operation < 0xC0 or operation in _TO_UNIFORM) and before >> 16 & 0x3F == uniform:
            is_ring = before & 0xFFF == _ULEA and before >> 75 & 31 == 3
            return before >> 32 & 0xFFFFFFFF if is_ring else None
    return None


def _signed(bits: int, width: int) -> int:
    return bits - (bits >> width - 1 << width)


def _under_way(words: Sequence[int], loads: Sequence[Load]) -> list[int]:
    """The loads, as bits of a number, that may be under way when an instruction is issued, of each instruction.

    Of every scoreboard are kept the loads that may be under way still when it is 0. Shared memory returns what it loads
    in order, which ptxas counts on: many a load has no scoreboard, but the next one has.
    """
    following, starts = followers(words), {load.at: k for k, load in enumerate(loads)}
    waits = [waits_for(word) for word in words]
    # Ahead of each instruction: what may be under way, and what of it may be so when scoreboard 0 .. 5 is 0.
    ahead = [[0] * 7 for _ in words]
    found = [0] * len(words)
    seen = [False] * len(words)
    todo = [0] if words else []
    while todo:
        i = todo.pop()
        seen[i] = True
        left = ahead[i]
        for k in waits[i]:
            left = [x & left[1 + k] for x in left]
        found[i] = left[0]
        if i in starts:
            load, own = loads[starts[i]], 1 << starts[i]
            after = [x | own for x in left]
            if load.scoreboard is not None:
                is_last = load.name in _IN_ORDER and words[i] >> 12 & 15 == sass.ALWAYS
                after[1 + load.scoreboard] = 0 if is_last else left[1 + load.scoreboard]
            left = after
        for j in following[i]:
            joined = [x | y for x, y in zip(left, ahead[j], strict=True)]
            if not seen[j] or joined != ahead[j]:
                ahead[j] = joined
                todo.append(j)
    return found


def report(name: str, found: Iterable[Arrival]) -> str:
    """Text about arrivals that loads may be under way at."""
    lines = [name]
    for arrival in found:
        if arrival.loads:
            lines.append(f"  {arrival}")
            lines += [f"    {load}" for load in arrival.loads]
    return "\n".join(lines if len(lines) > 1 else [f"{name}: none"])


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring. Exit status 1 if there is any such load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="*", type=Path, help="files")
    parser.add_argument("--rows", nargs="+", default=[], help="rows of the registry, compiled for sm_90a")
    options = parser.parse_args(arguments)
    some = False
    for name, cubin in [(path.name, path.read_bytes()) for path in options.cubins] + compiled(options.rows):
        found = arrivals(cubin)
        print(report(name, found))
        some |= any(arrival.loads for arrival in found)
    return int(some)


def compiled(names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Rows of the registry, by name, compiled for sm_90a."""
    from build_tools.jobs import preload_compiler
    from omniattn.registry import by_name
    from omniattn.runtime.compile import compile_spec

    if names:
        preload_compiler()
    return [(name, compile_spec(by_name(name), "90a").cubin) for name in names]


if __name__ == "__main__":
    sys.exit(main())
