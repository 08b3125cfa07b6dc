"""What ``omniattn bench options`` times: every option of ``attention`` as one line of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omniattn.bench.shapes import filter_named
from omniattn.errors import ArgumentError

#: In FlexAttention's form: (score, batch, head, query, key) to the new score. Called on tensors that broadcast.
ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]

#: Name of the call without options: what every other case of the shape is compared with.
PLAIN = "plain"
#: Seed and offset of dropout.
DROPOUT_RNG = (1234, 0)
#: Every query sees every key, or the mask hides pairs of every tile: no pair can be left out.
ALL = "all"
#: Lengths of the sequences of a batch that a padding mask leaves, of the longest one.
_LENGTHS = (1.0, 0.9, 0.75, 0.5)


def lengths(batch: int, seqlen: int) -> list[int]:
    """Keys of each sequence that a padding mask leaves visible."""
    return [int(_LENGTHS[b % len(_LENGTHS)] * seqlen) for b in range(batch)]


def _padding_share(batch: int, seqlen: int) -> float:
    return sum(lengths(batch, seqlen)) / (batch * seqlen)


@dataclass(frozen=True)
class MaskKind:
    """A mask: which of the extents (batch, heads, seqlen_q, seqlen_k) it has, what is in it, and what it leaves.

    Attributes
    ----------
    extents : str
        Letters of "bhqk"; the others are 1.
    values : {"bool", "fp32", "q"}
        Element type; "q": that of q.
    contents : {"padding", "random", "half"}
        "padding": the first `lengths` keys. "random": half of the pairs (bool), normal numbers (others). "half": as
        "random", with half of the blocks of each row of blocks hidden.
    share : callable
        ``share(batch, seqlen_k)``: what part of the pairs is counted.
    """

    extents: str
    values: str
    contents: str
    share: Callable[[int, int], float] = lambda batch, seqlen: 1.0


MASKS: dict[str, MaskKind] = {
    "padding": MaskKind("bk", "bool", "padding", _padding_share),
    "padding_fp32": MaskKind("bk", "fp32", "padding", _padding_share),
    "mixed": MaskKind("qk", "bool", "random"),
    "half": MaskKind("qk", "bool", "half", lambda batch, seqlen: 0.5),
    "bias_heads": MaskKind("hqk", "q", "random"),
    "bias_fp32": MaskKind("qk", "fp32", "random"),
}


@dataclass(frozen=True)
class Case:
    """One way to call ``attention``. An option of a new kind that is no array needs one more line below, no code.

    Attributes
    ----------
    name : str
        Name in tables and on the command line.
    options : mapping
        Arguments that ``attention`` gets as they stand here.
    mask : str
        Key of `MASKS`; empty: none.
    sinks : bool
        A sink for each head.
    scale : float
        ``softmax_scale`` as a multiple of 1 / sqrt(head_dim); 1: it is not given.
    score : ScoreMod, optional
        What ``options`` do to a score, for FlexAttention and for the check. None: nothing.
    group : int
        Query heads on one kv head.
    packed : bool
        ``attention_varlen`` on the batch's sequences one behind the other; others get the batch.
    expanded : {"", "heads", "batch"}
        k and v are in memory once for all heads, or for all sequences, with stride 0 over them.
    seqlen_q, seqlen_k : int, optional
        Lengths; default: the shape's.
    counted : str
        Which pairs of query and key are counted as work.
    gain : float
        Factor of q where results are checked, so that an option shows that does little to small scores.
    expression, mask_expression : str
        Of a `ScoreMod`, whose arrays are those of `Problem.arrays`; empty: none.
    documents : int
        Of each sequence, equally long, each visible to itself only: what ``mask_expression`` says; 0: none.
    blocks : bool
        ``block_mask`` with half of 16 blocks hidden from each block of queries.
    dropout : float
        ``dropout_p``, with `DROPOUT_RNG`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mask: str = ""
    sinks: bool = False
    scale: float = 1.0
    score: ScoreMod | None = None
    group: int = 1
    packed: bool = False
    expanded: str = ""
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    counted: str = ALL
    gain: float = 1.0
    expression: str = ""
    mask_expression: str = ""
    documents: int = 0
    blocks: bool = False
    dropout: float = 0.0

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) of the keys that a query sees, -1 for unlimited: causal and window in one."""
        left, right = self.options.get("window") or (-1, -1)
        return left, 0 if self.options.get("causal") else right


def softcap_fields(cap: float) -> dict[str, Any]:
    """Fields of a case with this softcap."""
    return {"score": lambda score, b, h, i, j: cap * (score / cap).tanh(), "gain": 4.0}


_CAUSAL = {"causal": True}


def document_tokens(case: Case, seqlen: int) -> int:
    """Tokens of a document."""
    return max(1, seqlen // case.documents)


def slope(head: Any) -> Any:
    """ALiBi's slope of a head, for a number or a tensor."""
    return 2.0 ** (-0.5 * (head + 1))


