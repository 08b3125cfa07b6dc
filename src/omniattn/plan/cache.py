"""The plans of this process by the facts of their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from ..runtime.driver import on_reset

T = TypeVar("T")


class PlanCache(Generic[T]):
    """A dictionary that keeps the newest entries: where it is full, the older half goes.

    Parameters
    ----------
    most : int
        Entries.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._plans: dict[Hashable, T] = {}
        #: Look up; None for a key that is not there.
        self.get = self._plans.get
        self._followers: list[Callable[[], None]] = []
        # A plan holds loaded kernels, which are worth nothing under another driver or in a forked child.
        on_reset(self.clear)

    def put(self, key: Hashable, plan: T) -> None:
        """Keep a plan."""
        with self._lock:
            if len(self._plans) >= self._most:
                for old in list(self._plans)[: max(1, self._most // 2)]:
                    del self._plans[old]
            self._plans[key] = plan

    def follow(self, other: PlanCache[Any]) -> None:
        """Forget all whenever ``other`` does: what is kept here was made of its plans."""
        other.lead(self.clear)

    def lead(self, clear: Callable[[], None]) -> None:
        """Call ``clear`` whenever all is forgotten."""
        self._followers.append(clear)

    def clear(self) -> None:
        """Forget all."""
        # Another thread of the parent may have held the lock when it forked.
        self._lock = threading.Lock()
        self._plans.clear()
        for follower in self._followers:
            follower()

    def __len__(self) -> int:
        return len(self._plans)
