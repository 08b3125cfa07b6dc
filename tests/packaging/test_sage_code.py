"""Machine code of attn_int8_sm80 for GPUs that nobody here has: products, other instructions, spills, the model."""

from __future__ import annotations

import functools
import math

import pytest

from build_tools import sage_model, sass
from build_tools.sage_model import GPUS, PUBLISHED, Step
from omniattn.registry import by_name

#: Instructions a score besides products in the common step, at most: counted, and a twentieth more.
MOST_A_SCORE = {
    ("A100", 64, 8): 7.8, ("A100", 64, 4): 10.1, ("A100", 128, 8): 7.8, ("A100", 128, 4): 10.2,
    ("RTX 3090", 64, 8): 10.1, ("RTX 3090", 64, 4): 12.3, ("RTX 3090", 128, 8): 12.2, ("RTX 3090", 128, 4): 14.4,
    ("RTX 4090", 64, 8): 9.1, ("RTX 4090", 64, 4): 11.6, ("RTX 4090", 128, 8): 11.2, ("RTX 4090", 128, 4): 13.5,
}  # fmt: skip
BY_NAME = {gpu.name: gpu for gpu in GPUS}


@functools.cache
def step_of(name: str, head_dim: int, bits: int) -> Step:
    """As NVRTC compiles it for sm_80, sm_86 or sm_89. One at a time: processes of pytest-xdist have some tests each."""
    gpu = BY_NAME[name]
    return sage_model.compiled_step(sage_model.row_for(gpu, bits, head_dim), gpu.arch)


@pytest.mark.parametrize("key", MOST_A_SCORE, ids=str)
def test_main_loop(key: tuple[str, int, int]) -> None:
    step, gpu = step_of(*key), BY_NAME[key[0]]
    assert step.arch == gpu.arch
    assert step.products == step.least_products, "products that are not needed, or missing"
    scores = step.rows * sage_model.KEYS // 32
    assert 0 < step.others / scores <= MOST_A_SCORE[key]
    assert step.counts["MUFU"] == scores, "an exponential for each score"
    assert step.spill_bytes == 0
    assert {"LDL", "STL"}.isdisjoint(step.counts)
    assert step.ctas(gpu) >= int(dict(step.spec.defines)["MIN_CTAS"])
    # Every operand of a product is loaded once by ldmatrix, but Q again for each part of a tile.
    d, tiles = key[1], step.rows // 16
    parts = sage_model.KEYS // int(dict(step.spec.defines)["PART_KEYS"])
    of_q = parts * tiles * (d * key[2] // 256)
    of_k = sage_model.KEYS * d * key[2] // 8 // 512
    of_v = sage_model.KEYS * d * (2 if step.spec.pv == "fp16" else 1) // 512
    assert step.counts["LDSM"] == of_q + of_k + of_v
    # What is expected is at or above what is published.
    for (name, bits), (_, best) in PUBLISHED.items():
        if (model_of(name), 128, bits) == key:
            bound, expected, chain, what = step.tops(BY_NAME[name])
            assert bound >= expected >= chain > 0
            assert what == "products"
            assert expected >= best


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_main_loop_of_the_ring(dtype: str) -> None:
    """The kernel of Hopper: what its step may take besides products, a twentieth more than counted."""
    step = sage_model.compiled_step(by_name(f"attn_int8_mbarrier_sm90_{dtype}_d128"), "90")
    assert step.products == step.least_products
    assert 0 < step.others / sage_model.KEYS <= 7.1
    assert step.counts["MUFU"] == 64, "32 by 64 scores"
    assert step.counts["LDSM"] == 8 + 16 + 32, "Q, K and V once"
    assert step.counts["LDGSTS"] == 4 + 8 + 1, "K, V and the scales"
    assert {"LDL", "STL"}.isdisjoint(step.counts), "spills belong into what edges need"
    assert step.spill_bytes <= 128


def model_of(name: str) -> str:
    """The GPU whose machine code another of the same target runs."""
    return "RTX 4090" if name == "L20" else name


def test_published_speeds_are_of_kernels_that_are_compiled_here() -> None:
    assert {(model_of(name), 128, bits) for name, bits in PUBLISHED} <= MOST_A_SCORE.keys()


def test_rates_are_those_of_the_datasheets() -> None:
    """Products a cycle and SM are powers of two: a slip of a digit would not be."""
    for gpu in GPUS:
        if gpu.generic or gpu.name == "L20":  # a fraction of a rate; and a clock that is held back
            continue
        for kind, tops in gpu.tops.items():
            a_cycle = tops * 1000 / gpu.sms / gpu.ghz / 2
            nearest = 2 ** round(math.log2(a_cycle))
            assert abs(a_cycle / nearest - 1) <= 0.03, (gpu.name, kind, a_cycle)


def instruction(operation: int, *, predicate: int = 7, distance: int = 0) -> bytes:
    word = operation | predicate << 12 | (distance * 4 & (1 << 48) - 1) << 34
    return word.to_bytes(16, "little")


def elf(code: bytes, kernels: int = 1) -> bytes:
    """A 64-bit ELF file with that many kernels of this code."""
    names = b"\0.text.kernel\0.names\0"
    sections = [(1, 64)] * kernels + [(14, 64 + len(code))]
    table = b"".join(
        name.to_bytes(4, "little") + bytes(20) + at.to_bytes(8, "little") + len(code).to_bytes(8, "little") + bytes(24)
        for name, at in sections
    )
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    header[0x28:0x30] = (64 + len(code) + len(names)).to_bytes(8, "little")
    header[0x3C:0x40] = len(sections).to_bytes(2, "little") + (len(sections) - 1).to_bytes(2, "little")
    return bytes(header) + code + names + table


def test_the_common_step_jumps_over_what_is_rare() -> None:
    code = b"".join(
        [
            instruction(0x23),  # 0
            instruction(0x37),  # 1: the loop's head
            instruction(0x147, predicate=0, distance=2),  # 2: over 3 and 4
            instruction(0x108),
            instruction(0x108),
            instruction(0x147, predicate=1, distance=1),  # 5: over a copy
            instruction(0x1AE),
            instruction(0x3C),  # 7
            instruction(0x144, predicate=0),  # 8: leaves
            instruction(0x147, distance=-9),  # 9: to 1
            instruction(0x14D),
        ]
    )
    found = sass.instructions(elf(code))
    assert sass.main_loop(found) == (1, 9)
    step = sass.common_step(found)
    assert step == {"IMMA": 1, "BRA": 3, "LDGSTS": 1, "HMMA": 1, "CALL": 1}
    assert sass.common_step(found, most_copies=1) == step
    assert "LDGSTS" not in sass.common_step(found, most_copies=0), "too many copies: another kind of them"
    idle = b"".join(
        [
            instruction(0x147, predicate=0, distance=3),  # 0: to 4, a shorter way without products
            instruction(0x37),
            instruction(0x108),
            instruction(0x108),
            instruction(0x1AE),  # 4
            instruction(0x147, distance=-6),  # 5: to 0
        ]
    )
    assert sass.common_step(sass.instructions(elf(idle)))["IMMA"] == 1
    with pytest.raises(ValueError, match="no loop"):
        sass.main_loop(found[:9])
    with pytest.raises(ValueError, match="64-bit ELF"):
        sass.instructions(b"PTX")
    with pytest.raises(ValueError, match="has 2"):
        sass.instructions(elf(code, 2))
