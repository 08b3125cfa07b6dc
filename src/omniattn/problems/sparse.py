"""``Sparse``: which blocks of attention a precision leaves out, given or from a file of `calibrate_sparse`."""

from __future__ import annotations

import dataclasses
import json
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

#: Of all blocks, or of a row's weights; one of each query head.
Shares = float | tuple[float, ...]

#: What a file of `calibrate_sparse` says it is.
KIND = "omniattn.sparse"
#: Raised when what its fields mean changes: older files are refused.
FORMAT = 1
_MOST_FP32 = 3.4028234663852886e38
_SHARE = "a number above 0, at most 1, or one for each query head"


def make_plain(knobs: Any) -> None:
    """Python numbers and flags in place of scalars of other libraries, as the options of `attention` may be."""
    function = type(knobs).__name__
    for field in dataclasses.fields(knobs):
        name, value = field.name, getattr(knobs, field.name)
        plain = tuple(_plain(x, name, function) for x in value) if isinstance(value, tuple) else None
        plain = _plain(value, name, function) if plain is None else plain
        if plain is not value:
            object.__setattr__(knobs, name, plain)


def _plain(value: Any, argument: str, function: str) -> Any:
    try:
        is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    except RuntimeError:  # a nested tensor, which the check of the knob refuses
        return value
    if not is_scalar or getattr(value, "requires_grad", False):
        return value
    try:
        return value.item()
    except Exception as error:
        expected = "a plain value, or an array of one that can be read now"
        raise ArgumentError(argument, expected, repr(value), function=function) from error


def shares_of(value: Any, argument: str, function: str) -> Shares | None:
    """A share, or one of each query head: numbers above 0, at most 1, in a tuple, a list or an array.

    Raises
    ------
    ArgumentError
        Anything else but None; NaN too, and an array that cannot be read: nested, sparse, without memory.
    """
    if value is None:
        return None
    # A share that is learned would lose its gradient.
    has_numbers = hasattr(value, "tolist") and not getattr(value, "requires_grad", False)
    try:
        found = value.tolist() if has_numbers else value
    except Exception as error:  # a nested or a sparse tensor, and one without memory
        expected = f"None, or {_SHARE}, in an array that can be read now"
        raise ArgumentError(argument, expected, repr(value), function=function) from error
    each = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    # Written so that NaN fails.
    if not each or not all(_is_number(x) and 0.0 < x <= 1.0 for x in each):
        raise ArgumentError(argument, f"None, or {_SHARE}", repr(value), function=function)
    return tuple(map(float, each)) if isinstance(found, (tuple, list)) else float(found)


def check_heads(shares: Shares | None, heads: int, argument: str, function: str, source: str = "") -> None:
    """Raise ArgumentError for shares of another number of heads; source: the file that they are from."""
    if isinstance(shares, tuple) and len(shares) != heads:
        where = f" of {source}" if source else ""
        expected = f"a number, or {heads} of them, one for each query head"
        raise ArgumentError(argument, expected, f"{len(shares)} numbers{where}", function=function)


