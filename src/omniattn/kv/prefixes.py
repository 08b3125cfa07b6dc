"""The tree of prefixes: which block holds which tokens behind which others.

A node is a full block of tokens; its path from the root is all that comes before. Children are found by their tokens
themselves, in a dictionary, which compares keys of equal hash: two prefixes are never taken for one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..errors import ArgumentError

#: Tokens of one block.
Key = tuple[Any, ...]


class Node:
    """A full block of tokens, behind those of its parents.

    Attributes
    ----------
    parent : Node or None
        None of a root, whose ``key`` is the salt.
    key : tuple or hashable
    children : dict
    block : int or None
        Block that holds them; None where it has gone while children, or sequences behind, are still there.
    pins : int
        Sequences whose last full block of known tokens this is: they go on from here.
    """

    __slots__ = ("block", "children", "key", "parent", "pins")

    def __init__(self, parent: Node | None, key: Any) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Key, Node] = {}
        self.block: int | None = None
        self.pins = 0


class PrefixTree:
    """Nodes by their tokens, a root for each salt; nodes that nobody needs any more go by themselves."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, Node] = {}

    @property
    def num_roots(self) -> int:
        """Salts that there is something for."""
        return len(self._roots)

    def root(self, salt: Hashable) -> Node:
        """The root of a salt. It stays once it is pinned or has children: `prune` it otherwise."""
        found = self._roots.get(salt)
        if found is None:
            found = self._roots[salt] = Node(None, salt)
        return found

    def child(self, node: Node, key: Key) -> Node:
        """The node of these tokens behind ``node``; made where there is none."""
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = Node(node, key)
        return found

    def find(self, salt: Hashable, tokens: Sequence[Any], left: int | None) -> list[Node]:
        """The longest prefix of whole blocks that can be read.

        Parameters
        ----------
        salt : hashable
        tokens : sequence
        left : int, optional
            Tokens that the next one sees on its left; None: all. Blocks before them may have gone, but for the nearest
            (see `first_needed`).

        Returns
        -------
        list of Node
            From the first block on.
        """
        size, node, path = self._block_size, self._roots.get(salt), []
        best = since = 0  # blocks of the longest one; the first block behind the last one that has gone
        for end in range(size, len(tokens) + 1, size):
            node = None if node is None else node.children.get(tuple(tokens[end - size : end]))
            if node is None:
                break
            path.append(node)
            if node.block is None:
                if left is None:
                    break
                since = len(path)
            elif since <= (0 if left is None else first_needed(end - left, size)):
                best = len(path)
        return path[:best]

    def pin(self, node: Node, before: Node | None = None) -> None:
        """A sequence goes on from ``node``, and no longer from ``before``."""
        node.pins += 1
        if before is not None:
            self.unpin(before)

    def unpin(self, node: Node) -> None:
        """A sequence ends that went on from here."""
        node.pins -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Drop a node that has nothing, and those above it that have nothing then."""
        at: Node | None = node
        while at is not None and at.block is None and not at.pins and not at.children:
            if at.parent is None:
                self._roots.pop(at.key, None)
            else:
                del at.parent.children[at.key]
            at = at.parent


def ancestor(node: Node, steps: int) -> Node:
    """The node so many blocks before this one."""
    for _ in range(steps):
        assert node.parent is not None
        node = node.parent
    return node


def path_to(node: Node) -> list[Node]:
    """The nodes from the first block to this one; empty for a root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def first_needed(begin: int, block_size: int) -> int:
    """The first block that a window from position ``begin`` on keeps: of those wholly left of it the nearest one.

    Kernels load keys in tiles, whose first one may begin left of the window. There the table's entries lead to that
    block: it is full, so that what is masked are numbers of the sequence itself, and not somebody's NaN.
    """
    return max(0, begin // block_size - 1)


def token_list(tokens: Any, function: str) -> list[Any]:
    """Tokens as a list of hashable objects."""
    try:
        found = list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)  # a text of NumPy has a tolist(), too
        hash(tuple(found))
    except (TypeError, RuntimeError):  # the latter of tensors that cannot be read: nested, sparse, without memory
        expected = "a sequence of hashable tokens, or a one-dimensional array"
        received = f"{type(tokens).__name__} {tokens!r}"
        raise ArgumentError("tokens", expected, received, function=f"BlockManager.{function}") from None
    return found


def check_salt(salt: Any, function: str) -> None:
    """Refuse a salt that is no key."""
    try:
        hash(salt)
    except TypeError:
        received = f"{type(salt).__name__} {salt!r}"
        raise ArgumentError("salt", "a hashable object", received, function=f"BlockManager.{function}") from None
