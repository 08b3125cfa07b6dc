"""What is looked at in a package: functions that ours stand in for, and what our code calls or reads of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from build_tools.peer_source import Found, Signature, Tree, differences, operators

#: Functions whose absence in ours is worth a word.
_OF_ATTENTION = re.compile(r"attn|attention|mla|metadata")


@dataclass(frozen=True)
class Outcome:
    """What a check looked at, and what it found to differ."""

    tried: str
    found: list[str]


#: A check reads the package's tree and ours.
Check = Callable[[Tree, Tree], Outcome]


def functions(their_module: str, our_module: str, *names: str) -> Check:
    """Signatures of the public functions and classes of a module of ours, and of further names."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        found, count = [], 0
        for name in (*ours.names(our_module), *names):
            there, here = theirs.find(f"{their_module}.{name}"), ours.find(f"{our_module}.{name}")
            pairs = [(name, there, here)]
            if there is not None and here is not None and isinstance(here.node, ast.ClassDef):
                for method in _methods(ours, here):
                    pairs.append((f"{name}.{method}", theirs.member(there, method), ours.member(here, method)))
            for text, left, right in pairs:
                count += 1
                found += [f"{text}: {what}" for what in _compared(theirs, left, ours, right)]
        extra = sorted(set(theirs.names(their_module)) - set(ours.names(our_module)) - set(names))
        found += [f"{name}: not in ours" for name in extra if _OF_ATTENTION.search(name) and name[0] != "_"]
        return Outcome(f"signatures of `{their_module}` ({count})", found)

    return check


def signature(their_name: str, our_name: str, *, aside: tuple[str, ...] = ()) -> Check:
    """One function; ``aside``: parameters of ours that are known to be more."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        found = _compared(theirs, theirs.find(their_name), ours, ours.find(our_name))
        known = [f"`{x}` in ours alone" for x in aside]
        return Outcome(f"`{their_name}`", [text for text in found if text not in known])

    return check


def _methods(ours: Tree, place: Found) -> list[str]:
    """Public methods of a class of ours and of its bases."""
    assert isinstance(place.node, ast.ClassDef)
    found = [x.name for x in place.node.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    for base in ours.bases(place):
        found += [name for name in _methods(ours, base) if name not in found]
    return found


def _compared(theirs: Tree, there: Found | None, ours: Tree, here: Found | None) -> list[str]:
    if there is None or here is None:
        return ["in ours alone" if there is None else "not in ours"]
    left, right = theirs.signature_of(there), ours.signature_of(here)
    # A value, or a class of C: that the name is there is all that the text says.
    return [] if left is None or right is None else differences(left, right)


def needs(what: Mapping[str, Iterable[str]], *, exact: bool = False, text: str = "") -> Check:
    """Names with arguments that they have to take; with ``exact`` no others."""

    def check(theirs: Tree, _: Tree) -> Outcome:
        return Outcome(text or f"{len(what)} interfaces", _missing(theirs, what, exact))

    return check


def _missing(theirs: Tree, what: Mapping[str, Iterable[str]], exact: bool) -> list[str]:
    found = []
    for name, arguments in what.items():
        known = [x for x in arguments if x != "self"]
        made = theirs.signature(name)
        if theirs.find(name) is None:
            found.append(f"`{name}` is not there")
        elif made is None:
            found += [f"`{name}` shows no arguments"] if known else []
        else:
            attributes = [x for x in known if x not in made.names and theirs.find(f"{name}.{x}") is None]
            found += [f"`{name}` without `{x}`" for x in attributes if not made.keywords]
            found += [f"`{name}` with `{x}`" for x in made.names if exact and x not in known]
    return found


def declared(module: str, constants: Mapping[str, str], *, exact: tuple[str, ...] = ()) -> Check:
    """What a module of ours says in constants that it needs: by constant the prefix of its names.

    A value is a mapping from names to arguments, to (module, arguments), or from modules to names in them.
    """

    def check(theirs: Tree, ours: Tree) -> Outcome:
        values, found, count = constants_of(ours, module), [], 0
        for constant, prefix in constants.items():
            what = _interfaces(values[constant], prefix)
            count += len(what)
            found += _missing(theirs, what, constant in exact)
        return Outcome(f"{count} interfaces that `{module}` names", found)

    return check


def _interfaces(value: Any, prefix: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):  # arguments of one function, or fields of one class
        return {prefix: tuple(sorted(value) if isinstance(value, (set, frozenset)) else value)}
    what: dict[str, tuple[str, ...]] = {}
    for name, arguments in value.items():
        if prefix == "*":  # names by module
            what |= {f"{name}.{x}": () for x in arguments}
        elif len(arguments) == 2 and isinstance(arguments[1], tuple):
            what[f"{arguments[0]}.{name}"] = arguments[1]
        else:
            what[prefix + name] = arguments
    return what


def constants_of(ours: Tree, module: str) -> dict[str, Any]:
    """Constants of a module of ours without its imports: a name that is imported has its dotted name as value."""
    source = ours.module(module)
    assert source is not None, module
    values: dict[str, Any] = {"__builtins__": {"frozenset": frozenset}, **imported(source)}
    for statement in source.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            names = [x.id for x in ast.walk(target) if isinstance(x, ast.Name)]
            try:
                # Our own text, which has nothing to call but frozenset.
                value = eval(compile(ast.Expression(statement.value), module, "eval"), values)
            except (NameError, AttributeError, TypeError, ValueError, KeyError):
                continue
            values |= dict(zip(names, value, strict=True)) if len(names) > 1 else {names[0]: value}
    return values


def imported(source: ast.Module) -> dict[str, str]:
    """Dotted names of what a module imports, anywhere in it, by the name that it has there."""
    found: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        elif isinstance(node, ast.Import):
            found |= {x.asname or x.name.split(".")[0]: x.name if x.asname else x.name.split(".")[0]
                      for x in node.names}  # fmt: skip
    return found


def uses(package: str, *rooms: str, aside: str = "") -> Check:
    """Every name that our sources import of a package, or read of its modules; ``aside``: a pattern of others."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        names: set[str] = set()
        for room in rooms:
            for path in sorted(ours.roots[0].joinpath(room).rglob("*.py")):
                names |= used(ast.parse(path.read_text(encoding="utf-8")), package)
        names = {name for name in names if not (aside and re.match(aside, name))}
        missing = [name for name in sorted(names) if not _is_there(theirs, name)]
        return Outcome(f"{len(names)} names in use", [f"`{name}` is not there" for name in missing])

    return check


