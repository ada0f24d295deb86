"""KV pages: the allocator, the prefix cache and the manager that lends pages to requests."""

from exactspec.cache.allocator import CacheIntegrityError, PagePool
from exactspec.cache.manager import CacheManager
from exactspec.cache.radix import RadixTree

__all__ = ["CacheIntegrityError", "CacheManager", "PagePool", "RadixTree"]
