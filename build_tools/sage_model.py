"""What the kernels on mma.sync can reach on GPUs that nobody here has: ``python -m build_tools.sage_model``.

Compiles the rows that `omniattn.select` takes for each GPU, counts the instructions of the common step of the main loop
in the machine code, and sets them against the vendor's rates. For one warp's step of 32 rows by 64 keys, in cycles of a
quarter of an SM::

    bound    = max(products, exponentials, fp32 pipe, integer pipe, issue slots, shared memory)      all overlap
    chain    = products + max(the others)                                       one warp by itself overlaps nothing
    expected = max(bound, chain / warps that a quarter of an SM holds)

`chain` alone is what comes out if the warps of a quarter wait for each other at every turn. Nothing is fitted. Left
out: power and clocks below boost, memory outside the SM, latencies, prologue and epilogue, the quantizers. Causal:
s / (s + 128) of full, the part of the products of edge tiles that counts, at s = 8192.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from build_tools import jobs, sass

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from omniattn.problems import UNLIMITED, AttentionProblem, Target  # noqa: E402
from omniattn.problems.precision import NAMED  # noqa: E402
from omniattn.registry import KernelSpec  # noqa: E402
from omniattn.select import choices  # noqa: E402

ROWS, KEYS = 32, 64
#: Length at which causal is given.
SEQLEN = 8192


_BITS = {"int8": 8, "int4": 4}
_QK = {bits: name for name, bits in _BITS.items()}


@dataclass(frozen=True)
class Gpu:
    """Datasheet facts. ``tops``: dense, of (operands, accumulator); ``fp32_lanes``: multiply-adds a cycle and SM."""

    name: str
    arch: str
    sms: int
    ghz: float
    smem_sm: int
    smem_cta: int
    fp32_lanes: int
    tops: dict[tuple[str, str], float]
    generic: bool = False  # without the kernels made for it alone


#: Sources: NVIDIA A100 datasheet (2021), GA102 whitepaper (2020), Ada GPU architecture whitepaper (2022), L20 data as
#: listed by its vendors. fp32 lanes, shared memory: CUDA programming guide, arithmetic throughput and specifications.
GPUS: tuple[Gpu, ...] = (
    Gpu(
        "A100", "80", 108, 1.41, 164 << 10, 163 << 10, 64,
        {("int8", "int32"): 624, ("int4", "int32"): 1248, ("fp16", "fp32"): 312, ("fp16", "fp16"): 312},
    ),
    Gpu(
        "RTX 3090", "86", 82, 1.695, 100 << 10, 99 << 10, 128,
        {("int8", "int32"): 284, ("int4", "int32"): 568, ("fp16", "fp32"): 71, ("fp16", "fp16"): 142},
    ),
    Gpu(
        "RTX 4090", "89", 128, 2.52, 100 << 10, 99 << 10, 128,
        {
            ("int8", "int32"): 660.6, ("int4", "int32"): 1321.2, ("fp16", "fp32"): 165.2, ("fp16", "fp16"): 330.3,
            ("fp8", "fp32"): 330.3, ("fp8", "fp16"): 660.6,
        },
    ),
    Gpu(
        "L20", "89", 92, 2.52, 100 << 10, 99 << 10, 128,
        {
            ("int8", "int32"): 239, ("int4", "int32"): 478, ("fp16", "fp32"): 119.5, ("fp16", "fp16"): 119.5,
            ("fp8", "fp32"): 239, ("fp8", "fp16"): 239,
        },
    ),
    # mma.sync reaches 0.629 of the datasheet's rates on Hopper (Luo et al. 2024, arXiv:2402.13499).
    Gpu(
        "H200, mma.sync", "90a", 132, 1.83, 228 << 10, 227 << 10, 128,
        {("int8", "int32"): 0.629 * 1979, ("fp16", "fp32"): 0.629 * 989, ("fp16", "fp16"): 0.629 * 989},
        generic=True,
    ),
)  # fmt: skip
#: Published TOPS at d128, full (SageAttention2, Zhang et al. 2024, and SageAttention2++, fp16 sums): least and most.
PUBLISHED: dict[tuple[str, int], tuple[float, float]] = {
    ("RTX 4090", 4): (574, 640),
    ("RTX 4090", 8): (411, 493),
    ("L20", 4): (273, 273),
    ("L20", 8): (217, 217),
    ("A100", 8): (193, 278),
}

_FP32 = ("FADD", "FMUL", "FFMA", "IMAD", "HADD2")
_ALU = (
    "ISETP", "FSETP", "SEL", "FSEL", "FMNMX", "LOP3", "IADD3", "SHF", "LEA", "PRMT", "MOV", "PLOP3", "IMNMX", "F2FP",
    "VOTE",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One warp's common step of a kernel as it was compiled."""

    spec: KernelSpec
    arch: str
    registers: int
    spill_bytes: int
    counts: dict[str, int]

    @property
    def rows(self) -> int:
        """Query rows of a warp."""
        return self.spec.block_m // self.spec.num_warps

    @property
    def least_products(self) -> int:
        """Tensor-core instructions that the step needs: m16n8k32 (int8, e4m3), m16n8k64 (int4), m16n8k16 (fp16)."""
        d, tiles = self.spec.head_dim, self.rows // 16
        of_k = tiles * (KEYS // 8) * (d * _BITS[self.spec.qk] // 256)
        of_v = tiles * (d // 8) * (KEYS // (16 if self.spec.pv == "fp16" else 32))
        return of_k + of_v

    @property
    def products(self) -> int:
        """Tensor-core instructions that the step has."""
        return sum(self.counts.get(name, 0) for name in sass.PRODUCTS)

    @property
    def others(self) -> int:
        """All other instructions."""
        return sum(self.counts.values()) - self.products

    def ctas(self, gpu: Gpu) -> int:
        """CTAs that an SM holds."""
        threads = 32 * self.spec.num_warps
        by_registers = 65536 // (-(-self.registers // 8) * 8 * threads)
        return min(by_registers, gpu.smem_sm // (self.spec.smem_bytes + 1024))

    def pipes(self, gpu: Gpu) -> dict[str, float]:
        """Cycles of a quarter of an SM by what is busy, for one warp's step."""
        a_quarter = gpu.sms * gpu.ghz * 4 / 1000  # 10^12 cycles of quarters a second
        ops, c = 2.0 * self.rows * KEYS * self.spec.head_dim, self.counts
        tensor = ops * a_quarter / gpu.tops[self.spec.qk, "int32"]
        tensor += ops * a_quarter / gpu.tops[self.spec.pv, self.spec.pv_accumulator]
        fp32 = sum(c.get(name, 0) for name in _FP32) * 128 / gpu.fp32_lanes
        # 128 bytes a cycle and SM, for four warps: ldmatrix and a copy move 512 bytes each.
        shared = 4 * (4 * c.get("LDSM", 0) + 4 * c.get("LDGSTS", 0) + c.get("LDS", 0) + c.get("SHFL", 0))
        return {
            "products": tensor,
            "exponentials": c.get("MUFU", 0) * 8.0,
            "fp32": fp32,
            "integer": 2.0 * sum(c.get(name, 0) for name in _ALU),
            "issue": float(sum(c.values())),
            "shared": float(shared),
        }

    def tops(self, gpu: Gpu) -> tuple[float, float, float, str]:
        """(bound, expected, chain, what binds), full."""
        pipes = self.pipes(gpu)
        bound, what = max((cycles, name) for name, cycles in pipes.items())
        chain = pipes["products"] + max(cycles for name, cycles in pipes.items() if name != "products")
        warps = self.ctas(gpu) * self.spec.num_warps / 4
        ops = 4.0 * self.rows * KEYS * self.spec.head_dim
        scale = ops * gpu.sms * 4 * gpu.ghz / 1000
        return scale / bound, scale / max(bound, chain / warps), scale / chain, what


def row_for(gpu: Gpu, bits: int, head_dim: int, dtype: str = "bfloat16") -> KernelSpec:
    """What ``precision="int8"`` or ``"int4"`` takes on this GPU."""
    problem = AttentionProblem(
        dtype, 2, SEQLEN, SEQLEN, 16, 16, head_dim, UNLIMITED, UNLIMITED, head_dim**-0.5, 0.0, "none", "none", False,
        NAMED[_QK[bits]], tensor_maps=not gpu.generic,
    )  # fmt: skip
    target = Target((int(gpu.arch[0]), int(gpu.arch[1])), gpu.smem_cta, gpu.sms)
    return choices(problem, target)[0].candidate.row


def compiled_step(spec: KernelSpec, arch: str) -> Step:
    """Compile a row, unless the build has done so, and count its common step."""
    result = jobs.compiled(spec, arch)
    code = sass.instructions(result.cubin, arch)
    tile = KEYS * spec.head_dim * (_BITS[spec.qk] + (16 if spec.pv == "fp16" else 8)) // 8
    copies = tile // (16 * 32 * spec.num_warps) + 2  # and scales of K, and delta_s
    return Step(
        spec, arch, result.entry["registers"], result.entry["spill_bytes"], dict(sass.common_step(code, copies))
    )


def table() -> list[str]:
    """Markdown."""
    lines = [
        "| GPU | kernel | CTAs an SM | products | other instructions (a score) | bound, by | expected, full | causal | "
        "nothing overlaps | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    steps: dict[tuple[str, str], Step] = {}
    for gpu in GPUS:
        for head_dim in (64, 128):
            for bits in (8,) if gpu.generic else (8, 4):
                spec = row_for(gpu, bits, head_dim)
                key = (spec.name, gpu.arch)
                step = steps[key] = steps.get(key) or compiled_step(spec, gpu.arch)
                bound, expected, chain, what = step.tops(gpu)
                published = PUBLISHED.get((gpu.name, bits)) if head_dim == 128 else None
                text = "–" if published is None else "–".join(dict.fromkeys(f"{x:.0f}" for x in published))
                causal = expected * SEQLEN / (SEQLEN + 128)
                counts = f"{step.products} (least {step.least_products}) | {step.others}"
                a_score = 32 * step.others / (step.rows * KEYS)
                lines.append(
                    f"| {gpu.name} | `{spec.name}` | {step.ctas(gpu)} | {counts} ({a_score:.1f}) | "
                    f"{bound:.0f}, {what} | {expected:.0f} | {causal:.0f} | {chain:.0f} | {text} |"
                )
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