@dataclass(frozen=True)
class Sparse:
    """Blocks of attention that are left out, predicted in the call: the arguments of `sparse_blocks`.

    Attributes
    ----------
    topk, cdf : float or tuple of float, optional
        One of them: the share of all blocks of keys that a block of queries keeps, or of their weights. A number, or
        one for each query head, in any sequence or array.
    similarity : float
        Blocks that do not resemble themselves more than this are always kept.
    block_size : int or (int, int)
        Queries and keys of a block, multiples of 64.
    keep_first : int
        Blocks of keys that are always kept.
    file : str or path, optional
        In place of all of them: a file of `calibrate_sparse`, read now. What it says stands in the other attributes.
    name : str, optional
        What of the file, by its name there; not needed if there is one alone.
    """

    topk: Any = None
    cdf: Any = None
    similarity: float = -0.1
    block_size: int | tuple[int, int] = (128, 64)
    keep_first: int = 0
    file: str | os.PathLike[str] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value that means nothing, and for a file that cannot be read."""
        make_plain(self)
        if self.file is not None:
            self._read()
        elif self.name is not None:
            raise ArgumentError("name", "None without file=", repr(self.name), function="Sparse")
        if (self.topk is None) == (self.cdf is None):
            received = "neither" if self.topk is None else "both"
            raise ArgumentError(
                "topk", "a share of the blocks, or cdf, one of their weights", received, function="Sparse"
            )
        for argument in ("topk", "cdf"):
            object.__setattr__(self, argument, shares_of(getattr(self, argument), argument, "Sparse"))
        if not (_is_number(self.similarity) and abs(self.similarity) <= _MOST_FP32):
            raise ArgumentError("similarity", "a finite number", repr(self.similarity), function="Sparse")
        sizes = self.block_size if isinstance(self.block_size, tuple) else (self.block_size, self.block_size)
        if len(sizes) != 2 or not all(_is_count(n) and n > 0 and n % 64 == 0 for n in sizes):
            expected = "a multiple of 64, or two of them (queries, keys)"
            raise ArgumentError("block_size", expected, repr(self.block_size), function="Sparse")
        if not _is_count(self.keep_first):
            expected = f"an integer from 0 to {2**31 - 1}"
            raise ArgumentError("keep_first", expected, repr(self.keep_first), function="Sparse")

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.block_size if isinstance(self.block_size, tuple) else (self.block_size, self.block_size)

    @property
    def source(self) -> str:
        """The file and what of it, in words; nothing without one."""
        return "" if self.file is None else f"{self.file!r}, {self.name!r}"

    def _read(self) -> None:
        file = os.fspath(self.file) if isinstance(self.file, (str, os.PathLike)) else None
        if not isinstance(file, str):
            raise ArgumentError("file", "None, or the path of a file", repr(self.file), function="Sparse")
        if self.name is not None and not isinstance(self.name, str):
            raise ArgumentError("name", "None or a str", repr(self.name), function="Sparse")
        rule, entries = read(file, "Sparse")
        name = next(iter(entries)) if self.name is None and len(entries) == 1 else self.name
        if name is None or name not in entries:
            known = ", ".join(map(repr, list(entries)[:8])) + (", ..." if len(entries) > 8 else "")
            raise ArgumentError("name", f"one of {known}, as {file!r} has them", repr(self.name), function="Sparse")
        rule[rule.pop("by")] = entries[name]
        for argument, value in rule.items():
            # A copy by dataclasses.replace comes with the values of the file.
            given, usual = getattr(self, argument), getattr(type(self), argument)
            given = shares_of(given, argument, "Sparse") if argument in ("topk", "cdf") else given
            if given not in (usual, value):
                expected = f"nothing, or {value!r}, as {file!r} has it"
                raise ArgumentError(argument, expected, repr(given), function="Sparse")
            object.__setattr__(self, argument, value)
        object.__setattr__(self, "file", file)
        object.__setattr__(self, "name", name)


def read(file: str | os.PathLike[str], function: str) -> tuple[dict[str, Any], dict[str, tuple[float, ...]]]:
    """The rule of a file of `calibrate_sparse`, and the shares of each name's heads.

    Returns
    -------
    rule : dict
        ``by`` ("topk" or "cdf"), ``similarity``, ``block_size``, ``keep_first``.
    shares : dict of str to tuple of float

    Raises
    ------
    ArgumentError
        There is no such file, or it is none of these; names the field.
    """
    path = Path(file)

    def refuse(what: str) -> ArgumentError:
        expected = "a file that omniattn.calibrate_sparse has written"
        return ArgumentError("file", expected, f"{path}: {what}", function=function)

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise refuse(f"no JSON ({error})") from None
    if not isinstance(data, Mapping) or data.get("kind") != KIND:
        raise refuse(f"no JSON object of kind {KIND!r}")
    if data.get("format") != FORMAT:
        raise refuse(f"format {data.get('format')!r}, not {FORMAT}")
    rule, entries = data.get("rule"), data.get("entries")
    if not isinstance(rule, Mapping) or rule.get("by") not in ("topk", "cdf"):
        raise refuse(f"rule {rule!r}")
    size, keep_first = rule.get("block_size"), rule.get("keep_first")
    similarity: Any = rule.get("similarity")
    if not (isinstance(size, list) and len(size) == 2 and all(_is_count(n) and n > 0 and n % 64 == 0 for n in size)):
        raise refuse(f"block_size {size!r}")
    if not (_is_number(similarity) and abs(similarity) <= _MOST_FP32):
        raise refuse(f"similarity {similarity!r}")
    if not _is_count(keep_first):
        raise refuse(f"keep_first {keep_first!r}")
    if not isinstance(entries, Mapping) or not entries:
        raise refuse("no entries")
    found = {}
    for name, entry in entries.items():
        shares = entry.get("shares") if isinstance(entry, Mapping) else None
        if not (isinstance(shares, list) and shares and all(_is_number(x) and 0.0 < x <= 1.0 for x in shares)):
            raise refuse(f"shares of {name!r}: {shares!r}")
        if entry.get("num_heads") != len(shares):
            raise refuse(f"num_heads of {name!r}: {entry.get('num_heads')!r}, with {len(shares)} shares")
        found[name] = tuple(map(float, shares))
    made = {
        "by": rule["by"], "similarity": float(similarity), "block_size": (size[0], size[1]), "keep_first": keep_first
    }  # fmt: skip
    return made, found


def _is_number(x: Any) -> bool:
    # Of NaN and infinity comparisons decide, which NaN fails.
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _is_count(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31
