"""Compiles ``native/*.c`` to the optional module ``omniattn._native``: ``python -m build_tools.native [OUTPUT]``.

Needs a C compiler (``CC``, else cc, gcc or clang) and Python's headers, neither CUDA nor a framework. The module is for
every Python from 3.10 on.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "_native.abi3.so"
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
    if program is None:
        raise RuntimeError("omniattn._native needs Linux, a C compiler (set CC) and Python's headers")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    output = output or root / "src/omniattn" / NAME
    sources = sorted(str(path) for path in (root / "native").glob("*.c"))
    command = [
        *program, "-shared", "-fPIC", "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden",
        f"-DPy_LIMITED_API={_LIMITED_API}", f"-I{sysconfig.get_path('include')}", *flags, *sources, "-o", str(output),
        "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return output


if __name__ == "__main__":
    print(build(output=Path(sys.argv[1]) if len(sys.argv) > 1 else None))
