"""Hatchling hook: compiles the prebuilt kernels and puts packs, manifest and kernel sources into the wheel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Where the wheel keeps what came from ``kernels_cu`` and ``build/kernels``.
WHEEL_KERNELS = "omniattn/_kernels"


class KernelBuildHook(BuildHookInterface):
    """Adds ``omniattn/_kernels`` to a wheel; leaves editable installs and sdists alone."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, then name every file for the wheel."""
        if self.target_name != "wheel" or version == "editable":
            return
        root = Path(self.root)
        if str(root) not in sys.path:
            # The isolated build environment knows backend-path only, and worker processes inherit sys.path.
            sys.path.insert(0, str(root))
        from build_tools import native, sbom
        from build_tools.kernels import build, kernel_sources

        # pip shows this with -v alone; README says it too.
        print(
            "omniattn: a wheel holds every kernel for every target; compiling them takes about 100 minutes of one "
            "core, shared by all cores, and only what changed the next time (pip install -e . compiles nothing)",
            file=sys.stderr,
        )
        built = build(root)
        include: dict[str, str] = build_data["force_include"]
        for path in kernel_sources(root / "kernels_cu"):
            inside = path.relative_to(root / "kernels_cu").as_posix()
            include[str(path)] = f"{WHEEL_KERNELS}/src/{inside}"
        for file in built.files:
            include[str(built.folder / file)] = f"{WHEEL_KERNELS}/{file}"
        with_native = os.environ.get("OMNIATTN_BUILD_NATIVE") == "1"
        bill = sbom.write(root, built.manifest, native.NAME if with_native else None)
        build_data["sbom_files"].append(bill.relative_to(root).as_posix())
        if with_native:
            module = native.build(root, root / "build" / native.NAME)
            include[str(module)] = f"omniattn/{native.NAME}"
            build_data["pure_python"] = False
            build_data["tag"] = native.wheel_tag()
            return
        # Cubins know no host operating system and no Python ABI.
        build_data["pure_python"] = True
        build_data["tag"] = "py3-none-any"
