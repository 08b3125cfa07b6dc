"""Loads of shared memory that may still be under way when a barrier is arrived at: ``python -m build_tools.pending_loads
CUBIN...``, or ``--rows NAME...`` to compile rows of the registry for sm_90a first.

A stage that bulk copies fill is given back by an arrival (pipeline/ring.cuh). The arrival orders no load whose result
nobody has waited for: the next copy may overtake it (docs/performance/attn_bwd_sm90.md, v20). What is waited for, stands
in the instructions: one that takes its time counts up one of six scoreboards and counts it down when its result is
there, and any instruction may wait until some of them are 0. This walks all ways through the code and lists, for every
arrival, the loads whose scoreboard nobody has waited for since.

Such a load is a fault only if the arrival gives back what it reads; which barrier that is, the machine code does not
say. ``Arrival.reads`` helps: places in shared memory, as offsets of the loads.

Bits of an instruction besides those of ``build_tools/sass.py``: 16 to 23 the register that a load writes, 24 to 31 that
of its address, 40 to 63 its offset; 110 to 112 the scoreboard that counts the result (7: none), 116 to 121 the
scoreboards that it waits for.
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
_INDIRECT = {0x149: "BRX", 0x14A: "JMP", 0x14B: "JMX", 0x158: "BRXU", 0x159: "JMXU"}
_NO_SCOREBOARD, _NO_REGISTER, _NEVER = 7, 0xFF, 15
#: The last three digits of SYNCS: arrivals in this form; 0x5A7 asks for a phase.
_ARRIVE = 0x9A7
_ONE_ARRIVAL = 1 << 84  # .A1T0; without it the arrival expects bytes


@dataclass(frozen=True)
class Load:
    """A load of shared memory: its place in the code, its name, address register (None: none) and offset in bytes."""

    at: int
    name: str
    register: int | None
    offset: int
    scoreboard: int | None

    def __str__(self) -> str:
        register = "" if self.register is None else f"R{self.register}+"
        return f"{self.name} [{register}{self.offset:#x}] at {16 * self.at:#x}"


@dataclass(frozen=True)
class Arrival:
    """An arrival at a barrier, and the loads that may be under way then, in the code's order."""

    at: int
    expects_bytes: bool
    loads: tuple[Load, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """Offsets of the loads, each once, sorted."""
        return tuple(sorted({load.offset for load in self.loads}))


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
        if word >> 38 & 0x3F == 0:
            waited.add(word >> 44 & 7)
    return waited


def load_of(at: int, word: int) -> Load | None:
    """The load of shared memory that instruction ``at`` is, or None."""
    name = _LOADS.get(word & 0x1FF)
    if name is None or word >> 12 & 15 == _NEVER:
        return None
    register, offset = word >> 24 & 0xFF, word >> 40 & 0xFFFFFF
    offset -= (offset >> 23) << 24
    return Load(at, name, None if register == _NO_REGISTER else register, offset, scoreboard(word))


def followers(words: Sequence[int]) -> list[list[int]]:
    """Which instructions may come next, of each; a return comes back behind every call.

    Raises
    ------
    ValueError
        A branch goes to a computed address.
    """
    calls = [i + 1 for i, word in enumerate(words) if word & 0x1FF == _CALL]
    found = []
    for i, word in enumerate(words):
        operation, always = word & 0x1FF, word >> 12 & 15 == sass.ALWAYS
        if operation in _INDIRECT:
            raise ValueError(f"{_INDIRECT[operation]} at {16 * i:#x} goes to a computed address")
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
        The file is no 64-bit ELF file with one kernel, or a branch goes to a computed address.
    """
    words = _words(cubin)
    loads = [load for load in map(load_of, range(len(words)), words) if load is not None]
    under_way = _under_way(words, loads)
    found = []
    for i, word in enumerate(words):
        if word & 0xFFF == _ARRIVE:
            listed = tuple(load for k, load in enumerate(loads) if under_way[i] >> k & 1)
            found.append(Arrival(i, not word & _ONE_ARRIVAL, listed))
    return found


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
            kind = "arrival that expects bytes" if arrival.expects_bytes else "arrival"
            lines.append(f"  {kind} at {16 * arrival.at:#x}")
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
    from build_tools.kernels import preload_compiler
    from omniattn.registry import by_name
    from omniattn.runtime.compile import compile_spec

    if names:
        preload_compiler()
    return [(name, compile_spec(by_name(name), "90a").cubin) for name in names]


if __name__ == "__main__":
    sys.exit(main())
