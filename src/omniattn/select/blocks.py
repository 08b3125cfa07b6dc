"""The kernels that predict which blocks of attention are worth computing."""

from __future__ import annotations

from ..problems import Target
from ..problems.sparse_blocks import SparseBlocksProblem
from .choice import Selection, only, the_one


def select_blocks(
    problem: SparseBlocksProblem, target: Target, force: str | None = None
) -> tuple[Selection, Selection]:
    """The kernel that takes means of blocks, and the one that chooses by them.

    Raises
    ------
    ArgumentError
        ``force`` names another kernel of these operations.
    UnsupportedError
        The GPU is too old.
    """
    wide = only("block_means", lambda spec: spec.dtype == problem.dtype and spec.head_dim >= problem.head_dim)
    means = the_one(wide, f"{problem.dtype}, head_dim {problem.head_dim} in rows of {wide.head_dim}", target, force)
    return means, the_one(only("choose_blocks"), "keeps blocks by the products of their means", target, force)
