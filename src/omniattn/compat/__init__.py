"""Functions of FlashAttention, SageAttention, SpargeAttn, FlashInfer and FlashMLA on omniattn, for code that uses them.

Use the modules themselves, ``from omniattn.compat.flash_attn import flash_attn_func``, or, for code that imports the
original, `install`. Importing this package imports no framework and installs nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentError

__all__ = ["install", "uninstall"]

#: What `install` takes -> original modules, and the modules of this package that stand in for them.
_MODULES = {
    "flash_attn": {
        "flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn",
        "flash_attn.bert_padding": "bert_padding",
    },
    "flash_attn_interface": {
        "flash_attn_interface": "flash_attn_interface", "flash_attn_3": "flash_attn_interface",
        "flash_attn_3.flash_attn_interface": "flash_attn_interface",
    },
    "sageattention": {"sageattention": "sageattention", "sageattention.core": "sageattention"},
    "flashinfer": {
        "flashinfer": "flashinfer", "flashinfer.decode": "flashinfer", "flashinfer.prefill": "flashinfer",
        "flashinfer.cascade": "flashinfer", "flashinfer.page": "flashinfer",
    },
    "flash_mla": {"flash_mla": "flash_mla", "flash_mla.flash_mla_interface": "flash_mla"},
    "spas_sage_attn": {"spas_sage_attn": "spas_sage_attn", "spas_sage_attn.core": "spas_sage_attn"},
}  # fmt: skip
#: Those that are installed by their name only: code that finds the original expects more of it than attention.
_BY_NAME = ("flashinfer", "flash_mla", "spas_sage_attn")
#: Names of the distributions that the originals come with.
_DISTRIBUTIONS = {
    "flash_attn": ("flash-attn",), "flash_attn_interface": ("flash-attn-3",), "sageattention": ("sageattention",),
    "flashinfer": ("flashinfer-python",), "flash_mla": ("flash-mla",),
    "spas_sage_attn": ("spas-sage-attn",),
}  # fmt: skip

#: What stood in sys.modules before, None for nothing, by name of `install` and module.
_before: dict[str, dict[str, ModuleType | None]] = {}


def install(*names: str, replace: bool = False) -> None:
    """Let ``import flash_attn`` (and so on) find the modules of this package, in this process.

    Importing omniattn never does that by itself. Call it before anything else imports the original, or asks whether it
    is there. `importlib.util.find_spec`, ``__version__`` and `importlib.metadata` answer as for the original, whose
    version the modules say.

    Parameters
    ----------
    names : str
        "flash_attn" (with "flash_attn.flash_attn_interface" and "flash_attn.bert_padding"), "flash_attn_interface"
        (FlashAttention-3; with "flash_attn_3"), "sageattention" (with "sageattention.core"). These three unless given.
        Or "flashinfer" (with "flashinfer.decode", ".prefill", ".cascade" and ".page"), whose attention over caches is
        all that is there, "flash_mla", whose attention is, and "spas_sage_attn" (with "spas_sage_attn.core"), whose
        functions of SageAttention2 are: for code that uses nothing else of them. What is installed already stays.
    replace : bool
        Also where the original has been imported. Whoever holds its functions keeps them.

    Raises
    ------
    ArgumentError
        Another name, or the original has been imported; nothing has been installed then.
    ImportError
        There is no torch.
    """
    function = "compat.install"
    names = _checked(names, function) or tuple(name for name in _MODULES if name not in _BY_NAME)
    wanted = [name for name in names if name not in _before]
    for name in wanted:
        there = [module for module in _MODULES[name] if sys.modules.get(module) is not None]
        if there and replace is not True:
            hint = "compat.install(..., replace=True) puts it aside until compat.uninstall()"
            raise ArgumentError("names", "modules that are not imported yet", there[0], function=function, hint=hint)
    sources = {source: import_module(f"{__name__}.{source}") for name in wanted for source in _MODULES[name].values()}
    for name in wanted:
        # Other modules of the original would be the original's beside ours: they are put aside too.
        own = [module for module in sys.modules if module.split(".")[0] in _packages(name)]
        _before[name] = {module: sys.modules.pop(module) for module in own}
        _before[name] |= {module: None for module in _MODULES[name] if module not in _before[name]}
        for module, source in _MODULES[name].items():
            made = _stand_in(module, sources[source], name)
            sys.modules[module] = made
            parent, _, child = module.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, made)
    if wanted and _finder not in sys.meta_path:
        # First, so that what it says comes before an original that is on the disk.
        sys.meta_path.insert(0, _finder)


def uninstall(*names: str) -> None:
    """Undo `install`: what was imported before is back, and what was not is found on the disk, or not at all.

    Parameters
    ----------
    names : str
        As for `install`. All that are installed unless given.

    Raises
    ------
    ArgumentError
        Another name.
    """
    for name in _checked(names, "compat.uninstall") or tuple(_before):
        for module, old in _before.pop(name, {}).items():
            sys.modules.pop(module, None)
            if old is not None:
                sys.modules[module] = old
    if not _before and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _checked(names: tuple[str, ...], function: str) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or name not in _MODULES:
            raise ArgumentError("names", " or ".join(map(repr, _MODULES)), repr(name), function=function)
    return names


def _packages(name: str) -> set[str]:
    """Top-level modules."""
    return {module.split(".")[0] for module in _MODULES[name]}


def _stand_in(module: str, source: ModuleType, name: str) -> ModuleType:
    """A module of the original's name, with everything that ``source`` has."""
    made = ModuleType(module, source.__doc__)
    made.__dict__.update({key: value for key, value in vars(source).items() if not key.startswith("__")})
    for key in ("__all__", "__getattr__", "__file__"):
        if key in vars(source):
            made.__dict__[key] = vars(source)[key]
    is_package = any(other.startswith(module + ".") for other in _MODULES[name])
    made.__spec__ = ModuleSpec(module, None, origin=source.__name__, is_package=is_package)
    made.__package__ = module if is_package else module.rpartition(".")[0]
    if is_package:
        made.__path__ = []
    made.__dict__["__version__"] = _version(name)
    return made


def _version(name: str) -> str:
    """Version of the original that a module follows."""
    return str(import_module(f"{__name__}.{name}").__version__)


class _Metadata(Distribution):
    """What `importlib.metadata` says of an original: name, version and top-level modules."""

    def __init__(self, name: str, distribution: str) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {_version(name)}\n"
            f"Summary: omniattn.compat.{name}\n",
            "top_level.txt": "\n".join(sorted(_packages(name))) + "\n",
        }

    def read_text(self, filename: Any) -> str | None:
        """A file of the metadata; None for all but two."""
        return self._texts.get(str(filename))

    def locate_file(self, path: Any) -> Path:
        """A path below this package: there are no files."""
        return Path(__file__).parent / str(path)


class _Finder(DistributionFinder):
    """Distributions of what is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Modules are in sys.modules."""
        return

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """Those of the name that is asked for, or all."""
        asked = getattr(context, "name", None)
        for name in _before:
            for distribution in _DISTRIBUTIONS[name]:
                if asked is None or re.sub(r"[-_.]+", "-", asked).lower() == distribution:
                    yield _Metadata(name, distribution)


_finder = _Finder()
