"""Batch generation for training data: a static K/V cache, many slots, one CUDA graph a step.

Prompts fill the cache in dense passes of similar lengths, the step does the rest. On the CPU the step runs eagerly.
A sequence depends on (prompt, temperature, min_p, its seed) and the device's kernels, not on its slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exactspec.errors import ConfigError
from exactspec.train.frozen import FrozenTarget

PREFILL_TOKENS = 65_536  # of one dense pass, padding included
REFILL_EVERY = 16  # steps between looks at which slots have ended (a look waits for the device)


@dataclass(frozen=True)
class Job:
    """One sequence to generate. `seed` must fit 31 bits."""

    prompt: tuple[int, ...]
    max_new: int
    temperature: float
    seed: int
    min_p: float = 0.0


class BatchGenerator:
    """Runs jobs through `slots` slots of `length` tokens each."""

    def __init__(self, target: FrozenTarget, stop_ids: Sequence[int], slots: int, length: int) -> None:
        if any(window is not None and window < length for window in target.spec.windows):
            raise ConfigError(f"slot_tokens: {length} is over the target's sliding window, which generation lacks")
        device = target.device
        self.target = target
        self.slots = slots
        self.length = length
        self.cache = target.make_cache(slots, length)
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int32, device=device)
        self.tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int32, device=device)  # of the newest known token
        self.limit = torch.ones(slots, dtype=torch.int32, device=device)  # tokens when the sequence must end
        self.active = torch.zeros(slots, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(slots, device=device)
        self.min_p = torch.zeros(slots, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, jobs: Sequence[Job], on_progress: Callable[[int, float], None] | None = None) -> list[list[int]]:
        """Answers (without prompt; the stop token included if one was drawn) in the order of the jobs."""
        for job in jobs:
            if len(job.prompt) + job.max_new > self.length or not job.prompt or job.max_new < 1:
                raise ConfigError(
                    f"slot_tokens: a job of {len(job.prompt)} + {job.max_new} tokens does not fit {self.length}"
                )
        answers: list[list[int]] = [[] for _ in jobs]
        # long ones first: the tail of the run is then short
        waiting = sorted(range(len(jobs)), key=lambda j: len(jobs[j].prompt) + jobs[j].max_new)
        in_slot = [-1] * self.slots
        started = time.monotonic()
        while True:
            ended = self._collect(in_slot, jobs, answers)
            self._refill(ended, in_slot, waiting, jobs)
            if on_progress:
                on_progress(len(jobs) - len(waiting), time.monotonic() - started)
            if all(job < 0 for job in in_slot):
                return answers
            for _ in range(REFILL_EVERY):
                self._step()

    def _collect(self, in_slot: list[int], jobs: Sequence[Job], answers: list[list[int]]) -> list[int]:
        """Takes finished sequences out; returns the free slots."""
        free = [slot for slot, active in enumerate(self.active.tolist()) if not active]
        done = [slot for slot in free if in_slot[slot] >= 0]
        if done:
            index = torch.tensor(done, device=self.tokens.device)
            rows, ends = self.tokens[index].cpu(), self.position[index].tolist()
            for row, end, slot in zip(rows, ends, done, strict=True):
                job = in_slot[slot]
                answers[job] = row[len(jobs[job].prompt) : end + 1].tolist()
                in_slot[slot] = -1
        return free

    def _refill(self, free: list[int], in_slot: list[int], waiting: list[int], jobs: Sequence[Job]) -> None:
        count = min(len(free), len(waiting))
        if not count:
            return
        slots = free[:count]
        chosen = [waiting.pop() for _ in range(count)]
        for slot, job in zip(slots, chosen, strict=True):
            in_slot[slot] = job
        picked = [jobs[j] for j in chosen]
        self._prefill(slots, [job.prompt for job in picked])
        index = torch.tensor(slots, device=self.tokens.device)
        columns: list[tuple[Tensor, list[float]]] = [
            (self.position, [len(job.prompt) - 1 for job in picked]),
            (self.limit, [len(job.prompt) + job.max_new for job in picked]),
            (self.seeds, [job.seed for job in picked]),
            (self.temperature, [job.temperature for job in picked]),
            (self.min_p, [job.min_p for job in picked]),
            (self.active, [1] * count),
        ]
        for column, values in columns:
            column[index] = torch.tensor(values).to(column)

    def _prefill(self, slots: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> None:
        """Tokens and K/V of prompts, the longest first: passes of at most PREFILL_TOKENS."""
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        while order:
            width = len(prompts[order[0]])
            count = max(1, PREFILL_TOKENS // width)
            part, order = order[:count], order[count:]
            padded = torch.tensor([list(prompts[i]) + [0] * (width - len(prompts[i])) for i in part])
            index = torch.tensor([slots[i] for i in part], device=self.tokens.device)
            token_ids = padded.to(self.tokens.device)
            self.tokens[index, :width] = token_ids.int()
            self.target.prefill(token_ids, index, self.cache)

    def _step(self) -> None:
        if self.tokens.device.type != "cuda":
            if bool(self.active.any()):
                self._advance()
            return
        if self._graph is None:
            self._graph = self._record()
        self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        """Warm-up on a side stream with all slots idle (nothing changes), then capture."""
        kept = self.active.clone()
        self.active.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self.active.copy_(kept)
        return graph

    @torch.no_grad()
    def _advance(self) -> None:
        """One token for every active slot. Idle slots compute and store nothing that lasts."""
        at = self.position.long()[:, None]
        current = self.tokens.gather(1, at)[:, 0]
        logits = self.target.step(current, self.position, (self.position + 1) * self.active, self.cache)
        drawn = self.target.ops.sample(logits, self.temperature, self.min_p, self.seeds, self.position)
        following = (at + 1).clamp(max=self.length - 1)
        known = self.tokens.gather(1, following)[:, 0]
        token = torch.where(self.active == 0, known, drawn)
        self.tokens.scatter_(1, following, token[:, None])
        stopped = (token[:, None] == self.stop_ids).any(1)
        ended = stopped | (self.position + 2 >= self.limit)
        self.position.add_(self.active)
        self.active.mul_((~ended).int())
