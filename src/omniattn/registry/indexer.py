"""Rows of the indexer of sparse attention: its logits, and the largest of each row. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import KernelSpec

#: Heads of one product; fewer are filled up, more are several.
INDEX_HEADS = 64
#: Channels of a key.
INDEX_DIM = 128
#: Of the generic kernel: queries times products of a CTA.
_SLOTS = 2
#: Of Hopper's, for one product of 64 heads, up to 2, up to 4 and more: the same, columns of a product, warpgroups that
#: multiply, tiles in shared memory, CTAs of an SM, registers of a thread that multiplies (0: as many as of the others).
_ONE, _TWO, _FOUR, _MORE = (1, 64, 1, 5, 4, 0), (2, 128, 1, 8, 2, 0), (4, 128, 4, 20, 1, 112), (8, 128, 4, 12, 1, 112)
#: Keys that a CTA computes in one step.
STEP = 128

#: Of a CTA of top_k: threads, vectors of four elements that a thread asks for at once, CTAs of an SM, candidates of a
#: thread in shared memory. For rows that are many, for few, and for those that a cluster shares.
_MANY, _FEW, _SHARED = (512, 6, 2, 16), (1024, 4, 1, 12), (512, 16, 1, 10)
#: Where bits say what of a row, or a part, is a candidate, and room is for numbers alone, two of them in the place of
#: one.
_MANY_MARKED, _SHARED_MARKED = (512, 8, 2, 14), (512, 16, 1, 14)
#: The same where shared memory holds a row, or a CTA's part of it, in the place of candidates.
_HELD, _MANY_HELD, _SHARED_HELD = (1024, 1, 1, 16), (512, 1, 2, 16), (512, 1, 1, 16)
#: For many short ones: more CTAs an SM with fewer threads.
_MANY_SHORT = (256, 1, 4, 16)
#: Elements of it that a thread has at most, and of a row with marks.
HELD, MARKED = 32, 64
#: Elements of a row from which on 1024 threads of one CTA an SM are faster for many of them.
LONG_ROW = 1 << 17
#: The rows of top_k, those that hold rows first.
TOP_K_SHORT = "top_k_sm80_many_short"
TOP_K_MANY = ("top_k_sm80_many_held", "top_k_sm80_many_marked", "top_k_sm80_many")
TOP_K_FEW = ("top_k_sm80_held", "top_k_sm80_few")
TOP_K_SHARED = ("top_k_sm90_shared_held", "top_k_sm90_shared_marked", "top_k_sm90_shared")
#: Words of its bits of positions, and in a cluster; bytes of its bins, of candidates beyond those of a thread, and of
#: what stands behind.
_MASK, _SHARED_MASK = 2048, 4096
_BINS_BYTES, _SPILLED_BYTES, _SELECT_BYTES = 4 * (2048 + 1024 + 1024), 8 * 1024, 512
#: What the CTAs of a cluster send each other.
_EXCHANGE_BYTES = 37 * 512
#: CTAs that share a row at most.
MAX_CLUSTER = 8
#: Steps of a CTA of index_logits that are worth its queries' way into shared memory, and rounds of CTAs that even out
#: sequences of different lengths.
LEAST_STEPS, ROUNDS = 8, 3
#: Elements of a row that a CTA of a cluster is worth, and those that a cluster of 4 holds: only longer rows have larger
#: clusters, which few places have room for.
LEAST_PART, HELD_BY_FOUR = 8192, 4 * HELD * _SHARED_HELD[0]


def _index_logits_sm90(shape: tuple[int, int, int, int, int, int], name: str) -> KernelSpec:
    slots, width, consumers, stages, ctas, registers = shape
    tile = INDEX_HEADS * INDEX_DIM
    smem = slots * (tile + 4 * 4 * 20 + 8) + stages * (tile + 4 * 64 + 16)
    defines = {
        "SLOTS": slots, "WIDTH": width, "CONSUMERS": consumers, "STAGES": stages, "CTAS": ctas, "REGISTERS": registers,
    }  # fmt: skip
    return KernelSpec(
        name=f"index_logits_sm90_{name}", family="index_logits_sm90", op="index_logits",
        source="entry/index_logits_sm90.cu", symbol="index_logits_sm90",
        defines=tuple((n, str(v)) for n, v in defines.items()), dtype="float8_e4m3fn", head_dim=INDEX_DIM,
        block_m=slots, block_n=width, num_warps=4 * (consumers + 1), smem_bytes=-(-smem // 1024) * 1024,
        ctas_per_sm=ctas, min_arch=(9, 0), arch_specific=True,
    )  # fmt: skip


def _index_logits_sm80() -> KernelSpec:
    smem = _SLOTS * (2 * INDEX_HEADS * INDEX_DIM + 4 * INDEX_HEADS + 8)
    return KernelSpec(
        name="index_logits_sm80", family="index_logits_sm80", op="index_logits", source="entry/index_logits_sm80.cu",
        symbol="index_logits_sm80", defines=(("SLOTS", str(_SLOTS)),), dtype="float8_e4m3fn", head_dim=INDEX_DIM,
        block_m=_SLOTS, block_n=INDEX_HEADS, num_warps=4, smem_bytes=-(-smem // 16) * 16, ctas_per_sm=3,
    )  # fmt: skip


def _top_k(
    shape: tuple[int, int, int, int], name: str, cluster: bool, held: bool = False, marked: bool = False
) -> KernelSpec:
    threads, vectors, ctas, depth = shape
    most = threads * (HELD if held else MARKED if marked else 0)
    mask, spilled = most // 32, 16
    if not most:
        mask, spilled = _SHARED_MASK if cluster else _MASK, _SPILLED_BYTES
    smem = _BINS_BYTES + 4 * mask + 8 * threads * depth + spilled + _SELECT_BYTES
    arch = "sm90" if cluster else "sm80"
    defines = {
        "THREADS": threads, "VECTORS": vectors, "DEPTH": depth, "MASK": mask, "CTAS": ctas,
        "CLUSTER": int(cluster), "HELD": int(held), "MARKED": int(marked),
    }  # fmt: skip
    return KernelSpec(
        name=f"top_k_{arch}_{name}", family=f"top_k_{arch}", op="top_k", source="entry/top_k_sm80.cu",
        symbol="top_k_sm80", defines=tuple((n, str(v)) for n, v in defines.items()), dtype="float32",
        head_dim=INDEX_DIM, block_m=MAX_CLUSTER if cluster else 1, block_n=threads * depth, num_warps=threads // 32,
        smem_bytes=smem + (_EXCHANGE_BYTES if cluster else 0), ctas_per_sm=ctas,
        min_arch=(9, 0) if cluster else (8, 0), most_elems=most,
    )  # fmt: skip


def indexer_rows() -> Iterator[KernelSpec]:
    """Rows of ``index_logits`` and ``top_k``."""
    yield _index_logits_sm90(_ONE, "one")
    yield _index_logits_sm90(_TWO, "two")
    yield _index_logits_sm90(_FOUR, "four")
    yield _index_logits_sm90(_MORE, "more")
    yield _index_logits_sm80()
    yield _top_k(_MANY, "many", cluster=False)
    yield _top_k(_MANY_MARKED, "many_marked", cluster=False, marked=True)
    yield _top_k(_FEW, "few", cluster=False)
    yield _top_k(_HELD, "held", cluster=False, held=True)
    yield _top_k(_MANY_HELD, "many_held", cluster=False, held=True)
    yield _top_k(_MANY_SHORT, "many_short", cluster=False, held=True)
    yield _top_k(_SHARED_MARKED, "shared_marked", cluster=True, marked=True)
    yield _top_k(_SHARED, "shared", cluster=True)
    yield _top_k(_SHARED_HELD, "shared_held", cluster=True, held=True)
