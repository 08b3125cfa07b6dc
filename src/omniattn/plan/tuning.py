"""The file of ``omniattn tune`` that `OMNIATTN_TUNING` names, and GPUs as selection sees them."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..problems import Target
from ..problems.costs import COSTS, OperationCosts
from ..problems.target import Coefficients, Tuning
from ..runtime import env, log
from ..runtime.device import DeviceInfo
from ..select.model import NAMES

VARIABLE = "OMNIATTN_TUNING"
#: Raised when what coefficients mean changes: older files are refused.
FORMAT = 1


class Gpu(NamedTuple):
    """What tells GPUs apart whose costs differ."""

    name: str
    cc: tuple[int, int]
    sm_count: int


def parse(data: Any, name: str) -> tuple[Gpu, Coefficients, tuple[tuple[str, OperationCosts], ...]]:
    """GPU, coefficients of attention and of other operations. Raises ArgumentError, which names the field."""

    def refuse(what: str) -> ArgumentError:
        expected = "a file that 'omniattn tune' has written"
        return ArgumentError(VARIABLE, expected, f"{name}: {what}", hint="Run 'omniattn tune' again, or unset it")

    if not isinstance(data, Mapping):
        raise refuse("no JSON object")
    if data.get("format") != FORMAT:
        raise refuse(f"format {data.get('format')!r}, not {FORMAT}")
    cc, sm_count, given = data.get("cc"), data.get("sm_count"), data.get("coefficients")
    if not (isinstance(cc, list) and len(cc) == 2 and all(isinstance(x, int) for x in cc)):
        raise refuse(f"cc {cc!r}")
    if not isinstance(sm_count, int):
        raise refuse(f"sm_count {sm_count!r}")

    def numbers(of: Any, names: tuple[str, ...]) -> dict[str, float]:
        if not isinstance(of, Mapping) or set(of) != set(names):
            raise refuse("coefficients of other names")
        for key, value in of.items():
            usual = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not usual or not math.isfinite(value) or value <= 0:
                raise refuse(f"coefficient {key} is {value!r}")
        return {key: float(of[key]) for key in names}

    rows = data.get("rows")
    if not isinstance(rows, Mapping):
        raise refuse(f"rows {rows!r}")
    coefficients = Coefficients(**numbers(given, NAMES), rows=numbers(rows, tuple(rows)))
    others = data.get("operations", {})
    if not isinstance(others, Mapping) or not set(others) <= set(COSTS):
        raise refuse(f"operations other than {', '.join(COSTS)}")
    costs = tuple(
        (op, kind(**numbers(others[op], tuple(field.name for field in fields(kind)))))
        for op, kind in COSTS.items()
        if op in others
    )
    return Gpu(str(data.get("device", "unknown")), (cc[0], cc[1]), sm_count), coefficients, costs


@functools.cache
def from_file() -> tuple[Gpu, Tuning] | None:
    """The GPU that was measured, and what the file says; None where none is named. Asked once a process, as plans are.

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
        expected = "a file that 'omniattn tune' has written"
        raise ArgumentError(VARIABLE, expected, f"{path}: {error}", hint="Run 'omniattn tune', or unset it") from None
    gpu, coefficients, costs = parse(data, str(path))
    return gpu, Tuning(coefficients, gpu.name, hashlib.sha256(text).hexdigest(), costs)


def tuning_for(device: DeviceInfo) -> Tuning | None:
    """What the file says of a GPU; None without one, or if another GPU was measured."""
    found = from_file()
    if found is None:
        return None
    here = Gpu(device.name, device.cc, device.sm_count)
    if found[0] != here:
        said = "{0.name} (compute capability {0.cc[0]}.{0.cc[1]}, {0.sm_count} SMs)"
        there, this = (said.format(gpu) for gpu in (found[0], here))
        log.warn_once(f"{VARIABLE} was measured on {there}, and is not used on {this}: run 'omniattn tune' there")
        return None
    return found[1]


def forget() -> None:
    """The file is read again when it is needed next. Plans that were made with it stay."""
    from_file.cache_clear()


#: SMs that a kernel of another stream has in the mean of a call's time. Transfers of NCCL between two H200 have 32 of
#: them, for a tenth of the time to all of it: of 0, 12 and 32 this was the fastest (docs/distributed.md, "Measured").
OTHERS_SMS = 12


@dataclass(frozen=True)
class SharedGpu:
    """Among the facts of a call: a kernel of another stream has some of the SMs for a part of the call's time.

    A persistent kernel divides its work among as many CTAs as there are SMs. Those that find no SM free begin when the
    other kernel ends, with all of their work. So such a call is planned for the SMs that are left, and has a CTA for
    each item of its list, which the GPU hands out.
    """


def target_beside(device: DeviceInfo, facts: Any) -> Target:
    """A GPU as the plan of a call with these facts sees it."""
    target = target_of(device)
    if any(fact.__class__ is SharedGpu for fact in (facts if facts.__class__ is tuple else (facts,))):
        return replace(target, sm_count=max(target.sm_count - OTHERS_SMS, 1), is_shared=True)
    return target


def target_of(device: DeviceInfo) -> Target:
    """A GPU as selection and builders see it."""
    return Target(
        device.cc, device.max_smem_optin, device.sm_count, tuning_for(device), device.clock_mhz, device.memory_gb_s
    )
