"""What a Python function of FlexAttention computes: it is called with objects that write down what is done to them.

Operators of Python, functions and methods of torch on single elements, and indexing of tensors that the function closes
over are understood. What is not raises `UnsupportedError` by its name; nothing is guessed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError, UnsupportedError
from ..problems.score_mod import MAX_ARRAYS
from . import score_graph as graph
from .score_graph import Node

_KINDS = {
    torch.bool: "b", torch.uint8: "i", torch.int8: "i", torch.int32: "i", torch.int64: "l", torch.float16: "f",
    torch.bfloat16: "f", torch.float32: "f",
}  # fmt: skip
_INSTEAD = "an omniattn.ScoreMod with an expression of your own"
_NO_VALUE = "its value is not known while the function is translated; use torch.where, &, | and ~"


def refuse(what: str, instead: str = _INSTEAD) -> UnsupportedError:
    """The error of something that cannot be translated."""
    return UnsupportedError(f"flex_attention(): {what} cannot be translated", instead=instead)


class Traced:
    """A number that is not known yet: what the function computes with scores and positions."""

    def __init__(self, node: Node, trace: Trace) -> None:
        self.node, self._trace = node, trace

    dim = property(lambda self: lambda: 0)
    ndim = property(lambda self: 0)
    shape = property(lambda self: torch.Size(()))
    size = property(lambda self: lambda dim=None: torch.Size(()))
    device = property(lambda self: self._trace.device)

    @property
    def dtype(self) -> torch.dtype:
        """float32, int32, int64 or bool."""
        return {"f": torch.float32, "i": torch.int32, "l": torch.int64, "b": torch.bool}[self.node.kind]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _HANDLERS:
            raise refuse(f"the method or attribute {name!r} of a tensor")
        return functools.partial(_call, self._trace, name, self)

    def __bool__(self) -> bool:
        raise refuse("a decision (if, and, or, not, while) on a score or a position", _NO_VALUE)

    def __index__(self) -> int:
        raise refuse("a score or position as a Python integer, as an index of a list or a range", _NO_VALUE)

    def __float__(self) -> float:
        raise refuse("a score or position as a Python float", _NO_VALUE)

    __int__ = __index__
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise refuse("a loop over a score or a position", _NO_VALUE)

    def __getitem__(self, index: Any) -> Any:
        raise refuse("an index of a score or a position", "the score or position itself: it has no dimensions")


class TracedArray:
    """A tensor of the function's, the first of whose dimensions have an index."""

    def __init__(self, tensor: torch.Tensor, indices: tuple[Node, ...], trace: Trace) -> None:
        self._tensor, self._indices, self._trace = tensor, indices, trace

    def __getitem__(self, index: Any) -> Any:
        return self._trace.element(self._tensor, self._indices, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse(f"{name!r} of a part of a tensor: only its elements are known")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise refuse(f"torch function {function.__name__!r} of a part of a tensor: only its elements are known")


class Trace(TorchFunctionMode):
    """Functions that are translated together, and the tensors that they read.

    Attributes
    ----------
    device : torch.device
        Of the call.
    arrays : list of tensor
        In the order in which they were met.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.arrays: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})

    def run(self, function: Callable[..., Any], argument: str, names: tuple[str, ...]) -> Node:
        """What the function gives for these arguments (`graph.PLACES`)."""
        if not callable(function):
            raise ArgumentError(argument, "a Python function, or None", type(function).__name__,
                                function="flex_attention")  # fmt: skip
        with self:
            made = function(*(Traced(graph.place(name), self) for name in names))
        try:
            return self.node(made)
        except UnsupportedError:
            expected = "a function that returns a tensor without dimensions, or a number"
            raise ArgumentError(argument, expected, f"one that returns {type(made).__name__}",
                                function="flex_attention") from None  # fmt: skip

    def node(self, x: Any) -> Node:
        """An operand: traced, a number, or a tensor without dimensions."""
        if isinstance(x, Traced):
            return x.node
        if isinstance(x, (bool, int, float)):
            if isinstance(x, float) and math.isnan(x):
                raise refuse("the constant NaN")
            return graph.const(x)
        if isinstance(x, torch.Tensor):
            if x.requires_grad and torch.is_grad_enabled():  # as a number it would lose its gradient in silence
                raise refuse("a tensor that requires a gradient, which only query, key and value can have,",
                             "passing tensor.detach()")  # fmt: skip
            if x.dim() == 0 and x.device.type == "cpu":
                return self.node(x.item())
            if x.dim() == 0:
                return self.load(x, ())
            raise refuse(f"a tensor of shape {tuple(x.shape)} as an operand: only its elements, by an index,")
        raise refuse(f"an operand of type {type(x).__name__!r}")

    def element(self, tensor: torch.Tensor, before: tuple[Node, ...], index: Any) -> Any:
        """``tensor[index]``, of a tensor of which the first dimensions have the indices ``before``."""
        indices = list(before)
        for one in index if isinstance(index, tuple) else (index,):
            if one is Ellipsis or one is None or isinstance(one, slice):
                raise refuse(f"the index {one!r} of a tensor, beside a score or a position")
            node = graph.widened(self.node(one))
            if node.kind not in "il":
                raise refuse("a float or a bool as an index of a tensor")
            if len(indices) == tensor.dim():
                most = f"at most {tensor.dim()} indices of a tensor of shape {tuple(tensor.shape)}"
                raise ArgumentError("index", most, str(len(indices) + 1), function="flex_attention")
            indices.append(self._from_the_start(node, tensor.shape[len(indices)]))
        if len(indices) < tensor.dim():
            return TracedArray(tensor, tuple(indices), self)
        return Traced(self.load(tensor, tuple(indices)), self)

    def _from_the_start(self, index: Node, extent: int) -> Node:
        """An index as torch means it: negative ones count from the end."""
        if index.least:
            return index
        if index.op == "const":
            return graph.const(int(index.value or 0) + extent)
        from_end = graph.arithmetic("add", index, graph.const(extent))
        return graph.where(graph.compare("lt", index, graph.const(0)), from_end, index)

    def load(self, tensor: torch.Tensor, indices: tuple[Node, ...]) -> Node:
        """An element of a tensor, which becomes one of the arrays."""
        kind = _KINDS.get(tensor.dtype)
        if kind is None:
            raise refuse(f"an element of a tensor of {tensor.dtype}", "float32, float16, bfloat16, int32, int64, int8, "
                         "uint8 or bool")  # fmt: skip
        narrow = tensor.dtype in (torch.int8, torch.uint8)
        for number, known in enumerate(self.arrays):
            if known is tensor or _same(known, tensor):
                return graph.load(number, kind, indices, narrow)
        if len(self.arrays) == MAX_ARRAYS:
            raise refuse(f"a function that reads more than {MAX_ARRAYS} tensors")
        self.arrays.append(tensor)
        return graph.load(len(self.arrays) - 1, kind, indices, narrow)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    facts = (a.dtype, a.device, a.shape, a.stride(), a.data_ptr())
    return a.numel() > 0 and facts == (b.dtype, b.device, b.shape, b.stride(), b.data_ptr())


def _traces(x: Any) -> Trace | None:
    """The trace that an argument belongs to."""
    if isinstance(x, (Traced, TracedArray)):
        return x._trace
    if isinstance(x, (tuple, list)):
        return next((found for y in x if (found := _traces(y)) is not None), None)
    return None


def dispatch(function: Any, args: Any, kwargs: Any) -> Any:
    """A call of torch: on what is traced it is written down, on tensors alone it is computed."""
    trace = _traces([*args, *kwargs.values()])
    if trace is None:
        return function(*args, **kwargs)
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__" and isinstance(args[0], torch.Tensor):
        return trace.element(args[0], (), args[1])
    if name not in _HANDLERS:
        raise refuse(f"torch function {name!r}")
    return _call(trace, name, *args, **kwargs)


def _call(trace: Trace, name: str, /, *args: Any, **kwargs: Any) -> Any:
    for option in ("device", "layout", "memory_format", "requires_grad", "pin_memory"):
        kwargs.pop(option, None)  # say nothing of a number
    try:
        made = _HANDLERS[name](trace, *args, **kwargs)
    except TypeError as error:
        raise refuse(f"{name!r} with these arguments ({error})") from error
    except ValueError as error:
        raise refuse(f"{name!r} ({error})") from error
    return Traced(made, trace)


Handler = Callable[..., Node]
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def put(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return put


def _binary(make: Callable[[Node, Node], Node], *names: str, reflected: str = "") -> None:
    """A function of two operands, by its names; and the operator of the right one."""

    def handler(trace: Trace, input: Any, other: Any) -> Node:
        return make(trace.node(input), trace.node(other))

    def backwards(trace: Trace, input: Any, other: Any) -> Node:
        return make(trace.node(other), trace.node(input))

    _HANDLERS.update(dict.fromkeys(names, handler))
    if reflected:
        _HANDLERS[reflected] = backwards


def _partial(function: Callable[..., Node], op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: function(op, a, b)


def _of_bools(op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: graph.logical(op, graph.cast(a, "b"), graph.cast(b, "b"))


_binary(_partial(graph.arithmetic, "mul"), "mul", "multiply", "__mul__", reflected="__rmul__")
_binary(_partial(graph.arithmetic, "min"), "minimum")
_binary(_partial(graph.arithmetic, "max"), "maximum")
for _op, _long in {
    "eq": "eq", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}.items():  # fmt: skip
    _binary(_partial(graph.compare, _op), _op, f"__{_op}__", _long)
for _op in ("and", "or", "xor"):
    _binary(_partial(graph.logical, _op), f"bitwise_{_op}", f"__{_op}__", reflected=f"__r{_op}__")
    _binary(_of_bools(_op), f"logical_{_op}")
_binary(_partial(graph.shift, "shl"), "__lshift__", "bitwise_left_shift", reflected="__rlshift__")
_binary(_partial(graph.shift, "shr"), "__rshift__", "bitwise_right_shift", reflected="__rrshift__")
_binary(graph.divide, "true_divide", "__truediv__", reflected="__rtruediv__")
_binary(graph.floor_divide, "floor_divide", "__floordiv__", reflected="__rfloordiv__")
_binary(graph.modulo, "remainder", "__mod__", reflected="__rmod__")
_binary(graph.power, "pow", "__pow__", reflected="__rpow__")


def _scaled(op: str) -> Handler:
    def handler(trace: Trace, input: Any, other: Any, alpha: Any = 1) -> Node:
        added = trace.node(other)
        if not (isinstance(alpha, int) and alpha == 1):  # a factor makes a bool a number
            added = graph.arithmetic("mul", added, trace.node(alpha))
        return graph.arithmetic(op, trace.node(input), added)

    return handler


_handles("add", "__add__", "__radd__")(_scaled("add"))
_handles("sub", "subtract", "__sub__")(_scaled("sub"))


@_handles("__rsub__", "rsub")
def _reversed_difference(trace: Trace, input: Any, other: Any) -> Node:
    return graph.arithmetic("sub", trace.node(other), trace.node(input))


@_handles("div", "divide")
def _division(trace: Trace, input: Any, other: Any, rounding_mode: str | None = None) -> Node:
    a, b = trace.node(input), trace.node(other)
    if rounding_mode is None:
        return graph.divide(a, b)
    if rounding_mode == "floor":
        return graph.floor_divide(a, b)
    if rounding_mode != "trunc":
        raise ValueError(f"rounding_mode={rounding_mode!r}")
    if "f" in (a.kind, b.kind):
        return graph.unary("trunc", graph.divide(a, b))
    quotient = graph.floor_divide(graph.unary("abs", a), graph.unary("abs", b))
    negative = graph.compare("ne", graph.compare("lt", a, graph.const(0)), graph.compare("lt", b, graph.const(0)))
    return graph.where(negative, graph.negative(quotient), quotient)


@_handles("where")
def _where(trace: Trace, condition: Any, input: Any, other: Any) -> Node:
    return graph.where(trace.node(condition), trace.node(input), trace.node(other))


@_handles("masked_fill")
def _masked_fill(trace: Trace, input: Any, mask: Any, value: Any) -> Node:
    x = trace.node(input)
    return graph.where(trace.node(mask), graph.cast(trace.node(value), x.kind), x)


@_handles("clamp", "clip")
def _clamp(trace: Trace, input: Any, min: Any = None, max: Any = None) -> Node:
    x = trace.node(input)
    if min is not None:
        x = graph.arithmetic("max", x, trace.node(min))
    return x if max is None else graph.arithmetic("min", x, trace.node(max))


@_handles("clamp_min")
def _clamp_min(trace: Trace, input: Any, min: Any) -> Node:
    return graph.arithmetic("max", trace.node(input), trace.node(min))


@_handles("clamp_max")
def _clamp_max(trace: Trace, input: Any, max: Any) -> Node:
    return graph.arithmetic("min", trace.node(input), trace.node(max))


@_handles("max", "min")
def _of_two_only(trace: Trace, input: Any, other: Any) -> Node:
    raise ValueError("torch.maximum and torch.minimum of two elements can be")


@_handles("neg", "negative", "__neg__")
def _negative(trace: Trace, input: Any) -> Node:
    return graph.negative(trace.node(input))


@_handles("__pos__", "positive", "clone", "contiguous")
def _itself(trace: Trace, input: Any, *_: Any) -> Node:
    return trace.node(input)


@_handles("__invert__", "bitwise_not")
def _inverted(trace: Trace, input: Any) -> Node:
    return graph.invert(trace.node(input))


@_handles("logical_not")
def _not(trace: Trace, input: Any) -> Node:
    return graph.invert(graph.cast(trace.node(input), "b"))


@_handles("sigmoid", "expit")
def _sigmoid(trace: Trace, input: Any) -> Node:
    return graph.sigmoid(trace.node(input))


@_handles("relu")
def _relu(trace: Trace, input: Any, inplace: bool = False) -> Node:
    return graph.relu(trace.node(input))


@_handles("square")
def _squared(trace: Trace, input: Any) -> Node:
    return graph.power(trace.node(input), graph.const(2))


@_handles("reciprocal")
def _reciprocal(trace: Trace, input: Any) -> Node:
    return graph.divide(graph.const(1.0), trace.node(input))


for _op in graph.UNARY:
    for _name in {"abs": ("abs", "absolute", "__abs__"), "trunc": ("trunc", "fix"), "sign": ("sign", "sgn")}.get(
        _op, (_op,)
    ):
        _HANDLERS[_name] = lambda trace, input, op=_op: graph.unary(op, trace.node(input))
_HANDLERS["asinh"] = _HANDLERS["arcsinh"] = lambda trace, input: graph.unary("asinh", trace.node(input))
_HANDLERS["arctan"] = _HANDLERS["atan"]


def _kind_of(dtype: Any) -> str:
    if dtype not in (torch.float32, torch.int32, torch.int64, torch.bool):
        raise ValueError(f"{dtype}: float32, int32, int64 and bool are what is computed in")
    return _KINDS[dtype]


for _name, _kind in {"float": "f", "int": "i", "long": "l", "bool": "b"}.items():
    _HANDLERS[_name] = lambda trace, input, kind=_kind: graph.widened(graph.cast(trace.node(input), kind))


@_handles("to", "type")
def _to(trace: Trace, input: Any, *given: Any, dtype: Any = None, **_: Any) -> Node:
    for x in given:
        if isinstance(x, torch.dtype):
            dtype = x
        elif isinstance(x, (Traced, torch.Tensor)):
            dtype = x.dtype
    x = trace.node(input)
    return x if dtype is None else graph.widened(graph.cast(x, _kind_of(dtype)))


@_handles("type_as")
def _type_as(trace: Trace, input: Any, other: Any) -> Node:
    return graph.widened(graph.cast(trace.node(input), _kind_of(other.dtype)))


def _new(like: Any, size: Any, value: Any, dtype: Any, trace: Trace) -> Node:
    if tuple(size if isinstance(size, (tuple, list, torch.Size)) else (size,)) != ():
        raise ValueError("a tensor with dimensions")
    kind = trace.node(like).kind if dtype is None else _kind_of(dtype)
    return graph.cast(trace.node(value), kind)


@_handles("new_full", "new_tensor")
def _new_full(trace: Trace, input: Any, size: Any, fill_value: Any = None, dtype: Any = None) -> Node:
    if fill_value is None:  # new_tensor
        size, fill_value = (), size
    return _new(input, size, fill_value, dtype, trace)


@_handles("new_ones")
def _new_ones(trace: Trace, input: Any, size: Any = (), dtype: Any = None) -> Node:
    return _new(input, size, 1, dtype, trace)


@_handles("new_zeros")
def _new_zeros(trace: Trace, input: Any, size: Any = (), dtype: Any = None) -> Node:
    return _new(input, size, 0, dtype, trace)


@_handles("full_like")
def _full_like(trace: Trace, input: Any, fill_value: Any, dtype: Any = None) -> Node:
    return _new(input, (), fill_value, dtype, trace)


@_handles("ones_like")
def _ones_like(trace: Trace, input: Any, dtype: Any = None) -> Node:
    return _new(input, (), 1, dtype, trace)


@_handles("zeros_like")
def _zeros_like(trace: Trace, input: Any, dtype: Any = None) -> Node:
    return _new(input, (), 0, dtype, trace)


@_handles("isinf")
def _isinf(trace: Trace, input: Any) -> Node:
    return graph.compare("eq", graph.unary("abs", graph.cast(trace.node(input), "f")), graph.const(math.inf))


@_handles("isnan")
def _isnan(trace: Trace, input: Any) -> Node:
    x = trace.node(input)
    return graph.compare("ne", x, x)


def _operators() -> None:
    """Python's operators of `Traced`, by the handlers of their names."""
    for name in _HANDLERS:
        if name.startswith("__"):

            def operator(self: Traced, *others: Any, _name: str = name) -> Any:
                return _call(self._trace, _name, self, *others)

            setattr(Traced, name, operator)


_operators()
