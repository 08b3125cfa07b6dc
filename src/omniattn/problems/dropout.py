"""Dropout of a call: how many of 256 probabilities it drops. No pointers, no framework objects."""

from __future__ import annotations

from dataclasses import dataclass

#: Values of the byte that decides about a probability.
LEVELS = 256
#: Of seed and offset, 32 bits each.
WORDS = 4


@dataclass(frozen=True)
class DropoutProblem:
    """Dropout of the probabilities of attention.

    Attributes
    ----------
    threshold : int
        Of `LEVELS`: a probability whose byte is below it is dropped; from 1 to 255.
    """

    threshold: int

    @property
    def p(self) -> float:
        """The share that is dropped."""
        return self.threshold / LEVELS

    @property
    def scale(self) -> float:
        """What is kept is multiplied by it: 1 / (1 - p)."""
        return LEVELS / (LEVELS - self.threshold)


def dropout_of(p: float) -> DropoutProblem | None:
    """Dropout by a share of at least 0 and less than 1, rounded to a multiple of 1/256 from 1/256 to 255/256.

    None for 0, which drops nothing. The scale is that of the rounded share, so that the mean of o is o without dropout.
    """
    return DropoutProblem(min(max(round(p * LEVELS), 1), LEVELS - 1)) if p else None
