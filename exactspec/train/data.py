"""Training sequences: made once by the target, kept as token ids, read back in batches of similar length."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exactspec.errors import CheckpointError, ConfigError
from exactspec.model.weights import LoadedTarget
from exactspec.text.prompt_file import read_prompt_file
from exactspec.train.frozen import FrozenTarget
from exactspec.train.generate import BatchGenerator, Job
from exactspec.train.options import DataOptions
from exactspec.train.prompts import PromptFilter, decode_all, frame_prompts, openings, user_turn
from exactspec.train.saving import write_json, write_tensors
from exactspec.train.templates import long_prompt, template_prompts

log = logging.getLogger(__name__)
_TURN_TOKENS = 200  # of a user turn that the target writes, at most
_BUCKET = 64  # sequence lengths are padded to multiples of this


@dataclass
class Sequences:
    """Prompts with answers, laid end to end. tokens int32 [N]; offsets int64 [n + 1]; prompt_len int32 [n]."""

    tokens: Tensor
    offsets: Tensor
    prompt_len: Tensor

    def __len__(self) -> int:
        return self.prompt_len.shape[0]

    def row(self, index: int) -> Tensor:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_len.sum())

    def answer_counts(self, vocab_size: int) -> Tensor:
        """How often each token stands in an answer: int64 [vocab_size]."""
        begins = torch.repeat_interleave(self.offsets[:-1] + self.prompt_len, self.lengths)
        return torch.bincount(self.tokens[torch.arange(len(self.tokens)) >= begins], minlength=vocab_size)

    def digest(self) -> str:
        """SHA-256 of the content, for provenance."""
        content = hashlib.sha256()
        for tensor in (self.tokens, self.offsets, self.prompt_len):
            content.update(tensor.contiguous().numpy().tobytes())
        return content.hexdigest()

    def subset(self, indices: Sequence[int]) -> Sequences:
        chosen = torch.tensor(list(indices), dtype=torch.int64)
        offsets = torch.zeros(len(chosen) + 1, dtype=torch.int64)
        offsets[1:] = self.lengths[chosen].cumsum(0)
        return Sequences(torch.cat([self.row(i) for i in indices]), offsets, self.prompt_len[chosen])


def pack(rows: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> Sequences:
    flat = np.fromiter((t for row in rows for t in row), dtype=np.int32)
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(row) for row in rows], dtype=torch.int64).cumsum(0)
    return Sequences(torch.from_numpy(flat), offsets, torch.tensor(prompt_lens, dtype=torch.int32))


def join(parts: Sequence[Sequences]) -> Sequences:
    starts = np.cumsum([0] + [len(part.tokens) for part in parts[:-1]])
    offsets = [part.offsets[:-1] + int(start) for part, start in zip(parts, starts, strict=True)]
    total = torch.tensor([sum(len(part.tokens) for part in parts)])
    return Sequences(
        torch.cat([part.tokens for part in parts]),
        torch.cat([*offsets, total]),
        torch.cat([part.prompt_len for part in parts]),
    )


# ---------------------------------------------------------------------------------------------------- making


def shard_name(shard: int, num_shards: int) -> str:
    return f"sequences-{shard}-of-{num_shards}.safetensors"


def build_shard(
    loaded: LoadedTarget,
    target: FrozenTarget,
    options: DataOptions,
    seed: int,
    folder: Path,
    shard: int,
    num_shards: int,
    origin: dict[str, Any] | None = None,
) -> None:
    """Makes this shard's part of the data and writes it, unless it is there already. Shards differ by their seeds.
    `origin` is kept beside it (origin.py)."""
    if (folder / shard_name(shard, num_shards)).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    maker = _Maker(loaded, target, options, seed * 1000 + shard, num_shards)
    sequences = maker.from_file(options.prompts, shard) if options.prompts else maker.from_target()
    if not len(sequences):
        raise ConfigError(f"prompts: none was left after filtering ({maker.filter.dropped})")
    facts = {
        "sequences": len(sequences),
        "answer_tokens": sequences.num_answer_tokens,
        "dropped": dict(maker.filter.dropped),
        "sha256": sequences.digest(),
        "seed": maker.seed,
        "made_with": origin,
    }
    write_json(folder / f"sequences-{shard}-of-{num_shards}.json", facts)
    write_tensors(folder / shard_name(shard, num_shards), {name: getattr(sequences, name) for name in _FIELDS})
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # the K/V cache of generation


_FIELDS = ("tokens", "offsets", "prompt_len")


def load_shards(folder: Path, num_shards: int) -> Sequences:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    parts = []
    for shard in range(num_shards):
        path = folder / shard_name(shard, num_shards)
        try:
            tensors = load_file(path)
            parts.append(Sequences(*(tensors[name] for name in _FIELDS)))
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{path}: not a whole file of training sequences ({error})") from error
    return join(parts)


class _Maker:
    """Prompts and answers of one shard."""

    def __init__(
        self, loaded: LoadedTarget, target: FrozenTarget, options: DataOptions, seed: int, num_shards: int
    ) -> None:
        self.tokenizer = loaded.tokenizer
        self.eos_ids = sorted(loaded.eos_ids)
        self.target = target
        self.options = options
        self.seed = seed
        self.num_shards = num_shards
        self.rng = random.Random(seed)
        config = loaded.config
        # positions beyond the context have no angles, and generation has no sliding windows
        self.longest = min([config.context_length, *(window for window in config.windows if window is not None)])
        self.max_prompt = min(options.max_prompt, self.longest - options.max_answer)
        if self.max_prompt < 1:
            raise ConfigError(
                f"max_answer: {options.max_answer} leaves no room for a prompt: the target's context, or its sliding "
                f"window, is {self.longest} tokens"
            )
        unseen = [text for path in options.exclude for text in read_prompt_file(path, "exclude")]
        self.filter = PromptFilter(unseen, options.exclude_words)
        self.started = time.monotonic()

    def from_file(self, path: Path, shard: int) -> Sequences:
        turns = [turn for turn in read_prompt_file(path) if self.filter.keep(turn, own_repetition=False)]
        return self.answer(frame_prompts(self.tokenizer, turns[shard :: self.num_shards], self.seed))

    def from_target(self) -> Sequences:
        """Own and template prompts with answers; then long prompts built from some of those answers, with theirs."""
        turns = self._own_turns(self.options.num_self_prompts // self.num_shards)
        templates = template_prompts(self.options.num_template_prompts // self.num_shards, self.seed)
        turns += [turn for turn in templates if self.filter.keep(turn, own_repetition=False)]
        self.rng.shuffle(turns)
        first = self.answer(frame_prompts(self.tokenizer, turns, self.seed))
        longs = self._long_turns(first, turns, self.options.num_long_prompts // self.num_shards)
        second = self.answer(frame_prompts(self.tokenizer, longs, self.seed + 1))
        return join([first, second]) if len(second) else first

    def _own_turns(self, count: int) -> list[str]:
        prompts, starts = openings(self.tokenizer, count, self.seed)
        opened = [pair for pair in zip(prompts, starts, strict=True) if len(pair[0]) < self.longest]
        rng = random.Random(self.seed)
        jobs = []
        for prompt, _ in opened:
            most = min(_TURN_TOKENS, self.longest - len(prompt))
            jobs.append(Job(tuple(prompt), most, rng.choice((0.8, 1.0)), rng.getrandbits(31), min_p=0.04))
        written = decode_all(self.tokenizer, self.generate(jobs, "user turns"))
        turns = [user_turn(start, text) for (_, start), text in zip(opened, written, strict=True)]
        kept = [turn for turn in turns if self.filter.keep(turn)]
        log.info("user turns: kept %d of %d (%s)", len(kept), len(turns), dict(self.filter.dropped))
        return kept

    def _long_turns(self, answered: Sequences, turns: Sequence[str], count: int) -> list[str]:
        """Documents are answers (whole ones) and other user turns; one to four of them a prompt."""
        picks = self.rng.sample(range(len(answered)), min(len(answered), 3 * count))
        rows = [answered.row(i)[int(answered.prompt_len[i]) :].tolist() for i in picks]
        rows = [row for row in rows if len(row) >= 60]
        texts = decode_all(self.tokenizer, rows)
        longs: list[str] = []
        while len(texts) > 4 and len(longs) < count:
            parts = [texts.pop() for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3, 4)))]
            if self.rng.random() < 0.3:
                parts.append(self.rng.choice(turns))
            turn = long_prompt(self.rng, [part.strip() for part in parts])
            if self.filter.keep(turn, own_repetition=False):
                longs.append(turn)
        return longs

    def answer(self, prompts: Sequence[list[int]]) -> Sequences:
        """Answers at the mix of temperatures; prompts that are too long are dropped."""
        kept = [prompt for prompt in prompts if len(prompt) <= self.max_prompt]
        self.filter.dropped["too long"] += len(prompts) - len(kept)
        shares, temperatures = zip(*self.options.temperatures, strict=True)
        rng = random.Random(self.seed + len(kept))
        jobs = [
            Job(tuple(prompt), self.options.max_answer, rng.choices(temperatures, shares)[0], rng.getrandbits(31))
            for prompt in kept
        ]
        answers = self.generate(jobs, "answers")
        both = [(p, a) for p, a in zip(kept, answers, strict=True) if len(a) >= 2]
        return pack([p + a for p, a in both], [len(p) for p, _ in both])

    def generate(self, jobs: Sequence[Job], what: str) -> list[list[int]]:
        """Runs the jobs; those that fit short slots first, then the long ones in fewer, longer slots."""
        options = self.options
        results: list[list[int]] = [[] for _ in jobs]
        short_length, long_length = min(options.slot_tokens, self.longest), self.max_prompt + options.max_answer
        sizes = [len(job.prompt) + job.max_new for job in jobs]
        groups = [
            ([j for j, size in enumerate(sizes) if size <= short_length], short_length),
            ([j for j, size in enumerate(sizes) if size > short_length], long_length),
        ]
        for members, length in groups:
            if not members:
                continue
            slots = min(options.slots, max(1, options.memory_tokens // length), len(members))
            runner = BatchGenerator(self.target, self.eos_ids, slots, max(length, max(sizes[j] for j in members)))
            answers = runner.run([jobs[j] for j in members], self._progress(what, len(members)))
            for j, answer in zip(members, answers, strict=True):
                results[j] = answer
        log.info(
            "%s: %d sequences, %d tokens, %.1f s since start",
            what,
            len(jobs),
            sum(map(len, results)),
            time.monotonic() - self.started,
        )
        return results

    def _progress(self, what: str, total: int) -> Callable[[int, float], None]:
        last = [time.monotonic()]

        def report(begun: int, seconds: float) -> None:
            if time.monotonic() - last[0] > 10:
                last[0] = time.monotonic()
                log.info("%s: %d of %d begun after %.0f s", what, begun, total, seconds)

        return report


# ---------------------------------------------------------------------------------------------------- reading


@dataclass
class Batch:
    """Padded sequences: token_ids [B, L] int64 (padding 0 at the right), lengths and prompt_len [B] int64."""

    token_ids: Tensor
    lengths: Tensor
    prompt_len: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(self.token_ids.to(device), self.lengths.to(device), self.prompt_len.to(device))


def make_batch(sequences: Sequences, indices: Sequence[int], max_sequence: int) -> Batch:
    rows = [sequences.row(i)[:max_sequence] for i in indices]
    lengths = torch.tensor([len(row) for row in rows])
    width = -(-int(lengths.max()) // _BUCKET) * _BUCKET
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for at, row in enumerate(rows):
        token_ids[at, : len(row)] = row
    return Batch(token_ids, lengths, sequences.prompt_len[list(indices)].long())


class BatchOrder:
    """An endless seeded order of batches. Sequences of similar length share a batch, batches come in random order.

    The order is a function of (seed, position): a resumed run continues where it stopped. Of each group of
    `world_size` batches, rank r takes the r-th.
    """

    def __init__(
        self, lengths: Tensor, batch_sequences: int, batch_tokens: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.lengths = lengths.numpy()
        self.batch_sequences = batch_sequences
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.rank = rank
        self.world_size = world_size

    def epoch(self, number: int) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, number))
        # a little noise on the lengths: batches are not the same groups every time
        noisy = self.lengths + rng.uniform(0, _BUCKET / 2, len(self.lengths))
        batches: list[list[int]] = []
        current: list[int] = []
        width = 0
        for index in np.argsort(noisy, kind="stable").tolist():
            width = max(width, -(-int(self.lengths[index]) // _BUCKET) * _BUCKET)
            full = len(current) >= self.batch_sequences or (len(current) + 1) * width > self.batch_tokens
            if current and full:
                batches.append(current)
                current = []
                width = -(-int(self.lengths[index]) // _BUCKET) * _BUCKET
            current.append(index)
        if current:
            batches.append(current)
        rng.shuffle(batches)
        return batches

    def batches(self, start: int) -> Iterator[list[int]]:
        """This rank's batches from step `start` on."""
        position, number = start * self.world_size + self.rank, 0
        batches = self.epoch(number)
        while True:
            while position >= len(batches):
                position -= len(batches)
                number += 1
                batches = self.epoch(number)
            yield batches[position]
            position += self.world_size


