"""The JSON of ``omniattn bench``: one form for all of them, which the tables of docs/performance are made from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omniattn.bench.timing import Timing
from omniattn.errors import ArgumentError, DriverError
from omniattn.version import __version__

#: Raised when a key changes its meaning or goes; new keys do not raise it.
SCHEMA = 1
#: What is said of a fact that is not known.
UNKNOWN = "unknown"

_KERNEL_MODULE_VERSION = Path("/sys/module/nvidia/version")


def document(
    bench: str,
    *,
    protocol: str,
    command: str,
    environment: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """A report, ready for JSON.

    Parameters
    ----------
    bench : str
        "forward", "backward", "int8", "int4", "decode" or "host"; of errors, what they are of.
    protocol : {"interleaved", "sustained", "host", "accuracy", "perplexity", "training", "context_parallel",
        "engine"}
    command : str
        The command line; empty if there was none.
    environment : mapping of str to str
        As :func:`environment` or :func:`reference_environment` gives it.
    rows : sequence of mapping
        One a measurement: text, numbers, truth values and None only.
    **more
        Whatever else a bench has to say.
    """
    return {
        "schema": SCHEMA,
        "bench": bench,
        "protocol": protocol,
        "command": command,
        "date": environment.get("date", UNKNOWN),
        "environment": dict(environment),
        **more,
        "rows": [dict(row) for row in rows],
    }


def to_json(data: Mapping[str, Any]) -> str:
    """A document as text that shows in a diff which rows have changed.

    Mappings have a line an entry. Lists have a line an element, whatever it holds: a row, a row's samples. Lists of
    numbers alone are on one line.
    """
    return _lines(data, "")


def write(data: Mapping[str, Any], path: Path) -> None:
    """Write a document to a file: how every result file is written."""
    path.write_text(to_json(data) + "\n", encoding="utf-8", newline="\n")


def _lines(value: Any, indent: str) -> str:
    within = indent + "  "
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(key)}: {_lines(entry, within)}" for key, entry in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, (list, tuple)) and not all(isinstance(element, (int, float)) for element in value):
        entries = [json.dumps(element) for element in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value)
    if not entries:
        return opening + closing
    return f"{opening}\n{within}" + f",\n{within}".join(entries) + f"\n{indent}{closing}"


def version_of(package: str) -> str:
    """Version of an installed distribution, or ``"unknown"``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def environment(torch: Any, packages: Iterable[str] = ()) -> dict[str, str]:
    """Device, driver, software versions and date, for the head of a report.

    Parameters
    ----------
    torch : module or None
        Its current CUDA device is the one that is described; None: there is none.
    packages : iterable of str
        Distributions beside omniattn, torch and NumPy.
    """
    facts = {
        "date": _today(),
        **dict.fromkeys(("device", "compute_capability", "sm_count"), UNKNOWN),
        "driver": _driver(),
        "cuda": UNKNOWN,
        "python": platform.python_version(),
        **dict.fromkeys(("torch_cuda", "cudnn"), UNKNOWN),
    }
    if torch is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["device"] = str(properties.name)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["sm_count"] = str(properties.multi_processor_count)
        facts["cuda"] = _cuda_of_driver(torch.cuda.current_device())
        facts["torch_cuda"] = str(torch.version.cuda or UNKNOWN)
        facts["cudnn"] = str(torch.backends.cudnn.version() or UNKNOWN)
    names = dict.fromkeys(("torch", "numpy", *packages))
    return {**facts, "omniattn": __version__, **{name: version_of(name) for name in names if name != "omniattn"}}


def reference_environment() -> dict[str, str]:
    """Software versions and date, for the head of a report that NumPy alone computes: no GPU, no driver."""
    return {
        "date": _today(),
        "device": "CPU",
        "python": platform.python_version(),
        "omniattn": __version__,
        "numpy": version_of("numpy"),
    }


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def _driver() -> str:
    try:
        return _KERNEL_MODULE_VERSION.read_text(encoding="ascii").strip()
    except OSError:
        return UNKNOWN


def _cuda_of_driver(ordinal: int) -> str:
    from omniattn import runtime

    try:
        return "{}.{}".format(*runtime.device_info(ordinal).driver_version)
    except (DriverError, ArgumentError):
        return UNKNOWN


def timing_facts(timing: Timing | None) -> dict[str, Any]:
    """A row's times: median and spread, and under load the means of clock and power. None where there is none."""
    load = None if timing is None else timing.load_dict()
    clocks = load and load["sm_mhz"]
    return {
        "median_us": None if timing is None else timing.median_us,
        "spread": None if timing is None else timing.spread,
        "sm_mhz": clocks["mean"] if clocks else None,
        "watts": load["watts"] if load else None,
        "drift": load["drift"] if load else None,
        "host_limited": load["host_limited"] if load else None,
    }


def samples_of(timing: Timing | None) -> dict[str, Any]:
    """What a row's times were found from."""
    if timing is None:
        return {"samples_us": [], "sustained": None}
    return {"samples_us": list(timing.samples_us), "sustained": timing.load_dict()}
