"""The kernels that prepare a mask for attention."""

from __future__ import annotations

from ..problems import AttentionProblem, Target
from .choice import Selection, only, the_one


def select_masks(problem: AttentionProblem, target: Target, force: str | None = None) -> tuple[Selection, Selection]:
    """The kernel that packs a mask, and the one that lists the tiles of keys that it leaves.

    Raises
    ------
    ArgumentError
        ``force`` names another kernel of these operations.
    UnsupportedError
        The GPU is too old.
    """
    kind = "a boolean mask" if problem.mask == "bool" else "an additive mask of keys"
    pack = only("mask_pack", lambda spec: spec.dtype == problem.dtype)
    return the_one(pack, f"packs {kind} by tiles of 64 queries and 64 keys", target, force), _listing(target, force)


def select_tile_kinds(target: Target, force: str | None = None) -> tuple[Selection, Selection]:
    """The kernel that finds out what a block mask or a mask expression leaves of each tile, and the one that lists it.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `select_masks`.
    """
    what = "finds out which tiles of 64 queries and 64 keys are visible"
    return the_one(only("tile_kinds"), what, target, force), _listing(target, force)


def select_mask_align(target: Target, force: str | None = None) -> Selection:
    """The kernel that copies an additive mask to where a tensor map can describe it.

    Raises
    ------
    ArgumentError, UnsupportedError
        As `select_masks`.
    """
    return the_one(only("mask_align"), "copies the mask to rows at multiples of 16 bytes", target, force)


def _listing(target: Target, force: str | None) -> Selection:
    return the_one(only("mask_list"), "lists the tiles of keys that the mask and the window leave", target, force)
