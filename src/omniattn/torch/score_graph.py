"""Expressions over a score as a graph: what a traced function computes, and its derivative by the score.

A node has a kind: ``"b"`` (bool), ``"i"`` (int32), ``"l"`` (int64) or ``"f"`` (float32). Kinds of two operands meet as
torch's do. Python's rules hold where C++ has others: ``/`` divides floats, ``//`` and ``%`` round to minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

Number = bool | int | float
KINDS = "bilf"
#: Arguments of a function of a score, with their kinds.
PLACES = {"score": "f", "b": "i", "h": "i", "q": "i", "k": "i"}
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
#: What may leave 8 bits.
_WRAPPING = frozenset(("add", "sub", "mul", "neg", "inv", "shl", "abs"))
#: Added to a position, this or more may leave 32 bits.
_MAY_WRAP = 2**30
#: Arithmetic of two bools, by what it is of their bits.
_OF_BOOLS = {"add": "or", "mul": "and", "min": "and", "max": "or"}


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on other nodes.

    Attributes
    ----------
    op : str
        ``"place"`` (an argument), ``"const"``, ``"load"`` (an element of an array), ``"where"``, or a function's name.
    args : tuple of Node
    kind : str
    value : number, str or int
        Of ``"const"`` the number, of ``"place"`` its name, of ``"load"`` the array's number.
    least : bool
        Known to be 0 or more.
    uses_score : bool
        Its value depends on the score.
    narrow : bool
        Made of 8-bit integers and constants alone: torch computes it in 8 bits.
    """

    op: str
    args: tuple[Node, ...]
    kind: str
    value: Number | str | None = None
    least: bool = False
    uses_score: bool = False
    narrow: bool = False


def place(name: str) -> Node:
    """An argument of the function."""
    return Node("place", (), PLACES[name], name, name != "score", name == "score")


def const(value: Number) -> Node:
    """A number."""
    kind = "b" if isinstance(value, bool) else "f" if isinstance(value, float) else "i"
    if kind == "i" and not -(2**31) <= value < 2**31:
        kind = "l"
    return Node("const", (), kind, value, not math.isnan(value) and value >= 0)


def load(array: int, kind: str, indices: tuple[Node, ...], narrow: bool = False) -> Node:
    """An element of an array; narrow: of 8-bit integers."""
    return Node("load", indices, kind, array, kind == "b", any(i.uses_score for i in indices), narrow)


def _is(node: Node, value: Number) -> bool:
    return node.op == "const" and node.value == value


def _made(op: str, *args: Node, kind: str, least: bool = False) -> Node:
    numbers = [x for x in args if x.op != "const" and x.kind != "b"]
    narrow = kind == "i" and bool(numbers) and all(x.narrow for x in numbers)
    if narrow and op in _WRAPPING:
        raise ValueError("int8 and uint8 alone, whose results wrap around; .int() makes them int32")
    return Node(op, args, kind, None, least, any(x.uses_score for x in args), narrow)


def cast(x: Node, kind: str) -> Node:
    """``x`` as another kind; floats to ints are cut off, as C and torch do."""
    if x.kind == kind:
        return x
    if x.op == "const":
        number: Number = x.value  # type: ignore[assignment]
        if kind in "il" and not math.isfinite(number):
            raise ValueError(f"{number} as an integer")
        made = const(bool(number) if kind == "b" else float(number) if kind == "f" else int(number))
        return made if made.kind == kind else Node("const", (), kind, made.value, made.least)
    return _made("cast", x, kind=kind, least=x.least or kind == "b")


def widened(x: Node) -> Node:
    """``x``, an 8-bit integer as an int32."""
    return replace(x, narrow=False) if x.narrow else x


def numeric(x: Node) -> Node:
    """A bool as an int."""
    return cast(x, "i") if x.kind == "b" else x


def together(*given: Node, least: str = "b") -> tuple[Node, ...]:
    """Nodes of one kind: the widest of theirs, at least ``least``."""
    kind = max((x.kind for x in given), key=KINDS.index)
    kind = max(kind, least, key=KINDS.index)
    return tuple(cast(x, kind) for x in given)


