"""KV caches: their memory (`cache`), the blocks they are made of (`blocks`), and the formats of their bytes."""
