"""Which instructions a cubin executes, without a disassembler: opcodes and branches of sm_80 to sm_90 machine code.

An instruction has 128 bits: the operation in bits 0 to 8, its predicate in bits 12 to 15 (7: always), a branch's
distance from the next instruction, in units of 4 bytes, in bits 34 to 81.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_NAMES = {
    0x02: "MOV", 0x05: "CS2R", 0x06: "VOTE", 0x07: "SEL", 0x08: "FSEL", 0x09: "FMNMX", 0x0B: "FSETP", 0x0C: "ISETP",
    0x10: "IADD3", 0x11: "LEA", 0x12: "LOP3", 0x16: "PRMT", 0x17: "IMNMX", 0x19: "SHF", 0x1C: "PLOP3", 0x20: "FMUL",
    0x21: "FADD", 0x23: "FFMA", 0x24: "IMAD", 0x25: "IMAD", 0x27: "IMAD", 0x30: "HADD2", 0x36: "VIADD", 0x37: "IMMA",
    0x3B: "LDSM", 0x3C: "HMMA", 0x3E: "F2FP", 0x7A: "QMMA", 0x108: "MUFU", 0x11D: "BAR", 0x141: "BSYNC",
    0x144: "CALL", 0x145: "BSSY", 0x147: "BRA", 0x14D: "EXIT", 0x150: "RET", 0x183: "LDL", 0x184: "LDS", 0x187: "STL",
    0x188: "STS", 0x189: "SHFL", 0x1AE: "LDGSTS",
}  # fmt: skip
#: Tensor-core products of integers, halves, and 8-bit floats.
PRODUCTS = ("IMMA", "HMMA", "QMMA")
#: The predicate of an instruction that has none.
ALWAYS = 7
_NOP = 0x118
#: Form of a copy's operands: an address is the sum of a register and a uniform one.
_UNIFORM = 6


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name (or opcode in hexadecimal), where it jumps to, and whether it always does."""

    name: str
    target: int | None
    always: bool


def sections(cubin: bytes) -> list[tuple[str, bytes]]:
    """Name and bytes of every section of a 64-bit ELF file.

    Raises
    ------
    ValueError
        It is none.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin (64-bit ELF) is expected")
    (table_at,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_index = struct.unpack_from("<HH", cubin, 0x3C)
    table = [struct.unpack_from("<IIQQQQIIQQ", cubin, table_at + 64 * i) for i in range(count)]
    names_at = table[names_index][4]

    def name(entry: tuple[int, ...]) -> str:
        start = names_at + entry[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    nobits = 8  # a section type: it has a size, but no bytes in the file
    return [(name(e), b"" if e[1] == nobits else cubin[e[4] : e[4] + e[5]]) for e in table]


def code(cubin: bytes) -> bytes:
    """Machine code of the one kernel of a cubin.

    Raises
    ------
    ValueError
        The file is no 64-bit ELF file with one kernel.
    """
    texts = [data for name, data in sections(cubin) if name.startswith(".text.")]
    if len(texts) != 1:
        raise ValueError(f"a cubin with one kernel is expected, this one has {len(texts)}")
    return texts[0]


def distance(word: int, arch: str) -> int:
    """How far behind the next instruction a branch or call goes, in units of 4 bytes; ``word``: its 128 bits."""
    far = word >> 34 & (1 << 48) - 1
    far -= (far >> 47) << 48
    # From sm_90 on the lowest 8 bits lie apart.
    return far << 8 | word >> 16 & 0xFF if arch.startswith("9") else far


def instructions(cubin: bytes, arch: str = "80") -> list[Instruction]:
    """The one kernel of a cubin for ``arch``; targets are indices.

    Raises
    ------
    ValueError
        The file is no 64-bit ELF file with one kernel.
    """
    text = code(cubin)
    found = []
    for i in range(len(text) // 16):
        low, high = struct.unpack_from("<QQ", text, 16 * i)
        operation = low & 0x1FF
        target = None
        if _NAMES.get(operation) == "BRA":
            target = i + 1 + distance(low | high << 64, arch) // 4
        found.append(Instruction(_NAMES.get(operation, hex(operation)), target, low >> 12 & 15 == ALWAYS))
    return found


def uniform_copies(cubin: bytes) -> int:
    """Copies to shared memory (LDGSTS) that have a part of an address in a uniform register; sm_80 to sm_90a.

    Raises
    ------
    ValueError
        The file is no 64-bit ELF file with one kernel.
    """
    text = code(cubin)
    words = (struct.unpack_from("<Q", text, at)[0] for at in range(0, len(text), 16))
    # Bits 9 to 11 are the form of the operands.
    return sum(_NAMES.get(word & 0x1FF) == "LDGSTS" and word >> 9 & 7 == _UNIFORM for word in words)


def count(code: Iterable[Instruction]) -> Counter[str]:
    """How often each name occurs."""
    return Counter(x.name for x in code if x.name != hex(_NOP))


def main_loop(code: list[Instruction]) -> tuple[int, int]:
    """[first, last] of the outermost loop with products. Behind it there may be more that jumps into its middle."""
    loops = [
        (x.target, i)
        for i, x in enumerate(code)
        if x.target is not None and x.target <= i and any(y.name in PRODUCTS for y in code[x.target : i + 1])
    ]
    if not loops:
        raise ValueError("no loop with tensor-core products")
    return min(loops, key=lambda loop: (loop[0], -loop[1]))


#: Instruction, whether there have been products, copies so far.
_State = tuple[int, bool, int]


def common_step(code: list[Instruction], most_copies: int | None = None) -> Counter[str]:
    """Instructions of one pass through the main loop in the common case.

    Of all ways from the loop's head to its branch back the shortest among those that multiply and copy the next tile:
    what masks edges, and what raises the base of the softmax, is jumped over. ``most_copies``: how many copies (LDGSTS)
    the next tile takes; ways with more have copies of two kinds, of which only one happens.
    """
    first, last = main_loop(code)
    # Instructions so far, and from where.
    best: dict[_State, tuple[int, _State | None]] = {(first, False, 0): (0, None)}
    ways: dict[int, set[tuple[bool, int]]] = {first: {(False, 0)}}
    for i in range(first, last):
        x = code[i]
        leaves = x.target is not None or x.name in ("EXIT", "CALL", "RET")
        following = [] if leaves and x.always else [i + 1]
        if x.target is not None and i < x.target <= last:
            following.append(x.target)
        for multiplied, copies in ways.get(i, ()):
            now = multiplied or x.name in PRODUCTS, copies + (x.name == "LDGSTS")
            if most_copies is not None and now[1] > most_copies:
                continue
            length = best[i, multiplied, copies][0] + 1
            for j in following:
                state = (j, *now)
                if state not in best or length < best[state][0]:
                    best[state] = length, (i, multiplied, copies)
                    ways.setdefault(j, set()).add(now)
    if last not in ways:
        raise ValueError("no way through the main loop")
    at: _State | None = (last, *max(ways[last]))
    way = []
    while at is not None:
        way.append(code[at[0]])
        at = best[at][1]
    return count(way)
