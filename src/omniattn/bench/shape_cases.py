"""What ``omniattn bench few``, ``short``, ``packed`` and ``windows`` time: shapes beside the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omniattn.bench.backward_cases import lognormal_lengths
from omniattn.bench.option_cases import ALL, Case, Extents, OptionShape, softcap_fields
from omniattn.bench.shapes import TOTAL_TOKENS, ForwardShape, Shape, filter_named
from omniattn.errors import ArgumentError

#: What the marks of calls are scaled by that cuDNN was not measured on: cuDNN's TFLOP/s on these shapes, that day. Its
#: speed at 16384 causal tokens differs by a fifth between runs, and is no measure.
REFERENCES: dict[str, tuple[ForwardShape, float]] = {
    "full": (ForwardShape(4, 16, 4096, 128, False), 663.0),
    "causal": (ForwardShape(4, 16, 4096, 128, True), 567.0),
}


@dataclass(frozen=True)
class Mark:
    """FlashAttention-3 on a call, and cuDNN in the same run: one H200, 2026-11-22, FlashAttention-3 built from source.

    FlashAttention-3 cannot be installed from a package index. What it would take in another run follows from how much
    longer cuDNN takes there.

    Attributes
    ----------
    fa3_us, fa3_tflops : float
        One of them; TFLOP/s of visible pairs. The other one is 0.
    cudnn_us : float
        cuDNN's time on the same call; 0: see ``reference``.
    cudnn_tflops : float
        Its speed on the same call, where that was written down; else 0.
    reference : str
        Key of `REFERENCES` where cuDNN was not measured on the call.
    """

    fa3_us: float = 0.0
    fa3_tflops: float = 0.0
    cudnn_us: float = 0.0
    cudnn_tflops: float = 0.0
    reference: str = ""

    def scaled_us(self, flops: float, cudnn_us: float | None) -> float | None:
        """FlashAttention-3's time in a run where cuDNN takes ``cudnn_us`` on the call, or on the reference.

        ``flops`` are those of the call. None where cuDNN did not run.
        """
        if cudnn_us is None:
            return None
        then = self.cudnn_us
        if self.reference:
            shape, speed = REFERENCES[self.reference]
            then = shape.flops / speed * 1e-6
        elif not then:
            then = flops / self.cudnn_tflops * 1e-6
        return (self.fa3_us or flops / self.fa3_tflops * 1e-6) * cudnn_us / then


@dataclass(frozen=True)
class ShapeCase:
    """One call.

    Attributes
    ----------
    head_dim, heads : int
    lengths_q, lengths_k : tuple of int
        Of the sequences; all alike unless ``packed``.
    causal : bool
    group : int
        Query heads on one kv head.
    own_head_dim_v : int
        head_dim of v and o where that is another one; else 0.
    window : tuple of int, optional
        Keys that a query sees left and right of its own; -1: all.
    softcap : float
    mask : str
        Key of `option_cases.MASKS`; empty: none.
    expanded : {"", "heads", "batch"}
        k and v are in memory once for all heads, or for all sequences.
    packed : str
        Name of the lengths; empty: a batch.
    precision : {"exact", "int8"}
        Of this package's call.
    operands : bool
        Its arrays come quantized: K and V that many calls attend to.
    both : bool
        Timed with this package's kernels on wgmma and with those on mma.sync too, whatever it chooses.
    flex : bool
        FlexAttention runs, which has to be compiled for each call: seconds.
    mark : Mark, optional
    """

    head_dim: int
    heads: int
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    causal: bool = False
    group: int = 1
    own_head_dim_v: int = 0
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    mask: str = ""
    expanded: str = ""
    packed: str = ""
    precision: str = "exact"
    operands: bool = False
    both: bool = False
    flex: bool = False
    mark: Mark | None = None

    @property
    def long_name(self) -> str:
        """Name used by filters and reports, for example ``d128 b1 h32/8 sq16 sk32768 full``."""
        width = f"d{self.head_dim}" + (f"/{self.own_head_dim_v}" if self.own_head_dim_v else "")
        heads = f"h{self.heads}" + (f"/{self.heads // self.group}" if self.group > 1 else "")
        words = [width, heads, "packed", self.packed]
        if not self.packed:
            queries, keys = self.lengths_q[0], self.lengths_k[0]
            lengths = [f"s{keys}"] if queries == keys else [f"sq{queries}", f"sk{keys}"]
            words = [width, f"b{len(self.lengths_q)}", heads, *lengths]
        words.append("causal" if self.causal else "full")
        if self.window is not None:
            left, right = self.window
            words.append(f"window{left + 1}" if self.causal else f"window{left}/{right}")
        words += [_MASK_WORDS[self.mask]] if self.mask else []
        words += [f"softcap{self.softcap:g}"] if self.softcap else []
        words += [f"expanded over {self.expanded}"] if self.expanded else []
        words += [self.precision] if self.precision != "exact" else []
        return " ".join([*words, *(["operands"] if self.operands else [])])

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``attention`` and ``attention_varlen`` that are no arrays."""
        found: dict[str, Any] = {"causal": True} if self.causal else {}
        if self.window is not None:
            found["window"] = self.window
        return {**found, "softcap": self.softcap} if self.softcap else found

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) of the keys that a query sees, -1 for unlimited: causal and window in one."""
        left, right = self.window or (-1, -1)
        return left, 0 if self.causal else right

    @property
    def head_dim_v(self) -> int:
        """head_dim of v and o."""
        return self.own_head_dim_v or self.head_dim

    def dense(self) -> tuple[Case, OptionShape]:
        """The call as ``omniattn bench options`` has calls; of a batch only."""
        queries, keys = self.lengths_q[0], self.lengths_k[0]
        fields: dict[str, Any] = softcap_fields(self.softcap) if self.softcap else {}
        case = Case(
            self.long_name, self.options, mask=self.mask, group=self.group, expanded=self.expanded, seqlen_q=queries,
            seqlen_k=keys, counted=ALL, **fields,
        )  # fmt: skip
        return case, OptionShape(
            len(self.lengths_q), self.heads, keys, self.head_dim, own_head_dim_v=self.own_head_dim_v
        )

    @property
    def pairs(self) -> float:
        """Pairs of query and key that are visible, of all heads."""
        if not self.packed:
            return Extents.of(*self.dense()).pairs
        left, right = self.bounds
        return float(self.heads * sum(_visible(*sizes, left, right) for sizes in _sizes(self)))

    @property
    def flops(self) -> float:
        """Operations of both products, for visible pairs."""
        return 2.0 * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> float:
        """q, the mask, and k and v that someone sees read once, o written once, in 16 bits.

        Masks of bools, and operands: in 8 bits.
        """
        left, right = self.bounds
        queries, keys = sum(self.lengths_q), 0
        for own, theirs in _sizes(self):
            first = max(0, theirs - own - left) if left >= 0 else 0
            keys += min(theirs, theirs + right if right >= 0 else theirs) - first
        widths = self.head_dim + self.head_dim_v
        share = {"": 1, "heads": self.heads // self.group, "batch": len(self.lengths_k)}[self.expanded]
        of_k = (1.0 if self.operands else 2.0) * widths * (keys * self.heads // self.group / share)
        of_q = float((1 if self.operands else 2) * self.head_dim + 2 * self.head_dim_v) * queries * self.heads
        found = of_k + of_q
        if not self.mask:
            return found
        rows = {"padding": len(self.lengths_q), "mixed": self.lengths_q[0], "bias_heads": 2 * self.heads * queries}
        return found + rows[self.mask] * self.lengths_k[0]


#: Those of `option_cases.MASKS` that these cases have, in a name.
_MASK_WORDS = {"padding": "key-padding", "mixed": "bool-mask", "bias_heads": "bf16-bias"}


def _sizes(case: ShapeCase) -> list[tuple[int, int]]:
    return list(zip(case.lengths_q, case.lengths_k, strict=True))


def _visible(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of one sequence."""
    found = 0
    for own in range(keys - queries, keys):
        first = max(0, own - left) if left >= 0 else 0
        last = min(keys - 1, own + right) if right >= 0 else keys - 1
        found += max(0, last - first + 1)
    return found


