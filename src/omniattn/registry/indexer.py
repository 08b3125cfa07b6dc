"""Rows of the indexer of sparse attention: its logits, and the largest of each row. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from .spec import KernelSpec

#: Heads of one product; fewer are filled up, more are several.
INDEX_HEADS = 64
#: Channels of a key.
INDEX_DIM = 128
#: Queries times products of a CTA's tile: of the kernel on wgmma, of the generic one.
_SLOTS_SM90, _SLOTS_SM80 = 8, 2
#: Keys that a CTA computes in one step.
STEP = 128

#: Of a CTA of top_k: threads, vectors of four elements that a thread asks for at once, CTAs of an SM, and keys in
#: shared memory: of the whole row, or of its candidates.
_HELD, _STREAM = (1024, 8, 1, 32768 + 4096), (512, 2, 2, 4096)
#: Bytes of the histograms of the three digits, and of what stands behind them.
_SELECT_BYTES = 4 * (4096 + 1024 + 1024) + 320
#: CTAs that share a row at most.
MAX_CLUSTER = 8


def _index_logits(arch: int) -> KernelSpec:
    slots = _SLOTS_SM90 if arch == 90 else _SLOTS_SM80
    query = INDEX_HEADS * INDEX_DIM * (1 if arch == 90 else 2)
    weights = 4 * 4 * 20 if arch == 90 else 4 * INDEX_HEADS
    smem = slots * (query + weights + 8)
    return KernelSpec(
        name=f"index_logits_sm{arch}", family=f"index_logits_sm{arch}", op="index_logits",
        source=f"entry/index_logits_sm{arch}.cu", symbol=f"index_logits_sm{arch}", defines=(("SLOTS", str(slots)),),
        dtype="float8_e4m3fn", head_dim=INDEX_DIM, block_m=slots, block_n=STEP, num_warps=8 if arch == 90 else 4,
        smem_bytes=-(-smem // 1024) * 1024 if arch == 90 else -(-smem // 16) * 16, ctas_per_sm=2 if arch == 90 else 3,
        min_arch=(9, 0) if arch == 90 else (8, 0), arch_specific=arch == 90,
    )  # fmt: skip


def _top_k(held: bool, cluster: bool) -> KernelSpec:
    threads, vectors, ctas, keys = _HELD if held else _STREAM
    arch = "sm90" if cluster else "sm80"
    defines = {
        "THREADS": threads, "VECTORS": vectors, "CANDIDATES": keys, "CTAS": ctas, "HELD": int(held),
        "CLUSTER": int(cluster),
    }  # fmt: skip
    return KernelSpec(
        name=f"top_k_{arch}_{'held' if held else 'stream'}", family=f"top_k_{arch}", op="top_k",
        source="entry/top_k_sm80.cu", symbol="top_k_sm80", defines=tuple((n, str(v)) for n, v in defines.items()),
        dtype="float32", head_dim=INDEX_DIM, block_m=MAX_CLUSTER if cluster else 1,
        block_n=keys, num_warps=threads // 32,
        smem_bytes=_SELECT_BYTES + (4 * keys + 16 if held else 8 * keys), ctas_per_sm=ctas,
        min_arch=(9, 0) if cluster else (8, 0),
    )  # fmt: skip


def indexer_rows() -> Iterator[KernelSpec]:
    """Rows of ``index_logits`` and ``top_k``."""
    yield from (_index_logits(arch) for arch in (90, 80))
    yield from (_top_k(held, cluster) for cluster in (False, True) for held in (True, False))
