"""The order of the package's rooms, and the imports that break it: ``python -m build_tools.house``.

A room is a folder of ``src/omniattn``, or a module beside them. Imports point from a room to those below it: a call
goes down from ops to runtime. Modules never import each other in a circle.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "omniattn"

#: Rooms from bottom to top. A room may import those of the rows below its own, not its neighbours in the row. The
#: longest name that fits a module counts: ``kv.formats`` is a room of its own. The package's name means ``__init__``.
ROOMS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "data"),
    ("registry",),
    ("kv.formats",),
    ("kv.layout",),
    ("problems",),
    ("runtime",),
    ("arrays",),
    ("arguments",),
    ("kv",),
    ("reference", "launch", "select"),
    ("plan",),
    ("checks",),
    ("frameworks",),
    ("ops",),
    (PACKAGE,),
    ("torch", "jax"),
    ("compat", "integrations", "distributed"),
    ("testing",),
    ("bench",),
    ("tune",),
    ("cli",),
    ("__main__",),
)
#: Imports that climb, at most. Each is one too many; a new one needs a reason that the reviewer believes.
MAX_CLIMBING = 0


@dataclass(frozen=True, order=True)
class Import:
    """One module that imports another.

    Attributes
    ----------
    source, target : str
        Modules by their full names.
    line : int
        Of the first such import, wherever it stands: inside a function it is an import too.
    for_types : bool
        True if it is never executed (``if TYPE_CHECKING``).
    """

    source: str
    target: str
    line: int
    for_types: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}{' (for types)' if self.for_types else ''}"


def modules(folder: Path, package: str = PACKAGE) -> dict[str, Path]:
    """Return the modules of a package by name, from its folder."""
    found = {}
    for path in sorted(folder.glob("**/*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports(folder: Path, package: str = PACKAGE) -> list[Import]:
    """Return who imports whom inside a package; one that is executed counts before one for types."""
    known = modules(folder, package)
    found: dict[tuple[str, str], Import] = {}
    for name, path in known.items():
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for statement, for_types in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            for target in _targets(statement, home, known):
                one = Import(name, target, statement.lineno, for_types)
                held = found.get((name, target))
                if target != name and (held is None or (held.for_types and not for_types)):
                    found[name, target] = one
    return sorted(found.values())


def _statements(node: ast.AST, for_types: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All import statements below ``node``, and whether a type checker alone sees them."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node, for_types
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for guarded in node.body:
            yield from _statements(guarded, True)
        for other in node.orelse:
            yield from _statements(other, for_types)
        return
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, for_types)


def _targets(statement: ast.Import | ast.ImportFrom, home: str, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that a statement in ``home`` names."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in known)
        return
    base = statement.module or ""
    if statement.level:
        parts = home.split(".")
        base = ".".join([*parts[: len(parts) - statement.level + 1], *filter(None, [statement.module])])
    for alias in statement.names:
        inner = f"{base}.{alias.name}"
        if inner in known or base in known:
            yield inner if inner in known else base


def circles(found: Iterable[Import]) -> list[list[str]]:
    """Return the groups of modules that import each other round, by Tarjan's algorithm; imports for types count too."""
    edges: dict[str, list[str]] = {}
    for one in found:
        edges.setdefault(one.source, []).append(one.target)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in edges.get(node, []):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return sorted(groups)


def room(module: str, package: str = PACKAGE, rooms: Sequence[Sequence[str]] = ROOMS) -> tuple[int, str] | None:
    """Return a module's row, from the bottom, and its room; None if it has none."""
    inside = module.removeprefix(package).removeprefix(".") or package
    places = [
        (len(name), row, name)
        for row, names in enumerate(rooms)
        for name in names
        if inside == name or inside.startswith(f"{name}.")
    ]
    return max(places)[1:] if places else None


def climbing(found: Iterable[Import], package: str = PACKAGE, rooms: Sequence[Sequence[str]] = ROOMS) -> list[Import]:
    """Return the imports of a room above, of a neighbour, or of a module that has no room."""
    bad = []
    for one in found:
        source, target = room(one.source, package, rooms), room(one.target, package, rooms)
        if source is None or target is None or (source[1] != target[1] and source[0] <= target[0]):
            bad.append(one)
    return bad


def unplaced(names: Iterable[str], package: str = PACKAGE, rooms: Sequence[Sequence[str]] = ROOMS) -> list[str]:
    """Return the modules that belong to no room."""
    return [name for name in names if room(name, package, rooms) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: print circles, climbing imports and modules without a room; fail where the rule is broken."""
    argparse.ArgumentParser(prog="python -m build_tools.house", description=__doc__).parse_args(argv)
    folder = ROOT / "src" / PACKAGE
    found = imports(folder)
    rings, up, strays = circles(found), climbing(found), unplaced(modules(folder))
    for ring in rings:
        print("circle:", ", ".join(ring))
    for one in up:
        print("climbs:", one)
    for name in strays:
        print("in no room:", name)
    executed = [one for one in up if not one.for_types]
    allowed = f"{len(executed)} climbing imports (at most {MAX_CLIMBING})"
    print(f"{len(rings)} circles, {allowed}, {len(up) - len(executed)} for types")
    return 0 if not rings and not strays and len(executed) <= MAX_CLIMBING else 1


if __name__ == "__main__":
    raise SystemExit(main())
