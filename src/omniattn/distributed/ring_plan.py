"""``plan``: what `ring_attention` computes and sends, step by step, without a GPU and without a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..arguments import check_bool, check_int, check_number
from ..checks import values
from ..errors import ArgumentError, UnsupportedError
from ..problems import Fp8, Int8, QuantizeProblem
from ..problems.memory import ITEMSIZE
from ..problems.quantize import QK_DTYPES
from .schedule import Range, Step, Task, check_schedule, length_of, ring_of, unites
from .wires import check_causal_lengths, check_precision, check_starts, product_of


@dataclass(frozen=True)
class RankStep:
    """One step of one rank.

    Attributes
    ----------
    source : int
        Whose K and V it reads.
    calls : int
        Calls of attention.
    rows : int
        Keys that travel for it: 0 in the first step, and where no query sees a key of that rank.
    pairs : int
        Pairs of a query and a key, of one head and one sequence of the batch.
    bytes_forward, bytes_backward : int
        That this rank receives: K and V; in the backward K and V again and the gradients of its own from the rank that
        read them in this step.
    flops : int
        Of the forward: 2 (head_dim + head_dim_v) for each pair, query head and sequence.
    bytes_merged : int
        That the merges of this step's results read and write in this rank's memory, in the forward.
    """

    source: int
    calls: int
    rows: int
    pairs: int
    bytes_forward: int
    bytes_backward: int
    flops: int
    bytes_merged: int


@dataclass(frozen=True)
class RingPlan:
    """What a call of `ring_attention` does on all ranks; ``str()`` is a table.

    Attributes
    ----------
    ranks : tuple of tuple of RankStep
        Steps by rank.
    rows_q, rows_k : tuple of int
        Tokens of each rank.
    """

    ranks: tuple[tuple[RankStep, ...], ...]
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]

    @property
    def bytes_forward(self) -> int:
        """The most that a rank receives in a forward."""
        return max(sum(step.bytes_forward for step in steps) for steps in self.ranks)

    @property
    def bytes_backward(self) -> int:
        """The most that a rank receives in a backward."""
        return max(sum(step.bytes_backward for step in steps) for steps in self.ranks)

    @property
    def bytes_in_flight(self) -> int:
        """The most memory for K and V of other ranks: one part that is read, one that arrives."""
        return max(
            sum(step.bytes_forward for step in steps[at : at + 2]) for steps in self.ranks for at in range(len(steps))
        )

    @property
    def balance(self) -> float:
        """Mean of the ranks' work by the most: 1 where all have the same. 1 without any work."""
        work = [sum(step.flops for step in steps) for steps in self.ranks]
        return sum(work) / (len(work) * max(work)) if max(work) else 1.0

    def seconds(
        self, *, tflops: float, link_gb_s: float, memory_gb_s: float | None = None, transfer_sms: float = 0.0
    ) -> float:
        """Time of a forward where kernels run at one rate and each rank receives at one rate, by the slowest rank.

        A step begins when its keys are there and the step before has ended; its transfer begins with the step before.
        Launches are not in it: of short sequences they are most of the time.

        Parameters
        ----------
        tflops : float
            Rate of attention, 10^12 operations a second.
        link_gb_s : float
            Rate at which a rank receives, 10^9 bytes a second.
        memory_gb_s : float, optional
            Rate at which partial results are merged, 10^9 bytes a second; unless given merges take no time.
        transfer_sms : float
            Part of the SMs that a transfer has while it lasts, from 0 to less than 1: 32 of 132 with NCCL on an H100.
        """
        times = self._times("seconds", tflops, link_gb_s, memory_gb_s, transfer_sms)
        return max((end for end, _, _ in times), default=0.0)

    def overlap(
        self, *, tflops: float, link_gb_s: float, memory_gb_s: float | None = None, transfer_sms: float = 0.0
    ) -> float:
        """Part of the time of a forward's transfers that kernels run in, by the rank that waits longest for keys.

        1 where none waits, or nothing travels. Arguments and model as those of `seconds`.
        """
        times = self._times("overlap", tflops, link_gb_s, memory_gb_s, transfer_sms)
        waited, moved = max(((waited, moved) for _, waited, moved in times), default=(0.0, 0.0))
        return 1.0 - waited / moved if moved else 1.0

    def _times(
        self, function: str, tflops: float, link_gb_s: float, memory_gb_s: float | None, transfer_sms: float
    ) -> list[tuple[float, float, float]]:
        """Of each rank: seconds of all, of waiting for keys, and of transfers."""
        rate = check_number(tflops, "tflops", function, least=0.0) * 1e12
        link = check_number(link_gb_s, "link_gb_s", function, least=0.0) * 1e9
        memory = float("inf")
        if memory_gb_s is not None:
            memory = check_number(memory_gb_s, "memory_gb_s", function, least=0.0) * 1e9
        for value, name in ((rate, "tflops"), (link, "link_gb_s"), (memory, "memory_gb_s")):
            if not value > 0:
                raise ArgumentError(name, "a number > 0", repr(value), function=function)
        spared = check_number(transfer_sms, "transfer_sms", function, least=0.0)
        if not spared < 1:
            raise ArgumentError("transfer_sms", "a number from 0 to less than 1", repr(spared), function=function)
        found = []
        for steps in self.ranks:
            begin = end = arrived = waited = 0.0
            for step, behind in zip(steps, (*steps[1:], None), strict=True):
                arrived = max(arrived, begin) + step.bytes_forward / link
                begin = max(end, arrived)
                waited += begin - end
                alone = step.flops / rate
                beside = 0.0 if behind is None else behind.bytes_forward / link
                end = begin + alone + spared * min(beside, alone / (1 - spared)) + step.bytes_merged / memory
            found.append((end, waited, sum(step.bytes_forward for step in steps) / link))
        return found

    def __str__(self) -> str:
        lines = ["rank  step  keys of  calls      rows       pairs  MB received  MB in backward"]
        for rank, steps in enumerate(self.ranks):
            for number, step in enumerate(steps):
                lines.append(
                    f"{rank:4}  {number:4}  {step.source:7}  {step.calls:5}  {step.rows:8}  {step.pairs:10}  "
                    f"{step.bytes_forward / 1e6:11.3f}  {step.bytes_backward / 1e6:14.3f}"
                )
        lines.append(
            f"work of the mean rank by the most: {self.balance:.3f}; MB that a rank receives, at most: "
            f"{self.bytes_forward / 1e6:.3f} forward, {self.bytes_backward / 1e6:.3f} backward; K and V of others "
            f"in memory at a time: {self.bytes_in_flight / 1e6:.3f} MB"
        )
        return "\n".join(lines)


