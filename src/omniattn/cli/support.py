"""The support table: operation x dtype x head_dim class x GPU -> prebuilt, JIT or unsupported.

It is computed from the registry, never written by hand. Two questions share the code: what a released wheel holds
(README), and what this installation can do (``omniattn info``, through :func:`omniattn.runtime.resolve`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from omniattn.bench.report import markdown_table
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.arch import Arch


@dataclass(frozen=True)
class Column:
    """A kind of GPU.

    Attributes
    ----------
    cc : (major, minor)
        Compute capability.
    products : str
        What it is sold as.
    smem_bytes : int
        Opt-in shared memory of one CTA.
    """

    cc: tuple[int, int]
    products: str
    smem_bytes: int

    @property
    def target(self) -> str:
        """``"sm_90"``."""
        return f"sm_{self.cc[0]}{self.cc[1]}"


#: Shared memory: CUDA programming guide, "Technical Specifications per Compute Capability", 1 KiB less than an SM has.
GPUS: tuple[Column, ...] = (
    Column((8, 0), "A100, A30", 163 << 10),
    Column((8, 6), "A10, A40, RTX 30", 99 << 10),
    Column((8, 9), "L4, L40, RTX 40", 99 << 10),
    Column((9, 0), "H100, H200", 227 << 10),
    Column((10, 0), "B200", 227 << 10),
    Column((12, 0), "RTX 50", 99 << 10),
)

#: Of compute capabilities besides.
_SHARED_MEMORY = {(8, 7): 163 << 10, (11, 0): 227 << 10}


def shared_memory(cc: tuple[int, int]) -> int:
    """Opt-in shared memory of one CTA; of unknown GPUs what the least of their kind has, or the least of all."""
    known = {gpu.cc: gpu.smem_bytes for gpu in GPUS} | _SHARED_MEMORY
    alike = [size for (major, _), size in known.items() if major == cc[0]]
    return known.get(cc) or min(alike or known.values())


#: Best first: a cell shows the best that any of its kernels offers.
KINDS: tuple[str, ...] = ("prebuilt", "cache", "jit", "unsupported")

#: Kind to the word in a table.
WORDS = {"prebuilt": "prebuilt", "cache": "cached", "jit": "JIT", "unsupported": "–"}

#: Registry feature to words.
FEATURES = {
    "score_mods": "with softcap or mask",
    "dmask": "with the gradient of a mask",
    "fragments": "behind the kernel of Hopper",
    "smooth_q": "with smooth_q",
    "head_dim_v": "v of another head_dim",
    "value_factors": "a factor for 128 rows of v",
    "e4m3": "to e4m3",
    "hadamard": "with a rotation",
}

#: Row format of a cache to words, where its name does not do.
CACHES = {"16": "16-bit", "fbgemm": "int4 (FBGEMM's layout)"}

#: What calls an operation whose name is not that of a public function.
CALLS = {
    "quantized_attention": "precision int8, int4",
    "fp8_attention": "precision fp8, e4m3 arrays",
    "layout_fp8": "attention on e4m3 arrays",
    "quantize_fp8_sums": "attention with precision fp8",
    "quantize_values": "attention with precision fp8",
    "quantize": "quantize_qk, quantize_v",
    "quantize_delta": "quantize_qk with smooth_q",
    "decode_combine": "decode",
    "mask_pack": "attention with a mask",
    "mask_align": "attention with an additive mask",
    "mask_list": "attention with a mask",
    "tile_kinds": "attention with a block_mask or score_mod",
    "packed_parts": "attention_varlen with seqused_q or seqused_k",
}

#: Kernels beside those of `attention_backward`, which they follow: the README's line is not about them.
BESIDE = {
    "attention_backward_dq": "attention_backward, dq alone or deterministic",
    "attention_backward_prepare": "attention_backward, LSE and delta of rows",
    "attention_backward_finish": "attention_backward, dq of sums",
}

#: Q, K and V of `attention` to e4m3 in two launches.
FP8_VALUES = ("quantize_fp8_sums", "quantize_values")

#: Kernels that some calls of `attention` and `quantize_qk` take for speed, or before others: tables are about those.
FASTER = (
    "attention_split", "attention_combine", "attention_combine_lse", "attention_combine_packed",
    "quantize_fp8", "layout_fp8", *FP8_VALUES,
)  # fmt: skip

#: Operation of the registry to its line in the README's table.
LINES = {
    **dict.fromkeys(("attention", *FASTER[:4]), "`attention`, `attention_varlen`"),
    "quantized_attention": "the same, precision int8 and int4",
    **dict.fromkeys(("fp8_attention", "layout_fp8", *FP8_VALUES), "the same, precision fp8 and e4m3 arrays"),
    "quantize_fp8": "`quantize_qk`, `quantize_v`",
    "quantize": "`quantize_qk`, `quantize_v`",
    "quantize_delta": "`quantize_qk`, `quantize_v`",
    "mask_pack": "`attention`, `attention_varlen`",
    "mask_align": "`attention`, `attention_varlen`",
    "mask_list": "`attention`, `attention_varlen`",
    "tile_kinds": "`attention`, `attention_varlen`",
    "packed_parts": "`attention`, `attention_varlen`",
    **dict.fromkeys(("attention_backward", *BESIDE), "`attention_backward`, `attention_varlen_backward`"),
    "merge_states": "`merge_states`",
    "decode": "`decode`",
    "decode_combine": "`decode`",
    "append": "`append`",
    "copy_blocks": "`copy_blocks`",
}

#: What a kernel takes that does not list the key among what it lacks.
SCOPES = {"dense": "dense", "varlen": "packed"}

#: ``(spec, cc) -> (kind, reason)``
Resolver = Callable[[KernelSpec, tuple[int, int]], tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    """What one GPU offers for one class of problems.

    Attributes
    ----------
    kind : str
        One of :data:`KINDS`.
    kernels : tuple of str
        Kernels that stand behind it.
    reason : str
        Why.
    partial : str
        What part of the class a kernel of this GPU takes, its family, and its kind where that differs, such as
        ``"dense: attn_fwd_sm90"``; empty if there is none.
    own : str
        The same without the kind.
    own_kind : str
        The kind.
    """

    kind: str
    kernels: tuple[str, ...]
    reason: str
    partial: str = ""
    own: str = ""
    own_kind: str = ""

    @property
    def usual(self) -> str:
        """The kind that most calls of the class get."""
        return self.own_kind if self.own and KINDS.index(self.own_kind) < KINDS.index(self.kind) else self.kind

    @property
    def text(self) -> str:
        """Text of the cell in a table."""
        if not self.partial:
            return WORDS[self.kind]
        return f"only {self.partial}" if self.kind == "unsupported" else f"{WORDS[self.kind]}; {self.partial}"


@dataclass(frozen=True)
class SupportRow:
    """One line of the table.

    Attributes
    ----------
    op : str
    features : str
        Options that its kernels were compiled for, in words; empty for the common set.
    dtype, head_dim : str
        ``head_dim`` is a range such as ``"8–64"``.
    cells : tuple of Cell
        One a column.
    """

    op: str
    features: str
    dtype: str
    head_dim: str
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """The first cell of the line."""
        op = f"{self.op} ({CALLS[self.op]})" if self.op in CALLS else BESIDE.get(self.op, self.op)
        return f"{op}, {self.features}" if self.features else op


def wheel_resolver(spec: KernelSpec, cc: tuple[int, int]) -> tuple[str, str]:
    """What a released wheel offers on a GPU that can run the kernel, from the registry row alone."""
    for target in spec.prebuild:
        if Arch.parse(target).runs_on(cc):
            return "prebuilt", f"sm_{target} cubin"
    return "jit", "compiled by NVRTC on first use"


def runtime_resolver(spec: KernelSpec, cc: tuple[int, int]) -> tuple[str, str]:
    """What this installation offers: files and compilers that are really here."""
    from omniattn import runtime

    try:
        resolution = runtime.resolve(spec, cc)
    except ArgumentError as error:
        # An environment variable with a bad value: every call on a GPU would raise this.
        return "unsupported", str(error)
    return resolution.kind, resolution.reason


def columns_with(gpus: Iterable[tuple[tuple[int, int], str, int]]) -> tuple[Column, ...]:
    """:data:`GPUS`, preceded by the given GPUs, each compute capability once."""
    chosen = {cc: Column(cc, name, smem) for cc, name, smem in gpus}
    return (*chosen.values(), *(column for column in GPUS if column.cc not in chosen))


def support_rows(
    resolver: Resolver, registry: Iterable[KernelSpec] = REGISTRY, columns: Sequence[Column] = GPUS
) -> list[SupportRow]:
    """Compute the table.

    Parameters
    ----------
    resolver : callable
        :func:`wheel_resolver` or :func:`runtime_resolver`.
    registry : iterable of KernelSpec
    columns : sequence of Column

    Returns
    -------
    list of SupportRow
        By operation and features as in the registry, then dtype, then head_dim.
    """
    # A specialized kernel serves nothing that the kernel for anything does not; of two kernels that differ by the LSE
    # only, one is enough to see. What adds to dq in a fixed order serves calls that other kernels serve in two passes.
    specs = [spec for spec in registry if spec.specialization is None and "lse" not in spec.features]
    specs = [spec for spec in specs if spec.op not in FASTER and "ordered" not in spec.features]
    rows = []
    for op, words in dict.fromkeys((operation_of(spec), _words(spec)) for spec in specs):
        alike = [spec for spec in specs if (operation_of(spec), _words(spec)) == (op, words)]
        for dtype in sorted({spec.dtype for spec in alike}):
            # A row that lacks something speaks for a part of its class only: it must not decide the whole cell.
            chosen = [spec for spec in alike if spec.dtype == dtype and not spec.lacks]
            partial = [spec for spec in alike if spec.dtype == dtype and spec.lacks]
            smallest = 8
            for head_dim in sorted({spec.head_dim for spec in chosen or partial}):
                # A kernel takes every head_dim up to its own; the next smaller one is only faster below that.
                able = [spec for spec in chosen if spec.head_dim == head_dim]
                wide = [spec for spec in partial if spec.head_dim >= head_dim]
                cells = tuple(_cell(able, wide, resolver, column) for column in columns)
                rows.append(SupportRow(op, words, dtype, f"{smallest}–{head_dim}", cells))
                smallest = head_dim + 8
    return rows


def operation_of(spec: KernelSpec) -> str:
    """A row's operation; attention on quantized operands is one of its own here, on integers and on e4m3."""
    if spec.quantized:
        return "fp8_attention" if spec.qk == "fp8" else "quantized_attention"
    return spec.op


