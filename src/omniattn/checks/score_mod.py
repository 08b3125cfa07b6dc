"""What a `ScoreMod` may be made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ArgumentError
from ..problems.score_mod import MAX_ARRAYS, words

#: Characters of an expression, at most.
MAX_TEXT = 10_000

# No statements, blocks, directives, strings or line continuations: what is left can only be one expression.
_ALLOWED = re.compile(r"[A-Za-z0-9_\s.,+\-*/%<>=!&|^~?:()\[\]]", re.ASCII)
#: Comments, which could hide what closes the expression, and other spellings of { } [ ] #.
_REFUSED = ("//", "/*", "*/", "<%", "%>", "<:", ":>", "%:")
#: Functions that several threads have to call together, or that end or stop a kernel.
_COLLECTIVE = re.compile(
    r"\b(?:__(?:sync|shfl|any|all|ballot|match|reduce|activemask|trap|brkpt|nanosleep|exit|threadfence|barrier)\w*"
    r"|atomic\w*|malloc|free|memcpy|memset|asm)\b"
)
_PAIRS = {")": "(", "]": "["}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_RESERVED = (
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl "
    "const const_cast constexpr continue decltype default delete do double dynamic_cast else enum explicit "
    "export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq "
    "nullptr operator or or_eq private protected public register reinterpret_cast return short signed sizeof "
    "static static_assert static_cast struct switch template this thread_local throw true try typedef typeid "
    "typename union unsigned using virtual void volatile wchar_t while xor xor_eq"
)
_KEYWORDS = frozenset(_RESERVED.split())
_POSITIONS = ("score", "b", "h", "q", "k")
#: Types in the text around an expression (`omniattn.launch.score_mod`): an array of that name would hide them.
_TYPES = frozenset(
    ("Float", "Half", "BFloat16", "ScoreArray", "ScoreModArrays", "ScorePosition", "int64", "int32", "int8", "uint8")
)


def check_text(text: Any, argument: str) -> str:
    """An expression of CUDA C++: one, and nothing but."""
    over = "b, h, q, k" if argument == "mask" else ", ".join(_POSITIONS)
    expected = f"an expression of CUDA C++ over {over} and the arrays"
    if callable(text):
        raise ArgumentError(argument, expected, f"{text!r}: a function goes into reference=", function="ScoreMod")
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(argument, expected, repr(text), function="ScoreMod")
    if len(text) > MAX_TEXT:
        raise ArgumentError(argument, f"at most {MAX_TEXT} characters", str(len(text)), function="ScoreMod")
    for i, character in enumerate(text):
        if not _ALLOWED.match(character):
            raise ArgumentError(
                argument, f"{expected}: no statements, strings, comments or directives",
                f"{character!r} at character {i}", function="ScoreMod",
            )  # fmt: skip
    for pair in _REFUSED:
        if pair in text:
            raise ArgumentError(
                argument, f"{expected}: no comments, and brackets as ( ) and [ ] only", repr(pair), function="ScoreMod"
            )
    if "**" in text:
        raise ArgumentError(argument, f"{expected}: powf(x, y) for powers", "'**'", function="ScoreMod")
    if argument == "mask" and "score" in words(text):
        raise ArgumentError(
            argument, f"{expected}: what depends on the score goes into the expression, with -INFINITY", "'score'",
            function="ScoreMod",
        )  # fmt: skip
    if (found := _COLLECTIVE.search(text)) is not None:
        raise ArgumentError(
            argument, "an expression of one thread that only computes", repr(found.group()), function="ScoreMod"
        )
    opened: list[str] = []
    for i, character in enumerate(text):
        if character in "([":
            opened.append(character)
        elif character in ")]" and (not opened or opened.pop() != _PAIRS[character]):
            raise ArgumentError(
                argument, "brackets in pairs", f"{character!r} at character {i}, which closes none", function="ScoreMod"
            )
    if opened:
        raise ArgumentError(argument, "brackets in pairs", f"{opened[-1]!r} that is never closed", function="ScoreMod")
    return text


def check_array_names(names: tuple[str, ...]) -> None:
    """Names that expressions can use for arrays."""
    if len(names) > MAX_ARRAYS:
        raise ArgumentError("arrays", f"at most {MAX_ARRAYS}", str(len(names)), function="ScoreMod")
    for name in names:
        # Names without a lower-case letter are left to macros.
        usable = _NAME.fullmatch(name) and not name.isupper() and not name.startswith("oa_")
        if not usable or name in _KEYWORDS or name in _POSITIONS or name in _TYPES:
            expected = "a C++ name with a lower-case letter, no keyword or type, none of score, b, h, q, k"
            raise ArgumentError("arrays", expected, repr(name), function="ScoreMod")


def check_reference(reference: Any, names: Iterable[str], argument: str = "reference") -> Callable[..., Any] | None:
    """A function that can be called as ``reference(score, b, h, q, k, **arrays)``, or None."""
    if reference is None:
        return None
    called = ", ".join((*_POSITIONS, *(f"{name}={name}" for name in names)))
    expected = f"a function that can be called as {argument}({called}), or None"
    if not callable(reference):
        raise ArgumentError(argument, expected, repr(reference), function="ScoreMod")
    try:
        signature = inspect.signature(reference)
    except (TypeError, ValueError):  # a builtin that does not tell
        return reference
    try:
        signature.bind(*_POSITIONS, **dict.fromkeys(names))
    except TypeError as error:
        raise ArgumentError(argument, expected, f"one with {signature}: {error}", function="ScoreMod") from None
    return reference