def arithmetic(op: str, a: Node, b: Node) -> Node:
    """``add``, ``sub``, ``mul``, ``min`` or ``max``; of two bools what torch makes of them, a bool."""
    if a.kind == b.kind == "b":
        if op not in _OF_BOOLS:
            raise ValueError("a difference of bools")
        return logical(_OF_BOOLS[op], a, b)
    a, b = together(a, b, least="i")
    if op in ("add", "mul") and a.op == "const" and b.op != "const":
        a, b = b, a
    # Neither changes a NaN or an infinity: 0 is added, 1 multiplies.
    if (op in ("add", "sub") and _is(b, 0)) or (op == "mul" and _is(b, 1)):
        return a
    if op == "mul" and _is(b, -1):
        return negative(a)
    least = a.least and b.least if op != "sub" else False
    if op == "max":
        least = a.least or b.least
    if a.kind != "f" and (op == "mul" or (op == "add" and b.op == "const" and b.value >= _MAY_WRAP)):  # type: ignore[operator]
        least = False  # it may wrap around
    return _made(op, a, b, kind=a.kind, least=least)


def negative(a: Node) -> Node:
    """-a."""
    a = numeric(a)
    if a.op == "const":
        return const(-a.value)  # type: ignore[operator]
    return a.args[0] if a.op == "neg" else _made("neg", a, kind=a.kind)


def divide(a: Node, b: Node) -> Node:
    """True division, of floats."""
    a, b = cast(a, "f"), cast(b, "f")
    return a if _is(b, 1.0) else _made("div", a, b, kind="f", least=a.least and b.least)


def floor_divide(a: Node, b: Node) -> Node:
    """Division that rounds to minus infinity."""
    a, b = together(a, b, least="i")
    if a.kind != "f":
        return _made("floordiv", a, b, kind=a.kind, least=a.least and b.least)
    # As torch does it: the floor of a quotient, which is rounded, may be one too many.
    rest = _made("fmod", a, b, kind="f", least=a.least)
    quotient = unary("round", divide(arithmetic("sub", a, rest), b))
    less = _has_other_sign(rest, b)
    if less is not None:
        quotient = where(less, arithmetic("sub", quotient, const(1.0)), quotient)
    return quotient if b.op == "const" and b.value else where(compare("eq", b, const(0.0)), divide(a, b), quotient)


def modulo(a: Node, b: Node) -> Node:
    """The remainder of `floor_divide`: it has the divisor's sign."""
    a, b = together(a, b, least="i")
    if a.kind != "f":
        return _made("mod", a, b, kind=a.kind, least=b.least)
    rest = _made("fmod", a, b, kind="f", least=a.least)
    less = _has_other_sign(rest, b)
    return rest if less is None else where(less, arithmetic("add", rest, b), rest)


def _has_other_sign(rest: Node, divisor: Node) -> Node | None:
    """Whether a remainder that is not 0 has another sign than the divisor; None: never."""
    if divisor.least:
        return None if rest.least else compare("lt", rest, const(0.0))
    if divisor.op == "const":
        return compare("gt", rest, const(0.0))
    signs = (compare("lt", x, const(0.0)) for x in (rest, divisor))
    return logical("and", compare("ne", rest, const(0.0)), logical("xor", *signs))


def power(a: Node, b: Node) -> Node:
    """a to the power of b; small whole exponents are products."""
    if b.op == "const" and float(b.value or 0) in (0.0, 1.0, 2.0, 3.0, 4.0):
        a = cast(a, "f") if b.kind == "f" else numeric(a)
        made = cast(const(1), a.kind)
        for _ in range(int(b.value or 0)):
            made = arithmetic("mul", made, a)
        return made
    if b.op == "const" and float(b.value or 0) == 0.5:
        return unary("sqrt", a)
    if "f" not in (a.kind, b.kind):
        raise ValueError("an integer to the power of an integer that is no constant from 0 to 4")
    return _made("pow", cast(a, "f"), cast(b, "f"), kind="f")


def compare(op: str, a: Node, b: Node) -> Node:
    """A bool of two numbers."""
    return _made(op, *together(a, b), kind="b", least=True)