def plan(
    seqlen: int,
    world_size: int,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    seqlen_k: int | None = None,
    cu_seqlens: Any = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    precision: str | Int8 | Fp8 = "exact",
    schedule: str = "zigzag",
) -> RingPlan:
    """What `ring_attention`, or with cu_seqlens `ring_attention_varlen`, computes and sends.

    Parameters
    ----------
    seqlen : int
        Queries of the whole sequence, or of all packed documents.
    world_size : int
        Ranks of the group.
    num_q_heads, num_kv_heads, head_dim, head_dim_v, batch, dtype
        Of q, k and v; head_dim_v is head_dim unless given. dtype by name.
    seqlen_k : int, optional
        Keys of the whole sequence; as many as queries unless given.
    cu_seqlens : sequence of int, optional
        As in `ring_attention_varlen`.
    causal, window, precision, schedule
        As in `ring_attention`; a low precision in the format of Hopper.

    Returns
    -------
    RingPlan

    Raises
    ------
    ArgumentError, UnsupportedError
        As in `ring_attention`.
    """
    name = "plan"
    seqlen = check_int(seqlen, "seqlen", name)
    world_size = check_int(world_size, "world_size", name, least=1)
    heads_q = check_int(num_q_heads, "num_q_heads", name, least=1)
    heads_kv = check_int(num_kv_heads, "num_kv_heads", name, least=1)
    if heads_q % heads_kv:
        raise ArgumentError("num_kv_heads", f"a divisor of num_q_heads {heads_q}", repr(heads_kv), function=name)
    head_dim = _head_dim(head_dim, "head_dim", name)
    dim_v = head_dim if head_dim_v is None else _head_dim(head_dim_v, "head_dim_v", name)
    batch = check_int(batch, "batch", name)
    if dtype not in values.CPU_DTYPES:
        raise ArgumentError("dtype", " or ".join(map(repr, values.CPU_DTYPES)), repr(dtype), function=name)
    keys = seqlen if seqlen_k is None else check_int(seqlen_k, "seqlen_k", name)
    starts = () if cu_seqlens is None else check_starts(cu_seqlens, name)
    if starts and (starts[-1], keys) != (seqlen, seqlen):
        expected = f"{seqlen} tokens at the end, as seqlen and seqlen_k"
        raise ArgumentError("cu_seqlens", expected, repr(starts[-1]), function=name)
    seen = values.check_window(window, check_bool(causal, "causal", name), name)
    low = check_precision(precision, seen, keys, name)
    check_schedule(schedule, name)
    if low.quantized:
        _check_operands(head_dim, dim_v, seen, (seqlen, keys), bool(starts), name)
    unite = not low.quantized or unites(keys, world_size, schedule, seen)
    ring = ring_of(seqlen, keys, world_size, schedule, seen, starts, unite)
    row = heads_kv * (head_dim + dim_v) * ITEMSIZE[dtype] * batch
    problem = QuantizeProblem(
        dtype, batch, 0, 0, heads_q, heads_kv, head_dim, False, QK_DTYPES.get(low.qk, "int8"), low.granularity,
        v_dtype="float16" if low.quantized and product_of(low, (9, 0))[0] == "fp16" else "float8_e4m3",
    )  # fmt: skip

    def wire_bytes(step: Step, to_self: bool) -> int:
        if to_self or not step.tasks:
            return 0
        if not low.quantized:
            return (step.rows[1] - step.rows[0]) * row
        return sum(_operand_bytes(replace(problem, rows_k=b - a)) for a, b in step.ranges)

    item = ITEMSIZE[dtype]
    of_row = heads_q * dim_v * batch

    def merged_bytes(tasks: Sequence[Task], seen: list[Range], count: int, last_rows: int) -> int:
        """Two results are merged as they are, more in float32, to which each is converted and the last one back."""
        wide, total = max(item, 4), 0
        for task in tasks:
            rows = _count(task.q) * of_row
            if count > 2:
                total += rows * (item + wide)
            if any(a < task.q[1] and task.q[0] < b for a, b in seen):
                total += 3 * rows * (item if count <= 2 else wide)
            seen.append(task.q)
        return total + (item + wide) * last_rows * of_row

    def steps_of(rank: int) -> tuple[RankStep, ...]:
        found = []
        seen: list[Range] = []
        count = sum(len(step.tasks) for step in ring.steps(rank))
        for number, step in enumerate(ring.steps(rank)):
            reader = ring.step((rank + number) % world_size, number)
            pairs, travel = sum(task.pairs for task in step.tasks), _count(step.rows) if number else 0
            back = travel * row + (_count(reader.rows) * row if number else 0)
            flops = 2 * pairs * heads_q * (head_dim + dim_v) * batch
            sent = wire_bytes(step, number == 0)
            rows = length_of(seqlen, world_size, rank, schedule) if count > 2 and number == world_size - 1 else 0
            merges = merged_bytes(step.tasks, seen, count, rows)
            found.append(RankStep(step.source, len(step.tasks), travel, pairs, sent, back, flops, merges))
        return tuple(found)

    rows_q, rows_k = (
        tuple(length_of(n, world_size, rank, schedule) for rank in range(world_size)) for n in (seqlen, keys)
    )
    return RingPlan(tuple(steps_of(rank) for rank in range(world_size)), rows_q, rows_k)