def _words(spec: KernelSpec) -> str:
    """What a row was compiled for beyond the common set: features, the format of its cache."""
    features = spec.features | ({"head_dim_v"} if spec.own_head_dim_v else set())
    # Kernels for a mask serve calls without smooth_q or softcap too: the class has the one name.
    if "score_mods" in features:
        features &= {"score_mods", "head_dim_v", "value_factors"}
    words = ", ".join(FEATURES.get(name, name) for name in sorted(features, reverse=True))
    formats = [CACHES.get(name, name.replace("g", ", group_size ")) for name in dict.fromkeys(spec.cache)]
    if not formats:
        return words
    name, _, group = formats[0].partition(", ")
    cache = f"{name} cache" if len(formats) == 1 else f"{formats[0]} and {formats[1]} cache"
    return ", ".join(filter(None, (words, cache, group if len(formats) == 1 else "")))


def _cell(specs: Sequence[KernelSpec], partial: Sequence[KernelSpec], resolver: Resolver, column: Column) -> Cell:
    """``specs`` take everything of the class; each of ``partial`` lacks something."""
    kind, names, reasons = _best(specs, resolver, column)
    part_kind, part_names, part_reasons = _best(partial, resolver, column)
    if part_kind == "unsupported":
        return Cell(kind, names, reasons or part_reasons)
    chosen = [spec for spec in partial if spec.name in part_names]
    if not frozenset.intersection(*(spec.lacks for spec in chosen)) and KINDS.index(part_kind) < KINDS.index(kind):
        # What one of them lacks another one has: together they take the whole class.
        return Cell(part_kind, part_names, part_reasons)
    scope = ", ".join(word for lack, word in SCOPES.items() if any(lack not in spec.lacks for spec in chosen))
    if all("softcap" in spec.lacks for spec in chosen):
        scope += " without softcap"
    families = ", ".join(dict.fromkeys(spec.family for spec in chosen))
    if part_reasons != reasons:
        reasons = f"{reasons or 'no kernel takes the whole class'}; {families}: {part_reasons}"
    quality = "" if part_kind == kind else f" ({WORDS[part_kind]})"
    own = f"{scope}: {families}"
    return Cell(kind, (*names, *part_names), reasons, f"{own}{quality}", own, part_kind)


