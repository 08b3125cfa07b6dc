"""What backends of engines are told of latent attention (MLA): its sizes, and how many tokens one call takes."""

from __future__ import annotations

from ..problems.decode import MAX_Q_LEN
from ..problems.with_cache import few_queries, fixed_rows
from ..registry.decode import LATENT_DIMS

__all__ = ["HEAD_DIM", "HEAD_DIM_V", "MOST_CHANNELS", "MOST_QUERIES", "most_queries", "takes_heads"]

#: Channels of a row, and of its value.
HEAD_DIM, HEAD_DIM_V = LATENT_DIMS
#: Tokens of a request that one call over the rows takes.
MOST_QUERIES = MAX_Q_LEN
#: Channels of a prompt's heads at most, which models make of the rows.
MOST_CHANNELS = 256


def most_queries(num_heads: int, *, deterministic: bool, in_8_bits: bool) -> int:
    """Tokens of a request that one call of packed queries over the rows takes."""
    return few_queries(num_heads, rows=fixed_rows(in_8_bits)) if deterministic else MOST_QUERIES


def takes_heads(*dims: int) -> bool:
    """Whether heads of prompts with so many channels are served."""
    return all(dim % 8 == 0 and 8 <= dim <= MOST_CHANNELS for dim in dims)