def _head_dim(value: Any, argument: str, function: str) -> int:
    found = check_int(value, argument, function, least=8)
    if found % 8 or found > values.MAX_HEAD_DIM:
        expected = f"a multiple of 8 from 8 to {values.MAX_HEAD_DIM}"
        raise ArgumentError(argument, expected, repr(value), function=function)
    return found


def _check_operands(
    head_dim: int, dim_v: int, window: tuple[int, int], rows: tuple[int, int], packed: bool, function: str
) -> None:
    """What does not travel in 8 bits."""
    if packed:
        raise UnsupportedError(f"{function}(): cu_seqlens with a low precision", instead="precision='exact'")
    if dim_v != head_dim:
        expected = f"head_dim {head_dim} with a low precision"
        raise ArgumentError("head_dim_v", expected, repr(dim_v), function=function)
    check_causal_lengths(window, rows, function)
    values.check_quantized_head_dim(head_dim, "a low precision", function)


def _count(rows: Range) -> int:
    return rows[1] - rows[0]


def _operand_bytes(problem: QuantizeProblem) -> int:
    """K and V of one chunk with their scales."""
    total = 0
    for name, (shape, dtype) in problem.shapes().items():
        if name in ("k_int", "k_scale", "v", "v_scale", "v_mean"):
            count = 1
            for n in shape:
                count *= n
            total += count * ITEMSIZE[dtype]
    return total