def _best(specs: Sequence[KernelSpec], resolver: Resolver, column: Column) -> tuple[str, tuple[str, ...], str]:
    """The best kind that any of the kernels offers, the kernels that offer it, and why."""
    found: dict[str, list[tuple[str, str]]] = {"unsupported": []}
    unfit = {spec.name: spec.unfit(column.cc, column.smem_bytes, where=column.target) for spec in specs}
    for spec in specs:
        if not unfit[spec.name]:
            kind, reason = resolver(spec, column.cc)
            found.setdefault(kind, []).append((spec.name, reason))
    if not any(found.values()):
        # That kernels for other GPUs do not run here says something only where there are no others.
        found["unsupported"] = [(name, reason) for name, reason in unfit.items() if reason]
    best = min((kind for kind, kernels in found.items() if kernels), key=KINDS.index, default="unsupported")
    names = tuple(name for name, _ in found[best])
    return best, names, "; ".join(dict.fromkeys(reason for _, reason in found[best]))


def _texts(row: SupportRow) -> tuple[str, ...]:
    return tuple(cell.text for cell in row.cells)


def _reasons(row: SupportRow) -> tuple[str, ...]:
    return tuple(f"{cell.kind}: {cell.reason}" for cell in row.cells)


def merge_rows(rows: Sequence[SupportRow], *, same_reasons: bool = False) -> list[SupportRow]:
    """Join rows with the same cells: dtypes, then neighbouring head_dim ranges, then features with the common set.

    Parameters
    ----------
    rows : sequence of SupportRow
    same_reasons : bool
        Join only rows whose reasons agree too.
    """
    seen = _reasons if same_reasons else _texts
    by_dtype: dict[tuple[object, ...], list[SupportRow]] = {}
    for row in rows:
        by_dtype.setdefault((row.op, row.features, row.head_dim, seen(row)), []).append(row)
    merged: list[SupportRow] = []
    for group in by_dtype.values():
        row = replace(group[0], dtype=", ".join(one.dtype for one in group))
        last = merged[-1] if merged else None
        if (
            last
            and replace(last, head_dim="", cells=()) == replace(row, head_dim="", cells=())
            and seen(last) == seen(row)
        ):
            span = f"{last.head_dim.split('–')[0]}–{row.head_dim.split('–')[1]}"
            merged[-1] = replace(row, head_dim=span)
        else:
            merged.append(row)
    by_features: dict[tuple[object, ...], list[SupportRow]] = {}
    for row in merged:
        by_features.setdefault((row.op, row.dtype, row.head_dim, seen(row)), []).append(row)
    return [
        group[0]
        if len(group) == 1
        else replace(
            group[0], features=", ".join(f"also {row.features}" if row.features else "" for row in group).strip(", ")
        )
        for group in by_features.values()
    ]


