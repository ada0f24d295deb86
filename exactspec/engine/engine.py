"""The engine: add, abort, step. A step is schedule -> round -> commit -> output."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from exactspec.cache.manager import CacheManager
from exactspec.draft.base import Drafter
from exactspec.engine.admission import Limits, check_request, max_total_tokens
from exactspec.engine.batch import Block
from exactspec.engine.config import EngineConfig
from exactspec.engine.metrics import EngineMetrics, EngineStats
from exactspec.engine.output import append_until_stop, stop_token_ids
from exactspec.engine.overlap import RoundPipeline
from exactspec.engine.round import DecodedRound, RoundResult
from exactspec.engine.runner import make_runner
from exactspec.engine.scoring import Scorer
from exactspec.engine.verify_policy import VerifyPolicy
from exactspec.grammar import GrammarCompiler, needs_grammar
from exactspec.model.target import TargetModel
from exactspec.sampling.adjust import OutputHistory
from exactspec.sampling.sampler import Sampler, sampling_support
from exactspec.scheduler.scheduler import Scheduler
from exactspec.text.stops import StopChecker, check_stops
from exactspec.types import (
    FinishReason,
    Request,
    RunningRequest,
    SamplingParams,
    StepOutput,
    TokenLogprob,
    TokenSource,
)
from exactspec.verify.accept import AcceptResult, outcome_sources


@contextmanager
def _no_collections() -> Iterator[None]:
    """A step makes thousands of objects that stay: looking through them for cycles, again and again while they are
    made, takes longer than making them. Garbage waits for the end of the step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Engine:
    """Owns the target, the drafter, the K/V pool and every request between `add` and its last output.

    Not thread-safe: one thread calls it. A failing `add` leaves it unchanged; requests never disturb each other
    (contract C1).
    """

    def __init__(
        self, config: EngineConfig, target: TargetModel, drafter: Drafter, num_pages: int, policy: VerifyPolicy
    ) -> None:
        self.config = config
        self.target = target
        self.drafter = drafter
        tokenizer, vocab_size = target.tokenizer, target.config.vocab_size
        self.valid_vocab = min(tokenizer.vocab_size, vocab_size)
        self.eos_ids = frozenset(target.eos_ids)
        self.pool = target.make_pool(num_pages * config.page_size)
        self.cache = CacheManager(num_pages, config.page_size, config.prefix_cache)
        self.scheduler = Scheduler(
            self.cache,
            max_running_requests=config.max_running_requests,
            prefill_chunk=config.prefill_chunk,
            max_waiting=config.max_waiting_requests,
            gamma_rows=1 + drafter.gamma,
        )
        self.sampler = Sampler(target.backend, vocab_size, self.valid_vocab, self.eos_ids)
        self.runner = make_runner(
            target, drafter, self.sampler, policy, self.pool, config.page_size, config.max_running_requests
        )
        self.scorer = Scorer(target, self.valid_vocab)
        self.grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_ids)
        self.limits = Limits(
            vocab_size=vocab_size,
            context_length=target.config.context_length,
            pool_tokens=num_pages * config.page_size,
            block_rows=1 + drafter.gamma,
            hidden_states=config.hidden_states,
            drawable=self.valid_vocab,
            eos_ids=self.eos_ids,
        )
        self.rounds = RoundPipeline(self.scheduler, config.overlap)
        self.metrics = EngineMetrics()
        self._ended: list[StepOutput] = []  # aborted between steps, reported by the next one

    # ---- requests in and out -------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises RequestError if the request cannot be served exactly; changes nothing. Grammars are checked on
        `add`.
        """
        check_request(request, self.limits)
        check_stops(request.params)

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError (refused) or QueueFullError (try later)."""
        self.check(request)
        params = request.params
        running = RunningRequest(
            request,
            list(request.prompt_ids),
            max_tokens=max_total_tokens(request, self.limits),
            stop_ids=stop_token_ids(params, self.eos_ids),
        )
        if params.stop or params.stop_regex:
            running.stop_checker = self.make_stop_checker(params)
        if params.has_penalties:
            running.history = OutputHistory()
        if needs_grammar(params):
            running.grammar = self.grammars.owner(params)
        self.scheduler.add(running)

    def make_stop_checker(self, params: SamplingParams) -> StopChecker:
        return StopChecker(self.target.tokenizer, params)

    def abort(self, request_id: str, message: str = "Aborted") -> bool:
        """Ends a request now; its last output comes with the next step or `take_ended`. False if there is none of that
        id.
        """
        request = self.scheduler.abort(request_id)
        if request is None:
            return False
        self.drafter.forget(request)
        self._ended.append(self._output(request, FinishReason("abort", message=message)))
        return True

    def take_ended(self) -> list[StepOutput]:
        """The last outputs of requests aborted since the last step, for those who cannot wait for the next one."""
        outputs, self._ended = self._ended, []
        return outputs

    def has_work(self) -> bool:
        return bool(self._ended) or not self.scheduler.idle

    def retract_running(self) -> None:
        """Sends every running request back to the queue, from where it goes on with the next steps, unchanged (C1)."""
        for request in self.scheduler.running():
            self.scheduler.force_retract(request)

    def flush_cache(self, *, while_waiting: bool = False) -> bool:
        """Empties the prefix cache and the running averages; False, changing nothing, while requests are unfinished:
        with `while_waiting`, while any of them runs (those in the queue hold no pages).
        """
        busy = self.scheduler.num_running > 0 if while_waiting else not self.scheduler.idle
        if busy or not self.cache.flush():
            return False
        self.metrics.reset_averages()
        return True

    def close(self) -> None:
        """Ends what the engine keeps running outside this process: other ranks, if any. It takes no requests after."""
        return None

    def check_integrity(self) -> None:
        """Raises if a page is lost or owned twice (contract C7)."""
        self.scheduler.check_integrity()

    def stats(self) -> EngineStats:
        return self.metrics.snapshot(self.scheduler, self.cache)

    # ---- the step ------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Runs one step over all requests; returns what it adds to each, ends included."""
        with _no_collections():
            try:
                return self._step()
            except BaseException:
                self.rounds.drop()
                raise

    def _step(self) -> list[StepOutput]:
        outputs, self._ended = self._ended, []
        result = self.rounds.next(self.runner)
        if result is None:
            return outputs
        if isinstance(result, DecodedRound):
            return outputs + self._commit_decoded(result)
        prefills = [block for block in result.blocks if block.is_prefill]
        for block in prefills:
            self._commit_prefill(block, result)
        return outputs + self._commit_draws(result) + self._finish_unsampled(prefills)

    def _commit_prefill(self, block: Block, result: RoundResult) -> None:
        """Notes a prefill chunk as written and scores its prompt rows; draws are committed after."""
        request = block.request
        self.scorer.score_prompt(block, result.hidden)
        if request.request.return_hidden_states and request.num_output == 0:
            rows = result.hidden[block.first_row : block.first_row + block.num_rows].clone()
            request.prompt_hidden = [*(request.prompt_hidden or []), rows]
        request.kv_len = block.start + block.num_rows
        self.scheduler.prefilled(request)

    def _commit_decoded(self, decoded: DecodedRound) -> list[StepOutput]:
        """What `_commit_draws` does, for requests of which nothing else is wanted: in one pass over columns."""
        outputs = []
        for request, tokens, accepted, verified, drafted, entries in zip(
            decoded.requests, decoded.tokens, decoded.accepted, decoded.verified, decoded.drafted, decoded.scored,
            strict=True,
        ):  # fmt: skip
            stats, committed = request.stats, len(tokens)
            count, finish = append_until_stop(request, tokens)
            request.kv_len = len(request.token_ids) - 1
            stats.note_round(drafted, verified, accepted, committed)
            sources = outcome_sources(accepted, verified)[:count]
            if count < committed:
                tokens, entries = tokens[:count], None if entries is None else entries[:count]
            outputs.append(StepOutput(request.request.request_id, tokens, entries, sources, finish, stats))
            if finish is not None:
                self._finish(request)
        self.metrics.note_rounds(decoded.accepted, decoded.verified, sum(decoded.drafted))
        self.metrics.note_outputs(outputs)
        return outputs

    def _commit_draws(self, result: RoundResult) -> list[StepOutput]:
        emitted = [
            self._emit(block, accept) for block, accept in zip(result.sampled_blocks, result.accepted, strict=True)
        ]
        logprobs = self.scorer.score_outputs(result, [max(count, 1) for count, _ in emitted])
        outputs = []
        for number, (block, (count, finish)) in enumerate(zip(result.sampled_blocks, emitted, strict=True)):
            outputs.append(self._describe(number, count, finish, result, logprobs[number]))
            if finish is not None:
                self._finish(block.request)
        self.metrics.note_step(result, outputs)
        return outputs

    def _emit(self, block: Block, accept: AcceptResult) -> tuple[int, FinishReason | None]:
        """Commits what a block's draws mean for its request: tokens, lengths, counts. Returns how many tokens it emits,
        and its end, if it has come."""
        request, tokens = block.request, accept.tokens
        if (
            block.is_prefill and request.max_tokens == request.prompt_len
        ):  # scoring: the draw is reported, never emitted
            return 0, FinishReason("length")
        count, finish = append_until_stop(request, tokens)
        if request.history is not None:
            request.history.advance(tokens[:count])
        if not block.is_prefill:
            request.kv_len = min(block.start + 1 + accept.num_accepted, len(request.token_ids) - 1)
            request.stats.note_round(block.num_drafted, len(block.drafts), accept.num_accepted, len(tokens))
        return count, finish

    def _describe(
        self, number: int, count: int, finish: FinishReason | None, result: RoundResult, logprobs: list | None
    ) -> StepOutput:
        block, accept = result.sampled_blocks[number], result.accepted[number]
        request = block.request
        output = self._output(request, finish, accept.tokens[:count], accept.sources[:count])
        if logprobs is not None:
            output.logprobs = logprobs[:count]
            if count == 0:
                output.next_token = logprobs[0]
        if request.request.return_hidden_states:
            first_row = block.sampled_rows.start
            output.hidden_states = [result.hidden[first_row + i].clone() for i in range(count)]
        if request.request.sampling_mask is not None and result.sampled is not None:
            first = result.first_logit_row[number]
            output.sampling_mask = sampling_support(result.sampled, list(range(first, first + count)))
        return output

    def _finish_unsampled(self, prefills: list[Block]) -> list[StepOutput]:
        """Scoring requests that did not even ask for the next token end when their prefill does."""
        outputs = []
        for block in prefills:
            request = block.request
            done = request.kv_len == request.prompt_len == request.max_tokens
            if done and not block.num_sampled:
                outputs.append(self._output(request, FinishReason("length")))
                self._finish(request)
        return outputs

    def _output(
        self,
        request: RunningRequest,
        finish: FinishReason | None,
        tokens: list[int] | None = None,
        sources: list[TokenSource] | None = None,
    ) -> StepOutput:
        """An output without logprobs yet; hands over what the prefill found, once."""
        asked = request.request
        logprobs: list[TokenLogprob] | None = [] if asked.params.logprobs is not None else None
        output = StepOutput(asked.request_id, tokens or [], logprobs, sources or [], finish, request.stats)
        if (request.prompt_logprobs is not None or request.prompt_hidden) and not request.is_prefilling:
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
            if request.prompt_hidden:
                output.prompt_hidden = torch.cat(request.prompt_hidden)
                request.prompt_hidden = None
        return output

    def _finish(self, request: RunningRequest) -> None:
        self.scheduler.finish(request)
        self.drafter.forget(request)
