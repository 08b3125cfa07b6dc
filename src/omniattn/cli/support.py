"""The support tables, computed from the registry and never written by hand.

The README's says what a released wheel holds: operation x GPU. ``omniattn info`` says what this installation can do,
with reasons: operation, options, dtype and head_dim x GPU, through :func:`omniattn.runtime.resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from omniattn import registry
from omniattn.bench.report import markdown_table
from omniattn.errors import ArgumentError
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.arch import Arch

#: Shared memory of a CTA by compute capability.
_MAX_SMEM = {cc: max_smem for gpus in registry.GPUS.values() for cc, max_smem in gpus.items()}


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


GPUS: tuple[Column, ...] = tuple(
    Column(cc, products, _MAX_SMEM[cc])
    for cc, products in {
        (8, 0): "A100, A30",
        (8, 6): "A10, A40, RTX 30",
        (8, 9): "L4, L40, RTX 40",
        (9, 0): "H100, H200",
        (10, 0): "B200",
        (12, 0): "RTX 50",
    }.items()
)

#: Of compute capabilities besides.
_SHARED_MEMORY = {(11, 0): 227 << 10}


def shared_memory(cc: tuple[int, int]) -> int:
    """Opt-in shared memory of one CTA; of unknown GPUs what the least of their kind has, or the least of all."""
    known = _MAX_SMEM | _SHARED_MEMORY
    alike = [size for (major, _), size in known.items() if major == cc[0]]
    return known.get(cc) or min(alike or known.values())


#: Where a kernel's binary comes from, best first, and the word in a table.
WORDS = {"prebuilt": "prebuilt", "cache": "cached", "jit": "JIT", "unsupported": "–"}

#: What a row was compiled for, in words. Whether it makes an LSE is not among them: rows with one serve every call.
FEATURES: dict[str, Callable[[KernelSpec], bool]] = {
    "a factor for 128 rows of v": lambda spec: spec.value_factors,
    "with smooth_q": lambda spec: spec.smooth_q == "always",
    "with softcap or mask": lambda spec: spec.score_mods,
    "deterministic": lambda spec: spec.ordered_dq,
    # Beside rows for head dims above some number others take v of any head_dim.
    "v of another head_dim": lambda spec: (
        (spec.own_head_dim_v > 0 and not spec.above_head_dim) or spec.other_head_dim_v > spec.any_head_dim_v
    ),
    "with a rotation": lambda spec: spec.rotated,
    "behind the kernel of Hopper": lambda spec: spec.fragments,
    "to e4m3": lambda spec: spec.rotated,
    "with the gradient of a mask": lambda spec: spec.dmask,
}

#: Row format of a cache to words, where its name does not do.
CACHES = {"16": "16-bit", "fbgemm": "int4 (FBGEMM's layout)"}
_FORMAT = re.compile(r"^(.+?)(?:g(\d+))?$", re.MULTILINE)

_FORWARD, _FP8 = "`attention`, `attention_varlen`", "the same, precision fp8 and e4m3 arrays"
_LATENT = "`decode` over latent caches, `attention_sparse`"
_BACKWARD, _QUANTIZE = "`attention_backward`, `attention_varlen_backward`", "`quantize_qk`, `quantize_v`"
#: Operation of the registry to its line in the README's table, and to what calls it where its name does not say so.
LINES: dict[str, tuple[str, str]] = {
    "attention": (_FORWARD, ""),
    "attention_split": (_FORWARD, "few queries on many keys"),
    "attention_combine": (_FORWARD, "behind attention_split"),
    "attention_combine_lse": (_FORWARD, "behind attention_split"),
    "attention_combine_packed": (_FORWARD, "behind attention_split"),
    "mask_pack": (_FORWARD, "attention with a mask"),
    "mask_align": (_FORWARD, "attention with an additive mask"),
    "mask_list": (_FORWARD, "attention with a mask"),
    "tile_kinds": (_FORWARD, "attention with a block_mask or score_mod"),
    "clear_unused": (_FORWARD, "attention_varlen with seqused_q, its gradients with either"),
    "quantized_attention": ("the same, precision int8 and int4", "precision int8, int4"),
    "fp8_attention": (_FP8, "precision fp8, e4m3 arrays"),
    "layout_fp8": (_FP8, "attention on e4m3 arrays"),
    "quantize_fp8_sums": (_FP8, "attention with precision fp8"),
    "quantize_values": (_FP8, "attention with precision fp8"),
    "quantize_kv_sums": ("the same, precision int8 and int4", "attention with precision int8"),
    "quantize_kv": ("the same, precision int8 and int4", "attention with precision int8"),
    "attention_backward": (_BACKWARD, ""),
    "attention_backward_dq": (_BACKWARD, "dq alone or deterministic"),
    "attention_backward_prepare": (_BACKWARD, "LSE and delta of rows"),
    "attention_backward_finish": (_BACKWARD, "dq of sums"),
    "quantize": (_QUANTIZE, "quantize_qk, quantize_v"),
    "quantize_delta": (_QUANTIZE, "quantize_qk with smooth_q"),
    "quantize_fp8": (_QUANTIZE, "quantize_qk to e4m3"),
    "decode": ("`decode`", ""),
    "decode_combine": ("`decode`", "behind decode"),
    "latent_decode": (_LATENT, "decode over latent caches, attention_sparse"),
    "latent_combine": (_LATENT, "behind latent_decode"),
    "append": ("`append`", ""),
    "latent_append": ("`append`", "append to latent caches"),
    "dequantize": ("`decode`", "prompts over quantized caches"),
    "dequantize_rounds": ("`decode`", "prompts over quantized caches"),
    "copy_blocks": ("`copy_blocks`", ""),
    "merge_states": ("`merge_states`", ""),
    "index_logits": ("`index_logits`", ""),
    "top_k": ("`top_k`", ""),
    "block_means": ("`sparse_blocks`", ""),
    "choose_blocks": ("`sparse_blocks`", "behind block_means"),
}
#: What no wheel holds of an operation: a user's expressions, and what the registry does not list.
FIRST_USE = {
    _FORWARD: "`score_mod`, dropout",
    _BACKWARD: "`score_mod`, dropout",
    "`decode`": "K and V in different formats",
    "`append`": "K and V in different formats",
}

#: ``(spec, cc) -> (kind, reason)``
Resolver = Callable[[KernelSpec, tuple[int, int]], tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    """What one GPU offers for one class of problems.

    Attributes
    ----------
    kernels : dict
        Kind (a key of :data:`WORDS`) to the names of the kernels that are to be had so, of those that calls take.
    reason : str
        Why.
    """

    kernels: dict[str, tuple[str, ...]]
    reason: str

    @property
    def text(self) -> str:
        """Text of the cell in a table; with the numbers of kernels where they are not all of one kind."""
        if len(self.kernels) < 2:
            return WORDS[next(iter(self.kernels), "unsupported")]
        return ", ".join(f"{len(names)} {WORDS[kind]}" for kind, names in self.kernels.items())


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
        caller = LINES.get(self.op, ("", ""))[1]
        return ", ".join(filter(None, (f"{self.op} ({caller})" if caller else self.op, self.features)))


def is_held(spec: KernelSpec, cc: tuple[int, int]) -> bool:
    """Whether a released wheel has a cubin of the kernel that a GPU loads."""
    return any(Arch.parse(target).runs_on(cc) for target in spec.prebuild)


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
        :func:`runtime_resolver`, or another one.
    registry : iterable of KernelSpec
    columns : sequence of Column

    Returns
    -------
    list of SupportRow
        By operation and features as in the registry, then dtype, then head_dim.
    """
    classes: dict[tuple[str, str], dict[str, dict[int, list[KernelSpec]]]] = {}
    for spec in registry:
        of_dtype = classes.setdefault((operation_of(spec), _words(spec)), {}).setdefault(spec.dtype, {})
        of_dtype.setdefault(spec.head_dim, []).append(spec)
    rows = []
    for (op, words), of_op in classes.items():
        for dtype, of_dtype in sorted(of_op.items()):
            smallest = 8
            for head_dim, specs in sorted(of_dtype.items()):
                wider = [spec for width, more in of_dtype.items() if width > head_dim for spec in more]
                cells = tuple(_cell(specs, wider, resolver, column) for column in columns)
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
    words = [name for name, has in FEATURES.items() if has(spec)]
    for kind, group in dict.fromkeys(_FORMAT.findall("\n".join(spec.cache))):
        words.append(f"{CACHES.get(kind, kind)} cache" + (f", group_size {group}" if group else ""))
    return ", ".join(words)


