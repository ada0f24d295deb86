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
from exactspec.logprobs.processor import lost_row
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

_NOT_FINITE = FinishReason("abort", message="logits: the row of the next token holds NaN or no finite entry")


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
        self._outputs: list[StepOutput] = []  # not handed out yet: of this step, or of aborts since the last one
        self._halfway: RunningRequest | None = None  # committed in part, nothing told
        self._overruns: dict[str, str] = {}  # requests that must not go on after this step, and why

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
        self._outputs.append(self._output(request, FinishReason("abort", message=message)))
        return True

    def take_ended(self) -> list[StepOutput]:
        """What the next step would report before it runs, the last outputs of aborted requests above all: for those who
        cannot wait for it."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_work(self) -> bool:
        return bool(self._outputs) or not self.scheduler.idle

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
        """Runs one step over all requests; returns what it adds to each, ends included.

        After an exception the requests go on with the next step as if this one had not been; what it had committed by
        then is reported by the next one.
        """
        with _no_collections():
            try:
                self._step()
            except BaseException:
                self._recover()
                raise
        outputs, self._outputs = self._outputs, []
        self._end_overruns()
        return outputs

    def _recover(self) -> None:
        self.rounds.drop()
        self.runner.forget()
        if self._halfway is not None:
            request_id, self._halfway = self._halfway.request.request_id, None
            self.abort(request_id, "the step failed that was about to report its newest tokens")

    def _end_overruns(self) -> None:
        """Aborts requests that held up the step for too long; the last outputs come with the next one."""
        overruns, self._overruns = self._overruns, {}
        for request_id, reason in overruns.items():
            self.abort(request_id, reason)

    def _step(self) -> None:
        result = self.rounds.next(self.runner)
        if isinstance(result, DecodedRound):
            self._commit_decoded(result)
        elif result is not None:
            self._commit_blocks(result)

    def _commit_decoded(self, decoded: DecodedRound) -> None:
        """What `_commit_blocks` does, for requests of which nothing else is wanted: in one pass over columns."""
        outputs = []
        for request, tokens, accepted, verified, drafted, entries in zip(
            decoded.requests, decoded.tokens, decoded.accepted, decoded.verified, decoded.drafted, decoded.scored,
            strict=True,
        ):  # fmt: skip
            stats, committed = request.stats, len(tokens)
            lost = None if entries is None else lost_row(entries)
            count, finish = append_until_stop(request, tokens if lost is None else tokens[:lost])
            if lost is not None and finish is None:
                finish = _NOT_FINITE
            request.kv_len = len(request.token_ids) - 1
            stats.note_round(drafted, verified, accepted, committed)
            sources = outcome_sources(accepted, verified)[:count]
            if count < committed:
                tokens, entries = tokens[:count], None if entries is None else entries[:count]
            outputs.append(StepOutput(request.request.request_id, tokens, entries, sources, finish, stats))
            if finish is not None:
                self._finish(request)
        self._outputs += outputs
        self.metrics.note_rounds(decoded.accepted, decoded.verified, sum(decoded.drafted))
        self.metrics.note_outputs(outputs)

    def _commit_blocks(self, result: RoundResult) -> None:
        """Scores all, which may fail and can be done again; then commits and reports request by request."""
        lost_prompts = {
            block.request
            for block in result.blocks
            if block.is_prefill and not self.scorer.score_prompt(block, result.hidden)
        }
        logprobs = self.scorer.score_outputs(result)
        outputs, number = [], 0
        for block in result.blocks:
            request = self._halfway = block.request
            if block.is_prefill:
                self._commit_prefill(block, result)
            output = None
            if request in lost_prompts:
                request.prompt_logprobs = None
                output = self._output(request, _NOT_FINITE)
            elif block.num_sampled:
                output = self._emit(block, number, result, logprobs[number])
            elif request.kv_len == request.prompt_len == request.max_tokens:  # scoring, without even a draw to report
                output = self._output(request, FinishReason("length"))
            number += block.num_sampled > 0
            if output is not None:
                self._report(request, output)
                outputs.append(output)
            self._halfway = None
        self.metrics.note_step(result, outputs)

    def _report(self, request: RunningRequest, output: StepOutput) -> None:
        self._outputs.append(output)
        if output.finish is not None:
            self._finish(request)
        elif request.grammar is not None and request.grammar.overrun is not None:
            self._overruns[request.request.request_id] = request.grammar.overrun

    def _commit_prefill(self, block: Block, result: RoundResult) -> None:
        """Notes a prefill chunk as written; its draw, if any, is committed after."""
        request = block.request
        if request.request.return_hidden_states and request.num_output == 0:
            rows = result.hidden[block.first_row : block.first_row + block.num_rows].clone()
            request.prompt_hidden = [*(request.prompt_hidden or []), rows]
        request.kv_len = block.start + block.num_rows
        self.scheduler.prefilled(request)

    def _emit(self, block: Block, number: int, result: RoundResult, entries: list[TokenLogprob] | None) -> StepOutput:
        """Commits what a block's draws mean for its request (tokens, lengths, counts, an end) and describes it."""
        request, accept = block.request, result.accepted[number]
        lost = None if entries is None else lost_row(entries)
        count = 0
        finish: FinishReason | None = FinishReason("length")  # of scoring: the draw is reported, never emitted
        if not block.is_prefill or request.max_tokens > request.prompt_len:
            count, finish = self._append(block, accept, accept.tokens[:lost])
        if lost is not None and (finish is None or not count):
            finish = _NOT_FINITE
        output = self._output(request, finish, accept.tokens[:count], accept.sources[:count])
        if entries is not None:
            output.logprobs = entries[:count]
            if count == 0 and lost is None:
                output.next_token = entries[0]
        if request.request.return_hidden_states:
            first_row = block.sampled_rows.start
            output.hidden_states = [result.hidden[first_row + i].clone() for i in range(count)]
        if request.request.sampling_mask is not None and result.sampled is not None:
            first = result.first_logit_row[number]
            output.sampling_mask = sampling_support(result.sampled, list(range(first, first + count)))
        return output

    def _append(self, block: Block, accept: AcceptResult, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens the request emits, and its end, if it has come."""
        request = block.request
        count, finish = append_until_stop(request, tokens)
        if request.history is not None:
            request.history.advance(tokens[:count])
        if not block.is_prefill:
            request.kv_len = min(block.start + 1 + accept.num_accepted, len(request.token_ids) - 1)
            request.stats.note_round(block.num_drafted, len(block.drafts), accept.num_accepted, len(accept.tokens))
        return count, finish

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
