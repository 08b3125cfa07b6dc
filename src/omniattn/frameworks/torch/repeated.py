"""Calls with gradients like one that has run: what was checked and planned for it, found by the facts of the tensors.

Of calls of `attention` and `attention_varlen` on plain CUDA tensors, without mask, score modification, ``out`` and
``stream``, whose gradients are those of q, k and v. Everything else takes the long way each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arrays import from_torch
from ...plan import native
from ...plan.cache import PlanCache
from ...plan.engine import PLANS, Call, Plan, kept
from ...runtime.env import forced_kernels

#: Places among a forward's arrays: q, k, v, out, cu_seqlens_q, cu_seqlens_k, mask, sinks, of packed calls seqused_q and
#: seqused_k and block_table, which has no gradient.
_NUM_ARRAYS, _OUT, _MASK, _USED = (8, 11), 3, 6, slice(8, 10)


def key_of(call: Call) -> tuple[Any, list[int]]:
    """What decides about a call with gradients, None for those that are not repeated; the addresses of its arrays."""
    objects = call.objects
    plain = len(objects) in _NUM_ARRAYS and objects[_OUT] is None and objects[_MASK] is None
    if not plain or call.stream is not None or call.subject is not None or call.facts is not None:
        return None, []
    seen = from_torch.gradient_facts(objects)
    if seen is None:
        return None, []
    options = call.options
    # True == 1 == 1.0, but not every one of them is valid everywhere.
    types: tuple[Any, ...] = tuple(map(type, options))
    if tuple in types:
        types += tuple(tuple(map(type, x)) for x in options if x.__class__ is tuple)
    key = (call.operation, seen[0], options, types, forced_kernels())
    try:
        hash(key)
    except TypeError:  # an unhashable option
        return None, []
    return key, seen[1]


#: (call of the forward, its arrays by name, do, o, lse, dlse, wanted) -> the call of the backward, whose results are in
#: the order of `GRADIENTS`.
Backward = Callable[[Call, dict[str, Any], Any, Any, Any, Any, tuple[str, ...]], Call]


class _Launches:
    """Launches of a plan, by Python and, once they have run so, by the C module."""

    __slots__ = ("_plan", "_runs")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._runs = 0

    def run(
        self, operation: Repeated, options: tuple[bool, ...], objects: tuple[Any, ...], addresses: list[int]
    ) -> list[Any] | None:
        """Results, or None. The first two are what the module finds them by."""
        assert self._plan.repeat is not None
        results = self._plan.repeat(objects, addresses, None, None)
        self._runs += 1
        if results is not None and self._runs % native.OFFERED == 1 and self._plan.program is not None:
            native.learn_as(operation, options, objects, self._plan.program, self._plan.repeat)
        return results


class Repeated:
    """What is known of a call with gradients of q, k and v.

    Parameters
    ----------
    call : Call
        Its operation and options, without arrays.
    forward : Plan
        Of the forward with the LSE.
    backward_of : callable
        Gives the call of the backward.
    """

    __slots__ = ("_backwards", "_forward", "backward_of", "call", "runs")

    def __init__(self, call: Call, forward: Plan, backward_of: Backward) -> None:
        self.call = call
        self.backward_of = backward_of
        self.runs = 0  # by Python
        self._forward = _Launches(forward)
        # By what is needed and the facts of the backward's arrays.
        self._backwards: dict[Any, _Launches] = {}

    def run_forward(self, objects: tuple[Any, ...], addresses: list[int] | None) -> list[Any] | None:
        """o and the LSE; None for arrays that have to be looked at. Without addresses only the C module is asked."""
        if addresses is not None:
            return self._forward.run(self, (), objects, addresses)
        return None if native.run_as is None else native.run_as(self, (), objects)

    def learn_backward(self, needed: tuple[bool, ...], call: Call, do: Any) -> None:
        """Keep the fast path of ``call``, a backward that has run."""
        if call.objects[3] is not do:  # a copy of it
            return
        seen, plan = from_torch.torch_facts(call.objects), kept(call)
        if seen is not None and plan is not None:
            if len(self._backwards) > 16:
                self._backwards.clear()
            self._backwards[needed, seen[0]] = _Launches(plan)

    def run_backward(self, needed: tuple[bool, ...], do: Any, saved: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Gradients of q, k and v; None for a backward that is not known. saved: `saved_of` the forward."""
        q, k, v, o, lse, starts_q, starts_k, sinks, *used = saved
        objects = (q, k, v, do, o, lse, None, starts_q, starts_k, None, sinks, None, None, None, *used)
        results = None if native.run_as is None else native.run_as(self, needed, objects)
        if results is None:
            seen = from_torch.torch_facts(objects)
            launches = None if seen is None else self._backwards.get((needed, seen[0]))
            if seen is None or launches is None:
                return None
            results = launches.run(self, needed, objects, seen[1])
            if results is None:
                return None
        if False not in needed:
            return tuple(results)
        made = iter(results)
        return tuple(next(made) if needs else None for needs in needed)


def saved_of(objects: tuple[Any, ...], o: Any, lse: Any) -> tuple[Any, ...]:
    """What the backward needs of a forward."""
    q, k, v, _, starts_q, starts_k, _, sinks = objects[:8]
    return q, k, v, o, lse, starts_q, starts_k, sinks, *objects[_USED]


def objects_of(saved: tuple[Any, ...]) -> list[Any]:
    """Arrays of the forward."""
    q, k, v, _, _, starts_q, starts_k, sinks, *used = saved
    return [q, k, v, None, starts_q, starts_k, None, sinks, *used, *([None] if used else [])]


#: By `key_of`.
KNOWN: PlanCache[Repeated] = PlanCache(1024)
KNOWN.follow(PLANS)


def learn(call: Call, backward_of: Backward) -> None:
    """Keep what is known of ``call``, which has run, if gradients of nothing but q, k and v are wanted of it."""
    key, _ = key_of(call)
    if key is None or any(x is not None and x.requires_grad for x in call.objects[3:]):
        return
    objects = tuple(x if x is None else x.detach() for x in call.objects)
    forward = kept(Call(call.operation, objects, call.options._replace(return_lse=True)))
    if forward is not None:
        KNOWN.put(key, Repeated(Call(call.operation, (), call.options), forward, backward_of))
