"""How long functions are: of Python by its syntax tree, of device code by its braces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Comments, strings, characters and directives of device code, whose braces are none.
_NO_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)+'|^[ \t]*\#(?:[^\n\\]|\\.)*""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
#: What stands before a function's body: arguments or a constructor's last initializer, qualifiers, a result type.
_HEAD = re.compile(r"[)}]\s*(?:const\b\s*|noexcept\b\s*)*(?:->[^;{}()]*)?$")
#: A constructor up to a member that braces initialize.
_INITIALIZER = re.compile(r"\)\s*:(?!:)[^;]*\w$", re.DOTALL)
#: The name before the first list of arguments that is not an attribute's; of a specialization, with its own arguments.
_NAME = re.compile(
    r"\b(?!__launch_bounds__|alignas|decltype)(operator\s*\(\)|operator[^\w(][^(]*|[A-Za-z_]\w*(?:<[^<>()]*>)?)\s*\("
)


class Function(NamedTuple):
    """One function: where it begins, decorators and template arguments included, and its lines up to the last brace."""

    name: str
    line: int
    lines: int


def python_functions(text: str) -> list[Function]:
    """Return the functions and methods of a Python file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append(Function(node.name, first, (node.end_lineno or node.lineno) - first + 1))
    return found


def device_functions(text: str) -> list[Function]:
    """Return the functions of a file of CUDA C++. Lambdas are lines of the function that they stand in."""
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    return list(_outermost(code))


def _outermost(code: str) -> Iterator[Function]:
    open_braces: list[Function | None] = []  # of a function, or of a scope or a block that is none
    inside = False  # a function
    parentheses = head_at = 0
    in_initializer = 0  # how many braces deep
    for match in re.finditer(r"[{}();]", code):
        mark, at = match.group(), match.start()
        if mark in "()":
            parentheses += 1 if mark == "(" else -1
        elif in_initializer:
            in_initializer += {"{": 1, "}": -1}.get(mark, 0)
        elif parentheses and not inside:
            continue  # an argument's default
        elif mark == "{":
            head = code[head_at:at].strip()
            if not inside and _INITIALIZER.search(head):
                in_initializer = 1
                continue
            name = _NAME.search(head)
            if not inside and name is not None and _HEAD.search(head):
                start = head_at + len(code[head_at:at]) - len(code[head_at:at].lstrip())
                open_braces.append(Function(name.group(1), code.count("\n", 0, start) + 1, 0))
                inside = True
            else:
                open_braces.append(None)
            head_at = at + 1
        elif mark == "}":
            function = open_braces.pop()
            if function is not None:
                inside = False
                yield function._replace(lines=code.count("\n", 0, at) + 2 - function.line)
            head_at = at + 1
        else:
            head_at = at + 1
