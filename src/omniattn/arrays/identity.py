"""Objects by their identity."""

from __future__ import annotations

from typing import Any


class Same:
    """An object by its identity, for facts: the key that holds it keeps the object alive."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of