def _batch(head_dim: int, batch: int, heads: int, queries: int, keys: int, **fields: Any) -> ShapeCase:
    return ShapeCase(head_dim, heads, (queries,) * batch, (keys,) * batch, **fields)


def _packed(name: str, head_dim: int, heads: int, lengths: Sequence[int], **fields: Any) -> ShapeCase:
    return ShapeCase(head_dim, heads, tuple(lengths), tuple(fields.pop("keys", lengths)), packed=name, **fields)


def _few() -> tuple[ShapeCase, ...]:
    marks = {16: Mark(52, cudnn_us=382), 64: Mark(62, cudnn_us=381), 128: Mark(108, cudnn_us=380),
             512: Mark(365, cudnn_us=404)}  # fmt: skip
    plain = {n: _batch(128, 1, 32, n, 32768, group=4) for n in (1, 16, 64, 128, 512)}
    sixteen, one = plain[16], plain[1]
    keys = [n * 16 for n in lognormal_lengths(16, 8192)]
    # A server's step: tokens of sequences that decode, and part of a prompt among them.
    decoding = [n * 4 for n in lognormal_lengths(64, 65536)]
    mixed = (1, 1, 1, 1000) * 25
    # Speculative decoding: a few drafted tokens of each sequence.
    drafts, sevens = _batch(128, 32, 32, 4, 4096, group=4), _batch(128, 32, 28, 4, 4096, group=7)
    return (
        one,
        *(replace(plain[n], mark=mark, both=True) for n, mark in marks.items()),
        _batch(128, 1, 16, 256, 65536, mark=Mark(214, cudnn_us=774)),
        _batch(128, 8, 32, 32, 8192, group=4, both=True, mark=Mark(87, reference="full")),
        _batch(128, 4, 16, 128, 32768),
        _batch(128, 1, 28, 8, 16384, group=7),
        _batch(128, 1, 32, 1, 4096),
        *(replace(plain[n], causal=True) for n in (64, 512)),
        *(_batch(64, 1, 32, n, 32768, group=4, both=True) for n in (16, 128)),
        _batch(256, 1, 16, 16, 32768, group=8),
        *(replace(case, mask="mixed", both=True) for case in (one, sixteen, plain[64])),
        replace(sixteen, mask="bias_heads", both=True, flex=True),
        _batch(128, 4, 32, 16, 8192, group=4, mask="padding", both=True),
        replace(sixteen, softcap=50.0, both=True, flex=True),
        *(replace(plain[n], mask="mixed") for n in (128, 512)),
        *(replace(plain[n], softcap=50.0) for n in (64, 128, 512)),
        replace(plain[128], mask="bias_heads"),
        *(replace(batched, mask=mask) for batched in (drafts, sevens) for mask in ("", "mixed")),
        replace(drafts, softcap=50.0),
        _batch(128, 32, 64, 8, 8192, group=8),
        _batch(128, 64, 32, 1, 1024, group=4),
        _packed("8x32on8192", 128, 32, (32,) * 8, keys=(8192,) * 8, group=4, both=True),
        _packed("16x1-61onlognormal", 128, 32, range(1, 65, 4), keys=keys, group=4, causal=True),
        _packed("64x1onlognormal", 128, 32, (1,) * 64, keys=decoding, group=4, causal=True, both=True),
        _packed("63x1and2048on4096", 128, 32, (*(1,) * 31, 2048, *(1,) * 32), keys=(4096,) * 64, group=4, causal=True),
        _packed("32x4onlognormal", 64, 32, (4,) * 32, keys=decoding[:32], group=4, causal=True),
        _packed("25x1000among75x1", 128, 32, mixed, keys=[n + 500 for n in mixed], group=4, causal=True, both=True),
        _packed(
            "64x1onlognormal", 128, 32, (1,) * 64, keys=decoding, group=4, causal=True, precision="int8", both=True
        ),
        *(replace(plain[n], precision="int8", both=True) for n in (16, 128)),
        *(replace(plain[n], precision="int8", operands=True) for n in (16, 64, 128, 512)),
    )


