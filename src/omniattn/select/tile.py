"""Which tile of queries a call of short sequences gets, by a model (docs/performance/short.md).

Short sequences fill a part of a large tile, or keep too few SMs busy; small tiles read K and V more often, and hide
waiting less well. Times in microseconds on an H200, the GPU that the constants were fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.memory import ITEMSIZE
from ..registry import KernelSpec

#: `KernelSpec.tuned_for` of tiles that only this module chooses.
SMALL = "small"
#: Query rows and keys of a sequence up to which there is something to choose: of longer ones the model knows nothing.
SHORT, _MAX_KEYS = 1024, 4096
#: What another tile than the usual has to gain.
_GAIN = 0.985
#: A launch; memory and L2, bytes a microsecond.
_LAUNCH_US, _MEMORY, _L2 = 5.6, 3.97e6, 1e7
#: To begin and end a tile, and for every CTA that shares the SM; hiding scores at a causal edge, per key.
_ITEM_US, _BESIDE_US, _EDGE_US = 2.04, 0.074, 0.00092
#: A step by itself: waiting, softmax per key, meeting the other warpgroups per key.
_STEP_US, _CHAIN_US, _MEET_US = 0.094, 0.0029, 0.0021
#: A step of a busy SM, of each warpgroup: both products per key and channel, exponentials per key.
_PRODUCT_US, _EXP_US = 0.964 * 64 * 4 * 132 / 934e6, 0.00104
#: More of it where CTAs share the SM without ping-pong, and with 32 keys, whose products read Q too often (causal:
#: twice as much).
_SHARED, _NARROW = 0.083, 0.117
#: What 32 keys a step have to gain where there are more: the model flatters them.
_FLATTERY = 1.06
#: What a causal list of tiles is longer than its mean.
_UNEVEN = 0.16


def _tile_steps(sq: int, sk: int, block_m: int, block_n: int, causal: bool) -> list[int]:
    """Tiles of keys of each tile of queries; rows that fill up a causal head's last tile go before its first one."""
    if not causal:
        return [-(-sk // block_n)] * -(-sq // block_m)
    lead = (-sq % block_m) // 64 * 64
    ends = (min(m0 + block_m, sq) + sk - sq for m0 in range(-lead, sq, block_m))
    return [-(-min(max(end, 0), sk) // block_n) for end in ends]


def tile_us(problem: AttentionProblem, spec: KernelSpec, target: Target) -> float:
    """Time of exact attention by ``spec``; packed sequences as a batch of the mean length, windows as causal."""
    p, batch = problem, max(problem.batch, 1)
    sq, sk = (-(-n // batch) if p.varlen else n for n in (p.seqlen_q, p.seqlen_k))
    if not (p.batch and sq and sk and p.num_q_heads):
        return 0.0
    causal = p.window_right != UNLIMITED
    steps = _tile_steps(sq, sk, spec.block_m, spec.block_n, causal)
    items = batch * p.num_q_heads * len(steps)
    ctas = min(-(-items // target.sm_count), spec.ctas_per_sm)
    groups = -(-min(sq, spec.block_m) // 64)
    product = _PRODUCT_US * spec.block_n * spec.head_dim
    busy = ctas * groups * (product + _EXP_US * spec.block_n)
    busy *= 1 + (_SHARED if spec.ctas_per_sm > 1 else 0.0)
    busy *= 1 + (_NARROW * (1 + causal) if spec.block_n == 32 else 0.0)
    alone = product + _STEP_US + (_CHAIN_US + (_MEET_US if groups > 1 else 0.0)) * spec.block_n
    step, item = max(alone, busy), _ITEM_US + _BESIDE_US * ctas
    slots = target.sm_count * spec.ctas_per_sm
    if causal:
        item += _EDGE_US * spec.block_n * -(-spec.block_m // spec.block_n) * max(1.0, ctas / 2)
    if causal and len(steps) > 1:
        mean = (items * item + batch * p.num_q_heads * sum(steps) * step) / slots
        work = max(max(steps) * step + item, (1 + _UNEVEN) * mean)
    else:
        work = -(-items // slots) * (item + max(steps) * step)
    if spec.block_n == 32 and sk > 32:
        work *= _FLATTERY + (_FLATTERY - 1) * causal
    row_bytes, rows = 2 * ITEMSIZE[p.dtype] * p.head_dim, batch * (sq * p.num_q_heads + sk * p.num_kv_heads)
    reread = batch * p.num_q_heads * sum(steps) * spec.block_n
    return _LAUNCH_US + max(work, row_bytes * rows / _MEMORY, row_bytes * reread / _L2)


def best_tile(problem: AttentionProblem, target: Target, usual: KernelSpec, others: Iterable[KernelSpec]) -> KernelSpec:
    """The row among ``usual`` and ``others`` that is fastest by the model.

    Parameters
    ----------
    problem : AttentionProblem
        Exact attention without score modifiers.
    target : Target
    usual : KernelSpec
        The row that long sequences take.
    others : iterable of KernelSpec
        Rows of other tiles that can serve the problem.

    Returns
    -------
    KernelSpec
    """
    sequences = max(problem.batch, 1) if problem.varlen else 1
    if problem.seqlen_q > SHORT * sequences or problem.seqlen_k > _MAX_KEYS * sequences:
        return usual
    best, shortest = usual, _GAIN * tile_us(problem, usual, target)
    for spec in others:
        time = tile_us(problem, spec, target)
        if time < shortest:
            best, shortest = spec, time
    return best