def _is_there(theirs: Tree, name: str) -> bool:
    """Whether a name leads to something, as far as the text can tell: what a value has, it cannot."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        place = theirs.find(".".join(parts[:size]))
        if place is not None:
            return size == len(parts) or (place.node is not None and not isinstance(place.node, ast.ClassDef))
    return False


def used(source: ast.Module, package: str) -> set[str]:
    """Dotted names below a package that a module imports or reads."""
    names = imported(source)
    found = {name for name in names.values() if name.startswith(f"{package}.")}
    inner = {id(node.value) for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, _, rest = ast.unparse(node).partition(".")
            if re.fullmatch(r"[\w.]+", rest) and root in names and f"{names[root]}.".startswith(f"{package}."):
                found.add(f"{names[root]}.{rest}")
    # A module that is read further is there if what is read is.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def aten(module: str, path: str) -> Check:
    """Operators that the handlers of ``module`` take the place of, by torch's list of them."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        text = next((root / path for root in theirs.roots if (root / path).is_file()), None)
        known = {} if text is None else operators(text.read_text(encoding="utf-8"))
        place, source = ours.find(f"{module}.Handlers"), ours.module(module)
        assert place is not None
        assert source is not None
        found, handlers = [], _handlers(source)
        for operator, method in handlers.items():
            here = ours.member(place, method)
            made = None if here is None else ours.signature_of(here)
            assert made is not None, method
            if operator not in known:
                found.append(f"`aten::{operator}` is not there")
            else:
                found += [f"`aten::{operator}`: {what}" for what in _operands(known[operator], made)]
        return Outcome(f"{len(handlers)} operators of aten", found)

    return check


def _handlers(source: ast.Module) -> dict[str, str]:
    """Methods by the names of the operators, of ``self.functions``."""
    found = {}
    for node in ast.walk(source):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pairs = [(node.targets[0].slice, node.value)]
        for key, value in pairs:
            if isinstance(key, ast.Constant) and isinstance(value, ast.Attribute) and value.attr.startswith("_"):
                found[str(key.value)] = value.attr
    return found


def _operands(operator: Signature, method: Signature) -> list[str]:
    """Operands by position have to be the method's behind the set of keys, those by keyword among its own or taken."""
    by_position = [x.name for x in operator.parameters if not x.kind]
    own = [x.name for x in method.parameters if not x.kind][1:]
    found = [] if by_position == own else [f"({', '.join(by_position)}) in place of ({', '.join(own)})"]
    by_keyword = [x for x in operator.parameters if x.kind]
    return found + [f"`{x}` refused" for x in by_keyword if x.name not in method.names and not method.keywords]


def keywords(what: str, call: str, files: str, known: Callable[[Tree], Iterable[str]]) -> Check:
    """Keywords that functions of a package pass to ``call``: those that ours do not know."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        there: dict[str, int] = {}
        for root in theirs.roots:
            for path in sorted(root.glob(files)):
                text = path.read_text(encoding="utf-8")
                for node in ast.walk(ast.parse(text, str(path))) if f"{call}(" in text else ():
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == call:
                        for keyword in node.keywords:
                            if keyword.arg is not None:
                                there[keyword.arg] = there.get(keyword.arg, 0) + 1
        taken = set(known(ours))
        new = [f"`{name}` is not known ({count} calls)" for name, count in sorted(there.items()) if name not in taken]
        return Outcome(f"{len(there)} keywords of {what}", new if there else [f"no call of `{call}`"])

    return check


def entries(their_name: str, our_name: str) -> Check:
    """Keys of the dictionary of arguments that a function makes: ours that the function of ours does not name."""

    def check(theirs: Tree, ours: Tree) -> Outcome:
        place, made = theirs.find(their_name), _inner(ours, our_name)
        if place is None or place.node is None:
            return Outcome(f"`{their_name}`", ["it is not there"])
        keys = {
            str(key.value) for node in ast.walk(place.node) if isinstance(node, ast.Dict) for key in node.keys
            if isinstance(key, ast.Constant)
        }  # fmt: skip
        new = [f"`{key}` is dropped" for key in sorted(keys - set(made))]
        return Outcome(f"{len(keys)} arguments of `{their_name}`", new if keys else ["it makes no arguments"])

    return check


def _inner(ours: Tree, name: str) -> tuple[str, ...]:
    """Parameters of a function within a function."""
    outer, _, inner = name.rpartition(".")
    place = ours.find(outer)
    assert place is not None
    assert place.node is not None
    nodes = [x for x in ast.walk(place.node) if isinstance(x, ast.FunctionDef) and x.name == inner]
    return tuple(argument.arg for argument in (*nodes[0].args.args, *nodes[0].args.kwonlyargs))
