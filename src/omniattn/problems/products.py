"""Which products a GPU multiplies best: what its vendor says of rates."""

from __future__ import annotations

_FP8_FIRST = (
    (("fp8", "fp16"), ("fp8", "fp32"), ("fp16", "fp16"), ("fp16", "fp32")),
    "fp8 products are twice as fast as fp16 ones, and on GeForce cards twice as fast again with fp16 sums",
)
#: Element type and accumulator of P V by compute capability, best first, for kernels on mma.sync: (choices, why). The
#: rates are the vendor's (docs/precision.md cites them).
_CHOICES: dict[tuple[int, int], tuple[tuple[tuple[str, str], ...], str]] = {
    (8, 0): ((("fp16", "fp32"), ("fp16", "fp16")), "fp16 products are as fast with fp32 sums as with fp16 ones"),
    (8, 6): ((("fp16", "fp16"), ("fp16", "fp32")), "fp16 products are twice as fast with fp16 sums as with fp32 ones"),
    (8, 9): _FP8_FIRST,
    (12, 0): _FP8_FIRST,
}
_OTHERWISE = (
    (("fp16", "fp32"), ("fp16", "fp16"), ("fp8", "fp32"), ("fp8", "fp16")),
    "fp16 products run on every GPU at full rate; mma.sync on fp8 may be converted to them first, as on Hopper",
)


def products_of(cc: tuple[int, int]) -> tuple[tuple[tuple[str, str], ...], str]:
    """Element types of P V and of its sums on a GPU of this compute capability, best first, and why."""
    return _CHOICES.get(cc, _OTHERWISE)
