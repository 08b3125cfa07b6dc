"""The wheel's bill of materials (CycloneDX 1.6, PEP 770): what is in it, what it requires, what compiled it.

The wheel holds nothing of others: the kernels include no header of the CUDA toolkit, and the C module links against
nothing but the C library. What it requires is listed as such.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "omniattn.cdx.json"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)([^;]*)")


def document(manifest: Mapping[str, Any], license_id: str, requirements: Iterable[str], native: str | None) -> str:
    """The bill of one wheel as JSON text; the same input gives the same bytes.

    Parameters
    ----------
    manifest : mapping
        That of the cubins: package version, compiler, and each pack's file and sha256.
    license_id : str
        SPDX identifier of the package.
    requirements : iterable of str
        What the package requires, as in its metadata.
    native : str, optional
        Name of the C module's file, if the wheel has it.
    """
    version = str(manifest["package_version"])
    own = f"pkg:pypi/omniattn@{version}"
    licenses = [{"license": {"id": license_id}}]
    files = [
        {
            "type": "file",
            "name": f"omniattn/_kernels/{pack['file']}",
            "hashes": [{"alg": "SHA-256", "content": pack["file_sha256"]}],
        }
        for pack in sorted(manifest["packs"], key=lambda pack: str(pack["file"]))
    ]
    if native is not None:
        files.append({"type": "file", "name": f"omniattn/{native}"})
    required = []
    for text in sorted(requirements):
        found = _REQUIREMENT.match(text)
        if found is None:
            raise ValueError(f"requirements: expected names with versions, received {text!r}")
        name = found[1].lower().replace("_", "-")
        required.append(
            {"type": "library", "bom-ref": f"pkg:pypi/{name}", "name": name, "purl": f"pkg:pypi/{name}",
             "properties": [{"name": "requirement", "value": text}]}
        )  # fmt: skip
    root = {
        "type": "library", "bom-ref": own, "name": "omniattn", "version": version, "purl": own, "licenses": licenses,
        "components": files,
    }  # fmt: skip
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [{"type": "application", "name": str(manifest["compiler"])}]},
            "component": root,
        },
        "components": required,
        "dependencies": [{"ref": own, "dependsOn": [part["bom-ref"] for part in required]}],
    }
    return json.dumps(bill, indent=1, sort_keys=True) + "\n"


def write(root: Path, manifest: Mapping[str, Any], native: str | None) -> Path:
    """Write the bill of a wheel of the checkout ``root`` below its build folder; return its path."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # hatchling itself depends on tomli there
        import tomli as tomllib
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    path = root / "build/sbom" / ("platform" if native else "any") / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(manifest, project["license"], project["dependencies"], native), encoding="utf-8")
    return path
