"""A runner whose rounds can be launched unread, on the CPU: it stands for a device that keeps the requests' state."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from exactspec.engine.batch import Block
from exactspec.engine.engine import Engine
from exactspec.engine.round import Flight, RoundResult, RoundRunner
from exactspec.scheduler.plan import StepPlan
from exactspec.types import RunningRequest


@dataclass
class EagerFlight:
    runner: LaunchingRunner
    requests: list[RunningRequest]
    result: RoundResult | None

    def read(self, live: Set[RunningRequest]) -> RoundResult:
        return self.runner.land(self, live)


class LaunchingRunner(RoundRunner):
    """A launched round runs at once, from copies of the requests that no stop ever cuts, as on a device.

    Checks what the pipeline promises: at most two rounds are unread at a time, a round behind another has only its
    requests, and when a round is read the host is where the device was.
    """

    fail_in = 0  # reads until one fails
    unread = 0
    num_launched = num_behind = num_dropped_rows = 0

    def can_launch(self, plan: StepPlan) -> bool:
        return not plan.prefills and all(r.history is None and r.grammar is None for r in plan.decodes)

    def launch(self, decodes: list[RunningRequest], behind: Flight | None = None) -> Flight:
        assert self.unread <= 1
        if behind is None:
            self._device = {}
            self.unread = 0  # of a round that nobody needed any more
        else:
            assert set(decodes) <= set(behind.requests)
            self.num_behind += 1
        copies = {}
        for request in decodes:
            copy = self._device[request] if behind else replace(request, token_ids=list(request.token_ids))
            copy.pages = list(request.pages)
            copies[request] = copy
        self._device = copies
        active = {copy: request for request, copy in copies.items() if len(copy.token_ids) < copy.max_tokens}
        result = super().run(StepPlan(decodes=list(active))) if active else None
        for block, accept in zip(result.sampled_blocks, result.accepted, strict=True) if result else ():
            copy = block.request
            block.request = active[copy]
            copy.token_ids.extend(accept.tokens)
            copy.kv_len += accept.num_accepted + 1
        self.unread += 1
        self.num_launched += 1
        return EagerFlight(self, decodes, result)

    def land(self, flight: EagerFlight, live: Set[RunningRequest]) -> RoundResult:
        self.unread -= 1
        self.fail_in -= 1
        if self.fail_in == 0:
            raise RuntimeError("the read-back failed")
        result = flight.result
        assert result is not None, "a round in which nobody could be active was launched and read"
        kept = [i for i, block in enumerate(result.sampled_blocks) if block.request in live]
        self.num_dropped_rows += len(flight.requests) - len(kept)
        for block in (result.sampled_blocks[i] for i in kept):
            assert block.start == block.request.kv_len, "host and device disagree"
            assert block.token_ids[0] == block.request.token_ids[-1]
        blocks: list[Block] = [result.sampled_blocks[i] for i in kept]
        return replace(
            result, blocks=blocks, sampled_blocks=blocks, first_logit_row=[result.first_logit_row[i] for i in kept],
            accepted=[result.accepted[i] for i in kept],
        )  # fmt: skip


def launching(engine: Engine) -> LaunchingRunner:
    """Puts a LaunchingRunner into the engine."""
    old = engine.runner
    runner = LaunchingRunner(old.target, old.drafter, old.sampler, old.policy, old.pool, old.page_size)
    engine.runner = runner
    return runner
