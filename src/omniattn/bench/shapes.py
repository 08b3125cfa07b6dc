"""The problems that ``omniattn bench`` times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from omniattn.errors import ArgumentError

#: Every forward shape holds this many tokens, and batch * heads * head_dim follows from the hidden size, so that the
#: work of two rows differs only by what their names say.
TOTAL_TOKENS = 16384
HIDDEN_SIZE = 2048


@dataclass(frozen=True)
class ForwardShape:
    """One self-attention problem with equal query and key lengths.

    Attributes
    ----------
    batch, heads, seqlen, head_dim : int
    causal : bool
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def name(self) -> str:
        """Name used by filters and reports, for example ``d128 s4096 causal``."""
        return f"d{self.head_dim} s{self.seqlen} {'causal' if self.causal else 'full'}"

    @property
    def long_name(self) -> str:
        """Name with batch and heads, for example ``d128 b4 h16 s4096 causal``."""
        return f"d{self.head_dim} b{self.batch} h{self.heads} s{self.seqlen} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> int:
        """Floating-point operations: 4*b*h*s*s*d for the two products, half of it when causal (the usual count)."""
        full = 4 * self.batch * self.heads * self.seqlen * self.seqlen * self.head_dim
        return full // 2 if self.causal else full


def _forward_shapes() -> tuple[ForwardShape, ...]:
    return tuple(
        ForwardShape(TOTAL_TOKENS // seqlen, HIDDEN_SIZE // head_dim, seqlen, head_dim, causal)
        for head_dim in (64, 128, 256)
        for seqlen in (1024, 4096, 16384)
        for causal in (False, True)
    )


#: 16k tokens, hidden size 2048: head_dim 64, 128, 256; sequence length 1024, 4096, 16384; full and causal.
FORWARD_SHAPES: tuple[ForwardShape, ...] = _forward_shapes()

#: The same, and longer and wider ones at d128: what quantization costs and gives depends on the length.
LOW_PRECISION_SHAPES: tuple[ForwardShape, ...] = tuple(
    sorted(
        FORWARD_SHAPES
        + tuple(
            ForwardShape(batch, heads, seqlen, 128, causal)
            for batch, heads, seqlen in ((1, 16, 32768), (4, 32, 8192))
            for causal in (False, True)
        ),
        key=lambda shape: (shape.head_dim, shape.seqlen, shape.causal),
    )
)


def filter_shapes(patterns: Sequence[str], shapes: Iterable[ForwardShape] = FORWARD_SHAPES) -> tuple[ForwardShape, ...]:
    """Select shapes by name.

    Parameters
    ----------
    patterns : sequence of str
        Each pattern is a set of words joined by spaces or commas, all of which must be words of the shape's long
        name: ``"d64"``, ``"d128 causal"``, ``"d256,s1024,full"``, ``"b1 h16"``. A shape that matches any pattern is
        kept. None: all.
    shapes : iterable of ForwardShape

    Returns
    -------
    tuple of ForwardShape

    Raises
    ------
    ArgumentError
        A pattern matches no shape.
    """
    return filter_named(patterns, shapes)


class Named(Protocol):
    """A shape whose words can be asked for."""

    @property
    def long_name(self) -> str:
        """Words joined by spaces."""


Shape = TypeVar("Shape", bound=Named)


def filter_named(patterns: Sequence[str], shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """`filter_shapes` of shapes of any kind."""
    kept = tuple(shapes)
    if not patterns:
        return kept
    chosen: set[Shape] = set()
    for pattern in patterns:
        words = set(pattern.replace(",", " ").lower().split())
        matching = {shape for shape in kept if words <= set(shape.long_name.split())}
        if not words or not matching:
            known = sorted({word for shape in kept for word in shape.long_name.split()})
            raise ArgumentError("--shapes", f"words out of {', '.join(known)}", repr(pattern))
        chosen |= matching
    return tuple(shape for shape in kept if shape in chosen)
