"""The steps of a ring, forward and backward, on tensors (batch, seq, heads, head_dim).

In step t rank r works on the keys of rank r - t. Each rank sends its own K and V to those that read them, and only the
rows that they read; two parts are there at a time, one that is read and one that arrives. dK and dV of a part go from
each rank back to its owner, who adds them in the order of the steps: the sum has the same bits at every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..errors import UnsupportedError
from ..ops.attention import attention_beside, attention_varlen
from ..ops.attention_backward import attention_varlen_backward, gradients_beside
from ..ops.merge import merge_states
from .exchange import Group, Transfer, exchange
from .schedule import UNLIMITED, Range, Ring, Step, Task

#: Keys of a tile of the backward's kernels.
TILE_KEYS = 128


@dataclass(frozen=True)
class Common:
    """What is the same for all calls of a ring.

    Attributes
    ----------
    function : str
        The public function, for errors.
    softmax_scale, softcap : float
    deterministic : bool
    """

    function: str
    softmax_scale: float
    softcap: float
    deterministic: bool

    def options(self, task: Task) -> dict[str, Any]:
        """Of one call of forward or backward."""
        found: dict[str, Any] = {
            "softmax_scale": self.softmax_scale, "softcap": self.softcap, "deterministic": self.deterministic,
            "window": None if task.window == (UNLIMITED, UNLIMITED) else task.window,
        }  # fmt: skip
        return found


class Wire(Protocol):
    """K and V of a rank in the form in which they travel."""

    def sent(self, step: Step) -> list[Any]:
        """What another rank gets for its ``step``: contiguous tensors."""

    def buffers(self, step: Step) -> list[Any]:
        """Tensors to receive it into."""

    def own(self, step: Step) -> list[Any]:
        """What the owner itself reads in ``step``, without copies."""

    def attend(self, part: list[Any], step: Step, task: Task, sinks: Any, is_shared: bool) -> tuple[Any, Any]:
        """o and LSE of one task. is_shared: a transfer has some of the GPU's SMs meanwhile."""


class Plain:
    """K and V as they are."""

    def __init__(self, q: Any, k: Any, v: Any, common: Common) -> None:
        self.q, self.k, self.v, self.common = q, k, v, common

    def own(self, step: Step) -> list[Any]:
        """Views of the rows that the step reads."""
        return [rows_of(self.k, step.rows), rows_of(self.v, step.rows)]

    def sent(self, step: Step) -> list[Any]:
        """Copies only where the rows are not contiguous."""
        return [x.contiguous() for x in self.own(step)]

    def buffers(self, step: Step) -> list[Any]:
        """For K and V of another rank."""
        rows = step.rows[1] - step.rows[0]
        return [x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (self.k, self.v)]

    def attend(self, part: list[Any], step: Step, task: Task, sinks: Any, is_shared: bool) -> tuple[Any, Any]:
        """Exact attention of a rectangle, or of whole documents."""
        q, (k, v) = rows_of(self.q, task.q), keys_of(part, step, task)
        options = self.common.options(task)
        if not task.starts:
            return attention_beside(q, k, v, is_shared=is_shared, sinks=sinks, **options)
        o, lse = attention_varlen(
            q[0], k[0], v[0], sinks=sinks, return_lse=True, **packed(task, q.device), **options
        )  # fmt: skip
        return o[None], lse[None]


def rows_of(x: Any, rows: Range) -> Any:
    """A view of rows."""
    return x[:, rows[0] : rows[1]]


def keys_of(part: list[Any], step: Step, task: Task) -> list[Any]:
    """A task's rows of tensors that begin with the step's first one."""
    return [x[:, task.k[0] - step.rows[0] : task.k[1] - step.rows[0]] for x in part]


def packed(task: Task, device: Any) -> dict[str, Any]:
    """Arguments that say where documents begin. On a GPU the copy is from pinned memory: the host does not wait."""
    starts = torch.tensor(task.starts, dtype=torch.int32)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "ring_attention_varlen() within a CUDA graph: each replay would copy the same documents from memory of "
                "the host that is free by then",
                instead="ring_attention(), or a call outside of the graph",
            )
        starts = starts.pin_memory().to(device, non_blocking=True)
    longest = max(b - a for a, b in zip(task.starts, task.starts[1:], strict=False))
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}


def unseen(rows: Range, seen: list[Range]) -> list[Range]:
    """What of a range none of others has, in order."""
    found, begin = [], rows[0]
    for a, b in sorted(seen):
        if begin < min(a, rows[1]):
            found.append((begin, min(a, rows[1])))
        begin = max(begin, b)
    return [*found, (begin, rows[1])] if begin < rows[1] else found


