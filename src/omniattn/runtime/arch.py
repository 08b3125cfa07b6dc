"""GPU targets: names, order, and which binary runs where."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError

_PATTERN = re.compile(r"(?:(sm|compute)_)?(\d{2,3})([af]?)")


@dataclass(frozen=True)
class Arch:
    """A compilation target.

    Attributes
    ----------
    major, minor : int
        Compute capability.
    suffix : str
        ``"a"`` (that capability alone), ``"f"`` (its family) or ``""``.
    virtual : bool
        True for PTX (``compute_90``), which the driver translates when it loads it.
    """

    major: int
    minor: int
    suffix: str = ""
    virtual: bool = False

    @classmethod
    def parse(cls, text: str, *, argument: str = "arch") -> Arch:
        """Read ``"90a"``, ``"sm_90a"`` or ``"compute_80"``."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(argument, "a target such as 'sm_90a', '90a' or 'compute_80'", repr(text))
        kind, digits, suffix = match.groups()
        return cls(int(digits[:-1]), int(digits[-1]), suffix, kind == "compute")

    @classmethod
    def of_device(cls, cc: tuple[int, int]) -> Arch:
        """The target to compile for on this very device: the one with all its instructions."""
        return cls(cc[0], cc[1], "a" if cc[0] >= 9 else "")

    @property
    def cc(self) -> tuple[int, int]:
        """Compute capability."""
        return self.major, self.minor

    @property
    def number(self) -> str:
        """``"90a"``, as manifests and the registry write it."""
        return f"{self.major}{self.minor}{self.suffix}"

    def __str__(self) -> str:
        return f"{'compute' if self.virtual else 'sm'}_{self.number}"

    def runs_on(self, cc: tuple[int, int]) -> bool:
        """Whether a cubin of this target runs on a device (PTX: whether the driver can translate it)."""
        if self.suffix == "a":
            return self.cc == cc
        if self.virtual and not self.suffix:
            return self.cc <= cc
        return self.major == cc[0] and self.minor <= cc[1]

    def preference(self) -> tuple[int, int]:
        """Sort key among the targets that run on a device: exact ``a``, then family, then nearest minor."""
        return ({"a": 0, "f": 1, "": 2}[self.suffix], -self.minor)