def with_anchors(sequences: Sequences, max_sequence: int) -> Sequences:
    """Those in which something can be learnt once they are cut to max_sequence: an answer token with a successor.

    Raises ConfigError where fewer than two are left, one to train on and one to measure on.
    """
    starts = sequences.prompt_len.long().clamp(min=1)
    usable = (sequences.lengths.clamp(max=max_sequence) - 1 > starts).nonzero().flatten().tolist()
    if len(usable) < 2:
        raise ConfigError(
            f"prompts: {len(usable)} of {len(sequences)} sequences have an answer of two tokens or more within "
            f"max_sequence ({max_sequence}); at least 2 are needed"
        )
    return sequences if len(usable) == len(sequences) else sequences.subset(usable)


def split_heldout(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """(training, held-out) indices; at least one sequence on each side."""
    order = np.random.default_rng((seed, 77)).permutation(count).tolist()
    held = min(max(1, round(share * count)), max(1, count - 1))
    return sorted(order[held:]), sorted(order[:held])


def describe(folder: Path, num_shards: int) -> list[dict[str, Any]]:
    """What the shards say about themselves, {} where one says nothing. CheckpointError for a damaged file."""
    said = []
    for shard in range(num_shards):
        path = folder / f"sequences-{shard}-of-{num_shards}.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        if not isinstance(facts, dict):
            raise CheckpointError(f"{path}: must hold a JSON object")
        said.append(facts)
    return said
