"""KV cache: append new keys and values, rotating keys and queries in the same pass."""

from tilesmith.ops.cache.op import kv_cache_append

__all__ = ["kv_cache_append"]
