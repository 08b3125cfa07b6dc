"""The code of a source file without its comments, docstrings and layout: what a digest of code is made of."""

from __future__ import annotations

import ast
import re

#: Tokens of device code, the first match counts. Comments and line continuations have no group, so they leave nothing.
_DEVICE = re.compile(
    r"""
      (?://(?:[^\\\n]|\\.)*|/\*.*?\*/|\\\n)
    | (?P<newline>\n)
    | (?P<space>[ \t\r\f\v]+)
    | (?P<token>
          (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)"
        | "(?:[^"\\\n]|\\.)*"
        | '(?:[^'\\\n]|\\.)+'
        | \.?\d(?:[eEpP][+-]|'?[\w.])*
        | [A-Za-z_]\w*
        | \.\.\.|<<=|>>=|->\*|::|->|\+\+|--|<<|>>|&&|\|\||\#\#|[-+*/%^&|<>=!]=
        | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)


def device_code(text: str) -> str:
    """Tokens of CUDA C++, one a line.

    Directives keep where their blanks are, but not how many: ``#define F(x)`` and ``#define F (x)`` differ.
    """
    tokens: list[str] = []
    directive, line_is_empty, blank = False, True, False
    for match in _DEVICE.finditer(text.replace("\r\n", "\n")):
        if match["newline"]:
            if directive:
                tokens.append("end of directive")
            directive, line_is_empty, blank = False, True, False
        elif match["token"] is None:  # a comment separates tokens as a blank does
            blank = True
        else:
            directive = directive or (line_is_empty and match["token"] == "#")
            if directive and blank and not line_is_empty:
                tokens.append(" ")
            tokens.append(match["token"])
            line_is_empty = blank = False
    return "\n".join(tokens)


def python_code(text: str) -> str:
    """The syntax tree without docstrings and positions; the same from every version of Python that can parse it.

    Raises
    ------
    SyntaxError
        It is no Python.
    """
    return _tree(ast.parse(text))


def _tree(node: object) -> str:
    if isinstance(node, ast.Constant):
        # ascii(): which characters are printable changes with Python's version.
        return f"{type(node.value).__name__} {node.value!a}"
    if isinstance(node, list):
        return f"[{','.join(_tree(item) for item in node if not _is_bare_string(item))}]"
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr[{','.join(_format_parts(node.values))}]"
    if isinstance(node, ast.AST):
        # Empty fields are left out: later versions have fields that earlier ones do not know.
        fields = ((name, getattr(node, name, None)) for name in sorted(node._fields) if name not in ("ctx", "kind"))
        given = (f"{name}={_tree(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({','.join(given)})"
    return ascii(node)


def _is_bare_string(node: object) -> bool:
    """Whether a statement is a string that nothing is done with: a docstring, wherever it stands."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _format_parts(parts: list[ast.expr]) -> list[str]:
    """Parts of an f-string; Python's versions differ in where they cut its plain text."""
    found: list[str] = []
    plain = ""
    for part in parts:
        if isinstance(part, ast.Constant):
            plain += str(part.value)
            continue
        if plain:
            found.append(ascii(plain))
        plain = ""
        found.append(_tree(part))
    return [*found, ascii(plain)] if plain else found
