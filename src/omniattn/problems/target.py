"""What selection and builders look at of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Facts of a GPU.

    Attributes
    ----------
    cc : (major, minor)
        Compute capability.
    max_smem : int
        Bytes of shared memory that one CTA can opt in to.
    sm_count : int
        Streaming multiprocessors.
    """

    cc: tuple[int, int]
    max_smem: int
    sm_count: int = 1
