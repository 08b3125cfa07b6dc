"""Names and signatures of packages by their source text: nothing of them is imported or run.

A `Tree` finds what a dotted name leads to, through re-exports, aliases and base classes. What a package makes at run
time only (``setattr``, modules in C without a stub) is not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Re-exports that are followed for one name.
_DEPTH = 20


@dataclass(frozen=True)
class Found:
    """What a name leads to: a module, or a node in one. ``node`` is None for a module itself."""

    module: str
    node: ast.AST | None
    tree: Tree


@dataclass(frozen=True)
class Parameter:
    """One of a signature: kind is "" for a plain one, "*" for by keyword only, "/" by position only, or the star."""

    name: str
    default: str | None
    kind: str = ""

    def __str__(self) -> str:
        return self.name if self.default is None else f"{self.name}={self.default}"


@dataclass(frozen=True)
class Signature:
    """Parameters without self and cls, ``*args`` and ``**kwargs`` apart."""

    parameters: tuple[Parameter, ...]
    star: str | None = None
    keywords: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(parameter.name for parameter in self.parameters)


class Tree:
    """Packages below folders, the first of which wins."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots
        self.module = cache(self._module)
        self.bindings = cache(self._bindings)

    def _path(self, name: str) -> Path | None:
        for root in self.roots:
            base = root.joinpath(*name.split("."))
            for path in (base / "__init__.py", base.with_name(base.name + ".py"), base / "__init__.pyi",
                         base.with_name(base.name + ".pyi")):  # fmt: skip
                if path.is_file():
                    return path
        return None

    def is_package(self, name: str) -> bool:
        """Whether a module is a folder."""
        path = self._path(name)
        return path is not None and path.stem == "__init__"

    def _module(self, name: str) -> ast.Module | None:
        path = self._path(name)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8", errors="replace"), str(path))

    def _bindings(self, module: str) -> dict[str, ast.AST]:
        """What the statements of a module bind, the last one where several do."""
        found = self.module(module)
        return {} if found is None else dict(_bound(found.body))

    def find(self, dotted: str, depth: int = _DEPTH) -> Found | None:
        """What a dotted name leads to; None where it leads to nothing that the text shows."""
        parts = dotted.split(".")
        for size in range(len(parts), 0, -1):
            module = ".".join(parts[:size])
            if self.module(module) is not None:
                place: Found | None = Found(module, None, self)
                for part in parts[size:]:
                    place = None if place is None else self._inside(place, part, depth)
                return place
        return None

    def _inside(self, place: Found, name: str, depth: int) -> Found | None:
        if depth == 0:
            return None
        if place.node is None:
            return self._of_module(place.module, name, depth)
        if isinstance(place.node, ast.ClassDef):
            return self._of_class(place, name, depth)
        return None

    def _of_module(self, module: str, name: str, depth: int) -> Found | None:
        node = self.bindings(module).get(name)
        if node is not None:
            return self._followed(module, node, name, depth)
        for statement in self._stars(module):
            found = self.find(f"{self._target(module, statement)}.{name}", depth - 1)
            if found is not None:
                return found
        child = f"{module}.{name}"
        return None if self.module(child) is None else Found(child, None, self)

    def _stars(self, module: str) -> Iterator[ast.ImportFrom]:
        found = self.module(module)
        for statement in [] if found is None else _flat(found.body):
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                yield statement

    def _target(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a ``from`` names."""
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + self.is_package(module)]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def _followed(self, module: str, node: ast.AST, name: str, depth: int) -> Found | None:
        """The end of re-exports and aliases."""
        if isinstance(node, ast.ImportFrom):
            original = next(x.name for x in node.names if (x.asname or x.name) == name)
            target = self._target(module, node)
            if target == module:  # ``from . import child``
                child = f"{module}.{original}"
                return None if self.module(child) is None else Found(child, None, self)
            # What another package has is there for what the text can tell.
            return self.find(f"{target}.{original}", depth - 1) or self._foreign(module, target, node)
        if isinstance(node, ast.Import):
            original = next(x.name if x.asname else x.name.split(".")[0] for x in node.names
                            if (x.asname or x.name.split(".")[0]) == name)  # fmt: skip
            return self.find(original, depth - 1) or self._foreign(module, original, node)
        value = getattr(node, "value", None) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("functools.partial", "partial") and value.args:
            value = value.args[0]
        if isinstance(value, (ast.Name, ast.Attribute)) and depth:
            alias = self._chain(module, ast.unparse(value), depth - 1)
            if alias is not None:
                return alias
        return Found(module, node, self)

    def _foreign(self, module: str, target: str, node: ast.AST) -> Found | None:
        return None if target.split(".")[0] == module.split(".")[0] else Found(module, node, self)

    def _chain(self, module: str, dotted: str, depth: int) -> Found | None:
        """A dotted expression as a module reads it."""
        place: Found | None = Found(module, None, self)
        for part in dotted.split("."):
            place = None if place is None else self._inside(place, part, depth)
        return place

    def _of_class(self, place: Found, name: str, depth: int) -> Found | None:
        assert isinstance(place.node, ast.ClassDef)
        node = dict(_bound(place.node.body)).get(name)
        if node is None:
            node = next((x for x in _attributes(place.node) if x.attr == name), None)
        if node is not None:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign) else None
            if isinstance(value, ast.Name) and value.id != name:
                return self._inside(place, value.id, depth - 1) or Found(place.module, node, self)
            return Found(place.module, node, self)
        for base in self.bases(place, depth):
            found = self._inside(base, name, depth - 1)
            if found is not None:
                return found
        return None

    def bases(self, place: Found, depth: int = _DEPTH) -> list[Found]:
        """Base classes and metaclasses whose text is there."""
        assert isinstance(place.node, ast.ClassDef)
        metaclasses = [x.value for x in place.node.keywords if x.arg == "metaclass"]
        names = [ast.unparse(base).partition("[")[0] for base in (*place.node.bases, *metaclasses)]
        found = [self._chain(place.module, name, depth - 1) for name in names]
        return [base for base in found if base is not None and isinstance(base.node, ast.ClassDef)]

    def signature(self, dotted: str) -> Signature | None:
        """Of a function, or of a class's making; None where there is none, or the text does not show it."""
        place = self.find(dotted)
        return None if place is None else self.signature_of(place)

    def member(self, place: Found, name: str) -> Found | None:
        """What a module or class has by a name."""
        return self._inside(place, name, _DEPTH)

    def signature_of(self, place: Found) -> Signature | None:
        """`signature` of what has been found."""
        node = place.node
        if isinstance(node, _Function):
            return _of_function(node)
        if not isinstance(node, ast.ClassDef):
            return None
        own = dict(_bound(node.body)).get("__init__")
        if own is not None:
            return _of_function(own) if isinstance(own, _Function) else None
        if _has_fields(node):
            return Signature(tuple(self._fields(place).values()))
        of_bases = [self.signature_of(base) for base in self.bases(place)]
        return next((made for made in of_bases if made is not None), None)

    def _fields(self, place: Found) -> dict[str, Parameter]:
        """Of a dataclass or NamedTuple, those of its bases first."""
        assert isinstance(place.node, ast.ClassDef)
        fields: dict[str, Parameter] = {}
        for base in reversed(self.bases(place)):
            fields |= self._fields(base)
        for statement in place.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if "ClassVar" not in ast.unparse(statement.annotation):
                value = None if statement.value is None else ast.unparse(statement.value)
                fields[statement.target.id] = Parameter(statement.target.id, value)
        return fields

    def names(self, module: str) -> list[str]:
        """Public names of a module: ``__all__``, or else the functions that it defines."""
        bound = self.bindings(module)
        listed = bound.get("__all__")
        if isinstance(listed, ast.Assign) and isinstance(listed.value, (ast.List, ast.Tuple)):
            return [x.value for x in listed.value.elts if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        return [name for name, node in bound.items() if isinstance(node, _Function) and not name.startswith("_")]


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those below ``if``, ``try`` and ``with`` among them."""
    for statement in body:
        yield statement
        if isinstance(statement, (ast.If, ast.Try, ast.With)):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, part, []):
                    yield from _flat(inner.body) if isinstance(inner, ast.ExceptHandler) else _flat([inner])


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements bind; a function that is there wins over one that an ``except`` puts in its place."""
    seen: dict[str, ast.AST] = {}
    for statement in _flat(body):
        if isinstance(statement, (*_Function, ast.ClassDef)):
            if not any(ast.unparse(x).endswith("overload") for x in statement.decorator_list):
                seen[statement.name] = statement
            seen.setdefault(statement.name, statement)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                of_import = isinstance(statement, ast.Import) and not alias.asname
                seen[alias.name.split(".")[0] if of_import else alias.asname or alias.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                for name in ast.walk(target):
                    if not isinstance(name, ast.Name) or not isinstance(name.ctx, ast.Store):
                        continue
                    if not _is_nothing(statement, seen.get(name.id)):
                        seen[name.id] = statement
    yield from seen.items()


def _is_nothing(statement: ast.Assign | ast.AnnAssign, before: ast.AST | None) -> bool:
    """``name = None`` behind what was imported under that name."""
    return before is not None and isinstance(statement.value, ast.Constant) and statement.value.value is None


def _attributes(node: ast.ClassDef) -> Iterator[ast.Attribute]:
    """``self.name`` that methods assign to."""
    for function in node.body:
        for inner in ast.walk(function) if isinstance(function, _Function) else ():
            if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
                continue
            if ast.unparse(inner.value) == "self":
                yield inner


def _has_fields(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(x) for x in node.decorator_list]
    return any("dataclass" in x for x in decorators) or any("NamedTuple" in ast.unparse(x) for x in node.bases)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    arguments = node.args
    plain = [*((x, "/") for x in arguments.posonlyargs), *((x, "") for x in arguments.args)]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(x) for x in arguments.defaults]
    found = [Parameter(x.arg, default, kind) for (x, kind), default in zip(plain, defaults, strict=True)]
    if found and found[0].name in ("self", "cls"):
        found = found[1:]
    for x, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(x.arg, None if value is None else ast.unparse(value), "*"))
    star, options = arguments.vararg, arguments.kwarg
    return Signature(tuple(found), None if star is None else star.arg, None if options is None else options.arg)


def differences(theirs: Signature, ours: Signature) -> list[str]:
    """How ours differs, a text each; empty where a call of theirs means the same to ours."""
    found = []
    known = {x.name: x for x in ours.parameters}
    there = {x.name: x for x in theirs.parameters}
    for x in theirs.parameters:
        if x.name not in known and ours.star and x.kind != "*":
            continue
        if x.name not in known:
            what = f"swallowed by **{ours.keywords}" if ours.keywords else "refused"
            found.append(f"`{x}` {what}")
        elif known[x.name].default != x.default:
            found.append(f"`{x}` is `{known[x.name]}` in ours")
        elif known[x.name].kind == "*" != x.kind:
            found.append(f"`{x.name}` by keyword only in ours")
    if not theirs.keywords:
        found += [f"`{x}` in ours alone" for x in ours.parameters if x.name not in there]
    both = [name for name in there if name in known and "*" not in (there[name].kind, known[name].kind)]
    return found + ["another order"] * (both != [name for name in known if name in both])


def operators(text: str) -> Mapping[str, Signature]:
    """Signatures of aten's operators by name, of the text of native_functions.yaml."""
    found = {}
    for name, arguments in re.findall(r"^- func: ([\w.]+)\((.*?)\) ->", text, re.MULTILINE):
        parameters, kind = [], ""
        for part in re.findall(r"(?:[^,\[(]|\[[^\]]*\]|\([^)]*\))+", arguments):
            if part.strip() == "*":
                kind = "*"
                continue
            declared, _, default = part.partition("=")
            parameters.append(Parameter(declared.split()[-1], default or None, kind))
        found[name] = Signature(tuple(parameters))
    return found
