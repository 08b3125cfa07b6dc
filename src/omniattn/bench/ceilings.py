"""What the chip gives in the same run: the denominators of "% of the ceiling"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniattn.bench.timing import Timer, Timing

_MATMUL_SIZE = 8192
_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings.

    Attributes
    ----------
    matmul_tflops : float
        bf16 matrix product 8192 x 8192 x 8192 of random normal data (the clock depends on the data: zeros run faster).
    copy_tb_per_s : float
        Device-to-device copy, bytes read plus bytes written.
    """

    matmul_tflops: float
    copy_tb_per_s: float

    @classmethod
    def from_timings(cls, matmul: Timing, copy: Timing) -> Ceilings:
        """Convert medians to rates."""
        return cls(
            matmul_tflops=2 * _MATMUL_SIZE**3 / matmul.median_us * 1e-6,
            copy_tb_per_s=2 * _COPY_BYTES / copy.median_us * 1e-6,
        )


def measure_ceilings(torch: Any, timer: Timer) -> Ceilings:
    """Time a large bf16 matrix product and a large copy on the current device, as everything else is timed."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    size = (_MATMUL_SIZE, _MATMUL_SIZE)
    a = torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator)
    b = torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator)
    product = torch.empty_like(a)
    source = torch.zeros(_COPY_BYTES, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    timings = timer(
        {
            "matmul": lambda _: torch.matmul(a, b, out=product),
            "copy": lambda _: target.copy_(source),
        }
    )
    return Ceilings.from_timings(timings["matmul"], timings["copy"])
