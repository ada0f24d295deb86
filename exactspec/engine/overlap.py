"""Overlap of host and device: while the device runs a round, the host works on the results of the one before it.

In the steady state (the running requests go on, nobody may join) the next round is launched before the present one is
read; which tokens it starts from, only the device knows. Anything else waits until everything is read and takes the
ordinary way, so that schedules are only ever made from settled state.

Why nothing is ever shown or stored too much. A request that ends, is aborted or is retracted while a round with it is
unread gets nothing of that round. Its pages may be given away at once: whoever gets them is launched later on the same
stream, and until then the unread round only writes K/V at positions beyond all that the host has committed, hence never
into pages that went to the prefix cache.
"""

from __future__ import annotations

import time

from exactspec.engine.round import DecodedRound, Flight, RoundResult, RoundRunner
from exactspec.scheduler.plan import StepPlan
from exactspec.scheduler.scheduler import Scheduler


class RoundPipeline:
    """Owns the rounds in flight: at most one is unread between calls of `next`.

    With `overlap` off, or a runner that cannot launch, `next` is schedule and run.
    """

    def __init__(self, scheduler: Scheduler, overlap: bool) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self.num_overlapped = 0  # rounds launched before the one in front of them was read
        self.launch_seconds = 0.0  # of the host, spent on planning and launching those
        self._flight: Flight | None = None

    def next(self, runner: RoundRunner) -> RoundResult | DecodedRound | None:
        """The results of one more round, which the caller commits before it calls again; None if there is no work."""
        flight, self._flight = self._flight, None
        running = self.scheduler.running_set
        if flight is None or running.isdisjoint(flight.requests):
            plan = self._plan()
            if plan.empty:
                return None
            if not (self.overlap and runner.can_launch(plan)):
                return runner.run(plan)
            flight = runner.launch(plan.decodes)
        began = time.perf_counter()
        self._flight = self._launch_behind(flight, runner)
        self.launch_seconds += time.perf_counter() - began
        return flight.read(running)

    def drop(self) -> None:
        """Forgets the round in flight: the host could not follow the one before it. What it wrote is written again."""
        self._flight = None

    def _plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for chunk in plan.prefills:
            if chunk.is_first and chunk.request.num_output == 0:  # a prefill that a retraction cut short starts over
                chunk.request.prompt_logprobs = chunk.request.prompt_hidden = None
        return plan

    def _launch_behind(self, flight: Flight, runner: RoundRunner) -> Flight | None:
        """The round after `flight` for the requests that may outlive it."""
        scheduler = self.scheduler
        if scheduler.may_admit:
            return None
        running = scheduler.running_set
        # the round in flight adds at least one token: is there room for another?
        going_on = [r for r in flight.requests if len(r.token_ids) + 1 < r.max_tokens and r in running]
        if not going_on or not scheduler.reserve_ahead(going_on):
            return None
        self.num_overlapped += 1
        return runner.launch(going_on, behind=flight)
