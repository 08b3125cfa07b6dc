"""The newest tokens of a quantized cache, which it keeps in 16 bits: what a constructor may be given."""

from __future__ import annotations

from typing import Any

from .. import arguments
from ..errors import ArgumentError
from .formats import KV_ARRAY_DTYPES, KVFormat
from .on_arrays import MAX_CACHE_ROWS

#: Tokens that a ring of the newest ones has beyond the window: as many as `decode` takes may be dropped again, and the
#: window is still whole.
RECENT_SPARE = 16


def check_recent(cache: Any, name: str, window: Any, dtype: Any, slots: Any) -> tuple[int, int, KVFormat | None]:
    """Tokens, slots and format of a cache's recent window; (0, 0, None) for none. Its other attributes are known."""
    tokens = arguments.check_int(window, "recent_window", name)
    formats = (cache.k_format, cache.v_format)
    exact = next((f.dtype for f in formats if not f.quantized), None)
    if tokens == 0:
        # KVCache's slots are its sequences, no argument.
        for value, argument in ((dtype, "recent_dtype"), (slots if cache.paged else None, "recent_slots")):
            if value is not None:
                raise ArgumentError(argument, "None without recent_window", repr(value), function=name)
        return 0, 0, None
    if not any(f.quantized for f in formats):
        expected = f"0 with {exact!r}, which keeps all tokens as they are; a window is for 'fp8', 'int8' and 'int4'"
        raise ArgumentError("recent_window", expected, repr(window), function=name)
    if dtype is None:
        dtype = exact or "bf16"
    choices = tuple(KV_ARRAY_DTYPES) if exact is None else (exact,)
    if not isinstance(dtype, str) or dtype not in choices:
        expected = " or ".join(map(repr, choices)) if exact is None else f"{exact!r}, like the 16-bit K or V"
        raise ArgumentError("recent_dtype", expected, repr(dtype), function=name)
    if slots is None:
        raise ArgumentError("recent_slots", "an integer >= 1, with recent_window", "None", function=name)
    count = arguments.check_int(slots, "recent_slots", name, least=1, most=arguments.MAX_ROWS)
    ring = tokens + RECENT_SPARE
    if ring > arguments.MAX_ROWS or count * ring * cache.num_kv_heads > MAX_CACHE_ROWS:
        expected = f"at most {MAX_CACHE_ROWS} rows in all (slots x ({tokens} + {RECENT_SPARE}) x heads)"
        received = f"{count} x {ring} x {cache.num_kv_heads}"
        raise ArgumentError("recent_window", expected, received, function=name)
    return tokens, count, KVFormat(dtype, cache.head_dim, cache.k_format.row_dim, False, True)