def _short() -> tuple[ShapeCase, ...]:
    def both(case: ShapeCase, full: Mark | None = None, causal: Mark | None = None) -> tuple[ShapeCase, ShapeCase]:
        return replace(case, mark=full), replace(case, causal=True, mark=causal)

    wide = both(
        _batch(192, 4, 16, 4096, 4096, own_head_dim_v=128),
        Mark(fa3_tflops=744, reference="full"),
        Mark(fa3_tflops=688, reference="causal"),
    )
    pairs = ((64, 128), (128, 64), (96, 64))
    return (
        *both(
            _batch(128, 16, 16, 1024, 1024),
            Mark(fa3_tflops=618, cudnn_tflops=594),
            Mark(fa3_tflops=473, cudnn_tflops=424),
        ),
        _batch(128, 8, 32, 2048, 2048, group=4, causal=True, mark=Mark(fa3_tflops=610, cudnn_tflops=503)),
        _batch(112, 4, 32, 2048, 2048, causal=True, mark=Mark(fa3_tflops=522, cudnn_tflops=442)),
        *both(_batch(64, 256, 16, 128, 128)),
        *both(_batch(128, 64, 16, 256, 256)),
        *both(_batch(64, 2048, 16, 16, 16)),
        *both(_batch(64, 1024, 16, 64, 64)),
        _batch(128, 2, 16, 1000, 1000),
        _batch(128, 1, 8, 1024, 1024, mark=Mark(22.7, cudnn_us=20.6)),
        _batch(64, 2, 12, 197, 197),
        _batch(64, 1, 12, 577, 577, mark=Mark(17.9, cudnn_us=14.2)),
        _batch(64, 8, 12, 448, 1500),
        _batch(64, 4, 16, 4096, 77),
        *(_batch(128, 4, 16, 4096, 4096, expanded=over) for over in ("heads", "batch")),
        *wide,
        *(_batch(d, 4, 16, 4096, 4096, own_head_dim_v=dv) for d, dv in pairs),
    )


