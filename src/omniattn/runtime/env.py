"""All environment variables of omniattn, in one table.

Each is read when it is needed, never at import, so that a bad value is an error of the call that needs it. Device code
is compiled, cached and loaded once per process, device and kernel: a variable that steers this has no effect on a
kernel that is already loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def _flag(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ArgumentError(name, "1 or 0 (also true/false, yes/no, on/off)", repr(value))


def _choice(*choices: str) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        lowered = value.strip().lower()
        if lowered not in choices:
            raise ArgumentError(name, "one of " + ", ".join(choices), repr(value))
        return lowered

    return parse


def _folder(name: str, value: str) -> Path:
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ArgumentError(name, "a folder (made when missing)", f"{value!r}: {error}") from None
    try:
        is_file = path.exists() and not path.is_dir()
    except OSError:  # behind a folder that this user may not enter: as good as missing
        is_file = False
    if is_file:
        raise ArgumentError(name, "a folder (made when missing)", f"{value!r}, which is a file")
    return path


def _file(name: str, value: str) -> Path:
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ArgumentError(name, "a file", f"{value!r}: {error}") from None
    if not path.is_file():
        raise ArgumentError(name, "a file that exists", repr(value), hint="Correct the path, or unset it")
    return path


def _text(name: str, value: str) -> str:
    return value.strip()


def _archs(name: str, value: str) -> tuple[str, ...]:
    from .arch import Arch

    parts = [part for part in value.replace(",", " ").replace(";", " ").split() if part]
    if not parts:
        raise ArgumentError(name, "targets such as '80 89 90a'", repr(value))
    return tuple(Arch.parse(part, argument=name).number for part in parts)


@dataclass(frozen=True)
class Variable:
    """One row of the table.

    Attributes
    ----------
    name : str
        The variable.
    meaning : str
        What it does.
    default : object
        Its value when unset or empty.
    values : str
        What it accepts, in words.
    parse : callable
        ``(name, text) -> value``; raises `ArgumentError` naming the variable.
    """

    name: str
    meaning: str
    default: Any
    values: str
    parse: Callable[[str, str], Any]


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "OMNIATTN_LOG",
        "log to standard error from this level on (stdlib logger 'omniattn')",
        None,
        "debug, info, warning",
        _choice("debug", "info", "warning"),
    ),
    Variable(
        "OMNIATTN_FORCE_JIT",
        "pass over prebuilt kernels: use the disk cache and NVRTC only",
        False,
        "1, 0",
        _flag,
    ),
    Variable(
        "OMNIATTN_DISABLE_JIT",
        "never compile at run time: use prebuilt and cached kernels only",
        False,
        "1, 0",
        _flag,
    ),
    Variable(
        "OMNIATTN_CACHE_DIR",
        "folder of kernels compiled here and of opened packs of prebuilt ones; unset: the platform's cache folder",
        None,
        "a folder",
        _folder,
    ),
    Variable(
        "OMNIATTN_DRIVER",
        "how the CUDA driver is reached; unset: cuda-bindings, or CuPy where that cannot be imported",
        None,
        "cuda, cupy",
        _choice("cuda", "cupy"),
    ),
    Variable(
        "OMNIATTN_FORCE_KERNEL",
        "on a GPU every operation uses the first of these kernels that is its own and fits, or fails if none fits; "
        "operations without a kernel here choose freely",
        None,
        "names of kernels, separated by commas",
        _text,
    ),
    Variable(
        "OMNIATTN_DUMP",
        "write source, options, binary and compiler log of every loaded kernel below this folder",
        None,
        "a folder",
        _folder,
    ),
    Variable(
        "OMNIATTN_LINEINFO",
        "compile with -lineinfo, for profilers",
        False,
        "1, 0",
        _flag,
    ),
    Variable(
        "OMNIATTN_CHECK_SCORE_MOD",
        "compare the indices of a ScoreMod with its arrays' extents: the first outside is reported and ends the kernel",
        False,
        "1, 0",
        _flag,
    ),
    Variable(
        "OMNIATTN_NATIVE",
        "run repeated calls on torch tensors by the C module omniattn._native, where it is installed; asked once",
        True,
        "1, 0",
        _flag,
    ),
    Variable(
        "OMNIATTN_TUNING",
        "choose ways of running attention by the costs in this file, which 'omniattn tune' measured; asked once",
        None,
        "a file",
        _file,
    ),
    Variable(
        "OMNIATTN_CUDA_ARCHS",
        "targets to prebuild when a wheel is built; unset: what the registry says",
        None,
        "targets such as '80 89 90a'",
        _archs,
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> Any:
    """Value of the variable ``name`` (one of the table), or its default when unset or empty.

    Raises
    ------
    ArgumentError
        Its text is not an accepted value; names the variable.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name, "")
    return variable.parse(name, text) if text.strip() else variable.default


# `os.environ.get` raises and catches an error for a variable that is not set, which costs a microsecond a call.
environment: Any = getattr(os.environ, "_data", None)
FORCE: Any = os.environ.encodekey("OMNIATTN_FORCE_KERNEL") if hasattr(os.environ, "encodekey") else None


def forced_kernels() -> str | None:
    """``OMNIATTN_FORCE_KERNEL``, asked at every call; None if it is not set."""
    if environment is not None and FORCE not in environment:
        return None
    return get("OMNIATTN_FORCE_KERNEL")


def jit_policy() -> tuple[bool, bool]:
    """``(prebuilt kernels may be used, NVRTC may be run)``.

    Raises
    ------
    ArgumentError
        Both are forbidden.
    """
    force, disable = get("OMNIATTN_FORCE_JIT"), get("OMNIATTN_DISABLE_JIT")
    if force and disable:
        raise ArgumentError(
            "OMNIATTN_FORCE_JIT", "unset or 0 when OMNIATTN_DISABLE_JIT=1", "1", hint="Unset one of the two"
        )
    return not force, not disable
