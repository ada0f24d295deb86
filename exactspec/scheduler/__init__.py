"""Continuous batching under a page budget."""

from exactspec.scheduler.plan import PrefillChunk, StepPlan
from exactspec.scheduler.scheduler import Scheduler, max_cached_tokens

__all__ = ["PrefillChunk", "Scheduler", "StepPlan", "max_cached_tokens"]
