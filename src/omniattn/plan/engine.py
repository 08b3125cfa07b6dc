"""One way for every operation: find the plan of a call or make it, then run it.

The first call with given shapes, strides, dtypes and options is validated and planned (kernels, grids, packed
arguments). Later calls find the plan by the same facts. Where all arrays are plain CUDA tensors of torch they take the
fast path (`repeat.Repeat`) and pay for addresses only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .. import arguments, arrays, runtime
from ..arrays import Tensor
from ..errors import telling
from ..kv.layout import ADDRESSES
from ..problems import Output, Target
from ..problems.memory import WORKSPACE_ALIGNMENT
from ..runtime.env import forced_kernels
from ..runtime.record import LaunchRecord, Program
from ..select import Selection
from . import native
from .cache import PlanCache
from .repeat import Repeat
from .tuning import target_beside

if TYPE_CHECKING:
    from ..kv.cache import KVCache

#: Addresses of a cache behind those of a call's arrays.
CACHE_OPERANDS = tuple(f"cache.{name}" for name in ADDRESSES)


class Problem(Protocol):
    """What is known of every problem."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call returns."""


@dataclass(frozen=True)
class Launches:
    """What a call launches.

    Attributes
    ----------
    selection : Selection
        The kernel that the call is about.
    records : tuple of LaunchRecord
    workspace_bytes : int
        0 for none.
    others : tuple of Selection
        Of the kernels before and behind it.
    problem : object, optional
        What the call has become, where its problem left something open.
    """

    selection: Selection
    records: tuple[LaunchRecord, ...]
    workspace_bytes: int = 0
    others: tuple[Selection, ...] = ()
    problem: Any = None


@dataclass(frozen=True, eq=False)
class Operation:
    """How the calls of one public function are checked, planned and run.

    Attributes
    ----------
    name : str
        The function.
    arrays : tuple of str
        The caller's arrays by name, in the order of `Call.objects`; the first one's framework and device decide.
    check : callable
        (call, tensors) -> problem, or an error. Looks at everything but addresses.
    check_memory : callable
        (call, tensors): addresses and aliasing; called for each call that does not take the fast path.
    plan : callable
        (problem, target, force) -> Launches.
    reference : callable
        (call, problem, tensors) -> results, by NumPy.
    required : tuple of str
        Arrays that have to be there; ``check`` finds them in ``tensors``.
    aligned : frozenset of str
        Arrays that kernels access 16 bytes at a time; the others are aligned to their elements.
    labels : dict
        Names of arrays in errors, where these are not their own.
    otherwise : callable, optional
        The call of another operation that takes the place of a call whose arrays are not plain tensors; or None.
    keep : bool
        Whether plans are worth keeping.
    placed : (index, bytes), optional
        The array, of `arrays`, whose plan depends on whether its address is a multiple of so many bytes.
    given : dict
        Arrays of `arrays` that results are written to, where they are there: by the names of these results.
    same : tuple of str
        Arrays that a given one may be itself: its elements are read before the results at their places are written.
    writes_cache : bool
        Whether the cache is written.
    gradients : callable, optional
        (call) -> results, where a tensor of the call needs a gradient.
    traced : callable, optional
        (call) -> results, where a trace, a transform or a dispatch mode has to see the call.
    """

    name: str
    arrays: tuple[str, ...]
    check: Callable[[Call, dict[str, Tensor]], Any]
    check_memory: Callable[[Call, dict[str, Tensor]], None]
    plan: Callable[[Any, Target, str | None], Launches]
    reference: Callable[[Call, Any, dict[str, Tensor]], list[Any]]
    required: tuple[str, ...] = ()
    aligned: frozenset[str] = frozenset()
    labels: dict[str, str] = field(default_factory=dict)
    otherwise: Callable[[Call], Call | None] | None = None
    keep: bool = True
    placed: tuple[int, int] | None = None
    given: dict[str, str] = field(default_factory=lambda: {"o": "out"})
    same: tuple[str, ...] = ()
    writes_cache: bool = False
    gradients: Callable[[Call], list[Any]] | None = None
    traced: Callable[[Call], list[Any]] | None = None