class Merged:
    """Partial results of a rank's queries over disjoint keys, merged by their LSEs.

    Three results and more are summed in float32; two are merged by one rounding, and one is the result.
    """

    def __init__(self, shape: tuple[int, ...], like: Any, count: int) -> None:
        self.shape, self.like = shape, like
        self.dtype = like.dtype if count <= 2 else torch.promote_types(like.dtype, torch.float32)
        self.o: Any = None
        self.lse: Any = None
        self.seen: list[Range] = []

    def add(self, rows: Range, o: Any, lse: Any) -> None:
        """Take the result of one task."""
        if self.o is None and rows == (0, self.shape[1]):
            self.o, self.lse = o.to(self.dtype), lse
        elif self.seen == [rows] == [(0, self.shape[1])]:
            _, self.lse = merge_states(self.o, self.lse, o.to(self.dtype), lse, out=self.o)
        else:
            self._begin()
            o_here, lse_here = rows_of(self.o, rows), self.lse[:, :, rows[0] : rows[1]]
            fresh = unseen(rows, self.seen)
            if fresh == [rows]:
                o_here.copy_(o)
                lse_here.copy_(lse)
            else:
                self._clear(fresh)
                _, merged = merge_states(o_here, lse_here, o.to(self.dtype), lse, out=o_here)
                lse_here.copy_(merged)
        self.seen.append(rows)

    def _begin(self) -> None:
        """Memory for all rows, which hold nothing yet."""
        if self.o is None:
            batch, rows, heads, _ = self.shape
            self.o = self.like.new_empty(self.shape, dtype=self.dtype)
            self.lse = self.like.new_empty((batch, heads, rows), dtype=torch.float32)

    def _clear(self, ranges: list[Range]) -> None:
        """Rows that see no key."""
        for a, b in ranges:
            self.o[:, a:b] = 0.0
            self.lse[:, :, a:b] = -torch.inf

    def result(self, sinks: Any, bias: Any = None) -> tuple[Any, Any]:
        """o in the queries' dtype and LSE. sinks: those that no call has counted yet; bias: of the LSE; or None."""
        self._begin()
        self._clear(unseen((0, self.shape[1]), self.seen))
        if bias is not None:
            self.lse = self.lse + bias
        if sinks is not None:
            self._count(sinks)
        return self.o.to(self.like.dtype), self.lse

    def _count(self, sinks: Any) -> None:
        """One more logit a head, without a value."""
        lse = torch.logaddexp(self.lse, sinks.to(torch.float32)[:, None])
        share = torch.where(lse == -torch.inf, 0.0, torch.exp(self.lse - lse))
        self.o = self.o * share.transpose(1, 2)[..., None].to(torch.promote_types(self.dtype, torch.float32))
        self.lse = lse


def forward(
    group: Group,
    ring: Ring,
    wire: Wire,
    q: Any,
    head_dim_v: int,
    common: Common,
    sinks: Any,
    bias: Any = None,
    early: bool = True,
) -> tuple[Any, Any]:
    """o (batch, rows, heads, head_dim_v) and LSE (batch, heads, rows) of this rank's queries over the keys of all.

    bias: what the LSE of each row lacks, or None. early: whether a task may count sinks, which it does without bias.
    """
    steps = ring.steps(group.rank)
    tasks = [task for step in steps for task in step.tasks]
    merged = Merged((*q.shape[:3], head_dim_v), q, len(tasks))
    # A sink is counted once: by the first call if it has all queries, else behind the last one.
    early = early and sinks is not None and bool(tasks) and tasks[0].q == (0, q.shape[1])
    arriving: Transfer | None = None
    for number, step in enumerate(steps):
        part = wire.own(step) if arriving is None else arriving.wait()
        arriving = send_keys(group, ring, wire, number + 1, common.function)
        is_shared = arriving is not None and arriving.begin_first()
        for task in step.tasks:
            with_sinks = sinks if early and task is tasks[0] else None
            merged.add(task.q, *wire.attend(part, step, task, with_sinks, is_shared))
    return merged.result(None if early else sinks, bias)