def _taken(specs: Sequence[KernelSpec], column: Column) -> list[KernelSpec]:
    """Those that run on a GPU, without what no call takes there: nobody has to wait for that."""
    able = [spec for spec in specs if not spec.unfit(column.cc, column.smem_bytes)]
    return [spec for spec in able if is_held(spec, column.cc)] if column.cc in _MAX_SMEM else able


def _cell(specs: Sequence[KernelSpec], wider: Sequence[KernelSpec], resolver: Resolver, column: Column) -> Cell:
    """wider: kernels for more channels, which serve where none of ``specs`` runs."""
    found: dict[str, list[tuple[str, str]]] = {}
    for spec in _taken(specs, column) or _taken(wider, column):
        kind, reason = resolver(spec, column.cc)
        found.setdefault(kind, []).append((spec.name, reason))
    if not found:
        unfit = (spec.unfit(column.cc, column.smem_bytes, where=column.target) for spec in specs)
        return Cell({}, "; ".join(dict.fromkeys(filter(None, unfit))) or "no call takes it there")
    kinds = {kind: found[kind] for kind in WORDS if kind in found}
    reasons = dict.fromkeys(reason for kernels in kinds.values() for _, reason in kernels)
    return Cell({kind: tuple(name for name, _ in kernels) for kind, kernels in kinds.items()}, "; ".join(reasons))


def merge_rows(rows: Sequence[SupportRow]) -> list[SupportRow]:
    """Join rows with the same cells and reasons: dtypes, then neighbouring head_dim ranges, then features."""

    def seen(row: SupportRow) -> tuple[tuple[str, str], ...]:
        return tuple((cell.text, cell.reason) for cell in row.cells)

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
        group[0] if len(group) == 1 else replace(group[0], features="; ".join(row.features or "plain" for row in group))
        for group in by_features.values()
    ]


def readme_table(registry: Iterable[KernelSpec] = REGISTRY) -> str:
    """The table of the README, in Markdown: what a released wheel holds, a line an operation."""
    lines: dict[str, list[KernelSpec]] = {}
    for spec in registry:
        op = operation_of(spec)
        lines.setdefault(LINES[op][0] if op in LINES else f"`{op}`", []).append(spec)
    header = ["operation", *(f"{gpu.products} ({gpu.target})" for gpu in GPUS), "compiled on first use"]
    body = []
    for line, specs in lines.items():
        # The kernel that the line is named after, not those beside it.
        named = [spec for spec in specs if operation_of(spec) == operation_of(specs[0])]
        cells = ["prebuilt" if any(is_held(spec, gpu.cc) for spec in named) else "–" for gpu in GPUS]
        body.append([line, *cells, FIRST_USE.get(line, "")])
    return markdown_table(header, body)