def table(rows: Sequence[SupportRow]) -> tuple[list[str], list[list[str]]]:
    """Header and cells as text."""
    header = ["operation", "dtype", "head_dim", *(f"{gpu.target} ({gpu.products})" for gpu in GPUS)]
    return header, [[row.label, row.dtype, row.head_dim, *_texts(row)] for row in rows]


_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def readme_table(registry: Iterable[KernelSpec] = REGISTRY) -> str:
    """The table of the README, in Markdown: a line an operation, what a released wheel holds; exceptions below."""
    lines: dict[str, list[SupportRow]] = {}
    for row in support_rows(wheel_resolver, [spec for spec in registry if spec.op not in BESIDE]):
        if FEATURES["head_dim_v"] not in row.features:  # the text below the table has them
            lines.setdefault(LINES.get(row.op, f"`{row.op}`"), []).append(row)
    notes: dict[str, str] = {}
    cells = {}
    for line, rows in lines.items():
        for column in range(len(GPUS)):
            usual, exceptions = _summary(rows, column)
            marks = " ".join(notes.setdefault(text, str(len(notes) + 1).translate(_DIGITS)) for text in exceptions)
            cells[line, column] = f"{WORDS[usual]} {marks}".strip()
    # GPUs that have the same in every line share a column.
    alike: dict[tuple[str, ...], list[Column]] = {}
    for column, gpu in enumerate(GPUS):
        alike.setdefault(tuple(cells[line, column] for line in lines), []).append(gpu)
    header = ["operation"]
    for gpus in alike:
        products = ", ".join(gpu.products for gpu in alike[gpus])
        header.append(f"{products} ({', '.join(gpu.target for gpu in alike[gpus])})")
    body = [[line, *(column[index] for column in alike)] for index, line in enumerate(lines)]
    below = "".join(f"\n{mark} {text}  " for text, mark in notes.items())
    return markdown_table(header, body) + ("\n" + below.rstrip() if below else "")