#: Scores of ALiBi, as FlexAttention has them and as an expression.
_ALIBI: dict[str, Any] = {
    "score": lambda score, b, h, i, j: score + slope(h) * (j - i),
    "expression": "score + slopes[h] * (k - q)",
}

CASES: tuple[Case, ...] = (
    Case(PLAIN),
    Case("causal", _CAUSAL, counted="visible"),
    Case("padding mask, bool (b,1,1,s)", mask="padding", counted="visible"),
    Case("mask, bool (1,1,s,s), every tile mixed", mask="mixed"),
    Case("mask, bool (1,1,s,s), half of the blocks empty", mask="half", counted="of blocks that are not empty"),
    Case("bias, bf16 (1,h,s,s)", mask="bias_heads"),
    Case("bias, fp32 (1,1,s,s)", mask="bias_fp32"),
    Case("key mask, fp32 (b,1,1,s), 0 or -inf", mask="padding_fp32", counted="visible"),
    Case("softcap 50", {"softcap": 50.0}, **softcap_fields(50.0)),
    Case("softcap 50, causal", {"softcap": 50.0, **_CAUSAL}, counted="visible", **softcap_fields(50.0)),
    Case("window 1024, causal", {"window": (1023, 0), **_CAUSAL}, counted="visible"),
    Case("sinks", sinks=True),
    Case("return_lse", {"return_lse": True}),
    Case("4 query heads on a kv head", group=4),
    Case("negative softmax_scale", scale=-1.0),
    Case("packed", packed=True),
    Case("packed, causal", _CAUSAL, packed=True, counted="visible"),
    Case("packed, softcap 50", {"softcap": 50.0}, packed=True, **softcap_fields(50.0)),
    Case("k and v expanded over heads", expanded="heads"),
    Case("k and v expanded over the batch", expanded="batch"),
    Case("128 queries on 32768 keys", seqlen_q=128, seqlen_k=32768),
    Case("score_mod, ALiBi", **_ALIBI),
    Case("score_mod, ALiBi, causal", _CAUSAL, counted="visible", **_ALIBI),
    Case("score_mod, 8 documents", expression="score", mask_expression="doc[q] == doc[k]", documents=8,
         counted="visible"),
    Case("block_mask, half of the blocks empty", blocks=True, counted="of blocks that are not empty"),
    Case("dropout 0.1", dropout=0.1),
    Case("dropout 0.1, causal", _CAUSAL, dropout=0.1, counted="visible"),
    Case("packed, dropout 0.1", packed=True, dropout=0.1),
)  # fmt: skip

#: At other head dimensions: what has tiles of its own there.
_FEWER = (
    PLAIN, "causal", "padding mask, bool (b,1,1,s)", "mask, bool (1,1,s,s), every tile mixed", "bias, bf16 (1,h,s,s)",
    "softcap 50", "softcap 50, causal", "window 1024, causal", "4 query heads on a kv head", "score_mod, ALiBi",
    "dropout 0.1",
)  # fmt: skip


