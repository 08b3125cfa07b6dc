"""Loads of shared memory ahead of an arrival that gives their stage back: how they are found; rows have none."""

from __future__ import annotations

import pytest

from build_tools import pending_loads
from build_tools.jobs import ROOT, preload_compiler
from omniattn.registry import by_name
from omniattn.runtime.compile import compile_spec
from omniattn.runtime.nvrtc import get_compiler
from omniattn.runtime.sources import Sources

# Instructions of attn_bwd_sm90 and attn_int8_sm90, as nvdisasm prints them.
LDS = 0x000E680000000A00_03840000B80A7984  # LDS.64 R10, [R184+0x38400], of which scoreboard 1 has the result
LDS_UNIFORM = 0x000E680008000C00_01DC001A8F087984  # LDS.128 R8, [R143+UR26+0x1dc00]
LDS_LAST = 0x0008620000000A00_0384E000B8987984  # LDS.64 R152, [R184+0x384e0]; scoreboard 4 has the operands
LDS_UNCOUNTED = 0x000FE20000000A00_0384800000187984  # LDS.64 R24, [R0+0x38480]
LDS_NEVER = 0x000FE20000000800_00000000FFFFF984  # @!PT LDS RZ, [RZ]
LDSM = 0x000E620000000200_000000001110783B  # LDSM.16.M88.4 R16, [R17]
FFMA = 0x102FE2000800080A_0000003498007C23  # FFMA R0, R152, UR52, -R10, behind scoreboard 1
DEPBAR = 0x000FC80000000000_000080000000791A  # DEPBAR.LE SB0, 0x0
FORWARD = 0x000FEA0003800000_0000000000600947  # @P0 BRA, over 24 instructions
BACK = 0x000FEA000383FFFF_FFFFFFFC00F08947  # @!P0 BRA, back over 4 from the next one
ALWAYS = 0x000FF60003800000_0000000000FC7947  # BRA, over 63
OR_P2 = 0x000FEA0001000000_0000000000187947  # BRA P2, over 6: without P2 it goes on
DIVERGED = 0x000FEA000B800000_0000002205707947  # BRA.DIV
EXIT = 0x000FEA0003800000_000000000000794D

HEAD = """
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
extern "C" __global__ void kernel(uint32* out, uint32 zero, int32 count) {
    extern __shared__ uint8 smem[];
    const uint32 at = uint32(__cvta_generic_to_shared(smem)), bar = at + 8192;
"""


def arrivals(body: str) -> list[pending_loads.Arrival]:
    """Of a kernel with that body, with loads under way."""
    preload_compiler()
    sources = Sources(ROOT / "kernels_cu")
    headers = sources.closure("ptx/mbarrier.cuh") | sources.closure("ptx/shared.cuh")
    options = ("--gpu-architecture=sm_90a", "-std=c++17")
    cubin, _ = get_compiler().compile(HEAD + body + "}", "kernel.cu", headers, options, False)
    found = pending_loads.arrivals(cubin)
    assert found, "no arrival at all"
    return [arrival for arrival in found if arrival.loads]


def test_scoreboards() -> None:
    assert [pending_loads.scoreboard(x) for x in (LDS, LDS_LAST, LDS_UNCOUNTED, LDSM, FFMA)] == [1, 1, None, 1, None]
    assert pending_loads.waits_for(FFMA) == {1}
    assert pending_loads.waits_for(LDS) == set()
    assert pending_loads.waits_for(DEPBAR) == {0}
    assert pending_loads.waits_for(DEPBAR | 1 << 38) == set(), "one may still be under way"
    assert pending_loads.waits_for(DEPBAR & ~(1 << 47)) == set(), "without .LE the mask alone counts"
    assert pending_loads.waits_for(DEPBAR | 0b110 << 32) == {0, 1, 2}


def test_loads() -> None:
    assert pending_loads.load_of(3, LDS) == pending_loads.Load(3, "LDS", 184, None, 0x38400, 1)
    assert pending_loads.load_of(0, LDSM) == pending_loads.Load(0, "LDSM", 17, None, 0, 1)
    assert str(pending_loads.load_of(0, LDS_UNIFORM)) == "LDS [R143+UR26+0x1dc00] at 0x0"
    assert pending_loads.load_of(0, LDS | 0xFFFFF0 << 40).offset == -16  # type: ignore[union-attr]
    assert pending_loads.load_of(0, LDS_NEVER) is None
    assert pending_loads.load_of(0, FFMA) is None


@pytest.mark.parametrize(
    ("word", "steps"),
    [(FORWARD, {1, 25}), (BACK, {1, -3}), (ALWAYS, {64}), (OR_P2, {1, 7}), (EXIT, set()), (FFMA, {1})],
)
def test_ways(word: int, steps: set[int]) -> None:
    words = [FFMA] * 600
    words[300] = word
    assert {to - 300 for to in pending_loads.followers(words)[300]} == steps


def test_a_branch_of_diverged_warps_may_go_on() -> None:
    assert 1 in pending_loads.followers([DIVERGED, FFMA])[0]


def test_a_branch_that_is_not_relative() -> None:
    with pytest.raises(ValueError, match="BRX at 0x10"):
        pending_loads.followers([FFMA, 0x949])


def test_a_load_ahead_of_an_arrival() -> None:
    (arrival,) = arrivals("""
    const uint32 x = load_shared(at + 4 * threadIdx.x);
    mbarrier_arrive(bar);
    out[threadIdx.x] = x;""")
    (load,) = arrival.loads
    assert load.name == "LDS"
    assert not arrival.expects_bytes
    assert str(load) in pending_loads.report("kernel", [arrival])


def test_a_load_of_the_round_before() -> None:
    (arrival,) = arrivals("""
    uint32 x = 0;
#pragma unroll 1
    for (int32 i = 0; i < count; ++i) {
        mbarrier_arrive(bar);
        out[i] = x;
        x = load_shared(at + 4 * i);
    }
    out[count] = x;""")
    assert len(arrival.loads) == 1


def test_an_address_of_what_was_loaded_waits() -> None:
    assert not arrivals("""
    const uint32 x = load_shared(at + 4 * threadIdx.x);
    mbarrier_arrive(bar + (x & zero));
    out[threadIdx.x] = x;""")


# Each had loads of bits, biases or Q under way when it gave their stage back.
@pytest.mark.parametrize(
    "name",
    [
        "attn_fwd_sm90_bf16_d64_m256n64_masks",
        "attn_fwd_sm90_bf16_d128_m192n64_softcap",
        "attn_fwd_sm90_bf16_d128_m192n64_bias16",
        "attn_fwd_sm90_bf16_d64_m192n64_bias32",
        "attn_int8_sm90_bf16_d128",
    ],
)
def test_rows(name: str) -> None:
    preload_compiler()
    found = [x for x in pending_loads.arrivals(compile_spec(by_name(name), "90a").cubin) if x.loads]
    if "int8" in name:  # K's scale may be on its way when the stage of Q is given back
        assert all(len(x.loads) == 1 for x in found), pending_loads.report(name, found)
    else:
        assert not found, pending_loads.report(name, found)