class Call:
    """One call of a public function.

    Parameters
    ----------
    operation : Operation
    objects : tuple
        The caller's arrays in the order of `Operation.arrays`, None for what is absent.
    options : NamedTuple
        Everything else, as the caller gave it.
    stream : optional
        The caller's.
    cache : KVCache, optional
        Of operations on one.
    facts : hashable
        What else the plan depends on; kept with the plan.
    subject : object, optional
        What the checks look at besides; not kept.

    Attributes
    ----------
    problem : object
        What `run` found the call to be.
    """

    __slots__ = ("cache", "facts", "objects", "operation", "options", "problem", "stream", "subject")

    def __init__(
        self,
        operation: Operation,
        objects: tuple[Any, ...],
        options: Any,
        stream: Any = None,
        cache: KVCache | None = None,
        facts: Any = None,
        subject: Any = None,
    ) -> None:
        self.operation = operation
        self.objects = objects
        self.options = options
        self.stream = stream
        self.cache = cache
        self.facts = facts
        self.subject = subject
        self.problem: Any = None


class Plan:
    """A validated call.

    Attributes
    ----------
    problem : object
        One of `omniattn.problems`.
    launches : Launches or None
        None on the CPU.
    program : Program or None
        The launches with their kernels loaded; None on the CPU, and where nothing shall be loaded.
    ordinal : int
        The GPU.
    repeat : Repeat or None
        The fast path of calls with the same facts; None where there is none.
    runs : int
        How often that ran by Python.
    """

    __slots__ = ("launches", "ordinal", "problem", "program", "repeat", "runs")

    def __init__(self, problem: Any, launches: Launches | None, program: Program | None, ordinal: int) -> None:
        self.problem = problem
        self.launches = launches
        self.program = program
        self.ordinal = ordinal
        self.repeat: Repeat | None = None
        self.runs = 0


PLANS: PlanCache[Plan] = PlanCache(4096)
PLANS.lead(native.clear)

#: What a framework that differentiates calls adds: (call) -> results of a call like one that it knows, or None.
KNOWN_CALLS: list[Callable[[Call], list[Any] | None]] = []


class Described(Exception):
    """Ends a call that `describing` wraps; carries its plan. Never reaches the user."""

    def __init__(self, call: Call, plan: Plan, tensors: dict[str, Tensor]) -> None:
        super().__init__(call.operation.name)
        self.call, self.plan, self.tensors = call, plan, tensors


class _Mode(threading.local):
    describing = False


_mode = _Mode()
_lock = threading.Lock()
#: Threads that describe calls now: a number that is read faster than a thread's own mode.
_describers = 0


@contextmanager
def describing() -> Iterator[None]:
    """In this block `run` validates and plans, and raises `Described` in place of running. One thread's own."""
    global _describers
    with _lock:
        _describers += 1
    _mode.describing = True
    try:
        yield
    finally:
        _mode.describing = False
        with _lock:
            _describers -= 1


def is_describing() -> bool:
    """Whether this thread's calls are described and not run."""
    return _mode.describing


def repeated(
    operation: Operation, objects: tuple[Any, ...], options: tuple[Any, ...], stream: Any, cache: Any = None
) -> list[Any] | None:
    """What `run` gives for a call that the C module knows, without the call as data; None for others.

    Of a call without ``facts``, whose ``problem`` nobody asks for. ``options`` may be any tuple of their values.
    """
    ask = native.run
    return None if ask is None or _describers else ask(None, operation, objects, options, stream, cache, None)