def send_keys(group: Group, ring: Ring, wire: Wire, number: int, function: str) -> Transfer | None:
    """Begin the transfers of K and V of a step; None behind the last one."""
    if number >= group.size:
        return None
    to = (group.rank + number) % group.size
    asked, mine = ring.step(to, number), ring.step(group.rank, number)
    sends = [(x, to) for x in wire.sent(asked)] if asked.tasks else []
    receives = [(x, mine.source) for x in wire.buffers(mine)] if mine.tasks else []
    what = f"{function}(): step {number} of {group.size - 1}, K and V from rank {mine.source} and to rank {to}"
    return exchange(group, sends, receives, 2 * number, what)


class Sum:
    """A gradient: summands of rows, and one of all rows, which may be complete last.

    Two summands are added with one rounding, more in float32.

    Parameters
    ----------
    like : tensor
        What it is the gradient of.
    rows : int
    count : int
        Summands.
    whole : tensor, optional
        The one of all rows: its memory, which `result` reads and may return.
    """

    def __init__(self, like: Any, rows: int, count: int, whole: Any = None) -> None:
        self.like, self.whole, self.count = like, whole, count
        self.shape = (like.shape[0], rows, *like.shape[2:])
        self.total: Any = None
        self.held: tuple[Range, Any] | None = None

    def add(self, rows: Range, x: Any) -> None:
        """Add the gradient of rows; ``x`` may become the sum."""
        if self.count <= 2 and self.whole is not None and self.held is None:
            self.held = rows, x  # until all of the other one is there
            return
        dtype = self.like.dtype if self.count <= 2 else torch.promote_types(self.like.dtype, torch.float32)
        if self.total is None and rows == (0, self.shape[1]):
            self.total = x.to(dtype)
            return
        if self.total is None:
            self.total = self.like.new_zeros(self.shape, dtype=dtype)
        rows_of(self.total, rows).add_(x)

    def result(self) -> Any:
        """In the dtype of what it is a gradient of."""
        if self.held is not None:
            rows_of(self.whole, self.held[0]).add_(self.held[1])
        if self.whole is not None and self.total is not None:
            return self.total.add_(self.whole).to(self.like.dtype)
        if self.whole is not None:
            return self.whole
        return self.like.new_zeros(self.shape) if self.total is None else self.total.to(self.like.dtype)


@dataclass(frozen=True)
class Saved:
    """Of a forward: (batch, seq, heads, head_dim) tensors, LSE, and gradients of o and LSE."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    do: Any
    dlse: Any


def backward(group: Group, ring: Ring, saved: Saved, common: Common, wanted: tuple[str, ...]) -> dict[str, Any]:
    """Gradients of this rank's q, k and v by name; wanted: of "dq", "dk", "dv", the same on all ranks.

    Where it can be, a rank's work on its own keys is in two parts, by heads: the first one while K and V of the next
    step arrive, the second one while dK and dV of the last step return.
    """
    wire = Plain(saved.q, saved.k, saved.v, common)
    steps = ring.steps(group.rank)
    of_keys: list[str] = [name for name in ("dk", "dv") if name in wanted]
    like = {"dq": saved.q, "dk": saved.k, "dv": saved.v}
    rows = {name: x.shape[1] for name, x in like.items()}
    parts = _parts(saved, steps[0]) if group.size > 1 else []
    whole = {name: torch.empty_like(like[name], memory_format=torch.contiguous_format) for name in wanted if parts}
    dq = Sum(saved.q, rows["dq"], sum(len(step.tasks) for step in steps), whole.get("dq"))
    # The owner's sum: its own tasks, and a summand of each rank that reads its keys.
    readers = [ring.step((group.rank + n) % group.size, n) for n in range(1, group.size)]
    count = len(steps[0].tasks) + sum(bool(step.tasks) for step in readers)
    own = {name: Sum(like[name], rows[name], count, whole.get(name)) for name in of_keys}
    arriving: Transfer | None = None
    returning: tuple[Transfer, Step] | None = None
    for number, step in enumerate(steps):
        part = wire.own(step) if arriving is None else arriving.wait()
        arriving = send_keys(group, ring, wire, number + 1, common.function)
        is_shared = arriving is not None and arriving.begin_first()
        if number == 0 and parts:
            _own_part(saved, parts[0], common, step.tasks[0], whole, is_shared)
            continue
        first = step.rows[0] if number else 0
        sums = own if number == 0 else {
            name: Sum(like[name], step.rows[1] - step.rows[0], len(step.tasks)) for name in of_keys
        }  # fmt: skip
        for task in step.tasks:
            found = _gradients(saved, part, step, task, common, wanted, is_shared)
            if "dq" in wanted:
                dq.add(task.q, found["dq"])
            for name in of_keys:
                sums[name].add((task.k[0] - first, task.k[1] - first), found[name])
        if returning is not None:
            _take(own, returning)
        returning = _send_gradients(group, ring, sums, number, like, common.function) if number and of_keys else None
    if parts:
        is_shared = returning is not None and returning[0].begin_first()
        _own_part(saved, parts[1], common, steps[0].tasks[0], whole, is_shared)
    if returning is not None:
        _take(own, returning)
    results = {name: total.result() for name, total in own.items()}
    if "dq" in wanted:
        results["dq"] = dq.result()
    return results


def _parts(saved: Saved, own: Step) -> list[Range]:
    """Two ranges of heads, if a rank's own step is one call, and half of it keeps a GPU busy; else none.

    Where query heads share keys and values, what returns is too little beside the work to gain by it.
    """
    q, k = saved.q, saved.k
    if len(own.tasks) != 1 or own.tasks[0].starts or not q.shape[2] == k.shape[2] > 1:
        return []
    task = own.tasks[0]
    if (task.q, task.k, own.rows) != ((0, q.shape[1]), (0, k.shape[1]), (0, k.shape[1])):
        return []
    half = k.shape[2] // 2
    if k.is_cuda:
        tiles = k.shape[0] * half * -(-k.shape[1] // TILE_KEYS)
        if tiles < torch.cuda.get_device_properties(k.device).multi_processor_count:
            return []
    return [(0, half), (half, k.shape[2])]


def _own_part(saved: Saved, heads: Range, common: Common, task: Task, whole: dict[str, Any], is_shared: bool) -> None:
    """Gradients of a rank's queries and its own keys, of a range of heads, into ``whole``."""
    here = slice(*heads)
    do, q, k, v, o = (x[:, :, here] for x in (saved.do, saved.q, saved.k, saved.v, saved.o))
    given = {name: x[:, :, here] for name, x in whole.items()}
    if saved.dlse is not None:
        given["dlse"] = saved.dlse[:, here]
    gradients_beside(
        do, q, k, v, o, saved.lse[:, here], is_shared=is_shared, given=given, wanted=tuple(whole),
        **common.options(task),
    )  # fmt: skip


