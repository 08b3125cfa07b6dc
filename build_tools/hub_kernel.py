"""The package as a kernel of Hugging Face's ``kernels``: a folder that ``kernels.get_local_kernel`` loads.

    python -m build_tools.hub_kernel FOLDER --wheel FILE   # of a wheel, with its kernels
    python -m build_tools.hub_kernel FOLDER                # of this checkout: for the CPU only

Several versions of a kernel may be loaded in one process, under names that the loader gives them. So imports are
relative throughout, and torch's library of operators has a name of its own in each folder. What needs the installed
package stays away: the command line, benchmarks, tuning, and the integrations of engines that load plugins by name.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from pathlib import Path

from omniattn.errors import ArgumentError
from omniattn.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "omniattn"
#: The oldest version of `kernels` that this folder was loaded by.
LEAST_KERNELS = "0.17.0"
LEFT_OUT = ("__main__.py", "bench", "cli", "integrations/sglang*", "integrations/vllm", "testing", "tune")
#: Names that transformers and users of flash-attn ask a kernel for, with their modules; and modules.
EXTRA_NAMES = {
    **dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"), "compat.flash_attn"),
    "sageattn": "compat.sageattention",
    **dict.fromkeys(("compat", "distributed", "integrations", "jax", "torch"), ""),
}
VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}

CARD = """---
library_name: kernels
license: apache-2.0
---
# omniattn {version}

Attention kernels for NVIDIA GPUs from Ampere on.

```python
from kernels import get_kernel

oa = get_kernel("{repository}")
o = oa.attention(q, k, v, causal=True)
```

In transformers: `attn_implementation="{repository}"`, which calls `flash_attn_func` and `flash_attn_varlen_func`. For
masks, softcap, sinks and other precisions call
`importlib.import_module(f"{{oa.__name__}}.integrations.transformers").register()`, then
`model.set_attn_implementation("omniattn")`. `flash_attn_func`, `flash_attn_varlen_func`, `flash_attn_with_kvcache` and
`sageattn` are there by these names.

`torch-cuda` needs cuda-bindings, which CUDA builds of torch 2.10 and newer require, or CuPy with
`OMNIATTN_DRIVER=cupy`; `torch-cpu` is the NumPy reference.
"""


def rewritten(source: str, parts: tuple[str, ...], library: str) -> str:
    """A module's text with relative imports and operators of the library ``library``.

    Parameters
    ----------
    source : str
    parts : tuple of str
        Names of the package's folders that the module lies in.
    library : str
        Name of torch's library of operators.
    """
    lines = source.splitlines(keepends=True)
    dots = "." * (len(parts) + 1)
    root = '__import__(__name__.partition(".")[0])'
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            below = (node.module or "").partition(".")[2]
            _put(lines, node, f"from {PACKAGE}{'.' * bool(below)}{below} import", f"from {dots}{below} import")
        elif isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            if len(node.names) != 1:
                raise ValueError(f"line {node.lineno}: an import of several modules, one of them {PACKAGE}")
            (alias,) = node.names
            below = alias.name.partition(".")[2]
            if alias.asname and below:
                made = f"from {dots}{below.rpartition('.')[0]} import {below.rpartition('.')[2]} as {alias.asname}"
            elif below:
                made = f'{PACKAGE} = __import__(__name__.partition(".")[0] + ".{below}")'
            else:
                made = f"{alias.asname or PACKAGE} = {root}"
            _put(lines, node, ast.unparse(node), made)
    text = "".join(lines)
    text = text.replace(f'Library("{PACKAGE}"', f'Library("{library}"')
    text = text.replace(f"torch.ops.{PACKAGE}", f"torch.ops.{library}")
    text = re.sub(rf"\b{PACKAGE}::", f"{library}::", text)
    return text.replace(f'import_module("{PACKAGE}._native")', 'import_module(__name__.partition(".")[0] + "._native")')


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _put(lines: list[str], node: ast.stmt, old: str, new: str) -> None:
    line = lines[node.lineno - 1]
    if old not in line:
        raise ValueError(f"line {node.lineno}: {old!r} expected, {line.strip()!r} found")
    lines[node.lineno - 1] = line.replace(old, new, 1)


def _is_left_out(path: Path) -> bool:
    texts = [path.as_posix(), *(parent.as_posix() for parent in path.parents)]
    return "__pycache__" in path.parts or any(
        Path(text).match(pattern) for text in texts for pattern in LEFT_OUT if text.count("/") == pattern.count("/")
    )


def with_extra_names(text: str) -> str:
    """The package's ``__init__`` that has `EXTRA_NAMES` too, loaded when they are first used."""
    marker = "_ROOMS = {\n"
    if text.count(marker) != 1:
        raise ValueError(f"{PACKAGE}/__init__.py: {marker!r} expected once")
    return text.replace(marker, marker + "".join(f'    "{name}": "{room}",\n' for name, room in EXTRA_NAMES.items()))


def write(folder: Path, package: Path, repository: str) -> None:
    """Write the kernel's folder.

    Parameters
    ----------
    folder : Path
        New or empty.
    package : Path
        The package's folder, of a checkout or of an unpacked wheel.
    repository : str
        What the card calls it, ``"owner/name"``.

    Raises
    ------
    ArgumentError
        A folder that holds something, a package without `__init__.py`.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ArgumentError("FOLDER", "a new or empty folder", str(folder), function="hub_kernel")
    if not (package / "__init__.py").exists():
        raise ArgumentError("package", "a folder with __init__.py", str(package), function="hub_kernel")
    files = [p for p in sorted(package.rglob("*")) if p.is_file() and not _is_left_out(p.relative_to(package))]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    identity = f"{re.sub(r'[^a-z0-9]', '_', __version__)}_{digest.hexdigest()[:12]}"
    for variant, backend in VARIANTS.items():
        if backend == "cuda" and not (package / "_kernels").exists():
            continue
        name = f"_{PACKAGE}_{backend}_{identity}"
        for path in files:
            below = path.relative_to(package)
            if backend == "cpu" and below.parts[0] == "_kernels":
                continue
            if path.suffix in (".so", ".pyd"):
                continue  # one folder serves every Python and system
            place = folder / "build" / variant / below
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix != ".py":
                shutil.copyfile(path, place)
                continue
            text = rewritten(path.read_text(encoding="utf-8"), below.parts[:-1], name)
            place.write_text(with_extra_names(text) if below.as_posix() == "__init__.py" else text, encoding="utf-8")
        facts = {
            "id": name, "name": PACKAGE, "version": 1, "license": "apache-2.0", "kernels-minver": LEAST_KERNELS,
            "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (folder / "build" / variant / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD.format(version=__version__, repository=repository), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m build_tools.hub_kernel", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="take the package, with its kernels, from this wheel"
    )
    parser.add_argument("--repository", default=f"{PACKAGE}/{PACKAGE}", metavar="OWNER/NAME", help="for the card")
    given = parser.parse_args(arguments)
    if given.wheel is None:
        write(given.folder, ROOT / "src" / PACKAGE, given.repository)
        return 0
    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(given.wheel) as wheel:
            wheel.extractall(unpacked)
        write(given.folder, Path(unpacked) / PACKAGE, given.repository)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