def run(call: Call, *, is_asked: bool = False) -> list[Any]:
    """Run a call.

    Parameters
    ----------
    call : Call
    is_asked : bool
        `repeated` does not know it.

    Returns
    -------
    list
        The arrays of the problem's `outputs`, in order.
    """
    if _mode.describing:
        other = None if call.operation.otherwise is None else call.operation.otherwise(call)
        raise _describe_plan(call if other is None else other)
    if not call.operation.keep:
        return execute(make_plan(call, {}, load=True), call, {})
    if native.run is not None and not is_asked:
        results = native.run(call, call.operation, call.objects, call.options, call.stream, call.cache, call.facts)
        if results is not None:
            return results
    stream, cache = call.stream, call.cache
    raw = None if stream is None else telling(call.operation.name, arrays.resolve_stream, stream)
    seen = arrays.torch_facts(call.objects)
    if seen is None:
        call.options = arguments.plain_options(call.options, call.operation.name)
        if call.operation.gradients is not None:
            for known in KNOWN_CALLS:
                results = known(call)
                if results is not None:
                    return results
        traced = arrays.needs_operator(call.objects) or (call.cache is not None and call.cache.traced)
        if call.operation.traced is not None and (traced or _is_autocast(call)):
            return call.operation.traced(call)
        if call.operation.gradients is not None and arrays.needs_gradient(call.objects):
            return call.operation.gradients(call)
        other = None if call.operation.otherwise is None else call.operation.otherwise(call)
        if other is not None:
            return run(other)
        tensors = describe(call, raw)
        facts: Any = tuple(
            None if t is None else (t.dtype, t.device, t.ordinal, t.shape, t.strides)
            for t in map(tensors.get, call.operation.arrays)
        )
        addresses: list[int] = []
    else:
        tensors = {}
        facts, addresses = seen
    key: Any = _key(call, facts, addresses, tensors)
    try:
        plan = PLANS.get(key)
    except TypeError:  # an unhashable option, a list for window say: validation has the last word
        plan, key = None, None
    if plan is None:  # no plan is kept under an array in the options, whose value may change
        options = arguments.plain_options(call.options, call.operation.name)
        if options is not call.options:
            call.options = options
            return run(call, is_asked=True)
    if plan is not None and plan.repeat is not None and seen is not None and (cache is None or cache.plain_torch):
        call.problem = plan.problem
        results = plan.repeat(call.objects, addresses, cache, raw)
        if results is not None:
            plan.runs += 1
            if plan.runs % native.OFFERED == 1 and plan.program is not None:
                native.learn(call, plan.problem, plan.program, plan.repeat)
            return results
    if not tensors:
        tensors = describe(call, raw)
    if plan is None:
        # float32, which autocast changes, has no plan on a GPU.
        if seen is not None and _is_autocast(call):
            return call.operation.traced(call)  # type: ignore[misc]
        plan = make_plan(call, tensors, load=True)
        if seen is not None and plan.program is not None and plan.launches is not None:
            operation, size = call.operation, plan.launches.workspace_bytes
            plan.repeat = Repeat.of(
                plan.program, operation.arrays, operation.aligned, tensors, plan.problem.outputs, size, operation.given,
                operation.writes_cache,
            )  # fmt: skip
        if key is not None:
            PLANS.put(key, plan)
    results = execute(plan, call, tensors)
    if plan.repeat is not None and plan.repeat.writes is not None:
        plan.repeat.writes.allow(tensors, cache)
    return results


def _key(call: Call, facts: Any, addresses: list[int], tensors: dict[str, Tensor]) -> Any:
    """What the plan of a call depends on."""
    options, cache, placed = call.options, call.cache, call.operation.placed
    # True == 1 == 1.0, but not every one of them is valid everywhere.
    types: tuple[Any, ...] = tuple(map(type, options))
    if tuple in types:
        types += tuple(tuple(map(type, x)) for x in options if x.__class__ is tuple)
    if placed is not None and call.objects[placed[0]] is not None:
        index, multiple = placed
        address = addresses[index] if addresses else tensors[call.operation.arrays[index]].ptr
        types += (address % multiple == 0,)
    return (
        call.operation, facts, options, types, call.facts, None if cache is None else cache.identity, forced_kernels(),
    )  # fmt: skip


def kept(call: Call) -> Plan | None:
    """The plan of a call that has run and has a fast path, for whoever will know that the facts are the same."""
    seen = arrays.torch_facts(call.objects)
    if seen is None or not call.operation.keep:
        return None
    try:
        plan = PLANS.get(_key(call, *seen, {}))
    except TypeError:  # an unhashable option
        return None
    return None if plan is None or plan.repeat is None else plan


def _is_autocast(call: Call) -> bool:
    """Whether torch's autocast is to change the dtype of q, k or v: in operations that have gradients."""
    return call.operation.gradients is not None and arrays.is_autocast(call.objects[:3])


def describe(call: Call, raw: int | None) -> dict[str, Tensor]:
    """The caller's arrays by name, those that are there; raises for one that has to be and is None."""
    operation, required = call.operation, call.operation.required
    return {
        name: arrays.describe_of(operation.name, x, operation.labels.get(name, name), raw)
        for name, x in zip(operation.arrays, call.objects, strict=True)
        if x is not None or name in required
    }


def make_plan(call: Call, tensors: dict[str, Tensor], *, load: bool) -> Plan:
    """Validate everything but addresses; choose the kernels; load them if ``load``."""
    operation, cache = call.operation, call.cache
    problem = telling(operation.name, operation.check, call, tensors)
    place = next(iter(tensors.values())) if tensors else cache.tensors[0]  # type: ignore[union-attr]
    if place.device == "cpu":
        return Plan(problem, None, None, 0)
    ordinal = place.ordinal
    launches = operation.plan(problem, target_beside(runtime.device_info(ordinal), call.facts), forced_kernels())
    program = None
    if load:
        names = operand_names(operation, cache is not None, problem)
        facts = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        text = call_text(operation.name, facts) + ("" if cache is None else f" and {cache!r}")
        program = Program(launches.records, names, lambda spec: runtime.load(spec, ordinal), text)
    return Plan(launches.problem or problem, launches, program, ordinal)


