"""Compiles ``native/*.c`` to the optional module ``omniattn._native``: ``python -m build_tools.native [OUTPUT]``.

Needs a C compiler (``CC``, else cc, gcc or clang; on Windows the one that setuptools finds) and Python's headers,
neither CUDA nor a framework. The module is for every Python from 3.10 on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "_native.pyd" if sys.platform == "win32" else "_native.abi3.so"
_LIMITED_API = "0x030A0000"


def compiler() -> list[str] | None:
    """The C compiler, if there is one and Python's headers are there."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file() or not sys.platform.startswith("linux"):
        return None
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return None if found is None else [found]


def wheel_tag() -> str:
    """Tag of a wheel with the module for this machine; auditwheel makes it a manylinux one."""
    return "cp310-abi3-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build(root: Path = ROOT, output: Path | None = None, flags: tuple[str, ...] = ()) -> Path:
    """Compile; return the module's path, by default in the package of the checkout ``root``.

    Raises
    ------
    RuntimeError
        There is no compiler, or it failed.
    """
    program = compiler()
    if program is None and sys.platform != "win32":
        raise RuntimeError("omniattn._native needs Linux or Windows, a C compiler (set CC) and Python's headers")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    output = output or root / "src/omniattn" / NAME
    sources = sorted(str(path) for path in (root / "native").glob("*.c"))
    if sys.platform == "win32":
        return by_setuptools(sources, output, "/std:c11", "/O2", "/W3", *flags)
    command = [
        *(program or ()), "-shared", "-fPIC", "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden",
        f"-DPy_LIMITED_API={_LIMITED_API}", f"-I{sysconfig.get_path('include')}", *flags, *sources, "-o", str(output),
        "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return output


def by_setuptools(sources: list[str], output: Path, *flags: str) -> Path:
    """Compile with the compiler that setuptools finds, as Visual Studio's, which is not in the path."""
    from setuptools import Distribution, Extension

    extension = Extension(
        "_native",
        [os.path.relpath(path) for path in sources],
        define_macros=[("Py_LIMITED_API", _LIMITED_API)],
        py_limited_api=True,
        extra_compile_args=list(flags),
    )
    command: Any = Distribution({"name": "omniattn", "ext_modules": [extension]}).get_command_obj("build_ext")
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        command.build_lib = command.build_temp = folder
        command.ensure_finalized()
        command.run()
        os.replace(Path(folder) / command.get_ext_filename("_native"), output)
    return output


if __name__ == "__main__":
    print(build(output=Path(sys.argv[1]) if len(sys.argv) > 1 else None))
