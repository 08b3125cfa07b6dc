"""What JAX keeps of a call: everything but its arrays, hashable; and the call's problem for given shapes and dtypes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ...arrays import Tensor, contiguous_strides
from ...arrays.tensor import fill
from ...errors import ArgumentError, OmniattnError, UnsupportedError
from ...kv.cache import KVCache
from ...kv.leaves import CacheFacts
from ...plan.engine import Call, Operation
from ...runtime.env import forced_kernels

#: (shape, dtype) of an array.
Facts = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Signature:
    """A call without its arrays.

    Attributes
    ----------
    operation : Operation
    names : tuple of str
        The caller's arrays that are there, in the order of a bind; behind them come those of the cache.
    options : NamedTuple
    types : tuple of type
        Of the options: True == 1, but not every one of them is valid everywhere.
    facts : hashable
        As `Call.facts`.
    cache : CacheFacts, optional
    key : hashable
        What `subject` is found equal by.
    subject : object, optional
        As `Call.subject`, without arrays.
    forced : hashable
        The kernels that the environment asked for when the call was traced.
    """

    operation: Operation
    names: tuple[str, ...]
    options: Any
    types: tuple[Any, ...]
    facts: Any
    cache: CacheFacts | None
    key: Any
    subject: Any = field(compare=False)
    forced: Any = field(default_factory=forced_kernels)

    def __repr__(self) -> str:
        given = {name: value for name, value in self.options._asdict().items() if value is not None}
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all operands."""
        return self.names if self.cache is None else (*self.names, *(f"cache.{name}" for name in self.cache.arrays))

    def with_options(self, **changes: Any) -> Signature:
        """The same call with other options."""
        options = self.options._replace(**changes)
        return replace(self, options=options, types=types_of(options))

    def call(self, cache: KVCache | None = None) -> Call:
        """The call, without arrays."""
        nothing = (None,) * len(self.operation.arrays)
        return Call(self.operation, nothing, self.options, None, cache, self.facts, self.subject)

    def check(self, tensors: dict[str, Tensor]) -> tuple[Call, Any]:
        """The call and its problem, from facts of all operands by name; raises as the public function."""
        of_cache = {n.removeprefix("cache."): t for n, t in tensors.items() if n.startswith("cache.")}
        call = self.call(None if self.cache is None else self.cache.on(of_cache))
        own = {name: t for name, t in tensors.items() if not name.startswith("cache.")}
        call.problem = self.operation.check(call, own)
        return call, call.problem

    def outputs(self, facts: tuple[Facts, ...]) -> tuple[Facts, ...]:
        """Shapes and dtypes of the results; of a call that writes a cache, its planes."""
        if self.operation.name == "append":
            assert self.cache is not None
            by_name = dict(zip(self.arrays, facts, strict=True))
            return tuple(by_name[f"cache.{name}"] for name in self.cache.planes)
        return tuple((tuple(o.shape), o.dtype) for o in check_now(self, facts).outputs)


def types_of(options: Any) -> tuple[Any, ...]:
    """Types of options, those inside of tuples too."""
    inner = (tuple(map(type, x)) for x in options if x.__class__ is tuple)
    return (*map(type, options), *inner)


def facts_of(x: Any) -> Facts:
    """Shape and dtype of a JAX value or abstract value."""
    return tuple(x.shape), str(x.dtype)


def tensor(facts: Facts, argument: str, device: str, ordinal: int, ptr: int = 0) -> Tensor:
    """A row-major array by its facts."""
    shape, dtype = facts
    t = Tensor()
    fill(t, None, "jax", ptr, shape, contiguous_strides(shape), dtype, device, ordinal, False, argument)
    return t


@functools.lru_cache(maxsize=4096)
def problem_of(signature: Signature, facts: tuple[Facts, ...], device: str, ordinal: int) -> Any:
    """The problem of a call on a device; raises as the public function."""
    labels = signature.operation.labels
    tensors = {
        name: tensor(of, labels.get(name, name), device, ordinal)
        for name, of in zip(signature.arrays, facts, strict=True)
    }
    return signature.check(tensors)[1]


@functools.lru_cache(maxsize=1)
def _has_gpu() -> bool:
    return bool(jax.default_backend() == "gpu")


def default_place() -> tuple[str, int]:
    """Device type and number on which a trace most likely runs; nobody knows before it is lowered."""
    device = jax.config.jax_default_device
    platform = getattr(device, "platform", device)
    if platform is None:
        platform = "gpu" if _has_gpu() else "cpu"
    if platform not in ("gpu", "cuda"):
        return "cpu", 0
    return "cuda", getattr(device, "local_hardware_id", None) or 0


def check_now(signature: Signature, facts: tuple[Facts, ...]) -> Any:
    """Check a call while it is traced; its problem.

    A call that only the CPU can take (float32, say) may yet be lowered for it: what is wrong on a GPU alone is said
    when it is lowered for one.
    """
    place = default_place()
    try:
        return problem_of(signature, facts, *place)
    except OmniattnError:
        if place[0] == "cpu":
            raise
        try:
            return problem_of(signature, facts, "cpu", 0)
        except OmniattnError:
            pass
        raise


def without_tracers(function: str, options: Any) -> Any:
    """Options that can be hashed, lists as tuples.

    Raises
    ------
    ArgumentError
        A traced value: options are part of the compiled program.
    """
    for name, value in options._asdict().items():
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, jax.core.Tracer):
                raise ArgumentError(
                    name, "a value that is known when the call is traced", f"a traced {x.aval.str_short()}",
                    function=function, hint="static_argnames of jax.jit keeps an argument as it is",
                )  # fmt: skip
    made = options._replace(**{n: tuple(x) for n, x in options._asdict().items() if isinstance(x, list)})
    try:
        hash(made)
    except TypeError:
        raise UnsupportedError(
            f"{function}(): options of type {', '.join(sorted({type(x).__name__ for x in made}))} in a traced call",
            instead="numbers, texts and tuples of them",
        ) from None
    return made