def _gradients(
    saved: Saved, part: list[Any], step: Step, task: Task, common: Common, wanted: tuple[str, ...], is_shared: bool
) -> dict[str, Any]:
    """Of one task, by name."""
    do, q, o = (rows_of(x, task.q) for x in (saved.do, saved.q, saved.o))
    k, v = keys_of(part, step, task)
    lse = saved.lse[:, :, task.q[0] : task.q[1]]
    dlse = None if saved.dlse is None else saved.dlse[:, :, task.q[0] : task.q[1]]
    options = common.options(task)
    if not task.starts:
        dense = gradients_beside(
            do, q, k, v, o, lse, is_shared=is_shared, given={"dlse": dlse}, wanted=wanted, **options
        )  # fmt: skip
        return dict(zip(wanted, dense, strict=True))
    found = attention_varlen_backward(
        do[0], q[0], k[0], v[0], o[0], lse[0], dlse=None if dlse is None else dlse[0], wanted=wanted,
        **packed(task, q.device), **options,
    )  # fmt: skip
    return {name: x[None] for name, x in zip(wanted, found, strict=True)}


def _send_gradients(
    group: Group, ring: Ring, sums: dict[str, Sum], number: int, like: dict[str, Any], function: str
) -> tuple[Transfer, Step]:
    """Send dK and dV of a part to its owner, and begin to receive those of this rank's keys from who read them."""
    mine = ring.step(group.rank, number)
    reader = (group.rank + number) % group.size
    theirs = ring.step(reader, number)
    sends = [(total.result().contiguous(), mine.source) for total in sums.values()] if mine.tasks else []
    receives = []
    if theirs.tasks:
        rows = theirs.rows[1] - theirs.rows[0]
        receives = [(like[name].new_empty((like[name].shape[0], rows, *like[name].shape[2:])), reader) for name in sums]
    what = f"{function}(): backward, step {number} of {group.size - 1}, gradients to rank {mine.source}"
    what += f" and from rank {reader}"
    return exchange(group, sends, receives, 2 * number + 1, what), theirs


def _take(own: dict[str, Sum], returning: tuple[Transfer, Step]) -> None:
    """Add what a reader of this rank's keys found."""
    transfer, step = returning
    for total, x in zip(own.values(), transfer.wait(), strict=False):
        total.add(step.rows, x)
