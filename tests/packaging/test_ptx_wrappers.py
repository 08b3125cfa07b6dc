"""Wrappers of instructions that no kernel uses yet: the device compiler takes them, and makes what they say."""

from __future__ import annotations

import re

import pytest

from build_tools.jobs import ROOT, preload_compiler
from build_tools.wgmma_header import KINDS, Kind
from omniattn.runtime.compile import Sources
from omniattn.runtime.nvrtc import get_compiler

KERNELS = ROOT / "kernels_cu"


def compiled(source: str, *includes: str) -> tuple[str, str]:
    """PTX for compute_90a, and ptxas' log for sm_90a; raises where either does not compile."""
    preload_compiler()
    sources = Sources(KERNELS)
    headers: dict[str, str] = {}
    for name in includes:
        headers |= sources.closure(name)
    text = "".join(f'#include "{name}"\n' for name in includes) + source
    ptx, _ = get_compiler().compile(text, "w.cu", headers, ("--gpu-architecture=compute_90a", "-std=c++17"), True)
    options = ("--gpu-architecture=sm_90a", "-std=c++17", "--ptxas-options=-v")
    _, log = get_compiler().compile(text, "w.cu", headers, options, False)
    return re.sub(r"\s+", " ", ptx.decode()), log


def products(kind: Kind) -> dict[tuple[str, int], list[str]]:
    """Template arguments of every form, by form and width."""
    majors = ("kKMajor", "kMnMajor")
    found = {}
    for form, widths in (("ss", kind.ss), ("rs", kind.rs)):
        arguments = [""]
        if kind.has_majors:
            arguments = [f"<{b}>" for b in majors] if form == "rs" else [f"<{a}, {b}>" for a in majors for b in majors]
        found |= {(form, width): arguments for width in widths}
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.file)
def test_products(kind: Kind) -> None:
    calls, expected = [], []
    for (form, width), variants in products(kind).items():
        for arguments in variants:
            a = "w" if form == "rs" else "x"
            calls.append(f"""
extern "C" __global__ void k{len(calls)}({kind.accumulator}* out, uint64 x, uint64 y, uint32 z) {{
    {kind.accumulator} d[{width // 2}] = {{}};
    uint32 w[4] = {{z, z + 1, z + 2, z + 3}};
    wgmma_fence();
    Wgmma<{kind.tag}, {width}>::{form}{arguments}(d, {a}, y, 1);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < {width // 2}; ++i) out[threadIdx.x * {width // 2} + i] = d[i] + {kind.accumulator}(w[i & 3]);
}}""")
            flags = "".join(f", {int(m == 'kMnMajor')}" for m in re.findall(r"k\w+Major", arguments))
            operand = r"\{[^}]*\}" if form == "rs" else r"%rd\d+"
            tail = (", " if kind.scales + flags else "") + kind.scales + flags
            expected.append(
                rf"wgmma\.mma_async\.sync\.aligned\.m64n{width}k{kind.depth}\.{re.escape(kind.types)} \{{[^}}]*\}}, "
                rf"{operand}, %rd\d+, p{tail};"
            )
    ptx, log = compiled("".join(calls), f"ptx/wgmma_{kind.file}.cuh")
    for i, pattern in enumerate(expected):
        body = ptx.split(f".visible .entry k{i}(", 1)[1].split(".visible .entry", 1)[0]
        assert len(re.findall(r"wgmma\.mma_async", body)) == 1
        assert re.search(pattern, body), f"{calls[i]}\nexpected {pattern}"
    assert "erialized" not in log


#: Statement, header, and the instruction that it has to become.
STATEMENTS = {
    "stmatrix_x1": ("stmatrix_x1(s, {u});", "stmatrix.sync.aligned.m8n8.x1.shared.b16"),
    "stmatrix_x2": ("stmatrix_x2(s, {u, u});", "stmatrix.sync.aligned.m8n8.x2.shared.b16"),
    "stmatrix_x4": ("stmatrix_x4(s, {u, u, u, u});", "stmatrix.sync.aligned.m8n8.x4.shared.b16"),
    "stmatrix_x1.trans": ("stmatrix_x1<true>(s, {u});", "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16"),
    "stmatrix_x2.trans": ("stmatrix_x2<true>(s, {u, u});", "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"),
    "stmatrix_x4.trans": ("stmatrix_x4<true>(s, {u, u, u, u});", "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16"),
    "tma_store_4d": (
        "tma_store_4d(&map, s, 1, 2, 3, 4);", "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [",
    ),
    "tma_reduce_add_4d": (
        "tma_reduce_add_4d(&map, s, 1, 2, 3, 4);",
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [",
    ),
    "bulk_reduce_add": (
        "bulk_reduce_add(p, s, 256);", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [",
    ),
    "bulk_store": ("bulk_store(p, s, 256);", "cp.async.bulk.global.shared::cta.bulk_group ["),
    "bulk_commit": ("bulk_commit();", "cp.async.bulk.commit_group;"),
    "bulk_wait": ("bulk_wait<1>();", "cp.async.bulk.wait_group 1;"),
    "bulk_wait_read": ("bulk_wait_read<2>();", "cp.async.bulk.wait_group.read 2;"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
def test_instruction(name: str) -> None:
    statement, instruction = STATEMENTS[name]
    source = f"""
extern "C" __global__ void k(const __grid_constant__ TensorMap map, float* p, uint32 s, uint32 u) {{ {statement} }}
"""
    ptx, _ = compiled(source, "ptx/stmatrix.cuh", "ptx/bulk_store.cuh")
    assert instruction in ptx


def test_tiles_of_keys_can_be_walked() -> None:
    """The loop that a backward kernel has around its tiles."""
    source = """
extern "C" __global__ void k(const __grid_constant__ AttnFwdParams p, const __grid_constant__ TileList list, int* out) {
    PersistentBwdTiles tiles;
    for (BwdTile t; tiles.next<128>(p, list, t);) {
        QueryTiles<64, 128> rows(p, t);
        int head = t.batch_idx * p.num_kv_heads + t.kv_head_idx;
        for (int m = rows.first; m < rows.end; ++m) out[head * 1000 + m] = t.n0;
    }
}
"""
    ptx, log = compiled(source, "attention/query_tiles.cuh")
    assert ".visible .entry k(" in ptx
    assert "spill" not in log or "0 bytes spill stores" in log
