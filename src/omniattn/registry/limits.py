"""How far kernels can count. Standard library only."""

from __future__ import annotations

#: Columns of partial results, in units of four channels: offsets have 31 bits, and end some rows before.
MAX_COLUMNS = 2**31 - 2**10
#: Tiles of persistent kernels, likewise.
MAX_ITEMS = 2**31 - 2**16
