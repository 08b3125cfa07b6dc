"""Which tile of queries a call of short sequences gets, by a model (docs/performance/short.md).

Short sequences fill a part of a large tile, or keep too few SMs busy; small tiles read K and V more often, and hide
waiting less well. Times in microseconds on an H200, the GPU that the constants were fitted on.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..problems import UNLIMITED, AttentionProblem, Target
from ..problems.attention import WIDE_WINDOW
from ..problems.memory import ITEMSIZE
from ..problems.shares import even_share, short_tile, takes_even_share
from ..registry import KernelSpec
from .features import SECTOR, sequences

#: `KernelSpec.tuned_for` of tiles that only this module chooses.
SMALL = "small"
#: Query rows and keys of a sequence up to which the model was fitted.
SHORT, _MAX_KEYS = 1024, 4096
#: Tiles an SM up to which longer sequences have the choice too: their number counts then, not how long they are.
_FEW = 2
#: Keys a query from which on that is left to a split of the keys, which was measured there: of calls that leave SMs
#: idle, and not of packed ones.
_RATIO = 16
#: Queries that one small tile holds.
_ONE_TILE = 64
#: What another tile than the usual has to gain; beyond what the model was fitted to.
_GAIN, _FAR = 0.985, 0.88
#: A wider one besides, which computes with columns of zeros; if rows are no multiple of 64 bytes, and not all tiles run
#: at once; with 32 keys, as a factor of these.
_WIDER, _UNALIGNED, _FEW_KEYS = 0.9, 0.6, 0.9
#: The same of the large tile of 128, which two warpgroups share, and of small ones that run at once.
_LARGE_WIDER = 0.96
#: A launch; memory and L2, bytes a microsecond; where rows of K and V end within a sector of 32 bytes.
LAUNCH_US, MEMORY, _L2, _L2_PARTS = 5.6, 3.97e6, 1e7, 1.6e6
#: The same of packed sequences with several tiles of queries, which are not at the same keys at the same time.
_L2_PACKED = 7.2e6
#: Bytes of K and V under way from which on some, and all of them, come from memory again for the next tile of a head;
#: and how much more that are after many rounds, in which CTAs drift apart: of packed sequences of unequal lengths.
_HELD, _LOST = 65e6, 100e6
_TOGETHER, _DRIFT = 5.0, 2.5
#: To begin and end a tile, and for every CTA that shares the SM; hiding scores at a causal edge, per key.
_ITEM_US, _BESIDE_US, _EDGE_US = 2.04, 0.074, 0.00092
#: A step by itself: waiting, softmax per key, meeting the other warpgroups per key.
_STEP_US, _CHAIN_US, _MEET_US = 0.094, 0.0029, 0.0021
#: A step of a busy SM, of each warpgroup: both products per key and channel, exponentials per key.
_PRODUCT_US, _EXP_US = 0.964 * 64 * 4 * 132 / 934e6, 0.00104
#: More of it where CTAs share the SM without ping-pong, and with 32 keys, whose products read Q too often (causal:
#: twice as much).
_SHARED, _NARROW = 0.083, 0.117
#: What 32 keys a step have to gain where there are more: the model flatters them, and more so where 64 leave no edge.
_FLATTERY, _NO_EDGE = 1.06, 0.03
#: Query rows of four warpgroups, and how much longer they take in packed sequences.
_FOUR_GROUPS, _FOUR_PACKED = 256, 1.05
#: What a causal list of tiles is longer than its mean.
_UNEVEN = 0.16


def _tile_steps(sq: int, sk: int, block_m: int, block_n: int, left: int, right: int) -> list[int]:
    """Tiles of keys of each tile of queries; rows that fill up a causal head's last tile go before its first one."""
    if left == right == UNLIMITED:
        return [-(-sk // block_n)] * -(-sq // block_m)
    lead = (-sq % block_m) // 64 * 64 if right != UNLIMITED else 0
    found = []
    for m0 in range(-lead, sq, block_m):
        first, last = max(m0, 0) + sk - sq, min(m0 + block_m, sq) + sk - sq
        end = sk if right == UNLIMITED else min(max(last + right, 0), sk)
        begin = 0 if left == UNLIMITED else min(max(first - left, 0), sk)
        found.append(max(-(-end // block_n) - begin // block_n, 0))
    return found


def item_us(problem: AttentionProblem, spec: KernelSpec, ctas: int) -> float:
    """To begin and end a tile, of ``ctas`` CTAs an SM."""
    item = _ITEM_US + _BESIDE_US * ctas
    if problem.window_right != UNLIMITED:
        item += _EDGE_US * spec.block_n * -(-spec.block_m // spec.block_n) * max(1.0, ctas / 2)
    return item


def step_us(problem: AttentionProblem, spec: KernelSpec, rows: int, ctas: int) -> float:
    """A tile of keys, for so many query rows of a tile and CTAs an SM."""
    product = _PRODUCT_US * spec.block_n * spec.head_dim
    groups = -(-min(rows, spec.block_m) // 64)
    busy = ctas * groups * (product + _EXP_US * spec.block_n)
    busy *= 1 + (_SHARED if spec.ctas_per_sm > 1 else 0.0)
    busy *= 1 + (_NARROW * (1 + (problem.window_right != UNLIMITED)) if spec.block_n == 32 else 0.0)
    alone = product + _STEP_US + (_CHAIN_US + (_MEET_US if groups > 1 else 0.0)) * spec.block_n
    return max(alone, busy)


def tile_us(problem: AttentionProblem, spec: KernelSpec, target: Target) -> float:
    """Time of exact attention by ``spec``."""
    p, batch = problem, max(problem.batch, 1)
    lengths = sequences(p)
    if not (p.batch and all(map(min, lengths)) and p.num_q_heads):
        return 0.0
    causal = p.window_right != UNLIMITED
    slots = target.sm_count * spec.ctas_per_sm
    heads = batch * p.num_q_heads / len(lengths)
    window = p.window_left, p.window_right
    tiles = [_tile_steps(sq, sk, spec.block_m, spec.block_n, *window) for sq, sk in lengths]
    items = round(heads * sum(map(len, tiles)))
    ctas = min(-(-items // target.sm_count), spec.ctas_per_sm)
    item = item_us(p, spec, ctas)
    total = longest = 0.0
    for (sq, _), steps in zip(lengths, tiles, strict=True):
        step = step_us(p, spec, sq, ctas)
        total += heads * (len(steps) * item + sum(steps) * step)
        longest = max(longest, item + max(steps) * step)
    if len(lengths) > 1 or (causal and len(tiles[0]) > 1):
        work = max(longest, (1 + _UNEVEN * causal) * total / slots)
    else:
        rounds: float = -(-items // slots)
        if spec.ctas_per_sm == 1 and takes_even_share(p):
            # The fit knows of no short last tiles but for those that a few CTAs less share evenly.
            last = short_tile(p.seqlen_q, spec.block_m)
            ctas, even = even_share(batch * p.num_q_heads, len(tiles[0]), last, slots)
            rounds = even if ctas < slots else rounds
        work = rounds * longest
    if p.varlen and spec.block_m == _FOUR_GROUPS:
        work *= _FOUR_PACKED
    if spec.block_n == 32 and max(sk for _, sk in lengths) > 32:
        work *= _FLATTERY + (_FLATTERY - 1) * causal + _NO_EDGE * all(sk % 64 == 0 for _, sk in lengths)
    rows = batch * sum(sq * p.num_q_heads + _seen(p, sq, sk) * p.num_kv_heads for sq, sk in lengths) / len(lengths)
    row_bytes, reread = 2 * ITEMSIZE[p.dtype] * p.head_dim, heads * sum(map(sum, tiles)) * spec.block_n
    lost = _lost_in_l2(p, spec, items, sum(sk for _, sk in lengths) / len(lengths), slots) if len(lengths) > 1 else 0.0
    apart = p.varlen and p.max_seqlen_q > spec.block_m
    again = lost / MEMORY + (1 - lost) / min(l2_rate(p), _L2_PACKED if apart else _L2)
    return LAUNCH_US + max(work, row_bytes * rows / MEMORY, row_bytes * reread * again)


def _lost_in_l2(p: AttentionProblem, spec: KernelSpec, items: int, keys: float, slots: int) -> float:
    """Which part of K and V, so many keys of a head in the mean, comes from memory for each tile of queries."""
    if p.max_seqlen_q <= spec.block_m:
        return 0.0  # query heads of a kv head stay together
    heads = min(slots, items) * p.num_kv_heads / p.num_q_heads
    under_way = heads * 2 * ITEMSIZE[p.dtype] * p.head_dim * keys
    under_way *= max(((items / slots) ** 0.5 - _TOGETHER) / _DRIFT, 1.0)
    return min(max((under_way - _HELD) / (_LOST - _HELD), 0.0), 1.0)


def _seen(p: AttentionProblem, sq: int, sk: int) -> int:
    """Keys that some query sees."""
    if p.window_left == UNLIMITED:
        return sk
    return min(sk, p.window_left + sq + max(p.window_right, 0))


def l2_rate(p: AttentionProblem) -> float:
    """Bytes a microsecond."""
    return _L2 if whole_sectors(p) else _L2_PARTS


def whole_sectors(p: AttentionProblem) -> bool:
    """Whether rows of K are whole sectors of memory: tensor maps bring others at a fraction of the rate."""
    return p.head_dim * ITEMSIZE[p.dtype] % SECTOR == 0


def _gain(p: AttentionProblem, usual: KernelSpec, target: Target) -> float | None:
    """What another tile than the usual has to gain, as a factor; None where there is no choice."""
    sequences = max(p.batch, 1) if p.varlen else 1
    is_short = p.seqlen_q <= SHORT * sequences
    if is_short and p.seqlen_k <= _MAX_KEYS * sequences:
        return _GAIN
    tiles = sequences * -(-p.seqlen_q // (sequences * usual.block_m)) * p.num_q_heads * (1 if p.varlen else p.batch)
    if p.seqlen_q <= _ONE_TILE * sequences and tiles > target.sm_count:
        return _GAIN
    unsplit = p.varlen or p.seqlen_k <= _RATIO * p.seqlen_q or tiles > target.sm_count
    if unsplit and (is_short or tiles <= _FEW * target.sm_count):
        return _FAR
    narrow = min(p.window_left, p.window_right) >= 0 and p.window_left + p.window_right < WIDE_WINDOW
    return _GAIN if narrow else None


def _wider(p: AttentionProblem, spec: KernelSpec, target: Target) -> float:
    """What a tile with columns of zeros has to gain, as a factor."""
    if SMALL not in spec.tuned_for:
        return _LARGE_WIDER
    sequences = max(p.batch, 1)
    tiles = sequences * -(-p.seqlen_q // ((sequences if p.varlen else 1) * spec.block_m)) * p.num_q_heads
    if tiles <= target.sm_count * spec.ctas_per_sm:
        return _LARGE_WIDER
    return (_UNALIGNED if p.head_dim % 32 else _WIDER) * (_FEW_KEYS if spec.block_n == 32 else 1.0)


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
        Rows of other tiles that can serve the problem, wider ones too.

    Returns
    -------
    KernelSpec
    """
    gain = _gain(problem, usual, target)
    if gain is None:
        return usual
    best, shortest = usual, gain * tile_us(problem, usual, target)
    for spec in others:
        time = tile_us(problem, spec, target) / (_wider(problem, spec, target) if spec.head_dim > usual.head_dim else 1)
        if time < shortest:
            best, shortest = spec, time
    return best
