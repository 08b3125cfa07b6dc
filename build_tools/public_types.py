"""Types of the public names as a strict checker sees them: writes a module that uses each, and has pyright check it.

python -m build_tools.public_types         # needs pyright (extra `types`)
python -m build_tools.public_types --text  # the module alone
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import omniattn
from build_tools.site import MODULES, public_names

ROOT = Path(__file__).resolve().parents[1]
#: What needs a framework that need not be installed says Any of the framework's types.
OPTIONS = {
    "typeCheckingMode": "strict",
    "reportMissingImports": "none",
    "reportMissingModuleSource": "none",
    "reportMissingTypeStubs": "none",
}


def text() -> str:
    """A module in which every public name, and every public attribute of a public class, is an expression."""
    lines = ["import omniattn", *(f"import {module}" for module in MODULES), "", "_: list[object] = ["]
    for name in sorted(set(omniattn.__all__) - {"errors"}):
        lines.append(f"    omniattn.{name},")
        value = getattr(omniattn, name)
        if isinstance(value, type):
            slots = {x for cls in value.__mro__ for x in getattr(cls, "__slots__", ())}
            found = [x for x in dir(value) if not x.startswith("_") and x not in slots]
            lines += [f"    omniattn.{name}.{x}," for x in sorted(found)]
    lines += [f"    {module}.{name}," for module in MODULES for name in public_names(module)]
    return "\n".join([*lines, "]", ""])


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.public_types", description=__doc__.partition("\n")[0])
    parser.add_argument("--text", action="store_true", help="print the module, check nothing")
    if parser.parse_args(arguments).text:
        print(text(), end="")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "names.py").write_text(text(), encoding="utf-8")
        config = {"include": ["names.py"], "extraPaths": [str(ROOT / "src")], **OPTIONS}
        (Path(folder) / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
        return subprocess.call([sys.executable, "-m", "pyright", "--project", folder, "--pythonpath", sys.executable])


if __name__ == "__main__":
    raise SystemExit(main())
