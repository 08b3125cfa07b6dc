"""KV caches: their memory, the blocks they are made of, and the formats of their bytes."""

from .blocks import BlockManager
from .cache import KVCache, PagedKVCache

__all__ = ["BlockManager", "KVCache", "PagedKVCache"]
