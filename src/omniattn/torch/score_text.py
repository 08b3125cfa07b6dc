"""A graph over a score (`score_graph`) as CUDA C++ for a `ScoreMod`, and evaluated by NumPy for arrays on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .score_graph import Node

_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "shl": "<<", "shr": ">>",
}  # fmt: skip
_CALLS = {
    "exp": "expf", "exp2": "exp2f", "expm1": "expm1f", "log": "logf", "log2": "log2f", "log10": "log10f",
    "log1p": "log1pf", "sqrt": "sqrtf", "rsqrt": "rsqrtf", "sin": "sinf", "cos": "cosf", "tan": "tanf",
    "sinh": "sinhf", "cosh": "coshf", "tanh": "tanhf", "asinh": "asinhf", "atan": "atanf", "erf": "erff",
    "floor": "floorf", "ceil": "ceilf", "trunc": "truncf", "round": "rintf", "pow": "powf",
    "fmod": "fmodf",
}  # fmt: skip
_TYPES = {"b": "bool", "i": "int", "l": "int64", "f": "float"}


def array_name(number: int) -> str:
    """What expressions call an array."""
    return f"t{number}"


def text(node: Node) -> str:
    """The node as one expression of CUDA C++."""
    return _text(node, {})


def _text(node: Node, known: dict[int, str]) -> str:
    if id(node) not in known:
        known[id(node)] = _written(node, [_text(x, known) for x in node.args])
    return known[id(node)]


def _number(node: Node) -> str:
    value: Any = node.value
    if node.kind == "b":
        return "true" if value else "false"
    if node.kind != "f":
        written = f"int64({value})" if node.kind == "l" else str(int(value))
        return f"({written})" if value < 0 else written
    value = float(value)
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    written = repr(value)
    written = f"{written}f" if "." in written or "e" in written else f"{written}.0f"
    return f"({written})" if value < 0 or written.startswith("-") else written


def _written(node: Node, args: list[str]) -> str:
    op, kind = node.op, node.kind
    if op == "place":
        return str(node.value)
    if op == "const":
        return _number(node)
    if op == "load":
        return f"{array_name(int(node.value or 0))}({', '.join(args)})"
    if op == "where":
        return f"({args[0]} ? {args[1]} : {args[2]})"
    if op == "cast":
        return f"({args[0]} != 0)" if kind == "b" else f"{_TYPES[kind]}({args[0]})"
    if op in _SIGNS:
        return f"({args[0]} {_SIGNS[op]} {args[1]})"
    if op in _CALLS:
        return f"{_CALLS[op]}({', '.join(args)})"
    return _WRITTEN[op](kind, node.args, args)


def _limit(kind: str, nodes: tuple[Node, ...], args: list[str], name: str, sign: str) -> str:
    a, b = args
    if kind == "i":
        return f"{name}(int({a}), int({b}))"
    # NaN of either operand is the result, as in torch; fminf would drop it.
    nan = "" if kind == "l" or nodes[1].op == "const" else f" || {b} != {b}"
    return f"({b} {sign} {a}{nan} ? {b} : {a})"


def _floor_division(nodes: tuple[Node, ...], args: list[str], remainder: bool) -> str:
    a, b = args
    if nodes[0].least and nodes[1].least:
        return f"({a} {'%' if remainder else '/'} {b})"
    rest = f"(({a} % {b} + {b}) % {b})"
    return rest if remainder else f"(({a} - {rest}) / {b})"


def _bits(name: str, logical: str) -> Callable[[str, tuple[Node, ...], list[str]], str]:
    return lambda kind, nodes, args: f"({args[0]} {logical if kind == 'b' else name} {args[1]})"


_WRITTEN: dict[str, Callable[[str, tuple[Node, ...], list[str]], str]] = {
    "neg": lambda kind, nodes, args: f"(-{args[0]})",
    "not": lambda kind, nodes, args: f"(!{args[0]})",
    "inv": lambda kind, nodes, args: f"(~{args[0]})",
    "abs": lambda kind, nodes, args: (
        f"fabsf({args[0]})" if kind == "f" else f"abs(int({args[0]}))" if kind == "i"
        else f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
    ),
    "sign": lambda kind, nodes, args: f"{_TYPES[kind]}(({args[0]} > 0) - ({args[0]} < 0))",
    "min": lambda kind, nodes, args: _limit(kind, nodes, args, "min", "<"),
    "max": lambda kind, nodes, args: _limit(kind, nodes, args, "max", ">"),
    "floordiv": lambda kind, nodes, args: _floor_division(nodes, args, False),
    "mod": lambda kind, nodes, args: _floor_division(nodes, args, True),
    "and": _bits("&", "&&"),
    "or": _bits("|", "||"),
    "xor": _bits("^", "!="),
}  # fmt: skip

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide,
    "mod": np.mod, "fmod": np.fmod, "pow": np.power, "min": np.minimum, "max": np.maximum, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "not": np.logical_not, "inv": np.invert, "neg": np.negative, "where": np.where, "abs": np.abs,
    "sign": lambda x: np.where(x == x, np.sign(x), 0),  # 0 of NaN, as torch has it
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "asinh": np.arcsinh, "atan": np.arctan, "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "round": np.rint,
    "erf": np.vectorize(math.erf, otypes=[float]),
}  # fmt: skip


def evaluate(node: Node, places: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """The node's value.

    Parameters
    ----------
    node : Node
    places : mapping
        ``score`` (rows, keys), whose dtype all floats have, ``q`` (rows, 1), ``k`` (1, keys); ``b`` and ``h``, numbers.
    arrays : mapping
        NumPy arrays by `array_name`.

    Returns
    -------
    ndarray or number that broadcasts to (rows, keys)
    """
    dtype = np.asarray(places["score"]).dtype
    with np.errstate(all="ignore"):  # of branches that are not chosen
        return _value(node, places, arrays, {"b": np.bool_, "i": np.int32, "l": np.int64, "f": dtype.type}, {})


def _value(node: Node, places: Mapping[str, Any], arrays: Mapping[str, Any], types: Any, known: dict[int, Any]) -> Any:
    if id(node) in known:
        return known[id(node)]
    args = [_value(x, places, arrays, types, known) for x in node.args]
    of_kind = types[node.kind]
    if node.op == "place":
        made = np.asarray(places[str(node.value)]).astype(of_kind)
    elif node.op == "const":
        made = of_kind(node.value)
    elif node.op == "load":
        array = np.asarray(arrays[array_name(int(node.value or 0))])
        made = np.asarray(array[tuple(args)]).astype(of_kind)
    elif node.op == "cast":
        made = np.asarray(args[0]).astype(of_kind)
    else:
        made = np.asarray(_NUMPY[node.op](*args)).astype(of_kind, copy=False)
    known[id(node)] = made
    return made
