"""One call of ``attention_with_kvcache``: attention over pages, or one of ``decode``, as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

from .attention import AttentionProblem
from .decode import DecodeProblem
from .outputs import Output


def few_queries(group: int) -> int:
    """Queries of a sequence up to which ``decode``'s kernels have no row too many: their smallest tile has 8.

    ``group``: query heads of a kv head.
    """
    return max(1, 8 // group)


@dataclass(frozen=True)
class WithCacheProblem:
    """One call of ``attention_with_kvcache``, after validation.

    Attributes
    ----------
    kernels : AttentionProblem or DecodeProblem
        The call of the kernels that run it. That of attention has the rows of all sequences packed, those of a batch
        too; that of ``decode`` is a batch.
    q_shape : tuple of int
        Of q and o as the caller has them.
    capacity : int
        Tokens that a sequence can have at most.
    window : (int, int)
        Keys visible left and right of the diagonal, -1 for all; causal is a right side of 0.
    why : str
        Why these kernels.
    batch_index : bool
        Each sequence names the one of a contiguous cache that it reads.
    few : DecodeProblem, optional
        Of packed queries that attention over pages runs: the call of ``decode``'s kernels on the sequences that have a
        few, which may take these off it.
    """

    kernels: AttentionProblem | DecodeProblem
    q_shape: tuple[int, ...]
    capacity: int
    window: tuple[int, int]
    why: str
    batch_index: bool = False
    few: DecodeProblem | None = None

    @property
    def by_decode(self) -> bool:
        """Whether the kernels of ``decode`` run it."""
        return isinstance(self.kernels, DecodeProblem)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Arrays that the call makes. The LSE is as its kernels write it: `lse_is_own` says whether as the caller's."""
        o, *lse = self.kernels.outputs
        return (Output("o", self.q_shape, o.dtype), *lse)

    @property
    def lse_is_own(self) -> bool:
        """Whether the LSE is (heads, rows) of packed queries, (batch, heads, q_len) of a batch; else it needs a view.

        The kernels of ``decode`` write (batch, heads, q_len), those over pages (heads, rows).
        """
        return self.by_decode or len(self.q_shape) == 3
