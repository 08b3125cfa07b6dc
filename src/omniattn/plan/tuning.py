"""The file of ``omniattn tune`` that `OMNIATTN_TUNING` names, and GPUs as selection sees them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..problems import Target
from ..problems.target import Coefficients, Tuning
from ..runtime import env, log
from ..runtime.device import DeviceInfo
from ..select.model import NAMES

VARIABLE = "OMNIATTN_TUNING"
#: Raised when what coefficients mean changes: older files are refused.
FORMAT = 1


def parse(data: Any, name: str) -> tuple[tuple[int, int], str, Coefficients]:
    """Compute capability, device and coefficients of a file's content. Raises ArgumentError, which names the field."""

    def refuse(what: str) -> ArgumentError:
        return ArgumentError(VARIABLE, "a file that 'omniattn tune' has written", f"{name}: {what}")

    if not isinstance(data, Mapping):
        raise refuse("no JSON object")
    if data.get("format") != FORMAT:
        raise refuse(f"format {data.get('format')!r}, not {FORMAT}: run 'omniattn tune' again")
    cc, given = data.get("cc"), data.get("coefficients")
    if not (isinstance(cc, list) and len(cc) == 2 and all(isinstance(x, int) for x in cc)):
        raise refuse(f"cc {cc!r}")
    if not isinstance(given, Mapping) or set(given) != set(NAMES):
        raise refuse("coefficients of other names: run 'omniattn tune' again")
    for key, value in given.items():
        usual = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not usual or not math.isfinite(value) or value <= 0:
            raise refuse(f"coefficient {key} is {value!r}")
    return (cc[0], cc[1]), str(data.get("device", "unknown")), Coefficients(**{n: float(given[n]) for n in NAMES})


@functools.cache
def from_file() -> tuple[tuple[int, int], Tuning] | None:
    """Compute capability and content of the file; None where none is named. Asked once a process, as plans are kept.

    Raises
    ------
    ArgumentError
        It cannot be read, or is no such file.
    """
    path: Path | None = env.get(VARIABLE)
    if path is None:
        return None
    try:
        text = path.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise ArgumentError(VARIABLE, "a file that 'omniattn tune' has written", f"{path}: {error}") from None
    cc, device, coefficients = parse(data, str(path))
    return cc, Tuning(coefficients, device, hashlib.sha256(text).hexdigest())


def tuning_for(cc: tuple[int, int]) -> Tuning | None:
    """What the file says of a GPU of this compute capability; None without one, or if it is of another."""
    found = from_file()
    if found is None:
        return None
    if found[0] != cc:
        here, there = ("{}.{}".format(*x) for x in (cc, found[0]))
        log.warn_once(f"{VARIABLE} is of compute capability {there}, and is not used on this GPU, which has {here}")
        return None
    return found[1]


def digest() -> str:
    """Of the file that is used; empty without one."""
    found = from_file()
    return "" if found is None else found[1].digest


def forget() -> None:
    """The file is read again when it is needed next. Plans that were made with it stay."""
    from_file.cache_clear()


def target_of(device: DeviceInfo) -> Target:
    """A GPU as selection and builders see it."""
    return Target(device.cc, device.max_smem_optin, device.sm_count, tuning_for(device.cc))
