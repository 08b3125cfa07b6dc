"""``omniattn info``: what this machine has, which kernels would run on it, and why."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import omniattn
from omniattn import runtime
from omniattn.cli import console, readme, support
from omniattn.errors import ArgumentError, CompileError, DriverError
from omniattn.plan import tuning
from omniattn.runtime import cache, env
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver import get_driver
from omniattn.runtime.nvrtc import get_compiler
from omniattn.runtime.store import get_store

#: Libraries whose place is reported. omniattn itself uses only nvrtc and the driver; the others tell which CUDA the
#: frameworks beside it run on.
_LIBRARIES = ("nvrtc", "cudart", "nvJitLink", "cublas")

#: Distributions whose versions are reported, without importing them.
_PACKAGES = (
    "numpy", "cuda-bindings", "cuda-pathfinder", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc", "torch", "cupy",
    "cupy-cuda12x", "cupy-cuda13x", "jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "rich", "matplotlib",
)  # fmt: skip

_KERNEL_MODULE_VERSION = Path("/sys/module/nvidia/version")


def add_parser(commands: Any) -> None:
    """Add ``info`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "info", help="GPU, driver, libraries, cache, and which kernel runs where", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the documents' generated tables")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --markdown: put the tables between the markers of these files",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.write is not None and not arguments.markdown:
        raise ArgumentError("--write", "to be used with --markdown", " ".join(map(str, arguments.write)))
    if arguments.markdown and arguments.json:
        raise ArgumentError("--json", "to be used without --markdown", "both")
    if arguments.markdown:
        if arguments.write is not None:
            readme.write(arguments.write)
        else:
            print("\n\n".join(readme.tables().values()))
        return 0
    if not arguments.json:
        console.require_rich()
    variables = environment()
    with _silent_if_wrong():
        gpus, driver = gpus_and_driver()
        facts = {**collect(gpus, driver), "environment": variables}
        columns, rows = support_here(gpus)
    if arguments.json:
        console.print_json({**facts, "support": [_support_dict(columns, row) for row in rows]})
    else:
        with console.pipe_columns(_PIPE_COLUMNS):
            _show(facts)
            _show_support(columns, rows)
    return 0


def collect(gpus: Sequence[DeviceInfo], driver: dict[str, Any]) -> dict[str, Any]:
    """What ``info`` reports but the environment and the support table, ready for JSON."""
    return {
        "omniattn": {"version": omniattn.__version__, "path": str(Path(omniattn.__file__).parent)},
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "driver": driver,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "nvrtc": nvrtc(),
        "libraries": libraries(),
        "packages": packages(),
        "kernels": kernel_store(),
        "cache": cache_facts(),
        "tuning": tuning_facts(),
    }


@contextlib.contextmanager
def _silent_if_wrong() -> Iterator[None]:
    """Without OMNIATTN_LOG where its text is wrong: the first message would raise, and the table says what is wrong."""
    try:
        env.get("OMNIATTN_LOG")
    except ArgumentError:
        text = os.environ.pop("OMNIATTN_LOG")
        try:
            yield
        finally:
            os.environ["OMNIATTN_LOG"] = text
    else:
        yield


def tuning_facts() -> dict[str, Any]:
    """The file by which ways of running attention are chosen, or why it cannot be; empty without one."""
    try:
        found = tuning.from_file()
    except ArgumentError as error:
        return {"error": str(error)}
    if found is None:
        return {}
    return {"device": found[1].device, "cc": list(found[0].cc), "digest": found[1].digest}


def gpus_and_driver() -> tuple[list[DeviceInfo], dict[str, Any]]:
    """All GPUs, and the driver or why there is none."""
    facts: dict[str, Any] = {}
    if _KERNEL_MODULE_VERSION.is_file():
        facts["kernel_module"] = _KERNEL_MODULE_VERSION.read_text(encoding="ascii").strip()
    try:
        driver = get_driver()
        gpus = [runtime.device_info(ordinal) for ordinal in range(driver.device_count())]
    except (DriverError, ArgumentError) as error:
        return [], {**facts, "error": str(error)}
    facts["binding"] = {"cuda": "cuda-bindings", "cupy": "CuPy"}[driver.name]
    if gpus:
        facts["cuda"] = "{}.{}".format(*gpus[0].driver_version)
    return gpus, facts


def nvrtc() -> dict[str, Any]:
    """NVRTC's version and place, or why there is none."""
    try:
        compiler = get_compiler()
    except CompileError as error:
        return {"error": str(error)}
    archs = [f"sm_{arch}" for arch in compiler.archs]
    path = locate("nvrtc").get("path")
    version = f"{compiler.version[0]}.{compiler.version[1]}"
    return {"version": version, "binding": compiler.binding, "path": path, "targets": archs}


def locate(name: str) -> dict[str, Any]:
    """Where cuda-pathfinder finds a CUDA library."""
    try:
        from cuda import pathfinder
    except ImportError as error:
        return {"name": name, "error": f"cuda-pathfinder cannot be imported ({error})"}
    try:
        found = pathfinder.load_nvidia_dynamic_lib(name)
    except (RuntimeError, OSError) as error:
        return {"name": name, "error": str(error).strip().split("\n", 1)[0]}
    return {"name": name, "path": found.abs_path, "found_via": found.found_via}


def libraries() -> list[dict[str, Any]]:
    """CUDA libraries and where they were found."""
    return [locate(name) for name in _LIBRARIES]


def packages() -> dict[str, str | None]:
    """Versions of the packages that matter; None: not installed."""
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def kernel_store() -> dict[str, Any]:
    """What came with this installation."""
    store = get_store()
    entries = [entry for alike in store.entries.values() for entry in alike]
    archs = sorted({f"sm_{entry.arch}" for entry in entries})
    return {
        "kind": store.kind,
        "path": str(store.folder),
        "prebuilt": len(entries),
        "packs": len({entry.pack.file for entry in entries}),
        "targets": archs,
        "compiler": store.compiler,
        "problem": store.problem,
    }


def cache_facts() -> dict[str, Any]:
    """Folder, number and size of the kernels compiled on this machine."""
    nothing = {"folder": None, "entries": 0, "bytes": 0, "writable": False}
    try:
        store = cache.get_cache()
    except ArgumentError as error:
        return {**nothing, "problem": str(error)}
    if store.folder is None:
        return {**nothing, "problem": "there is no home folder"}
    files = store.entries()
    existing = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    return {
        "folder": str(store.folder),
        "entries": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "writable": os.access(existing, os.W_OK),
        "problem": store.refusal(),
    }


def environment() -> list[dict[str, Any]]:
    """Every environment variable of omniattn, its text, and what is wrong with it."""
    rows = []
    for variable in env.VARIABLES:
        text = os.environ.get(variable.name)
        error = None
        try:
            env.get(variable.name)
        except ArgumentError as problem:
            error = str(problem)
        rows.append({"name": variable.name, "value": text, "meaning": variable.meaning, "error": error})
    return rows


def support_here(gpus: Sequence[DeviceInfo]) -> tuple[tuple[support.Column, ...], list[support.SupportRow]]:
    """Operation x dtype x head_dim class x GPU, for this installation; this machine's GPUs come first."""
    columns = support.columns_with((gpu.cc, gpu.name, gpu.max_smem_optin) for gpu in gpus)
    return columns, support.support_rows(support.runtime_resolver, columns=columns)


def _support_dict(columns: Sequence[support.Column], row: support.SupportRow) -> dict[str, Any]:
    cells = {column.target: dataclasses.asdict(cell) for column, cell in zip(columns, row.cells, strict=True)}
    return {"op": row.op, "features": row.features, "dtype": row.dtype, "head_dim": row.head_dim, "gpus": cells}


def _show(facts: dict[str, Any]) -> None:
    rows = [["omniattn", f"{facts['omniattn']['version']}, {facts['omniattn']['path']}"], ["Python", facts["python"]]]
    rows += [[f"GPU {gpu['ordinal']}", _gpu_text(gpu)] for gpu in facts["gpus"]] or [["GPU", "none"]]
    driver = facts["driver"]
    module = f"{driver['kernel_module']}, " if "kernel_module" in driver else ""
    error = driver.get("error")
    rows.append(["driver", module + (error or f"CUDA {driver.get('cuda', '?')}, through {driver['binding']}")])
    nvrtc_facts = facts["nvrtc"]
    rows.append(["NVRTC", nvrtc_facts.get("error") or "{version} through {binding}, {path}".format(**nvrtc_facts)])
    for library in facts["libraries"]:
        text = f"{library['path']} (via {library['found_via']})" if "path" in library else "not found"
        rows.append([f"library {library['name']}", text])
    installed = [f"{name} {version}" for name, version in facts["packages"].items() if version]
    rows.append(["packages", ", ".join(installed)])
    kernels = facts["kernels"]
    held = f"{kernels['prebuilt']} prebuilt ({', '.join(kernels['targets'])}; {kernels['compiler']})"
    rows.append(["kernels", f"{kernels['kind']}: {kernels['problem'] or held}, {kernels['path']}"])
    kept = facts["cache"]
    state = "" if kept["writable"] else ", NOT WRITABLE: kernels compiled at run time stay in memory"
    found = f"{kept['folder']}: {kept['entries']} kernels, {kept['bytes'] / 1e6:.1f} MB"
    rows.append(["cache", (kept["problem"] or found) + state])
    tuned = facts["tuning"]
    if tuned:
        rows.append(["tuning", tuned.get("error") or f"measured on {tuned['device']}, digest {tuned['digest'][:12]}"])
    console.print_table("This machine", ["", ""], rows)
    console.print_table(
        "Environment variables",
        ["variable", "value", "meaning"],
        [[v["name"], v["error"] or v["value"] or "(unset)", v["meaning"]] for v in facts["environment"]],
    )


def _gpu_text(gpu: dict[str, Any]) -> str:
    cc = "{}.{}".format(*gpu["cc"])
    return (
        f"{gpu['name']}, compute capability {cc}, {gpu['sm_count']} SMs, "
        f"{gpu['max_smem_optin'] // 1024} KiB shared memory, {gpu['l2_bytes'] / 2**20:.0f} MiB L2"
    )


#: What a report that is pasted somewhere has.
_PIPE_COLUMNS = 100
#: Columns of a terminal that the table with a column for every GPU needs.
_FULL_WIDTH = 190


def _show_support(columns: Sequence[support.Column], rows: Sequence[support.SupportRow]) -> None:
    title = "Which kernels this installation has"
    if console.width() < _FULL_WIDTH:
        _show_support_narrow(title, columns, rows)
        return
    # Reasons are few and long: they are numbered below the table.
    reasons: dict[str, int] = {}
    body = []
    for row in support.merge_rows(rows):
        cells = [f"{cell.text} [{reasons.setdefault(cell.reason, len(reasons) + 1)}]" for cell in row.cells]
        body.append([row.label, row.dtype, row.head_dim, *cells])
    header = ["operation", "dtype", "head_dim", *(f"{column.target} {column.products}" for column in columns)]
    console.print_table(title, header, body, wrapped=True)
    for reason, number in reasons.items():
        console.print_paragraph(f"[{number}] {reason}")


def _show_support_narrow(title: str, columns: Sequence[support.Column], rows: Sequence[support.SupportRow]) -> None:
    """One column for all GPUs: those that a line has the same for stand together."""
    body = []
    reasons: dict[str, dict[str, None]] = {column.target: {} for column in columns}
    for row in support.merge_rows(rows):
        same: dict[str, list[str]] = {}
        for column, cell in zip(columns, row.cells, strict=True):
            same.setdefault(cell.text, []).append(column.target)
            reasons[column.target].update(dict.fromkeys(cell.reason.split("; ")))
        kernels = "\n".join(f"{', '.join(targets)}: {text}" for text, targets in same.items())
        dtypes = row.dtype.replace("bfloat", "bf").replace("float", "fp")
        body.append([row.label, dtypes, row.head_dim, kernels])
    console.print_table(title, ["operation", "dtype", "head_dim", "kernels"], body, wrapped=True)
    alike: dict[str, list[str]] = {}
    for target, of_target in reasons.items():
        alike.setdefault("; ".join(of_target), []).append(target)
    for reason, targets in alike.items():
        console.print_paragraph(f"{', '.join(targets)}: {reason}")
