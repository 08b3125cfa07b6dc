"""Calls with gradients like one that has run: what was checked and planned for it, found by the facts of the tensors.

Of calls of `attention` and `attention_varlen` on plain CUDA tensors, without mask, score modification, ``out`` and
``stream``, whose gradients are those of q, k and v. Everything else takes the long way each time.
"""

from __future__ import annotations

from typing import Any

from ...arrays import from_torch
from ...plan.cache import PlanCache
from ...plan.engine import PLANS, Call, Operation, kept
from ...plan.repeat import Repeat
from ...runtime.env import forced_kernels

#: Places among a forward's arrays: q, k, v, out, cu_seqlens_q, cu_seqlens_k, mask, sinks.
_NUM_ARRAYS, _OUT, _MASK = 8, 3, 6
#: What comes before them among the inputs of the autograd function.
_LEAD = (None,) * 4
_NOT_OTHERS = (False,) * (_NUM_ARRAYS - 3)


def key_of(call: Call) -> tuple[Any, list[int]]:
    """What decides about a call with gradients, None for those that are not repeated; the addresses of its arrays."""
    objects = call.objects
    plain = len(objects) == _NUM_ARRAYS and objects[_OUT] is None and objects[_MASK] is None
    if not plain or call.stream is not None or call.subject is not None:
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


class Repeated:
    """What is known of a call with gradients.

    Attributes
    ----------
    call : Call
        Its operation and options, without arrays.
    forward : Repeat or None
        The fast path of the forward with the LSE; None as long as it has not run, or where there is none.
    """

    __slots__ = ("_backwards", "call", "forward")

    def __init__(self, operation: Operation, options: Any) -> None:
        self.call = Call(operation, (), options)
        self.forward: Repeat | None = None
        # By what is needed and the facts of the backward's arrays: its fast path.
        self._backwards: dict[Any, Repeat] = {}

    def learn_forward(self, call: Call, key: Any) -> None:
        """Keep the fast path of ``call``, which has run."""
        objects = tuple(x if x is None else x.detach() for x in call.objects)
        self.forward = kept(Call(call.operation, objects, call.options._replace(return_lse=True)))
        if self.forward is not None:
            _KNOWN.put(key, self)

    def learn_backward(self, needed: tuple[bool, ...], call: Call, do: Any) -> None:
        """Keep the fast path of ``call``, a backward that has run."""
        # Not where do was copied, or where sums become gradients of another dtype.
        if call.objects[3] is not do or needed[3:] != _NOT_OTHERS:
            return
        seen, repeat = from_torch.torch_facts(call.objects), kept(call)
        if seen is not None and repeat is not None:
            if len(self._backwards) > 16:
                self._backwards.clear()
            self._backwards[needed, seen[0]] = repeat

    def run_backward(
        self, needed: tuple[bool, ...], do: Any, o: Any, lse: Any, saved: list[Any]
    ) -> tuple[Any, ...] | None:
        """Gradients of the autograd function's inputs; None for a backward that is not known."""
        q, k, v, _, starts_q, starts_k, _, sinks = saved
        objects = (q, k, v, do, o, lse, None, starts_q, starts_k, None, sinks, None, None, None)
        seen = from_torch.torch_facts(objects)
        if seen is None:
            return None
        repeat = self._backwards.get((needed, seen[0]))
        if repeat is None:
            return None
        results = repeat(objects, seen[1], None, None)
        if results is None:
            return None
        made = iter(results)
        return (*_LEAD, *(next(made) if needs else None for needs in needed))


_KNOWN: PlanCache[Repeated] = PlanCache(1024)
_KNOWN.follow(PLANS)


def repeated(key: Any) -> Repeated | None:
    """What is known of a call with this key (`key_of`)."""
    return None if key is None else _KNOWN.get(key)