@dataclass(frozen=True)
class OptionShape:
    """What the cases are timed on.

    Attributes
    ----------
    batch, heads, seqlen, head_dim : int
        Of the plain call.
    only : tuple of str
        Names of the cases that are timed on it; empty: all.
    own_head_dim_v : int
        head_dim of v and o where that is another one; else 0.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    only: tuple[str, ...] = ()
    own_head_dim_v: int = 0

    @property
    def head_dim_v(self) -> int:
        """head_dim of v and o."""
        return self.own_head_dim_v or self.head_dim

    @property
    def long_name(self) -> str:
        """Name used by filters and reports, for example ``d128 b4 h16 s4096``."""
        return f"d{self.head_dim} b{self.batch} h{self.heads} s{self.seqlen}"

    def cases(self) -> tuple[Case, ...]:
        """Its cases in the order of `CASES`."""
        return tuple(case for case in CASES if not self.only or case.name in self.only)


#: The last two are head dimensions without tiles of their own: each is compared with its own plain call.
OPTION_SHAPES: tuple[OptionShape, ...] = (
    OptionShape(4, 16, 4096, 128),
    OptionShape(4, 32, 4096, 64, _FEWER),
    OptionShape(4, 8, 4096, 256, _FEWER),
    OptionShape(4, 16, 4096, 96, (PLAIN, "causal")),
    OptionShape(4, 16, 4096, 40, (PLAIN, "causal")),
)


def chosen(shapes: Sequence[str], cases: Sequence[str]) -> dict[OptionShape, tuple[Case, ...]]:
    """What to time: shapes that have all words of one of ``shapes``, cases whose name has one of ``cases`` in it.

    An empty sequence chooses all. The plain call is always among the cases.

    Raises
    ------
    ArgumentError
        A pattern matches nothing, or nothing of the chosen shapes.
    """
    for text in cases:
        if not any(text.lower() in case.name.lower() for case in CASES):
            names = "; ".join(case.name for case in CASES)
            raise ArgumentError("--case", f"text within one of: {names}", repr(text))
    found: dict[OptionShape, tuple[Case, ...]] = {}
    for shape in filter_named(shapes, OPTION_SHAPES):
        kept = tuple(
            case
            for case in shape.cases()
            if case.name == PLAIN or not cases or any(text.lower() in case.name.lower() for text in cases)
        )
        # The plain call alone answers nothing unless it was asked for.
        if len(kept) > 1 or not cases or any(text.lower() in PLAIN for text in cases):
            found[shape] = kept
    if not found:
        raise ArgumentError("--case", "a case of one of the chosen shapes", ", ".join(map(repr, cases)))
    return found


@dataclass(frozen=True)
class Extents:
    """Sizes of one case on one shape, and the pairs of query and key that count as work."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    pairs: float

    @classmethod
    def of(cls, case: Case, shape: OptionShape) -> Extents:
        """The case on the shape."""
        queries, keys = case.seqlen_q or shape.seqlen, case.seqlen_k or shape.seqlen
        left, right = case.bounds
        pairs = 0
        for query in range(queries):
            own = query + keys - queries
            first = max(0, own - left) if left >= 0 else 0
            last = min(keys - 1, own + right) if right >= 0 else keys - 1
            pairs += max(0, last - first + 1)
        share = MASKS[case.mask].share(shape.batch, keys) if case.mask else 0.5 if case.blocks else 1.0
        if case.documents:
            tokens = document_tokens(case, keys)
            whole, rest = divmod(keys, tokens)
            share *= (whole * tokens**2 + rest**2) / keys**2
        return cls(
            shape.batch, shape.heads, shape.heads // case.group, queries, keys, shape.head_dim, shape.head_dim_v,
            pairs * shape.batch * shape.heads * share,
        )  # fmt: skip

    @property
    def flops(self) -> float:
        """Floating-point operations of both products for the pairs that count."""
        return 2.0 * self.pairs * (self.head_dim + self.head_dim_v)