def call_text(function: str, facts: Iterable[tuple[str, str, Sequence[int]]]) -> str:
    """What errors say of a call: names, element types and shapes of its arrays."""
    return f"{function} of " + ", ".join(f"{name} {dtype} {tuple(shape)}" for name, dtype, shape in facts)


def operand_names(operation: Operation, with_cache: bool, problem: Problem) -> tuple[str, ...]:
    """The order in which a program of this operation takes addresses."""
    outputs = tuple(output.name for output in problem.outputs)
    # Outputs may have the names of inputs that they are made of (v, say): those of inputs mean the inputs.
    return (
        *operation.arrays, *(CACHE_OPERANDS if with_cache else ()),
        *(f"out.{name}" if name in operation.arrays else name for name in outputs), "workspace",
    )  # fmt: skip


def execute(plan: Plan, call: Call, tensors: dict[str, Tensor]) -> list[Any]:
    """Run a validated call."""
    operation, cache = call.operation, call.cache
    call.problem = plan.problem
    telling(operation.name, operation.check_memory, call, tensors)
    given = given_outputs(operation, tensors)
    written = [*given.values(), *(cache.planes.values() if operation.writes_cache and cache is not None else ())]
    if plan.launches is None:
        results: list[Any] = telling(operation.name, operation.reference, call, plan.problem, tensors)
        arrays.mark_written(written)
        return results
    assert plan.program is not None, "a plan without loaded kernels describes a call, it cannot run one"
    own = [] if cache is None else cache.tensors
    place = next(iter(tensors.values())) if tensors else own[0]
    outputs = [
        given[o.name] if o.name in given else arrays.empty_like_framework(place, o.shape, o.dtype)
        for o in plan.problem.outputs
    ]
    everything = [*(t for name, t in tensors.items() if name not in operation.given.values()), *own, *outputs]
    workspace = 0
    if plan.launches.workspace_bytes:
        memory = workspace_of(place, plan.launches.workspace_bytes)
        everything.append(memory)
        workspace = -(-memory.ptr // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    handle = arrays.prepare(everything, call.stream)
    addresses = [
        *(tensors[name].ptr if name in tensors else 0 for name in operation.arrays),
        *(() if cache is None else cache.addresses),
        *(t.ptr for t in outputs),
        workspace,
    ]
    if cache is not None:
        cache.order.before(handle)
    arrays.mark_written(written)
    plan.program.launch(handle, addresses)
    if cache is not None:
        cache.order.after(own, handle)
    arrays.release(everything, handle)
    return [arrays.finish(t, handle) for t in outputs]


def given_outputs(operation: Operation, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Arrays that the caller gives for results, by the names of the results."""
    return {result: tensors[name] for result, name in operation.given.items() if name in tensors}


def workspace_of(place: Tensor, num_bytes: int) -> Tensor:
    """Scratch memory, `WORKSPACE_ALIGNMENT` bytes more than asked for, from the library of the array ``place``."""
    return arrays.empty_like_framework(place, (num_bytes + WORKSPACE_ALIGNMENT,), "uint8")


def store_results(call: Call, problem: Problem, tensors: dict[str, Tensor], values: Sequence[Any]) -> list[Any]:
    """NumPy results in arrays of the caller's framework; everything has been computed by now."""
    place, given = next(iter(tensors.values())), given_outputs(call.operation, tensors)
    results = []
    for output, value in zip(problem.outputs, values, strict=True):
        t = given.get(output.name) or arrays.empty_like_framework(place, output.shape, output.dtype)
        arrays.store(t, value)
        results.append(arrays.finish(t, 0))
    return results


def _describe_plan(call: Call) -> Described:
    raw = None if call.stream is None else telling(call.operation.name, arrays.resolve_stream, call.stream)
    if call.operation.gradients is not None and arrays.needs_gradient(call.objects):
        call.objects = arrays.without_gradients(call.objects)
    tensors = describe(call, raw)
    plan = make_plan(call, tensors, load=False)
    telling(call.operation.name, call.operation.check_memory, call, tensors)
    if plan.launches is None:
        everything = [*tensors.values(), *([] if call.cache is None else call.cache.tensors)]
        telling(call.operation.name, arrays.prepare, everything, call.stream)
    return Described(call, plan, tensors)
