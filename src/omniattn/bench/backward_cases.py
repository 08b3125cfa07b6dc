"""What ``omniattn bench backward`` times: shapes of attention whose gradients are computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omniattn.bench.shapes import FORWARD_SHAPES, TOTAL_TOKENS, filter_named

#: Products of the backward over those of the forward: S again, dP, dV, dK, dQ.
BACKWARD_PRODUCTS = 2.5
#: Packed sequences, and the standard deviation of the logarithm of their lengths.
_PACKED, _SIGMA = 16, 1.0
#: Short sequences: batch, heads, length, head_dim. The last is a vision transformer's.
_SHORT = ((256, 16, 128, 64), (64, 16, 256, 128), (1, 12, 577, 64))


@dataclass(frozen=True)
class BackwardShape:
    """One self-attention problem.

    Attributes
    ----------
    heads, head_dim : int
    lengths : tuple of int
        Of the sequences. All alike unless ``packed``.
    causal : bool
    group : int
        Query heads on one kv head.
    window : int
        Keys that a query sees, itself included; 0: no window. Causal only.
    softcap : float
    packed : bool
        ``attention_varlen``.
    generic : bool
        This package's kernels for every GPU (mma.sync), whatever it would choose here.
    short : bool
        Of short sequences: no headline shape.
    """

    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    causal: bool
    group: int = 1
    window: int = 0
    softcap: float = 0.0
    packed: bool = False
    generic: bool = False
    short: bool = False

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def seqlen(self) -> int:
        """The longest sequence."""
        return max(self.lengths)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    @property
    def heads_kv(self) -> int:
        """Heads of k and v."""
        return self.heads // self.group

    @property
    def plain(self) -> bool:
        """Whether it has no option but causal, and this package chooses its kernels: a headline shape."""
        return self.group == 1 and not (self.window or self.softcap or self.packed or self.generic or self.short)

    @property
    def long_name(self) -> str:
        """Name used by filters and reports, for example ``d128 b4 h32/8 s4096 causal``."""
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.group > 1 else "")
        words = [f"d{self.head_dim}", f"b{self.batch}", heads]
        words += ["packed" if self.packed else f"s{self.seqlen}", "causal" if self.causal else "full"]
        if self.window:
            words.append(f"window{self.window}")
        if self.softcap:
            words.append(f"softcap{self.softcap:g}")
        return " ".join([*words, *(["generic"] if self.generic else [])])

    @property
    def pairs(self) -> int:
        """Pairs of query and key that are visible, of all heads."""
        found = 0
        for n in self.lengths:
            if not self.causal:
                found += n * n
                continue
            most = min(n, self.window) if self.window else n
            # The first `most` queries see 1, 2, ... keys, the others `most`.
            found += most * (most + 1) // 2 + (n - most) * most
        return found * self.heads

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of both products of the forward, for visible pairs."""
        return 4.0 * self.pairs * self.head_dim

    @property
    def flops(self) -> float:
        """Of the five products of the backward."""
        return BACKWARD_PRODUCTS * self.forward_flops

    def dense_twin(self) -> BackwardShape:
        """Equally long sequences with about the FLOPs and the tokens of packed ones."""
        mean = sum(n * n for n in self.lengths) / self.tokens
        seqlen = max(1, min(self.tokens, 64 * round(mean / 64) or round(mean)))
        return replace(self, lengths=(seqlen,) * max(1, round(self.tokens / seqlen)), packed=False)


def lognormal_lengths(count: int, tokens: int) -> tuple[int, ...]:
    """Quantiles of a lognormal distribution that add up to ``tokens``, in an order that is not sorted."""
    normal = statistics.NormalDist()
    sizes = [math.exp(_SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    found = [max(1, int(tokens * size / sum(sizes))) for size in sizes]
    found[-1] += tokens - sum(found)
    step = next(n for n in range(count // 2 + 1, 2 * count + 2) if math.gcd(n, count) == 1)
    return tuple(found[i * step % count] for i in range(count))


def _shapes() -> tuple[BackwardShape, ...]:
    plain = [BackwardShape(s.heads, s.head_dim, (s.seqlen,) * s.batch, s.causal) for s in FORWARD_SHAPES]
    both = (False, True)
    d128 = BackwardShape(16, 128, (4096,) * 4, True)
    return (
        *plain,
        *(replace(d128, heads=32, group=4, causal=causal) for causal in both),
        *(replace(d128, lengths=lognormal_lengths(_PACKED, TOTAL_TOKENS), packed=True, causal=c) for c in both),
        replace(d128, lengths=(TOTAL_TOKENS,), window=1024),
        *(replace(d128, softcap=50.0, causal=causal) for causal in both),
        *(
            BackwardShape(heads, head_dim, (seqlen,) * batch, causal, short=True)
            for batch, heads, seqlen, head_dim in _SHORT
            for causal in both
        ),
        *(replace(shape, generic=True) for shape in plain if shape.seqlen == 4096),
    )


#: 16k tokens, hidden size 2048, then grouped heads, packed and short sequences, a window, softcap, and the kernels for
#: every GPU.
BACKWARD_SHAPES: tuple[BackwardShape, ...] = _shapes()


def filter_backward(patterns: Sequence[str]) -> tuple[BackwardShape, ...]:
    """Shapes that have all words of one of ``patterns``; all where there is none."""
    return filter_named(patterns, BACKWARD_SHAPES)
