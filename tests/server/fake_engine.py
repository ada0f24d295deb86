"""A scripted engine with the real one's surface: several tokens per step, made-up but consistent logprobs.

The vocabulary is bytes, a few longer pieces (some cut characters) and special tokens. The continuation of a prompt is
scripted by the prompt itself: the text after the last "SAY:" is said, then EOS; without it the prompt is repeated.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from exactspec.engine.admission import Limits, check_request, max_total_tokens
from exactspec.errors import QueueFullError
from exactspec.grammar import GrammarCompiler, needs_grammar
from exactspec.text.stops import SlowPattern, StopChecker
from exactspec.types import FinishReason, Request, RequestStats, StepOutput, TokenLogprob, TokenSource

PIECES = [b" the", b"SAY", b"\xe2\x82", b"\xac", b"ab", b"<|no|>"]
EOS, START = 256 + len(PIECES), 257 + len(PIECES)
VOCAB = [bytes([i]) for i in range(256)] + PIECES + [b"<|end|>", b"<|start|>"]
WIDTH = 272
HIDDEN = 4


class FakeTokenizer:
    vocab_size = len(VOCAB)
    eos_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return VOCAB[token_id] if token_id < len(VOCAB) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in (EOS, START)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            longest = max((p for p in PIECES if data.startswith(p, at)), key=len, default=data[at : at + 1])
            ids.append(VOCAB.index(longest))
            at += len(longest)
        return ids

    def decode(self, ids: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and self.is_special(i))]
        return b"".join(VOCAB[i] for i in kept).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        return [START, *self.encode("".join(message["content"] for message in messages))]


def make_tokenizer(model: str) -> FakeTokenizer:
    return FakeTokenizer()


def logprob(position: int, token_id: int) -> float:
    """The made-up model: a float32-exact value that depends on where and what."""
    return -((position * 31 + token_id * 7) % 97 + 1) / 32


def entry(position: int, token_id: int, top: int | None, chosen: tuple[int, ...]) -> TokenLogprob:
    ranked = sorted(range(WIDTH), key=lambda i: (-logprob(position, i), i))[: top or 0]
    return TokenLogprob(
        token_id,
        None if position == 0 else logprob(position, token_id),
        tuple((i, logprob(position, i)) for i in ranked) if position else (),
        tuple((i, -math.inf if i == 5 else logprob(position, i)) for i in chosen) if position else (),
    )


@dataclass
class Running:
    request: Request
    script: list[int]
    output: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    checker: Any = None
    grammar: Any = None
    prefilled: bool = False


@dataclass
class Stats:
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 64
    free_pages: int = 64
    cached_pages: int = 0
    output_tokens: int = 0
    accept_length: float | None = 2.5
    accepted_histogram: dict[int, int] = field(default_factory=lambda: {0: 1, 2: 3})
    verified_histogram: dict[int, int] = field(default_factory=lambda: {3: 4})


class FakeEngine:
    """step() gives every request up to `block` tokens."""

    def __init__(self, block: int = 3, delay: float = 0.0, context_length: int = 4096, max_waiting: int = 2000) -> None:
        tokenizer = FakeTokenizer()
        part = type("Part", (), {})
        self.target, self.config, self.drafter = part(), part(), part()
        self.target.tokenizer, self.target.dtype, self.target.generation_defaults = tokenizer, "float32", {"top_k": 7}
        self.target.config, self.target.backend = part(), part()
        self.target.backend.device = "cpu"
        self.target.config.vocab_size, self.target.config.architecture = WIDTH, "FakeForCausalLM"
        self.config.page_size, self.drafter.gamma = 16, block - 1
        self.limits = Limits(
            WIDTH, context_length, 1 << 20, block, hidden_states=True, drawable=WIDTH, eos_ids=frozenset({EOS})
        )
        self.grammars = GrammarCompiler(tokenizer, WIDTH, {EOS})
        self.block, self.delay, self.max_waiting = block, delay, max_waiting
        self.running: dict[str, Running] = {}
        self.ended: list[StepOutput] = []
        self.cache: set[tuple[int, ...]] = set()
        self.total = 0
        self.in_queue = False  # all of running

    def check(self, request: Request) -> None:
        check_request(request, self.limits)

    def add(self, request: Request) -> None:
        self.check(request)
        if len(self.running) >= self.max_waiting:
            raise QueueFullError("the queue is full")
        text = self.target.tokenizer.decode(request.prompt_ids)
        if text.startswith("DIE"):
            os._exit(11)
        said = text.rsplit("SAY:", 1)
        script = [*self.target.tokenizer.encode(said[-1]), EOS] if len(said) > 1 else list(request.prompt_ids) * 1000
        running = Running(request, script, checker=StopChecker(self.target.tokenizer, request.params))
        running.grammar = self.grammars.owner(request.params) if needs_grammar(request.params) else None
        running.stats.cached_tokens = len(request.prompt_ids) - 1 if request.prompt_ids in self.cache else 0
        self.running[request.request_id] = running

    def abort(self, request_id: str, message: str = "Aborted") -> bool:
        running = self.running.pop(request_id, None)
        if running is None:
            return False
        self.ended.append(StepOutput(request_id, [], None, [], FinishReason("abort", message=message), running.stats))
        return True

    def take_ended(self) -> list[StepOutput]:
        outputs, self.ended = self.ended, []
        return outputs

    def has_work(self) -> bool:
        return bool(self.running or self.ended)

    def retract_running(self) -> None:
        self.in_queue = True
        for running in self.running.values():
            running.stats.num_retracted += 1

    def flush_cache(self, *, while_waiting: bool = False) -> bool:
        self.cache.clear()
        return not self.running or (while_waiting and self.in_queue)

    def stats(self) -> Stats:
        return Stats(num_running=len(self.running), output_tokens=self.total)

    def step(self) -> list[StepOutput]:
        outputs, self.ended, self.in_queue = self.ended, [], False
        time.sleep(self.delay)
        for running in list(self.running.values()):
            outputs.append(self._advance(running))
            if outputs[-1].finish is not None:
                del self.running[running.request.request_id]
                self.cache.add(running.request.prompt_ids)
        return outputs

    def _advance(self, running: Running) -> StepOutput:
        request, first = running.request, len(running.output)
        limit = max_total_tokens(request, self.limits) - len(request.prompt_ids)
        finish = FinishReason("length") if limit == 0 else None
        drafts = self.block - 1 if request.max_drafts is None else min(self.block - 1, request.max_drafts)
        for _ in range(1 if first == 0 else 1 + drafts):
            if finish is None:
                running.output.append(self._next(running))
                finish = self._end(running, limit)
        new = running.output[first:]
        if first:
            running.stats.rounds += 1
            running.stats.num_drafted += drafts
            running.stats.num_accepted += len(new) - 1
            running.stats.num_committed += len(new)
            running.stats.accepted_per_round.append(len(new) - 1)
        self.total += len(new)
        last = TokenSource.BONUS if first else TokenSource.PLAIN
        sources = ([TokenSource.ACCEPTED] * (len(new) - 1) + [last])[: len(new)]
        output = StepOutput(request.request_id, new, None, sources, finish, running.stats)
        self._describe(running, output, first)
        return output

    def _next(self, running: Running) -> int:
        token = running.script[min(len(running.output), len(running.script) - 1)]
        if running.grammar is not None:
            mask = running.grammar.mask_after([])
            token = token if mask[token] else int(mask.nonzero()[-1])
        return token

    def _end(self, running: Running, limit: int) -> FinishReason | None:
        params, token = running.request.params, running.output[-1]
        if running.grammar is not None:
            running.grammar.advance([token])
        matched = running.checker.append(token)
        if isinstance(matched, SlowPattern):
            return FinishReason("abort", message=matched.reason)
        if matched is not None:
            return FinishReason("stop", matched)
        if not params.ignore_eos and token in {EOS, *(params.stop_token_ids or ())}:
            return FinishReason("stop", token)
        if len(running.output) >= limit:
            return FinishReason("length")
        return FinishReason("stop", token) if running.grammar is not None and running.grammar.terminated else None

    def _describe(self, running: Running, output: StepOutput, first: int) -> None:
        request, params = running.request, running.request.params
        prompt, chosen = request.prompt_ids, tuple(params.logprob_token_ids or ())
        at = len(prompt) + first
        if params.logprobs is not None:
            ids = output.token_ids
            output.logprobs = [entry(at + i, token, params.logprobs, chosen) for i, token in enumerate(ids)]
            if not ids:
                output.next_token = entry(at, running.script[0], params.logprobs, chosen)
        if not running.prefilled and params.prompt_logprobs is not None:
            start = params.prompt_logprob_start
            output.prompt_logprobs = [
                entry(i, prompt[i], params.prompt_logprobs, chosen) for i in range(start, len(prompt))
            ]
        if request.return_hidden_states:
            output.hidden_states = [torch.full((HIDDEN,), float(at + i)) for i in range(len(output.token_ids))]
            if not running.prefilled:
                output.prompt_hidden = torch.arange(len(prompt)).float()[:, None].expand(-1, HIDDEN).contiguous()
        if request.sampling_mask is not None:
            output.sampling_mask = [([token, 1], [0.0, -math.inf]) for token in output.token_ids]
        running.prefilled = True


def make_engine(settings: dict[str, Any]) -> FakeEngine:
    if settings["model"] == "broken":
        from exactspec.errors import ConfigError

        raise ConfigError("model: is broken")
    return FakeEngine(delay=0.01 if settings["model"] == "slow" else 0.0)
