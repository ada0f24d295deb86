"""No growth over 2,000 requests: what is allocated at the start is all there is."""

from __future__ import annotations

import random

import pytest

from exactspec.engine.llm import LLM
from exactspec.types import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.long]
GROWTH_MIB = 48  # allocator noise; a leak of one 1,000-token page list or logits row a request would pass it by far


def test_memory_does_not_grow_over_2000_requests():
    psutil = pytest.importorskip("psutil")
    llm = LLM("smollm2-135m", draft="dspark", kv_tokens=8192, max_running_requests=16)
    chance = random.Random(0)

    def batch(count: int) -> None:
        prompts = [[chance.randrange(49000) for _ in range(chance.randrange(4, 60))] for _ in range(count)]
        params = [
            SamplingParams(
                max_new_tokens=chance.randrange(1, 9),
                temperature=chance.choice([0.0, 1.0]),
                logprobs=chance.choice([None, 0, 5]),
                prompt_logprobs=chance.choice([None, None, 2]),
                frequency_penalty=chance.choice([0.0, 0.0, 0.5]),
                stop=chance.choice([None, ["zq"]]),
            )
            for _ in range(count)
        ]
        llm.generate(prompts, params)

    batch(500)  # caches of the allocator, the prefix tree and the noise fill up
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        batch(100)
    growth = (psutil.Process().memory_info().rss - before) / 2**20
    assert growth < GROWTH_MIB, f"grew by {growth:.0f} MiB"
    llm.engine.check_integrity()
    assert llm.engine.flush_cache()
    assert llm.engine.cache.num_free == llm.engine.cache.num_pages