def _summary(rows: Sequence[SupportRow], column: int) -> tuple[str, list[str]]:
    """The kind that a line of the README shows for a GPU, and what differs from it."""
    # What stands first in the registry is the common set.
    first = [row for row in rows if (row.op, row.features) == (rows[0].op, rows[0].features)]
    counts = Counter(row.cells[column].usual for row in first)
    usual = max(counts, key=lambda kind: (counts[kind], -KINDS.index(kind)))
    notes = []
    for kind in KINDS:
        by_dtype = {
            dtype: text
            for dtype in dict.fromkeys(row.dtype for row in rows)
            if kind != usual and (text := _classes(rows, column, kind, dtype))
        }
        everywhere = len({*by_dtype.values()}) == 1 and len(by_dtype) == len({row.dtype for row in rows})
        texts = set(by_dtype.values()) if everywhere else [f"{text}, {dtype}" for dtype, text in by_dtype.items()]
        notes += [f"{WORDS[kind]}: {text}" for text in texts]
    cells = [row.cells[column] for row in rows if row.cells[column].own]
    for kind in sorted({cell.kind for cell in cells if cell.kind != cell.usual}, key=KINDS.index):
        notes.append(f"{WORDS[kind]}: in part, arrays that tensor maps cannot describe")
    return usual, notes + list(dict.fromkeys(cell.own for cell in cells))


def _classes(rows: Sequence[SupportRow], column: int, kind: str, dtype: str) -> str:
    """Classes of problems for which a GPU has ``kind``, in words."""
    found: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.dtype != dtype:
            continue
        name = row.features or (CALLS.get(row.op, row.op) if row.op != rows[0].op else "")
        names.setdefault(name, []).append(row.head_dim)
        if row.cells[column].usual == kind:
            found.setdefault(name, []).append(row.head_dim)
    if not found:
        return ""
    common = [width for width in next(iter(found.values())) if all(width in found.get(name, ()) for name in names)]
    parts = [f"head_dim {_joined(common)}"] if common else []
    rest: dict[str, list[str]] = {}
    for name, widths in found.items():
        left = [width for width in widths if width not in common]
        if left:
            where = "" if widths == names[name] else f" at head_dim {_joined(left)}"
            rest.setdefault(where, []).append(name or "without options")
    parts += [f"{', '.join(group)}{where}" for where, group in rest.items()]
    return "; ".join(parts)


def _joined(ranges: Sequence[str]) -> str:
    """Neighbouring ranges as one: 8–64 and 72–128 are 8–128."""
    joined: list[list[int]] = []
    for text in ranges:
        low, high = (int(number) for number in text.split("–"))
        if joined and joined[-1][1] + 8 == low:
            joined[-1][1] = high
        else:
            joined.append([low, high])
    return ", ".join(f"{low}–{high}" for low, high in joined)
