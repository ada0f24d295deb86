"""Which runner makes the rounds: the ordinary one, or a device's own where it has one."""

from __future__ import annotations

from exactspec.backend.base import KVPool
from exactspec.draft.base import Drafter
from exactspec.engine.round import RoundRunner
from exactspec.engine.verify_policy import VerifyPolicy
from exactspec.model.target import TargetModel
from exactspec.sampling.sampler import Sampler


def make_runner(
    target: TargetModel,
    drafter: Drafter,
    sampler: Sampler,
    policy: VerifyPolicy,
    pool: KVPool,
    page_size: int,
    most_requests: int,
) -> RoundRunner:
    """Same results either way, bit for bit. `most_requests`: requests that a step may hold."""
    if target.backend.name != "cuda":
        return RoundRunner(target, drafter, sampler, policy, pool, page_size)
    from exactspec.engine.cuda_round import CudaRoundRunner

    return CudaRoundRunner(target, drafter, sampler, policy, pool, page_size, most_requests)