def logical(op: str, a: Node, b: Node) -> Node:
    """``and``, ``or`` or ``xor`` of bools, or of the bits of ints."""
    a, b = together(a, b)
    if a.kind == "f":
        raise ValueError("bits of floats")
    if a.kind == "b" and op in ("and", "or"):
        for x, other in ((a, b), (b, a)):
            if x.op == "const":
                return other if bool(x.value) == (op == "and") else x
    return _made(op, a, b, kind=a.kind, least=a.kind == "b" or (a.least and b.least))


def invert(a: Node) -> Node:
    """Not of a bool, or of the bits of an int."""
    if a.kind == "f":
        raise ValueError("bits of floats")
    if a.op == "const" and a.kind == "b":
        return const(not a.value)
    return _made("not" if a.kind == "b" else "inv", a, kind=a.kind, least=a.kind == "b")


def shift(op: str, a: Node, b: Node) -> Node:
    """``shl`` or ``shr`` of ints."""
    a, b = together(a, b, least="i")
    if a.kind == "f":
        raise ValueError("bits of floats")
    return _made(op, a, b, kind=a.kind, least=op == "shr" and a.least)


def where(condition: Node, a: Node, b: Node) -> Node:
    """a where the condition holds, else b."""
    a, b = together(a, b)
    condition = cast(condition, "b")
    if condition.op == "const":
        return a if condition.value else b
    return _made("where", condition, a, b, kind=a.kind, least=a.least and b.least)


#: Functions of a float. Of ints only "abs", "sign" and those that round, which leave them as they are.
UNARY = frozenset(
    ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh",
     "tanh", "asinh", "atan", "erf", "floor", "ceil", "trunc", "round", "abs", "sign")
)  # fmt: skip
_ROUNDING = frozenset(("floor", "ceil", "trunc", "round"))


def unary(op: str, a: Node) -> Node:
    """A function of `UNARY`."""
    a = numeric(a)
    if a.kind != "f" and op in _ROUNDING:
        return a
    if op not in ("abs", "sign"):
        a = cast(a, "f")
    if op == "abs" and a.least:
        return a
    return _made(op, a, kind=a.kind, least=op in ("abs", "exp", "exp2", "sqrt", "cosh"))


def relu(a: Node) -> Node:
    """a where it is more than 0, or NaN. By the minimum of `_of_limit` its derivative at 0 would be 1; torch's is 0."""
    a = numeric(a)
    zero = cast(const(0), a.kind)
    return a if a.least else replace(where(compare("le", a, zero), zero, a), least=True)


def sigmoid(a: Node) -> Node:
    """1 / (1 + exp(-a))."""
    return divide(const(1.0), arithmetic("add", unary("exp", negative(cast(a, "f"))), const(1.0)))


def derivative(x: Node) -> Node | None:
    """The derivative by the score; None where it is 0 everywhere."""
    return _derivative(x, {})


def _derivative(x: Node, known: dict[int, Node | None]) -> Node | None:
    if not x.uses_score or x.kind != "f":
        return None
    if id(x) not in known:
        if x.op == "place":
            known[id(x)] = const(1.0)
        else:
            rule = _RULES.get(x.op)
            inner = tuple(_derivative(a, known) for a in x.args)
            known[id(x)] = None if rule is None or not any(inner) else rule(x, x.args, inner)
    return known[id(x)]


Inner = tuple[Node | None, ...]


def _times(factor: Node, inner: Node | None) -> Node | None:
    return None if inner is None else arithmetic("mul", inner, factor)