def _packed_cases() -> tuple[ShapeCase, ...]:
    lognormal = _packed("lognormal", 128, 16, lognormal_lengths(16, TOTAL_TOKENS))
    # An order that is not sorted, as that of requests.
    wide = [17 + (4096 - 17) * (i * 20 % 33) // 32 for i in range(33)]
    narrow = [128 + i * 37 % 129 for i in range(128)]
    tiny = [1 + i * 13 % 32 for i in range(8192)]

    def both(case: ShapeCase, full: float = 0.0, causal: float = 0.0) -> tuple[ShapeCase, ShapeCase]:
        marks = [Mark(fa3_tflops=x, reference=of) if x else None for x, of in ((full, "full"), (causal, "causal"))]
        return replace(case, mark=marks[0]), replace(case, causal=True, mark=marks[1])

    full, causal = both(lognormal, 576, 452)
    return (
        full,
        replace(causal, flex=True),
        *both(_packed("lognormal", 128, 32, lognormal.lengths_q, group=4), 0.0, 495),
        *both(_packed("33x17-4096", 128, 16, wide), 596, 560),
        *both(_packed("128x128-256", 128, 16, narrow), 197, 115),
        *both(_packed("4096x16", 64, 16, (16,) * 4096)),
        *both(_packed("8192x1-32", 128, 16, tiny, group=4)),
        replace(lognormal, causal=True, window=(1023, 0)),
        replace(lognormal, causal=True, precision="int8"),
    )


def _windows() -> tuple[ShapeCase, ...]:
    plain = _batch(128, 1, 16, TOTAL_TOKENS, TOTAL_TOKENS)
    marks = {4096: 694.0, 1024: 536.0, 128: 172.0}
    causal = {
        n: replace(plain, causal=True, window=(n - 1, 0), flex=True, mark=Mark(fa3_tflops=speed, reference="causal"))
        for n, speed in marks.items()
    }
    # The others of one window: FlexAttention would be compiled for each.
    other = replace(causal[1024], flex=False, mark=None)
    return (
        *causal.values(),
        *(replace(plain, window=(n // 2, n // 2)) for n in marks),
        replace(other, heads=32, group=4),
        *(replace(other, head_dim=head_dim, heads=2048 // head_dim) for head_dim in (64, 256)),
        replace(other, softcap=50.0, flex=True),
        replace(other, lengths_q=(128,), lengths_k=(32768,), window=(4095, 0)),
        replace(other, lengths_q=lognormal_lengths(16, TOTAL_TOKENS), lengths_k=lognormal_lengths(16, TOTAL_TOKENS),
                packed="lognormal", window=(127, 0)),
    )  # fmt: skip


#: Cases of each bench.
SHAPE_CASES: dict[str, tuple[ShapeCase, ...]] = {
    "few": _few(),
    "short": _short(),
    "packed": _packed_cases(),
    "windows": _windows(),
}


def chosen_cases(cases: Sequence[Shape], shapes: Sequence[str], texts: Sequence[str]) -> tuple[Shape, ...]:
    """Those that have all words of one of ``shapes``, and one of ``texts`` in their name; empty: all.

    Raises
    ------
    ArgumentError
        A pattern matches nothing.
    """
    found = filter_named(shapes, cases)
    for text in texts:
        if not any(text.lower() in case.long_name for case in found):
            names = "; ".join(case.long_name for case in found)
            raise ArgumentError("--case", f"text within one of: {names}", repr(text))
    return tuple(case for case in found if not texts or any(text.lower() in case.long_name for text in texts))
