"""Seeds of requests and of their n samples."""

from __future__ import annotations

import hashlib
import secrets


def fresh_seed() -> int:
    """A seed for a request that brings none: 63 random bits, so that clients can send it back as a JSON integer."""
    return secrets.randbits(63)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of n, a signed 64-bit integer: the seed itself for index 0, a hash of both after that.

    A hash, not seed + index: two requests whose seeds are neighbours must not share samples.
    """
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little", signed=True) + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"sample-seed").digest(), "little", signed=True)