def _sum(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None:
        return a or b
    return arithmetic("add", a, b)


def _chosen(condition: Node, a: Node | None, b: Node | None) -> Node:
    zero = const(0.0)
    return where(condition, a or zero, b or zero)


def _of_sub(x: Node, args: tuple[Node, ...], d: Inner) -> Node | None:
    return _sum(d[0], None if d[1] is None else negative(d[1]))


def _of_div(x: Node, args: tuple[Node, ...], d: Inner) -> Node | None:
    a = None if d[0] is None else divide(d[0], args[1])
    b = None if d[1] is None else negative(divide(arithmetic("mul", d[1], x), args[1]))
    return _sum(a, b)


def _of_pow(x: Node, args: tuple[Node, ...], d: Inner) -> Node | None:
    # What is constant at a zero, as torch has it: an infinity times 0 is none.
    a, b = args
    zero = const(0.0)
    less = arithmetic("mul", power(a, arithmetic("sub", b, const(1.0))), b)
    if b.op != "const":
        less = where(compare("eq", b, zero), zero, less)
    flat = logical("and", compare("eq", a, zero), compare("ge", b, zero))
    by_exponent = where(flat, zero, arithmetic("mul", x, unary("log", a)))
    return _sum(_times(less, d[0]), _times(by_exponent, d[1]))


def _of_fmod(x: Node, args: tuple[Node, ...], d: Inner) -> Node | None:
    by_divisor = None if d[1] is None else negative(arithmetic("mul", unary("trunc", divide(*args)), d[1]))
    return _sum(d[0], by_divisor)


def _of_limit(x: Node, args: tuple[Node, ...], d: Inner) -> Node | None:
    # Where both are equal a limit that is a constant lets the gradient pass, as torch's clamp does.
    op = "ge" if x.op == "max" else "le"
    return _chosen(compare(op, *args), *d)


def _by(factor: Callable[[Node, Node], Node]) -> Callable[[Node, tuple[Node, ...], Inner], Node | None]:
    """The rule of a function of one argument: its derivative from the result and the argument."""
    return lambda x, args, d: _times(factor(x, args[0]), d[0])


def _one_minus(a: Node) -> Node:
    return arithmetic("sub", const(1.0), a)


def _square(a: Node) -> Node:
    return arithmetic("mul", a, a)


_RULES: dict[str, Callable[[Node, tuple[Node, ...], Inner], Node | None]] = {
    "add": lambda x, args, d: _sum(d[0], d[1]),
    "sub": _of_sub,
    "mul": lambda x, args, d: _sum(_times(args[1], d[0]), _times(args[0], d[1])),
    "div": _of_div,
    "pow": _of_pow,
    "fmod": _of_fmod,
    "neg": lambda x, args, d: None if d[0] is None else negative(d[0]),
    "min": _of_limit,
    "max": _of_limit,
    "where": lambda x, args, d: _chosen(args[0], d[1], d[2]),
    "abs": _by(lambda x, a: unary("sign", a)),
    "exp": _by(lambda x, a: x),
    "exp2": _by(lambda x, a: arithmetic("mul", x, const(math.log(2.0)))),
    "expm1": _by(lambda x, a: arithmetic("add", x, const(1.0))),
    "log": _by(lambda x, a: divide(const(1.0), a)),
    "log2": _by(lambda x, a: divide(const(1.0 / math.log(2.0)), a)),
    "log10": _by(lambda x, a: divide(const(1.0 / math.log(10.0)), a)),
    "log1p": _by(lambda x, a: divide(const(1.0), arithmetic("add", a, const(1.0)))),
    "sqrt": _by(lambda x, a: divide(const(0.5), x)),
    "rsqrt": _by(lambda x, a: divide(arithmetic("mul", x, const(-0.5)), a)),
    "sin": _by(lambda x, a: unary("cos", a)),
    "cos": _by(lambda x, a: negative(unary("sin", a))),
    "tan": _by(lambda x, a: arithmetic("add", _square(x), const(1.0))),
    "sinh": _by(lambda x, a: unary("cosh", a)),
    "cosh": _by(lambda x, a: unary("sinh", a)),
    "tanh": _by(lambda x, a: _one_minus(_square(x))),
    "asinh": _by(lambda x, a: unary("rsqrt", arithmetic("add", _square(a), const(1.0)))),
    "atan": _by(lambda x, a: divide(const(1.0), arithmetic("add", _square(a), const(1.0)))),
    "erf": _by(lambda x, a: arithmetic("mul", unary("exp", negative(_square(a))), const(2.0 / math.sqrt(math.pi)))),
}
